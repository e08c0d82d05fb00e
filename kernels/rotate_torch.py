"""The rotation in torch operations: any device, any strides, same results as the Triton kernel."""

from collections.abc import Sequence

import torch


def rotate(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Write the rotation of each ``xs[i]`` ``[B, S, H, D]`` to ``outs[i]`` (which may be ``xs[i]``).

    The maths is in the widest of float32, the input's and the tables' dtype, in the order of the
    formula and without fused multiply-add: the Triton kernel rounds at the same places, so both
    paths give the same bits.
    """
    rotary_dim = 2 * cos.shape[-1]
    for x, out in zip(xs, outs, strict=True):
        compute = compute_dtype(x, cos)
        c = cos[: x.shape[1], None, :].to(compute)
        s = sin[: x.shape[1], None, :].to(compute)
        if inverse:
            s = -s
        x0, x1 = (half.to(compute) for half in _pairs(x, rotary_dim, interleaved))
        y0, y1 = _pairs(out, rotary_dim, interleaved)
        # Both products of a pair are taken before either result is stored: out may be x.
        r0, r1 = x0 * c - x1 * s, x1 * c + x0 * s
        y0.copy_(r0)
        y1.copy_(r1)
        if out is not x:
            out[..., rotary_dim:].copy_(x[..., rotary_dim:])


def compute_dtype(x: torch.Tensor, cos: torch.Tensor) -> torch.dtype:
    """The dtype of the arithmetic: at least float32, and no narrower than the input or the tables."""
    return torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)


def _pairs(x: torch.Tensor, rotary_dim: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
