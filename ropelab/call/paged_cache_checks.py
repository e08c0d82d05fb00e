"""Checks of the arguments of a rotation that also writes into a paged cache.

Each message names the argument, what the call expected and what it got.
"""

from typing import Any

import torch

from ropelab.arguments import (
    DTYPES,
    POSITION_DTYPES,
    check_device,
    check_dtype,
    check_like,
    check_shape,
    check_tensor,
    dtype_name,
    tensor,
)
from ropelab.call.checks import check_places, check_rope_arguments
from ropelab.call.qk_norm import check_weights
from ropelab.call.where import Where
from ropelab.kernels import Norm
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.kernels.tensors import CacheTensors
from ropelab.layout.seq_format import check_heads, to_bshd

CACHE_DTYPES = (*DTYPES, *FLOAT8_DTYPES)

NAMES = (
    "key_cache", "value_cache", "q_out", "k_out", "v_out", "q_nope_out", "q_scale_out", "k_scale_cache",
    "v_scale_cache", "q", "k", "v", "q_nope", "slot_mapping", "q_weight", "k_weight", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
"""The arguments of a call, in the order of `CacheTensors`; the call writes the first nine."""


def check_call(given: tuple[Any, ...], where: Where, norm: Norm | None) -> None:
    """Raise TypeError or ValueError for arguments that the kernels cannot serve, judged by all but their contents."""
    t, seq_format = CacheTensors._make((*given, None, None, None)), where.options.seq_format
    tensor("k", t.k)
    check_rope_arguments(t.q, t.k, where)
    _check_value(t, seq_format)
    if norm is not None:
        _check_weights(t, seq_format)
    _check_nope(t, norm)
    for name in ("q", "k", "v", "q_nope"):
        out, x, of_q = getattr(t, f"{name}_out"), getattr(t, name), name in ("q", "q_nope")
        if out is not None and x is not None:
            check_shape(f"{name}_out", out, x.shape, t.q, dtypes=(x.dtype, *(FLOAT8_DTYPES if of_q else ())))
            check_adjacent(f"{name}_out", out)
    if t.q_nope_out is not None:
        check_dtype("q_nope_out", t.q_nope_out, t.q_out, "q_out")
    _check_caches(t, seq_format)
    _check_slot_mapping(t, seq_format)
    q_heads, k_heads = (to_bshd(x, seq_format).shape[2] for x in (t.q, t.k))
    slots = *t.k_cache.shape[:2], k_heads
    for name, scale, made, made_name, shape, of, x in (
        ("q_scale", t.q_scale, t.q_scale_out, "q_scale_out", (*t.q.shape[:-1], 1), "q_out", t.q_out),
        ("k_scale", t.k_scale, t.k_scale_cache, "k_scale_cache", slots, "key_cache", t.k_cache),
        ("v_scale", t.v_scale, t.v_scale_cache, "v_scale_cache", slots, "value_cache", t.v_cache),
    ):
        _check_scale(name, scale, q_heads if of == "q_out" else k_heads, of, x)
        if made is not None:
            check_made_scale(made_name, made, shape, of, x)
            if scale is not None:
                raise ValueError(f"{name}: expected None, because the call makes the scales of {of}, got a tensor")
    if t.shares_scale and t.v_cache.dtype != t.k_cache.dtype:
        raise TypeError(
            f"value_cache: expected key_cache's dtype {dtype_name(t.k_cache.dtype)} for a scale that both share, "
            f"got {dtype_name(t.v_cache.dtype)}"
        )


def check_contents(given: tuple[Any, ...], where: Where, norm: Norm | None) -> None:
    """Raise ValueError for a token beyond the tables, and for a slot beyond the cache, as far as CPU memory says.

    The host would have to wait for a GPU to read slots there, and a kernel skips a slot beyond the cache.
    """
    t = CacheTensors._make((*given, None, None, None))
    check_places(t.q, where)
    check_slots(t.slots, t.k_cache.shape[0] * t.k_cache.shape[1], "key_cache")


def check_slots(slots: torch.Tensor, capacity: int, cache: str) -> None:
    """Raise ValueError for slots in CPU memory beyond the ``capacity`` of a cache."""
    if slots.is_cuda or not slots.numel():
        return
    last = int(slots.max())
    if last >= capacity:
        raise ValueError(f"slot_mapping: expected slots below the {capacity} slots of {cache}, got {last}")


def _check_value(t: CacheTensors, seq_format: str) -> None:
    check_heads("v", t.v, seq_format)
    check_like("v", t.v, t.q)
    k, v = to_bshd(t.k, seq_format).shape, to_bshd(t.v, seq_format).shape
    for axis, what in ((0, "batch size"), (1, "sequence length"), (2, "number of heads")):
        if v[axis] != k[axis]:
            raise ValueError(f"v: expected k's {what} {k[axis]}, got {v[axis]}")
    if not v[3]:
        raise ValueError("v: expected at least one feature of a head, got none")


def _check_weights(t: CacheTensors, seq_format: str) -> None:
    q_weight, k_weight, head_dim = tensor("q_weight", t.q_weight), tensor("k_weight", t.k_weight), t.q.shape[-1]
    expected = [to_bshd(x, seq_format).shape[2] * head_dim for x in (t.q, t.k)]
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    if [weight.numel() for weight in weights.values()] != expected:
        return check_weights(q_weight, k_weight, t.q)
    for (name, weight), features in zip(weights.items(), expected, strict=True):
        check_tensor(name, weight, (1,), f"({head_dim},) or ({features},)")
        check_device(name, weight, t.q)
    check_dtype("k_weight", k_weight, q_weight, "q_weight")


def _check_nope(t: CacheTensors, norm: Norm | None) -> None:
    for name, x, other in (("q_nope", t.q_nope, "q_nope_out"), ("q_nope_out", t.q_nope_out, "q_nope")):
        if x is None and getattr(t, other) is not None:
            raise TypeError(f"{name}: expected a torch.Tensor beside {other}, got None")
    if t.q_nope is None:
        return
    if norm is not None:
        raise ValueError("q_nope: expected None beside q_weight (a norm takes whole heads), got a tensor")
    check_shape("q_nope", t.q_nope, (*t.q.shape[:-1], "N"), t.q, dtypes=(t.q.dtype,))
    if not t.q_nope.shape[-1]:
        raise ValueError("q_nope: expected at least one feature of a head, got none")


def _one_of(cache: torch.Tensor, name: str, heads: int, features: int) -> str:
    """The end of a message about a cache of another shape: how to make a paged cache of it."""
    if isinstance(cache, torch.Tensor) and cache.ndim == 3:
        return f" (slots without blocks: pass {name}.unsqueeze(1))"
    if isinstance(cache, torch.Tensor) and cache.ndim == 5 and 2 in cache.shape[:2]:
        return f" (keys and values in one tensor: pass key_cache, value_cache = cache.unbind({cache.shape.index(2)}))"
    if isinstance(cache, torch.Tensor) and cache.ndim == 4 and (cache.shape[1], cache.shape[3]) == (heads, features):
        return f" (heads before the slots of a block: pass {name}.transpose(1, 2))"
    return ""


def _check_caches(t: CacheTensors, seq_format: str) -> None:
    for name, cache, x in (("key_cache", t.k_cache, t.k), ("value_cache", t.v_cache, t.v)):
        heads, features = to_bshd(x, seq_format).shape[2:]
        shape = "blocks", "block_size", heads, features
        check_shape(name, cache, shape, t.q, dtypes=CACHE_DTYPES, hint=_one_of(cache, name, heads, features))
        if not cache.shape[1]:
            raise ValueError(f"{name}: expected blocks of at least one slot, got {tuple(cache.shape)}")
        check_adjacent(name, cache)
    if t.v_cache.shape[:2] != t.k_cache.shape[:2]:
        raise ValueError(
            f"value_cache: expected key_cache's blocks and block_size {tuple(t.k_cache.shape[:2])}, "
            f"got {tuple(t.v_cache.shape[:2])}"
        )


def check_adjacent(name: str, x: torch.Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name}: expected adjacent features (a last stride of 1), got strides {tuple(x.stride())}")


def _check_slot_mapping(t: CacheTensors, seq_format: str) -> None:
    check_shape("slot_mapping", t.slots, ("slots",), t.q, dtypes=POSITION_DTYPES)
    batch, seq_len = to_bshd(t.q, seq_format).shape[:2]
    if t.slots.shape[0] > batch * seq_len:
        raise ValueError(
            f"slot_mapping: expected at most a slot for each of {batch * seq_len} tokens, got {t.slots.shape[0]}"
        )


def _check_scale(name: str, scale: torch.Tensor | None, heads: int, of: str, x: torch.Tensor) -> None:
    if scale is None:
        return
    check_tensor(name, scale, (0, 1), f"(), (1,) or ({heads},)", (torch.float32,))
    if scale.numel() not in (1, heads):
        raise ValueError(f"{name}: expected shape (), (1,) or ({heads},), got {tuple(scale.shape)}")
    if scale.ndim and scale.stride(0) != 1 and scale.numel() > 1:
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(scale.stride())}")
    check_device(name, scale, x)
    _check_needed(name, of, x)


def check_made_scale(name: str, scale: torch.Tensor, shape: tuple[int, ...], of: str, x: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless ``scale`` can hold the scales that a call makes of ``x``, its ``of``."""
    check_shape(name, scale, shape, x, of, (torch.float32,))
    _check_needed(name, of, x)


def _check_needed(name: str, of: str, x: torch.Tensor) -> None:
    if x.dtype not in FLOAT8_DTYPES:
        raise ValueError(f"{name}: expected no scale for the dtype of {of}, {dtype_name(x.dtype)}, got a scale")
