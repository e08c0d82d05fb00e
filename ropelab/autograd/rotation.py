"""The derivatives of the rotation: in reverse mode to any order, in forward mode, and under vmap.

A rotation is linear in its input, ``y = R x``, so the backward is the transposed rotation, ``dx = R^T dy``. The
transposed rotation reads the layout that the forward writes, and turns by minus the angle (`Where.transposed`).
"""

import torch

from ropelab.autograd.batching import is_batched_gradient, rotate_batched, rotate_batched_gradients
from ropelab.autograd.table_gradients import table_gradients
from ropelab.call.angles import Angles
from ropelab.call.checks import (
    check_inplace_autograd,
    check_layouts_alike,
    check_memory,
    check_places,
    check_recordable,
    check_writable,
)
from ropelab.call.dispatcher import copy_over, must_dispatch, transformed
from ropelab.call.operation import Prepared
from ropelab.call.rotation import ROTATE_IN_PLACE, rotate_or_dispatch
from ropelab.call.where import Options, Where


def differentiated(q, k, where: Where, inplace: bool):
    """Rotate q, or q and k, and let autograd record the rotation where a caller differentiates it."""
    if not needs_autograd(q, k, *where.angles):
        return rotate_or_dispatch(q, k, where, inplace)
    return _overwrite(q, k, where) if inplace else rotate_recorded(q, k, where)


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Whether a caller differentiates. Other calls leave out autograd's function, which takes as long as a launch."""
    if torch.is_grad_enabled():
        for x in tensors:
            if getattr(x, "requires_grad", False):
                return True
    return transformed()


def check_untransformed() -> None:
    """Raise NotImplementedError under a transform of torch.func or in forward mode, for a call in place."""
    if transformed():
        raise NotImplementedError("inplace: expected False under torch.func transforms and forward mode, got True")


def rotate_recorded(q, k, where: Where):
    """Rotate into new tensors, and record the rotation."""
    if transformed():
        return _TransformedRotation.apply(q, k, *where.flat)
    return _record((q, k, *where.tensors), *where[2:], False)


def rotate_again(prepared: Prepared, q, k, cos, sin, positions, offsets):
    """`rotate_recorded` of plain tensors, as `Operation.look_up` found it."""
    if type(offsets) is not int:
        positions, offsets = offsets, 0
    return _record((q, k, cos, sin, positions), offsets, prepared.options, False, prepared)


def _record(tensors, first_position: int, options: Options, inplace: bool, prepared: Prepared | None = None):
    """Rotate with `_Rotation`; ``tensors`` are q, k and `Where.tensors`."""
    if torch.compiler.is_compiling():
        return _Rotation.apply(*tensors, first_position, options, inplace, prepared)
    unwrap = torch._C._functorch.unwrap_if_dead  # removes the wrapper of a transform of torch.func that has ended
    unwrapped = [x if x is None else unwrap(x) for x in tensors]
    try:
        return _apply(*unwrapped, first_position, options, inplace, prepared)
    except RuntimeError:  # autograd saves no inference tensor, but its message names no argument
        q, k, cos, sin, positions = tensors
        trained_tables = any(getattr(x, "requires_grad", False) for x in (cos, sin))
        saved = {"q": q, "k": k} if trained_tables else {}
        check_recordable(positions=positions, **Angles(cos, sin).named, **saved)
        raise


def _overwrite(q, k, where: Where):
    """Rotate in place, and record the rotation."""
    check_untransformed()
    if must_dispatch(q, k):
        return _overwrite_by_copy(q, k, where)
    ROTATE_IN_PLACE.check((q, k), where)
    check_memory(q, k, where.read)
    check_writable(("q", "k"), (q, k))
    check_inplace_autograd(q, k, where.angles)
    check_recordable(positions=where.positions, **where.angles.named)
    check_places(q, where)
    if k is not None and (q._is_view() or k._is_view()):
        # Autograd can rewrite the history of a view only for a function with a single output.
        return tuple(
            _record((x, None, *where.tensors), *where[2:], True)
            if x.requires_grad
            else rotate_or_dispatch(x, None, where, True)
            for x in (q, k)
        )
    return _record((q, k, *where.tensors), *where[2:], True)


def _overwrite_by_copy(q, k, where: Where):
    """Rotate into new tensors, and copy them over q and k. Autograd can record the copy through the dispatcher."""
    check_layouts_alike(where.options)
    if not torch.compiler.is_compiling():  # compilers cannot follow these checks; PyTorch has its own checks
        check_writable(("q", "k"), (q, k))
        check_inplace_autograd(q, k, where.angles)
    where = where._replace(options=where.options._replace(overwrites=True))
    new = _Rotation.apply(q, k, *where.flat, False, None)
    return copy_over((q,), (new,))[0] if k is None else copy_over((q, k), new)


class _Rotation(torch.autograd.Function):
    """``y = R x``, and its vector-Jacobian product ``dx = R^T dy``. ``cos`` and ``sin`` are `Angles`."""

    # q comes first: autograd takes the first input of an in-place function to be the view whose history it rewrites.
    @staticmethod
    def forward(ctx, q, k, cos, sin, positions, first_position, options, inplace, prepared):
        if prepared is None:
            ys = rotate_or_dispatch(q, k, Where.of(cos, sin, positions, first_position, options), inplace)
        else:
            made = prepared((q, k), cos, sin, positions, first_position)
            ys = made[0] if k is None else made
        needed = ctx.needs_input_grad
        trained_tables = needed[2] or needed[3]
        if not trained_tables and k is not None:  # then each output depends on its own input alone
            if not needed[0]:
                ctx.mark_non_differentiable(ys[0])
            elif not needed[1]:
                ctx.mark_non_differentiable(ys[1])
        if inplace:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        ctx.first_position, ctx.options = first_position, options
        # Only the gradients of the tables need the inputs.
        ctx.save_for_backward(cos, sin, positions, *((q, k) if trained_tables else (None, None)))
        ctx.set_materialize_grads(False)
        return ys

    @staticmethod
    def backward(ctx, *y_grads):
        return *_backward(ctx, y_grads, _rotate_gradients), *(None,) * 5


_apply = super(torch.autograd.Function, _Rotation).apply
"""``_Rotation.apply`` without its search for wrappers."""


class _TransformedRotation(torch.autograd.Function):
    """`_Rotation` for torch.func and for forward mode.

    There are two classes for two reasons. Autograd inspects the signature of a function with ``setup_context`` at every
    call, and the inspection takes longer than the launch. torch.compile accepts no function with a ``jvp``.
    """

    @staticmethod
    def forward(q, k, cos, sin, positions, first_position, options):
        return _rotate_batches(q, k, Where.of(cos, sin, positions, first_position, options))

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, cos, sin, positions, ctx.first_position, ctx.options = inputs
        ctx.save_for_backward(cos, sin, positions, q, k)
        ctx.save_for_forward(cos, sin, positions, q, k)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *y_grads):
        # The recorded rotation removes the wrappers of transforms that have ended; a plain rotation would keep them.
        return *_backward(ctx, y_grads, rotate_recorded), None, None, None

    @staticmethod
    def vmap(info, in_dims, q, k, cos, sin, positions, first_position, options):
        where = Where.of(cos, sin, positions, first_position, options)
        ys = rotate_batched(rotate_recorded, info.batch_size, in_dims[:5], q, k, where)
        return ys, 0 if k is None else (0, 0)

    @staticmethod
    def jvp(ctx, q_tangent, k_tangent, cos_tangent, sin_tangent, *_):
        cos, sin, positions, q, k = ctx.saved_tensors
        where, tangents = Where.of(cos, sin, positions, ctx.first_position, ctx.options), []
        for x, x_tangent in ((q, q_tangent), (k, k_tangent)):
            if x is None:
                continue
            # y is linear in x. The features that rotate are linear in the tables too; the others do not depend on them.
            tangent = torch.zeros_like(x)
            if x_tangent is not None:
                tangent = rotate_recorded(x_tangent, None, where)
            if cos_tangent is not None or sin_tangent is not None:
                turn = Angles(*(torch.zeros_like(cos) if t is None else t for t in (cos_tangent, sin_tangent)))
                first, end = ctx.options.slice(where.angles.columns)
                turned = rotate_recorded(x, None, where._replace(angles=turn))[..., first:end]
                tangent = tangent + torch.nn.functional.pad(turned, (first, x.shape[-1] - end))
            tangents.append(tangent)
        return tangents[0] if k is None else tuple(tangents)


def _backward(ctx, y_grads, rotate) -> tuple[torch.Tensor | None, ...]:
    """The gradients of q, k, cos and sin.

    Args:
        rotate: a function that rotates into new tensors and that autograd can differentiate again.
    """
    cos, sin, positions, q, k = ctx.saved_tensors
    where = Where.of(cos, sin, positions, ctx.first_position, ctx.options)
    x_grads = [g if needed else None for g, needed in zip(y_grads, ctx.needs_input_grad, strict=False)]
    present = [g for g in x_grads if g is not None]
    if present:
        second = present[1] if len(present) > 1 else None
        rotated = rotate(present[0], second, where.transposed())
        remaining = iter((rotated,) if second is None else rotated)
        x_grads = [None if g is None else next(remaining) for g in x_grads]
    table_grads = (None, None)
    if any(ctx.needs_input_grad[2:4]):
        table_grads = table_gradients((q, k), y_grads, where)
    return *x_grads, *(None,) * (2 - len(x_grads)), *table_grads


def _rotate_gradients(q, k, where: Where):
    """Rotate gradients, and record the rotation where a caller differentiates the gradient again."""
    rotate = rotate_recorded if needs_autograd(q, k, *where.angles) else _rotate_batches
    return rotate(q, k, where)


def _rotate_batches(q, k, where: Where):
    """Rotate tensors that may be batches of gradients or of tangents, without a record for autograd."""
    if not torch.compiler.is_compiling() and (is_batched_gradient(q) or is_batched_gradient(k)):
        return rotate_batched_gradients(_rotate_batches, q, k, where)
    return rotate_or_dispatch(q, k, where, False)
