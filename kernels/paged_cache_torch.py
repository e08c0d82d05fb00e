"""The way from the projections to attention in torch operations, for any device and strides.

The places of rounding are the same as in `paged_cache_triton`. Without a norm the results have the same bits; the sums
of a norm run in another order.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ropelab.kernels import qk_norm_torch, rotate_torch
from ropelab.kernels.float8 import FLOAT8_DTYPES, scale_of_rows, to_float8
from ropelab.kernels.rotation import Norm, Rotation
from ropelab.kernels.tensors import CacheTensors, RotateTensors


def write(t: CacheTensors, rotation: Rotation, norm: Norm | None, first_position: int = 0) -> None:
    """Normalize and rotate q and k, write q, and write k and v into slots of the caches.

    The result of q or k has the dtype of q first, as if separate launches wrote and read it, and then the dtype of its
    destination. Nothing is written to a slot that no token has, and a negative slot or a slot beyond the cache counts
    as no slot. A token without a position gives zeros for q and k.

    Args:
        rotation: without ``out_interleaved`` and ``transpose``.
        norm: the norm of q and k, or None.
        first_position: as for `run.run`.
    """
    wide = compute_dtype(t)
    xs = [t.q, t.k] if norm is None else [x.to(wide) for x in (t.q, t.k)]
    if norm is not None and norm.first:
        xs = _normed(xs, t, norm)
    turned = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    rotate_torch.rotate(RotateTensors.of(xs, turned, t.cos, t.sin, t.positions), rotation, first_position)
    if norm is not None and not norm.first:
        turned = _normed(turned, t, norm)
        nowhere = rotate_torch.without_position(t.positions)
        if nowhere is not None:  # a weight that is not finite makes NaN of the zeros of a token without a position
            turned = [y.masked_fill(nowhere, 0) for y in turned]
    q, k = (y.to(t.q.dtype) for y in turned)
    v = t.v.clone() if t.v_out is not None else t.v
    q_scale, k_scale, v_scale = t.q_scale, t.k_scale, t.v_scale
    if t.q_scale_out is not None:
        q_scale = scale_of_rows(q if t.q_nope is None else torch.cat((q, t.q_nope), dim=-1), t.q_out.dtype)
        t.q_scale_out.copy_(q_scale[..., None])
    t.q_out.copy_(stored(q, t.q_out.dtype, q_scale))
    if t.q_nope is not None and t.q_nope_out is not None:
        t.q_nope_out.copy_(stored(t.q_nope, t.q_nope_out.dtype, q_scale))
    if t.k_out is not None:
        t.k_out.copy_(k)
    if t.v_out is not None:
        t.v_out.copy_(v)
    tokens, row = rows_of_slots(t.slots, t.k_cache)
    k, v = (x.flatten(0, 1)[tokens] for x in (k, v))
    if t.k_scale_cache is not None:
        k_scale = scale_of_rows(torch.cat((k, v), dim=-1) if t.shares_scale else k, t.k_cache.dtype)
        v_scale = k_scale if t.shares_scale else v_scale
        t.k_scale_cache[row] = k_scale
    if t.v_scale_cache is not None:
        v_scale = t.v_scale_cache[row] = scale_of_rows(v, t.v_cache.dtype)
    for x, cache, scale in ((k, t.k_cache, k_scale), (v, t.v_cache, v_scale)):
        rows = stored(x, cache.dtype, scale)
        if cache.dtype in FLOAT8_DTYPES:  # not every version of torch indexes 8-bit floats
            cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
        cache[row] = rows


def rows_of_slots(slots: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The tokens that have a slot in ``cache``; and the page, and the row in the page, of each of these slots."""
    pages, page = cache.shape[:2]
    tokens = ((slots >= 0) & (slots < pages * page)).nonzero().flatten()
    slots = slots[tokens].long()
    return tokens, (slots // page, slots % page)


def compute_dtype(t: CacheTensors) -> torch.dtype:
    """The dtype of the arithmetic: at least float32, and no narrower than the input, the tables or the weights."""
    return rotate_torch.compute_dtype(t.q, t.cos) if t.q_weight is None else qk_norm_torch.compute_dtype(t)


def _normed(xs: Sequence[torch.Tensor], t: Any, norm: Norm) -> list[torch.Tensor]:
    """The normalized q and k times their weights."""
    found = []
    for x, weight in zip(xs, (t.q_weight, t.k_weight), strict=True):
        rows = x.flatten(-2) if t.norm_across_heads else x
        rows, rstd = qk_norm_torch.normed(rows, norm.eps)
        rows = rows.masked_fill(rstd.isinf(), 0)  # zeros stay zeros where eps is 0
        found.append((rows * (weight.to(x.dtype) + norm.weight_offset)).view(x.shape))
    return found


def stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """``x [..., heads, features]`` in the dtype of its destination; an 8-bit float is divided by its scale first."""
    if dtype not in FLOAT8_DTYPES:
        return x.to(dtype)
    return to_float8(x if scale is None else x.float() / scale[..., None], dtype)
