"""The mistakes of 8-bit floats and their scales in words, each with the numbers that it makes of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT
from ropelab.conformance.cache.block_scales import WEIGHT_SCALE, BlockScales, RopeAndQuantizeIndexer
from ropelab.conformance.cache.case import bits
from ropelab.conformance.cache.conventions import UNWRITTEN
from ropelab.conformance.cache.seen import PARTS, SCALES, Hypothesis, K, Q, Seen, V
from ropelab.conformance.cache.subject import Bounded
from ropelab.conformance.cache_bounds import half_unit
from ropelab.kernels import NO_POSITION
from ropelab.kernels.float8 import FLOAT8_DTYPES

UNSIGNED_ZEROS = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""The formats of older AMD cards: their numbers are half those of `FLOAT8_DTYPES` with the same bits."""
MOST = torch.finfo(FLOAT8_DTYPES[0]).max
Named = Iterator[tuple[str, Hypothesis]]
Array = np.ndarray


# ---------------------------------------------------------------------------------------------------- given scales


def given_scales(seen: Seen, which: int) -> Named:
    """Yield what becomes of the scale of an 8-bit float, in all features or in some."""
    right, inverse = ("multiplied", "divided") if seen.subject.convention.scales_multiply else ("divided", "multiplied")
    changes: dict[str, Callable[[Sequence[float]], float]] = {
        "is stored without its scale": lambda s: 1.0,
        f"is {inverse} by its scale, in place of {right}": lambda s: 1 / s[which],
        f"is {right} by its scale twice": lambda s: s[which] ** 2,
        f"is {right} by the square root of its scale": lambda s: s[which] ** 0.5,
        **{f"is {right} by the scale of {'qkv'[i]}": itemgetter(i) for i in (Q, K, V) if i != which},
    }
    parts = {
        "": (False, True),
        " in the features that rotate": (True,),
        " in the features that do not rotate": (False,),
    }
    for words, scale in changes.items():
        for where, turning in parts.items():

            def scaled(seen: Seen, which: int, scale=scale, turning=turning) -> Bounded:
                case, right = seen.case, seen.definition(which)
                scales = (*case.scales[:which], scale(case.scales), *case.scales[which + 1 :])
                other = seen.told(which, replace(case, scales=scales))
                turns = np.zeros(right[0].shape[-1], bool)
                turns[seen.subject.turning(len(turns), case.rotary_dim)] = True
                hit = np.isin(turns, turning)
                return np.where(hit, other[0], right[0]), np.where(hit, other[1], right[1])

            yield words + where, scaled
    yield "is rounded towards zero", _truncated
    yield "is NaN or infinite beyond the largest number, in place of the largest number", _not_clamped


def _truncated(seen: Seen, which: int) -> Bounded:
    """The number is at most as large as the quotient, and less than a unit in the last place smaller."""
    value, bound = seen.definition(which)
    half = half_unit(abs(value), seen.case.memory.dtype)
    error = np.maximum(bound - half, 0)
    return value - np.sign(value) * half, (half + error) / 2  # the evidence allows twice the bound


def _not_clamped(seen: Seen, which: int) -> Bounded:
    (value, bound), actual = seen.definition(which), seen.actual(which)
    assert actual is not None, "a hypothesis is about a part that is there"
    lost = (abs(value) >= torch.finfo(seen.case.memory.dtype).max) & ~np.isfinite(actual)
    return np.where(lost, actual, value), bound


def other_format(seen: list[Seen], which: int) -> str:
    """Return in which other 8-bit format the stored bits are right, or an empty string."""
    dtype = seen[0].case.memory.dtype
    if dtype not in FLOAT8_DTYPES or which not in (K, V) or seen[0].blocks:
        return ""
    for other, like in zip((*FLOAT8_DTYPES, *UNSIGNED_ZEROS), 2 * FLOAT8_DTYPES, strict=True):
        if other != dtype and all(_has_bits(one, which, other, like) for one in seen):
            return f"has the bits of {str(other).removeprefix('torch.')}"
    return ""


def _has_bits(seen: Seen, which: int, other: torch.dtype, like: torch.dtype) -> bool:
    """Return whether the bits of a part are right in another format, whose numbers round as those of ``like``."""
    case = seen.case
    rows = bits(case.rows(seen.written.memory)[which - 1]).view(other).float().cpu().numpy().astype(EXACT)
    right, bound = seen.told(which, replace(case, memory=bits(case.memory).view(like)))
    most = torch.finfo(other).max
    return rows.shape == right.shape and bool((abs(rows - right.clip(-most, most)) <= 2 * bound).all())


# ----------------------------------------------------------------------------------------------------- made scales


def made_scales(which: int) -> Named:
    """Yield what an operator may take for the scale of a head of a token, beside that of another head or token."""

    def of(change: Callable[[Array, Seen], Any]) -> Hypothesis:
        def changed(seen: Seen, which: int) -> Bounded:
            value, bound = seen.definition(which)
            found = np.broadcast_to(change(value, seen), value.shape)
            room = np.broadcast_to(change(value + bound, seen) - found, value.shape)
            return found, np.maximum(abs(room), bound * abs(found / value))

        return changed

    for other in (part for part in (Q, K, V) if SCALES + part != which):
        yield f"is that of {PARTS[other]}", _of_part(SCALES + other)
    yield "is not written", of(lambda s, seen: np.full_like(s, UNWRITTEN))
    yield "is 1", of(lambda s, seen: np.ones_like(s))
    yield "is its reciprocal", of(lambda s, seen: 1 / s)
    yield ("is the largest magnitude itself, not divided by the largest 8-bit float",
           of(lambda s, seen: s * float(torch.finfo(seen.case.memory.dtype).max)))  # fmt: skip
    yield "is the largest of all heads of the token", of(lambda s, seen: s.max(1, keepdims=True))
    if which < SCALES + V:
        yield "is made before the rotation", _before


def _of_part(other: int) -> Hypothesis:
    return lambda seen, which: seen.told(other)


def _before(seen: Seen, which: int) -> Bounded:
    at = seen.case.token_positions()[0]
    return seen.told(which, replace(seen.case, positions=torch.where(at == NO_POSITION, at, 0 * at)))


# ---------------------------------------------------------------------------------------------------- block scales

Blocks = tuple[Array, Array]
"""Features ``[n, H, blocks, D / blocks]`` and the exponents of their scales ``[n, H, blocks]``."""


def block_scales(seen: Seen) -> Named:
    """Yield what becomes of the scales of blocks, and of the weights that take them in."""
    kind = seen.subject.convention
    assert isinstance(kind, BlockScales), "exponents belong to block scales"
    least = kind.amax_epsilon
    for words, change in OF_BLOCKS.items():
        yield words, _of_blocks(change)
    weights = isinstance(kind, RopeAndQuantizeIndexer)
    for words, power in WEIGHTS.items() if weights else BESIDE.items():
        yield f"has right features{words}", _of_blocks(_to_power(power))
    if not weights:
        yield ("is divided by the largest magnitude of a block over 448, beside the next power of two as the scale",
               _of_blocks(lambda y, e: (y / _filled(y, e, least)[..., None], e)))  # fmt: skip
        yield ("has the largest magnitudes of blocks over 448 for scales, and not the next powers of two",
               _of_blocks(lambda y, e: (y, e + np.log2(_filled(y, e, least)))))  # fmt: skip
        return
    for words, factor in (("lack", 1 / WEIGHT_SCALE), ("have twice", WEIGHT_SCALE)):
        shift = float(np.rint(np.log2(factor)))
        yield (f"has right features, and its weights {words} the factor weight_scale",
               _of_blocks(_to_power(1, shift), _constant(factor / 2**shift)))  # fmt: skip

    def off_power(y: Array, e: Array) -> Blocks:
        """Return the unrounded scale of each block over the power of two nearest to it, and that power's exponent."""
        exact = np.log2(_filled(y, e, least))
        return np.exp2(exact - np.rint(exact)), np.rint(exact)

    yield ("has the largest magnitude over 448 for its scale, in numbers and in weights, not the next power of two",
           _of_blocks(lambda y, e: (y / off_power(y, e)[0][..., None], e + off_power(y, e)[1]),
                      lambda y, e: off_power(y, e)[0]))  # fmt: skip


WEIGHTS = {
    ", and its weights lack the scale of the query": 0,
    ", and its weights are divided by the scale of the query": -1,
    ", and its weights have the scale of the query twice": 2,
}
BESIDE = {" beside scales of 1": 0, " beside the reciprocals of its scales": -1}
"""What lies beside right 8-bit floats by mistake, in words -> the power of the right scales."""


def _to_power(power: int, shift: float = 0.0) -> Callable[[Array, Array], Blocks]:
    return lambda y, e: _scaled_by(y, e, power * e + shift)


def _constant(factor: float) -> Callable[[Array, Array], float]:
    return lambda y, e: factor


def small_scales(seen: Seen) -> Named:
    """Yield that the scales of the blocks that fill them least are half as large as the numbers need."""
    (y, right), _, _ = in_blocks(seen)
    (_, stored), _, _ = in_blocks(seen, seen.actual(K))
    filled = _filled(y, right)
    small, enough = filled[(stored == right - 1) & (filled > 0)], filled[stored == right]
    if small.size and (enough > small.max()).any():
        limit = float((small.max() + enough[enough > small.max()].min()) / 2)
        yield (
            f"has scales half as large as the numbers need, and clips, in blocks that fill less than {limit:.2g} of "
            "448",
            _of_blocks(lambda y, e: _clipped(y, e - ((_filled(y, e) > 0) & (_filled(y, e) < limit)))),
        )


def in_blocks(seen: Seen, numbers: Array | None = None) -> tuple[Blocks, Array, Array]:
    """Return blocks and exponents, the features that have no scale, and what else is stored, of k or its definition."""
    kind, case, given = seen.subject.convention, seen.case, seen.definition(K)[0] if numbers is None else numbers
    assert isinstance(kind, BlockScales), "exponents belong to block scales"
    width, scaled = case.inputs[K].shape[-1], kind.scaled_features(case)
    blocks = scaled // kind.block_dim(scaled)
    y, rest, exponents, more = np.split(given, (scaled, width, width + blocks), axis=-1)
    return (y.reshape(*y.shape[:-1], blocks, -1), exponents), rest, more


def _of_blocks(
    change: Callable[[Array, Array], Blocks], times: Callable[[Array, Array], Any] = lambda y, e: 1.0
) -> Hypothesis:
    """Return the hypothesis of other features and exponents. All else that is stored is multiplied by ``times``."""

    def changed(seen: Seen, which: int) -> Bounded:
        ((y, exponents), rest, more), ((near, apart), room, off) = (
            in_blocks(seen),
            in_blocks(seen, seen.definition(K)[1]),
        )
        parts, others = change(y, exponents)
        with np.errstate(all="ignore"):
            larger = np.nan_to_num(abs(parts).max(-1) / abs(y).max(-1))
        shift = np.maximum(np.maximum(np.exp2(others - exponents), larger), 1)  # larger numbers round more
        apart = apart + 1e-5 * (others != np.rint(others))  # the logarithm of a rounded scale
        factor = times(y, exponents)
        wide = 1e-5 * bool(np.ndim(factor))  # the factor follows from rounded features
        flat = (*y.shape[:2], -1)
        return (
            np.concatenate((parts.reshape(flat), rest, others, factor * more), axis=-1),
            np.concatenate(((near * shift[..., None]).reshape(flat), room, apart, factor * (off + wide)), axis=-1),
        )

    return changed


def _filled(y: Array, exponents: Array, least: float = 0.0) -> Array:
    """Return the largest magnitude of each block, or the least, over the largest 8-bit float times the scale."""
    return np.maximum(abs(y).max(-1), least) / (MOST * np.exp2(exponents))


def _clipped(y: Array, exponents: Array) -> Blocks:
    """Return features that are clipped to the largest 8-bit float times their scale, and the exponents."""
    most = MOST * np.exp2(exponents)[..., None]
    return np.clip(y, -most, most), exponents


def _of_largest(y: Array, largest: Array) -> Blocks:
    """Return blocks whose scales bring the given number of each to the largest 8-bit float, or less."""
    least = 1e-10  # smaller numbers do not scale a block
    return _clipped(y, np.ceil(np.log2(np.maximum(largest, least) / MOST)))


def _scaled_by(y: Array, exponents: Array, others: Array) -> Blocks:
    """Return the features that stored numbers stand for beside other exponents."""
    return y * np.exp2(others - exponents)[..., None], others


def _by_twos(e: Array) -> Array:
    return np.repeat(np.maximum(e[..., ::2], e[..., 1::2]), 2, -1) if e.shape[-1] % 2 == 0 else e


def _halves_first(x: Array) -> Array:
    """Return ``x [n, H, ...]`` as memory has it that was filled with the halves of the heads one after another."""
    groups = x.reshape(len(x), 2 if x.shape[1] % 2 == 0 else 1, -1)
    return groups.swapaxes(0, 1).reshape(x.shape)


OF_BLOCKS: dict[str, Callable[[Array, Array], Blocks]] = {
    "rounds the exponents of its scales to the nearest, not up, and clips": lambda y, e: _clipped(
        y, e - ((_filled(y, e) > 0) & (_filled(y, e) < 0.5**0.5))
    ),
    "has scales twice as large as the numbers need": lambda y, e: (y, e + 1),
    "has scales half as large as the numbers need, and clips": lambda y, e: _clipped(y, e - 1),
    "has the scale of the largest number of a block, and not of the largest magnitude, and clips": lambda y, e: (
        _of_largest(y, y.max(-1))
    ),
    "has the scale of the first number of a block, and clips": lambda y, e: _of_largest(y, abs(y[..., 0])),
    "is divided by a scale, and stored with twice that scale": lambda y, e: (2 * y, e + 1),
    "is divided by a scale, and stored with half that scale": lambda y, e: (y / 2, e - 1),
    "has the scales of its blocks in reverse order": lambda y, e: _scaled_by(y, e, e[..., ::-1]),
    "has the scale of the next block": lambda y, e: _scaled_by(y, e, np.roll(e, -1, -1)),
    "has the scales of the other half of the heads": lambda y, e: _scaled_by(y, e, np.roll(e, e.shape[1] // 2, 1)),
    "has the scales of the next head": lambda y, e: _scaled_by(y, e, np.roll(e, -1, 1)),
    "lies in memory with one half of the heads of all tokens before the other half": lambda y, e: _scaled_by(
        _halves_first(y * np.exp2(-e)[..., None]) * np.exp2(e)[..., None], e, e
    ),
    "has one scale for all blocks of a head": lambda y, e: (y, np.broadcast_to(e.max(-1, keepdims=True), e.shape)),
    "has the scale of the first head of its token": lambda y, e: _clipped(y, np.broadcast_to(e[:, :1], e.shape)),
    "has one scale for each two blocks": lambda y, e: (y, _by_twos(e)),
    "has one scale for all heads of a token": lambda y, e: (y, np.broadcast_to(e.max(1, keepdims=True), e.shape)),
}  # fmt: skip
"""A mistake about block scales in words -> the features and exponents that are stored with it."""
