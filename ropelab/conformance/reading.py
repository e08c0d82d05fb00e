"""Read a wrong function in words, where a common mistake accounts for every wrong element of every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, rotate_exactly, rotation_bound
from ropelab.conformance.case import Case
from ropelab.conformance.measure import Maps, Reader, angle
from ropelab.conformance.subject import fill
from ropelab.conformance.watched import Seen
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import LAYOUTS, pairs
from ropelab.positions.axes import mrope_axes

Tables = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Cosines and sines ``[B, S, 1, R/2]``, and the error that their angles have."""
Rule = Callable[[np.ndarray, Case], np.ndarray]
"""The positions that a mistaken function takes for the positions ``[B, S, 1 or R/2]`` of a case."""


@dataclass(frozen=True)
class Mistake:
    """A call as a mistaken function takes it.

    Attributes:
        words: what the function does.
        tables: the cosines and sines that it uses in a call.
        layout: the layout that it reads and writes; None for the declared ones.
        gradients: whether the mistake is one of gradients.
        tail: what it multiplies the features that do not rotate with.
    """

    words: str
    tables: Callable[[Seen], Tables]
    layout: str | None = None
    gradients: bool = False
    tail: float = 1.0

    def accounts_for(self, seen: Seen, elements: np.ndarray) -> bool:
        """Return whether elements of a call are as the mistake makes them, within the roundings of a few rotations."""
        if self.gradients and not seen.gradient:
            return False
        made, bound = self.make(seen)
        with np.errstate(invalid="ignore"):
            as_made = (abs(seen.actual - made) <= 2 * bound) | (np.isnan(seen.actual) & np.isnan(made))
        return bool(as_made[elements].all())

    def make(self, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
        """Return what a mistaken function makes of a call, and the error that its arithmetic has."""
        declared = (seen.subject.layout, seen.subject.out_layout)[:: -1 if seen.gradient else 1]
        source, target = declared if self.layout is None else (self.layout,) * 2
        width, (c, s, error) = seen.case.rotary_dim, self.tables(seen)
        members = pairs(seen.given[..., :width], source)
        made, bound = self.tail * seen.given, np.zeros_like(seen.given)
        fill(made, width, target, rotate_exactly(*members, c, s))
        arithmetic = seen.subject.arithmetic(seen.case.inputs[0].dtype)
        first, second = rotation_bound(*members, c, s, arithmetic, error)
        fill(bound, width, target, (first + second, first + second))
        return made, bound


@dataclass(frozen=True)
class HalfAHead(Mistake):
    """A part of the head that rotates with partners half a head apart, as those of a head that rotates as a whole.

    Attributes:
        cut: whether it rotates features ``j < R``, each with its partner, which need not rotate itself; or else pairs
            ``(i, i + D/2)`` with ``i < R/2``.
    """

    cut: bool = False

    def make(self, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
        half, count = seen.given.shape[-1] // 2, seen.case.rotary_dim // 2
        own = np.arange(seen.given.shape[-1])
        partner = np.where(own < half, own + half, own - half).clip(max=len(own) - 1)
        source = partner if seen.gradient else own  # a gradient reaches a feature from its partner's result
        columns, turning = (own % count, own < 2 * count) if self.cut else (own % half, own % half < count)

        def each(table: np.ndarray, of: np.ndarray, still: float) -> np.ndarray:
            return np.where(turning[of], table[..., columns[of].clip(max=count - 1)], still)

        c, s, error = self.tables(seen)
        members = seen.given, np.where(own < half, 1, -1) * seen.given[..., partner]
        turn = each(c, own, 1), each(s, source, 0)
        arithmetic = seen.subject.arithmetic(seen.case.inputs[0].dtype)
        first, second = rotation_bound(
            *members, *turn, arithmetic, np.maximum(each(error, own, 0), each(error, source, 0))
        )
        return rotate_exactly(*members, *turn)[0], first + second


# ------------------------------------------------------------------------------------------------ the tables of a call


def right(seen: Seen, **other) -> Tables:
    """Return the right tables of a call, or those of another call: ``other`` are attributes of the case."""
    c, s, error = (table[:, seen.tokens] for table in seen.subject.cosines(replace(seen.case, **other)))
    return c, -s if seen.gradient else s, error


def turned(seen: Seen, positions: np.ndarray, frequencies: np.ndarray) -> Tables:
    """Return the tables of any positions ``[B, S, 1 or R/2]`` and any frequencies in rad per position."""
    case = seen.case
    angles = (np.where(positions == NO_POSITION, 0, positions) / case.interpolation)[:, :, None] * frequencies
    error = seen.subject.convention.angle_error(angles, frequencies) + 4 * np.finfo(float).eps * (abs(angles) + 1)
    return case.factor * np.cos(angles), seen.sign * case.factor * np.sin(angles), case.factor * error


def moved(rule: Rule, which: str = "") -> Callable[[Seen], Tables]:
    """Return the tables of other positions, or of other positions for the ``"cosines"`` or the ``"sines"`` alone."""

    def tables(seen: Seen) -> Tables:
        positions = seen.case.pair_positions().numpy()
        asked = -1 if seen.case.inverse and seen.subject.convention.negates else 1  # the function sees these
        other = asked * np.broadcast_to(rule(asked * positions, seen.case), positions.shape)
        other = np.where(positions == NO_POSITION, NO_POSITION, other)[:, seen.tokens]
        (c, s, error), own = turned(seen, other.astype(EXACT), seen.frequencies), right(seen)
        error = np.maximum(error, own[2])
        return own[0] if which == "sines" else c, own[1] if which == "cosines" else s, error

    return tables


def with_frequencies(frequencies: Callable[[Seen], np.ndarray]) -> Callable[[Seen], Tables]:
    return lambda seen: turned(seen, seen.positions.astype(EXACT), frequencies(seen))


def _signed(seen: Seen) -> Tables:
    c, s, error = right(seen)
    return c, -s, error


def _twice(seen: Seen) -> Tables:
    c, s, error = right(seen)
    return c * c - s * s, 2 * c * s, 4 * error


def _times(number: float) -> Callable[[Seen], Tables]:
    return lambda seen: tuple(number * table for table in right(seen))  # type: ignore[return-value]


def _first(turning: int) -> Callable[[Seen], Tables]:
    """Return the tables of a function that rotates the first pairs alone."""

    def tables(seen: Seen) -> Tables:
        c, s, error = right(seen)
        kept = np.arange(c.shape[-1]) < turning
        return np.where(kept, c, 1), np.where(kept, s, 0), error

    return tables


def _rounded(stage: str, dtype: torch.dtype) -> Callable[[Seen], Tables]:
    """Return the tables where positions, frequencies, angles or the tables themselves are rounded to 16 bits."""

    def to16(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x.astype(float)).float().to(dtype).double().numpy().astype(EXACT)

    def tables(seen: Seen) -> Tables:
        positions, frequencies = (
            np.where(seen.positions == NO_POSITION, 0, seen.positions).astype(EXACT),
            seen.frequencies,
        )
        if stage == "positions":
            return turned(seen, to16(positions), frequencies)
        if stage == "frequencies":
            return turned(seen, positions, to16(frequencies))
        if stage == "angles":
            scale = seen.case.interpolation
            return turned(seen, to16(positions * frequencies / scale) * scale, np.ones(1, EXACT))
        c, s, error = right(seen)
        return to16(c), to16(s), error

    return tables


# -------------------------------------------------------------------------------------------------------- the readings


def _starts(p: np.ndarray, case: Case) -> np.ndarray:
    """Return the position at which the sequence or the document of each token starts."""
    if case.lengths is None:
        return p[:, :1]
    ends = np.cumsum(case.lengths)
    document = np.searchsorted(ends, np.arange(p.shape[1]), side="right").clip(0, len(ends) - 1)
    return p[:, np.minimum((ends - case.lengths)[document], p.shape[1] - 1)]


def _axes(p: np.ndarray, case: Case, order: tuple[int, ...] = (0, 1, 2), *, blocks: bool = False) -> np.ndarray:
    """Return the positions of pairs that read the axes in another order, or blocks of pairs for turns."""
    if case.positions is None or case.mrope_section is None or len(case.positions) != len(order):
        return p
    along = mrope_axes(case.mrope_section, mrope_interleaved=case.mrope_interleaved != blocks)
    return case.positions.cpu().numpy()[list(order)][list(along)].transpose(1, 2, 0)


def _rank(p: np.ndarray, case: Case, contiguous: bool) -> np.ndarray:
    """Return the positions of the first rank, or of contiguous shards, where tokens are sharded."""
    if case.shard is None:
        return p
    size, rank = case.shard
    if not contiguous:
        return replace(case, shard=(size, 0)).pair_positions().numpy()
    counts = [length // size for length in case.lengths or (size * p.shape[1],)]
    return np.concatenate([rank * n + np.arange(n) for n in counts])[:, None]


RULES: dict[str, Rule] = {
    "is not rotated, as at position 0": lambda p, case: 0 * p,
    "takes the number of the token in the call for its position": lambda p, case: np.arange(p.shape[1])[:, None],
    "takes the positions of the first sequence": lambda p, case: p[:1],
    "takes the positions of the sequence before": lambda p, case: np.roll(p, 1, 0),
    "takes positions modulo the number of tokens": lambda p, case: p % p.shape[1],
    "counts from 0 in each sequence or document": lambda p, case: p - _starts(p, case),
    "takes the position along the first axis for all axes": lambda p, case: p[..., :1],
    "exchanges the second and the third axis of positions": lambda p, case: _axes(p, case, (0, 2, 1)),
    "takes blocks of pairs for axes that take turns": lambda p, case: _axes(p, case, blocks=True),
    "takes the positions of the first rank": lambda p, case: _rank(p, case, contiguous=False),
    "takes the shards of ranks for contiguous": lambda p, case: _rank(p, case, contiguous=True),
}
"""Mistaken positions that depend on the call alone."""


def mistakes(maps: Maps | None) -> Iterator[Mistake]:
    """Yield the common mistakes, the simplest first. Numbers in them are read off the measured map."""
    yield Mistake("repeats the forward rotation, not its transpose", _signed, gradients=True)
    yield Mistake("turns by minus the angle", _signed)
    for words, rule in RULES.items():
        yield Mistake(words, moved(rule))
    for layout in LAYOUTS:
        yield Mistake(f"pairs features as in the layout {layout}", right, layout)
    yield HalfAHead("pairs feature i with i + head_dim/2 where i + rotary_dim/2 is its partner", right)
    yield HalfAHead("rotates the first features with partners head_dim/2 apart, not rotary_dim/2", right, cut=True)
    yield Mistake("is zero", _times(0.0), tail=0.0)
    yield Mistake("is not a number, as memory that nothing was written to", _times(np.nan), tail=np.nan)
    yield Mistake("is zero in features that do not rotate", right, tail=0.0)
    yield Mistake("is rotated twice", _twice)
    yield Mistake("has the frequencies of a head that rotates as a whole", with_frequencies(_by_head_dim))
    yield Mistake("ignores the factor of the tables", lambda seen: right(seen, factor=1.0))
    yield Mistake("ignores the scale of positions", lambda seen: right(seen, interpolation=1.0))
    if maps is not None:
        yield from _read_off(maps)
    for which in ("sines", "cosines"):
        for words, rule in RULES.items():
            yield Mistake(f"{words}, in the {which} alone", moved(rule, which))
    for stage in ("positions", "frequencies", "angles", "cosines and sines"):
        for dtype in (torch.bfloat16, torch.float16):
            yield Mistake(f"has {stage} in {str(dtype).removeprefix('torch.')}", _rounded(stage, dtype))


def _of_base(seen: Seen, base: float, features: int = 0) -> np.ndarray:
    return EXACT(base) ** (-2 * np.arange(len(seen.frequencies)) / EXACT(features or seen.case.rotary_dim))


def _by_head_dim(seen: Seen) -> np.ndarray:
    return _of_base(seen, seen.subject.base, seen.given.shape[-1])


def _plus(n: float) -> Rule:
    return lambda p, case: p + n


def _modulo(n: float) -> Rule:
    return lambda p, case: p % n


def _read_off(maps: Maps) -> Iterator[Mistake]:
    """Yield the mistakes with a number: a shift or modulus of positions, a factor, a base, the pairs that rotate."""
    seen, case, reader = maps.seen, maps.seen.case, Reader(maps)
    places = np.argwhere(maps.wrong.any((-1, -2, -3)))[:40]
    for which, entry in (("", "sin of y1"), ("sines", "sin of y1"), ("cosines", "cos of y0")):
        read = ((float(seen.positions[b, s, 0]), reader.read((b, s, h))[entry][0]) for b, s, h in places)
        known = np.array([both for both in read if both[1] is not None], float).reshape(-1, 2)
        alone = f", in the {which} alone" if which else ""
        off = known[:, 1] - known[:, 0]
        if len(off) and (off == off[0]).all() and off[0]:
            words = f"takes position p {'+' if off[0] > 0 else '-'} {abs(off[0]):g} for p{alone}"
            yield Mistake(words, moved(_plus(off[0]), which))
        for n in np.unique(-off[off < -1]):
            if (known[:, 0] % n == known[:, 1]).all():
                yield Mistake(f"takes positions modulo {n:g}{alone}", moved(_modulo(n), which))
    ratio = maps.length[maps.alone] / case.factor
    if ratio.size and np.ptp(ratio) <= 1e-3 * abs(np.median(ratio)):
        factor = float(np.median(ratio))
        yield Mistake(f"is {factor:.4g} times as long", _times(factor))
    at = seen.positions[..., :1].min(-1)[:, :, None]
    hits = np.argwhere(maps.wrong.any((-1, -2, -3)) & (at > 0) & maps.alone.all(-1))
    if not len(hits) or case.axes is not None:
        return
    b, s, h = min(hits.tolist(), key=lambda place: at[place[0], place[1], 0])
    rates = seen.sign * angle(maps.matrix[b, s, h]).astype(float) / float(at[b, s, 0]) * case.interpolation
    if len(rates) > 1 and (rates > 0).all():
        slopes = -np.log(rates[1:]) / np.arange(1, len(rates)) * len(rates)
        if np.ptp(slopes) <= 1e-3 * (1 + abs(np.median(slopes))):
            base = float(np.exp(np.median(slopes)))
            yield Mistake(
                f"has frequencies of the base {base:.4g}", with_frequencies(lambda seen: _of_base(seen, base))
            )
    still = (abs(maps.matrix[b, s, h] - np.eye(2)) <= maps.error[b, s, h]).all((-1, -2))
    if still[-1] and not still[0] and (np.diff(still.astype(int)) >= 0).all():
        turning = int((~still).sum())
        yield Mistake(f"rotates the first {turning} pairs alone", _first(turning))


def readings(calls: list[Seen], maps: Maps | None) -> list[str]:
    """Return what the function does in words: sentences that together account for every head of a token with a wrong
    element, in every call.

    Args:
        calls: the calls that were watched, of which ``right`` is the definition.
        maps: the measured map of a wrong call.

    Returns:
        A sentence for all inputs, or one for each input or direction; empty if some wrong element has no reading.
    """
    known = list(mistakes(maps))
    wrong = [seen for seen in calls if seen.wrong.any()]
    parts: tuple[Callable[[Seen], object], ...] = (
        lambda seen: "", lambda seen: seen.which, lambda seen: seen.gradient, lambda seen: seen.what,
    )  # fmt: skip
    for part in parts:
        groups: dict[object, list[Seen]] = {}
        for seen in wrong:
            groups.setdefault(part(seen), []).append(seen)
        found = [(group, _accounting(group, known)) for group in groups.values()]
        if found and all(mistake for _, mistake in found):
            return [_sentence(group, mistake, calls) for group, mistake in found if mistake]
    return []


def _accounting(group: list[Seen], known: list[Mistake]) -> Mistake | None:
    """Return the mistake that makes each head of a token that has a wrong element, with its right elements."""
    heads = [(seen, np.broadcast_to(seen.wrong.any(-1, keepdims=True), seen.wrong.shape)) for seen in group]
    return next((mistake for mistake in known if all(mistake.accounts_for(*one) for one in heads)), None)


def _sentence(group: list[Seen], mistake: Mistake, calls: list[Seen]) -> str:
    named = list(dict.fromkeys(seen.what for seen in group))
    everywhere = all(mistake.accounts_for(seen, ~seen.wrong) for seen in calls if seen.what in named)
    return f"{', '.join(named)}{'' if everywhere else ', where wrong'}: {mistake.words}"
