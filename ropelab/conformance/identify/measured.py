"""Turn measured matrices into deviations with parameters: pairs, factors, frequencies, rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, exact
from ropelab.conformance.identify.angles import CLOSE, refined, rows, simple, slopes, waves
from ropelab.conformance.identify.deviation import Deviation
from ropelab.conformance.identify.matrix import Blocks, blocks, layouts, matrices
from ropelab.conformance.identify.plan import FORMATS, Plan, columns
from ropelab.conformance.identify.questions import FORWARD, Question
from ropelab.conformance.identify.scalings import Scaling, scalings
from ropelab.conformance.identify.vocabulary import ANGLE, FREQUENCY, PAIR, PURE, ROW, in_reverse, rounding, set_row
from ropelab.conformance.subject import Subject

LAYOUT = "pair i is (i, i + rotary_dim/2) for split_half, (2i, 2i + 1) for interleaved"
FAR = 140_000
"""Rows of larger numbers are not looked for."""

RULES: dict[str, Callable[[int, int], int]] = {
    "i // 2": lambda i, n: i // 2,
    "i mod n / 2, for n pairs": lambda i, n: i % max(n // 2, 1),
    "2 i mod n, for n pairs": lambda i, n: 2 * i % n,
    "n / 2 + i // 2, for n pairs": lambda i, n: n // 2 + i // 2,
    "2 (i // 2)": lambda i, n: i // 2 * 2,
    "i + 1 for even i and i - 1 for odd i": lambda i, n: min(i ^ 1, n - 1),
}
"""A rule in words -> the pair whose frequency pair i of n pairs has."""
Site = tuple[int, int]
"""A sequence and a head, where angles are measured."""


def structure(subject: Subject, question: Question, which: int) -> tuple[tuple[str, str, int], Deviation | None]:
    """Return how the function pairs the features of an input, and the deviation from the declared pairs.

    The declared pairs come back without a deviation if they explain the matrix, or if nothing does.
    """
    declared = (subject.layout, subject.out_layout, question.case.rotary_dim)
    found = matrices(subject, question)
    possible = list(layouts(found[which])) if found is not None else []
    if not possible or declared in possible:
        return declared, None
    source, target, rotary_dim = possible[0]
    near = [p for p in possible if p[2] == question.case.rotary_dim]
    if near:
        source, target, rotary_dim = near[0]
    parameters = {"layout": source, "out_layout": target, "rotary_dim": rotary_dim}
    parts = []
    if (source, target) != declared[:2]:
        parts.append(f"pairs features as {source}" + (f" and writes them as {target}" if target != source else ""))
    width = question.case.inputs[which].shape[-1]
    if rotary_dim != declared[2]:
        parts.append("rotates all features" if rotary_dim == width else f"rotates {rotary_dim} features")

    def change(plan: Plan) -> None:
        plan.layout, plan.out_layout = source, target

    def extent(plan: Plan) -> int:
        if rotary_dim == declared[2]:
            return plan.rotary_dim
        return plan.shape[-1] if rotary_dim == width else min(rotary_dim, plan.shape[-1])

    return (source, target, rotary_dim), Deviation(
        "layout", " and ".join(parts), LAYOUT, change, parameters, rotary_dim=extent
    )


class View(NamedTuple):
    """The entries of the blocks that are cosines and sines of the angles, and their factors.

    Attributes:
        cosine, sine: the names of the entries.
        of_cosine, of_sine: the factors.
    """

    cosine: str
    sine: str
    of_cosine: float
    of_sine: float

    def __call__(self, found: Blocks) -> Blocks:
        """Return the blocks of the angles, without the factors."""
        cosine, sine = getattr(found, self.cosine) / self.of_cosine, getattr(found, self.sine) / self.of_sine
        return Blocks(cosine, cosine, sine, sine)


class Measured:
    """The angles of one input at one sequence and head.

    Attributes:
        frequency: the right inverse frequencies ``[pairs]``.
        views: the entries of the blocks that are cosines and sines.
        close: the largest difference of measured and computed cosines that counts as rounding.
    """

    def __init__(self, subject: Subject, asked: dict[str, Question], which: int, pairing: tuple[str, str, int]):
        self.subject, self.asked, self.which, self.pairing = subject, asked, which, pairing
        declared = next(iter(asked.values())).case.rotary_dim
        self.frequency = columns(declared, pairing[2], subject.base).numpy()
        self.views, self.close = [View("cos0", "sin1", 1.0, 1.0)], CLOSE
        self._blocks: dict[str, list[Blocks] | None] = {}

    def blocks(self, name: str) -> Blocks | None:
        """Return the blocks for a question; None if the function does not answer it."""
        if name not in self._blocks:
            question = self.asked.get(name)
            self._blocks[name] = None if question is None else blocks(self.subject, question, *self.pairing)
        found = self._blocks[name]
        if found is None:
            return None
        self.close = max(self.close, _unit(found[self.which]))
        return found[self.which]

    def _simple(self, value: float) -> float:
        return simple(value, self.close)

    def _constant(self, values: np.ndarray) -> float | None:
        return _constant(values, self.close)

    def deviations(self, site: Site, wrong: set[str], hit: list[int]) -> Iterator[Deviation]:
        """Yield the deviations that the angles at a sequence and head suggest.

        Args:
            site: the sequence and the head.
            wrong: the names of the questions that the function answers wrong.
            hit: the pairs that have wrong elements.
        """
        counted = [n for n, q in self.asked.items() if _counts_from_zero(q)]
        counted = [n for n in counted if n in wrong] or counted
        longest = max(counted, key=lambda n: self.asked[n].case.shape[1], default="")
        found = self.blocks(longest) if counted else None
        found_rates: list[np.ndarray] = []
        if found is not None and all(np.isfinite(v).all() for v in vars(found).values()):
            at = (min(site[0], len(found.cos0) - 1), slice(None), min(site[1], found.cos0.shape[2] - 1))
            sense = -1.0 if self.subject.reversed else 1.0
            yield from self._factors(found, at, len(self.asked[longest].before))
            yield from _growing(found, at, self.close)
            yield from _amplitudes(found, at, self.close)
            self.views = _views(found, at, self.close)
            found_rates.append(self.frequency[::-1])
            for view in self.views:
                seen = view(found)
                yield from self._columns(seen, at, sense)
                for suggested in self._frequencies(seen, view, at, sense, site):
                    found_rates.append(self._rates(suggested))
                    yield suggested
                yield from self._dynamic(self.asked[longest], seen, at, sense)
        hit = [pair for pair in hit if pair < len(self.frequency)]
        for pairs in (None, hit):
            if pairs is None or 0 < len(pairs) < len(self.frequency):
                yield from self._rows(site, pairs, self.frequency)
        for rates in {r.tobytes(): r for r in found_rates}.values():
            yield from self._rows(site, None, rates)

    def _rates(self, deviation: Deviation) -> np.ndarray:
        """Return the inverse frequencies of a deviation, times its multiple."""
        question = SimpleNamespace(case=SimpleNamespace(interpolation=1.0))
        plan = SimpleNamespace(question=question, frequency=self.frequency, sine_frequency=self.frequency,
                               row=np.zeros(1), multiple=1.0, several=False, factor=1.0, rounded={})  # fmt: skip
        deviation.change(cast(Plan, plan))
        return np.asarray(plan.multiple * plan.frequency, dtype=np.float64)

    def _factors(self, found: Blocks, at, calls: int) -> Iterator[Deviation]:
        first = np.hypot(found.cos0[at], found.sin1[at])
        constant = self._constant(first)
        scaled = self.blocks("tables with a factor")
        power = 1.0
        if scaled is not None:
            factor = self.asked["tables with a factor"].case.factor
            where = min(at[0], len(scaled.cos0) - 1), 0, min(at[2], scaled.cos0.shape[2] - 1)
            other = np.hypot(scaled.cos0[where], scaled.sin1[where])
            power = self._simple(math.log(max(other.mean(), 1e-9) / max(first.mean(), 1e-9)) / math.log(factor))
        if power != 1:
            words = "drops the factor of the tables" if power == 0 else f"applies power {power:g} of the tables' factor"
            yield Deviation("factor", words, PAIR, lambda p: _to_power(p, power), {"power": power})
        if constant is not None and abs(constant - 1) > self.close and constant > 0:
            if calls:
                each = self._simple(constant ** (1 / calls))

                def grown(plan: Plan) -> None:
                    plan.factor = plan.factor * each ** len(plan.question.before)
                    plan.extra += 1 + len(plan.question.before)

                yield Deviation("factor", f"is multiplied by {each:.6g} once more for each earlier call", PURE, grown,
                                {"factor": each})  # fmt: skip
            both = dict.fromkeys((self._simple(constant), constant))
            yield from (_factor("cos0 cos1 sin0 sin1", "is multiplied", v) for v in both)
        for parts, words, values in (
            ("cos0 cos1", "has cosines multiplied", found.cos0[at][:1]),
            ("sin0 sin1", "has sines multiplied", _amplitude(found.sin1[at])),
            ("cos0 sin0", "has first members of pairs multiplied", found.cos0[at][:1]),
            ("cos1 sin1", "has second members of pairs multiplied", found.cos1[at][:1]),
        ):
            value = self._constant(values)
            if value is not None and abs(value - 1) > self.close and value > 0:
                yield from (_factor(parts, words, v) for v in dict.fromkeys((self._simple(value), value)))

    def _columns(self, found: Blocks, at, sense: float) -> Iterator[Deviation]:
        """Yield deviations in which columns of the tables belong to other pairs, from tokens at positions 0, 1, ..."""
        positions = np.arange(found.cos0.shape[1])[:, None]
        tables = np.cos(positions * self.frequency), sense * np.sin(positions * self.frequency)
        both = zip((found.cos0, found.sin1), tables, strict=True)
        matched = [_matched(values[at], table, self.close) for values, table in both]
        right = list(range(len(self.frequency)))
        order = [o for o in matched if o is not None]
        if len(order) == 2 and order != [right, right] and len(set(order[0])) > 1:
            same = order[0] == order[1]
            words = f"takes the cosines of pairs {order[0]}" if order[0] != right else ""
            words += f"{' and ' if words else 'takes '}the sines of pairs {order[1]}" if order[1] != right else ""
            words = f"takes the frequencies of pairs {order[0]}" if same else words
            words += f" for pairs {right}" + (" (-1: zero)" if any(-1 in o for o in order) else "")

            rolls = [k for k in range(len(right)) if same and order[0] == list(np.roll(right, -k))]
            if rolls:
                yield self._rolled(rolls[0])
            if same and order[0] == right[::-1]:
                yield in_reverse()
            yield from (_by_rule(words, rule) for words, rule in RULES.items()
                        if same and order[0] == [rule(i, len(right)) for i in right])  # fmt: skip
            if not same and (order[0] == right) != (order[1] == right):  # cosines or sines alone
                zero = next((w for w, o in zip(("cosines", "sines"), order, strict=True) if set(o) == {-1}), "")
                words = f"has zero in place of the {zero}" if zero else words

            def change(plan: Plan) -> None:
                if plan.frequency.shape[-1] == len(right):
                    plan.frequency, plan.sine_frequency = (
                        np.where(np.array(o) < 0, 0, f[..., o])
                        for f, o in zip((plan.frequency, plan.sine_frequency), order, strict=True)
                    )

            yield Deviation("order of frequencies", words, FREQUENCY, change, {"cosines": order[0], "sines": order[1]})

    def _rolled(self, by: int) -> Deviation:
        count = len(self.frequency)
        half = 2 * by == count

        def change(plan: Plan) -> None:
            width = plan.frequency.shape[-1]
            plan.frequency = plan.sine_frequency = np.roll(plan.frequency, -(width // 2 if half else by), axis=-1)

        words = "swaps the frequencies of the first half of the pairs with those of the second half" if half else (
            f"takes for pair i the frequency of pair (i + {by}) mod {count}"
        )  # fmt: skip
        return Deviation("order of frequencies", words, FREQUENCY, change, {"shift": by})

    def _frequencies(self, found: Blocks, view: View, at, sense: float, site: Site) -> Iterator[Deviation]:
        slope, intercept = slopes(np.arctan2(sense * found.sin1[at], found.cos0[at]))
        far = self.blocks("large positions")
        if far is not None and np.isfinite(far.cos0).all():
            where = (min(site[0], len(far.cos0) - 1), slice(None), min(site[1], far.cos0.shape[2] - 1))
            positions = self.asked["large positions"].case.token_positions()[0].numpy()
            turned = np.arctan2(sense * view(far).sin1[where], view(far).cos0[where])
            yield from self._sloped(refined(slope, intercept, turned, positions), intercept)
        yield from self._sloped(slope, intercept)

    def _sloped(self, slope: np.ndarray, intercept: np.ndarray) -> Iterator[Deviation]:
        """Yield the frequencies that slopes suggest."""
        multiple = self._constant(slope / self.frequency)
        if multiple is not None:
            value = self._simple(multiple)
            if value > 1 and value.is_integer():
                yield Deviation("multiple", f"is rotated {value:g} times", PAIR, lambda p: _turned_again(p, int(value)),
                                {"multiple": value}, rounds=value)  # fmt: skip
            if value not in (0.0, 1.0, -1.0):
                yield Deviation("multiple", f"turns by {value:.6g} times the angle", ANGLE,
                                lambda p: _turned_more(p, value), {"multiple": value},
                                rounds=max(1.0, abs(value)))  # fmt: skip
            shift = self._constant((intercept / slope)[:1]) if multiple else None
            if shift is not None and abs(shift - round(shift)) > self.close:
                yield self._offset(self._simple(shift))
            return
        for name, rounded in FORMATS.items():
            if np.allclose(rounded(self.frequency).astype(float), slope, rtol=1e-5, atol=1e-7):
                yield rounding("frequency", name)
        yield from self._other_base(slope)
        for scaling in scalings(self.frequency, slope, self.subject.base):
            yield Deviation("frequencies", f"has {scaling.words}", FREQUENCY, _scaled(scaling), scaling.parameters)
        if len(slope) and (abs(slope - slope[0]) < self.close).all():
            yield self._fixed(np.full_like(slope, self._simple(float(slope[0]))), "the same frequency for all pairs")
        factors = np.array([self._simple(float(r)) for r in slope / self.frequency])
        listed = ", ".join(f"{r:.4g}" for r in factors)
        yield self._fixed(factors * self.frequency, f"frequencies that are right times [{listed}]")
        yield self._fixed(slope, f"frequencies that are right times [{listed}], rounded")

    def _other_base(self, slope: np.ndarray) -> Iterator[Deviation]:
        if len(slope) < 2 or not (slope * np.sign(slope[0]) > 0).all():
            return
        width, pair = 2 * len(slope), np.arange(len(slope))
        fitted = np.polyfit(pair[:4], np.log(abs(slope[:4])), 1)
        base, multiple = math.exp(-fitted[0] * width / 2), self._simple(float(np.sign(slope[0]) * math.exp(fitted[1])))
        if base <= 1 or not np.allclose(np.log(abs(slope)), np.polyval(fitted, pair), atol=3e-3):
            return
        turned = "" if multiple == 1 else f", and turns by {multiple:.6g} times the angle"
        turned = ", and turns by minus the angle" if multiple == -1 else turned
        divisor = width * math.log(self.subject.base) / math.log(base) if self.subject.base > 1 else 0.0
        if abs(divisor - round(divisor)) < 1e-3 * divisor and round(divisor) != width:
            exponent = -2 * pair / round(divisor)
            yield self._fixed(multiple * self.subject.base**exponent,
                              f"an exponent that is divided by {round(divisor)} in place of {width}{turned}",
                              {"divisor": round(divisor), "multiple": multiple})  # fmt: skip
        for value in dict.fromkeys((float(f"{base:.1g}"), float(f"{base:.2g}"), float(f"{base:.3g}"))):
            if abs(value / base - 1) < 5e-3:
                yield self._fixed(multiple * value ** (-2 * pair / width), f"the base {value:g}{turned}",
                                  {"base": value, "multiple": multiple})  # fmt: skip

    def _fixed(self, frequency: np.ndarray, words: str, parameters=None) -> Deviation:
        count = len(frequency)

        def change(plan: Plan) -> None:
            if plan.frequency.shape[-1] == count:
                plan.frequency = plan.sine_frequency = exact_array(frequency)
            elif parameters and "base" in parameters:
                width = 2 * plan.frequency.shape[-1]
                value = parameters["multiple"] * parameters["base"] ** (-np.arange(0, width, 2) / width)
                plan.frequency = plan.sine_frequency = exact_array(value)
            elif (frequency == frequency[0]).all():
                plan.frequency = plan.sine_frequency = 0 * plan.frequency + frequency[0]

        found = parameters or {"frequencies": frequency.tolist()}
        return Deviation("frequencies", f"has {words}", FREQUENCY, change, found)

    def _dynamic(self, question: Question, found: Blocks, at, sense: float) -> Iterator[Deviation]:
        """Yield scalings that depend on the number of tokens of the call, or of the longest call before it."""
        slope, _ = slopes(np.arctan2(sense * found.sin1[at], found.cos0[at]))
        ratio = slope / self.frequency
        tokens = max(question.before, default=question.case.shape[1])
        who = "the longest call before" if question.before else "the call"

        def length(plan: Plan) -> int:
            return max(plan.question.before, default=0) if question.before else plan.shape[1]

        multiple = self._constant(ratio)
        if multiple is not None and 0 < multiple < 1:
            limit = self._simple(multiple * tokens)

            def slower(plan: Plan) -> None:
                plan.multiple = plan.multiple * min(1.0, limit / max(length(plan), 1))

            words = f"turns by {limit:g} / n times the angle if {who} has n > {limit:g} tokens"
            yield Deviation("dynamic scaling", words, FREQUENCY, slower, {"scaling": "linear", "length": limit})
        if multiple is None and not question.before and abs(ratio[0] - 1) < self.close < 1 - ratio[-1]:
            case = question.case
            double = replace(question, case=replace(case, inputs=tuple(x.repeat(1, 2, 1, 1) for x in case.inputs)))
            again = blocks(self.subject, double, *self.pairing)
            if again is None or question.kind != FORWARD:
                return
            other = again[self.which]
            faster, _ = slopes(np.arctan2(sense * other.sin1[at], other.cos0[at]))
            if not (ratio[-1] > 0 and faster[-1] > 0):
                return
            first, second = 1 / ratio[-1], self.frequency[-1] / faster[-1]
            rate = (second - first) / tokens  # the factor is s n / L - (s - 1)
            scale = self._simple(float(rate * tokens - first + 1))
            limit = self._simple(float(scale / rate)) if rate > 0 else 0.0
            if scale > 0 and limit > 0:

                def rebased(plan: Plan, length: Callable[[Plan], int]) -> None:
                    count = plan.frequency.shape[-1]
                    factor = max(1.0, scale * length(plan) / limit - scale + 1)
                    slower = factor ** (-np.arange(count) / (count - 1))
                    plan.frequency = plan.sine_frequency = plan.frequency * exact_array(slower)

                for unit, of in (("tokens", length), ("positions", lambda plan: int(plan.position.max(initial=0)) + 1)):
                    words = f"has dynamic NTK scaling by {scale:g} beyond {limit:g} {unit}"
                    yield Deviation("dynamic scaling", words, FREQUENCY, partial(rebased, length=of),
                                    {"scaling": "dynamic", "factor": scale, "length": limit})  # fmt: skip

    def _rows(self, site: Site, pairs: list[int] | None, rates: np.ndarray) -> Iterator[Deviation]:
        """Yield deviations of the rows that tokens read, from rows recovered at known positions, in some pairs."""
        columns_read = slice(None) if pairs is None else pairs
        seen: dict[str, Deviation] = {}
        for name, question in self.asked.items():
            if not name.endswith((" on", "large positions", "each sequence")) and not question.tokens:
                continue
            found = self.blocks(name)
            if found is None or not all(np.isfinite(v).all() for v in vars(found).values()):
                continue
            at = (min(site[0], len(found.cos0) - 1), slice(None), min(site[1], found.cos0.shape[2] - 1))
            positions = question.case.token_positions()[at[0]].numpy()
            limit = FAR if positions.max() > 1000 else 300
            read_rates = rates if pairs is None else rates[pairs]
            both = waves(tuple(read_rates * (-1.0 if self.subject.reversed else 1.0)), limit)
            half = len(read_rates)
            for view in self.views:
                cosine, sine = view(found).cos0[at][:, columns_read], view(found).sin1[at][:, columns_read]
                read = rows(np.concatenate((cosine, sine), axis=1), both, -limit, positions, self.close)
                if read is not None:
                    seen |= {d.words: d for d in self._regressed(read, positions)}
                    if (read * positions < 0).any():  # the function also turns the other way
                        seen |= {d.words: d for d in self._regressed(-read, positions)}
                elif limit == 300:
                    cosines = rows(cosine, both[:, :half], -limit, positions, self.close)
                    sines = rows(sine, both[:, half:], -limit, positions, self.close)
                    if cosines is not None and sines is not None and len(set((sines - cosines).tolist())) == 1:
                        seen |= {d.words: d for d in self._shifted(cosines, sines, positions)}
        yield from seen.values()

    def _offset(self, offset: float) -> Deviation:
        return Deviation("offset", f"takes position {'+' if offset > 0 else '-'} {abs(offset):g} for the position", ROW,
                         lambda p: set_row(p, p.row + offset), {"offset": offset})  # fmt: skip

    def _regressed(self, read: np.ndarray, positions: np.ndarray) -> Iterator[Deviation]:
        apart = read - positions
        if not apart.any():
            return
        if (apart == apart[0]).all():
            yield self._offset(float(apart[0]))
        usual = int(np.median(apart))
        if usual and (read == np.where(positions > 0, positions + usual, positions)).all():
            yield Deviation("offset", f"takes position {usual:+d} for positions above 0", ROW,
                            lambda p: set_row(p, np.where(p.row > 0, p.row + usual, p.row)),
                            {"offset": usual})  # fmt: skip
        if usual and (read == np.maximum(positions + usual, 0)).all():
            yield Deviation("offset", f"takes position {usual:+d}, but at least 0", ROW,
                            lambda p: set_row(p, np.maximum(p.row + usual, 0)), {"offset": usual})  # fmt: skip
        wrap = math.gcd(*(abs(apart).tolist()))
        if wrap > 1 and (read >= 0).all():
            for modulus in [m for m in range(max(int(read.max()) + 1, 2), wrap + 1) if wrap % m == 0]:
                yield from _wraps(modulus)
        for bits in range(1, wrap.bit_length()):
            half = 2**bits // 2
            if (read == np.mod(positions + half, 2 * half) - half).all():
                yield Deviation("wrap", f"takes positions as integers of {bits} bits", ROW, partial(_signed_wrap, half),
                                {"modulus": 2 * half})  # fmt: skip
        last = int(read.max())
        if last and (read == np.minimum(positions, last)).all():  # position 0 for all is no rotation
            yield Deviation("clamp", f"takes position {last} for all positions beyond", ROW,
                            lambda p: set_row(p, np.minimum(p.row, last)), {"last": last})  # fmt: skip
        moved = positions != 0
        if moved.any():
            stride = round(float(np.median(positions[moved] / np.maximum(read[moved], 1))))
            if stride > 1 and (read == positions // stride).all():
                words = f"changes the row every {stride} positions only"
                yield Deviation("stride", words, ROW, lambda p: set_row(p, p.row // stride), {"stride": stride})
                yield Deviation("stride", f"{words}, towards 0", ROW, lambda p: set_row(p, np.trunc(p.row / stride)),
                                {"stride": stride})  # fmt: skip

    def _shifted(self, cosines: np.ndarray, sines: np.ndarray, positions: np.ndarray) -> Iterator[Deviation]:
        """Yield the deviations of sines that are some rows from the cosines, and of the rows of the cosines."""
        shift = int((sines - cosines)[0])
        if not shift:
            return
        yield from self._regressed(cosines, positions)
        side = "behind" if shift < 0 else "ahead of"
        words = f"reads rows of sin that are {_count(abs(shift))} {side} those of cos"

        def change(plan: Plan) -> None:
            plan.sine_row = plan.sine_row + shift

        yield Deviation("sine row", words, ROW, change, {"shift": shift})


def _factor(parts: str, words: str, factor: float) -> Deviation:
    def change(plan: Plan) -> None:
        for part in parts.split():
            setattr(plan, part, getattr(plan, part) * factor)
        plan.extra += 2  # the factor is rounded, and so is the product with it

    return Deviation("factor", f"{words} by {factor:.6g}", PAIR, change, {"factor": factor})


def _unit(found: Blocks) -> float:
    """Return the unit in the last place of 1 in the shortest format of 16 bits that all entries have; 0 if none is.

    A function that rounds tables or results to 16 bits has matrices of 16 bits.
    """
    entries = torch.from_numpy(np.concatenate([np.ravel(v) for v in vars(found).values()]))
    entries = entries[entries.isfinite()]
    if not entries.frac().any():
        return 0.0
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(entries.to(dtype).double(), entries):
            return torch.finfo(dtype).eps
    return 0.0


def _sizes(cosine: np.ndarray, sine: np.ndarray, close: float) -> tuple[float, float]:
    """Return the factors a of cosines and b of sines; 1 if they cannot be measured.

    A cosine m and a sine n of any angle obey ``(m / a)**2 + (n / b)**2 = 1``, so ``n**2 = b**2 - (b / a)**2 m**2``.
    """
    cosine, sine = cosine.ravel() ** 2, sine.ravel() ** 2
    if np.ptp(cosine) < close:
        return 1.0, 1.0
    slope, start = np.polyfit(cosine, sine, 1)
    if slope >= 0 or start <= 0 or abs(slope * cosine + start - sine).max() > 2 * close * max(1.0, start):
        return 1.0, 1.0
    second = math.sqrt(start)
    return simple(second / math.sqrt(-slope), close), simple(second, close)


def _views(found: Blocks, at, close: float) -> list[View]:
    """Return where cosines and sines are: in the first row of the blocks, in the second, or in each other's place.

    The angle of the slowest pair is small, unless the tables are swapped.
    """
    first, second = (
        View(cosine, sine, *_sizes(getattr(found, cosine)[at], getattr(found, sine)[at], close))
        for cosine, sine in (("cos0", "sin0"), ("cos1", "sin1"))
    )
    views = [first]
    one, other = first(found), second(found)
    if (abs(one.cos0[at] - other.cos0[at]) > close).any() or (abs(one.sin0[at] - other.sin0[at]) > close).any():
        views.append(second)
    if (abs(one.sin0[at]) > abs(one.cos0[at])).all(axis=0).any():
        views.append(View("sin0", "cos0", first.of_sine, first.of_cosine))
    return views


def _amplitudes(found: Blocks, at, close: float) -> Iterator[Deviation]:
    """Yield the factors of cosines and of sines where the angles are unknown."""
    cosine, sine = _sizes(found.cos0[at], found.sin0[at], close)
    for parts, words, value in (("cos0 cos1", "cosines", cosine), ("sin0 sin1", "sines", sine)):
        if cosine != sine and abs(value - 1) > close and value > 0:
            yield _factor(parts, f"has {words} multiplied", simple(value, close))


def _growing(found: Blocks, at, close: float) -> Iterator[Deviation]:
    """Yield the deviations of xPos: pair i is multiplied by ``((i + c r) / (r + c r)) ** (sign p / s)`` at position p.

    With r pairs, the offset c (0.4 as published) and the scale s follow from the growth of two pairs.
    """
    amplitude = np.hypot(found.cos0[at], found.sin1[at])
    if not (amplitude > 1e-3).all() or len(amplitude) < 4:
        return
    rate = np.log(amplitude[-1] / amplitude[0]) / (len(amplitude) - 1)
    pairs = np.arange(len(rate))
    if abs(rate).max() < 1e-6:
        return
    for offset in np.arange(0.1, 1.01, 0.1).round(1):
        shape = np.log((pairs + offset * len(pairs)) / (len(pairs) * (1 + offset)))
        scale = simple(float(shape[0] / rate[0]), close)
        if scale and abs(shape / scale - rate).max() < 1e-3 * abs(rate).max():

            def change(plan: Plan, offset=offset, scale=scale) -> None:
                count = plan.frequency.shape[-1]
                size = (np.arange(count) + EXACT(offset) * count) / (count * (1 + EXACT(offset)))
                grown = size ** (plan.position / scale)
                for part in ("cos0", "cos1", "sin0", "sin1"):
                    setattr(plan, part, getattr(plan, part) * grown)
                plan.extra += 2

            words = f"is scaled by xPos: a power of position / {scale:g} for each pair"
            yield Deviation("xPos", words, PAIR, change, {"scale": scale, "offset": float(offset)})


def _scaled(scaling: Scaling) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        plan.frequency = plan.sine_frequency = exact_array(scaling.apply(plan.frequency.astype(np.float64)))

    return change


def exact_array(values: np.ndarray) -> np.ndarray:
    """Return an array as ``EXACT`` numbers."""
    return exact(torch.from_numpy(np.array(values, dtype=np.float64)))


def _turned_again(plan: Plan, times: int) -> None:
    _turned_more(plan, times)
    plan.factor = plan.factor**times


def _turned_more(plan: Plan, multiple: float) -> None:
    plan.multiple, plan.several = plan.multiple * multiple, True


def _signed_wrap(half: int, plan: Plan) -> None:
    set_row(plan, np.mod(plan.row + half, 2 * half) - half)


def _wraps(modulus: int) -> Iterator[Deviation]:
    """Yield the deviations that take positions modulo a number: as in Python, as in C, and positions above 0 only."""
    words, parameters = f"takes positions modulo {modulus}", {"modulus": modulus}
    yield Deviation("wrap", words, ROW, lambda p: set_row(p, np.mod(p.row, modulus)), parameters)
    yield Deviation("wrap", f"{words}, with the sign of the position", ROW,
                    lambda p: set_row(p, np.fmod(p.row, modulus)), parameters)  # fmt: skip
    yield Deviation("wrap", f"{words}, but not negative positions", ROW,
                    lambda p: set_row(p, np.where(p.row < 0, p.row, np.mod(p.row, modulus))), parameters)  # fmt: skip


def _counts_from_zero(question: Question) -> bool:
    """Return whether the tokens of all sequences have the positions 0, 1, 2, ..., at least three of them."""
    case = question.case
    positions = case.token_positions()
    counted = bool((positions == torch.arange(case.shape[1])).all()) and case.lengths is None
    return counted and case.shape[1] > 2 and case.factor == 1 and not case.inverse


def _count(number: int) -> str:
    return "one position" if number == 1 else f"{number} positions"


def _to_power(plan: Plan, power: float) -> None:
    plan.factor = plan.factor**power
    plan.extra += 2  # a quotient or a product with the factor, and the factor itself
    if not power:  # the function computes the angles again: two roundings, each up to an ulp of an angle up to pi
        plan.inexact = 4 * math.pi * FLOAT32_UNIT


def _constant(values: np.ndarray, close: float) -> float | None:
    """Return the mean if all values agree, else None."""
    values = np.asarray(values)
    if not values.size or not np.isfinite(values).all():
        return None
    mean = float(values.mean())
    return mean if (abs(values - mean) <= close * max(1.0, abs(mean))).all() else None


def _amplitude(sines: np.ndarray) -> np.ndarray:
    """Return the amplitude of sines at consecutive tokens ``[tokens, pairs]``, as a vector of equal estimates.

    ``s[t-1] + s[t+1] = 2 cos(f) s[t]`` holds for any amplitude, so the amplitude follows from the first pair only:
    its angle is 1 rad per token.
    """
    return sines[1:2, 0] / math.sin(1.0)


def _by_rule(words: str, rule: Callable[[int, int], int]) -> Deviation:
    def change(plan: Plan) -> None:
        count = plan.frequency.shape[-1]
        plan.frequency = plan.sine_frequency = plan.frequency[..., [rule(i, count) for i in range(count)]]

    return Deviation("order of frequencies", f"turns pair i by the frequency of pair {words}", FREQUENCY, change,
                     {"rule": words})  # fmt: skip


def _matched(values: np.ndarray, table: np.ndarray, close: float) -> list[int] | None:
    """Return for each column of ``values`` the equal column of ``table``, or -1 for zeros; None if there is none."""
    order = []
    for pair in range(values.shape[1]):
        hits = [j for j in range(table.shape[1]) if (abs(values[:, pair] - table[:, j]) < close / 20).all()]
        if pair in hits:
            hits = [pair]
        if not hits and not (abs(values[:, pair]) < close / 20).all():
            return None
        order.append(hits[0] if hits else -1)
    return order
