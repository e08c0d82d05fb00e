"""Facts that are read off the results of an operator that writes a paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, exact
from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import numbers
from ropelab.conformance.cache.mistakes import Named, called, same, wider, with_parts
from ropelab.conformance.cache.scale_mistakes import Hypothesis
from ropelab.conformance.cache.seen import PARTS, RETURNED, SCALES, K, Q, Seen, V, kept, off, told
from ropelab.conformance.cache.subject import Bounded, CacheSubject
from ropelab.conformance.identify.plain import plain
from ropelab.conformance.identify.read_off import named_frequencies

FEW = 4
"""The number of tokens that are told."""


def hypotheses(subject: CacheSubject, seen: Seen, which: int) -> Named:
    """Yield what a part of the results shows of frequencies and of the norm, to be proven in other calls."""
    if which not in (Q, K, RETURNED):
        return
    if seen.case.yarn[0] == 1:
        width = seen.case.inputs[min(which, K)].shape[-1]
        for words, rates in named_frequencies(subject.base, seen.case.rotary_dim, width):
            yield f"has {words}", _turned_by(rates)
    yield from _other_partners(subject, seen, which)
    order = _normalizing_heads(subject, seen, which)
    if order is not None and order != list(range(len(order))):

        def norm(z: np.ndarray, w: np.ndarray, eps: float, turns: slice) -> np.ndarray:
            means = (z * z).mean(-1, keepdims=True)
            means = means[..., order, :] if z.shape[-2] == len(order) else means  # the other of q and k
            return w.reshape(-1, z.shape[-1]) * z / np.sqrt(means + eps)

        yield _order_in_words(order), wider(called(same, norm=norm), 2)


def _other_partners(subject: CacheSubject, seen: Seen, which: int) -> Named:
    """Yield of which features the wrong heads make each pair, where cosines, sines and signs are those of the pair."""
    y, (right, bound) = seen.actual(subject, which), seen.definition(subject, which)
    if y is None or y.shape != right.shape or seen.case.norm_last:
        return
    straight = with_parts(subject, tables=lambda c, s, m: (np.ones_like(c), np.zeros_like(s)))
    value, near = told(straight, seen.case, which)
    width = seen.case.inputs[K if which == RETURNED else which].shape[-1]
    rows = seen.wrong(subject, which).any(-1)
    z, found, room = (x[..., :width][rows] for x in (value, y, near + bound))  # [n, D]
    turns = subject.turning(width, seen.case.rotary_dim)
    places = subject.definition.members(np.arange(width), turns, subject.layout)
    cos, sin = (np.broadcast_to(t[kept(subject, seen.case, which)], (*rows.shape, t.shape[-1]))[rows]
                for t in subject.cosines(seen.case)[:2])  # fmt: skip
    reads: list[tuple[int, int, int]] = []
    for pair in range(len(places[0])):
        c, s = cos[:, pair, None, None], sin[:, pair, None, None]
        for member, (at, sense) in enumerate(zip(places, (-1, 1), strict=True)):
            made = z[:, :, None] * c + sense * z[:, None, :] * s  # [n, own, partner]
            near = 4 * room.max(-1)[:, None, None]
            hits = np.argwhere((abs(made - found[:, at[pair], None, None]) <= near).all(0))
            meant = (places[member][pair], places[1 - member][pair])
            if not len(hits):
                return
            own, partner = min(hits.tolist(), key=lambda hit: (hit[0] != meant[0]) + (hit[1] != meant[1]))
            reads.append((int(at[pair]), own, partner))
    pairs_of = list(zip(reads[::2], reads[1::2], strict=True))
    moved = [(one, n) for n, (one, _) in enumerate(pairs_of) if one[1:] != (places[0][n], places[1][n])]
    if not moved or any(one[1:] != other[:0:-1] for one, other in pairs_of):
        return
    listed = [one[1:] for one, _ in moved[:FEW]], [(int(places[0][n]), int(places[1][n])) for _, n in moved[:FEW]]
    said, instead = (", ".join(map(str, some)) + ", ..." * (len(moved) > FEW) for some in listed)

    def taken(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
        value, near = told(straight, seen.case, which)
        right, bound = (x.copy() for x in seen.definition(subject, which))
        if seen.case.inputs[Q].shape[-1] != width:
            raise ValueError("the features of wider heads were not measured")
        cos, sin = (t[kept(subject, seen.case, which)] for t in subject.cosines(seen.case)[:2])
        for number, (to, i, j) in enumerate(reads):
            pair, sense = number // 2, (-1, 1)[number % 2]
            right[..., to] = value[..., i] * cos[..., pair] + sense * value[..., j] * sin[..., pair]
            bound[..., to] = bound[..., to] + near[..., i] + near[..., j] + bound.max(-1)
        return right, bound

    yield f"makes pairs of the features {said} in place of {instead}", taken


def _turned_by(rates: np.ndarray) -> Hypothesis:
    def taken(subject: CacheSubject, seen: Seen, which: int) -> Bounded:
        angles = seen.case.token_positions()[0].numpy()[:, None, None] * rates
        sense = -1.0 if subject.reversed and (seen.case.table_free or subject.convention.own_angles) else 1.0
        other = with_parts(subject, tables=lambda c, s, m: (m * np.cos(angles), m * sense * np.sin(angles)))
        return told(other, seen.case, which)

    return taken


def _normalizing_heads(subject: CacheSubject, seen: Seen, which: int) -> list[int] | None:
    """Return for each head the head whose mean square normalizes it; None if a head has none."""
    number, actual = (K if which == RETURNED else which), seen.actual(subject, which)
    right = seen.definition(subject, which)[0]
    if number >= len(seen.case.weights) or seen.case.norm_last or actual is None or actual.shape != right.shape:
        return None
    x = exact(seen.case.inputs[number][0])[kept(subject, seen.case, which)]
    if seen.case.weights[number].numel() != x.shape[-1] or x.shape[:2] != right.shape[:2]:
        return None
    means = (x * x).mean(-1) + seen.case.eps
    with np.errstate(all="ignore"):
        ratio = np.where(abs(right) > 0.05 * abs(right).max(), actual / right, np.nan)
        shown = means / np.nanmedian(ratio, axis=-1).astype(np.float64) ** 2
        off = np.nanmax(abs(shown[:, :, None] / means[:, None, :] - 1), axis=0)
    best = [int(head if off[head, head] < 0.01 else np.argmin(off[head])) for head in range(len(off))]
    return best if all(off[head, of] < 0.01 for head, of in enumerate(best)) else None


def _order_in_words(order: list[int]) -> str:
    if set(order) == {0}:
        return "is normalized by the mean square of the first head"
    said = ", ".join(f"head {head} by that of head {of}" for head, of in enumerate(order) if head != of)
    return f"is normalized by the mean square of other heads: {said}"


def facts(subject: CacheSubject, seen: Seen, which: int) -> Iterator[str]:
    """Yield what a wrong part of one call shows, in words; each line reproduces all of its wrong numbers."""
    y, (right, bound) = seen.actual(subject, which), seen.definition(subject, which)
    if y is None or y.shape != right.shape or which >= SCALES:
        return
    case, wrong = seen.case, seen.wrong(subject, which)
    x = exact(case.inputs[K if which == RETURNED else which][0])[kept(subject, case, which)]
    if which == K and isinstance(subject.convention, BlockScales):
        features = slice(0, x.shape[-1])
        yield from _of_blocks(subject, case, y, right, bound)
        y, right, bound, wrong = (z[..., features] for z in (y, right, bound, wrong))
    sources = [(PARTS[which], right, bound)]
    for other in (Q, K, V):
        if other != which and seen.actual(subject, other) is not None:
            sources.append((PARTS[other], *seen.definition(subject, other)))
    slots = case.slots[case.slots >= 0].cpu().numpy() if which in (K, V) and subject.convention.addressed else None
    nouns = ("token" if slots is None else "slot", "head", "feature")
    with np.errstate(all="ignore"):
        found = plain(y, wrong, sources, {"the input": x}, nouns, case.rotary_dim, slots)
        yield from (f"{PARTS[which]} {fact}" for fact in found)


def _of_blocks(subject: CacheSubject, case, y: np.ndarray, right: np.ndarray, bound: np.ndarray) -> Iterator[str]:
    """Yield which of scales and stored 8-bit numbers are right by themselves, where their products are not."""
    kind = subject.convention
    assert isinstance(kind, BlockScales), "these are facts about scales of blocks"
    head_dim, scaled = case.inputs[1].shape[-1], kind.scaled_features(case)
    blocks = kind.truth(case, *(np.zeros((1, 1, head_dim), EXACT),) * 2)[1][0].shape[-1]
    parts = [z[..., head_dim : head_dim + blocks] for z in (y, right, bound)]
    scales = not off(parts[0], (parts[1], parts[2])).any()
    with np.errstate(all="ignore"):
        size = [np.repeat(np.exp2(e), scaled // blocks, -1) for e in parts[:2]]
        stored, meant, near = y[..., :scaled] / size[0], right[..., :scaled] / size[1], bound[..., :scaled] / size[1]
        bits = not off(stored, (meant, near)).any()
        ratio = (stored / meant)[abs(meant) > 64].astype(np.float64)
    if scales != bits:
        names = "its scales are", "its 8-bit numbers, without their scales, are"
        yield f"the stored k is wrong, and {names[0] if scales else names[1]} right"
    if scales and ratio.size and np.isfinite(ratio).all() and ratio.min() > 0 and ratio.max() > 1.01 * ratio.min():
        yield (f"the 8-bit numbers of the stored k are {ratio.min():.3g} to {ratio.max():.3g} times as large as their "
               "scales ask for")  # fmt: skip


def places(subject: CacheSubject, seen: Seen, which: int) -> Iterator[str]:
    """Yield in which slots the right rows of tokens are, if these are not the slots of the tokens."""
    if which not in (K, V) or isinstance(subject.convention, BlockScales) or not subject.convention.addressed:
        return
    case, place = seen.case, seen.case.places[which - 1]
    right, bound = seen.definition(subject, which)
    number = place.within(torch.arange(len(case.memory))).numpy().reshape(-1, *place.shape[2:])
    rows = numbers(seen.written.memory)[number]
    slots, tokens = case.slots[case.slots >= 0].tolist(), np.flatnonzero(case.live.numpy()).tolist()
    found: dict[int, tuple[int, int]] = {}
    for at, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
        hits = np.flatnonzero((abs(rows - right[at]) <= 2 * bound[at]).all(axis=(1, 2)))
        if len(hits) and slot not in hits:
            found[token] = int(hits[0]), slot
    if found:
        size = place.shape[1]
        said = [f"token {t} in slot {i} (block {i // size}) in place of slot {slot} (block {slot // size})"
                for t, (i, slot) in list(found.items())[:FEW]]  # fmt: skip
        more = f" and {len(found) - FEW} more tokens" if len(found) > FEW else ""
        yield f"{PARTS[which]} is in other slots: {'; '.join(said)}{more}; blocks have {size} slots"
