"""Statements about the features of pairs, which Z3 proves of `stages_triton` for heads of any size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import triton.language as tl
import z3

from ropelab.kernels import rotate_triton, stages_triton
from ropelab.study.topics.proofs.symbolic import Bool, Claim, Machine, Number, both, every, implies

MOST_FEATURES = 2**20
"""The most elements of a block in Triton, and so the most features of a head."""


def _head(m: Machine, interleaved: bool, **known: Any) -> SimpleNamespace:
    """The choices of a head: its features, of which the pairs from FIRST on rotate, in one block of lanes."""
    half, first, rest = (m.integer(name, 0, MOST_FEATURES, width=0) for name in ("half", "first", "rest"))
    block = m.integer("block_pairs", 1, MOST_FEATURES, width=0)
    head = SimpleNamespace(
        ROTARY_DIM=2 * half, FIRST=first, LANE_DIM=2 * half + rest, BLOCK_PAIRS=block, INTERLEAVED=interleaved, GROUP=0,
        **known,
    )  # fmt: skip
    m.assume((half >= 1) & (first <= rest) & (head.LANE_DIM <= MOST_FEATURES))
    m.assume(block >= half + (rest + 1) // 2)
    return head


def _lane(m: Machine, member: int, C: SimpleNamespace, piece: int = 0) -> tuple[Number, Number, Bool]:
    """A pair of a head, its feature as a member, and whether the pair has it."""
    feature, exists = m.call(stages_triton.lane_feature, member, C.INTERLEAVED, C, piece)
    (pair,) = [v for v in z3.z3util.get_vars(feature.value) if str(v).startswith("lane")]
    return Number(m, pair), feature, exists


def _inside(m: Machine, interleaved: bool, member: int) -> Any:
    C = _head(m, interleaved)
    _, feature, exists = _lane(m, member, C)
    return implies(exists, both(feature >= 0, feature < C.LANE_DIM, feature.safe))


def _distinct(m: Machine, interleaved: bool, members: tuple[int, int]) -> Any:
    C = _head(m, interleaved)
    (i, f, has), (j, g, also) = (_lane(m, member, C) for member in members)
    same = i == j if members[0] == members[1] else False
    return implies(both(has, also, f == g), same)


def _onto(m: Machine, interleaved: bool, member: int) -> Any:
    """Every feature has a lane: this finds it, among the pairs that rotate or among the pairs after them."""
    C = _head(m, interleaved)
    half, feature = C.ROTARY_DIM // 2, m.integer("feature", 0, C.LANE_DIM)
    rotates = bool((feature >= C.FIRST) & (feature < C.FIRST + C.ROTARY_DIM))
    place = feature - C.FIRST if rotates else feature
    if not rotates and bool(feature > C.FIRST):
        place = place - C.ROTARY_DIM
    width = half if rotates else (C.LANE_DIM - C.ROTARY_DIM + 1) // 2
    own = place % 2 if interleaved else (place >= width).to(tl.int32)
    index = place // 2 if interleaved else place - own * width
    m.assume(own == member)
    pair, found, exists = _lane(m, member, C)
    m.assume(pair == (index if rotates else half + index))
    return both(exists, found == feature, pair < C.BLOCK_PAIRS)


def _definition(m: Machine, interleaved: bool, member: int) -> Any:
    """`ropelab.layout.pairing` defines the pairs that rotate: ``(2i, 2i + 1)``, or ``(i, i + R/2)``."""
    C = _head(m, interleaved)
    pair, feature, exists = _lane(m, member, C)
    right = 2 * pair + member if interleaved else pair + member * (C.ROTARY_DIM // 2)
    return implies(pair < C.ROTARY_DIM // 2, both(exists, feature == C.FIRST + right))


def _pieces(m: Machine, interleaved: bool, member: int, piece: int) -> Any:
    """A lane of a piece is the lane of the whole head that follows the lanes of the pieces before."""
    C = _head(m, interleaved)
    lane, whole, exists = _lane(m, member, C)
    block = m.integer("block", 1, MOST_FEATURES, width=0)
    m.assume(C.BLOCK_PAIRS >= (piece + 1) * block)
    pair, feature, has = _lane(m, member, SimpleNamespace(**vars(C) | {"BLOCK_PAIRS": block}), piece)
    return implies(lane == pair + piece * block, both(feature == whole, has == exists))


def _hints(m: Machine, interleaved: bool, group: int) -> Any:
    """GROUP divides what `addressing.whole_heads` says it divides; then the hints of `_addresses` are true."""
    C = _head(m, interleaved)
    C.GROUP = group
    rest = (C.LANE_DIM - C.ROTARY_DIM + 1) // 2
    for number in (C.ROTARY_DIM // 2, rest, C.FIRST):
        m.assume(number % group == 0)
    row = m.integer("row", 0, 2**40, width=64)
    at = m.call(stages_triton.members_of, row, m.condition(True), interleaved, C)
    true = []
    for (x, width), exists in zip(m.hints, (at.first_exists, at.second_exists), strict=False):
        (lane,) = [v for v in z3.z3util.get_vars(x.value) if str(v).startswith("lane")]
        step = m.integer("step", 0, width)
        later, exists_later = (z3.substitute(e, (lane, lane + step.value)) for e in (x.value, exists.holds))
        begins = both(lane % width == 0, exists.holds, exists_later)
        true.append(z3.Implies(begins, z3.And(x.value % width == 0, later == x.value + step.value)))
    return z3.And(*true)


def _pair_claims() -> Iterator[Claim]:
    for interleaved in (False, True):
        for member in (0, 1):
            yield partial(_onto, interleaved=interleaved, member=member)
            yield partial(_inside, interleaved=interleaved, member=member)
            yield partial(_definition, interleaved=interleaved, member=member)
            for other in (0, 1):
                yield partial(_distinct, interleaved=interleaved, members=(member, other))


def _layouts(m: Machine, member: int) -> Any:
    """The features of a pair in both layouts: a program that reads one and writes the other moves no other pair."""
    half = m.integer("half", 1, MOST_FEATURES, width=0)
    C = SimpleNamespace(ROTARY_DIM=2 * half, FIRST=0, LANE_DIM=2 * half, BLOCK_PAIRS=half)
    heads = [SimpleNamespace(**vars(C), INTERLEAVED=flag) for flag in (True, False)]
    (i, f, _), (j, g, _) = (_lane(m, member, head) for head in heads)
    # The permutation of `ropelab.layout.pairing`: feature 2i + a of one layout is feature i + a R/2 of the other.
    return implies(i == j, both(f // 2 + (f % 2) * half == g))


def _accesses(
    m: Machine, interleaved: bool, chunk: int, copies: bool
) -> tuple[SimpleNamespace, list[tuple[Number, Any]]]:
    """A lane of an access of flat rows: the features that it reads, each with whether it does."""
    pairs, first, rest = (m.integer(name, 0, MOST_FEATURES, width=0) for name in ("pairs", "first", "rest"))
    m.assume((pairs >= 1) & (first <= rest) & (2 * chunk * (pairs + rest) <= MOST_FEATURES))
    C = SimpleNamespace(
        ROTARY_DIM=2 * chunk * pairs, BLOCK_PAIRS=chunk, BEFORE=2 * chunk * first,
        PER_HEAD=pairs + rest if copies else pairs, LANE_DIM=2 * chunk * (pairs + rest),
    )  # fmt: skip
    access = m.integer("access", 0, C.PER_HEAD)
    at = m.call(rotate_triton._members_of_accesses, m.number(0), m.condition(True), access, interleaved, C)
    return C, access, m.lanes[-1][0], [at.first] if interleaved else [at.first, at.second]


def _access_is_once(m: Machine, interleaved: bool, chunk: int, copies: bool, members: tuple[int, int]) -> Any:
    """Features of accesses exist, and no two lanes have the same feature; the accesses have as many as the head.

    The hints on their multiples are true. In place, only the features that rotate are read.
    """
    C, a, i, one = _accesses(m, interleaved, chunk, copies)
    b = m.integer("other_access", 0, C.PER_HEAD)
    before = len(m.multiples)
    at = m.call(rotate_triton._members_of_accesses, m.number(0), m.condition(True), b, interleaved, C)
    j, other = m.lanes[-1][0], [at.first, at.second]
    x, y = one[members[0]], other[members[1]]
    same = every((members[0] == members[1], a == b, i == j))
    inside = every((x >= 0, x < C.LANE_DIM, x.safe))
    if not copies:
        inside = every((inside, x >= C.BEFORE, x < C.BEFORE + C.ROTARY_DIM))
    hints = every(hint % width == 0 for hint, width in m.multiples[: 1 if interleaved else before])
    return every((inside, implies(x == y, same), hints))


def _access_claims() -> Iterator[Claim]:
    for chunk, copies in product((1, 2, 4, 8), (False, True)):
        yield partial(_access_is_once, interleaved=True, chunk=chunk, copies=copies, members=(0, 0))
        for members in product((0, 1), repeat=2):
            yield partial(_access_is_once, interleaved=False, chunk=chunk, copies=copies, members=members)


STATEMENTS: dict[str, Any] = {
    "pairs are a bijection: every feature of a head is one member of one pair": _pair_claims,
    "accesses of flat rows are a bijection to the features of a head": _access_claims,
    "pieces continue the pairs of a head": [
        partial(_pieces, interleaved=flag, member=a, piece=piece)
        for flag, a, piece in product((False, True), (0, 1), (1, 2, 5))
    ],
    "layouts are a permutation: pair i has the same place in both": [partial(_layouts, member=a) for a in (0, 1)],
    "hints on adjacent features are true": [
        partial(_hints, interleaved=flag, group=2**i) for flag in (False, True) for i in range(4)
    ],
}
