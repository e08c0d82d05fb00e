"""This file leads from the projections to attention in torch operations, for any device and strides.

The places of rounding are the same as in `paged_cache_triton`. Without a norm the results have the same bits; the sums
of a norm run in another order.
"""

from collections.abc import Sequence

import torch

from ropelab.kernels import qk_norm_torch, rotate_torch
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8
from ropelab.kernels.paged_cache import Norm, Scales, Tensors, compute_dtype
from ropelab.kernels.rotation import NO_POSITION, Rotation


def write(
    tensors: Tensors,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    norm: Norm | None,
    scales: Scales,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
) -> None:
    """Normalize and rotate q and k, write q, and write k and v into slots of the caches.

    The result of q or k has the dtype of q first, as if separate launches wrote and read it, and then the dtype of its
    destination. Nothing is written to a slot that no token has, and a negative slot or a slot beyond the cache counts
    as no slot. A token without a position gives zeros for q and k.

    Args:
        cos, sin, rotation, positions, first_position: as for `rotate_triton.rotate`, without ``out_interleaved`` and
            ``transpose``.
        norm: the norm of q and k, or None.
    """
    t = tensors
    wide = compute_dtype(t.q, cos, norm)
    xs = [t.q, t.k] if norm is None else [x.to(wide) for x in (t.q, t.k)]
    if norm is not None and norm.first:
        xs = _normed(xs, norm)
    turned = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    rotate_torch.rotate(xs, turned, cos, sin, rotation, positions=positions, first_position=first_position)
    if norm is not None and not norm.first:
        turned = _normed(turned, norm)
        if positions is not None:  # a weight that is not finite makes NaN of the zeros of a token without a position
            per_token = positions[:, None] if rotation.offsets else positions
            nowhere = (per_token == NO_POSITION)[:, :, None, None]
            turned = [y.masked_fill(nowhere, 0) for y in turned]
    q, k = (y.to(t.q.dtype) for y in turned)
    v = t.v.clone() if t.v_out is not None else t.v
    t.q_out.copy_(stored(q, t.q_out.dtype, scales.q))
    if t.nope is not None:
        q_nope, q_nope_out = t.nope
        q_nope_out.copy_(stored(q_nope, q_nope_out.dtype, scales.q))
    if t.k_out is not None:
        t.k_out.copy_(k)
    if t.v_out is not None:
        t.v_out.copy_(v)
    blocks, block_size = t.k_cache.shape[:2]
    has_slot = (t.slots >= 0) & (t.slots < blocks * block_size)
    slots = t.slots[has_slot].long()
    for x, cache, scale in ((k, t.k_cache, scales.k), (v, t.v_cache, scales.v)):
        rows = stored(x.flatten(0, 1)[: len(t.slots)][has_slot], cache.dtype, scale)
        if cache.dtype in FLOAT8_DTYPES:  # not every version of torch indexes 8-bit floats
            cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
        cache[slots // block_size, slots % block_size] = rows


def _normed(xs: Sequence[torch.Tensor], norm: Norm) -> list[torch.Tensor]:
    """The normalized q and k times their weights."""
    across, found = norm.across_heads(xs[0].shape[-1]), []
    for x, weight in zip(xs, (norm.q_weight, norm.k_weight), strict=True):
        rows = x.flatten(-2) if across else x
        rows, rstd = qk_norm_torch.normed(rows, norm.eps)
        rows = rows.masked_fill(rstd.isinf(), 0)  # zeros stay zeros where eps is 0
        found.append((rows * (weight.to(x.dtype) + norm.weight_offset)).view(x.shape))
    return found


def stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """``x [..., heads, features]`` in the dtype of its destination; an 8-bit float is divided by its scale first."""
    if dtype not in FLOAT8_DTYPES:
        return x.to(dtype)
    return to_float8(x if scale is None else x.float() / scale.view(-1, 1), dtype)
