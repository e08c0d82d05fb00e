"""Bound the error of a computation step by step; it continues `bounds`.

An `Inexact` has exact values, and the largest error of the computed ones. Each operation passes the errors of its
operands on and adds its rounding (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 2.2)::

    fl(a' + b')   off by at most  e = da + db,                   rounded: e + u (|a + b| + e)
    fl(a' b')     off by at most  e = |a| db + |b| da + da db,   rounded: e + u (|a b| + e) + underflow

A fused multiply-add leaves out a rounding, and so stays below. A sum over an axis passes each term through
``roundings`` roundings, by default one less than there are terms, which holds in any order (section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ropelab.conformance.bounds import EXACT, REFERENCE, Rounding

DIVISION_UNITS = 4
"""The relative error of a division in units: the PTX ISA states at most 2 ulps for ``div.full.f32``, to which Triton
compiles ``/``, and an ulp is at most 2 units."""


@dataclass(frozen=True)
class Inexact:
    """Computed numbers: their exact values, ``EXACT``, and the largest error of each.

    Attributes:
        value, error: as above; they broadcast against each other.
        compute: the rounding of each operation.
    """

    value: np.ndarray
    error: Any
    compute: Rounding

    @classmethod
    def exact(cls, value: np.ndarray, compute: Rounding) -> Inexact:
        return cls(value, np.zeros_like(value), compute)

    def _rounded(self, value: np.ndarray, error: np.ndarray, units: float = 1, underflow: bool = True) -> Inexact:
        unit = units * EXACT(self.compute.unit) + 4 * REFERENCE.unit
        added = unit * (abs(value) + error) + (self.compute.underflow if underflow else 0)
        return Inexact(value, error + added, self.compute)

    def __add__(self, other: Inexact) -> Inexact:
        return self._rounded(self.value + other.value, self.error + other.error, underflow=False)

    def __neg__(self) -> Inexact:
        return Inexact(-self.value, self.error, self.compute)

    def __sub__(self, other: Inexact) -> Inexact:
        return self + -other

    def __mul__(self, other: Inexact) -> Inexact:
        error = abs(self.value) * other.error + abs(other.value) * self.error + self.error * other.error
        return self._rounded(self.value * other.value, error)

    def divided(self, number: float) -> Inexact:
        """The quotient by a number that is exact."""
        return self._rounded(self.value / number, self.error / number, DIVISION_UNITS)

    def sum(self, axis: int, roundings: int | None = None) -> Inexact:
        """The sum over an axis, which stays as an axis of 1."""
        count = self.value.shape[axis] - 1 if roundings is None else roundings
        growth = (1 + EXACT(self.compute.unit)) ** count - 1 + self.value.shape[axis] * REFERENCE.unit
        size = (abs(self.value) + self.error).sum(axis, keepdims=True)
        error = np.broadcast_to(self.error, self.value.shape).sum(axis, keepdims=True) + growth * size
        return Inexact(self.value.sum(axis, keepdims=True), error, self.compute)

    def rsqrt(self, units: float) -> Inexact:
        """The reciprocal square root of positive numbers, which itself errs by so many units.

        The root is decreasing and convex, so the number that is smaller by the error is the farthest.
        """
        value = 1 / np.sqrt(self.value)
        if (self.value <= self.error).any():
            raise ValueError("rsqrt: expected numbers above their error, got one that may be zero")
        return self._rounded(value, 1 / np.sqrt(self.value - self.error) - value, units, underflow=False)

    def stored(self, store: Rounding) -> np.ndarray:
        """The largest error of the numbers rounded to the dtype of a tensor."""
        return self.error + store.of(abs(self.value) + self.error)
