"""Prove how exactly a kernel without tables reduces the angle of every int32 position to an eighth of a turn.

`cos_sin` of both backends runs with a symbolic position (`Word`) and the numbers of one frequency, and Z3 proves the
largest error of what it passes to the series. A frequency is a number of turns with 96 bits behind the point. Close to
a multiple of a quarter turn the error counts relative to a small sine, so the smallest distance matters; the continued
fraction of a frequency has it for all positions (Khinchin, Continued Fractions, theorems 16 and 17).
"""

from __future__ import annotations

import math
from fractions import Fraction
from types import FunctionType, SimpleNamespace
from typing import Any

import pandas as pd
import triton.language as tl
import z3
from mpmath import mp
from z3 import z3util

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.table_free import fixed_point
from ropelab.kernels import angles_torch, angles_triton
from ropelab.study.topics.proofs import series

POSITIONS = 2**31
LIMIT = Fraction(81, 20)
"""The largest error of a reduced angle, in units of 2^-61 rad.

Three products drop less than a unit each, and the 32 bits that `cos_sin` drops of the turns are less than
``2 pi / 8`` units. The constant 2 pi is off by at most a quarter unit at an eighth of a turn: 4.04 in all."""
with mp.workprec(200):
    _BELOW = int(mp.floor(mp.pi * 2**160))
_TWO_PI = Fraction(_BELOW, 2**159), Fraction(_BELOW + 1, 2**159)


class Word:
    """An integer of 64 bits, or of 32 bits without a sign, that wraps around: a linear term of Z3 between two numbers.

    An operation that may leave the range of the width subtracts an unknown multiple of 2^64, or of 2^32.
    """

    def __init__(self, facts: list, value: Any, low: int, high: int, bits: int = 64, signed: bool = True):
        self.facts, self.value, self.low, self.high = facts, value, low, high
        self.bits, self.signed = bits, signed

    @classmethod
    def number(cls, facts: list, value: int) -> Word:
        return cls(facts, z3.IntVal(value), value, value)

    def _wrapped(self, value: Any, ends: list[int], bits: int | None = None, signed: bool | None = None) -> Word:
        bits, signed = bits or self.bits, self.signed if signed is None else signed
        first = -(2 ** (bits - 1)) if signed else 0
        low, high = min(ends), max(ends)
        times = (low - first) // 2**bits
        if times == (high - first) // 2**bits:  # of all numbers between the ends
            value, low, high = value - 2**bits * times, low - 2**bits * times, high - 2**bits * times
        else:
            value = value - 2**bits * z3.Int(f"times_{len(self.facts)}")
            low, high = first, first + 2**bits - 1
            self.facts.append(z3.And(low <= value, value <= high))
        return Word(self.facts, z3.simplify(value), low, high, bits, signed)

    def _other(self, x: Any) -> Word:
        return x if isinstance(x, Word) else Word.number(self.facts, x)

    def __add__(self, other: Any) -> Word:
        if isinstance(other, int) and other == 2**61 and self.stops:
            raise _Reduced(self)
        other = self._other(other)
        return self._wrapped(self.value + other.value, [self.low + other.low, self.high + other.high])

    def __sub__(self, other: Any) -> Word:
        other = self._other(other)
        return self._wrapped(self.value - other.value, [self.low - other.high, self.high - other.low])

    def __mul__(self, other: Any) -> Word:
        other = self._other(other)
        ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return self._wrapped(self.value * other.value, ends)

    def __rshift__(self, places: int) -> Word:
        low, high = self.low >> places, self.high >> places
        if low == high:
            return Word(self.facts, z3.IntVal(low), low, high, self.bits, self.signed)
        quotient = z3.Int(f"shifted_{len(self.facts)}")
        rest = self.value - 2**places * quotient
        self.facts.append(z3.And(0 <= rest, rest < 2**places))
        return Word(self.facts, quotient, low, high, self.bits, self.signed)

    def __lshift__(self, places: int) -> Word:
        return self * 2**places

    def __and__(self, mask: int) -> Word:
        """The low bits; ``mask + 1`` is a power of two."""
        rest = self - ((self >> mask.bit_length()) << mask.bit_length())
        return Word(self.facts, rest.value, 0, mask)

    def __getitem__(self, index: Any) -> Word:
        return self

    def to(self, dtype: Any) -> Any:
        if dtype == tl.float32:
            return Float(self)
        width = {tl.int32: (32, True), tl.int64: (64, True), tl.uint32: (32, False)}[dtype]
        return self._wrapped(self.value, [self.low, self.high], *width)

    def long(self) -> Word:
        return self

    def float(self) -> Float:
        return Float(self)

    def abs(self) -> Word:
        """The magnitude: positions here are their magnitudes."""
        return self

    stops = False
    """Whether `cos_sin` ends at the turns, to which it adds an eighth."""


class Halves(Word):
    """A word of 64 bits whose upper and lower 32 bits are variables."""

    def __init__(self, facts: list, low: int, high: int):
        self.upper = Word(facts, z3.Int("upper"), low >> 32, high >> 32)
        self.lower = Word(facts, z3.Int("lower"), 0, 2**32 - 1, 32, False)
        super().__init__(facts, self.upper.value * 2**32 + self.lower.value, low, high)
        for word in (self.upper, self.lower):
            facts.append(z3.And(word.low <= word.value, word.value <= word.high))

    def __rshift__(self, places: int) -> Word:
        return self.upper if places == 32 else super().__rshift__(places)

    def to(self, dtype: Any) -> Any:
        return self.lower if dtype == tl.uint32 else super().to(dtype)


class Float:
    """A word as float32, whose rounding belongs to the series, times a power of two."""

    def __init__(self, word: Word, scale: float = 1.0):
        self.word, self.scale = word, scale

    def __mul__(self, factor: float) -> Float:
        return Float(self.word, self.scale * factor)


class _Reduced(Exception):
    """Ends `cos_sin` where the series begins; its arguments are head and tail."""


def _series(head: Any, tail: Any) -> None:
    raise _Reduced(head, tail)


class _Row:
    """The numbers of one frequency."""

    def __init__(self, words: list[Word]):
        self.words = words

    def unbind(self, axis: int) -> list[Word]:
        return self.words


def _run(backend: str, position: Word, row: list[Word]) -> tuple[Float, Float]:
    """What `cos_sin` of a backend passes to its series."""
    if backend == "torch":
        body = angles_torch.cos_sin
        arguments, names = (position, _Row(row)), {"sine_and_cosine": _series}
    else:
        body = angles_triton.cos_sin.fn
        language = SimpleNamespace(
            load=lambda at, **hints: row[at.low], abs=Word.abs,
            **{name: getattr(tl, name) for name in ("int32", "int64", "uint32", "float32")},
        )  # fmt: skip
        arguments = (position, Word.number([], 0), 1, Word.number([], 0), True)
        names = {"tl": language, "_sine_and_cosine": _series}
    known = {name: getattr(value, "value", value) for name, value in body.__globals__.items()}
    try:
        FunctionType(body.__code__, known | names)(*arguments)
    except _Reduced as reduced:
        return reduced.args
    raise AssertionError("cos_sin does not come to its series")


def turns_are_exact(backend: str, high: int, low: int) -> bool:
    """Whether the turns are position x frequency modulo 1, cut off behind 64 bits, for every magnitude of an int32.

    The difference of both sides is a linear form: apart from ``count low`` less its bits that are cut off, each of its
    coefficients must be a multiple of 2^64.
    """
    facts: list = []
    count = Word(facts, z3.Int("count"), 0, POSITIONS - 1, 64 if backend == "torch" else 32)
    Word.stops = True
    try:
        (turns,) = _run(backend, count, [Word.number(facts, n) for n in (high, low, 0)])
    finally:
        Word.stops = False
    shifted = (count.to(tl.int64) * low) >> 32
    cut = facts[-1]
    same = [v for v in z3util.get_vars(turns.value) if str(v).startswith("shifted") and _same_shift(facts, v, cut)]
    if len(same) != 1 or (count.to(tl.int64) * low).high >= 2**63:
        return False
    difference = z3.substitute(turns.value, (same[0], shifted.value)) - count.value * high - shifted.value
    return all(coefficient % 2**64 == 0 for coefficient in _coefficients(difference))


def _same_shift(facts: list, variable: Any, cut: Any) -> bool:
    """Whether one of the facts says of a variable what another fact says of its own."""
    (own,) = [v for v in z3util.get_vars(cut) if str(v).startswith("shifted")]
    return any(z3.eq(z3.simplify(fact), z3.simplify(z3.substitute(cut, (own, variable)))) for fact in facts[:-1])


def _coefficients(form: Any) -> list[int]:
    """The constant of a linear form, and the coefficients of its variables."""
    variables = z3util.get_vars(form)
    one, zero = z3.IntVal(1), z3.IntVal(0)
    values = [
        z3.simplify(
            z3.substitute(form, *((v, one if i == chosen else zero) for i, v in enumerate(variables)))
        ).as_long()
        for chosen in range(-1, len(variables))
    ]
    return values[:1] + [value - values[0] for value in values[1:]]


def reduction_is_exact(backend: str, limit: Fraction = LIMIT) -> bool:
    """Whether head and tail are within ``limit`` units of the exact angle of any turns, of which 64 bits are given.

    The exact angle is less the nearest number of quarter turns. The head is one of the series, and the tail is at most
    2^-13.
    """
    ends = [-(2**63), *(2**61 * odd for odd in (-3, -1, 0, 1, 3)), 2**63]
    return all(
        _is_reduced(backend, quarter, low, high - 1, limit)
        for quarter, low, high in zip((-2, -1, 0, 0, 1, 2), ends[:-1], ends[1:], strict=True)
    )


def _is_reduced(backend: str, quarter: int, low: int, high: int, limit: Fraction) -> bool:
    """The statement for the turns from ``low`` to ``high``, all of them nearest to a number of quarters."""
    facts: list = []
    turns = Halves(facts, low, high) if backend == "Triton" else Word(facts, z3.Int("turns"), low, high)
    facts.append(z3.And(low <= turns.value, turns.value <= high))
    one = Word(facts, z3.IntVal(1), 1, 1, 64 if backend == "torch" else 32)
    head, tail = _run(backend, one, [turns, Word.number(facts, 0), Word.number(facts, 0)])
    if (head.scale, tail.scale) != (2.0**-12, 2.0**-61):
        return False
    units, rest = head.word.value * 2**49 + tail.word.value, turns.value - quarter * 2**62
    wrong = [head.word.value > series.HEADS, head.word.value < -series.HEADS,
             tail.word.value > 2**48, tail.word.value < -(2**48)]  # fmt: skip
    for two_pi in _TWO_PI:  # the angle in units is rest 2 pi / 8
        difference = 8 * units * two_pi.denominator - rest * two_pi.numerator
        wrong += [limit.denominator * difference * sign > 8 * two_pi.denominator * limit.numerator for sign in (1, -1)]
    return all(_never([*facts, one]) for one in wrong)


def _never(facts: list) -> bool:
    """Whether Z3 finds that the facts contradict each other, in a context whose state no other question has changed."""
    asked, solver = z3.Solver(), z3.Solver(ctx=z3.Context())
    asked.add(*facts)
    solver.set("timeout", 60_000)
    solver.from_string(asked.sexpr())
    return solver.check() == z3.unsat


def nearest_to_a_quarter(high: int, low: int, positions: int = POSITIONS) -> Fraction:
    """The smallest distance of ``4 p g`` from a whole number, for p from 1 on and below ``positions``.

    Below the next denominator of a convergent, no p has a smaller distance than the denominator before it.
    """
    turns = Fraction(4 * ((high % 2**64) * 2**32 + low) % 2**96, 2**96)
    before, denominator, rest, distance = 0, 1, turns, abs(turns - round(turns))
    while rest and (rest := rest - rest.__floor__()):
        rest = 1 / rest
        before, denominator = denominator, rest.__floor__() * denominator + before
        if denominator >= positions:
            break
        distance = abs(denominator * turns - round(denominator * turns))
    return distance


def table_free_bounds(rotary_dim: int, base: float) -> pd.DataFrame:
    """The largest errors of cosines and sines that a kernel computes, at every int32 position, in float32 ulps.

    The error of the reduced angle counts most at the position whose angle is nearest to a multiple of a quarter turn.

    Returns:
        A row for each backend and part of the series: ``backend``; ``part``; ``series``, the bound of
        `series.bounds`; ``reduction``, the most that the reduced angle adds; ``total``.
    """
    rows = fixed_point(inverse_frequencies(rotary_dim, base)).tolist()
    distance = min(d for high, low, _ in rows if (d := nearest_to_a_quarter(high, low)))
    nearest = math.sin(float(distance) * math.pi / 2) * (1 - 2.0**-40)
    found = []
    for backend, function in series.FUNCTIONS.items():
        right = reduction_is_exact(backend) and all(turns_are_exact(backend, high, low) for high, low, _ in rows)
        off = float(LIMIT) * 2.0**-61 if right else math.inf
        # An ulp is more than 2^-24 of a number; the sine of a head other than 0 is at least that of 2^-13.
        least = {"sine": math.sin(2.0**-13), "cosine": 0.5, "sine at head 0": nearest}
        for part, error in series.bounds(function).items():
            added = off / (2.0**-24 * least[part])
            found.append(
                {"backend": backend, "part": part, "series": error, "reduction": added, "total": error + added}
            )
    return pd.DataFrame(found)


def bounds_sentence(bounds: pd.DataFrame) -> str:
    """The sentence on the table of `table_free_bounds`.

    Raises:
        AssertionError: a step is not proved.
    """
    away = bounds[bounds.part != "sine at head 0"].total.max()
    assert away < 1, "a step is not proved"
    return (
        f"Away from the zeros of a sine a computed value is within {away:.3f} ulps of the exact value, at every int32 "
        f"position, and next to a zero within {bounds.total.max():.2f} ulps."
    )
