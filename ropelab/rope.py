"""The public function: check the arguments, choose a backend, differentiate."""

import torch

from ropelab.checks import check_rope_arguments
from ropelab.kernels import backend_for
from ropelab.layout import pairs
from ropelab.seq_format import to_bshd


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "split_half",
    seq_format: str = "bshd",
    inverse: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys, in one pass over their memory.

    Each pair ``(x0, x1)`` of features of token ``s`` turns by the angle of row ``s`` of the tables::

        y0 = x0 cos - x1 sin
        y1 = x1 cos + x0 sin

    (Su et al., RoFormer, arXiv 2104.09864, equation 34.) The maths is in float32, or wider if the inputs are.
    CUDA tensors go through one Triton kernel, all others through torch operations with the same results.

    Args:
        q: ``[B, S, Hq, D]`` (``bshd``), ``[S, B, Hq, D]`` (``sbhd``) or ``[B, Hq, S, D]`` (``bhsd``);
            bfloat16, float16, float32 or float64; any strides.
        k: as ``q``, with any number of heads (GQA, MQA); or None.
        cos, sin: ``[P, R/2]``, ``P >= S``, ``R <= D``; row ``s`` belongs to token ``s``. For tokens that start
            at position m, pass ``cos[m:]``. Features from ``R`` on pass unchanged. See ``rotary_table``.
        layout: ``"split_half"`` pairs features ``(i, i + R/2)`` (GPT-NeoX, Hugging Face Llama);
            ``"interleaved"`` pairs ``(2i, 2i + 1)`` (GPT-J, Meta Llama).
        seq_format: order of the axes of ``q`` and ``k``.
        inverse: rotate by minus the angle. What a rotation did, its inverse undoes.
        inplace: overwrite ``q`` and ``k``; autograd is told.

    Returns:
        The rotated ``q``, or ``(q, k)`` when ``k`` is given; shape and dtype of the inputs. Differentiable any
        number of times in ``q``, ``k``, ``cos`` and ``sin``; the gradient in ``q`` and ``k`` is the rotation by
        minus the angle, made by the same kernel.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported or does not match.
        ValueError: wrong rank or shape, tables too short or too wide, devices that differ, unknown layout or
            format; for ``inplace``: overlapping memory, or a tensor that autograd needs unchanged.
    """
    check_rope_arguments(q, k, cos, sin, layout, seq_format, inplace)
    if k is not None and inplace and torch.is_grad_enabled() and (q._is_view() or k._is_view()):
        # Autograd can rewrite the history of a view only for a function with a single output.
        options = {"cos": cos, "sin": sin, "layout": layout, "seq_format": seq_format, "inverse": inverse}
        return apply_rope(q, inplace=True, **options), apply_rope(k, inplace=True, **options)
    return _Rotate.apply(q, k, cos, sin, layout, seq_format, inverse, inplace)


class _Rotate(torch.autograd.Function):
    """y = R x. Linear in x, so its vector-Jacobian product is R^T = the rotation by minus the angle."""

    # q comes first: autograd takes the first input of an in-place function to be the view it rewrites.
    @staticmethod
    def forward(ctx, q, k, cos, sin, layout, seq_format, inverse, inplace):
        xs = (q,) if k is None else (q, k)
        ys = xs if inplace else tuple(torch.empty_like(x) for x in xs)
        x_views = [to_bshd(x, seq_format) for x in xs]
        # Equal views of one tensor are one object here: that is how a backend knows in-place use.
        y_views = x_views if inplace else [to_bshd(y, seq_format) for y in ys]
        rotate = backend_for(q).rotate
        rotate(x_views, y_views, cos, sin, interleaved=layout == "interleaved", inverse=inverse)
        if inplace:
            ctx.mark_dirty(*xs)
        if not any(ctx.needs_input_grad[2:4]):  # then each output depends on its own input alone
            ctx.mark_non_differentiable(*(y for y, needed in zip(ys, ctx.needs_input_grad, strict=False) if not needed))
        ctx.options = layout, seq_format, inverse
        # The tables' gradients are the only ones that need the inputs.
        ctx.save_for_backward(cos, sin, *(xs if any(ctx.needs_input_grad[2:4]) else ()))
        ctx.set_materialize_grads(False)
        return ys[0] if k is None else ys

    @staticmethod
    def backward(ctx, *y_grads):
        cos, sin, *xs = ctx.saved_tensors
        wanted = [g if needed else None for g, needed in zip(y_grads, ctx.needs_input_grad, strict=False)]
        x_grads = _rotate_back(wanted, cos, sin, *ctx.options)
        table_grads = _table_gradients(xs, y_grads, cos, *ctx.options) if xs else (None, None)
        return *x_grads, *(None,) * (2 - len(x_grads)), *table_grads, None, None, None, None


def _rotate_back(y_grads, cos, sin, layout, seq_format, inverse) -> list[torch.Tensor | None]:
    """R^T of each gradient that is there, by the same function, which autograd can differentiate again."""
    present = [g for g in y_grads if g is not None]
    if not present:
        return list(y_grads)
    q, k = present[0], present[1] if len(present) > 1 else None
    rotated = _Rotate.apply(q, k, cos, sin, layout, seq_format, not inverse, False)
    remaining = iter((rotated,) if k is None else rotated)
    return [None if g is None else next(remaining) for g in y_grads]


def _table_gradients(xs, y_grads, cos, layout, seq_format, inverse) -> tuple[torch.Tensor, torch.Tensor]:
    """dL/dcos = sum g0 x0 + g1 x1 and dL/dsin = sum g1 x0 - g0 x1, over the heads and batches a row serves.

    In torch operations: tables are rarely trained, and autograd can differentiate these once more.
    """
    compute = torch.promote_types(cos.dtype, torch.float32)
    cos_grad = torch.zeros_like(cos, dtype=compute)
    sin_grad = torch.zeros_like(cos, dtype=compute)
    for x, g in zip(xs, y_grads, strict=True):
        if g is None:
            continue
        x0, x1 = (half.to(compute) for half in _rotary_pairs(x, cos, layout, seq_format))
        g0, g1 = (half.to(compute) for half in _rotary_pairs(g, cos, layout, seq_format))
        unused_rows = (0, 0, 0, cos.shape[0] - x0.shape[1])
        cos_grad = cos_grad + torch.nn.functional.pad((g0 * x0 + g1 * x1).sum((0, 2)), unused_rows)
        sin_grad = sin_grad + torch.nn.functional.pad((g1 * x0 - g0 * x1).sum((0, 2)), unused_rows)
    return cos_grad.to(cos.dtype), (-sin_grad if inverse else sin_grad).to(cos.dtype)


def _rotary_pairs(x, cos, layout, seq_format) -> tuple[torch.Tensor, torch.Tensor]:
    return pairs(to_bshd(x, seq_format)[..., : 2 * cos.shape[1]], layout)
