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
    if k is None:
        return _Rotate.apply(cos, sin, layout, seq_format, inverse, inplace, q)[0]
    if inplace and torch.is_grad_enabled() and (q._is_view() or k._is_view()):
        # Autograd can rewrite the history of a view only for a function with a single output.
        options = {"cos": cos, "sin": sin, "layout": layout, "seq_format": seq_format, "inverse": inverse}
        return apply_rope(q, inplace=True, **options), apply_rope(k, inplace=True, **options)
    return _Rotate.apply(cos, sin, layout, seq_format, inverse, inplace, q, k)


class _Rotate(torch.autograd.Function):
    """y = R x. Linear in x, so its vector-Jacobian product is R^T = the rotation by minus the angle."""

    @staticmethod
    def forward(ctx, cos, sin, layout, seq_format, inverse, inplace, *xs):
        ys = xs if inplace else tuple(torch.empty_like(x) for x in xs)
        _rotate(xs, ys, cos, sin, layout, seq_format, inverse)
        if inplace:
            ctx.mark_dirty(*xs)
        ctx.options = layout, seq_format, inverse
        # The tables' gradient is the only one that needs the input.
        ctx.save_for_backward(cos, sin, *(xs if any(ctx.needs_input_grad[:2]) else ()))
        ctx.set_materialize_grads(False)
        return ys

    @staticmethod
    def backward(ctx, *grads):
        cos, sin, *xs = ctx.saved_tensors
        layout, seq_format, inverse = ctx.options
        wanted = [i for i, g in enumerate(grads) if g is not None and ctx.needs_input_grad[6 + i]]
        x_grads: list[torch.Tensor | None] = [None] * len(grads)
        if wanted:
            rotated = _Rotate.apply(cos, sin, layout, seq_format, not inverse, False, *(grads[i] for i in wanted))
            for i, g in zip(wanted, rotated, strict=True):
                x_grads[i] = g
        cos_grad = sin_grad = None
        if xs:
            cos_grad, sin_grad = _table_gradients(xs, grads, cos, layout, seq_format, inverse)
        return cos_grad, sin_grad, None, None, None, None, *x_grads


def _rotate(xs, ys, cos, sin, layout, seq_format, inverse) -> None:
    """Run the backend on bshd views; where y is x, the views are one object too, which marks in-place use."""
    x_views = [to_bshd(x, seq_format) for x in xs]
    y_views = [v if y is x else to_bshd(y, seq_format) for x, y, v in zip(xs, ys, x_views, strict=True)]
    backend = backend_for(xs[0])
    backend.rotate(x_views, y_views, cos, sin, interleaved=layout == "interleaved", inverse=inverse)


def _table_gradients(xs, grads, cos, layout, seq_format, inverse) -> tuple[torch.Tensor, torch.Tensor]:
    """dL/dcos = sum g0 x0 + g1 x1 and dL/dsin = sum g1 x0 - g0 x1, over the heads and batches a row serves.

    In torch operations: tables are rarely trained, and autograd can differentiate these once more.
    """
    compute = torch.promote_types(cos.dtype, torch.float32)
    cos_grad = torch.zeros_like(cos, dtype=compute)
    sin_grad = torch.zeros_like(cos, dtype=compute)
    for x, g in zip(xs, grads, strict=True):
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
