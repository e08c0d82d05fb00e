"""The operators of vLLM that rotate and write into a paged cache, over `ropelab.rope_and_cache`.

The functions have the names and the order of arguments of ``torch.ops._C.fused_qknorm_rope_cache`` and
``torch.ops._C_cache_ops.concat_and_cache_mla_rope_fused`` in vLLM 0.33.0. The functions differ from the operators:

- They take every head size, every number of pairs, both layouts of strides and dtypes, and tables in any dtype.
- The arithmetic is in float32 or wider. vLLM's operator for MLA computes in the dtype of q.
- A slot beyond the cache is skipped, as a negative slot is. vLLM's operators write out of bounds there.
- ``concat_and_cache_mla_rope_fused`` rotates q_pe and k_pe of every token in place. vLLM's operator leaves both as
  they were for a token without a slot.
"""

from typing import Any

import torch

from ropelab.arguments import (
    POSITION_DTYPES,
    check_shape,
    check_tensor,
    choice,
    dtype_name,
    flag,
    integer,
    single,
    tensor,
)
from ropelab.call.refusals import in_words
from ropelab.call.traced import one_node
from ropelab.paged_cache import mla_rope_and_cache, rope_and_cache

_FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KV_CACHE_DTYPES = ("auto", *_FLOAT8)
"""The values of ``kv_cache_dtype``: "auto" for a cache in the dtype of the keys, or the format of 8-bit floats."""


@one_node
def fused_qknorm_rope_cache(
    q_out: torch.Tensor,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    rotary_pairs: int,
    epsilon: float,
    norm_weight_bias: float,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Normalize and rotate the heads of q and k in a packed qkv, and write q, k, v and both caches, in one pass.

    Args:
        q_out, k_out, v_out: ``[T, H * D]`` or ``[T, H, D]``, overwritten with the rotated q, the rotated k, and v.
            ``k_out`` and ``v_out`` may be None, unlike in vLLM: then only the caches get k and v.
        qkv: ``[T, (Hq + 2 Hk) D]``: the heads of q, of k and of v; any strides that keep the features adjacent.
        q_weight, k_weight: ``[D]``, of one floating dtype; the norm multiplies by ``norm_weight_bias`` plus the weight.
        cos, sin: ``[P, rotary_pairs]``; the pairs are ``(i, i + rotary_pairs)``.
        positions: ``[T]`` or longer, int32 or int64.
        slot_mapping, k_cache, v_cache: as for `ropelab.rope_and_cache`; a cache in 8-bit floats may be uint8.
        head_dim, num_q_heads, num_kv_heads: D, Hq and Hk.
        rotary_pairs: the number of pairs of the leading features that rotate; 0 for a norm without a rotation.
        epsilon: a number of at least 0, added to the mean of the squares.
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
        k_scale, v_scale: as for `ropelab.rope_and_cache`; ignored for ``"auto"``.

    Raises:
        TypeError, ValueError: as `ropelab.rope_and_cache`.

    Source: vLLM 0.33.0, ``torch.ops._C.fused_qknorm_rope_cache``.
    """
    check_tensor("qkv", qkv, (2,), "[tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]")
    head_dim = integer("head_dim", head_dim, at_least=1)
    q_heads = integer("num_q_heads", num_q_heads, at_least=0)
    kv_heads = integer("num_kv_heads", num_kv_heads, at_least=0)
    if qkv.shape[1] != (q_heads + 2 * kv_heads) * head_dim:
        raise ValueError(
            f"qkv: expected {(q_heads + 2 * kv_heads) * head_dim} columns for {q_heads} + 2 * {kv_heads} heads of "
            f"{head_dim} features, got {qkv.shape[1]}"
        )
    pairs = integer("rotary_pairs", rotary_pairs, at_least=0)
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, ("positions", pairs), qkv, "qkv")
    where: dict[str, Any] = {"cos": cos, "sin": sin, "positions": _of_tokens(positions, len(qkv))}
    if not pairs:  # nothing rotates: every token turns one pair by an angle of 0
        still = torch.zeros((len(qkv), 1), device=qkv.device)
        where = {"cos": still + 1, "sin": still}
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((q_heads, kv_heads, kv_heads), dim=1)
    q_out = _with_heads("q_out", q_out, head_dim)
    k_out = None if k_out is None else _with_heads("k_out", k_out, head_dim)
    v_out = None if v_out is None else _with_heads("v_out", v_out, head_dim)
    k_cache, k_scale = cache_in_its_dtype("k_cache", k_cache, kv_cache_dtype, k_scale, qkv.dtype)
    v_cache, v_scale = cache_in_its_dtype("v_cache", v_cache, kv_cache_dtype, v_scale, qkv.dtype)
    in_words(rope_and_cache, q="qkv", k="qkv", v="qkv", key_cache="k_cache", value_cache="v_cache")(
        q, k, v, k_cache, v_cache, slot_mapping, **where,
        q_weight=q_weight, k_weight=k_weight, eps=single("epsilon", epsilon, at_least=0),
        weight_offset=single("norm_weight_bias", norm_weight_bias),
        q_out=q_out, k_out=k_out, v_out=v_out, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


@one_node
def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: torch.Tensor | None,
) -> None:
    """Rotate q_pe and k_pe in place, and write kv_c and the rotated k_pe into the latent cache, in one pass.

    Args:
        positions: ``[T]`` or longer, int32 or int64.
        q_pe: ``[T, H, R]``, overwritten.
        k_pe: ``[T, R]`` or ``[T, 1, R]``, overwritten.
        kv_c: ``[T, L]``.
        cos_sin_cache: ``[P, R]``: the cosines of the R/2 pairs, then the sines; any floating dtype.
        is_neox: pairs are ``(i, i + R/2)``; otherwise ``(2i, 2i+1)``.
        slot_mapping: as for `ropelab.mla_rope_and_cache`.
        kv_cache: ``[blocks, block_size, L + R]``; a cache in 8-bit floats may be uint8.
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
        kv_cache_scale: float32 with one element, or None for 1; ignored for ``"auto"``.

    Raises:
        TypeError, ValueError: as `ropelab.mla_rope_and_cache`.

    Source: vLLM 0.33.0, ``torch.ops._C_cache_ops.concat_and_cache_mla_rope_fused``.
    """
    check_tensor("q_pe", q_pe, (3,), "[tokens, heads, rotary_dim]")
    check_shape("cos_sin_cache", cos_sin_cache, ("positions", q_pe.shape[2]), q_pe, "q_pe")
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    kv_cache, scale = cache_in_its_dtype("kv_cache", kv_cache, kv_cache_dtype, kv_cache_scale, q_pe.dtype)
    words = {"cos": "cos_sin_cache", "sin": "cos_sin_cache", "kv_scale": "kv_cache_scale"}
    in_words(mla_rope_and_cache, **words, q_out="q_pe", k_out="k_pe")(
        q_pe, k_pe, kv_c, kv_cache, slot_mapping, cos=cos, sin=sin, positions=_of_tokens(positions, len(q_pe)),
        layout="split_half" if flag("is_neox", is_neox) else "interleaved",
        q_out=q_pe, k_out=k_pe, kv_scale=scale,
    )  # fmt: skip


def _with_heads(name: str, x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """``x [T, H * D]`` or ``[T, H, D]`` as ``[T, H, D]``."""
    if tensor(name, x).ndim != 2:
        return x
    if x.shape[1] % head_dim:
        raise ValueError(f"{name}: expected a multiple of head_dim = {head_dim} columns, got {x.shape[1]}")
    return x.unflatten(-1, (-1, head_dim))


def _of_tokens(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """The positions of ``tokens`` tokens; a graph of CUDA may pad the positions."""
    check_tensor("positions", positions, (1,), "[tokens]", POSITION_DTYPES)
    if len(positions) < tokens:
        raise ValueError(f"positions: expected a position for each of {tokens} tokens, got {len(positions)}")
    return positions[:tokens]


def cache_in_its_dtype(
    name: str, cache: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cache in its dtype, and the scale, which a cache in the ``dtype`` of the keys does not have.

    Raises:
        ValueError: ``kv_cache_dtype`` is none of `KV_CACHE_DTYPES`.
        TypeError: the cache has another dtype.
    """
    choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    float8 = _FLOAT8.get(kv_cache_dtype)
    dtypes = {dtype} if float8 is None else {torch.uint8, float8}
    if tensor(name, cache).dtype not in dtypes:
        expected = " or ".join(sorted(map(dtype_name, dtypes), reverse=True))
        raise TypeError(
            f"{name}: expected {expected} for kv_cache_dtype = {kv_cache_dtype!r}, got {dtype_name(cache.dtype)}"
        )
    return (cache, None) if float8 is None else (cache.view(float8), scale)
