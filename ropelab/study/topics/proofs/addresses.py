"""Statements about addresses, which Z3 proves of `place_triton`: offsets of heads, and rows of a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import z3

from ropelab.kernels import addressing, place_triton
from ropelab.kernels.place_triton import Tokens
from ropelab.study.topics.proofs.pairs import MOST_FEATURES
from ropelab.study.topics.proofs.symbolic import Claim, Machine, Number, every


class Strided:
    """A tensor ``[B, S, H, D]`` for the host: symbolic sizes and strides, whose last element lies within 2^63."""

    def __init__(self, m: Machine, heads: int):
        self.shape = (
            m.integer("batch", 1, 2**31, width=0), m.integer("seq_len", 1, 2**31, width=0), m.number(heads),
            m.integer("head_dim", 1, MOST_FEATURES, width=0),
        )  # fmt: skip
        self._strides = tuple(m.integer(f"stride_{axis}", 0, 2**62, width=0) for axis in range(3))
        last = [(size - 1) * stride for size, stride in zip(self.shape, self._strides, strict=False)]
        m.assume(last[0] + last[1] + last[2] + self.shape[3] < 2**63)

    def stride(self, axis: int) -> Number:
        return self._strides[axis]


def _monotonic(m: Machine, index: Any, size: Any, stride: Any) -> None:
    """Tell Z3 a fact of integers: a larger index gives no smaller product with a stride."""
    index, size, stride = (m.number(x).value for x in (index, size, stride))
    below = z3.Implies(z3.And(0 <= index, index < size, stride >= 0), index * stride <= (size - 1) * stride)
    m.assumptions += [below, z3.Implies(z3.And(index >= 0, stride >= 0), index * stride >= 0)]


def _offsets(m: Machine, heads: int, block_tokens: int, block_heads: int, *, of_rows: bool, wide: bool) -> Any:
    """The address of a head of a token that exists, without an integer that leaves its range.

    With ``wide`` the host finds that a tile takes 64 bits (`addressing._max_tile_offset`), otherwise that 32 suffice.
    """
    x = Strided(m, heads)
    largest = m.call(addressing._max_tile_offset, x, block_tokens)
    m.assume(largest >= 2**31 if wide else largest < 2**31)
    C = SimpleNamespace(OFFSETS_64=wide, ALIGN=1)
    strides = [Number(m, x.stride(axis).value, 64 if wide or axis == 0 else 32) for axis in range(3)]
    batch, first = m.integer("batch_index", 0, x.shape[0]), m.integer("first", 0, 2**31)
    lane, head = m.integer("token", 0, block_tokens), m.integer("head", 0, -(-heads // block_heads) * block_heads)
    m.assume((first + lane < x.shape[1]) & (head < heads))
    place = (m.number(0), strides), Tokens(batch, first, lane, m.condition(True)), head
    at = m.call(place_triton.rows_at, *place, 1, C) if of_rows else m.call(place_triton.heads_at, *place, C)
    token = first.value + lane.value
    for index, size, stride in ((batch, x.shape[0], strides[0]), (token, x.shape[1], strides[1]),
                                (lane, block_tokens, strides[1]), (first, x.shape[1], strides[1]),
                                (head, heads, strides[2])):  # fmt: skip
        _monotonic(m, index, size, stride)
    right = batch.value * strides[0].value + token * strides[1].value + head.value * strides[2].value
    return z3.And(at.safe, at.value == right)


def _offset_claims() -> Iterator[Claim]:
    for heads in (1, 3, 32, 128):
        for block_tokens, block_heads in ((1, 8), (4, 2), (128, 1)):
            for flags in product((False, True), repeat=2):
                of_rows, wide = flags
                yield partial(_offsets, heads=heads, block_tokens=block_tokens, block_heads=block_heads,
                              of_rows=of_rows, wide=wide)  # fmt: skip


def _cached(m: Machine, page: int, narrow: bool) -> Any:
    """A slot is in the cache if ``0 <= slot < blocks * page``, and its row is ``[slot // page, slot % page, head]``."""
    blocks, heads = m.integer("blocks", 1, 2**40, width=64), m.integer("heads", 1, 2**16, width=0)
    m.assume(blocks * page < 2**31 if narrow else blocks * page >= 2**31)
    strides = [m.integer(f"stride_{axis}", 0, 2**62, width=64) for axis in range(3)]
    slot, head = m.integer("slot", -(2**63), 2**63, width=64), m.integer("head", 0, heads)
    C = SimpleNamespace(NARROW_SLOTS=narrow, PAGE=page)
    at, inside = m.call(place_triton.cached_at, (m.number(0), strides), place_triton.InCache(slot, blocks), head, 1, C)
    terms = (slot.value / page, blocks, strides[0]), (slot.value % page, page, strides[1]), (head, heads, strides[2])
    terms = [tuple(m.number(x).value for x in term) for term in terms]
    m.assumptions.append(z3.Sum(*((size - 1) * stride for _, size, stride in terms)) < 2**63)
    for term in terms:
        _monotonic(m, *term)
        _monotonic(m, term[1] - 1, term[1], term[2])
    right = z3.Sum(*(index * stride for index, _, stride in terms))
    has = z3.And(slot.value >= 0, slot.value < blocks.value * page)
    return z3.And(inside.safe, inside.holds == has, z3.Implies(has, z3.And(at.safe, at.value == right)))


def _distinct_slots(m: Machine, page: int) -> Any:
    """Two slots with the same block and place are one slot, so rows of a cache without overlap are apart."""
    one, other = (m.integer("slot", 0, 2**62, width=64) for _ in range(2))
    same = every((one // page == other // page, one % page == other % page))
    return z3.Implies(same, one.value == other.value)


def _cache_claims() -> Iterator[Claim]:
    for page in (1, 8, 16, 24, 64, 128, 256):
        yield partial(_distinct_slots, page=page)
        for narrow in (True, False):
            yield partial(_cached, page=page, narrow=narrow)


STATEMENTS: dict[str, Any] = {
    "offsets stay within 32 bits of a tile and 64 bits of a tensor": _offset_claims,
    "slots are distinct rows of a cache, and no other row is touched": _cache_claims,
}
