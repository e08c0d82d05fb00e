"""This file holds FlashInfer's function that rotates, quantizes and appends to a paged cache, over `rope_and_cache`.

The function has the name and the arguments of ``flashinfer.rope_quantize_fp8_append_paged_kv_cache`` in FlashInfer
0.7.2. The function differs from FlashInfer's:

- It takes every head size, both layouts of strides and dtypes, tables in any dtype, and caches in any dtype; the dtype
  of the caches need not be the dtype of q's results.
- FlashInfer finds a token's place in the cache in its kernel. Here `slot_mapping` finds it by torch operations, in a
  few launches. A caller who computes the slots once for all layers calls `ropelab.rope_and_cache` itself.
- The result for k is rounded to the dtype of k before it becomes an 8-bit float, as if a separate launch had written
  it. A scale ``s`` of FlashInfer multiplies; ropelab divides by the float32 nearest to ``1 / s``. Both differ from
  FlashInfer's bits by a rounding.
- q of a token with a negative batch index is rotated too. FlashInfer leaves its results unwritten.
- The rotated and the other features of a head of GQA should be neighbours in the memory of one tensor, in this order.
  Inputs that are not neighbours are concatenated first, and outputs that are not neighbours are copied afterwards.
"""

import torch

from ropelab.arguments import POSITION_DTYPES, check_tensor, choice, flag, integer, number, tensor
from ropelab.interop.refusals import renamed
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.paged_cache import rope_and_cache

_WORDS = {
    "q": "q_rope", "k": "k_rope", "key_cache": "paged_kv_cache[0]", "value_cache": "paged_kv_cache[1]",
    "cos": "cos_sin_cache", "sin": "cos_sin_cache", "q_out": "q_rope_out", "positions": "pos_ids",
    "q_scale": "quant_scale_q", "k_scale": "quant_scale_kv", "v_scale": "quant_scale_kv",
}  # fmt: skip


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k, convert q, k and v to 8-bit floats, and append k and v to a paged cache.

    Args:
        q_rope: ``[T, Hq, R]``, the features of q that rotate.
        k_rope: ``[T, Hk, R]``; or ``[T, R]`` for multi-head latent attention, whose heads share the key.
        q_nope: ``[T, Hq, N]``, the features of q that do not rotate; or None.
        k_nope: ``[T, Hk, N]``, or ``[T, N]``: the latent vector; or None.
        v: ``[T, Hk, Dv]``; None for multi-head latent attention.
        cos_sin_cache: ``[P, R]``: the cosines of the R/2 pairs, then the sines; any floating dtype.
        pos_ids: ``[T]`` of int32 or int64, the positions of the rotation.
        paged_kv_cache: ``(k_cache, v_cache)``, each ``[pages, page_size, Hk, R + N]`` (NHD) or ``[pages, Hk, page_size,
            R + N]`` (HND), where the rotated features come first; or ``(ckv_cache, kpe_cache)``, ``[pages, page_size,
            N]`` and ``[pages, page_size, R]``. The call overwrites the places of its tokens.
        kv_indices, kv_indptr, batch_indices, positions, page_size: as for `slot_mapping`.
        is_neox: pairs are ``(i, i + R/2)``; otherwise ``(2i, 2i+1)``.
        quantize_dtype: the dtype of the results for q: float8_e4m3fn or float8_e5m2; by default the dtype of
            ``q_rope_out`` or ``q_nope_out``, or float8_e4m3fn.
        quant_scale_q, quant_scale_kv: positive numbers by which q, and k and v, are multiplied before the conversion.
        kv_layout: ``"NHD"`` or ``"HND"``.
        q_rope_out, q_nope_out: as ``q_rope`` and ``q_nope`` in ``quantize_dtype``: tensors for the results.
        enable_pdl: accepted and ignored; it changes no result.

    Returns:
        The results for ``q_rope`` and for ``q_nope``; an empty tensor if there is no ``q_nope``.

    Raises:
        TypeError, ValueError: as `ropelab.rope_and_cache`.

    Source: FlashInfer 0.7.2, ``flashinfer/rope.py``.
    """
    check_tensor("q_rope", tensor("q_rope", q_rope), (3,), "[tokens, heads, rotary_dim]")
    check_tensor("k_rope", tensor("k_rope", k_rope), (2, 3), "[tokens, (heads,) rotary_dim]")
    flag("enable_pdl", enable_pdl)
    if tensor("cos_sin_cache", cos_sin_cache).ndim != 2 or cos_sin_cache.shape[1] != q_rope.shape[2]:
        raise ValueError(
            f"cos_sin_cache: expected shape [positions, {q_rope.shape[2]}], got {tuple(cos_sin_cache.shape)}"
        )
    k, v, key_cache, value_cache = _written(k_rope, k_nope, v, paged_kv_cache, kv_layout)
    if integer("page_size", page_size, at_least=1) != key_cache.shape[1]:
        raise ValueError(f"page_size: expected {key_cache.shape[1]}, the page size of the cache, got {page_size}")
    q_nope = None if q_nope is None or not q_nope.shape[-1] else q_nope
    outs = _outputs(q_rope, q_nope, q_rope_out, q_nope_out, quantize_dtype)
    heads: dict = {"q": q_rope, "q_out": outs[0]}
    if q_nope is not None and k_rope.ndim == 2:
        heads |= {"q_nope": q_nope, "q_nope_out": outs[1]}
    elif q_nope is not None:
        whole = _neighbours(*outs)
        whole_out = torch.empty((*q_rope.shape[:-1], k.shape[-1]), dtype=outs[0].dtype, device=q_rope.device)
        heads = {"q": _joined(q_rope, q_nope), "q_out": whole_out if whole is None else whole}
    slots = slot_mapping(kv_indices, kv_indptr, batch_indices, positions, page_size)
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    try:
        rope_and_cache(
            k=k, v=v, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots, cos=cos, sin=sin,
            positions=pos_ids, layout="split_half" if flag("is_neox", is_neox) else "interleaved",
            q_scale=_scale("quant_scale_q", quant_scale_q, outs[0]),
            k_scale=_scale("quant_scale_kv", quant_scale_kv, key_cache),
            v_scale=_scale("quant_scale_kv", quant_scale_kv, value_cache), **heads,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise renamed(error, **_WORDS) from error
    if "q_nope" not in heads and q_nope is not None and whole is None:
        for out, x in zip(outs, whole_out.split((q_rope.shape[-1], q_nope.shape[-1]), dim=-1), strict=True):
            out.copy_(x)
    return outs


def slot_mapping(
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """The slots of tokens in a paged cache, as `ropelab.rope_and_cache` takes them.

    Args:
        kv_indices: the pages of all requests, one request after the other.
        kv_indptr: ``[requests + 1]``, where the pages of each request begin in ``kv_indices``.
        batch_indices: ``[T]``, the request of each token; negative for a token that the cache does not get.
        positions: ``[T]``, the place of each token in its request.
        page_size: the number of places of a page.

    Returns:
        ``[T]``, int64; -1 for a token with a negative batch index.
    """
    for name, x in (("kv_indices", kv_indices), ("kv_indptr", kv_indptr), ("batch_indices", batch_indices),
                    ("positions", positions)):  # fmt: skip
        check_tensor(name, x, (1,), "one axis", POSITION_DTYPES)
    has_place = batch_indices >= 0
    first = kv_indptr[batch_indices.clamp_min(0)].long()
    place = torch.where(has_place, positions, 0).long()
    pages = kv_indices[torch.where(has_place, first + place // page_size, 0)].long()
    return torch.where(has_place, pages * page_size + place % page_size, -1)


def _written(k_rope, k_nope, v, caches, kv_layout: str):
    """k, v and their caches, as `ropelab.rope_and_cache` takes them."""
    if not isinstance(caches, (tuple, list)) or len(caches) != 2:
        raise ValueError(f"paged_kv_cache: expected a tuple of 2 tensors, got {type(caches).__name__}")
    first, second = (tensor(f"paged_kv_cache[{i}]", cache) for i, cache in enumerate(caches))
    choice("kv_layout", kv_layout, ("NHD", "HND"))
    if k_rope.ndim == 2:  # multi-head latent attention
        if v is not None:
            raise ValueError("v: expected None for k_rope of two axes (multi-head latent attention), got a tensor")
        check_tensor("k_nope", tensor("k_nope", k_nope), (2,), "[tokens, latent_dim]")
        for name, cache in (("paged_kv_cache[0]", first), ("paged_kv_cache[1]", second)):
            if cache.ndim != 3:
                raise ValueError(f"{name}: expected shape [pages, page_size, features], got {tuple(cache.shape)}")
        return k_rope.unsqueeze(1), k_nope.unsqueeze(1), second.unsqueeze(2), first.unsqueeze(2)
    tensor("v", v)
    if kv_layout == "HND":
        first, second = (cache.transpose(1, 2) if cache.ndim == 4 else cache for cache in (first, second))
    return _joined(k_rope, k_nope), v, first, second


def _joined(rope: torch.Tensor, nope: torch.Tensor | None) -> torch.Tensor:
    """The heads whose first features are ``rope`` and whose other features are ``nope``: a view if there is one."""
    if nope is None or not nope.shape[-1]:
        return rope
    whole = _neighbours(rope, nope)
    return torch.cat((rope, nope), dim=-1) if whole is None else whole


def _neighbours(rope: torch.Tensor, nope: torch.Tensor) -> torch.Tensor | None:
    """The view of the heads of which ``rope`` has the first features and ``nope`` the others; None if there is none."""
    x = rope.untyped_storage().data_ptr(), rope.stride(), rope.dtype, rope.shape[:-1], rope.storage_offset()
    y = nope.untyped_storage().data_ptr(), nope.stride(), nope.dtype, nope.shape[:-1], nope.storage_offset()
    if x[:-1] != y[:-1] or rope.stride(-1) != 1 or y[-1] != x[-1] + rope.shape[-1]:
        return None
    return rope.as_strided((*rope.shape[:-1], rope.shape[-1] + nope.shape[-1]), rope.stride())


def _outputs(q_rope, q_nope, q_rope_out, q_nope_out, dtype):
    """The tensors for the results for q: the given tensors, or new tensors."""
    if dtype is None:
        given = [x.dtype for x in (q_rope_out, q_nope_out) if x is not None]
        dtype = given[0] if given else FLOAT8_DTYPES[0]
    if dtype not in FLOAT8_DTYPES:
        raise TypeError(f"quantize_dtype: expected float8_e4m3fn or float8_e5m2, got {dtype}")
    for name, x in (("q_rope_out", q_rope_out), ("q_nope_out", q_nope_out)):
        if x is not None and x.dtype != dtype:
            raise TypeError(f"{name}: expected quantize_dtype {dtype}, got {x.dtype}")
    sizes = q_rope.shape[-1], 0 if q_nope is None else q_nope.shape[-1]
    new = torch.empty((*q_rope.shape[:-1], sum(sizes)), dtype=dtype, device=q_rope.device).split(sizes, dim=-1)
    return new[0] if q_rope_out is None else q_rope_out, new[1] if q_nope_out is None else q_nope_out


def _scale(name: str, factor: float, of: torch.Tensor) -> torch.Tensor | None:
    """The scale whose quotients are the products with ``factor``; None for 1 and for a tensor without a scale."""
    if number(name, factor) <= 0:
        raise ValueError(f"{name}: expected a positive number, got {factor}")
    if factor == 1 or of.dtype not in FLOAT8_DTYPES:
        return None
    return torch.full((1,), 1 / factor, dtype=torch.float32, device=of.device)
