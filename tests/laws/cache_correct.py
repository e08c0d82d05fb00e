"""A right operator in plain torch, method by method, and its form in each convention.

A fault overrides one method of `Operator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.cache.case import bits
from ropelab.kernels.float8 import FLOAT8_DTYPES, scale_of_rows, to_float8
from ropelab.study.faults.correct import turn
from tests.laws.cache_block_scales import BLOCK_FORMS, BlockScaled


class Operator:
    """The pass from q, k and v to the rotated q, the rotated k and the caches."""

    def __call__(
        self, q, k, v, key_cache, value_cache, slots, *, cos=None, sin=None, frequencies=None, positions,
        layout="split_half", weights=(), norm_last=False, eps=1e-6, offset=0.0, scales=(None, None, None), q_dtype=None,
        made_scales=None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Write the caches, and return the results for q and k.

        Args:
            q, k, v: ``[T, H, D]``.
            key_cache, value_cache: ``[blocks, block_size, H, D]``.
            slots: ``[N]``, negative for no slot.
            cos, sin: ``[P, R/2]``. positions: ``[T]``.
            frequencies: ``[R/2, 3]`` in place of cos and sin, see `ropelab.rotary_frequencies`.
            weights, eps, offset: as for the norm; without weights there is no norm.
            norm_last: whether the norm comes after the rotation.
            scales: of 8-bit floats in q, in the key cache and in the value cache: tensors of one element or None.
            q_dtype: the dtype of the result for q, by default the dtype of q.
            made_scales: in place of ``scales`` the tensors for those that the operator makes: of q ``[T, H]`` and of
                both caches ``[blocks, block_size, H]``.
        """
        positions = self.positions(positions, slots)
        rows = (cos[positions], sin[positions]) if frequencies is None else self.cosines(positions, frequencies)
        wide = torch.promote_types(torch.promote_types(q.dtype, rows[0].dtype), torch.float32)
        cos, sin = (row.to(wide)[:, None] for row in rows)
        q_turned, k_turned = (
            self.turned(x, weight, cos, sin, layout, norm_last, eps, offset, wide).to(q.dtype)
            for x, weight in zip((q, k), self.weights(*weights) if weights else (None, None), strict=True)
        )
        tokens, kept = self.live(slots, key_cache)
        k_rows, v_rows, q_scale = self.stored(k_turned, k)[tokens], v[tokens], scales[0]
        k_scale, v_scale = self.scale(scales, 1), self.scale(scales, 2)
        if made_scales is not None:
            q_scale, k_scale = self.row_scale(q_turned, q_dtype), self.row_scale(k_rows, key_cache.dtype)
            v_scale = self.row_scale(v_rows, value_cache.dtype)
            made_scales[0].copy_(q_scale[..., 0])
            for cache, scale in ((made_scales[1], k_scale), (made_scales[2], v_scale)):
                self.keep(cache, kept, scale)
        self.write(key_cache, kept, k_rows, k_scale, value_cache)
        self.write(value_cache, kept, v_rows, v_scale, key_cache)
        return self.convert(q_turned, q_dtype or q.dtype, q_scale), k_turned

    def turn_again(self, key_cache, slots, deltas, *, cos=None, sin=None, frequencies=None, layout="split_half"):
        """Rotate the keys in slots of a cache by further positions."""
        tokens, kept = self.live(slots, key_cache)
        deltas, (block, place) = deltas[tokens].long(), self.address(kept, key_cache, key_cache)
        if frequencies is None:
            cos, sin = cos[deltas.abs()], sin[deltas.abs()] * deltas.sign()[:, None]
        else:
            cos, sin = self.cosines(deltas, frequencies)
        x = bits(key_cache)[block, place].view(key_cache.dtype)
        x = x.float() if x.dtype in FLOAT8_DTYPES else x
        wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
        cos, sin = self.turn_by(cos.to(wide)[:, None], sin.to(wide)[:, None])
        turned = self.rotate(x.to(wide), cos, sin, layout)
        self.write(key_cache, kept, self.stored(turned, x), None, key_cache)
        return key_cache

    def turn_by(self, cos, sin):
        """Return the cosines and sines by which a cached key turns."""
        return cos, sin

    def row_scale(self, x, dtype):
        """Return the scales of the rows of ``x [n, H, D]``, ``[n, H, 1]``."""
        return scale_of_rows(x, dtype)[..., None]

    def keep(self, scales, slots, scale):
        """Write the scales of rows into slots of a tensor ``[blocks, block_size, H]``."""
        scales[self.address(slots, scales, scales)] = scale[..., 0]

    def turned(self, x, weight, cos, sin, layout, norm_last, eps, offset, wide):
        """Return the rotated heads, which are normalized before or after the rotation if there is a weight."""
        x = x.to(wide)
        if weight is not None and not norm_last:
            x = self.normalized(x, weight, eps, offset, wide)
        x = self.rotate(x, cos, sin, layout)
        return self.normalized(x, weight, eps, offset, wide) if weight is not None and norm_last else x

    def cosines(self, positions, frequencies):
        """Return the cosines and sines ``[T, R/2]`` of `ropelab.rotary_frequencies`, whose factor is 1."""
        angles = self.angles(positions, radians(frequencies))
        return angles.cos().float(), angles.sin().float()

    def angles(self, positions, per_position):
        """Return the angles ``[T, R/2]`` of positions, from rad per position in float64."""
        return positions[:, None] * per_position

    def positions(self, positions, slots):
        """Return the position of every token."""
        return positions.long()

    def weights(self, q_weight, k_weight):
        """Return the weights of the norm of q and of k."""
        return q_weight, k_weight

    def normalized(self, x, weight, eps, offset, wide):
        """Return the normalized heads; a weight for the features of all heads belongs to a norm across heads."""
        return self.norm(x.reshape(len(x), -1, len(weight)), weight, eps, offset, wide).view(x.shape)

    def norm(self, x, weight, eps, offset, wide):
        """Return ``x`` divided by the root mean square of its last axis, times the weight."""
        x = x.to(wide)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.to(wide) + offset)

    def rotate(self, x, cos, sin, layout):
        """Return the rotated heads."""
        return turn(x, cos, sin, layout)

    def live(self, slots, cache):
        """Return the tokens with a slot, and their slots."""
        tokens = (slots >= 0).nonzero()[:, 0]
        return tokens, slots[tokens].long()

    def stored(self, turned, k):
        """Return what the key cache stores, from the rotated k and k itself."""
        return turned

    def scale(self, scales, which):
        """Return the scale of the key cache (1) or of the value cache (2)."""
        return scales[which]

    def address(self, slots, cache, other):
        """Return the blocks and the places of slots in a cache, next to the other cache."""
        return slots // cache.shape[1], slots % cache.shape[1]

    def write(self, cache, slots, rows, scale, other):
        """Write rows into slots of a cache."""
        rows = self.convert(rows, cache.dtype, scale)
        block, place = self.address(slots, cache, other)
        bits(cache)[block, place] = bits(rows)

    def divide(self, x, scale):
        """Return the values that 8-bit floats store."""
        return x if scale is None else x.float() / scale

    def convert(self, x, dtype, scale):
        """Return ``x`` in the dtype of its destination."""
        if dtype not in FLOAT8_DTYPES:
            return x.to(dtype)
        return to_float8(self.divide(x, scale), dtype)


def radians(frequencies: torch.Tensor) -> torch.Tensor:
    """Return `ropelab.rotary_frequencies` ``[R/2, 3]`` in rad per position, modulo a turn, in float64."""
    high, low, _ = frequencies.unbind(-1)
    return 2 * math.pi * (high.double() + low.double() / 2.0**32) / 2.0**64


def as_rope_and_cache(operator: Operator) -> Callable[..., Any]:
    """Return the operator in the convention of `ropelab.rope_and_cache`."""

    def rope_and_cache(
        q, k, v, key_cache, value_cache, slot_mapping, *, cos=None, sin=None, frequencies=None, positions, layout,
        q_weight=None, k_weight=None, eps=1e-6, weight_offset=0.0, norm_first=True, q_out=None, k_out=None,
        q_scale=None, k_scale=None, v_scale=None, q_scale_out=None, k_scale_cache=None, v_scale_cache=None,
    ):  # fmt: skip
        made_scales = None if q_scale_out is None else (q_scale_out, k_scale_cache, v_scale_cache)
        weights = () if q_weight is None else (q_weight, k_weight)
        turned, k = operator(
            q, k, v, key_cache, value_cache, slot_mapping, cos=cos, sin=sin, frequencies=frequencies,
            positions=positions, layout=layout, weights=weights, norm_last=not norm_first, eps=eps,
            offset=weight_offset, scales=(q_scale, k_scale, v_scale),
            q_dtype=None if q_out is None else q_out.dtype, made_scales=made_scales,
        )  # fmt: skip
        if k_out is not None:
            k_out.copy_(k)
        return turned if q_out is None else q_out.copy_(turned)

    return rope_and_cache


def as_mla_rope_and_cache(operator: Operator) -> Callable[..., Any]:
    """Return the operator in the convention of `ropelab.mla_rope_and_cache`."""

    def mla_rope_and_cache(
        q_pe, k_pe, kv_c, kv_cache, slot_mapping, *, cos=None, sin=None, frequencies=None, positions, layout,
        k_out=None, kv_scale=None,
    ):  # fmt: skip
        entries, latent = kv_cache.unsqueeze(2), kv_c.shape[-1]
        turned, k = operator(
            q_pe, k_pe[:, None], kv_c[:, None], entries[..., latent:], entries[..., :latent], slot_mapping,
            cos=cos, sin=sin, frequencies=frequencies, positions=positions, layout=layout,
            scales=(None, kv_scale, kv_scale),
        )  # fmt: skip
        if k_out is not None:
            k_out.copy_(k[:, 0])
        return turned

    return mla_rope_and_cache


def as_fused_qknorm_rope_cache(operator: Operator) -> Callable[..., Any]:
    """Return the operator in the convention of vLLM's ``fused_qknorm_rope_cache``."""

    def fused_qknorm_rope_cache(
        q_out, k_out, v_out, qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, head_dim,
        num_q_heads, num_kv_heads, rotary_pairs, epsilon, norm_weight_bias, kv_cache_dtype="auto", k_scale=None,
        v_scale=None,
    ):  # fmt: skip
        heads = (num_q_heads, num_kv_heads, num_kv_heads)
        q, k, v = qkv.unflatten(-1, (-1, head_dim)).split(heads, dim=1)
        key_cache, value_cache = (_typed(cache, kv_cache_dtype) for cache in (k_cache, v_cache))
        turned, k = operator(
            q, k, v, key_cache, value_cache, slot_mapping, cos=cos, sin=sin, positions=positions,
            weights=(q_weight, k_weight), eps=epsilon, offset=norm_weight_bias, scales=(None, k_scale, v_scale),
        )  # fmt: skip
        for out, y in ((q_out, turned), (k_out, k), (v_out, v)):
            out.copy_(y.flatten(1))

    return fused_qknorm_rope_cache


def as_fused_qk_norm_rope(operator: Operator) -> Callable[..., Any]:
    """Return the operator in the convention of vLLM's ``fused_qk_norm_rope``."""

    def fused_qk_norm_rope(
        qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox,
        position_ids,
    ):  # fmt: skip
        q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((num_heads_q, num_heads_k, num_heads_v), dim=1)
        cos, sin = cos_sin_cache.chunk(2, dim=-1)
        caches, slots = (k.clone()[None], v.clone()[None]), torch.arange(len(qkv), device=qkv.device)
        turned, k_turned = operator(
            q, k, v, *caches, slots, cos=cos, sin=sin, positions=position_ids, weights=(q_weight, k_weight), eps=eps,
            layout="split_half" if is_neox else "interleaved",
        )  # fmt: skip
        q.copy_(turned)
        k.copy_(k_turned)

    return fused_qk_norm_rope


def as_fused_qk_norm_rope_of_base(operator: Operator) -> Callable[..., Any]:
    """Return the operator in the convention of SGLang's ``fused_qk_norm_rope``."""
    fused_qk_norm_rope = as_fused_qk_norm_rope(operator)

    def with_base(
        qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, base, is_neox, position_ids,
        factor, low, high, attention_factor, rotary_dim,
    ):  # fmt: skip
        frequencies = inverse_frequencies(rotary_dim, base).to(qkv.device)
        if factor != 1:
            pairs = torch.arange(len(frequencies), dtype=torch.float64, device=qkv.device)
            share = ((pairs - low) / (high - low)).clamp(0, 1)
            frequencies = frequencies * (1 - share) + frequencies / factor * share
        rows = int(position_ids.max()) + 1 if len(position_ids) else 0
        angles = torch.arange(rows, device=qkv.device)[:, None] * frequencies
        cache = attention_factor * torch.cat((angles.cos(), angles.sin()), dim=-1)
        fused_qk_norm_rope(
            qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cache, is_neox, position_ids
        )

    return with_base


def as_concat_and_cache_mla_rope_fused(operator: Operator) -> Callable[..., Any]:
    """Return the operator in the convention of vLLM's ``concat_and_cache_mla_rope_fused``."""
    mla = as_mla_rope_and_cache(operator)

    def concat_and_cache_mla_rope_fused(
        positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale
    ):
        cos, sin = cos_sin_cache.chunk(2, dim=-1)
        q_pe.copy_(
            mla(
                q_pe, k_pe.clone(), kv_c, _typed(kv_cache, kv_cache_dtype), slot_mapping, cos=cos, sin=sin,
                positions=positions, layout="split_half" if is_neox else "interleaved", k_out=k_pe,
                kv_scale=kv_cache_scale,
            )
        )  # fmt: skip

    return concat_and_cache_mla_rope_fused


def as_rope_quantize_fp8_append_paged_kv_cache(operator: Operator) -> Callable[..., Any]:
    """Return the operator in the convention of FlashInfer's ``rope_quantize_fp8_append_paged_kv_cache``."""

    def rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, paged_kv_cache, kv_indices, kv_indptr,
        batch_indices, positions, is_neox=True, quantize_dtype=None, quant_scale_q=1.0, quant_scale_kv=1.0,
        page_size=16, kv_layout="NHD", q_rope_out=None, q_nope_out=None,
    ):  # fmt: skip
        key_cache, value_cache = (cache.transpose(1, 2) if kv_layout == "HND" else cache for cache in paged_kv_cache)
        page = kv_indptr[batch_indices.clamp(min=0)] + positions // page_size
        slots = kv_indices[page].long() * page_size + positions % page_size
        slots = torch.where(batch_indices < 0, -1, slots)
        scales = (torch.tensor(1 / scale, device=v.device) for scale in (quant_scale_q, quant_scale_kv, quant_scale_kv))
        cos, sin = cos_sin_cache.chunk(2, dim=-1)
        q, k = torch.cat((q_rope, q_nope), dim=-1), torch.cat((k_rope, k_nope), dim=-1)
        turned, _ = operator(
            q, k, v, key_cache, value_cache, slots, cos=cos, sin=sin, positions=pos_ids, scales=tuple(scales),
            layout="split_half" if is_neox else "interleaved", q_dtype=quantize_dtype,
        )  # fmt: skip
        rotary_dim = q_rope.shape[-1]
        q_rope_out.view(torch.uint8).copy_(turned[..., :rotary_dim].view(torch.uint8))
        q_nope_out.view(torch.uint8).copy_(turned[..., rotary_dim:].view(torch.uint8))
        return q_rope_out, q_nope_out

    return rope_quantize_fp8_append_paged_kv_cache


def as_rotate_cached_keys(operator: Operator) -> Callable[..., Any]:
    """Return the operator in the convention of `ropelab.rotate_cached_keys`."""

    def rotate_cached_keys(key_cache, slots, deltas, **options):
        return operator.turn_again(key_cache, slots, deltas, **options)

    return rotate_cached_keys


FORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "rope_and_cache": as_rope_and_cache,
    "rope_and_cache_row_scales": as_rope_and_cache,
    "rotate_cached_keys": as_rotate_cached_keys,
    "mla_rope_and_cache": as_mla_rope_and_cache,
    "fused_qknorm_rope_cache": as_fused_qknorm_rope_cache,
    "fused_qk_norm_rope": as_fused_qk_norm_rope,
    "sglang_fused_qk_norm_rope": as_fused_qk_norm_rope_of_base,
    "concat_and_cache_mla_rope_fused": as_concat_and_cache_mla_rope_fused,
    "rope_quantize_fp8_append_paged_kv_cache": as_rope_quantize_fp8_append_paged_kv_cache,
    **BLOCK_FORMS,
}
"""Convention -> the function that gives an operator that form."""

CORRECT: dict[str, Callable[..., Any]] = {
    name: form(BlockScaled() if name in BLOCK_FORMS else Operator()) for name, form in FORMS.items()
}
"""Convention -> a right function."""


def _typed(cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    if kv_cache_dtype == "auto":
        return cache
    return cache.view(FLOAT8_DTYPES[1] if kv_cache_dtype == "fp8_e5m2" else FLOAT8_DTYPES[0])
