"""The heads of multi-head latent attention (MLA), assembled in torch operations for any device and strides.

`latent_triton` has the formulas. Both paths round at the same places and sum over the heads in the same order, so they
give the same bits.
"""

from dataclasses import replace

import torch

from ropelab.kernels import rotate_torch
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.tensors import LatentGradients, LatentTensors, RotateTensors, TailTensors

LANES = 16
"""The partial sums over the heads in the gradient of k_pe: head h joins the sum of lane ``h mod LANES``."""


def forward(t: LatentTensors, rotation: Rotation, first_position: int = 0) -> None:
    """Write ``key = [kv[:N], R k_pe]`` and, unless it is None, ``value = kv[N:]``; ``rotation.first`` is N."""
    whole = torch.cat((t.kv[..., : rotation.first], t.k_pe.expand(*t.kv.shape[:3], -1)), dim=-1)
    rotate_torch.rotate(RotateTensors.of((whole,), (t.key,), t.cos, t.sin, t.positions), rotation, first_position)
    if t.value is not None:
        t.value.copy_(t.kv[..., rotation.first :])


def turn_tail(t: TailTensors, rotation: Rotation, first_position: int = 0) -> None:
    """Rotate the features from ``rotation.first`` on in place."""
    rotate_torch.rotate(RotateTensors.of((t.q,), (t.q,), t.cos, t.sin, t.positions), rotation, first_position)


def backward(t: LatentGradients, rotation: Rotation, first_position: int = 0) -> None:
    """Write ``kv_grad = [key_grad[:N], value_grad]`` and ``k_pe_grad``, the turned sum of ``key_grad[N:]``."""
    nope_dim, nowhere = rotation.first, rotate_torch.without_position(t.positions)
    t.kv_grad[..., :nope_dim].copy_(t.key_grad[..., :nope_dim])
    t.kv_grad[..., nope_dim:].copy_(t.value_grad)
    if nowhere is not None:
        t.kv_grad[..., :nope_dim].masked_fill_(nowhere, 0)
    total = sum_over_heads(t.key_grad[..., nope_dim:].to(rotate_torch.compute_dtype(t.key_grad, t.cos)))
    turned = RotateTensors.of((total,), (t.k_pe_grad,), t.cos, t.sin, t.positions)
    rotate_torch.rotate(turned, replace(rotation, first=0), first_position)


def sum_over_heads(x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x [B, S, H, R]`` over the heads, ``[B, S, 1, R]``, in the order of `latent_triton`."""
    heads = x.shape[2]
    lanes = x.new_zeros(*x.shape[:2], LANES, x.shape[3])
    for first in range(0, heads, LANES):
        block = x[:, :, first : first + LANES]
        lanes[:, :, : block.shape[2]] += block
    while lanes.shape[2] > 1:
        lanes = lanes[:, :, 0::2] + lanes[:, :, 1::2]
    return lanes
