"""This file assembles the heads of multi-head latent attention (MLA) in torch operations, for any device and strides.

`latent_triton` has the formulas. Both paths round at the same places and sum over the heads in the same order, so they
give the same bits.
"""

from dataclasses import replace

import torch

from ropelab.kernels import rotate_torch
from ropelab.kernels.rotation import NO_POSITION, Rotation

LANES = 16
"""The partial sums over the heads in the gradient of k_pe: head h joins the sum of lane ``h mod LANES``."""


def forward(
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
) -> None:
    """Write ``key = [kv[:N], R k_pe]`` and, unless it is None, ``value = kv[N:]``; see `latent_triton.forward`."""
    nope_dim = rotation.first
    whole = torch.cat((kv[..., :nope_dim], k_pe.expand(*kv.shape[:3], -1)), dim=-1)
    rotate_torch.rotate((whole,), (key,), cos, sin, rotation, positions=positions, first_position=first_position)
    if value is not None:
        value.copy_(kv[..., nope_dim:])


def turn_tail(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
) -> None:
    """Rotate the features from ``rotation.first`` on in place; see `latent_triton.turn_tail`."""
    rotate_torch.rotate((q,), (q,), cos, sin, rotation, positions=positions, first_position=first_position)


def backward(
    key_grad: torch.Tensor,
    value_grad: torch.Tensor,
    kv_grad: torch.Tensor,
    k_pe_grad: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
) -> None:
    """Write the gradients of kv and k_pe; see `latent_triton.backward`."""
    nope_dim = rotation.first
    kv_grad[..., :nope_dim].copy_(key_grad[..., :nope_dim])
    kv_grad[..., nope_dim:].copy_(value_grad)
    if positions is not None:
        nowhere = positions == NO_POSITION
        nowhere = nowhere[:, None] if rotation.offsets else nowhere
        kv_grad[..., :nope_dim].masked_fill_(nowhere[..., None, None], 0)
    total = sum_over_heads(key_grad[..., nope_dim:].to(rotate_torch.compute_dtype(key_grad, cos)))
    rotate_torch.rotate(
        (total,), (k_pe_grad,), cos, sin, replace(rotation, first=0),
        positions=positions, first_position=first_position,
    )  # fmt: skip


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
