"""This file computes the RMS norm of every head and then the rotation in torch operations, for any device and strides.

The formulas and the places of rounding are the same as in `qk_norm_triton`; the sums run in another order.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ropelab.kernels import rotate_torch
from ropelab.kernels.rotation import NO_POSITION, Rotation


def forward(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    eps: float,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
) -> None:
    """Write ``R (w x / sqrt(mean(x^2) + eps))`` for q and k to ``outs``: see `qk_norm_triton.forward`."""
    wide = compute_dtype(xs[0], cos, weights)
    xs = [normed(x.to(wide), eps)[0] * w.to(wide) for x, w in zip(xs, weights, strict=True)]
    rotate_torch.rotate(xs, outs, cos, sin, rotation, positions=positions, first_position=first_position)


def backward(
    xs: Sequence[torch.Tensor],
    gs: Sequence[torch.Tensor],
    dxs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    dws: Sequence[torch.Tensor] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    eps: float,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
) -> None:
    """Write the gradients in q and k to ``dxs`` and in their weights to ``dws``: see `qk_norm_triton.backward`."""
    wide = compute_dtype(xs[0], cos, weights)
    back = replace(rotation, transpose=not rotation.transpose)
    turned = [torch.empty(g.shape, dtype=wide, device=g.device) for g in gs]
    gs = [g.to(wide) for g in gs]
    rotate_torch.rotate(gs, turned, cos, sin, back, positions=positions, first_position=first_position)
    for i, (x, gn, dx, w) in enumerate(zip(xs, turned, dxs, weights, strict=True)):
        xhat, rstd = normed(x.to(wide), eps)
        if positions is not None:  # a token without a position may hold any values
            per_token = positions[:, None] if rotation.offsets else positions
            nowhere = (per_token == NO_POSITION)[:, :, None, None]
            xhat, rstd = xhat.masked_fill(nowhere, 0), rstd.masked_fill(nowhere, 0)
        if dws is not None:
            dws[i].copy_((gn * xhat).sum((0, 1, 2)))
        wg = gn * w.to(wide)
        dx.copy_(rstd * (wg - xhat * (wg * xhat).mean(-1, keepdim=True)))


def compute_dtype(x: torch.Tensor, cos: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of the arithmetic: at least float32, and no narrower than the input, the tables or the weights."""
    return torch.promote_types(rotate_torch.compute_dtype(x, cos), weights[0].dtype)


def normed(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized ``x``, and the factor ``1 / sqrt(mean(x^2) + eps)`` ``[..., 1]``."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd
