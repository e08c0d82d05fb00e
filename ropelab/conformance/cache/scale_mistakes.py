"""The mistakes of 8-bit floats and their scales in words, each with the numbers that it makes of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT
from ropelab.conformance.cache.block_scales import WEIGHT_SCALE, BlockScales, RopeAndQuantizeIndexer
from ropelab.conformance.cache.case import bits
from ropelab.conformance.cache.conventions import UNWRITTEN
from ropelab.conformance.cache.seen import PARTS, SCALES, Seen, told
from ropelab.conformance.cache.subject import Bounded, CacheSubject
from ropelab.conformance.cache_bounds import half_unit
from ropelab.kernels import NO_POSITION
from ropelab.kernels.float8 import FLOAT8_DTYPES

UNSIGNED_ZEROS = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""The formats of older AMD cards: their numbers are half those of `FLOAT8_DTYPES` with the same bits."""
Hypothesis = Callable[[CacheSubject, Seen, int], Bounded]
"""What an operator with a mistake makes of a part: value and bound."""


# ---------------------------------------------------------------------------------------------------- given scales


def given_scales(subject: CacheSubject, which: int) -> Iterator[tuple[str, Hypothesis]]:
    """Yield what becomes of the scale of an 8-bit float, in all features or in some."""
    right, inverse = ("multiplied", "divided") if subject.convention.scales_multiply else ("divided", "multiplied")
    changes: dict[str, Callable[[Sequence[float]], float]] = {
        "is stored without its scale": lambda s: 1.0,
        f"is {inverse} by its scale, in place of {right}": lambda s: 1 / s[which],
        f"is {right} by its scale twice": lambda s: s[which] ** 2,
        f"is {right} by the square root of its scale": lambda s: s[which] ** 0.5,
    }
    for other, name in enumerate("qkv"):
        if other != which:
            changes[f"is {right} by the scale of {name}"] = itemgetter(other)
    parts: dict[str, Callable[[CacheSubject, Seen, int], np.ndarray]] = {
        "": lambda subject, seen, width: np.ones(width, bool),
        " in the features that rotate": _turning,
        " in the features that do not rotate": lambda *of: ~_turning(*of),
    }
    for words, scale in changes.items():
        for where, features in parts.items():

            def scaled(subject: CacheSubject, seen: Seen, which: int, scale=scale, features=features) -> Bounded:
                scales = list(seen.case.scales)
                scales[which] = scale(seen.case.scales)
                right = seen.definition(subject, which)
                other = told(subject, replace(seen.case, scales=(scales[0], scales[1], scales[2])), which)
                hit = features(subject, seen, right[0].shape[-1])
                return np.where(hit, other[0], right[0]), np.where(hit, other[1], right[1])

            yield words + where, scaled
    yield "is rounded towards zero", _truncated
    yield "is NaN or infinite beyond the largest number, in place of the largest number", _not_clamped


def _turning(subject: CacheSubject, seen: Seen, width: int) -> np.ndarray:
    found = np.zeros(width, bool)
    found[subject.turning(width, seen.case.rotary_dim)] = True
    return found


def _truncated(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
    """The number is at most as large as the quotient, and less than a unit in the last place smaller."""
    value, bound = seen.definition(subject, which)
    half = half_unit(abs(value), seen.case.memory.dtype)
    error = np.maximum(bound - half, 0)
    return value - np.sign(value) * half, (half + error) / 2  # the evidence allows twice the bound


def _not_clamped(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
    value, bound = seen.definition(subject, which)
    actual = seen.actual(subject, which)
    assert actual is not None, "a hypothesis is about a part that is there"
    lost = (abs(value) >= torch.finfo(seen.case.memory.dtype).max) & ~np.isfinite(actual)
    return np.where(lost, actual, value), bound


def other_format(subject: CacheSubject, seen: list[Seen], which: int) -> str:
    """Return in which other 8-bit format the stored bits are right, or an empty string."""
    dtype = seen[0].case.memory.dtype
    if dtype not in FLOAT8_DTYPES or which not in (1, 2) or isinstance(subject.convention, BlockScales):
        return ""
    for other in (*FLOAT8_DTYPES, *UNSIGNED_ZEROS):
        like = FLOAT8_DTYPES[UNSIGNED_ZEROS.index(other)] if other in UNSIGNED_ZEROS else other
        if other != dtype and all(_has_bits(subject, one, which, other, like) for one in seen):
            return f"has the bits of {str(other).removeprefix('torch.')}"
    return ""


def _has_bits(subject: CacheSubject, seen: Seen, which: int, other: torch.dtype, like: torch.dtype) -> bool:
    """Return whether the bits of a part are right in another format, whose numbers round as those of ``like``."""
    case = seen.case
    rows = bits(case.rows(seen.written.memory)[which - 1]).view(other).float().cpu().numpy().astype(EXACT)
    right, bound = told(subject, replace(case, memory=bits(case.memory).view(like)), which)
    most = torch.finfo(other).max
    return rows.shape == right.shape and bool((abs(rows - np.clip(right, -most, most)) <= 2 * bound).all())


# ----------------------------------------------------------------------------------------------------- made scales


def made_scales(which: int) -> Iterator[tuple[str, Hypothesis]]:
    """Yield what an operator may take for the scale of a head of a token."""
    own = which - SCALES

    def of(change: Callable[[np.ndarray], np.ndarray]) -> Hypothesis:
        def changed(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
            value, bound = seen.definition(subject, which)
            found = np.broadcast_to(change(value), value.shape)
            room = np.broadcast_to(change(value + bound) - found, value.shape)
            return found, np.maximum(abs(room), bound * abs(found / value))

        return changed

    for other in (0, 1, 2):
        if other != own:
            yield f"is that of {PARTS[other]}", partial(_of_part, part=other)
    yield "is not written", of(lambda s: np.full_like(s, UNWRITTEN))
    yield "is 1", of(np.ones_like)
    yield "is its reciprocal", of(lambda s: 1 / s)
    yield "is the largest magnitude itself, not divided by the largest 8-bit float", _undivided
    yield "is the largest of all heads of the token", of(lambda s: s.max(1, keepdims=True))
    yield "is that of the first head of the token", of(lambda s: s[:, :1])
    yield "is that of the next head", of(lambda s: np.roll(s, -1, 1))
    yield "is that of the head before", of(lambda s: np.roll(s, 1, 1))
    yield "is that of the next token", of(lambda s: np.roll(s, -1, 0))
    yield "is that of the token before", of(lambda s: np.roll(s, 1, 0))
    if own < 2:
        yield "is made before the rotation", _before


def _of_part(subject: CacheSubject, seen: Seen, which: int, part: int) -> Bounded:
    return told(subject, seen.case, SCALES + part)


def _undivided(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
    most = float(torch.finfo(seen.case.memory.dtype).max)
    return tuple(most * x for x in seen.definition(subject, which))  # type: ignore[return-value]


def _before(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
    at = seen.case.token_positions()[0]
    return told(subject, replace(seen.case, positions=torch.where(at == NO_POSITION, at, 0 * at)), which)


# ---------------------------------------------------------------------------------------------------- block scales


def block_scales(subject: CacheSubject) -> Iterator[tuple[str, Hypothesis]]:
    """Yield what becomes of the scales of blocks, and of the weights that take them in."""
    for words, change in OF_BLOCKS.items():
        yield words, _of_blocks(change)
    weights = isinstance(subject.convention, RopeAndQuantizeIndexer)
    for words, power in WEIGHTS.items() if weights else BESIDE.items():
        yield f"has right features{words}", _of_blocks(partial(_to_power, power=power))
    for words, factor in (("lack", 1 / WEIGHT_SCALE), ("have twice", WEIGHT_SCALE)) if weights else ():
        shift = float(np.rint(np.log2(factor)))
        words = f"has right features, and its weights {words} the factor weight_scale"
        yield words, _of_blocks(partial(_shifted, by=shift), partial(_constant, factor=factor / 2**shift))
    least = subject.convention.amax_epsilon if isinstance(subject.convention, BlockScales) else 0.0
    if weights:
        words = "has the largest magnitude over 448 for its scale, in numbers and in weights, not the next power of two"
        yield words, _of_blocks(partial(_beside_nearest, least=least), partial(_off_power, least=least))
        return
    words = "is divided by the largest magnitude of a block over 448, beside the next power of two as the scale"
    yield words, _of_blocks(partial(_divided, least=least))
    words = "has the largest magnitudes of blocks over 448 for scales, and not the next powers of two"
    yield words, _of_blocks(partial(_unrounded, least=least))


WEIGHTS = {
    ", and its weights lack the scale of the query": 0,
    ", and its weights are divided by the scale of the query": -1,
    ", and its weights have the scale of the query twice": 2,
}
BESIDE = {" beside scales of 1": 0, " beside the reciprocals of its scales": -1}
"""What lies beside right 8-bit floats by mistake, in words -> the power of the right scales."""


def _to_power(y: np.ndarray, e: np.ndarray, power: int) -> tuple[np.ndarray, np.ndarray]:
    return _scaled_by(y, e, power * e)


def _shifted(y: np.ndarray, e: np.ndarray, by: float) -> tuple[np.ndarray, np.ndarray]:
    return _scaled_by(y, e, e + by)


def _constant(y: np.ndarray, e: np.ndarray, factor: float) -> float:
    return factor


def _off_power(y: np.ndarray, e: np.ndarray, least: float) -> np.ndarray:
    """Return the unrounded scale of each block over the power of two nearest to it."""
    exact = np.log2(_filled(y, e, least))
    return np.exp2(exact - np.rint(exact))


def _beside_nearest(y: np.ndarray, e: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Return what is read of features that are divided by the unrounded scale, and the power of two nearest to it."""
    return y / _off_power(y, e, least)[..., None], e + np.rint(np.log2(_filled(y, e, least)))


def _divided(y: np.ndarray, e: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    return y / _filled(y, e, least)[..., None], e


def _unrounded(y: np.ndarray, e: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    return y, e + np.log2(_filled(y, e, least))


def small_scales(subject: CacheSubject, seen: Seen) -> Iterator[tuple[str, Hypothesis]]:
    """Yield that the scales of the blocks that fill them least are half as large as the numbers need."""
    kind, case = subject.convention, seen.case
    assert isinstance(kind, BlockScales), "exponents belong to block scales"
    value, bound = subject.expected(case)[1]
    (y, _), (right, _), *_ = kind.truth(case, *(x[case.live.numpy()] for x in (value, bound)))
    stored = kind.read(case, seen.written.memory)[1]
    filled = _filled(y[..., : kind.scaled_features(case)].reshape(*right.shape, -1), right)
    small, enough = filled[(stored == right - 1) & (filled > 0)], filled[stored == right]
    if not small.size or not (enough > small.max()).any():
        return
    limit = float((small.max() + enough[enough > small.max()].min()) / 2)

    def smaller(y: np.ndarray, e: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        filled = _filled(y, e)
        less = e - ((filled > 0) & (filled < limit))
        return _clipped(y, less), less

    words = f"has scales half as large as the numbers need, and clips, in blocks that fill less than {limit:.2g} of 448"
    yield words, _of_blocks(smaller)


def _filled(y: np.ndarray, exponents: np.ndarray, least: float = 0.0) -> np.ndarray:
    """Return the largest magnitude of each block, or the least, over the largest 8-bit float times the scale."""
    return np.maximum(abs(y).max(-1), least) / (torch.finfo(FLOAT8_DTYPES[0]).max * np.exp2(exponents))


def _of_largest(y: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Return the exponents of scales that bring the given number of each block to the largest 8-bit float, or less."""
    least = 1e-10  # smaller numbers do not scale a block
    return np.ceil(np.log2(np.maximum(largest, least) / torch.finfo(FLOAT8_DTYPES[0]).max))


def _of_blocks(
    change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    times: Callable[[np.ndarray, np.ndarray], Any] | None = None,
) -> Hypothesis:
    """Return the hypothesis of other features ``[n, H, blocks, D / blocks]`` and exponents ``[n, H, blocks]``.

    Everything else that is stored is multiplied by ``times``.
    """

    def changed(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
        kind, case = subject.convention, seen.case
        assert isinstance(kind, BlockScales), "exponents belong to block scales"
        live = case.live.numpy()
        value, bound = subject.expected(case)[1]
        (y, near), (exponents, apart), *rest = kind.truth(case, value[live], bound[live])
        blocks, scaled = exponents.shape[-1], kind.scaled_features(case)
        given = y[..., :scaled].reshape(*y.shape[:-1], blocks, -1)
        parts, changed_exponents = change(given, exponents)
        with np.errstate(all="ignore"):
            larger = np.nan_to_num(abs(parts).max(-1) / abs(given).max(-1))
        shift = np.maximum(np.maximum(np.exp2(changed_exponents - exponents), larger), 1)  # larger numbers round more
        room = near[..., :scaled].reshape(parts.shape) * shift[..., None]
        apart = apart + 1e-5 * (changed_exponents != np.rint(changed_exponents))  # the logarithm of a rounded scale
        values = np.concatenate((parts.reshape(*y.shape[:-1], -1), y[..., scaled:]), axis=-1)
        bounds = np.concatenate((room.reshape(*y.shape[:-1], -1), near[..., scaled:]), axis=-1)
        factor = times(given, exponents) if times else 1.0
        wide = 1 if np.ndim(factor) == 0 else 1 + 1e-5  # the factor follows from rounded features
        return (
            np.concatenate((values, changed_exponents, *(factor * value for value, _ in rest)), axis=-1),
            np.concatenate((bounds, apart, *(factor * (error + wide - 1) for _, error in rest)), axis=-1),
        )

    return changed


def _clipped(y: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return features that are clipped to the largest 8-bit float times their scale."""
    most = torch.finfo(FLOAT8_DTYPES[0]).max * np.exp2(exponents)[..., None]
    return np.clip(y, -most, most)


def _scaled_by(y: np.ndarray, exponents: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the features that stored numbers stand for beside other exponents."""
    return y * np.exp2(others - exponents)[..., None], others


def _nearest(y: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return the exponents nearest to those that the largest magnitudes of blocks need: ``e``, or 1 less."""
    filled = _filled(y, e)
    return e - ((filled > 0) & (filled < 0.5**0.5))


def _by_twos(e: np.ndarray) -> np.ndarray:
    return np.repeat(np.maximum(e[..., ::2], e[..., 1::2]), 2, -1) if e.shape[-1] % 2 == 0 else e


def _halves_first(x: np.ndarray) -> np.ndarray:
    """Return ``x [n, H, ...]`` as memory has it that was filled with the halves of the heads one after another."""
    groups = x.reshape(len(x), 2, -1) if x.shape[1] % 2 == 0 else x.reshape(len(x), 1, -1)
    return groups.swapaxes(0, 1).reshape(x.shape)


OF_BLOCKS: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "rounds the exponents of its scales to the nearest, not up, and clips": lambda y, e: (
        _clipped(y, _nearest(y, e)), _nearest(y, e)
    ),
    "has scales twice as large as the numbers need": lambda y, e: (y, e + 1),
    "has scales half as large as the numbers need, and clips": lambda y, e: (_clipped(y, e - 1), e - 1),
    "has the scale of the largest number of a block, and not of the largest magnitude, and clips": lambda y, e: (
        _clipped(y, _of_largest(y, y.max(-1))), _of_largest(y, y.max(-1))
    ),
    "has the scale of the first number of a block, and clips": lambda y, e: (
        _clipped(y, _of_largest(y, abs(y[..., 0]))), _of_largest(y, abs(y[..., 0]))
    ),
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
    "has the scale of the first head of its token": lambda y, e: (
        _clipped(y, np.broadcast_to(e[:, :1], e.shape)), np.broadcast_to(e[:, :1], e.shape)
    ),
    "has one scale for each two blocks": lambda y, e: (y, _by_twos(e)),
    "has one scale for all heads of a token": lambda y, e: (
        y, np.broadcast_to(e.max(axis=1, keepdims=True), e.shape)
    ),
}  # fmt: skip
"""A mistake about block scales in words -> the features and exponents that are stored with it."""
