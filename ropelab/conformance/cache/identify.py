"""Identify what an operator that writes a paged cache does wrong: read its call in other ways, and compare.

A hypothesis is a changed call, or other rows of the right results. It explains a result if it reproduces every element,
also for fresh numbers, positions and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase, bits, numbers
from ropelab.conformance.cache.laws import with_yarn
from ropelab.conformance.cache.subject import Bounded, CacheSubject, Scaling, yarn
from ropelab.conformance.case import Sizes
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.identification import Identification
from ropelab.kernels import NO_POSITION
from ropelab.kernels.float8 import FLOAT8_DTYPES

PARTS = ("q", "the stored k", "the stored v")
SEEDS = (0, 1, 2)
"""The last seed is for the proof."""
DEFINITION = "q, and k and v in the slots of their tokens, are the definition"


@dataclass(frozen=True)
class Seen:
    """The results of a call: values ``[n, H, D]`` of each part, in the order of the tokens with a slot.

    With block scales the values of k are the features, and behind them the exponents and what else is stored.

    Attributes:
        case: the call.
        values: q of all tokens, then the stored k and v.
        outside: whether memory outside of the slots of the tokens changed.
    """

    case: CacheCase
    values: tuple[np.ndarray | None, ...]
    outside: bool


Change = Callable[[CacheCase], CacheCase]
Yarn = tuple[float, float, float, float]
"""Factor, low, high and attention factor."""
Hypothesis = Callable[[CacheSubject, CacheCase], Bounded]


def identify_cache(subject: CacheSubject, sizes: Sizes) -> Identification:
    """Return the deviations of an operator.

    Args:
        subject: the operator, which broke a law.
        sizes: the extents of the calls.
    """
    kind = subject.convention
    draws: dict[str, Callable[..., CacheCase]] = {"": subject.draw}
    if kind.own_angles:
        draws["where the call asks for YaRN"] = lambda *of, **options: with_yarn(subject.draw(*of, **options))
    if not kind.float8_only:
        for dtype in FLOAT8_DTYPES:
            draws[f"in caches of {str(dtype).removeprefix('torch.')}"] = partial(subject.draw, cache_dtype=dtype)
    for words, draw in draws.items():
        try:
            seen = [_seen(subject, draw(replace(sizes, tokens=sizes.tokens + seed), seed=seed)) for seed in SEEDS]
        except Exception:  # the convention has no such call, or the laws show the traceback
            continue
        found = _identified(subject, seen, words)
        if not found.silent:
            return found
    return Identification()


def _identified(subject: CacheSubject, seen: list[Seen], circumstances: str) -> Identification:
    """Return the deviations in some calls; ``circumstances`` says what they have in common."""
    found, right, unexplained = [], [], []
    for which, part in enumerate(PARTS):
        if seen[0].values[which] is None:
            continue
        wrong = [_off(one, which, _definition(subject, one.case, which)) for one in seen]
        if not any(elements.any() for elements in wrong):
            right.append(part)
            continue
        explanation = next(_explanations(subject, seen, which, part, wrong), None)
        if explanation is None:
            share = np.mean([elements.mean() for elements in wrong])
            unexplained.append(f"{part} {circumstances}".rstrip() + f": {share:.0%} of the elements")
        else:
            where = f"{explanation.scope.words} {circumstances}".strip()
            found.append(replace(explanation, scope=replace(explanation.scope, words=where)))
    if any(one.outside for one in seen):
        words = "is written outside of the slots of the tokens"
        found.append(Deviation("outside", words, DEFINITION, _nothing, scope=Scope("the memory of the caches")))
    if unexplained:
        facts = (*(f"{d} (proven)" for d in found), *(f"{name} is right" for name in right))
        return Identification((), False, tuple(unexplained), facts=facts)
    return Identification(tuple(found), bool(found), right=tuple(right) if found else ())


def _nothing(plan: object) -> None:
    """The hypothesis itself is the simulation of an operator's deviation."""


def _seen(subject: CacheSubject, case: CacheCase) -> Seen:
    written = subject(case)
    q = numbers(written.q.reshape(case.inputs[0].shape)[0]) if written.q is not None else None
    outside = ~case.named()
    changed = bool((bits(written.memory) != bits(case.memory))[outside].any())
    return Seen(case, (q, *_rows(subject, case, written.memory)), changed)


def _rows(subject: CacheSubject, case: CacheCase, memory: torch.Tensor) -> tuple[np.ndarray | None, ...]:
    """Return what a memory says of k and v of the tokens with a slot; with block scales v is not stored."""
    kind = subject.convention
    if isinstance(kind, BlockScales):
        return np.concatenate(kind.read(case, memory), axis=-1), None
    return tuple(map(numbers, case.rows(memory)))


def _stored(subject: CacheSubject, case: CacheCase, which: int, value: np.ndarray, bound: np.ndarray) -> Bounded:
    """Return value and bound of what is stored of exact results ``[n, H, D]`` and their bound."""
    kind = subject.convention
    if which and isinstance(kind, BlockScales):
        values, bounds = zip(*kind.truth(case, value, bound), strict=True)
        return np.concatenate(values, axis=-1), np.concatenate(bounds, axis=-1)
    dtype = case.memory.dtype if which else case.q_dtype or case.inputs[0].dtype
    return subject.stored(case, which, value, bound, dtype)


def _definition(subject: CacheSubject, case: CacheCase, which: int) -> Bounded:
    value, bound = subject.expected(case)[which]
    live = case.live.numpy() if which else slice(None)
    return _stored(subject, case, which, value[live], bound[live])


def _off(seen: Seen, which: int, expected: Bounded) -> np.ndarray:
    values, (right, bound) = seen.values[which], expected
    if values is None or values.shape != right.shape:
        return np.ones((1, 1, 1), bool)
    return ~(abs(values - right) <= 2 * bound)


def _explanations(
    subject: CacheSubject, seen: list[Seen], which: int, part: str, wrong: list[np.ndarray]
) -> Iterator[Deviation]:
    for words, hypothesis in _hypotheses(subject, which):
        for where, mask in _masks(wrong):
            if all(_reproduces(subject, one, which, hypothesis, mask) for one in seen):
                yield Deviation("call", words, DEFINITION, _nothing, scope=Scope(part, words=where))


def _reproduces(subject: CacheSubject, seen: Seen, which: int, hypothesis: Hypothesis, mask) -> bool:
    try:
        with np.errstate(all="ignore"):
            told, bound = hypothesis(subject, seen.case)
    except (ValueError, IndexError, TypeError):
        return False
    right, error = _definition(subject, seen.case, which)
    if told.shape != right.shape:
        return False
    hit = mask(len(right))[:, None, None]
    expected = np.where(hit, told, right), np.where(hit, bound, error)
    return not _off(seen, which, expected).any()


def _masks(wrong: list[np.ndarray]) -> Iterator[tuple[str, Callable[[int], np.ndarray]]]:
    """Yield places among the tokens with a slot that contain all wrong rows, the widest first."""
    yield "", lambda n: np.ones(n, bool)
    rows = [(np.flatnonzero(e.any(axis=(1, 2))), len(e)) for e in wrong]
    masks: dict[str, Callable[[int], np.ndarray]] = {
        "for the last token with a slot": lambda n: np.arange(n) == n - 1,
        "for the first token with a slot": lambda n: np.arange(n) == 0,
        "for every token with a slot but the last": lambda n: np.arange(n) < n - 1,
        "for every token with a slot but the first": lambda n: np.arange(n) > 0,
        "for every second token with a slot": lambda n: np.arange(n) % 2 == 1,
        "for the first token with a slot and every second after it": lambda n: np.arange(n) % 2 == 0,
    }
    for words, mask in masks.items():
        if all(mask(n)[hit].all() for hit, n in rows):
            yield words, mask


def _hypotheses(subject: CacheSubject, which: int) -> Iterator[tuple[str, Hypothesis]]:
    def called(change: Change, other: CacheSubject = subject) -> Hypothesis:
        return lambda _, case: _definition(other, change(case), which)

    def rows(order: Callable[[int], np.ndarray]) -> Hypothesis:
        def taken(subject: CacheSubject, case: CacheCase) -> Bounded:
            value, bound = _definition(subject, case, which)
            return value[order(len(value))], bound[order(len(value))]

        return taken

    if which:
        yield "is not written: the slots keep their contents", lambda s, case: _old(s, case, which)
        yield "is the one of the next token with a slot", rows(lambda n: np.roll(np.arange(n), -1))
        yield "is the one of the token with a slot before", rows(lambda n: np.roll(np.arange(n), 1))
        yield "is in the slots in reverse order", rows(lambda n: np.arange(n)[::-1])
        yield "is the one of the first tokens of the call, slot after slot", lambda s, case: _compacted(s, case, which)
        yield "is zero", lambda s, case: _zero(s, case, which)
    if which and isinstance(subject.convention, BlockScales):
        yield from ((words, _of_scales(change)) for words, change in SCALES.items())
    elif which:
        other = 3 - which
        yield f"is {'kv'[other - 1]}", lambda s, case: _definition(s, case, other)
    if not isinstance(subject.convention, BlockScales):
        yield from _scale_hypotheses(subject, which)
    yield "is the one of the next token", called(lambda c: _rolled(c, which, -1))
    yield "is the one of the token before", called(lambda c: _rolled(c, which, 1))
    if which == 2:
        return
    yield "is not rotated", called(lambda c: _at(c, lambda p: p * 0))
    yield "turns by minus the angle", called(lambda c: c, replace(subject, reversed=not subject.reversed))
    for step in (1, -1):
        yield f"takes position {step:+d} for the position", called(_stepped(step))
    yield "takes the number of the token for the position", called(lambda c: _at(c, lambda p: torch.arange(len(p))))
    yield "takes the position of the first token", called(lambda c: _at(c, lambda p: p[:1].expand(len(p))))
    yield "takes the position of the next token", called(lambda c: _at(c, lambda p: p.roll(-1)))
    yield "takes the position of the token before", called(lambda c: _at(c, lambda p: p.roll(1)))
    for layout in subject.convention.layouts:
        if layout != subject.layout:
            yield f"pairs features as {layout}", called(lambda c: c, replace(subject, layout=layout))
    norms: dict[str, Change] = {
        "is not normalized": lambda c: replace(c, weights=()),
        "is normalized with weights of one": lambda c: replace(c, weights=tuple(map(torch.ones_like, c.weights))),
        "is normalized with the weights of " + ("q" if which else "k"): lambda c: replace(c, weights=c.weights[::-1]),
        "is normalized after the rotation": lambda c: replace(c, norm_last=True),
        "is normalized before the rotation": lambda c: replace(c, norm_last=False),
        "is normalized without the offset of the weights": lambda c: replace(c, weight_offset=0.0),
        "is normalized with 1 added to the weights": lambda c: replace(c, weight_offset=c.weight_offset + 1),
    }
    for words, change in norms.items():
        yield words, called(change)
        yield f"{words}, and is not rotated", called(_unrotated(change))
    if subject.convention.own_angles:
        for words, scaling in SCALINGS.items():
            yield words, called(lambda c: c, replace(subject, scaling=scaling))
        for words, of in YARN.items():
            yield words, called(partial(_with_numbers, of=of))
        turned = replace(subject, scaling=lambda f, place, factor: 1.25 * yarn(f, place, factor))
        words = "has the angles, and not cosines and sines, multiplied by the attention factor"
        yield words, called(lambda c: replace(c, yarn=(*c.yarn[:3], 1.0)) if c.yarn[3] == 1.25 else c, turned)
    for eps in (0.0, 1e-5, 1e-8, 1e-3, 1e-2, 1e-12):
        yield f"is normalized with eps {eps:g}", called(partial(replace, eps=eps))


def _with_numbers(case: CacheCase, of: Callable[[float, float, float, float], Yarn]) -> CacheCase:
    return replace(case, yarn=of(*case.yarn))


def _of_scale(s: Sequence[float], other: int) -> float:
    return s[other]


def _scale_hypotheses(subject: CacheSubject, which: int) -> Iterator[tuple[str, Hypothesis]]:
    """Yield what becomes of the scale of an 8-bit float, in all features or in some."""
    names = ("q", "k", "v")
    changes: dict[str, Callable[[Sequence[float]], float]] = {
        "is stored without its scale": lambda s: 1.0,
        "is multiplied by its scale, in place of divided": lambda s: 1 / s[which],
        "is divided by its scale twice": lambda s: s[which] ** 2,
    }
    for other, name in enumerate(names):
        if other != which:
            changes[f"is divided by the scale of {name}"] = partial(_of_scale, other=other)
    parts: dict[str, Callable[[CacheCase, int], np.ndarray]] = {
        "": lambda case, width: np.ones(width, bool),
        " in the features that rotate": lambda case, width: np.arange(width) < case.rotary_dim,
        " in the features that do not rotate": lambda case, width: np.arange(width) >= case.rotary_dim,
    }
    for words, scale in changes.items():
        for where, features in parts.items():

            def stored(subject: CacheSubject, case: CacheCase, scale=scale, features=features) -> Bounded:
                scales = list(case.scales)
                scales[which] = scale(case.scales)
                right, told = (
                    _definition(subject, c, which)
                    for c in (case, replace(case, scales=(scales[0], scales[1], scales[2])))
                )
                hit = features(case, right[0].shape[-1])
                return np.where(hit, told[0], right[0]), np.where(hit, told[1], right[1])

            yield words + where, stored


SCALINGS: dict[str, Scaling] = {
    "does not scale its frequencies": lambda f, place, factor: f,
    "divides all frequencies by the factor": lambda f, place, factor: f / factor,
    "multiplies frequencies by the factor, in place of dividing them": lambda f, place, factor: yarn(
        f, place, 1 / factor
    ),
    "has YaRN's ramp reversed: fast pairs are divided": lambda f, place, factor: yarn(f, 1 - place, factor),
    "has YaRN's ramp without ends: it is not clamped to 0 and 1": lambda f, place, factor: (
        f * (1 - place) + f / factor * place
    ),
    "has the square of YaRN's ramp": lambda f, place, factor: yarn(f, np.clip(place, 0, 1) ** 2, factor),
    "has a smooth curve in place of YaRN's ramp": lambda f, place, factor: yarn(
        f, np.clip(place, 0, 1) ** 2 * (3 - 2 * np.clip(place, 0, 1)), factor
    ),
    "has a step at the low end in place of YaRN's ramp": lambda f, place, factor: np.where(place > 0, f / factor, f),
    "has a step at the high end in place of YaRN's ramp": lambda f, place, factor: np.where(place >= 1, f / factor, f),
    "mixes wavelengths in place of frequencies": lambda f, place, factor: (
        f / (1 - np.clip(place, 0, 1) + factor * np.clip(place, 0, 1))
    ),
}
"""A mistake about YaRN's frequencies in words -> the frequencies with it."""

YARN: dict[str, Callable[[float, float, float, float], Yarn]] = {
    "is not multiplied by the attention factor": lambda s, low, high, m: (s, low, high, 1.0),
    "is multiplied by the attention factor twice": lambda s, low, high, m: (s, low, high, m * m),
    "is divided by the attention factor": lambda s, low, high, m: (s, low, high, 1 / m),
    "takes low and high in each other's place": lambda s, low, high, m: (s, high, low, m),
    "rounds low down and high up": lambda s, low, high, m: (s, float(np.floor(low)), float(np.ceil(high)), m),
    "rounds low up and high down": lambda s, low, high, m: (s, float(np.ceil(low)), float(np.floor(high)), m),
    "rounds low and high down": lambda s, low, high, m: (s, float(np.floor(low)), float(np.floor(high)), m),
    "rounds low and high to the nearest pair": lambda s, low, high, m: (
        s,
        float(np.rint(low)),
        float(np.rint(high)),
        m,
    ),
    "takes the square root of the factor": lambda s, low, high, m: (s**0.5, low, high, m),
    "takes the factor twice": lambda s, low, high, m: (s * s, low, high, m),
}
"""A mistake about YaRN's numbers in words -> the numbers with it."""


def _at(case: CacheCase, change: Callable[[torch.Tensor], torch.Tensor]) -> CacheCase:
    positions = case.token_positions()[0]
    nowhere = positions == NO_POSITION
    return replace(case, positions=torch.where(nowhere, positions, change(torch.where(nowhere, 0, positions))))


def _stepped(step: int) -> Change:
    return lambda case: _at(case, lambda positions: positions + step)


def _unrotated(change: Change) -> Change:
    return lambda case: _at(change(case), lambda positions: positions * 0)


def _zero(subject: CacheSubject, case: CacheCase, which: int) -> Bounded:
    value, bound = _definition(subject, case, which)
    return np.zeros_like(value), np.zeros_like(bound)


def _rolled(case: CacheCase, which: int, step: int) -> CacheCase:
    """The case whose input is the one of another token; its position stays."""
    inputs = list(case.inputs)
    inputs[which] = inputs[which].roll(step, 1)
    return replace(case, inputs=tuple(inputs))


def _compacted(subject: CacheSubject, case: CacheCase, which: int) -> Bounded:
    value, bound = subject.expected(case)[which]
    live = int(case.live.sum())
    return _stored(subject, case, which, value[:live], bound[:live])


def _old(subject: CacheSubject, case: CacheCase, which: int) -> Bounded:
    old = _rows(subject, case, case.memory)[which - 1]
    assert old is not None, "a part that is stored was stored before"
    return old, np.zeros_like(old)


def _of_scales(change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Hypothesis:
    """Return the hypothesis of other features ``[n, H, blocks, D / blocks]`` and exponents ``[n, H, blocks]``."""

    def changed(subject: CacheSubject, case: CacheCase) -> Bounded:
        kind = subject.convention
        assert isinstance(kind, BlockScales), "exponents belong to block scales"
        live = case.live.numpy()
        value, bound = subject.expected(case)[1]
        (y, near), (exponents, apart), *rest = kind.truth(case, value[live], bound[live])
        blocks, scaled = exponents.shape[-1], kind.scaled_features(case)
        parts = y[..., :scaled].reshape(*y.shape[:-1], blocks, -1)
        parts, changed_exponents = change(parts, exponents)
        shift = np.maximum(np.exp2(changed_exponents - exponents), 1)  # a larger scale rounds more
        room = near[..., :scaled].reshape(parts.shape) * shift[..., None]
        values = np.concatenate((parts.reshape(*y.shape[:-1], -1), y[..., scaled:]), axis=-1)
        bounds = np.concatenate((room.reshape(*y.shape[:-1], -1), near[..., scaled:]), axis=-1)
        return (
            np.concatenate((values, changed_exponents, *(value for value, _ in rest)), axis=-1),
            np.concatenate((bounds, apart, *(error for _, error in rest)), axis=-1),
        )

    return changed


def _clipped(y: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return features that are clipped to the largest 8-bit float times their scale."""
    most = torch.finfo(FLOAT8_DTYPES[0]).max * np.exp2(exponents)[..., None]
    return np.clip(y, -most, most)


def _scaled_by(y: np.ndarray, exponents: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the features that stored numbers stand for beside other exponents."""
    return y * np.exp2(others - exponents)[..., None], others


def _halves_first(x: np.ndarray) -> np.ndarray:
    """Return ``x [n, H, ...]`` as memory has it that was filled with the halves of the heads one after another."""
    groups = x.reshape(len(x), 2, -1) if x.shape[1] % 2 == 0 else x.reshape(len(x), 1, -1)
    return groups.swapaxes(0, 1).reshape(x.shape)


SCALES: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "has scales twice as large as the numbers need": lambda y, e: (y, e + 1),
    "has scales half as large as the numbers need, and clips": lambda y, e: (_clipped(y, e - 1), e - 1),
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
    "has one scale for all heads of a token": lambda y, e: (
        y, np.broadcast_to(e.max(axis=1, keepdims=True), e.shape)
    ),
}  # fmt: skip
"""A mistake about block scales in words -> the features and exponents that are stored with it."""
