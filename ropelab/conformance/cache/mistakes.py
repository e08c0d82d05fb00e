"""The mistakes of operators that write a paged cache in words, each with the numbers that it makes of a call.

A mistake is a changed call, a changed part of the definition, or other rows of the right results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, exact
from ropelab.conformance.cache.addresses import POSITIONS, Numbers, Tokens, slot_rules
from ropelab.conformance.cache.case import CacheCase
from ropelab.conformance.cache.conventions import UNWRITTEN
from ropelab.conformance.cache.definition import Definition, yarn
from ropelab.conformance.cache.scale_mistakes import block_scales, given_scales, made_scales
from ropelab.conformance.cache.seen import RETURNED, SCALES, Hypothesis, K, Q, Seen, V, source
from ropelab.conformance.cache.subject import Bounded
from ropelab.conformance.identify.vocabulary import SIGNS, TERMS
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import LAYOUTS, pairs, permutation

Change = Callable[[CacheCase], CacheCase]
Named = Iterator[tuple[str, Hypothesis]]
Array = np.ndarray


def mistakes(seen: list[Seen], which: int) -> Named:
    """Yield the mistakes that a part of the results can have, the most common first."""
    kind, blocks = seen[0].subject.convention, seen[0].blocks
    if which >= SCALES:
        yield from made_scales(which)
        yield from _rows("is that")
        yield from _rows("is that", 0)
        if which > SCALES:
            for words, slots in slot_rules():
                yield words, _scales_in(slots)
        return
    if seen[0].earlier is not None:
        yield from _recalled()
    if which in (K, V):
        yield "is not written: the slots keep their contents", _old
        yield "is the one of the next token with a slot", _moved(0, lambda n: np.roll(np.arange(n), -1))
        yield "is the one of the token with a slot before", _moved(0, lambda n: np.roll(np.arange(n), 1))
        yield "is in the slots in reverse order", _moved(0, lambda n: np.arange(n)[::-1])
        yield "is the one of the first tokens of the call, slot after slot", _compacted
        yield "is zero", lambda seen, which: (0 * seen.definition(which)[0], 0 * seen.definition(which)[1])
    if which == K and blocks:
        yield from block_scales(seen[0])
    elif which in (K, V):
        yield f"is {'kv'[2 - which]}", lambda seen, which: seen.told(3 - which)
    if which < RETURNED and not blocks:
        yield from given_scales(seen[0], which)
    own = source(which)
    for words, step in (("is the one of the next token", -1), ("is the one of the token before", 1)):
        yield words, called(partial(_rolled, own=own, step=step))
    yield from _rows("is the one")
    yield "has its heads in reverse order", _moved(1, lambda n: np.arange(n)[::-1])
    if which == V:
        for dtype in (torch.bfloat16, torch.float16):
            words = f"is rounded to {str(dtype).removeprefix('torch.')}"
            yield words, called(partial(_rounded, dtype=dtype))
        return
    if which == K and kind.queries and not kind.latent:
        yield ("is made of the heads of q with the same numbers",
               called(lambda c: _input(c, K, c.inputs[Q][:, :, : c.inputs[K].shape[2]])))  # fmt: skip
    for words, rule in POSITIONS.items():
        yield words, _at(rule)
    yield from _rotations(seen[0])
    if seen[0].case.weights:
        yield from _norms(which)
    elif kind.optional_norm:
        yield ("is normalized, although the call gives no weights",
               called(lambda c: replace(c, weights=tuple(x.new_ones(x.shape[-1]) for x in c.inputs[:2]))))  # fmt: skip
    if kind.own_angles:
        yield from _yarn()
    if kind.own_angles or seen[0].case.table_free:
        yield "has angles that are products in float32", _angles_in_float32
    if seen[0].case.inputs[own].dtype.itemsize == 2 and not seen[0].subject.rounds_operations:
        yield "rounds after every operation, not once at the end", called(lenient=True)


# ------------------------------------------------------------------------------------------- how a mistake is built


def called(change: Change = lambda case: case, room: float = 1, **parts: Any) -> Hypothesis:
    """Return the hypothesis of a changed call and of changed parts of the definition.

    Args:
        change: returns the changed call.
        room: the bound as a multiple of that of the definition, for a mistake with more roundings.
        parts: as for `Seen.told`.
    """

    def taken(seen: Seen, which: int) -> Bounded:
        value, bound = seen.told(which, change(seen.case), **parts)
        return value, room * bound

    return taken


def _moved(axis: int, order: Callable[[int], Array]) -> Hypothesis:
    """Return the hypothesis of the right rows of other tokens (axis 0) or of other heads (axis 1)."""

    def taken(seen: Seen, which: int) -> Bounded:
        value, bound = seen.definition(which)
        at = order(value.shape[axis]).astype(int)
        return value.take(at, axis), bound.take(at, axis)

    return taken


def _rows(verb: str, axis: int = 1) -> Named:
    noun = ("token", "head")[axis]
    yield f"{verb} of the next {noun}", _moved(axis, lambda n: np.roll(np.arange(n), -1))
    yield f"{verb} of the {noun} before", _moved(axis, lambda n: np.roll(np.arange(n), 1))
    yield (f"is that of the first {noun}" + (" in all heads" if verb == "is the one" else " of the token" * axis),
           _moved(axis, np.zeros))  # fmt: skip


def _input(case: CacheCase, which: int, x: torch.Tensor) -> CacheCase:
    return replace(case, inputs=(*case.inputs[:which], x, *case.inputs[which + 1 :]))


def _rolled(case: CacheCase, own: int, step: int) -> CacheCase:
    """Return the case whose input is that of another token; its position stays."""
    return _input(case, own, case.inputs[own].roll(step, 1))


def _rounded(case: CacheCase, dtype: torch.dtype) -> CacheCase:
    return _input(case, V, case.inputs[V].to(dtype).to(case.inputs[V].dtype))


def _old(seen: Seen, which: int) -> Bounded:
    old = seen.stored(which, seen.case.memory)
    assert old is not None, "a part that is stored was stored before"
    return old, np.zeros_like(old)


def _compacted(seen: Seen, which: int) -> Bounded:
    live = int(seen.case.live.sum())
    value, bound = seen.subject.part(seen.case, which)
    return seen.made_of(which, value[:live], bound[:live])


def _scales_in(slots: Numbers) -> Hypothesis:
    """Return what the slots of the tokens hold where each token's scale is written to another slot."""

    def taken(seen: Seen, which: int) -> Bounded:
        tokens = Tokens.of(seen)
        live, names = tokens.slot >= 0, slots(tokens)
        own, names, filled = tokens.slot[live], names[live], []
        for scales, before in zip(seen.definition(which), (UNWRITTEN, 0.0), strict=True):
            memory = np.full((tokens.total, *scales.shape[1:]), before, scales.dtype)
            memory[names[names >= 0]] = scales[names >= 0]
            filled.append(memory[own])
        return filled[0], filled[1]

    return taken


def _recalled() -> Named:
    """Yield what an operator takes from the call before."""
    taken = {
        "takes the positions of the earlier call": ("positions",),
        "is the one of the earlier call": ("inputs", "positions", "weights"),
        "is made of the input of the earlier call": ("inputs",),
        "is normalized with the weights of the earlier call": ("weights",),
        "is divided by the scale of the earlier call": ("scales",),
    }
    for words, names in taken.items():
        yield words, partial(_of_earlier, names=names)


def _of_earlier(seen: Seen, which: int, names: tuple[str, ...]) -> Bounded:
    return seen.told(which, replace(seen.case, **{name: getattr(seen.earlier, name) for name in names}))


def _at(rule: Numbers, change: Change = lambda case: case) -> Hypothesis:
    """Return the hypothesis of other positions in a changed call; a token without a position has none."""

    def taken(seen: Seen, which: int) -> Bounded:
        tokens = Tokens.of(seen)
        nowhere = tokens.position == NO_POSITION
        tokens = replace(tokens, position=np.where(nowhere, 0, tokens.position))
        positions = torch.from_numpy(np.where(nowhere, NO_POSITION, rule(tokens))[seen.number])
        return seen.told(which, replace(change(seen.case), positions=positions))

    return taken


# --------------------------------------------------------------------------------------------------------- rotation


def _rotations(seen: Seen) -> Named:
    subject = seen.subject
    yield "turns by minus the angle", called(reversed=not subject.reversed)
    for words, tables in TABLES.items():
        yield words, called(room=3 if "twice" in words else 1, tables=tables)
    others = [layout for layout in LAYOUTS if layout != subject.layout]
    for layout in others:
        yield f"pairs features as {layout}", called(layout=layout)
    for words, members in MEMBERS.items():
        yield words, called(members=members)
    for layout in others:
        yield (f"is written with the pairs as {layout}",
               called(stores=partial(_laid_out, layout=layout)))  # fmt: skip
    for number, part in ((1, "sin0"), (3, "sin1"), (0, "cos0"), (2, "cos1")):
        for words, factor in ((f"is reflected: {SIGNS[part]}", -1), (f"lacks the term with {TERMS[part]}", 0)):
            yield words, called(turn=_turn(np.where(np.arange(4) == number, factor, 1)))
    yield "computes second members of pairs from first members that are already rotated", _in_turn


TABLES: dict[str, Callable[[Array, Array, float], Bounded]] = {
    "has the attention factor on the cosines, and not on the sines": lambda c, s, m: (c, s / m),
    "has the attention factor on the sines, and not on the cosines": lambda c, s, m: (c / m, s),
    "takes cosines for sines and sines for cosines": lambda c, s, m: (s, c),
    "takes the frequencies in reverse order": lambda c, s, m: (c[..., ::-1], s[..., ::-1]),
    "takes the frequency of the next pair": lambda c, s, m: (np.roll(c, -1, -1), np.roll(s, -1, -1)),
    "takes the frequency of the pair before": lambda c, s, m: (np.roll(c, 1, -1), np.roll(s, 1, -1)),
    "swaps the frequencies of the first half of the pairs with those of the second half": lambda c, s, m: (
        np.roll(c, c.shape[-1] // 2, -1), np.roll(s, s.shape[-1] // 2, -1)
    ),
    "has the frequency of the first pair in all pairs": lambda c, s, m: (0 * c + c[..., :1], 0 * s + s[..., :1]),
    "is rotated twice": lambda c, s, m: (c * c - s * s, 2 * c * s),
}  # fmt: skip
"""A mistake about cosines and sines in words -> the tables with it."""


def _half_a_head(x: Array, turns: slice, layout: str) -> tuple[Array, Array]:
    half, count = x.shape[-1] // 2, x[..., turns].shape[-1] // 2
    return x[..., :count], x[..., half : half + count]


def _other_end(x: Array, turns: slice, layout: str) -> tuple[Array, Array]:
    width, count = x.shape[-1], x[..., turns].shape[-1]
    return pairs(x[..., :count] if turns.start else x[..., width - count :], layout)


MEMBERS: dict[str, Callable[[Array, slice, str], tuple[Array, Array]]] = {
    "pairs feature i with the feature half a head further, and not half of the features that rotate": _half_a_head,
    "rotates the features at the other end of the head": _other_end,
}
"""A mistake about pairs in words -> views of the first and the second members."""


def _laid_out(x: Array, turns: slice, _: str, layout: str) -> tuple[Array, Array]:
    return pairs(x[..., turns], layout)


def _turn(factors: Array) -> Callable[[Array, Array, Array, Array], tuple[Array, Array]]:
    c0, s0, c1, s1 = factors.tolist()
    return lambda x0, x1, c, s: (c0 * x0 * c - s0 * x1 * s, c1 * x1 * c + s1 * x0 * s)


def _in_turn(seen: Seen, which: int) -> Bounded:
    """Members of pairs are off by the errors of both: one is made from the other."""
    value, bound = seen.told(which, turn=lambda x0, x1, c, s: (x0 * c - x1 * s, x1 * c + (x0 * c - x1 * s) * s))
    turns, members = seen.subject.turning(value.shape[-1], seen.case.rotary_dim), seen.subject.definition.members
    summed = bound.copy()
    for room in members(summed, turns, seen.subject.layout):
        room[...] = sum(members(bound, turns, seen.subject.layout))
    return value, summed


def _angles_in_float32(seen: Seen, which: int) -> Bounded:
    frequencies = exact(inverse_frequencies(seen.case.rotary_dim, seen.subject.base)).astype(np.float32)
    angles = seen.case.token_positions()[0].numpy().astype(np.float32)[:, None, None] * frequencies
    return turned_by(lambda at: angles.astype(EXACT))(seen, which)


def turned_by(angles: Callable[[Array], Array]) -> Hypothesis:
    """Return the hypothesis of other angles ``[T, 1, R/2]``, from the positions ``[T, 1, 1]``."""

    def taken(seen: Seen, which: int) -> Bounded:
        found = angles(seen.case.token_positions()[0].numpy()[:, None, None])
        subject = seen.subject
        sense = -1.0 if subject.reversed and (seen.case.table_free or subject.convention.own_angles) else 1.0
        return seen.told(which, tables=lambda c, s, m: (m * np.cos(found), m * sense * np.sin(found)))

    return taken


# ------------------------------------------------------------------------------------------------------------- norm

Norm = Callable[[Array, Array, float, slice], Array]


@dataclass(frozen=True)
class _Row:
    """The features that share a mean, ``[..., W]``, eps, and those of them that rotate."""

    x: Array
    eps: float
    turns: slice

    def mean(self, features: Any = slice(None), power: int = 2) -> Array:
        """Return the mean square, or the mean of another power of the magnitudes."""
        return (abs(self.x[..., features]) ** power).mean(-1, keepdims=True)

    def over(self, count: float) -> Array:
        """Return the root of the sum of the squares over a count, and eps."""
        return np.sqrt(self.mean() * self.x.shape[-1] / count + self.eps)

    @property
    def rest(self) -> Array:
        return np.delete(np.arange(self.x.shape[-1]), np.r_[self.turns])


def _divided(root: Callable[[_Row], Array]) -> Norm:
    """Return a norm of rows, from the number by which a row is divided."""

    def norm(z: Array, weight: Array, eps: float, turns: slice) -> Array:
        rows = z.reshape(*z.shape[:-2], -1, weight.size)
        return (weight * rows / root(_Row(rows, eps, turns))).reshape(z.shape)

    return norm


def _in_parts(turned: bool, rest: bool) -> Norm:
    """Return a norm of the features that turn, of the others, or of both, each by their own mean square."""

    def norm(z: Array, weight: Array, eps: float, turns: slice) -> Array:
        y, rotates = z.copy(), np.zeros(z.shape[-1], bool)
        rotates[turns] = True
        for hit in (part for part in [rotates] * turned + [~rotates] * rest if part.any()):
            y[..., hit] = weight[hit] * z[..., hit] / np.sqrt((z[..., hit] ** 2).mean(-1, keepdims=True) + eps)
        return y

    return norm


def _over_heads(groups: Callable[[int], int]) -> Norm:
    """Return a norm over groups of the heads of a token, as nearly of one size as can be."""

    def norm(z: Array, weight: Array, eps: float, turns: slice) -> Array:
        parts = np.array_split(z, groups(z.shape[-2]), axis=-2)
        roots = [np.sqrt((part**2).mean((-2, -1), keepdims=True) + eps) for part in parts]
        y = np.concatenate([part / root for part, root in zip(parts, roots, strict=True)], axis=-2)
        return weight.reshape(-1, z.shape[-1]) * y

    return norm


def _weighted(change: Callable[[Array, slice], Array]) -> Norm:
    return lambda z, w, eps, t: _DEFINITION(z, change(w, t), eps, t)


def _reordered(source: str, target: str) -> Norm:
    """Return the norm with the weights of the features that rotate in the order of another layout."""

    def change(weight: Array, turns: slice) -> Array:
        found = weight.copy()
        found[turns] = weight[turns][permutation(len(weight[turns]), source, target).numpy()]
        return found

    return _weighted(change)


_DEFINITION: Norm = Definition().norm

NORMS: dict[str, Norm] = {
    "adds eps to the root of the mean square, not to the mean square": _divided(lambda r: np.sqrt(r.mean()) + r.eps),
    "adds the root of eps to the root of the mean square": _divided(lambda r: np.sqrt(r.mean()) + r.eps**0.5),
    "takes the larger of the mean square and eps, not their sum": _divided(
        lambda r: np.sqrt(np.maximum(r.mean(), r.eps))
    ),
    "is divided by the root of the sum of the squares, not of their mean": _divided(lambda r: r.over(1)),
    "divides the sum of the squares by one less than the number of features": _divided(
        lambda r: r.over(max(r.x.shape[-1] - 1, 1))
    ),
    "divides the sum of the squares by the number of features that rotate": _divided(
        lambda r: r.over(r.x[..., r.turns].shape[-1])
    ),
    "is divided by the mean square, not by its root": _divided(lambda r: r.mean() + r.eps),
    "is divided by the mean magnitude, not by the root of the mean square": _divided(
        lambda r: r.mean(power=1) + r.eps
    ),
    "is normalized by the mean square of the features that rotate": _divided(
        lambda r: np.sqrt(r.mean(r.turns) + r.eps)
    ),
    "is normalized by the mean square of the features that do not rotate": _divided(
        lambda r: np.sqrt(r.mean(r.rest) + r.eps)
    ),
    "is normalized in the features that rotate only, by their own mean square": _in_parts(True, False),
    "is normalized in the features that do not rotate only, by their own mean square": _in_parts(False, True),
    "is normalized in the features that rotate and in the others apart": _in_parts(True, True),
    "is multiplied by the weights twice": _weighted(lambda w, t: w * w),
    "is divided by the weights": _weighted(lambda w, t: 1 / w),
    "has the weights in the order of interleaved pairs where pairs are halves": _reordered("split_half", "interleaved"),
    "has the weights in the order of halves where pairs are interleaved": _reordered("interleaved", "split_half"),
    "is normalized over all heads of the token": _over_heads(lambda heads: 1),
    "is normalized over each half of the heads of the token": _over_heads(lambda heads: min(2, heads)),
    "is normalized head by head": _over_heads(lambda heads: heads),
}  # fmt: skip
"""A mistake about the norm in words -> the heads that it normalizes."""


def _layer_normed(seen: Seen, which: int) -> Bounded:
    """The result of a layer norm. A centred feature is off by the rounding of a sum of D features, up to the largest.

    The division by the root and the weight scale this error, and the rotation adds that of the partner.
    """
    norm: Norm = lambda z, w, eps, t: _DEFINITION(z - z.mean(-1, keepdims=True), w, eps, t)  # noqa: E731
    (value, bound), x = seen.told(which, norm=norm), seen.given(which)
    weight = abs(exact(seen.case.weights[source(which)]) + seen.case.weight_offset).max()
    root = np.sqrt(x.var(-1, keepdims=True) + seen.case.eps)
    room = 2 * (x.shape[-1] + 1) * FLOAT32_UNIT * abs(x).max(-1, keepdims=True) / root * weight
    return value, 2 * bound + room


def _divided_by_features(of: int) -> Hypothesis:
    def taken(seen: Seen, which: int) -> Bounded:
        count = math.prod(seen.case.inputs[of].shape[2:])
        return called(room=2, norm=_divided(lambda r: r.over(count)))(seen, which)

    return taken


def _norms(which: int) -> Named:
    changes: dict[str, Change] = {
        "is not normalized": lambda c: replace(c, weights=()),
        "is normalized with weights of one": lambda c: replace(c, weights=tuple(map(torch.ones_like, c.weights))),
        f"is normalized with the weights of {'k' if which == Q else 'q'}": lambda c: replace(
            c, weights=c.weights[::-1]
        ),
        "is normalized after the rotation": lambda c: replace(c, norm_last=True),
        "is normalized before the rotation": lambda c: replace(c, norm_last=False),
        "is normalized without the offset of the weights": lambda c: replace(c, weight_offset=0.0),
        "is normalized with 1 added to the weights": lambda c: replace(c, weight_offset=c.weight_offset + 1),
    }
    for words, change in changes.items():
        yield words, called(change)
        if "the rotation" not in words:  # without a rotation there is no before and after
            yield f"{words}, and is not rotated", _at(POSITIONS["is not rotated"], change)
    for words, norm in NORMS.items():
        yield words, called(room=2, norm=norm)
    yield "is normalized with its mean subtracted, as by a layer norm", _layer_normed
    for other, name in ((Q, "q"), (K, "k")):
        if other != source(which):
            words = f"divides the sum of the squares by the number of features of {name} in all heads"
            yield words, _divided_by_features(other)
    twice: Norm = lambda z, w, eps, t: _DEFINITION(_DEFINITION(z, w, eps, t), w, eps, t)  # noqa: E731
    yield "is normalized twice", called(room=3, norm=twice)
    for eps in (0.0, 1e-5, 1e-8, 1e-3, 1e-2, 1e-12):
        yield f"is normalized with eps {eps:g}", called(partial(replace, eps=eps))


# ------------------------------------------------------------------------------------------------------------- YaRN

SCALINGS: dict[str, Callable[[Array, Array, float], Array]] = {
    "does not scale its frequencies": lambda f, place, by: f,
    "divides all frequencies by the factor": lambda f, place, by: f / by,
    "multiplies frequencies by the factor, in place of dividing them": lambda f, place, by: yarn(f, place, 1 / by),
    "has YaRN's ramp reversed: fast pairs are divided": lambda f, place, by: yarn(f, 1 - place, by),
    "has YaRN's ramp without ends: it is not clamped to 0 and 1": lambda f, place, by: f * (1 - place + place / by),
    "has the square of YaRN's ramp": lambda f, place, by: yarn(f, place.clip(0, 1) ** 2, by),
    "has a smooth curve in place of YaRN's ramp": lambda f, place, by: yarn(
        f, place.clip(0, 1) ** 2 * (3 - 2 * place.clip(0, 1)), by
    ),
    "has a step at the low end in place of YaRN's ramp": lambda f, place, by: np.where(place > 0, f / by, f),
    "has a step at the high end in place of YaRN's ramp": lambda f, place, by: np.where(place >= 1, f / by, f),
    "mixes wavelengths in place of frequencies": lambda f, place, by: f / (1 + (by - 1) * place.clip(0, 1)),
}
"""A mistake about YaRN's frequencies in words -> the frequencies with it."""

YARN: dict[str, Callable[[float, float, float, float], tuple[float, float, float, float]]] = {
    "is not multiplied by the attention factor": lambda s, low, high, m: (s, low, high, 1.0),
    "is multiplied by the attention factor twice": lambda s, low, high, m: (s, low, high, m * m),
    "is divided by the attention factor": lambda s, low, high, m: (s, low, high, 1 / m),
    "takes low and high in each other's place": lambda s, low, high, m: (s, high, low, m),
    "takes the square root of the factor": lambda s, low, high, m: (s**0.5, low, high, m),
    "takes the factor twice": lambda s, low, high, m: (s * s, low, high, m),
}
"""A mistake about YaRN's numbers in words -> the numbers with it."""

ENDS: dict[str, Callable[[float], float]] = {
    "{}": lambda end: end,
    "half of {}": lambda end: end / 2,
    "twice {}": lambda end: 2 * end,
    "{} rounded down": lambda end: float(np.floor(end)),
    "{} rounded up": lambda end: float(np.ceil(end)),
    "{} rounded to the nearest pair": lambda end: float(np.rint(end)),
    "{} - 1": lambda end: end - 1,
    "{} + 1": lambda end: end + 1,
}
"""Mistakes about an end of YaRN's ramp in words."""
TOGETHER = {
    ("half of {}", "half of {}"): "has YaRN's ramp at 2i in place of the pair i, so that low and high are halved",
    ("twice {}", "twice {}"): "has YaRN's ramp at i / 2 in place of the pair i, so that low and high are doubled",
    ("{} rounded down", "{} rounded up"): "rounds low down and high up",
}
"""The words for both ends where the cause is one."""


def _with_numbers(case: CacheCase, of: Callable[..., tuple[float, float, float, float]]) -> CacheCase:
    return replace(case, yarn=of(*case.yarn))


def _with_ends(s: float, low: float, high: float, m: float, of_low, of_high) -> tuple[float, float, float, float]:
    return s, of_low(low), of_high(high), m


def _yarn() -> Named:
    for words, scaling in SCALINGS.items():
        yield words, called(scaling=scaling)
    numbers: dict[str, Callable[[float, float, float, float], tuple[float, float, float, float]]] = dict(YARN)
    for (first, of_low), (last, of_high) in list(product(ENDS.items(), repeat=2))[1:]:
        parts = [f"{said.format(end)} for {end}" for said, end in ((first, "low"), (last, "high")) if said != "{}"]
        words = TOGETHER.get((first, last), f"takes {' and '.join(parts)}, the ends of YaRN's ramp")
        numbers[words] = partial(_with_ends, of_low=of_low, of_high=of_high)
    for words, of in numbers.items():
        yield words, called(partial(_with_numbers, of=of))

    def turned(seen: Seen, which: int) -> Bounded:
        factor = seen.case.yarn[3]
        case = replace(seen.case, yarn=(*seen.case.yarn[:3], 1.0))
        return seen.told(which, case, scaling=lambda f, place, by: factor * yarn(f, place, by))

    yield "has the angles, and not cosines and sines, multiplied by the attention factor", turned
