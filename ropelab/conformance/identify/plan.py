"""This file holds a plan: the definition of the rotation for one tensor of one call, in parts that can deviate."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.bounds import EXACT, Rounding, exact, rotation_bound, table_angle_error
from ropelab.conformance.identify.questions import ARGUMENTS, GRADIENT, INPUTS, Question
from ropelab.conformance.law import names
from ropelab.conformance.subject import Subject
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import pairs

PARTS = ("row", "sine_row", "frequency", "sine_frequency", "multiple", "cos0", "cos1", "sin0", "sin1")


def _to_dtype(dtype: torch.dtype) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: exact(torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype))


def _to_tf32(values: np.ndarray) -> np.ndarray:
    """Return the values with 10 explicit bits of the significand, as tensor cores read operands."""
    significand, exponent = np.frexp(values)
    return np.ldexp(np.round(significand * 2**11) / 2**11, exponent)


def _reduced_in_float32(values: np.ndarray) -> np.ndarray:
    """Return angles reduced to one turn by float32 arithmetic, as fast maths does."""
    angles = torch.from_numpy(np.array(values, dtype=np.float64)).float()
    turns = (angles / (2 * math.pi)).round()
    return exact(angles - turns * torch.tensor(2 * math.pi, dtype=torch.float32))


INTEGER = "an integer"
FORMATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": _to_dtype(torch.bfloat16),
    "float16": _to_dtype(torch.float16),
    "TF32": _to_tf32,
    INTEGER: np.trunc,
}
"""The name of a format -> a function that rounds to it."""
MOST = 1 / 16
"""Roundings to fewer bits may add at most this share of a pair's size to a bound: a wide bound would prove nothing."""
REDUCED = "one turn, with a remainder computed in float32"


def columns(declared: int, rotary_dim: int, base: float) -> torch.Tensor:
    """Return the inverse frequencies of the first ``rotary_dim`` features of tables for ``declared`` features.

    A function that rotates more features than declared has frequencies for all of its features.
    """
    return inverse_frequencies(max(declared, rotary_dim), base)[: rotary_dim // 2]


class Plan:
    """The parts of the definition, as arrays that broadcast to ``[B, S, H, pairs]``; a deviation changes some of them.

    A pair becomes ``y0 = x0 cos0 C - x1 sin0 S`` and ``y1 = x1 cos1 C + x0 sin1 S`` with
    ``C = cos(multiple row frequency)`` and ``S = sin(multiple sine_row sine_frequency)``.

    Attributes:
        question, which: the call and the number of its input.
        name: the name of the input: x, q or k.
        rotary_dim, layout, out_layout: the features that rotate, how they are read, and how they are written.
        position, batch, token, head: coordinates, which broadcast to ``[B, S, H, 1]``.
        row, sine_row: the number of the row from which cosines and sines come.
        frequency, sine_frequency: rad per row.
        multiple: the factor of the angle; -1 for the inverse.
        cos0, cos1, sin0, sin1: factors of the four products.
        factor: the factor of the tables.
        tail, tail_added: the factor of the features that do not rotate, and a number added to them.
        order: axis -> the indices in whose order the input is read.
        rounded: the intermediate -> the format to which it is rounded, a key of ``FORMATS``.
        padding: the result of tokens without a position.
        raises: the name of the exception that the function raises in place of an answer; empty if it answers.
        inexact: the error of the angles (rad) beyond the error of a right function.
        extra: the number of roundings of a result beyond the roundings of a right function.
        several: whether the function may turn every pair several times.
        swapped: whether cosines and sines change places.
        changed_inputs, changed_arguments: whether the call changes its inputs or its other arguments.
    """

    def __init__(self, subject: Subject, question: Question, which: int, rotary_dim: int | None = None):
        case = question.case
        self.subject, self.question, self.which = subject, question, which
        self.name = names(case)[which]
        self.shape = tuple(case.inputs[which].shape)
        batch, tokens, heads, _ = self.shape
        self.rotary_dim = case.rotary_dim if rotary_dim is None else rotary_dim
        self.layout, self.out_layout = subject.layout, subject.out_layout
        positions = case.token_positions()
        self.nowhere = (positions == NO_POSITION).numpy()
        self.position = positions.masked_fill(positions == NO_POSITION, 0).numpy()[..., None, None].astype(EXACT)
        inverse = case.inverse
        if inverse and subject.convention.name == "plain":  # the caller negates the positions
            self.position, inverse = -self.position, False
        self.batch = np.arange(batch)[:, None, None, None]
        self.token = np.arange(tokens)[None, :, None, None]
        self.head = np.arange(heads)[None, None, :, None]
        self.row = self.sine_row = self.position
        self.frequency = self.sine_frequency = exact(columns(case.rotary_dim, self.rotary_dim, subject.base))
        self.multiple = np.array(-1.0 if inverse != subject.reversed else 1.0)
        self.factor = case.factor
        self.cos0 = self.cos1 = self.sin0 = self.sin1 = np.ones(())
        self.tail, self.tail_added, self.padding, self.raises = 1.0, 0.0, 0.0, ""
        self.order: dict[int, np.ndarray] = {}
        self.rounded: dict[str, str] = {}
        self.inexact, self.extra = 0.0, 0
        self.several = self.swapped = self.changed_inputs = self.changed_arguments = False

    @property
    def is_gradient(self) -> bool:
        """Whether the answer is a gradient."""
        return self.question.kind == GRADIENT

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the answer to the question, and how far rounding may take a function from the answer."""
        case = self.question.case
        x = exact(case.inputs[self.which])
        if self.question.kind == ARGUMENTS:
            return np.full((1, 1, 1, 1), float(self.changed_arguments)), np.zeros(1)
        if self.question.kind == INPUTS and not self.changed_inputs:
            return x, np.zeros(1)
        return self._turned(exact(case.cotangents[self.which])) if self.is_gradient else self._turned(x)

    def _turned(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for axis, order in self.order.items():
            x = np.take(x, np.argsort(order) if self.is_gradient else order, axis=axis)
        x = self._round("input", x)
        c, s, error = self._tables()
        c0, c1, s0, s1 = c * self.cos0, c * self.cos1, s * self.sin0, s * self.sin1
        source, target = self.layout, self.out_layout
        if self.is_gradient:  # the transposed matrix
            s0, s1, source, target = -s1, -s0, target, source
        x0, x1 = pairs(x[..., : self.rotary_dim], source)
        bounds = self._bounds(x0, x1, (c0, c1, s0, s1), error)
        most = bounds
        if self.rounded:
            enough = self._bounds(x0, x1, (c0, c1, s0, s1), self._inexact())
            most = tuple(bound + MOST * (abs(x0) + abs(x1)) for bound in enough)
        members = []
        products = ((x0 * c0, -x1 * s0), (x1 * c1, x0 * s1))
        for (first, second), bound, limit in zip(products, bounds, most, strict=True):
            if "product" in self.rounded:
                bound = bound + self._spread("product", first, bound) + self._spread("product", second, bound)
            y = self._round("product", first) + self._round("product", second)
            bound = self._spread("output", y, bound) if "output" in self.rounded else bound
            members.append((self._round("output", y), np.minimum(bound, limit)))
        y, bound = x * self.tail + self.tail_added, np.zeros_like(x)
        for features, near, member in zip(
            pairs(y[..., : self.rotary_dim], target), pairs(bound[..., : self.rotary_dim], target), members, strict=True
        ):
            features[...], near[...] = member
        y[self.nowhere], bound[self.nowhere] = self.padding, 0
        return y, bound

    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return cosines and sines, and the error of each before a table of the function's own dtype rounds it."""
        found, errors = [], []
        for function, row, frequency in (
            (np.cos, self.row, self.frequency), (np.sin, self.sine_row, self.sine_frequency)
        ):  # fmt: skip
            rows, rates = self._round("position", row), self._round("frequency", frequency)
            angles = self.multiple * (rows * rates)
            with np.errstate(all="ignore"):
                error = self.inexact + table_angle_error(angles)
                error = error + np.nan_to_num(self.subject.convention.angle_error(angles, abs(rates)))
                if "frequency" in self.rounded:  # the frequency that is rounded is inexact by that much itself
                    own = np.nan_to_num(self.subject.convention.angle_error(abs(frequency), abs(frequency)))
                    error = error + abs(self.multiple * rows) * self._spread("frequency", frequency, own)
                if "angle" in self.rounded:
                    error = self._spread("angle", angles, error)
                angles = self._round("angle", angles)
                values = self.factor * function(angles)
                error = abs(self.factor) * error
                if "table" in self.rounded:
                    error = self._spread("table", values, error)
            found.append(self._round("table", values))
            errors.append(error)
        return *(found[::-1] if self.swapped else found), np.maximum(*errors)

    def _inexact(self) -> np.ndarray:
        """Return the error of cosines and sines if nothing is rounded to fewer bits."""
        angles = np.maximum(
            abs(self.multiple * self.row * self.frequency), abs(self.multiple * self.sine_row * self.sine_frequency)
        )
        with np.errstate(all="ignore"):
            own = np.nan_to_num(self.subject.convention.angle_error(angles, abs(self.frequency)))
            return abs(self.factor) * (self.inexact + table_angle_error(angles) + own)

    def _bounds(self, x0, x1, factors, error) -> tuple[np.ndarray, np.ndarray]:
        c0, c1, s0, s1 = map(abs, factors)
        if self.several:  # a rounding of either member reaches both, whatever the last angle is
            c0 = c1 = s0 = s1 = np.maximum(np.maximum(c0, s0), np.hypot(c1, s1))
        size = np.maximum(np.maximum(abs(self.cos0), abs(self.sin0)), np.maximum(abs(self.cos1), abs(self.sin1)))
        dtype = self.question.case.inputs[0].dtype
        arithmetic = self.subject.arithmetic(dtype)
        first = rotation_bound(abs(x0), -abs(x1), c0, s0, arithmetic, size * error)[0]
        second = rotation_bound(abs(x0), abs(x1), c1, s1, arithmetic, size * error)[1]
        if not self.extra:
            return first, second
        # An additional operation rounds a number of at most the size of the two products to the dtype of the inputs.
        wide = dtype in (torch.float32, torch.float64)
        again = Rounding.nearest(dtype) if wide else Rounding.truncating(dtype)
        for _ in range(self.extra):
            first = first + again.of(abs(x0) * c0 + abs(x1) * s0 + first)
            second = second + again.of(abs(x1) * c1 + abs(x0) * s1 + second)
        return first, second

    def _spread(self, what: str, values: np.ndarray, error: np.ndarray) -> np.ndarray:
        """Return how far apart the roundings of two numbers can be, if one number is off by at most ``error``.

        A rounding is monotone, so the roundings of ``values - error`` and of ``values + error`` enclose all others.
        """
        middle = self._round(what, values)
        low, high = self._round(what, values - error), self._round(what, values + error)
        return np.maximum(abs(high - middle), abs(middle - low))

    def _round(self, what: str, values: np.ndarray) -> np.ndarray:
        if what not in self.rounded:
            return values
        name = self.rounded[what]
        return _reduced_in_float32(values) if name == REDUCED else FORMATS[name](values)
