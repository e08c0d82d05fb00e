"""Facts that are read off an answer: rows, columns, factors and copies, for answers that no description reproduces.

A fact is told only if it reproduces every element of the answer within the derived bound; a base that is fitted, only
if it reproduces the cosines and sines to within `CLOSE`. It says nothing about other calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from ropelab.conformance.bounds import EXACT
from ropelab.conformance.identify.angles import CLOSE, refined, rows, slopes, waves
from ropelab.conformance.identify.deviation import Deviation, Scope, planned, simulate
from ropelab.conformance.identify.evidence import Answer
from ropelab.conformance.identify.matrix import TINY, blocks, matrices
from ropelab.conformance.identify.measured import FAR
from ropelab.conformance.identify.plain import feature_order, listed, order_words, plain, said
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.questions import FORWARD, GRADIENT
from ropelab.conformance.identify.vocabulary import PAIR, set_row
from ropelab.conformance.law import names
from ropelab.conformance.subject import Subject
from ropelab.layout.pairing import LAYOUTS, pairs, permutation

SECONDS = 2.0
"""The limit of CPU time for all answers."""
NEAR_ROWS = 300
FEW = 3
"""The number of facts, and of parts of an answer, that are told."""
NOUNS = ("sequence", "token", "head", "feature")
ENTRIES = ("cos0", "cos1", "sin0", "sin1")
"""The factors of a pair: ``y0 = cos0 x0 - sin0 x1`` and ``y1 = cos1 x1 + sin1 x0``."""

Wrong = list[tuple[Answer, np.ndarray]]


def read_off(subject: Subject, wrong: Wrong, known: tuple[Deviation, ...] = ()) -> tuple[str, ...]:
    """Return what the simplest wrong answers show by themselves, in words.

    Args:
        subject: the function.
        wrong: answers with their unexplained elements, ``[B, S, H, D]``.
        known: deviations that reproduce other answers. Facts are beside the definition, or else beside these.
    """
    deadline = time.thread_time() + SECONDS
    told: dict[str, list[str]] = {}
    bases = [("", ()), (", beside the deviations that explain other answers", known)][: 1 + bool(known)]
    left = [a for a, _ in wrong if a.question.kind in (FORWARD, GRADIENT) and not isinstance(a.values, str)]
    for answer in sorted(left, key=lambda a: (a.question.kind != FORWARD, a.size)):
        if time.thread_time() > deadline:
            break
        facts = (f"{fact}{beside}" for beside, base in bases for fact in read(subject, answer, base))
        for fact in islice(facts, 1):
            told.setdefault(fact, []).append(_asked(answer))
    return tuple(
        f"{calls[0]}: {fact}" + (f" (the same in {len(calls) - 1} more)" if calls[1:] else "")
        for fact, calls in list(told.items())[:FEW]
    )


def read(subject: Subject, answer: Answer, known: tuple[Deviation, ...] = ()) -> Iterator[str]:
    """Yield what a wrong answer shows beside a description; each line reproduces all of its elements."""
    seen = _seen(subject, answer, known)
    if seen is None or not seen.wrong.any():
        return
    with np.errstate(all="ignore"):
        plan, case = seen.plan, answer.question.case
        told = {name: simulate(subject, answer.question, i, known) for i, name in enumerate(names(case))}
        sources = [(answer.name, seen.right, seen.bound)]
        sources += [(name, *y) for name, y in told.items() if name != answer.name and not isinstance(y, str)]
        given = {"the cotangent" if plan.is_gradient else "the input": answer.given}
        found = False
        for fact in plain(seen.y, seen.wrong, sources, given, _nouns(seen), plan.rotary_dim):
            yield fact
            found = True
        for reading in (_rows, _columns, _entries, _sums, _angles):
            if found and reading not in (_rows, _columns):  # the pairs one by one say less
                return
            for fact in reading(seen):
                yield fact
                found = True


@dataclass(frozen=True)
class _Seen:
    """A wrong answer beside the definition with known deviations; all arrays are ``[B, S, H, D]``."""

    subject: Subject
    answer: Answer
    known: tuple[Deviation, ...]
    wrong: np.ndarray
    y: np.ndarray
    right: np.ndarray
    bound: np.ndarray

    @property
    def plan(self) -> Plan:
        return planned(self.subject, self.answer.question, self.answer.which, self.known)

    def off(self, change: Callable[[Plan], object], rounds: float = 1.0) -> np.ndarray:
        """Return which elements a change of the definition does not reproduce."""
        question, which = self.answer.question, self.answer.which

        def here(plan: Plan) -> None:
            if plan.question is question and plan.which == which:
                change(plan)

        return self.answer.wrong(self.subject, (*self.known, Deviation("read", "", PAIR, here, rounds=rounds)))

    def turned(self) -> tuple[np.ndarray, np.ndarray, Plan]:
        """Return given and resulting pairs as complex numbers ``[B, S, H, pairs]``, and the plan."""
        plan = self.plan
        read, written = plan.layout, plan.out_layout
        if plan.is_gradient:
            read, written = written, read
        before, after = (
            pairs(x[..., : plan.rotary_dim].astype(np.float64), name)
            for x, name in ((self.answer.given, read), (self.y, written))
        )
        return before[0] + 1j * before[1], after[0] + 1j * after[1], plan


def _seen(subject: Subject, answer: Answer, known: tuple[Deviation, ...] = ()) -> _Seen | None:
    right = simulate(subject, answer.question, answer.which, known)
    y, elements = answer.values, answer.wrong(subject, known)
    if isinstance(right, str) or isinstance(y, str) or y.shape != right[0].shape or elements.shape != y.shape:
        return None
    return _Seen(subject, answer, known, elements, y, *(np.broadcast_to(part, y.shape) for part in right))


def _asked(answer: Answer) -> str:
    name, asked = answer.name, answer.question.name
    return f"the gradient of {name} for {asked.removeprefix('the gradient for ')}" if (
        answer.question.kind == GRADIENT
    ) else f"{name} for {asked}"  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- features


def orders(subject: Subject, wrong: Wrong) -> Iterator[Deviation]:
    """Yield for each input the order of features that its wrong results show; another layout has words of its own."""
    found: dict[str, dict[tuple[int, int], list[int] | None]] = {}
    for answer, _ in wrong:
        seen = _seen(subject, answer) if answer.question.kind == FORWARD else None
        if seen is not None:
            extents = seen.y.shape[-1], seen.plan.rotary_dim
            every = found.setdefault(answer.name, {})
            if extents not in every:
                every[extents] = feature_order(seen.y, seen.right, seen.bound)
    for name, known in found.items():
        if all(order is not None for order in known.values()) and not all(
            _is_layout(order or [], rotary_dim) for (_, rotary_dim), order in known.items()
        ):
            yield _ordered(name, {extents: order for extents, order in known.items() if order is not None})


def _is_layout(order: list[int], rotary_dim: int) -> bool:
    """Return whether an order of features writes pairs of one layout as another."""
    changes = (permutation(rotary_dim, *layouts).tolist() for layouts in (LAYOUTS, LAYOUTS[::-1]))
    return order[:rotary_dim] in changes and order[rotary_dim:] == list(range(rotary_dim, len(order)))


def _ordered(name: str, known: dict[tuple[int, int], list[int]]) -> Deviation:
    def change(plan: Plan) -> None:
        order = known.get((plan.shape[-1], plan.rotary_dim))
        if order is not None:
            plan.moved = np.arange(int(np.prod(plan.shape))).reshape(plan.shape)[..., order]

    (_, rotary_dim), order = next(iter(known.items()))
    words = f"has the right numbers in other features: {order_words(order, rotary_dim)}"
    return Deviation("feature order", words, PAIR, change, {"order": order}, Scope(name))


# -------------------------------------------------------------------------------------------------------------- rows


def _rows(seen: _Seen) -> Iterator[str]:
    """Yield the rows that tokens read, or heads of tokens if the heads of a token do not agree."""
    before, after, plan = seen.turned()
    if not before.shape[-1] or seen.answer.question.case.axes is not None:
        return
    if np.size(plan.multiple) > 1 or np.ndim(plan.frequency) > 1:  # a deviation confined to some elements
        return
    for axes in ((2,), ()):
        read = _read_rows(seen, before, after, plan, axes)
        if (
            read is not None and not seen.off(partial(set_row, row=read[..., None]), 2).any()
        ):  # or two turns after another
            if words := _rows_in_words(seen, read):
                yield words
            return


def read_rows(subject: Subject, answer: Answer) -> tuple[Plan, np.ndarray | None]:
    """Return the plan of a wrong answer, and the rows ``[B, S]`` that its tokens read; None if one reads no row."""
    seen = _seen(subject, answer)
    if seen is None:
        return Plan.of(subject, answer.question, answer.which), None
    before, after, plan = seen.turned()
    found = _read_rows(seen, before, after, plan, (2,)) if before.shape[-1] else None
    return plan, None if found is None else found[..., 0]


def read_heads(subject: Subject, answer: Answer) -> np.ndarray | None:
    """Return the number in memory of the head that each head of a wrong result was made from, ``[B, S, H]``.

    None if a head was made from none, turned by the row of its own token.
    """
    seen = _seen(subject, answer)
    if seen is None or seen.answer.question.case.axes is not None:
        return None
    before, after, plan = seen.turned()
    if not before.shape[-1] or np.size(plan.multiple) > 1:
        return None
    rates = float(plan.multiple) * plan.frequency.astype(np.float64)
    rows = np.broadcast_to(plan.row[..., :1], (*before.shape[:3], 1)).astype(np.float64)
    straight = after * np.exp(-1j * rows * rates) / plan.factor
    order = "bsh" if answer.question.case.lengths is not None else subject.seq_format.replace("d", "")
    heads = before.transpose(*map("bsh".index, order), 3).reshape(-1, before.shape[-1])
    off = abs(straight[..., None, :] - heads).max(axis=-1)
    own = np.arange(len(heads)).reshape([before.shape["bsh".index(axis)] for axis in order])
    own = own.transpose(*map(order.index, "bsh"))
    near = np.take_along_axis(off, own[..., None], axis=-1)[..., 0] <= _close(seen)
    found = np.where(near, own, off.argmin(axis=-1))
    return found if (near | (off.min(axis=-1) <= _close(seen))).all() else None


def _read_rows(seen: _Seen, before, after, plan: Plan, axes: tuple[int, ...]) -> np.ndarray | None:
    """Return the rows ``[B, S, 1]``, or ``[B, S, H]`` for each head; None if a token turns by no row."""
    weight = (abs(before) ** 2).sum(axis=axes, keepdims=True)
    turn = (after * before.conj()).sum(axis=axes, keepdims=True) / (weight * plan.factor)
    position = np.broadcast_to(plan.position[..., 0].astype(np.int64), turn.shape[:3])
    hit = np.broadcast_to(seen.wrong.any(axis=-1), before.shape[:3]).any(axis=axes, keepdims=True)
    if not np.isfinite(turn[hit]).all():
        return None
    sense = float(plan.multiple) * (-1 if plan.is_gradient else 1) / seen.answer.question.case.interpolation
    rates = tuple(float(f) * sense for f in plan.frequency)
    limit = FAR if abs(position).max(initial=0) > 1000 else NEAR_ROWS
    values = np.concatenate((turn.real, turn.imag), axis=-1)[hit]
    found = position.copy()
    known = np.unique(position)  # rows of the call itself come first: few other rows are as near by chance
    for table, first in ((_wave(known, rates), None), (waves(rates, limit), -limit)):
        at = rows(values, table, first or 0, np.zeros(len(values)) if first is None else position[hit], _close(seen))
        if at is not None:
            found[hit] = known[at] if first is None else at
            return found
    return None


def _wave(positions: np.ndarray, rates: tuple[float, ...]) -> np.ndarray:
    angles = positions[:, None] * np.array(rates)
    return np.concatenate((np.cos(angles), np.sin(angles)), axis=1)


def _close(seen: _Seen) -> float:
    return max(CLOSE, 8 * seen.subject.arithmetic(seen.answer.question.case.inputs[0].dtype).store.unit)


def _rows_in_words(seen: _Seen, read: np.ndarray) -> str:
    position = np.broadcast_to(seen.plan.position[..., 0, 0].astype(np.int64), read.shape[:2])
    parts, number = list(_parts(seen, read.shape)), seen.plan.token.reshape(-1)
    told: dict[tuple[str, str], list[str]] = {}
    for who, span, (batch, tokens, head) in parts:
        ours, meant = read[batch, tokens, head], position[batch, tokens]
        hit = np.flatnonzero(ours != meant)
        if len(hit):
            others = {name: position[b, t][hit] for name, _, (b, t, _) in parts
                      if name != who and len(position[b, t]) > hit[-1]}  # fmt: skip
            whose = next((f", which are those of {name}" for name, p in others.items() if (p == ours[hit]).all()), "")
            some = span and f"document {span} (tokens {tokens.start} to {tokens.stop - 1})"
            if len(hit) < len(ours):
                some = (
                    f"token{'s' * (len(hit) > 1)} {listed(number[hit + tokens.start])}{span and f' of document {span}'}"
                )
            turned = f"by positions {listed(ours[hit])} in place of {listed(meant[hit])}{whose}"
            told.setdefault((some, turned), []).append(who)
    lines = []
    for (some, turned), whos in told.items():
        every = len(whos) == len({who for who, _, _ in parts})
        who = " of ".join(filter(None, (some, "" if every else " and ".join(whos))))
        verb = "turn" if some.startswith("tokens") or (len(whos) > 1 and not every) else "turns"
        lines.append(f"{who} {verb} {turned}".strip())
    more = f"; {len(lines) - FEW} more parts by other positions" if len(lines) > FEW else ""
    return "; ".join(lines[:FEW]) + more


def _parts(seen: _Seen, shape: tuple[int, ...]) -> Iterator[tuple[str, str, tuple[int, slice, int]]]:
    """Yield the sequences or the packed documents of a call, each head of them by itself if rows differ by heads."""
    case = seen.answer.question.case
    spans: Iterable[tuple[str, slice]] = [("", slice(0, shape[1]))]
    if case.lengths is not None:
        ends = np.cumsum([0, *case.lengths]) // (case.shard or (1,))[0]
        both = list(zip(ends[:-1], ends[1:], strict=True))
        spans = [(str(n), slice(int(a), int(b))) for n, (a, b) in enumerate(both) if b > a]
    for batch, (span, tokens), head in product(range(shape[0]), spans, range(shape[2])):
        said = [f"head {head}"] * (shape[2] > 1) + [f"sequence {batch}"] * (shape[0] > 1)
        yield " of ".join(said), span, (batch, tokens, head)


# ----------------------------------------------------------------------------------------------- columns and products


def _columns(seen: _Seen) -> Iterator[str]:
    """Yield the pairs whose frequencies the pairs have, or the named frequencies that they have."""
    before, after, plan = seen.turned()
    count = before.shape[-1]
    if not count or seen.answer.question.case.axes is not None:
        return
    position = plan.position[..., 0].astype(np.float64) / seen.answer.question.case.interpolation
    sense = float(plan.multiple) * (-1 if plan.is_gradient else 1)
    turn = (after * before.conj()).sum(axis=2) / ((abs(before) ** 2).sum(axis=2) * plan.factor)
    for words, rates in named_frequencies(seen.subject.base, 2 * count, seen.y.shape[-1]):
        if not seen.off(partial(_with, frequency=rates)).any():
            yield f"has {words}"
    base = _fitted_base(position[0, :, 0], sense * np.angle(turn[0]))
    if base is not None:
        rates = base ** (-np.arange(count) / count)
        other = f"{base:.3g}" != f"{seen.subject.base:.3g}"  # the fit is no better than its digits
        if other and (abs(np.exp(1j * sense * position * rates) - turn) < _close(seen)).all():
            yield f"has about the base {base:.3g} in place of {seen.subject.base:g}"


def _fitted_base(position: np.ndarray, angles: np.ndarray) -> float | None:
    """Return the base whose frequencies fit angles ``[S, pairs]`` at positions ``[S]`` best; None if none can.

    The first tokens, which are consecutive, show the frequency of a pair up to a turn, and others refine it.
    """
    run = 1 + int((np.cumprod(np.diff(position) == 1)).sum())
    if run < 3 or angles.shape[1] < 3 or not np.isfinite(angles).all():
        return None
    slope, intercept = slopes(angles[:run])
    intercept = intercept - position[0] * slope
    slope = refined(slope, intercept, angles[run:], position[run:])
    if not (slope > 0).all():
        return None
    fitted = np.polyfit(np.arange(len(slope)), np.log(slope), 1)
    return float(np.exp(-fitted[0] * len(slope)))


def _with(plan: Plan, frequency: np.ndarray) -> None:
    plan.frequency = plan.sine_frequency = np.asarray(frequency).astype(EXACT)


def named_frequencies(base: float, rotary_dim: int, head_dim: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield frequencies ``[rotary_dim / 2]`` that functions have by mistake, with their formula.

    Args:
        base: the base of the right frequencies.
        rotary_dim, head_dim: the features that rotate, and all features of a head.
    """
    twice = EXACT(2) * np.arange(rotary_dim // 2)
    divisors = {rotary_dim // 2: "half of rotary_dim", 2 * rotary_dim: "2 rotary_dim", head_dim: "head_dim"}
    for divisor, name in divisors.items():
        if divisor not in (0, rotary_dim):
            words = f"exponents that are divided by {divisor} ({name}) in place of {rotary_dim} (rotary_dim)"
            yield words, EXACT(base) ** (-twice / divisor)
    for other in (10_000, 100_000, 500_000, 1_000_000):
        if other != base:
            yield f"the base {other:g} in place of {base:g}", EXACT(other) ** (-twice / rotary_dim)
    for factor in (2, 4, 8, 16, 32):
        for words, by in (
            (f"frequencies divided by {factor}", 1 / factor),
            (f"{factor} times the frequencies", factor),
        ):
            yield words, EXACT(base) ** (-twice / rotary_dim) * by


def _entries(seen: _Seen) -> Iterator[str]:
    """Yield which cosines and sines the wrong pairs are multiplied by: those of another pair, row or axis, or numbers.

    Calls with basis vectors show the four factors of each pair. A factor that no table has stays unexplained.
    """
    plan, (found, right) = seen.plan, _factors(seen)
    if found is None or not right[0].size or plan.frequency.ndim > 1:
        return
    rate, row = (np.broadcast_to(v, right[0].shape).astype(np.float64) for v in (plan.frequency, plan.row))
    reads: dict[str, tuple[np.ndarray, ...]] = {
        entry: (row.copy(), rate.copy(), np.ones(row.shape)) for entry in ENTRIES
    }
    told: dict[tuple[str, str], dict[int, int]] = {}
    lost: set[int] = set()
    wrong = np.array([~(abs(values - meant) < _close(seen)) for values, meant in zip(found, right, strict=True)])
    for pair in np.flatnonzero(wrong.any(axis=(0, 1, 2, 3))).tolist():
        every = {
            entry: (values[..., pair], np.asarray(wrong[..., pair].any(axis=0)))
            for entry, values in zip(ENTRIES, found, strict=True)
        }
        together = _found(seen, pair, every)
        for entry, hit in zip(ENTRIES, wrong[..., pair], strict=True):
            own = together if together or not hit.any() else _found(seen, pair, {entry: (every[entry][0], hit)})
            if own:
                for mine, theirs in zip(reads[entry], own[entry], strict=False):
                    mine[..., pair] = theirs
                told.setdefault(("" if together else entry, own[entry].words), {})[pair] = own[entry].column
            elif hit.any():
                lost.add(pair)
    told = {key: kept for key, columns in told.items() if (kept := {p: c for p, c in columns.items() if p not in lost})}
    if not told:
        return
    features = pairs(np.arange(plan.rotary_dim), plan.layout if plan.is_gradient else plan.out_layout)
    ours = np.concatenate([f[sorted({pair for columns in told.values() for pair in columns})] for f in features])
    hits = [np.flatnonzero(wrong.any(axis=(0, 4, *(1 + i for i in range(3) if i != axis)))) for axis in range(3)]
    for only in (None, hits):
        if not seen.off(partial(_read_from, reads=reads, only=only))[..., ours].any():
            where = "" if only is None else said([*hits, np.arange(1)], (*row.shape[:3], 1), _nouns(seen))
            rest = f"; pairs {listed(np.array(sorted(lost)))} unexplained" * bool(lost)
            yield f"{_entries_in_words(told, row.shape[-1])} {where}".rstrip() + rest
            return


def _factors(seen: _Seen) -> tuple[list[np.ndarray] | None, list[np.ndarray]]:
    """Return the measured factors of the pairs, and the right ones, ``[B, S, H, pairs]`` for each of `ENTRIES`.

    The measured ones are None if they do not reproduce the answer: then no pair is a sum of its own two features.
    """
    before, after, plan = seen.turned()
    angle = np.asarray(plan.multiple * plan.row * plan.frequency, dtype=np.float64)
    wave = {"cos": np.cos(angle) * plan.factor, "sin": np.sin(angle) * plan.factor}
    right = [np.broadcast_to(wave[name[:3]] * getattr(plan, name), before.shape) for name in ENTRIES]
    every = blocks(seen.subject, seen.answer.question, plan.layout, plan.out_layout, plan.rotary_dim)
    if every is None:
        return None, right
    found = [np.broadcast_to(getattr(every[seen.answer.which], name), before.shape) for name in ENTRIES]
    c0, c1, s0, s1 = found if not plan.is_gradient else (*found[:2], -found[3], -found[2])
    made = c0 * before.real - s0 * before.imag + 1j * (c1 * before.imag + s1 * before.real)
    alike = abs(made - after) <= _close(seen) * (1 + abs(before))
    return (found if alike.all() else None), right


class _Read(NamedTuple):
    """The row ``[B, S, H]``, the frequency and the amplitude of the cosines or sines that a factor of a pair is."""

    row: np.ndarray
    rate: float
    amplitude: float
    words: str
    column: int


def _found(seen: _Seen, pair: int, factors: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, _Read]:
    """Return what factors of a pair are in their place, with the same row and column; empty if nothing is all of them.

    Args:
        factors: the entry -> the measured numbers ``[B, S, H]``, and those which are wrong.
    """
    sense, factor, close = float(seen.plan.multiple), seen.plan.factor, _close(seen)
    for every in zip(*(_candidates(seen, entry, pair, len(factors) > 1) for entry in factors), strict=True):
        for (entry, (values, hit)), read in zip(factors.items(), every, strict=True):
            wave = np.sin if entry.startswith("sin") else np.cos
            if (abs(read.amplitude * factor * wave(sense * read.row[hit] * read.rate) - values[hit]) >= close).any():
                break
        else:
            return dict(zip(factors, every, strict=True))
    return {}


def _candidates(seen: _Seen, entry: str, pair: int, together: bool) -> Iterator[_Read]:
    """Yield what a cosine or a sine of a pair may be in its place, the nearest first.

    ``together`` asks for what all factors of a pair can be at once: of another row, axis or pair.
    """
    plan, case, kinds = seen.plan, seen.answer.question.case, ("cosines", "sines")
    own = np.broadcast_to(plan.row, (*plan.shape[:3], plan.rotary_dim // 2))[..., pair].astype(np.float64)
    rates, sine, sense = plan.frequency.astype(np.float64).tolist(), entry.startswith("sin"), float(plan.multiple)
    rows = {"": own}
    if case.axes is None or case.positions is None:
        rows |= {"the next row": own + 1, "the row before": own - 1}
    else:
        along = case.positions.numpy().astype(np.float64)
        rows |= {f"the positions of axis {n}": np.broadcast_to(at[..., None], own.shape) for n, at in enumerate(along)}
    for sign, kind in ((1.0, sine),) if together else product((1.0, -1.0), (sine, not sine)):
        if kind == sine and not together:
            yield _Read(0 * own + (sine and np.pi / 2 * sense / rates[pair]), rates[pair], sign, f"{sign:g}", pair)
        for words, at in rows.items():
            for column in sorted(range(len(rates)), key=lambda column: abs(column - pair)):
                if column == pair or "axis" not in words:
                    # A sine is a cosine that is a quarter of a turn behind.
                    shift = 0.0 if kind == sine else (-1 if kind else 1) * np.pi / 2 * sense / rates[column]
                    told = "angles" if together else "minus " * (sign < 0) + kinds[kind]
                    yield _Read(at + shift, rates[column], sign, told + f" of {words}" * bool(words), column)
    for factor in (0.0, 2.0, 0.5):
        yield _Read(own, rates[pair], factor, f"{factor:g} times the {kinds[sine]}" if factor else "0", pair)


def _read_from(plan: Plan, reads: dict[str, tuple[np.ndarray, ...]], only: list[np.ndarray] | None) -> None:
    """Give a plan other factors, everywhere or in some sequences, tokens and heads."""
    chosen = np.ones(reads["cos0"][0].shape, bool)
    if only is not None:
        chosen[...] = False
        chosen[np.ix_(*only)] = True
    for entries, parts in (
        (("cos0", "cos1"), ("row", "frequency")),
        (("sin0", "sin1"), ("sine_row", "sine_frequency")),
    ):
        changed = [reads[entry] for entry in entries]
        for n, part in enumerate(parts):  # a member that keeps its own number leaves the choice to the other
            ours, (first, second) = getattr(plan, part), (read[n] for read in changed)
            setattr(plan, part, np.where(chosen, np.where(first != ours, first, second), ours).astype(EXACT))
        for entry, read in zip(entries, changed, strict=True):
            setattr(plan, entry, np.where(chosen, read[2], 1.0) * getattr(plan, entry))


def _entries_in_words(told: dict[tuple[str, str], dict[int, int]], count: int) -> str:
    """Return in words which pairs have the cosines and sines of which others."""
    alike: dict[tuple[str, tuple], list[str]] = {}
    for (entry, words), columns in told.items():
        alike.setdefault((words, tuple(columns.items())), []).append(entry)
    lines = []
    for (words, moves), entries in alike.items():
        ours, theirs = (np.array(side) for side in zip(*moves, strict=True))
        kinds = {"cos": "cosines", "sin": "sines", "": "their own"}
        place = " and ".join(dict.fromkeys(kinds[entry[:3]] for entry in entries))
        members = {entry[3:] for entry in entries}
        only = f" for {'second' if members == {'1'} else 'first'} members" if len(members) == 1 and entries[0] else ""
        at = f"pairs {listed(ours)}" if len(ours) < count else "all pairs"
        source = words if (ours == theirs).all() else f"{words} of pairs {listed(theirs)}"
        if not entries[0]:
            lines.append(f"turns {at} by the {source}")
        else:
            lines.append(f"has {source} in place of the {place} of {at}{only}")
    return "; ".join(lines[:FEW]) + (f"; {len(lines) - FEW} more parts" if len(lines) > FEW else "")


def _sums(seen: _Seen) -> Iterator[str]:
    """Yield of which features of its head a wrong feature is made, if not of those of its pair."""
    every = matrices(seen.subject, seen.answer.question)
    if every is None or not np.isfinite(every[seen.answer.which]).all():
        return
    matrix, plan = every[seen.answer.which], seen.plan
    matrix = matrix.swapaxes(-1, -2) if plan.is_gradient else matrix
    made = (matrix @ seen.answer.given.astype(np.float64)[..., None])[..., 0]
    if (abs(made - seen.y) > _close(seen) * (1 + abs(seen.answer.given).max())).any():
        return
    meant = np.eye(matrix.shape[-1], dtype=bool)
    read, written = (np.array(pairs(np.arange(plan.rotary_dim), name)) for name in (plan.layout, plan.out_layout))
    meant[: plan.rotary_dim, : plan.rotary_dim] = False
    for member in (read, read[::-1]):
        meant[written, member] = True
    meant = meant.T if plan.is_gradient else meant
    found = np.asarray((abs(matrix) > TINY).any(axis=(0, 1, 2)))
    groups: dict[tuple, list[int]] = {}
    for to in np.flatnonzero((found & ~meant).any(axis=1)).tolist():
        groups.setdefault(tuple(tuple(np.flatnonzero(m[to]) - to) for m in (found, meant)), []).append(to)
    lines = [f"makes features {listed(np.array(features))} of {_relative(ours)} in place of {_relative(theirs)}"
             for (ours, theirs), features in groups.items()]  # fmt: skip
    if lines:
        yield "; ".join(lines[:FEW]) + (f"; {len(lines) - FEW} more parts" if len(lines) > FEW else "")


def _relative(offsets: tuple[int, ...]) -> str:
    return "features " + ", ".join(f"i{offset:+d}" if offset else "i" for offset in offsets) if offsets else "nothing"


def _angles(seen: _Seen) -> Iterator[str]:
    """Yield by which angle and factor the pair that is furthest off turns, and how far the others are off."""
    found, right = _factors(seen)
    if found is None or not right[0].size:
        return
    plan = seen.plan
    features = pairs(np.arange(plan.rotary_dim), plan.layout if plan.is_gradient else plan.out_layout)
    hit = np.asarray(seen.wrong[..., features[0]] | seen.wrong[..., features[1]])
    if not hit.any() or seen.wrong[..., plan.rotary_dim :].any():
        return
    ours, meant = ((v[0] + v[1]) / 2 + 1j * (v[2] + v[3]) / 2 for v in (found, right))
    alike = abs(found[0] - found[1]) + abs(found[2] - found[3]) < _close(seen)
    if not alike[hit].all():
        at = tuple(np.argwhere(hit & ~alike)[0])
        numbers = ", ".join(f"{v[at]:.4g}" for v in (found[0], -found[2], found[3], found[1]))
        yield f"multiplies pair {at[3]} by the matrix ({numbers}), which is no rotation with a factor, {_at(seen, at)}"
        return
    off, length = np.angle(ours * meant.conj()), abs(ours / meant)
    at = tuple(np.argwhere(hit & (abs(off) == abs(off[hit]).max()))[0])
    angle = float(np.broadcast_to(plan.multiple * plan.row * plan.frequency, off.shape)[at])
    longer = abs(length[hit] - 1)
    if abs(off[at]) < longer.max() / 8:
        at = tuple(np.argwhere(hit & (abs(length - 1) == longer.max()))[0])
        longer_by = f"{length[at]:.6g} times the right one of pair {at[3]} {_at(seen, at)}"
        yield f"has the right angles and other lengths, such as {longer_by}"
        return
    lengths = "the right lengths" if longer.max() < _close(seen) else "other lengths"
    turned = f"{angle + off[at]:.8g} rad in place of {angle:.8g} rad for pair {at[3]} {_at(seen, at)}"
    yield f"has {lengths} and other angles, such as {turned}"


def _at(seen: _Seen, at: tuple) -> str:
    return "of " + " of ".join(f"{noun} {index}" for noun, index in zip(_nouns(seen)[2::-1], at[2::-1], strict=True))


def _nouns(seen: _Seen) -> tuple[str, ...]:
    """Return the names of the axes; the numbers of a sample are no numbers of tokens of the call."""
    return tuple(f"sampled {noun}" if noun == "token" and seen.answer.question.tokens else noun for noun in NOUNS)
