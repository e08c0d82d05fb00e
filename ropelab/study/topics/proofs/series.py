"""Bound the error of the sine and cosine of kernels without tables on their whole range, by interval arithmetic.

The functions themselves run with intervals (`Rounded`) in place of tensors, for every head and for intervals that
together are all tails. In exact arithmetic they compute Taylor polynomials (`is_polynomial`). The rest of the series is
bounded by its next term. A fused multiply-add leaves out a rounding, which no bound here needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from ropelab.kernels import angles_torch, angles_triton

HEADS = 3217
"""The largest head in units of 2^-12, the nearest to pi/4."""
_TAIL = 2.0**-13
_UP = 1 + 2.0**-48
"""Every bound is enlarged by this factor after each operation, which covers the roundings of float64 in it."""
_TINY = 2.0**-1000


def half_ulp(x: np.ndarray) -> np.ndarray:
    """Half a unit in the last place of float32 at a magnitude: 2^-25 times the next power of two above."""
    _, exponent = np.frexp(x)
    return np.ldexp(1.0, np.maximum(exponent, -125) - 25)


def rounding(smallest: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """The largest error of rounding numbers of these magnitudes to float32.

    A power of two is a float32, so a number is rounded by no more than its distance to it. This matters for numbers on
    both sides of a power of two, where the unit in the last place changes.
    """
    power = np.ldexp(1.0, np.frexp(largest)[1] - 1)
    below = np.minimum(power * 2.0**-25, power - np.minimum(smallest, power))
    crossing = np.maximum(largest - power, np.where(smallest < power, below, 0.0))
    return np.minimum(np.minimum(half_ulp(largest), crossing), 2 * power - np.minimum(smallest, largest))


@dataclass(frozen=True)
class Rounded:
    """Numbers of float32, each ``ideal + shift + error``.

    The ideal is what the operations give in exact arithmetic, in ``[low, high]``. The shift is a known difference: of
    numbers that are known throughout, each rounding is computed. The error is at most ``error``.
    """

    low: np.ndarray
    high: np.ndarray
    error: np.ndarray
    shift: np.ndarray
    known: bool = False

    @classmethod
    def number(cls, x: Any) -> Rounded:
        x = np.asarray(np.float32(x), dtype=np.float64)
        return cls(x, x, np.zeros_like(x), np.zeros_like(x), True)

    @property
    def off(self) -> np.ndarray:
        """The largest difference of the computed number from the ideal."""
        return (abs(self.shift) + self.error) * _UP

    @property
    def size(self) -> np.ndarray:
        """The largest magnitude of the computed number."""
        if self.known:
            return abs(self.low + self.shift)
        return (np.maximum(abs(self.low), abs(self.high)) + self.off) * _UP

    def _rounded(self, corners: list, passed_on: Any, shift: Any, nearest: Any) -> Rounded:
        """The result of an operation, rounded to float32.

        Args:
            corners: its values at the ends of the ideals.
            passed_on: how far the errors of the operands move it.
            shift: its shift before the rounding.
            nearest: the distance of a float32 from the result, where one is known, else infinity.
        """
        low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
        margin = (_UP - 1) * np.maximum(abs(low), abs(high)) + _TINY
        low, high, passed_on = low - margin, high + margin, passed_on * _UP
        most = passed_on + abs(shift)
        smallest = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(abs(low), abs(high)) - most)
        rounded = rounding(np.maximum(smallest, 0.0), np.maximum(abs(low), abs(high)) + most)
        return Rounded(low, high, (passed_on + np.minimum(rounded, nearest)) * _UP, shift)

    def _exactly(self, other: Rounded, operation: Callable) -> Rounded:
        """The result for known numbers. float64 holds their sums and products of few digits without an error."""
        ideal = operation(self.low, other.low)
        computed = np.float32(operation(self.low + self.shift, other.low + other.shift)).astype(np.float64)
        return Rounded(ideal, ideal, np.zeros_like(ideal), computed - ideal, True)

    def __add__(self, other: Any) -> Rounded:
        other = other if isinstance(other, Rounded) else Rounded.number(other)
        if self.known and other.known:
            return self._exactly(other, np.add)
        corners = [self.low + other.low, self.high + other.high]
        # Both terms are numbers of float32, so the sum is no farther from a float32 than a term is large.
        nearest = np.minimum(self.size, other.size)
        return self._rounded(corners, self.error + other.error, self.shift + other.shift, nearest)

    def __neg__(self) -> Rounded:
        return Rounded(-self.high, -self.low, self.error, -self.shift, self.known)

    def __sub__(self, other: Any) -> Rounded:
        return self + -(other if isinstance(other, Rounded) else Rounded.number(other))

    def __rsub__(self, other: Any) -> Rounded:
        return -self + other

    def __mul__(self, other: Any) -> Rounded:
        other = other if isinstance(other, Rounded) else Rounded.number(other)
        if self.known and other.known:
            return self._exactly(other, np.multiply)
        corners = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        passed_on = self.size * other.off + other.size * self.off
        return self._rounded(corners, passed_on, np.zeros_like(passed_on), np.inf)

    __radd__, __rmul__ = __add__, __mul__


FUNCTIONS = {"torch": angles_torch.sine_and_cosine, "Triton": angles_triton._sine_and_cosine.fn}
"""The function of each backend; both have the same operations."""


def _with(function: FunctionType, full: Callable) -> FunctionType:
    """The function with plain numbers for Triton's, and ``full`` as the fill of a tensor."""
    known = {name: getattr(value, "value", value) for name, value in function.__globals__.items()}
    return FunctionType(function.__code__, known | {"torch": SimpleNamespace(full_like=lambda x, value: full(value))})


def _run(function: FunctionType, head: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[Rounded, Rounded]:
    """Sine and cosine of one of `FUNCTIONS` for heads and intervals of tails; a tail is rounded once."""
    sizes = np.sort(abs(np.stack((low, high))), axis=0)
    error = rounding(np.where(low * high < 0, 0.0, sizes[0]), sizes[1]) * _UP
    tail = Rounded(low, high, error, np.zeros_like(error))
    return _with(function, lambda value: Rounded.number(np.full(np.shape(head), value)))(Rounded.number(head), tail)


class Exact(Fraction):
    """A rational number that stays one in operations with numbers of Python."""

    def _of(operation: Callable) -> Callable:
        return lambda self, other: Exact(operation(Fraction(self), Fraction(other)))

    __add__ = __radd__ = _of(Fraction.__add__)
    __mul__ = __rmul__ = _of(Fraction.__mul__)
    __sub__, __rsub__ = _of(Fraction.__sub__), _of(lambda a, b: b - a)


def is_polynomial(function: FunctionType) -> bool:
    """Whether the function computes the two Taylor polynomials of head + tail in exact arithmetic.

    The difference is a polynomial of at most the eleventh degree in both arguments, so it is zero if it is zero on a
    grid of twelve values of each.
    """
    exact, grid = _with(function, Exact), [Exact(n) for n in range(12)]
    for head, tail in product(grid, grid):
        x = Fraction(head + tail)
        sine = x + sum(Fraction(c) * x ** (3 + 2 * i) for i, c in enumerate(angles_torch.SINE))
        cosine = 1 - x**2 / 2 + sum(Fraction(c) * x ** (4 + 2 * i) for i, c in enumerate(angles_torch.COSINE))
        if exact(head, tail) != (sine, cosine):
            return False
    return True


def _truncation(x: np.ndarray, function: str) -> np.ndarray:
    """The largest difference between the polynomial and the series for arguments of a magnitude up to ``x``."""
    given, first = (angles_torch.SINE, 3) if function == "sine" else (angles_torch.COSINE, 4)
    total = x ** (first + 2 * len(given)) / math.factorial(first + 2 * len(given))
    for i, coefficient in enumerate(given):
        power = first + 2 * i
        sign = -1 if (power // 2) % 2 else 1
        total = total + abs(float(np.float32(coefficient)) - sign / math.factorial(power)) * x**power
    return total * (1 + 2.0**-40)


def _ulps(head: np.ndarray, low: np.ndarray, high: np.ndarray, function: FunctionType) -> tuple[dict, np.ndarray]:
    """The largest errors in units in the last place of the exact values, and which sines are near a power of two.

    Args:
        head: multiples of 2^-12, not negative.
        low, high: the ends of the intervals of tails.
    """
    sine, cosine = _run(function, head, low, high)
    x_low, x_high = head + low, (head + high) * _UP
    units = [2 * half_ulp(least * (1 - 2.0**-48)) for least in (np.sin(x_low), np.cos(x_high))]
    found = {
        "sine": (sine.off + _truncation(x_high, "sine")) / units[0],
        "cosine": (cosine.off + _truncation(x_high, "cosine")) / units[1],
    }
    return found, np.frexp(sine.low - sine.off)[1] != np.frexp(sine.high + sine.off)[1]


def bounds(function: FunctionType, pieces: int = 8) -> dict[str, float]:
    """The largest errors over all arguments up to pi/4, in units in the last place: sine, cosine, and sine at head 0.

    Sine is odd and cosine even in every operation, so heads that are not negative stand for all.
    """
    if not is_polynomial(function):
        return dict.fromkeys(("sine", "cosine", "sine at head 0"), math.inf)
    edges = np.linspace(-_TAIL, _TAIL, pieces + 1)
    whole = np.repeat(np.arange(1, HEADS + 1) / 4096, pieces), np.tile(edges[:-1], HEADS), np.tile(edges[1:], HEADS)
    # Tails of a head of 0 begin at the smallest that the reduction makes.
    ends = np.ldexp(1.0, np.arange(-61, -12))
    zero = np.zeros(len(ends) - 1), ends[:-1], ends[1:]
    found, near = _largest(*whole, function), _largest(*zero, function)
    return {"sine": found["sine"], "cosine": max(found["cosine"], near["cosine"]), "sine at head 0": near["sine"]}


def _largest(head: np.ndarray, low: np.ndarray, high: np.ndarray, function: FunctionType) -> dict[str, float]:
    """The largest errors; intervals near a power of two, where the unit of the sine changes, are halved first."""
    largest = {"sine": 0.0, "cosine": 0.0}
    while len(head):
        found, near = _ulps(head, low, high, function)
        split = near & (high - low > (head + high) * 2.0**-30)
        for name, values in found.items():
            largest[name] = max(largest[name], float(values[~split].max(initial=0.0)))
        head, low, high = head[split], low[split], high[split]
        middle = (low + high) / 2
        head, low, high = np.tile(head, 2), np.concatenate((low, middle)), np.concatenate((middle, high))
    return largest
