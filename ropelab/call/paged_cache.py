"""Rotations that also write into a paged cache, for plain tensors and as operators of PyTorch's dispatcher."""

from typing import Any

from torch import Tensor, float32

from ropelab.arguments import check_tensor
from ropelab.call.checks import check_places
from ropelab.call.operation import Operation, Tensors
from ropelab.call.paged_cache_checks import CACHE_DTYPES, NAMES, check_call, check_contents, check_slots
from ropelab.call.refusals import in_words
from ropelab.call.where import Where
from ropelab.kernels import Norm
from ropelab.kernels.tensors import CacheTensors

Q_OUT = NAMES.index("q_out")
WRITE = Operation(
    "paged_cache", "write", CacheTensors, NAMES, check_call, check_contents=check_contents, writes=9,
    same={"q_out": "q", "k_out": "k", "v_out": "v", "q_nope_out": "q_nope"},
)  # fmt: skip


def _norm(given: Tensors, *flat) -> tuple[Norm | None]:
    return (None if given[NAMES.index("q_weight")] is None else Norm(*flat),)


WRITE.operator("ropelab::rope_and_cache", "float eps, float weight_offset, bool norm_first", read=_norm)


def _of_entries(
    kv_cache: Tensor, q_out: Tensor, k_out: Tensor | None, q_nope_out: Tensor | None, q_scale_out: Tensor | None,
    kv_scale_cache: Tensor | None, q_pe: Tensor, k_pe: Tensor, kv_c: Tensor, q_nope: Tensor | None, slots: Tensor,
    q_scale: Tensor | None, kv_scale: Tensor | None, *angles: Any,
) -> CacheTensors:  # fmt: skip
    """The tensors of `WRITE` for a cache of latent entries: an entry is a value, and the key behind it, of one head."""
    latent, key = kv_cache.unsqueeze(2).split_with_sizes((kv_c.shape[1], k_pe.shape[-1]), -1)
    k = k_pe.unsqueeze(1) if k_pe.ndim == 2 else k_pe
    k_out = k_out.unsqueeze(1) if k_out is not None and k_out.ndim == 2 else k_out
    q_scale_out = None if q_scale_out is None else q_scale_out.unsqueeze(-1)
    scales = None if kv_scale_cache is None else kv_scale_cache.unsqueeze(2)
    return CacheTensors(
        key, latent, q_out, k_out, None, q_nope_out, q_scale_out, scales, None, q_pe, k, kv_c.unsqueeze(1), q_nope,
        slots, None, None, q_scale, kv_scale, kv_scale, *angles,
    )  # fmt: skip


def _check_entries(given: Tensors, where: Where) -> None:
    kv_cache, _, k_out, _, q_scale_out, kv_scale_cache, q_pe, k_pe, kv_c, *_ = given
    check_tensor("k_pe", k_pe, (2, 3), "[tokens, rotary_dim] or [tokens, 1, rotary_dim]")
    check_tensor("kv_c", kv_c, (2,), "[tokens, latent_dim]")
    features = kv_c.shape[1] + k_pe.shape[-1]
    check_tensor("kv_cache", kv_cache, (3,), f"[blocks, block_size, {features}]", CACHE_DTYPES)
    if kv_cache.shape[2] != features:
        raise ValueError(f"kv_cache: expected shape [blocks, block_size, {features}], got {tuple(kv_cache.shape)}")
    if k_out is not None:
        check_tensor("k_out", k_out, (2, 3), "the shape of k_pe")
    if kv_scale_cache is not None:
        check_tensor("kv_scale_cache", kv_scale_cache, (2,), "[blocks, block_size]", (float32,))
    if q_scale_out is not None:
        check_tensor("q_scale_out", q_scale_out, (2,), "of q_pe without the features", (float32,))
    words = {"q": "q_pe", "k": "k_pe", "v": "kv_c", "k_scale": "kv_scale", "k_scale_cache": "kv_scale_cache"}
    check = in_words(check_call, **words, key_cache="kv_cache", value_cache="kv_cache")
    check(_of_entries(*given, *where.angles.for_kernels, where.positions)[: len(NAMES)], where, None)


def _check_slots_of_entries(given: Tensors, where: Where) -> None:
    kv_cache, q_pe, slots = given[0], given[6], given[10]
    check_places(q_pe, where)
    check_slots(slots, kv_cache.shape[0] * kv_cache.shape[1], "kv_cache")


WRITE_LATENT = Operation(
    "paged_cache", "write", _of_entries,
    ("kv_cache", "q_out", "k_out", "q_nope_out", "q_scale_out", "kv_scale_cache", "q_pe", "k_pe", "kv_c", "q_nope",
     "slot_mapping", "q_scale", "kv_scale"),
    _check_entries, numbers=lambda: (None,), check_contents=_check_slots_of_entries, writes=6,
    same={"q_out": "q_pe", "k_out": "k_pe", "q_nope_out": "q_nope"},
)  # fmt: skip
WRITE_LATENT.operator("ropelab::mla_rope_and_cache")
