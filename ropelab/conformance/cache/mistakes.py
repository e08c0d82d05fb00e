"""The mistakes of operators that write a paged cache in words, each with the numbers that it makes of a call.

A mistake is a changed call, a changed part of the definition, or other rows of the right results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch

from ropelab.conformance.bounds import FLOAT32_UNIT, exact
from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase, in_request
from ropelab.conformance.cache.conventions import UNWRITTEN
from ropelab.conformance.cache.definition import Definition, yarn
from ropelab.conformance.cache.scale_mistakes import Hypothesis, block_scales, given_scales, made_scales, small_scales
from ropelab.conformance.cache.seen import RETURNED, SCALES, K, Q, Seen, V, kept, rows, stored, told
from ropelab.conformance.cache.subject import Bounded, CacheSubject
from ropelab.conformance.identify.angles import simple
from ropelab.conformance.identify.vocabulary import SIGNS, TERMS
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import LAYOUTS, pairs, permutation

Change = Callable[[CacheCase], CacheCase]
Named = Iterator[tuple[str, Hypothesis]]


def mistakes(subject: CacheSubject, seen: list[Seen], which: int) -> Named:
    """Yield the mistakes that a part of the results can have, the most common first."""
    blocks = isinstance(subject.convention, BlockScales)
    if which >= SCALES:
        yield from made_scales(which)
        if which > SCALES:
            for words, slots in SLOTS.items():
                yield words, partial(_scales_in, slots=slots)
        return
    if seen[0].earlier is not None:
        yield from _recalled()
    if which in (K, V):
        yield "is not written: the slots keep their contents", _old
        yield "is the one of the next token with a slot", _rows(0, lambda n: np.roll(np.arange(n), -1))
        yield "is the one of the token with a slot before", _rows(0, lambda n: np.roll(np.arange(n), 1))
        yield "is in the slots in reverse order", _rows(0, lambda n: np.arange(n)[::-1])
        yield "is the one of the first tokens of the call, slot after slot", _compacted
        yield "is zero", lambda subject, seen, which: _times(seen.definition(subject, which), 0)
    if which == K and blocks:
        yield from block_scales(subject)
    elif which in (K, V):
        yield f"is {'kv'[2 - which]}", lambda subject, seen, which: told(subject, seen.case, 3 - which)
    if which < RETURNED and not blocks:
        yield from given_scales(subject, which)
    yield "is the one of the next token", called(lambda c: _rolled(c, which, -1))
    yield "is the one of the token before", called(lambda c: _rolled(c, which, 1))
    yield "is the one of the next head", _rows(1, lambda n: np.roll(np.arange(n), -1))
    yield "is the one of the head before", _rows(1, lambda n: np.roll(np.arange(n), 1))
    yield "has its heads in reverse order", _rows(1, lambda n: np.arange(n)[::-1])
    yield "is that of the first head in all heads", _rows(1, np.zeros)
    if which == V:
        for dtype in (torch.bfloat16, torch.float16):
            words = f"is rounded to {str(dtype).removeprefix('torch.')}"
            yield words, called(partial(_rounded, dtype=dtype))
        return
    if which == K and subject.convention.queries and not subject.convention.latent:
        yield "is made of the heads of q with the same numbers", called(_of_q)
    yield from _positions()
    yield from _rotations(subject)
    if seen[0].case.weights:
        yield from _norms(which)
    elif subject.convention.optional_norm:
        yield "is normalized, although the call gives no weights", called(_normalized)
    if subject.convention.own_angles:
        yield from _yarn()


# ------------------------------------------------------------------------------------------- how a mistake is built


def called(change: Change, **parts) -> Hypothesis:
    """Return the hypothesis of a changed call and of changed parts of the definition."""

    def taken(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
        return told(with_parts(subject, **parts), change(seen.case), which)

    return taken


def same(case: CacheCase) -> CacheCase:
    return case


def with_parts(subject: CacheSubject, **parts) -> CacheSubject:
    known = Definition.__dataclass_fields__
    definition = replace(subject.definition, **{name: part for name, part in parts.items() if name in known})
    return replace(subject, definition=definition, **{name: x for name, x in parts.items() if name not in known})


def wider(hypothesis: Hypothesis, factor: float) -> Hypothesis:
    """Return the hypothesis for a mistake with more roundings."""

    def taken(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
        value, bound = hypothesis(subject, seen, which)
        return value, factor * bound

    return taken


def _off_by_both(hypothesis: Hypothesis) -> Hypothesis:
    """Return the hypothesis for members of pairs that are off by the errors of both: one is made from the other."""

    def taken(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
        value, bound = hypothesis(subject, seen, which)
        turns, members = subject.turning(value.shape[-1], seen.case.rotary_dim), subject.definition.members
        summed = bound.copy()
        both = sum(members(bound, turns, subject.layout))
        for room in members(summed, turns, subject.layout):
            room[...] = both
        return value, summed

    return taken


def _times(found: Bounded, factor: float | np.ndarray) -> Bounded:
    return found[0] * factor, found[1] * abs(factor)


def _rows(axis: int, order: Callable[[int], np.ndarray]) -> Hypothesis:
    def taken(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
        value, bound = seen.definition(subject, which)
        at = order(value.shape[axis]).astype(int)
        return value.take(at, axis), bound.take(at, axis)

    return taken


def _input(case: CacheCase, which: int, x: torch.Tensor) -> CacheCase:
    inputs = list(case.inputs)
    inputs[which] = x
    return replace(case, inputs=tuple(inputs))


def _rounded(case: CacheCase, dtype: torch.dtype) -> CacheCase:
    return _input(case, V, case.inputs[V].to(dtype).to(case.inputs[V].dtype))


def _rolled(case: CacheCase, which: int, step: int) -> CacheCase:
    """Return the case whose input is the one of another token; its position stays."""
    number = K if which == RETURNED else which
    return _input(case, number, case.inputs[number].roll(step, 1))


def _of_q(case: CacheCase) -> CacheCase:
    return _input(case, K, case.inputs[Q][:, :, : case.inputs[K].shape[2]])


def _old(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
    old = rows(subject, seen.case, seen.case.memory)[which - 1]
    assert old is not None, "a part that is stored was stored before"
    return old, np.zeros_like(old)


def _compacted(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
    value, bound = subject.expected(seen.case)[which]
    live = int(seen.case.live.sum())
    return stored(subject, seen.case, which, value[:live], bound[:live])


# ------------------------------------------------------------------------------------------------------- addresses

SLOTS: dict[str, Callable[[Seen], torch.Tensor]] = {
    "is in the slots of the earlier call": lambda seen: _padded(seen, (seen.earlier or seen.case).slots),
    "is in the slot after the right one": lambda seen: _live_slots(seen, lambda s, size, total: s + 1),
    "is in the slot before the right one": lambda seen: _live_slots(seen, lambda s, size, total: s - 1),
    "is in the block after the right one": lambda seen: _live_slots(seen, lambda s, size, total: s + size),
    "is in the block before the right one": lambda seen: _live_slots(seen, lambda s, size, total: s - size),
    "of a token with a negative slot is in a slot counted from the end of the cache": lambda seen: _skipped_slots(
        seen, lambda s, size, total: s + total
    ),
    "of a token with a negative slot is in slot 0": lambda seen: _skipped_slots(seen, lambda s, size, total: 0 * s),
    "of a token with a negative slot is in the slot of its magnitude": lambda seen: _skipped_slots(
        seen, lambda s, size, total: -s
    ),
    "is in the slot with the number of the token": lambda seen: _live_slots(
        seen, lambda s, size, total: torch.arange(len(s)).to(s.device)
    ),
    "is in the slot with the number of the token among those with a slot": lambda seen: _live_slots(
        seen, lambda s, size, total: (s >= 0).long().cumsum(0) - 1
    ),
    "is in the slot with the number of the position": lambda seen: _live_slots(
        seen, lambda s, size, total: seen.case.token_positions()[0].to(s.device)
    ),
    "is in the first block, at the place of its slot in a block": lambda seen: _live_slots(
        seen, lambda s, size, total: s % size
    ),
    "is in the block and at the place of blocks of 16 slots, if the cache has it": lambda seen: _live_slots(
        seen, lambda s, size, total: _within(s // 16 * size + s % 16, total)
    ),
    "is in blocks of half the size": lambda seen: _live_slots(
        seen, lambda s, size, total: s // max(size // 2, 1) * size + s % max(size // 2, 1)
    ),
    "is in the block of its place, at the place of its block": lambda seen: _live_slots(
        seen, lambda s, size, total: s % (total // size) * size + s // (total // size)
    ),
}
"""Where k or v of a token is by mistake, in words -> the slots of all tokens ``[T]``."""

STRIDES: dict[str, Callable[[Seen, int], tuple[int, ...]]] = {
    "is addressed by the strides of the other cache": lambda seen, which: seen.case.places[2 - which].strides,
    "is addressed as if the heads of a token were adjacent (NHD)": lambda seen, which: _dense(seen, which, False),
    "is addressed as if the tokens of a head were adjacent (HND)": lambda seen, which: _dense(seen, which, True),
    "is addressed as if blocks followed each other without a gap": lambda seen, which: (
        math.prod(seen.case.places[which - 1].shape[1:]), *seen.case.places[which - 1].strides[1:],
    ),
}  # fmt: skip
"""How a cache is addressed by mistake, in words -> the strides of ``[blocks, block_size, heads, features]``."""


def _scales_in(subject: CacheSubject, seen: Seen, which: int, slots: Callable[[Seen], torch.Tensor]) -> Bounded:
    """Return what the slots of the tokens hold where each token's scale is written to another slot."""
    found = seen.definition(subject, which)
    own, names = own_slots(seen)[seen.case.live].numpy(), slots(seen)[seen.case.live].numpy()
    _, total = _extents(seen)
    filled = []
    for scales, before in zip(found, (UNWRITTEN, 0.0), strict=True):
        memory = np.full((total, *scales.shape[1:]), before, scales.dtype)
        memory[names[names >= 0]] = scales[names >= 0]
        filled.append(memory[own])
    return filled[0], filled[1]


def own_slots(seen: Seen) -> torch.Tensor:
    """Return the right slots of all tokens."""
    return _padded(seen, seen.case.slots)


def own_strides(seen: Seen, which: int) -> tuple[int, ...]:
    """Return the right strides of a cache."""
    return seen.case.places[which - 1].strides


def _padded(seen: Seen, slots: torch.Tensor) -> torch.Tensor:
    found = torch.full((seen.case.tokens,), -1)
    found[: len(slots)] = slots
    return found


def _extents(seen: Seen) -> tuple[int, int]:
    blocks, size = seen.case.places[0].shape[:2]
    return size, blocks * size


def _live_slots(seen: Seen, change: Callable) -> torch.Tensor:
    slots = own_slots(seen)
    return torch.where(slots >= 0, change(slots, *_extents(seen)), slots)


def _within(slots: torch.Tensor, total: int) -> torch.Tensor:
    """Return the slots, negative where the cache does not have them."""
    return torch.where(slots < total, slots, -1)


def _skipped_slots(seen: Seen, change: Callable) -> torch.Tensor:
    slots = own_slots(seen)
    named = torch.arange(len(slots)) < len(seen.case.slots)
    return torch.where((slots < 0) & named, change(slots, *_extents(seen)), slots)


def _dense(seen: Seen, which: int, hnd: bool) -> tuple[int, ...]:
    _, size, heads, features = seen.case.places[which - 1].shape
    block = seen.case.places[which - 1].strides[0]
    return (block, features, size * features, 1) if hnd else (block, heads * features, features, 1)


# ---------------------------------------------------------------------------------------------------- earlier calls


def _recalled() -> Named:
    def of(change: Callable[[CacheCase, CacheCase], CacheCase]) -> Hypothesis:
        def taken(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
            assert seen.earlier is not None, "these are mistakes of later calls"
            return told(subject, change(seen.case, seen.earlier), which)

        return taken

    yield "takes the positions of the earlier call", of(lambda c, e: replace(c, positions=e.positions))
    yield "is the one of the earlier call", of(lambda c, e: replace(c, inputs=e.inputs, positions=e.positions,
                                                                    weights=e.weights))  # fmt: skip
    yield "is made of the input of the earlier call", of(lambda c, e: replace(c, inputs=e.inputs))
    yield "is normalized with the weights of the earlier call", of(lambda c, e: replace(c, weights=e.weights))
    yield "is divided by the scale of the earlier call", of(lambda c, e: replace(c, scales=e.scales))


# -------------------------------------------------------------------------------------------------------- positions


def _positions() -> Named:
    for words, change in POSITIONS.items():
        yield words, called(partial(_at, change=change))


POSITIONS: dict[str, Callable[[torch.Tensor, CacheCase], torch.Tensor]] = {
    "is not rotated": lambda p, c: p * 0,
    "takes position +1 for the position": lambda p, c: p + 1,
    "takes position -1 for the position": lambda p, c: p - 1,
    "turns by the magnitude of a negative position": lambda p, c: p.abs(),
    "takes 0 for a negative position": lambda p, c: p.clamp(min=0),
    "takes the number of the token for the position": lambda p, c: torch.arange(len(p)),
    "takes the position of the first token": lambda p, c: p[:1].expand(len(p)),
    "takes the position of the next token": lambda p, c: p.roll(-1),
    "takes the position of the token before": lambda p, c: p.roll(1),
    "takes the slot for the position": lambda p, c: torch.where(c.live, _slots(c), p),
    "takes the place of the slot in its block for the position": lambda p, c: torch.where(
        c.live, _slots(c) % c.places[0].shape[1], p
    ),
    "takes the place of the token in its request for the position": lambda p, c: (
        torch.where(c.live, in_request(c.slots, c.places[0].shape[1])[: len(p)], p) if len(c.slots) == len(p) else p
    ),
    "takes the position of another token: tokens with a slot read the first positions": lambda p, c: p[
        (c.live.long().cumsum(0) - 1).clamp(min=0)
    ],
    "takes half the position": lambda p, c: p // 2,
}
"""A mistake about positions in words -> the positions ``[T]`` with it."""


def _at(case: CacheCase, change: Callable[[torch.Tensor, CacheCase], torch.Tensor]) -> CacheCase:
    positions = case.token_positions()[0]
    nowhere = positions == NO_POSITION
    return replace(case, positions=torch.where(nowhere, positions, change(torch.where(nowhere, 0, positions), case)))


def _slots(case: CacheCase) -> torch.Tensor:
    found = torch.zeros(case.tokens, dtype=torch.int64)
    found[: len(case.slots)] = case.slots.cpu()
    return found


# --------------------------------------------------------------------------------------------------------- rotation


def _rotations(subject: CacheSubject) -> Named:
    yield "turns by minus the angle", called(same, reversed=not subject.reversed)
    for words, tables in TABLES.items():
        yield words, wider(called(same, tables=tables), 3 if "twice" in words else 1)
    for layout in LAYOUTS:
        if layout != subject.layout:
            yield f"pairs features as {layout}", called(same, layout=layout)
    for words, members in MEMBERS.items():
        yield words, called(same, members=members)
    for layout in LAYOUTS:
        if layout != subject.layout:
            yield f"is written with the pairs as {layout}", called(same, stores=_laid_out(layout))
    for part, factors in (("sin0", (1, -1, 1, 1)), ("sin1", (1, 1, 1, -1)), ("cos0", (-1, 1, 1, 1)),
                          ("cos1", (1, 1, -1, 1))):  # fmt: skip
        yield f"is reflected: {SIGNS[part]}", called(same, turn=_turn(*factors))
        yield f"lacks the term with {TERMS[part]}", called(same, turn=_turn(*(max(f, 0) for f in factors)))
    words = "computes second members of pairs from first members that are already rotated"
    yield words, _off_by_both(called(same, turn=_in_turn))


TABLES: dict[str, Callable[[np.ndarray, np.ndarray, float], Bounded]] = {
    "has the attention factor on the cosines, and not on the sines": lambda c, s, m: (c, s / m),
    "has the attention factor on the sines, and not on the cosines": lambda c, s, m: (c / m, s),
    "takes cosines for sines and sines for cosines": lambda c, s, m: (s, c),
    "takes the frequencies in reverse order": lambda c, s, m: (c[..., ::-1], s[..., ::-1]),
    "takes the frequency of the next pair": lambda c, s, m: (np.roll(c, -1, -1), np.roll(s, -1, -1)),
    "takes the frequency of the pair before": lambda c, s, m: (np.roll(c, 1, -1), np.roll(s, 1, -1)),
    "swaps the frequencies of the first half of the pairs with those of the second half": lambda c, s, m: (
        np.roll(c, c.shape[-1] // 2, -1), np.roll(s, s.shape[-1] // 2, -1)
    ),
    "has the frequency of the first pair in all pairs": lambda c, s, m: (
        np.broadcast_to(c[..., :1], c.shape), np.broadcast_to(s[..., :1], s.shape)
    ),
    "is rotated twice": lambda c, s, m: (c * c - s * s, 2 * c * s),
}  # fmt: skip
"""A mistake about cosines and sines in words -> the tables with it."""


Members = Callable[[np.ndarray, slice, str], tuple[np.ndarray, np.ndarray]]


def _half_a_head(x: np.ndarray, turns: slice, layout: str) -> tuple[np.ndarray, np.ndarray]:
    half, count = x.shape[-1] // 2, x[..., turns].shape[-1] // 2
    return x[..., :count], x[..., half : half + count]


def _other_end(x: np.ndarray, turns: slice, layout: str) -> tuple[np.ndarray, np.ndarray]:
    width, count = x.shape[-1], x[..., turns].shape[-1]
    return pairs(x[..., :count] if turns.start else x[..., width - count :], layout)


MEMBERS: dict[str, Members] = {
    "pairs feature i with the feature half a head further, and not half of the features that rotate": _half_a_head,
    "rotates the features at the other end of the head": _other_end,
}
"""A mistake about pairs in words -> views of the first and the second members."""


def _laid_out(layout: str) -> Members:
    return lambda x, turns, _: pairs(x[..., turns], layout)


def _turn(c0: int, s0: int, c1: int, s1: int):
    return lambda x0, x1, c, s: (c0 * x0 * c - s0 * x1 * s, c1 * x1 * c + s1 * x0 * s)


def _in_turn(x0, x1, c, s):
    first = x0 * c - x1 * s
    return first, x1 * c + first * s


# ------------------------------------------------------------------------------------------------------------- norm

Norm = Callable[[np.ndarray, np.ndarray, float, slice], np.ndarray]


def _divided(root: Callable[[np.ndarray, float, slice], np.ndarray]) -> Norm:
    """Return a norm of rows ``[..., W]``, from the number by which a row is divided."""

    def norm(z: np.ndarray, weight: np.ndarray, eps: float, turns: slice) -> np.ndarray:
        rows = z.reshape(*z.shape[:-2], -1, weight.size)
        return (weight * rows / root(rows, eps, turns)).reshape(z.shape)

    return norm


def _mean(x: np.ndarray) -> np.ndarray:
    return (x * x).mean(-1, keepdims=True)


def _rest(rows: np.ndarray, turns: slice) -> np.ndarray:
    return np.delete(rows, np.r_[turns], axis=-1)


def _parts(z: np.ndarray, weight: np.ndarray, eps: float, turns: slice, turned: bool, rest: bool) -> np.ndarray:
    """Return heads of which the features that turn, or the others, are normalized by their own mean."""
    y, tail = z.copy(), np.ones(z.shape[-1], bool)
    tail[turns] = False
    for hit, wanted in ((~tail, turned), (tail, rest)):
        if wanted and hit.any():
            y[..., hit] = weight[hit] * z[..., hit] / np.sqrt(_mean(z[..., hit]) + eps)
    return y


def _of_all_heads(z: np.ndarray, weight: np.ndarray, eps: float, turns: slice, groups: int = 1) -> np.ndarray:
    by_head = weight.reshape(-1, z.shape[-1])
    rows = z.reshape(len(z), groups, -1)
    return by_head * (rows / np.sqrt(_mean(rows) + eps)).reshape(z.shape)


_DEFINITION: Norm = Definition().norm

NORMS: dict[str, Norm] = {
    "adds eps to the root of the mean square, not to the mean square": _divided(lambda x, e, t: np.sqrt(_mean(x)) + e),
    "adds the root of eps to the root of the mean square": _divided(lambda x, e, t: np.sqrt(_mean(x)) + e**0.5),
    "takes the larger of the mean square and eps, not their sum": _divided(
        lambda x, e, t: np.sqrt(np.maximum(_mean(x), e))
    ),
    "is divided by the root of the sum of the squares, not of their mean": _divided(
        lambda x, e, t: np.sqrt(_mean(x) * x.shape[-1] + e)
    ),
    "divides the sum of the squares by one less than the number of features": _divided(
        lambda x, e, t: np.sqrt(_mean(x) * x.shape[-1] / max(x.shape[-1] - 1, 1) + e)
    ),
    "divides the sum of the squares by the number of features that rotate": _divided(
        lambda x, e, t: np.sqrt(_mean(x) * x.shape[-1] / x[..., t].shape[-1] + e)
    ),
    "is divided by the mean square, not by its root": _divided(lambda x, e, t: _mean(x) + e),
    "is divided by the mean magnitude, not by the root of the mean square": _divided(
        lambda x, e, t: abs(x).mean(-1, keepdims=True) + e
    ),
    "is normalized by the mean square of the features that rotate": _divided(
        lambda x, e, t: np.sqrt(_mean(x[..., t]) + e)
    ),
    "is normalized by the mean square of the features that do not rotate": _divided(
        lambda x, e, t: np.sqrt(_mean(_rest(x, t)) + e)
    ),
    "is normalized in the features that rotate only, by their own mean square": lambda z, w, eps, t: _parts(
        z, w, eps, t, True, False
    ),
    "is normalized in the features that do not rotate only, by their own mean square": lambda z, w, eps, t: _parts(
        z, w, eps, t, False, True
    ),
    "is normalized in the features that rotate and in the others apart": lambda z, w, eps, t: _parts(
        z, w, eps, t, True, True
    ),
    "is multiplied by the weights twice": lambda z, w, eps, t: _DEFINITION(z, w * w, eps, t),
    "is divided by the weights": lambda z, w, eps, t: _DEFINITION(z, 1 / w, eps, t),
    "has the weights in the order of interleaved pairs where pairs are halves": lambda z, w, eps, t: _DEFINITION(
        z, _reordered(w, t, "split_half", "interleaved"), eps, t
    ),
    "has the weights in the order of halves where pairs are interleaved": lambda z, w, eps, t: _DEFINITION(
        z, _reordered(w, t, "interleaved", "split_half"), eps, t
    ),
    "is normalized over all heads of the token": _of_all_heads,
    "is normalized over each half of the heads of the token": lambda z, w, eps, t: _of_all_heads(
        z, w, eps, t, groups=2
    ),
    "is normalized head by head": lambda z, w, eps, t: _of_all_heads(z, w, eps, t, groups=z.shape[-2]),
}
"""A mistake about the norm in words -> the heads that it normalizes."""


def _layer_normed(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
    """The result of a layer norm. A centred feature is off by the rounding of a sum of D features, up to the largest.

    The division by the root and the weight scale this error, and the rotation adds that of the partner.
    """
    value, bound = called(same, norm=lambda z, w, eps, t: _DEFINITION(z - z.mean(-1, keepdims=True), w, eps, t))(
        subject, seen, which
    )
    number = K if which == RETURNED else which
    x = exact(seen.case.inputs[number][0])[kept(subject, seen.case, which)]
    weight = abs(exact(seen.case.weights[number]) + seen.case.weight_offset).max()
    root = np.sqrt(x.var(-1, keepdims=True) + seen.case.eps)
    room = 2 * (x.shape[-1] + 1) * FLOAT32_UNIT * abs(x).max(-1, keepdims=True) / root * weight
    return value, 2 * bound + room


def _divided_by_features(subject: CacheSubject, seen: Seen, which: int, of: int) -> Bounded:
    count = math.prod(seen.case.inputs[of].shape[2:])
    norm = _divided(lambda x, e, t: np.sqrt(_mean(x) * x.shape[-1] / count + e))
    return wider(called(same, norm=norm), 2)(subject, seen, which)


def _reordered(weight: np.ndarray, turns: slice, source: str, target: str) -> np.ndarray:
    found = weight.copy()
    width = len(weight[turns])
    found[turns] = weight[turns][permutation(width, source, target).numpy()]
    return found


def _unrotated(case: CacheCase, change: Change) -> CacheCase:
    return _at(change(case), POSITIONS["is not rotated"])


def _normalized(case: CacheCase) -> CacheCase:
    return replace(case, weights=tuple(x.new_ones(x.shape[-1]) for x in case.inputs[:2]))


def _norms(which: int) -> Named:
    changes: dict[str, Change] = {
        "is not normalized": lambda c: replace(c, weights=()),
        "is normalized with weights of one": lambda c: replace(c, weights=tuple(map(torch.ones_like, c.weights))),
        "is normalized with the weights of " + ("k" if which == Q else "q"): lambda c: replace(
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
            yield f"{words}, and is not rotated", called(partial(_unrotated, change=change))
    for words, norm in NORMS.items():
        yield words, wider(called(same, norm=norm), 2)
    yield "is normalized with its mean subtracted, as by a layer norm", _layer_normed
    for other, name in ((Q, "q"), (K, "k")):
        if other != (K if which == RETURNED else which):
            words = f"divides the sum of the squares by the number of features of {name} in all heads"
            yield words, partial(_divided_by_features, of=other)
    yield "is normalized twice", wider(called(
        same, norm=lambda z, w, eps, t: _DEFINITION(_DEFINITION(z, w, eps, t), w, eps, t)), 3)  # fmt: skip
    for eps in (0.0, 1e-5, 1e-8, 1e-3, 1e-2, 1e-12):
        yield f"is normalized with eps {eps:g}", called(partial(replace, eps=eps))


# ------------------------------------------------------------------------------------------------------------- YaRN

SCALINGS: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
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


def _with_ends(case: CacheCase, of_low: Callable[[float], float], of_high: Callable[[float], float]) -> CacheCase:
    factor, low, high, attention_factor = case.yarn
    return replace(case, yarn=(factor, of_low(low), of_high(high), attention_factor))


def _yarn() -> Named:
    for words, scaling in SCALINGS.items():
        yield words, called(same, scaling=scaling)
    for words, of in YARN.items():
        yield words, called(partial(_with_numbers, of=of))
    for (first, of_low), (last, of_high) in product(ENDS.items(), repeat=2):
        parts = [f"{said.format(end)} for {end}" for said, end in ((first, "low"), (last, "high")) if said != "{}"]
        words = TOGETHER.get((first, last), f"takes {' and '.join(parts)}, the ends of YaRN's ramp")
        if parts:
            yield words, called(partial(_with_ends, of_low=of_low, of_high=of_high))

    def turned(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
        by, low, high, factor = seen.case.yarn
        other = with_parts(subject, scaling=lambda f, place, by: factor * yarn(f, place, by))
        return told(other, replace(seen.case, yarn=(by, low, high, 1.0)), which)

    yield "has the angles, and not cosines and sines, multiplied by the attention factor", turned


# --------------------------------------------------------------------------------------------------------- measured


def measured(subject: CacheSubject, seen: Seen, which: int) -> Named:
    """Yield the numbers that the results of a call show: the factors of cosines and sines, eps, the least scale."""
    if which == K and isinstance(subject.convention, BlockScales):
        yield from small_scales(subject, seen)
    if which not in (Q, K, RETURNED) or seen.case.memory.dtype.itemsize == 1:
        return
    actual, number = seen.actual(subject, which), K if which == RETURNED else which
    if actual is None or actual.shape != seen.definition(subject, which)[0].shape or seen.case.norm_last:
        return
    straight = with_parts(subject, tables=lambda c, s, m: (np.ones_like(c), np.zeros_like(s)))
    value, _ = told(straight, seen.case, which)
    turns = subject.turning(value.shape[-1], seen.case.rotary_dim)
    (x0, x1), (y0, y1) = (subject.definition.members(x, turns, subject.layout) for x in (value, actual))
    cos, sin = (t[kept(subject, seen.case, which)] for t in subject.cosines(seen.case)[:2])
    with np.errstate(all="ignore"):
        size = x0 * x0 + x1 * x1
        ratios = (x0 * y0 + x1 * y1) / size / cos, (x0 * y1 - x1 * y0) / size / sin
        shown = [r[(size > 0.01) & (abs(t) > 0.1)] for r, t in zip(ratios, (cos, sin), strict=True)]
    if all(len(r) and np.isfinite(r).all() for r in shown):
        a, b = (simple(float(np.median(r)), 1e-4) for r in shown)
        tables = (("cosines", a),) * (a != 1) + (("sines", b),) * (b != 1)
        words = "has " + " and ".join(f"{table} multiplied by {factor:.6g}" for table, factor in tables)
        words = f"is multiplied by {a:.6g} in the features that rotate" if a == b else words
        yield words, called(same, tables=lambda c, s, m: (a * c, b * s))
    if number < len(seen.case.weights):
        x = exact(seen.case.inputs[number][0])[kept(subject, seen.case, which)]
        weight = exact(seen.case.weights[number]) + seen.case.weight_offset
        if weight.size == x.shape[-1]:
            w0, w1 = subject.definition.members(weight * x, turns, subject.layout)
            with np.errstate(all="ignore"):
                scale = (y0 * y0 + y1 * y1).sum(-1) / (w0 * w0 + w1 * w1).sum(-1)
                eps = float(np.median(1 / scale - (x * x).mean(-1)))
            if np.isfinite(eps) and eps > 0:
                eps = float(f"{eps:.2g}")
                yield f"is normalized with eps {eps:g}", called(partial(replace, eps=eps))
