"""FlashInfer's function that rotates, quantizes and appends to a paged cache, over `rope_and_cache`.

The function has the name and the arguments of ``flashinfer.rope_quantize_fp8_append_paged_kv_cache`` in FlashInfer
0.7.2. The function differs from FlashInfer's:

- It takes every head size, both layouts of strides and dtypes, tables in any dtype, and caches in any dtype; the dtype
  of the caches need not be the dtype of q's results.
- FlashInfer finds a token's place in the cache in its kernel. Here `slot_mapping` finds it by torch operations, in a
  few launches. A caller who computes the slots once for all layers calls `ropelab.rope_and_cache` itself.
- The result for k is rounded to the dtype of k before it becomes an 8-bit float, as if a separate launch had written
  it. A scale ``s`` of FlashInfer multiplies; ropelab divides by the float32 nearest to ``1 / s``. Both differ from
  FlashInfer's bits by a rounding.
- A token whose place is not in the pages of its request is refused in CPU memory, and skipped on a GPU. FlashInfer
  writes into the page that it finds in ``kv_indices``.
- q of a token with a negative batch index is rotated too. FlashInfer leaves its results unwritten.
- The rotated and the other features of a head of GQA should be neighbours in the memory of one tensor, in this order.
  Inputs that are not neighbours are concatenated first, and outputs that are not neighbours are copied afterwards.
"""

import torch

from ropelab.arguments import (
    DTYPES,
    POSITION_DTYPES,
    check_shape,
    check_tensor,
    choice,
    dtype_name,
    flag,
    integer,
    number,
    shown,
)
from ropelab.call.checks import check_no_grad, check_writable
from ropelab.call.memory import check_disjoint, is_plain
from ropelab.call.paged_cache_checks import CACHE_DTYPES
from ropelab.call.refusals import in_words
from ropelab.call.traced import one_node
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import Layout
from ropelab.paged_cache import rope_and_cache

_OF_HEADS = {
    "q": "q_rope", "k": "k_rope", "key_cache": "paged_kv_cache[0]", "value_cache": "paged_kv_cache[1]",
    "cos": "cos_sin_cache", "sin": "cos_sin_cache", "q_out": "q_rope_out", "positions": "pos_ids",
    "slot_mapping": "kv_indices",
}  # fmt: skip
_OF_LATENT = _OF_HEADS | {"v": "k_nope", "key_cache": "paged_kv_cache[1]", "value_cache": "paged_kv_cache[0]"}
"""The words of `rope_and_cache` -> FlashInfer's words, for heads of keys, and for multi-head latent attention."""
_OUTS = "q_rope_out", "q_nope_out"


@one_node
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
        quant_scale_q, quant_scale_kv: positive numbers by which q, and k and v, are multiplied before the conversion;
            they and their inverses are normal numbers in float32.
        kv_layout: ``"NHD"`` or ``"HND"``.
        q_rope_out, q_nope_out: as ``q_rope`` and ``q_nope`` in ``quantize_dtype``: tensors for the results.
        enable_pdl: accepted and ignored; it changes no result.

    Returns:
        The results for ``q_rope`` and for ``q_nope``; an empty tensor if there is no ``q_nope``.

    Raises:
        TypeError, ValueError: as `ropelab.rope_and_cache`.

    Source: FlashInfer 0.7.2, ``flashinfer/rope.py``.
    """
    check_tensor("q_rope", q_rope, (3,), "[tokens, heads, rotary_dim]")
    check_tensor("k_rope", k_rope, (2, 3), "[tokens, (heads,) rotary_dim]")
    latent, (tokens, _, rotary_dim) = k_rope.ndim == 2, q_rope.shape
    flag("enable_pdl", enable_pdl)
    layout: Layout = "split_half" if flag("is_neox", is_neox) else "interleaved"
    _like_q("cos_sin_cache", cos_sin_cache, ("positions", rotary_dim), q_rope, DTYPES)
    _like_q("pos_ids", pos_ids, (tokens,), q_rope, POSITION_DTYPES)
    _like_q("k_rope", k_rope, (tokens, *k_rope.shape[1:-1], rotary_dim), q_rope)
    if q_nope is not None:
        _like_q("q_nope", q_nope, (*q_rope.shape[:-1], "features"), q_rope)
        q_nope = q_nope if q_nope.shape[-1] else None
    k, v, key_cache, value_cache = _written(q_rope, k_rope, q_nope, k_nope, v, paged_kv_cache, kv_layout)
    if integer("page_size", page_size, at_least=1) != key_cache.shape[1]:
        raise ValueError(f"page_size: expected {key_cache.shape[1]}, the page size of the cache, got {page_size}")
    outs = _outputs(q_rope, q_nope, q_rope_out, q_nope_out, quantize_dtype)
    heads: dict = {"q": q_rope, "q_out": outs[0]}
    apart = False  # whether the results for q are copied to where the caller wants them
    if q_nope is not None and latent:
        heads |= {"q_nope": q_nope, "q_nope_out": outs[1]}
    elif q_nope is not None:
        whole = _neighbours(*outs)
        if apart := whole is None:
            # The results can be copied after the kernel has written the caches.
            check_writable(_OUTS, outs, "")
            check_no_grad(_OUTS, outs)
            caches = {f"paged_kv_cache[{i}]": cache for i, cache in enumerate(paged_kv_cache)}
            check_disjoint(caches | dict(zip(_OUTS, outs, strict=True)), {})
            whole = torch.empty((*q_rope.shape[:-1], k.shape[-1]), dtype=outs[0].dtype, device=q_rope.device)
        heads = {"q": _joined(q_rope, q_nope), "q_out": whole}
    slots = slot_mapping(kv_indices, kv_indptr, batch_indices, positions, page_size)
    _like_q("batch_indices", batch_indices, (tokens,), q_rope, POSITION_DTYPES)
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    in_words(rope_and_cache, **(_OF_LATENT if latent else _OF_HEADS))(
        k=k, v=v, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots, cos=cos, sin=sin,
        positions=pos_ids, layout=layout,
        q_scale=_scale("quant_scale_q", quant_scale_q, outs[0]),
        k_scale=_scale("quant_scale_kv", quant_scale_kv, key_cache),
        v_scale=_scale("quant_scale_kv", quant_scale_kv, value_cache), **heads,
    )  # fmt: skip
    if apart:
        for out, x in zip(outs, heads["q_out"].split([out.shape[-1] for out in outs], dim=-1), strict=True):
            out.copy_(x)
    return outs


@one_node
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
        ``[T]``, int64; -1 for a token with a negative batch index. On a GPU, and where a compiler traces, also for a
        token whose place is not in the pages of a request.

    Raises:
        TypeError: an argument is not a tensor of int32 or int64, or ``page_size`` is not an integer.
        ValueError: shapes or devices do not fit each other; or, in CPU memory, a token's place is not in the pages of a
            request.
    """
    tensors = {"kv_indices": kv_indices, "kv_indptr": kv_indptr, "batch_indices": batch_indices}
    check_tensor("positions", positions, (1,), "[tokens]", POSITION_DTYPES)
    for name, x in tensors.items():
        shape = (len(positions),) if name == "batch_indices" else (f"{name} size",)
        check_shape(name, x, shape, positions, "positions", POSITION_DTYPES)
    page_size = integer("page_size", page_size, at_least=1, below=_LIMIT)
    requests, entries = len(kv_indptr) - 1, len(kv_indices)
    if requests < 0:
        raise ValueError("kv_indptr: expected shape [requests + 1], got (0,)")
    # A row more keeps the indices valid where there is no request or no page.
    indptr, pages = (torch.nn.functional.pad(x, (0, 1)) for x in (kv_indptr, kv_indices))
    request = batch_indices.clamp(0, requests)
    first, end = indptr[request].long(), indptr[request + 1].long()
    place = positions.long()
    page = place // page_size
    pages = pages[(first + page).clamp(0, entries)].long()
    outside = {
        "batch_indices": (batch_indices >= requests, f"requests below {requests}, as kv_indptr has", batch_indices),
        "kv_indptr": ((first < 0) | (end < first) | (end > entries), f"places in kv_indices up to {entries}", first),
        "positions": ((page < 0) | (page >= end - first), "places in the pages of the request", place),
        "kv_indices": ((pages < 0) | (pages >= _LIMIT), f"pages from 0 to {_LIMIT - 1}", pages),
    }
    has_place = batch_indices >= 0
    readable = positions.device.type == "cpu" and not torch.compiler.is_compiling()
    for name, (wrong, expected, found) in outside.items():
        if readable and (wrong & has_place).any():
            raise ValueError(f"{name}: expected {expected}, got {found[wrong & has_place][0]}")
        has_place = has_place & ~wrong
    return torch.where(has_place, pages * page_size + place % page_size, -1)  # a page below the limit fits int64


_LIMIT = 2**31
"""No cache has as many pages, and no page as many places."""


def _like_q(name: str, x: torch.Tensor, shape: tuple[int | str, ...], q_rope: torch.Tensor, dtypes=None) -> None:
    """`check_shape` with the device and, by default, the dtype of ``q_rope``."""
    check_shape(name, x, shape, q_rope, "q_rope", dtypes or (q_rope.dtype,))


def _written(q_rope, k_rope, q_nope, k_nope, v, caches, kv_layout: str):
    """k, v and their caches, as `ropelab.rope_and_cache` takes them."""
    if not isinstance(caches, (tuple, list)) or len(caches) != 2:
        raise ValueError(f"paged_kv_cache: expected a tuple of 2 tensors, got {type(caches).__name__}")
    choice("kv_layout", kv_layout, ("NHD", "HND"))
    tokens, *heads, rotary_dim = k_rope.shape
    if not heads:  # multi-head latent attention
        if v is not None:
            raise ValueError("v: expected None for k_rope of two axes (multi-head latent attention), got a tensor")
        _like_q("k_nope", k_nope, (tokens, "latent_dim" if q_nope is None else q_nope.shape[-1]), q_rope)
        widths, k_rope, v = (k_nope.shape[-1], rotary_dim), k_rope.unsqueeze(1), k_nope.unsqueeze(1)
    else:
        nope_dim = 0 if q_nope is None else q_nope.shape[-1]
        if k_nope is not None or nope_dim:
            _like_q("k_nope", k_nope, (tokens, *heads, nope_dim), q_rope)
        _like_q("v", v, (tokens, *heads, "features"), q_rope)
        k_rope, widths = _joined(k_rope, k_nope), (rotary_dim + nope_dim, v.shape[-1])
    places = [*heads, "page_size"] if kv_layout == "HND" else ["page_size", *heads]
    for i, (cache, width) in enumerate(zip(caches, widths, strict=True)):
        _like_q(f"paged_kv_cache[{i}]", cache, ("pages", *places, width), q_rope, CACHE_DTYPES)
    if not heads:
        latents, keys = (cache.unsqueeze(2) for cache in caches)
        return k_rope, v, keys, latents
    return k_rope, v, *(cache.transpose(1, 2) if kv_layout == "HND" else cache for cache in caches)


def _joined(rope: torch.Tensor, nope: torch.Tensor | None) -> torch.Tensor:
    """The heads whose first features are ``rope`` and whose other features are ``nope``: a view if there is one."""
    if nope is None or not nope.shape[-1]:
        return rope
    whole = _neighbours(rope, nope)
    return torch.cat((rope, nope), dim=-1) if whole is None else whole


def _neighbours(rope: torch.Tensor, nope: torch.Tensor) -> torch.Tensor | None:
    """The view of the heads of which ``rope`` has the first features and ``nope`` the others; None if there is none."""
    if not (is_plain(rope) and is_plain(nope)):
        return None
    x = rope.untyped_storage().data_ptr(), rope.stride(), rope.dtype, rope.shape[:-1], rope.storage_offset()
    y = nope.untyped_storage().data_ptr(), nope.stride(), nope.dtype, nope.shape[:-1], nope.storage_offset()
    if x[:-1] != y[:-1] or rope.stride(-1) != 1 or y[-1] != x[-1] + rope.shape[-1]:
        return None
    return rope.as_strided((*rope.shape[:-1], rope.shape[-1] + nope.shape[-1]), rope.stride())


def _outputs(q_rope, q_nope, q_rope_out, q_nope_out, dtype):
    """The tensors for the results for q: the given tensors, or new tensors."""
    sizes = q_rope.shape[-1], 0 if q_nope is None else q_nope.shape[-1]
    given = dict(zip(_OUTS, (q_rope_out, q_nope_out), strict=True))
    for (name, out), size in zip(given.items(), sizes, strict=True):
        if out is not None:
            _like_q(name, out, (*q_rope.shape[:-1], size), q_rope, FLOAT8_DTYPES)
    if dtype is None:
        dtype = next((out.dtype for out in given.values() if out is not None), FLOAT8_DTYPES[0])
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT8_DTYPES:
        raise TypeError(f"quantize_dtype: expected float8_e4m3fn or float8_e5m2, got {shown(dtype)}")
    for name, out in given.items():
        if out is not None and out.dtype != dtype:
            raise TypeError(f"{name}: expected quantize_dtype {dtype_name(dtype)}, got {dtype_name(out.dtype)}")
    new = torch.empty((*q_rope.shape[:-1], sum(sizes)), dtype=dtype, device=q_rope.device).split(sizes, dim=-1)
    return new[0] if q_rope_out is None else q_rope_out, new[1] if q_nope_out is None else q_nope_out


_SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest factor whose inverse is a normal number in float32, as the inverse of the largest is."""


def _scale(name: str, factor: float, of: torch.Tensor) -> torch.Tensor | None:
    """The scale whose quotients are the products with ``factor``; None for 1 and for a tensor without a scale."""
    number(name, factor, at_least=_SMALLEST, at_most=1 / _SMALLEST)
    if factor == 1 or of.dtype not in FLOAT8_DTYPES:
        return None
    return torch.full((1,), 1 / factor, dtype=torch.float32, device=of.device)
