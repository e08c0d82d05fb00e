"""This file differentiates the rotation: in reverse mode to any order, in forward mode, and under vmap."""

import torch
from torch.autograd import forward_ad

from ropelab.batching import is_batched_gradient, rotate_batched, rotate_batched_gradients
from ropelab.checks import (
    check_inplace_autograd,
    check_layouts_alike,
    check_memory,
    check_places,
    check_recordable,
    check_rope_arguments,
    check_writable,
)
from ropelab.kernels import NO_POSITION
from ropelab.layout import join, pairs
from ropelab.ops import copy_over, dispatched, must_dispatch
from ropelab.prepared import Options, rotated
from ropelab.seq_format import to_bshd


def recorded(q, k, cos, sin) -> bool:
    """Whether anything differentiates: if not, autograd's function is left out, which costs as much as a launch."""
    if transformed():
        return True
    tensors = (q, cos, sin) if k is None else (q, k, cos, sin)
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def transformed() -> bool:
    """Whether torch.func or forward mode looks at what is computed."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def run(q, k, cos, sin, positions, first_position, options: Options, inplace: bool):
    """Rotate without recording: see `ropelab.prepared.rotated`."""
    rotate = dispatched if must_dispatch(q, k) else rotated
    return rotate(q, k, cos, sin, positions, first_position, options, inplace)


def rotate_differentiably(q, k, cos, sin, positions, first_position, options: Options):
    """Rotate into new tensors that know where they come from."""
    function = _RotateTransformed if transformed() else _Rotate
    return function.apply(q, k, cos, sin, positions, first_position, options, False)


def overwrite_differentiably(q, k, cos, sin, positions, first_position, options: Options):
    """Rotate in place and tell autograd."""
    if transformed():
        raise NotImplementedError("inplace: expected False under torch.func transforms and forward mode, got True")
    arguments = cos, sin, positions, first_position, options
    if must_dispatch(q, k):
        return _copy_differentiably(q, k, *arguments)
    check_rope_arguments(q, k, cos, sin, positions, options)
    check_layouts_alike(options)
    check_memory(q, k)
    check_writable(q, k)
    check_inplace_autograd(q, k, cos, sin)
    check_recordable(cos=cos, sin=sin, positions=positions)
    check_places(q, cos, positions, first_position, options)
    if k is not None and (q._is_view() or k._is_view()):
        # Autograd can rewrite the history of a view only for a function with a single output.
        return tuple((_Rotate.apply if x.requires_grad else run)(x, None, *arguments, True) for x in (q, k))
    return _Rotate.apply(q, k, *arguments, True)


def _copy_differentiably(q, k, cos, sin, positions, first_position, options: Options):
    """Rotate into new tensors and copy, as `ropelab.ops.dispatched` does, with a history that autograd can follow."""
    check_layouts_alike(options)
    if not torch.compiler.is_compiling():  # compilers cannot follow these; there PyTorch itself refuses
        check_writable(q, k)
        check_inplace_autograd(q, k, cos, sin)
    options = options._replace(overwrites=True)
    new = _Rotate.apply(q, k, cos, sin, positions, first_position, options, False)
    return copy_over((q,), (new,))[0] if k is None else copy_over((q, k), new)


class _Rotate(torch.autograd.Function):
    """y = R x. Linear in x, so its vector-Jacobian product is R^T, the rotation by minus the angle."""

    # q comes first: autograd takes the first input of an in-place function to be the view it rewrites.
    @staticmethod
    def forward(ctx, q, k, cos, sin, positions, first_position, options, inplace):
        ys = run(q, k, cos, sin, positions, first_position, options, inplace)
        trained_tables = any(ctx.needs_input_grad[2:4])
        if not trained_tables:  # then each output depends on its own input alone
            outputs = (ys,) if k is None else ys
            unneeded = [y for y, needed in zip(outputs, ctx.needs_input_grad, strict=False) if not needed]
            if unneeded:  # torch.compile takes a call without arguments for one with several outputs
                ctx.mark_non_differentiable(*unneeded)
        if inplace:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        if not torch.compiler.is_compiling():
            check_recordable(cos=cos, sin=sin, positions=positions, **({"q": q, "k": k} if trained_tables else {}))
        ctx.first_position, ctx.options = first_position, options
        # The tables' gradients are the only ones that need the inputs.
        ctx.save_for_backward(cos, sin, positions, *((q, k) if trained_tables else (None, None)))
        ctx.set_materialize_grads(False)
        return ys

    @staticmethod
    def backward(ctx, *y_grads):
        return _pull_back(ctx, y_grads, _rotate)


class _RotateTransformed(torch.autograd.Function):
    """The same for torch.func and forward mode.

    Apart, because in this form autograd inspects the signature at every call, which takes longer than the launch,
    and torch.compile accepts no function with a rule for forward mode.
    """

    @staticmethod
    def forward(q, k, cos, sin, positions, first_position, options, inplace):
        return _rotate_gradients(q, k, cos, sin, positions, first_position, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, cos, sin, positions, ctx.first_position, ctx.options, _ = inputs
        ctx.save_for_backward(cos, sin, positions, q, k)
        ctx.save_for_forward(cos, sin, positions, q, k)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *y_grads):
        # Not without autograd's function: it takes off the wrappers of transforms that have ended.
        return _pull_back(ctx, y_grads, rotate_differentiably)

    @staticmethod
    def vmap(info, in_dims, q, k, cos, sin, positions, first_position, options, inplace):
        arguments = q, k, cos, sin, positions, first_position, options
        ys = rotate_batched(rotate_differentiably, info.batch_size, in_dims[:5], *arguments)
        return ys, 0 if k is None else (0, 0)

    @staticmethod
    def jvp(ctx, q_tangent, k_tangent, cos_tangent, sin_tangent, *_):
        cos, sin, positions, q, k = ctx.saved_tensors
        where = positions, ctx.first_position, ctx.options
        tangents = []
        for x, x_tangent in ((q, q_tangent), (k, k_tangent)):
            if x is None:
                continue
            # y is linear in x and, but for the features that pass, linear in the tables.
            tangent = torch.zeros_like(x)
            if x_tangent is not None:
                tangent = rotate_differentiably(x_tangent, None, cos, sin, *where)
            if cos_tangent is not None or sin_tangent is not None:
                cos_turn, sin_turn = (torch.zeros_like(cos) if t is None else t for t in (cos_tangent, sin_tangent))
                first, end = ctx.options.slice(cos.shape[-1])
                turned = rotate_differentiably(x, None, cos_turn, sin_turn, *where)[..., first:end]
                tangent = tangent + torch.nn.functional.pad(turned, (first, x.shape[-1] - end))
            tangents.append(tangent)
        return tangents[0] if k is None else tuple(tangents)


def _pull_back(ctx, y_grads, rotate) -> tuple[torch.Tensor | None, ...]:
    """The gradients of q, k, cos, sin and of the other arguments, which have none."""
    cos, sin, positions, q, k = ctx.saved_tensors
    first_position, options = ctx.first_position, ctx.options
    # R^T of each gradient that is there, by a function that autograd can differentiate again.
    back = options._replace(
        layout=options.out_layout, out_layout=options.layout, transpose=not options.transpose, overwrites=False
    )
    x_grads = [g if needed else None for g, needed in zip(y_grads, ctx.needs_input_grad, strict=False)]
    present = [g for g in x_grads if g is not None]
    if present:
        second = present[1] if len(present) > 1 else None
        rotated = rotate(present[0], second, cos, sin, positions, first_position, back)
        remaining = iter((rotated,) if second is None else rotated)
        x_grads = [None if g is None else next(remaining) for g in x_grads]
    table_grads = (None, None)
    if any(ctx.needs_input_grad[2:4]):
        table_grads = _table_gradients((q, k), y_grads, cos, positions, first_position, options)
    return *x_grads, *(None,) * (2 - len(x_grads)), *table_grads, None, None, None, None


def _rotate(q, k, cos, sin, *where):
    """Differentiably if somebody differentiates the gradient."""
    rotate = rotate_differentiably if recorded(q, k, cos, sin) else _rotate_gradients
    return rotate(q, k, cos, sin, *where)


def _rotate_gradients(q, k, cos, sin, *where):
    """Rotate without recording what may be a batch of gradients, or of tangents."""
    if not torch.compiler.is_compiling() and (is_batched_gradient(q) or is_batched_gradient(k)):
        return rotate_batched_gradients(_rotate_gradients, q, k, cos, sin, *where)
    positions, first_position, options = where
    return run(q, k, cos, sin, positions, first_position, options, False)


def _table_gradients(xs, y_grads, cos, positions, first_position, options: Options):
    """What each row of the tables gets from the heads, batches and tokens that it serves.

    With g the gradient of y, of the pair's ``y0 = x0 c0 - x1 s0`` and ``y1 = x1 c1 + x0 s1``::

        dc0 = g0 x0,   dc1 = g1 x1,   ds0 = -g0 x1,   ds1 = g1 x0

    and of the transposed rotation the same with g and x in each other's place. In torch operations: tables are
    rarely trained, and autograd can differentiate these once more.
    """
    wide = torch.promote_types(cos.dtype, torch.float32)
    first, end = options.slice(cos.shape[-1])
    if all(g is None for g in y_grads):
        return None, None
    of_cos, of_sin = [], []
    for x, g in zip(xs, y_grads, strict=False):
        if x is None or g is None:
            continue
        x0, x1 = _wide_pairs(x, first, end, options.layout, options.seq_format, wide)
        g0, g1 = _wide_pairs(g, first, end, options.out_layout, options.seq_format, wide)
        if options.transpose:
            x0, x1, g0, g1 = g0, g1, x0, x1
        of_cos.append(_columns(g0 * x0, g1 * x1, cos, end - first, options.layout))
        of_sin.append(_columns(-g0 * x1, g1 * x0, cos, end - first, options.layout))
    cos_tokens, sin_tokens = sum(of_cos[1:], of_cos[0]), sum(of_sin[1:], of_sin[0])
    if positions is None:
        rows = torch.arange(cos_tokens.shape[1], device=cos.device) + first_position
        return tuple(_add_rows(cos, tokens, rows.expand(tokens.shape[:2])) for tokens in (cos_tokens, sin_tokens))
    if options.offsets:
        along = torch.arange(cos_tokens.shape[1], device=cos.device)
        positions = torch.where(positions[:, None] == NO_POSITION, NO_POSITION, positions[:, None] + along)
    positions = positions.long().expand(cos_tokens.shape[:2])
    rows = positions.abs()
    # Positions without a row have made NaN of the result; they must not make an illegal address of this.
    known = ((rows >= 0) & (rows < cos.shape[-2]))[..., None]
    rows = torch.where(known[..., 0], rows, 0)
    sin_tokens = torch.where((positions < 0)[..., None], -sin_tokens, sin_tokens)
    return tuple(_add_rows(cos, torch.where(known, t, 0), rows) for t in (cos_tokens, sin_tokens))


def _add_rows(table: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The sum of ``tokens [B, S, W]`` over all that share a row of the table."""
    if table.ndim == 3:
        batch = torch.arange(table.shape[0], device=table.device)[:, None]
        index: tuple[torch.Tensor, ...] = (batch.expand(rows.shape), rows)
    else:
        index = (rows,)
    return tokens.new_zeros(table.shape).index_put(index, tokens, accumulate=True).to(table.dtype)


def _columns(of_x0, of_x1, table: torch.Tensor, rotary_dim: int, layout: str) -> torch.Tensor:
    """``[B, S, W]``: the sum over heads, in one column for both members of a pair or in one for each."""
    of_x0, of_x1 = of_x0.sum(2), of_x1.sum(2)
    return join(of_x0, of_x1, layout) if table.shape[-1] == rotary_dim else of_x0 + of_x1


def _wide_pairs(x, first: int, end: int, layout: str, seq_format: str, dtype: torch.dtype):
    return (half.to(dtype) for half in pairs(to_bshd(x, seq_format)[..., first:end], layout))
