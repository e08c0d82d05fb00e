"""The RMS norm of every head and then the rotation in torch operations, for any device and strides.

The formulas and the places of rounding are the same as in `qk_norm_triton`; the sums run in another order.
"""

from dataclasses import replace

import torch

from ropelab.kernels import rotate_torch
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.tensors import NormGradients, NormTensors, RotateTensors


def forward(t: NormTensors, rotation: Rotation, eps: float, first_position: int = 0) -> None:
    """Write ``R (w x / sqrt(mean(x^2) + eps))`` for q and k."""
    wide = compute_dtype(t)
    q, k = (normed(x.to(wide), eps)[0] * w.to(wide) for x, w in ((t.q, t.q_weight), (t.k, t.k_weight)))
    turned = RotateTensors(q, k, t.q_out, t.k_out, t.cos, t.sin, t.positions)
    rotate_torch.rotate(turned, rotation, first_position)


def backward(t: NormGradients, rotation: Rotation, eps: float, first_position: int = 0) -> None:
    """Write the gradients of q and k and, where they are needed, of their weights."""
    wide = compute_dtype(t)
    back = replace(rotation, transpose=not rotation.transpose)
    gs = [g.to(wide) for g in (t.q_grad, t.k_grad)]
    turned = [torch.empty(g.shape, dtype=wide, device=g.device) for g in gs]
    rotate_torch.rotate(RotateTensors.of(gs, turned, t.cos, t.sin, t.positions), back, first_position)
    nowhere = rotate_torch.without_position(t.positions)
    of_q, of_k = (t.q, turned[0], t.q_dx, t.q_weight, t.q_dw), (t.k, turned[1], t.k_dx, t.k_weight, t.k_dw)
    for x, gn, dx, w, dw in (of_q, of_k):
        xhat, rstd = normed(x.to(wide), eps)
        if nowhere is not None:  # a token without a position may hold any values
            xhat, rstd = xhat.masked_fill(nowhere, 0), rstd.masked_fill(nowhere, 0)
        if dw is not None:
            dw.copy_((gn * xhat).sum((0, 1, 2)))
        wg = gn * w.to(wide)
        dx.copy_(rstd * (wg - xhat * (wg * xhat).mean(-1, keepdim=True)))


def compute_dtype(t) -> torch.dtype:
    """The dtype of the arithmetic: at least float32, and no narrower than the input, the tables or the weights."""
    return torch.promote_types(rotate_torch.compute_dtype(t.q, t.cos), t.q_weight.dtype)


def normed(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized ``x``, and the factor ``1 / sqrt(mean(x^2) + eps)`` ``[..., 1]``."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd
