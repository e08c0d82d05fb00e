"""Facts that are read off the results of an operator that writes a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ropelab.conformance.bounds import exact
from ropelab.conformance.cache.addresses import FEW
from ropelab.conformance.cache.mistakes import Named, called, turned_by
from ropelab.conformance.cache.scale_mistakes import in_blocks, small_scales
from ropelab.conformance.cache.seen import PARTS, RETURNED, SCALES, K, Q, Seen, V, off, source
from ropelab.conformance.cache.subject import Bounded
from ropelab.conformance.identify.angles import simple
from ropelab.conformance.identify.plain import plain
from ropelab.conformance.identify.read_off import named_frequencies


def hypotheses(seen: Seen, which: int) -> Named:
    """Yield what a part of the results shows of factors, frequencies, pairs and norm, to be proven in other calls."""
    if which == K and seen.blocks:
        yield from small_scales(seen)
    if which not in (Q, K, RETURNED):
        return
    y, right = seen.actual(which), seen.definition(which)[0]
    assert y is not None, "a part that is wrong is there"
    plainly = y.shape == right.shape and not seen.case.norm_last
    if plainly and seen.case.memory.dtype.itemsize > 1:
        yield from _factors(seen, which, y)
    if seen.case.yarn[0] == 1:
        width = seen.case.inputs[source(which)].shape[-1]
        for words, rates in named_frequencies(seen.subject.base, seen.case.rotary_dim, width):
            yield f"has {words}", turned_by(partial(np.multiply, rates))
    if plainly:
        yield from _other_partners(seen, which, y)
        yield from _normalizing_heads(seen, which, y / right)


def _straight(seen: Seen, which: int) -> Bounded:
    """Return the definition of a part without the rotation."""
    return seen.told(which, tables=lambda c, s, m: (np.ones_like(c), np.zeros_like(s)))


def _tables(seen: Seen, which: int) -> list[np.ndarray]:
    return [table[seen.kept(which)] for table in seen.subject.cosines(seen.case)[:2]]


def _factors(seen: Seen, which: int, y: np.ndarray) -> Named:
    """Yield the factors of cosines and sines, and eps."""
    subject, case = seen.subject, seen.case
    value, _ = _straight(seen, which)
    turns = subject.turning(value.shape[-1], case.rotary_dim)
    (x0, x1), (y0, y1) = (subject.definition.members(x, turns, subject.layout) for x in (value, y))
    tables, size = _tables(seen, which), x0 * x0 + x1 * x1
    ratios = [found / size / t for found, t in zip((x0 * y0 + x1 * y1, x0 * y1 - x1 * y0), tables, strict=True)]
    shown = [r[(size > 0.01) & (abs(t) > 0.1)] for r, t in zip(ratios, tables, strict=True)]
    if all(len(r) and np.isfinite(r).all() for r in shown):
        a, b = (simple(float(np.median(r)), 1e-4) for r in shown)
        factors = (("cosines", a),) * (a != 1) + (("sines", b),) * (b != 1)
        words = "has " + " and ".join(f"{table} multiplied by {factor:.6g}" for table, factor in factors)
        words = f"is multiplied by {a:.6g} in the features that rotate" if a == b else words
        yield words, called(tables=lambda c, s, m: (a * c, b * s))
    if source(which) < len(case.weights):
        x, weight = seen.given(which), exact(case.weights[source(which)]) + case.weight_offset
        if weight.size == x.shape[-1]:
            w0, w1 = subject.definition.members(weight * x, turns, subject.layout)
            scale = (y0 * y0 + y1 * y1).sum(-1) / (w0 * w0 + w1 * w1).sum(-1)
            eps = float(np.median(1 / scale - (x * x).mean(-1)))
            if np.isfinite(eps) and eps > 0:
                eps = float(f"{eps:.2g}")
                yield f"is normalized with eps {eps:g}", called(lambda c: replace(c, eps=eps))


def _other_partners(seen: Seen, which: int, y: np.ndarray) -> Named:
    """Yield the features that each feature of a wrong head is made of; its cosines, sines and signs are right."""
    value, near = _straight(seen, which)
    bound = seen.definition(which)[1]
    width = seen.case.inputs[source(which)].shape[-1]
    rows = seen.wrong(which).any(-1)
    z, found, room = (x[..., :width][rows] for x in (value, y, near + bound))  # [n, D]
    turns = seen.subject.turning(width, seen.case.rotary_dim)
    places = seen.subject.definition.members(np.arange(width), turns, seen.subject.layout)
    cos, sin = (np.broadcast_to(t, (*rows.shape, t.shape[-1]))[rows] for t in _tables(seen, which))
    reads: list[tuple[int, int, int]] = []
    for pair in range(len(places[0])):
        c, s = cos[:, pair, None, None], sin[:, pair, None, None]
        for member, (at, sense) in enumerate(zip(places, (-1, 1), strict=True)):
            made = z[:, :, None] * c + sense * z[:, None, :] * s  # [n, own, partner]
            close = 4 * room.max(-1)[:, None, None]
            hits = np.argwhere((abs(made - found[:, at[pair], None, None]) <= close).all(0))
            meant = (places[member][pair], places[1 - member][pair])
            if not len(hits):
                return
            own, partner = min(hits.tolist(), key=lambda hit: (hit[0] != meant[0]) + (hit[1] != meant[1]))
            reads.append((int(at[pair]), own, partner))
    partners = [(to, (i, j), (to, int(places[1 - n % 2][n // 2]))) for n, (to, i, j) in enumerate(reads)]
    moved = sorted((to, read, meant) for to, read, meant in partners if read != meant)
    if not moved:
        return
    closed = all(one[1:] == other[:0:-1] for one, other in zip(reads[::2], reads[1::2], strict=True))
    moved = [(to, read, meant) for to, read, meant in moved if not closed or to in places[0]]
    tos, said, instead = (
        ", ".join(map(str, some[:FEW])) + ", ..." * (len(moved) > FEW) for some in zip(*moved, strict=True)
    )
    what = "pairs" if closed else f"features {tos}"

    def taken(seen: Seen, which: int) -> Bounded:
        value, near = _straight(seen, which)
        right, bound = (x.copy() for x in seen.definition(which))
        if seen.case.inputs[Q].shape[-1] != width:
            raise ValueError("the features of wider heads were not measured")
        cos, sin = _tables(seen, which)
        for number, (to, i, j) in enumerate(reads):
            pair, sense = number // 2, (-1, 1)[number % 2]
            right[..., to] = value[..., i] * cos[..., pair] + sense * value[..., j] * sin[..., pair]
            bound[..., to] = bound[..., to] + near[..., i] + near[..., j] + bound.max(-1)
        return right, bound

    yield f"makes {what} of the features {said} in place of {instead}", taken


def _normalizing_heads(seen: Seen, which: int, ratio: np.ndarray) -> Named:
    """Yield for each head the head whose mean square normalizes it, if all heads have one and it is not their own."""
    number, x = source(which), seen.given(which)
    if number >= len(seen.case.weights) or seen.case.weights[number].numel() != x.shape[-1] or x.shape != ratio.shape:
        return
    means, right = (x * x).mean(-1) + seen.case.eps, seen.definition(which)[0]
    ratio = np.where(abs(right) > 0.05 * abs(right).max(), ratio, np.nan)
    shown = means / np.nanmedian(ratio, axis=-1).astype(np.float64) ** 2
    apart = np.nanmax(abs(shown[:, :, None] / means[:, None, :] - 1), axis=0)
    order = [int(head if apart[head, head] < 0.01 else np.argmin(apart[head])) for head in range(len(apart))]
    if order == list(range(len(order))) or any(apart[head, of] >= 0.01 for head, of in enumerate(order)):
        return

    def norm(z: np.ndarray, w: np.ndarray, eps: float, turns: slice) -> np.ndarray:
        means = (z * z).mean(-1, keepdims=True)
        means = means[..., order, :] if z.shape[-2] == len(order) else means  # the other of q and k
        return w.reshape(-1, z.shape[-1]) * z / np.sqrt(means + eps)

    said = ", ".join(f"head {head} by that of head {of}" for head, of in enumerate(order) if head != of)
    whose = "the first head" if set(order) == {0} else f"other heads: {said}"
    yield f"is normalized by the mean square of {whose}", called(room=2, norm=norm)


def facts(seen: Seen, which: int) -> Iterator[str]:
    """Yield what a wrong part of one call shows, in words; each line reproduces all of its wrong numbers."""
    y, (right, bound) = seen.actual(which), seen.definition(which)
    if y is None or y.shape != right.shape or which >= SCALES:
        return
    case, wrong, x = seen.case, seen.wrong(which), seen.given(which)
    with np.errstate(all="ignore"):
        if which == K and seen.blocks:
            yield from _of_blocks(seen, y, bound)
            y, right, bound, wrong = (z[..., : x.shape[-1]] for z in (y, right, bound, wrong))
        others = (other for other in (Q, K, V) if other != which and seen.actual(other) is not None)
        sources = [(PARTS[which], right, bound), *((PARTS[other], *seen.definition(other)) for other in others)]
        slotted = which in (K, V) and seen.subject.convention.addressed
        slots = case.every_slot[case.live.numpy()] if slotted else None
        nouns = ("slot" if slotted else "token", "head", "feature")
        found = plain(y, wrong, sources, {"the input": x}, nouns, case.rotary_dim, slots)
        yield from (f"{PARTS[which]} {fact}" for fact in found)


def _of_blocks(seen: Seen, y: np.ndarray, bound: np.ndarray) -> Iterator[str]:
    """Yield which of scales and stored 8-bit numbers are right by themselves, where their products are not."""
    (found, exponents), _, _ = in_blocks(seen, y)
    ((right, meant), _, _), ((near, apart), _, _) = in_blocks(seen), in_blocks(seen, bound)
    stored, wanted = (x / np.exp2(e)[..., None] for x, e in ((found, exponents), (right, meant)))
    scales = not off(exponents, (meant, apart)).any()
    bits = not off(stored, (wanted, near / np.exp2(meant)[..., None])).any()
    if scales != bits:
        names = "its scales are", "its 8-bit numbers, without their scales, are"
        yield f"the stored k is wrong, and {names[0] if scales else names[1]} right"
    ratio = (stored / wanted)[abs(wanted) > 64].astype(np.float64)
    if scales and ratio.size and np.isfinite(ratio).all() and ratio.min() > 0 and ratio.max() > 1.01 * ratio.min():
        yield (f"the 8-bit numbers of the stored k are {ratio.min():.3g} to {ratio.max():.3g} times as large as their "
               "scales ask for")  # fmt: skip
