"""The calling conventions of operators that rotate and write a paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.cache.block_scales import BLOCK_SCALES
from ropelab.conformance.cache.case import bits, in_request
from ropelab.conformance.cache.convention import CacheConvention, Written, is_float8, positions_of
from ropelab.conformance.case import Broken, NotApplicable
from ropelab.conformance.convention import Arguments
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8

ROW_SCALES = "q_scale_out", "k_scale_cache", "v_scale_cache"
UNWRITTEN = 3.0
"""What the tensors of made scales hold before the call."""


class RopeAndCache(CacheConvention):
    """The convention of `ropelab.rope_and_cache`."""

    name = "rope_and_cache"
    signature = (
        "fn(q, k, v, key_cache, value_cache, slot_mapping, *, cos, sin, positions, layout, q_weight, k_weight, eps, "
        "weight_offset, q_out, k_out, k_scale, v_scale) -> q_out, with frequencies in place of cos and sin if it is "
        "table-free, and norm_first=False if its norm is last"
    )
    norm = True
    optional_norm = True
    offset = True
    widths_differ = True
    variants = frozenset({"norm_last", "norm_across", "table_free"})

    def arguments(self, implementation, case, key_cache, value_cache):
        q, k, v = (x[0] for x in case.inputs)
        options = _options(self, implementation, case, k)
        if case.weights:
            options |= {"q_weight": case.weights[0], "k_weight": case.weights[1], "eps": case.eps}
        if case.weights and case.norm_last:
            options["norm_first"] = False
        if case.weight_offset:
            options["weight_offset"] = case.weight_offset
        if case.q_dtype is not None:
            options |= {"q_out": torch.empty_like(q, dtype=case.q_dtype), "q_scale": _scale(q, case.scales[0])}
        if is_float8(key_cache):
            options |= {"k_scale": _scale(q, case.scales[1]), "v_scale": _scale(q, case.scales[2])}
        positional = (q, k, v, key_cache, value_cache, case.slots.clone())
        changed = key_cache, value_cache, *(options[name] for name in ("k_out", "q_out") if name in options)
        return Arguments(changed, positional, options)

    def outputs(self, case, returned, arguments, memory):
        return Written(_heads(self, returned, case), arguments.keywords["k_out"], memory)


class RopeAndCacheWithRowScales(RopeAndCache):
    """The convention of `ropelab.rope_and_cache` for scales that the call makes, with 8-bit floats throughout."""

    name = "rope_and_cache_row_scales"
    signature = RopeAndCache.signature.replace(
        "k_scale, v_scale", "q_scale_out, k_scale_cache, v_scale_cache, all of float32"
    )
    float8_only = True
    scales_differ = False
    row_scales = True

    def arguments(self, implementation, case, key_cache, value_cache):
        found = super().arguments(implementation, case, key_cache, value_cache)
        options = {name: x for name, x in found.keywords.items() if name not in ("q_scale", "k_scale", "v_scale")}
        q = case.inputs[0][0]
        shapes = q.shape[:2], key_cache.shape[:3], value_cache.shape[:3]
        made = [torch.full(shape, UNWRITTEN, device=q.device) for shape in shapes]
        options |= dict(zip(ROW_SCALES, made, strict=True))
        return Arguments((*found.inputs, *made), found.positional, options)

    def outputs(self, case, returned, arguments, memory):
        q, k_scales, v_scales = (arguments.keywords[name] for name in ROW_SCALES)
        return replace(super().outputs(case, returned, arguments, memory), scales=(q, k_scales, v_scales))


class RotateCachedKeys(CacheConvention):
    """The convention of `ropelab.rotate_cached_keys`: k lies in the slots of its tokens, and turns there.

    v lies in the slots of the other cache, which the operator does not get. The positions are the deltas.
    """

    name = "rotate_cached_keys"
    signature = "fn(key_cache, slots, deltas, *, cos, sin, layout), in place, with frequencies if it is table-free"
    variants = frozenset({"table_free"})
    fewer_slots = False
    whole_tokens = True
    turns_cached = True
    queries = False
    signed = True

    def arguments(self, implementation, case, key_cache, value_cache):
        tokens, slots = case.live.to(case.slots.device), case.slots[case.slots >= 0]
        scales = case.scales[1:] if is_float8(key_cache) else (None, None)
        for cache, x, scale in zip((key_cache, value_cache), case.inputs[1:], scales, strict=True):
            rows = x[0, tokens]
            rows = rows.to(cache.dtype) if scale is None else to_float8(rows.float() / scale, cache.dtype)
            bits(cache)[slots // cache.shape[1], slots % cache.shape[1]] = bits(rows)
        options = {**self.angles(implementation, case), "layout": implementation.layout}
        return Arguments((key_cache,), (key_cache, case.slots.clone(), positions_of(implementation, case)), options)

    def outputs(self, case, returned, arguments, memory):
        return Written(None, None, memory)


class LatentRopeAndCache(CacheConvention):
    """The convention of `ropelab.mla_rope_and_cache`."""

    name = "mla_rope_and_cache"
    signature = "fn(q_pe, k_pe, kv_c, kv_cache, slot_mapping, *, cos, sin, positions, layout, k_out, kv_scale) -> q_out"
    latent = True
    variants = frozenset({"table_free"})
    partial = False
    scales_differ = False
    orders = ("NHD", "layers")

    def arguments(self, implementation, case, key_cache, value_cache):
        q, k, v = _latent_inputs(case)
        options = _options(self, implementation, case, k)
        if is_float8(key_cache):
            options["kv_scale"] = _scale(q, case.scales[1])
        cache = _entries(key_cache, value_cache)
        return Arguments((cache, options["k_out"]), (q, k, v, cache, case.slots.clone()), options)

    def outputs(self, case, returned, arguments, memory):
        return Written(_heads(self, returned, case), arguments.keywords["k_out"][:, None], memory)


class FusedQKNormRopeCache(CacheConvention):
    """The convention of vLLM's ``fused_qknorm_rope_cache``: a packed qkv, halves, and three tensors for the results.

    Both caches have the same strides. Source of the signature: vLLM 0.33.0, ``torch.ops._C``.
    """

    name = "fused_qknorm_rope_cache"
    signature = (
        "fn(q_out, k_out, v_out, qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, "
        "head_dim, num_q_heads, num_kv_heads, rotary_pairs, epsilon, norm_weight_bias, kv_cache_dtype, k_scale, "
        "v_scale)"
    )
    norm = True
    offset = True
    variants = frozenset({"norm_last", "norm_across"})
    narrow = True
    orders = ("NHD", "HND", "layers")
    layouts = ("split_half",)

    def arguments(self, implementation, case, key_cache, value_cache):
        q, k, v = (x[0] for x in case.inputs)
        outs = tuple(torch.empty_like(x.flatten(1)) for x in (q, k, v))
        cos, sin = self.tables(implementation, case)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        kind, caches = _kind(key_cache), tuple(map(_as_bytes, (key_cache, value_cache)))
        positional = (
            *outs, qkv, *case.weights, cos, sin, positions_of(implementation, case), case.slots.clone(), *caches,
            q.shape[-1], q.shape[1], k.shape[1], cos.shape[-1], case.eps, case.weight_offset, kind,
            _scale(q, case.scales[1]), _scale(q, case.scales[2]),
        )  # fmt: skip
        return Arguments((*outs, *caches), positional)

    def outputs(self, case, returned, arguments, memory):
        q, k, v = (x.unflatten(-1, like.shape[2:]) for x, like in zip(arguments.inputs, case.inputs, strict=False))
        return Written(q, k, memory, v)


class FusedQKNormRope(CacheConvention):
    """The convention of vLLM's ``fused_qk_norm_rope``: q and k of a packed qkv, in place, and no cache.

    The laws check the rows of k and v as if they were rows of caches. Source of the signature: vLLM 0.24.0,
    ``vllm/_custom_ops.py``.
    """

    name = "fused_qk_norm_rope"
    signature = (
        "fn(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox, "
        "position_ids), in place"
    )
    norm = True
    narrow = True
    addressed = False
    fewer_slots = False
    orders = ("NHD",)

    def arguments(self, implementation, case, key_cache, value_cache):
        if is_float8(key_cache) or not torch.equal(case.slots.cpu(), torch.arange(case.tokens)):
            raise NotApplicable(f"{self.name}: it writes no cache, and tokens have no slots")
        q, k, v = (x[0] for x in case.inputs)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        positional = (
            qkv, q.shape[1], k.shape[1], v.shape[1], q.shape[-1], case.eps, *case.weights,
            torch.cat(self.tables(implementation, case), dim=-1), implementation.layout == "split_half",
            positions_of(implementation, case),
        )  # fmt: skip
        return Arguments((qkv,), positional)

    def outputs(self, case, returned, arguments, memory):
        heads = [x.shape[2] for x in case.inputs]
        q, k, v = arguments.inputs[0].unflatten(-1, (sum(heads), -1)).split(heads, dim=1)
        for cache, rows in zip(case.caches(memory), (k, v), strict=True):
            cache[0, : len(rows)] = rows
        return Written(q, k, memory, v)


class FusedQKNormRopeOfBase(FusedQKNormRope):
    """The convention of SGLang's ``fused_qk_norm_rope``: as vLLM's, with a base and YaRN's numbers for the cache.

    Frequencies below ``low`` stay as they are, those above ``high`` are divided by the factor, and those between are
    mixed. Source of the signature: sglang, ``sgl-kernel/csrc/moe/fused_qknorm_rope_kernel.cu``.
    """

    name = "sglang_fused_qk_norm_rope"
    signature = (
        "fn(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, base, is_neox, "
        "position_ids, factor, low, high, attention_factor, rotary_dim), in place"
    )
    own_angles = True
    narrow = False

    def arguments(self, implementation, case, key_cache, value_cache):
        given = super().arguments(implementation, case, key_cache, value_cache)
        *first, _, is_neox, positions = given.positional
        positional = (*first, implementation.base, is_neox, positions.int(), *case.yarn, case.rotary_dim)
        return Arguments(given.inputs, positional)


class ConcatAndCacheMLA(CacheConvention):
    """The convention of vLLM's ``concat_and_cache_mla_rope_fused``: q_pe and k_pe in place, and one latent cache.

    The operator need not rotate a token without a slot. Source of the signature: vLLM 0.33.0,
    ``torch.ops._C_cache_ops``.
    """

    name = "concat_and_cache_mla_rope_fused"
    signature = (
        "fn(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache, kv_cache_dtype, "
        "kv_cache_scale), in place"
    )
    latent = True
    partial = False
    narrow = True
    scales_differ = False
    whole_tokens = True
    orders = ("NHD", "layers")

    def arguments(self, implementation, case, key_cache, value_cache):
        q, k, v = _latent_inputs(case)
        q, k = q.clone(), k.clone()
        cache = _as_bytes(_entries(key_cache, value_cache))
        positional = (
            positions_of(implementation, case), q, k, v, torch.cat(self.tables(implementation, case), dim=-1),
            implementation.layout == "split_half", case.slots.clone(), cache, _kind(key_cache),
            _scale(q, case.scales[1]),
        )  # fmt: skip
        return Arguments((q, k, cache), positional)

    def outputs(self, case, returned, arguments, memory):
        q, k, _ = arguments.inputs
        return Written(q, k[:, None], memory)


class RopeQuantizeAppend(CacheConvention):
    """The convention of FlashInfer's ``rope_quantize_fp8_append_paged_kv_cache`` for keys and values with heads.

    A page table says where a token belongs: here every token has a page of its own in the table of its request. A
    token without a slot has the request -1. The scales are factors. Source of the signature: flashinfer-python
    0.7.2.post1, ``flashinfer/rope.py``.
    """

    name = "rope_quantize_fp8_append_paged_kv_cache"
    signature = (
        "fn(q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, paged_kv_cache, kv_indices, kv_indptr, "
        "batch_indices, positions, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv, page_size, kv_layout, "
        "q_rope_out, q_nope_out)"
    )
    float8_only = scales_multiply = True
    scales_differ = False
    whole_tokens = True
    fewer_slots = False
    orders = ("NHD", "HND")

    def arguments(self, implementation, case, key_cache, value_cache):
        q, k, v = (x[0] for x in case.inputs)
        turned = case.rotary_dim
        dtype = key_cache.dtype
        q_out = torch.empty_like(q, dtype=dtype)
        hnd = key_cache.shape[1] > 1 and key_cache.stride(1) < key_cache.stride(2)
        caches = (key_cache.transpose(1, 2), value_cache.transpose(1, 2)) if hnd else (key_cache, value_cache)
        options = {
            "is_neox": implementation.layout == "split_half", "quantize_dtype": dtype,
            "quant_scale_q": 1 / case.scales[0], "quant_scale_kv": 1 / case.scales[1],
            "page_size": key_cache.shape[1], "kv_layout": "HND" if hnd else "NHD",
            "q_rope_out": q_out[..., :turned], "q_nope_out": q_out[..., turned:],
        }  # fmt: skip
        positional = (
            q[..., :turned], k[..., :turned], q[..., turned:], k[..., turned:], v,
            torch.cat(self.tables(implementation, case), dim=-1),
            positions_of(implementation, case).int(), caches, *_pages(case, key_cache.shape[1], q.device),
        )  # fmt: skip
        return Arguments((q_out, *caches), positional, options)

    def outputs(self, case, returned, arguments, memory):
        return Written(arguments.inputs[0], None, memory)

    def tables(self, implementation, case):
        cos, sin = super().tables(implementation, case)
        return cos.float(), sin.float()

    def divisor(self, scale):
        return float(1 / np.float64(np.float32(1 / scale)))


CACHE_CONVENTIONS: dict[str, CacheConvention] = {
    c.name: c
    for c in (
        RopeAndCache(),
        RopeAndCacheWithRowScales(),
        RotateCachedKeys(),
        LatentRopeAndCache(),
        FusedQKNormRopeCache(),
        FusedQKNormRope(),
        FusedQKNormRopeOfBase(),
        ConcatAndCacheMLA(),
        RopeQuantizeAppend(),
        *BLOCK_SCALES,
    )  # fmt: skip
}
"""Name -> convention."""


def _options(convention: CacheConvention, implementation, case, k: torch.Tensor) -> dict[str, Any]:
    """Return the keyword arguments that ropelab's operators share."""
    return {
        **convention.angles(implementation, case), "positions": positions_of(implementation, case),
        "layout": implementation.layout, "k_out": torch.empty_like(k),
    }  # fmt: skip


def _scale(q: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.tensor([scale], dtype=torch.float32, device=q.device)


def _kind(cache: torch.Tensor) -> str:
    """Return vLLM's name for the dtype of a cache."""
    return dict(zip(FLOAT8_DTYPES, ("fp8_e4m3", "fp8_e5m2"), strict=True)).get(cache.dtype, "auto")


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8) if is_float8(cache) else cache


def _latent_inputs(case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q_pe ``[T, H, R]``, k_pe ``[T, R]`` and kv_c ``[T, L]``."""
    q, k, v = (x[0] for x in case.inputs)
    return q, k[:, 0], v[:, 0]


def _entries(key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
    """Return the latent cache ``[blocks, block_size, L + R]``, which begins with the value cache."""
    blocks, size, _, latent = value_cache.shape
    entry = latent + key_cache.shape[-1]
    return value_cache.as_strided((blocks, size, entry), (*value_cache.stride()[:2], 1))


def _pages(case, page_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return kv_indices, kv_indptr, batch_indices and positions for two requests; token i is in request i % 2."""
    slots = case.slots.cpu()
    request = torch.arange(len(slots)) % 2
    count = torch.bincount(request, minlength=2)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), count.cumsum(0)))
    page_of_request = torch.arange(len(slots)) // 2
    indices = torch.empty(len(slots), dtype=torch.int64)
    indices[indptr[request] + page_of_request] = slots.clamp(min=0) // page_size
    positions = in_request(slots, page_size)
    request = torch.where(slots < 0, -1, request)
    return tuple(x.to(device, torch.int32) for x in (indices, indptr, request, positions))


def _heads(convention: CacheConvention, q: Any, case) -> torch.Tensor:
    """Return the result for q, or raise Broken if the function returned something else."""
    wanted = case.inputs[0].shape[1:]
    if not isinstance(q, torch.Tensor) or q.shape != wanted:
        got = tuple(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        raise Broken(f"the function, called as {convention.signature}, returned {got}, expected {tuple(wanted)}")
    return q
