"""Measure the linear map of a wrong call: the 2 x 2 matrix of each pair, and the position of its entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, exact
from ropelab.conformance.law import names
from ropelab.conformance.watched import Seen
from ropelab.layout.pairing import pairs

DRAWS = 4
"""The draws of numbers that a map is measured with: two determine a 2 x 2 matrix, the others test it."""
ENTRIES = {"cos of y0": (0, 0), "sin of y0": (0, 1), "sin of y1": (1, 0), "cos of y1": (1, 1)}
"""The entries of the matrix of a pair, ``y0 = cos x0 - sin x1`` and ``y1 = sin x0 + cos x1``."""

Ask = Callable[[int], Seen | None]
"""Asks the same call again with other numbers, by the number of the draw."""


@dataclass(frozen=True, eq=False)
class Maps:
    """The map of one input in a call.

    Attributes:
        seen: the call.
        matrix, right: the matrix that was measured for each pair, and the right one, ``[B, S, H, R/2, 2, 2]``.
        error: how far rounding may take each entry of ``matrix``.
        alone: whether the outputs of a pair depend on its two features only: bool ``[B, S, H, R/2]``.
    """

    seen: Seen
    matrix: np.ndarray
    right: np.ndarray
    error: np.ndarray
    alone: np.ndarray

    @cached_property
    def wrong(self) -> np.ndarray:
        """Whether an entry is wrong, or no map of the pair alone; NaN is wrong."""
        return ~(abs(self.matrix - self.right) <= self.error) | ~self.alone[..., None, None]

    @cached_property
    def length(self) -> np.ndarray:
        """The factor by which each pair gets longer: the root of the determinant's magnitude."""
        m = self.matrix
        return np.sqrt(abs(m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] * m[..., 1, 0]))


def angle(matrix: np.ndarray) -> np.ndarray:
    """Return the angle in rad of the rotation nearest to each matrix ``[..., 2, 2]``."""
    return np.arctan2(matrix[..., 1, 0] - matrix[..., 0, 1], matrix[..., 0, 0] + matrix[..., 1, 1])


def measure(first: Seen, ask: Ask) -> Maps | None:
    """Return the map of a call, or None where another call of it cannot be made."""
    drawn = [first, *filter(None, (ask(number) for number in range(1, DRAWS)))]
    if len(drawn) < DRAWS or any(one.given.shape != first.given.shape for one in drawn):
        return None
    source, target = (first.subject.layout, first.subject.out_layout)[:: -1 if first.gradient else 1]
    width = first.case.rotary_dim

    def members(values: Sequence[np.ndarray], layout: str) -> np.ndarray:
        return np.stack([np.stack(pairs(x[..., :width], layout), -1) for x in values]).astype(EXACT)

    x = members([one.given for one in drawn], source)
    y, right, bound = (members([getattr(one, name) for one in drawn], target) for name in ("actual", "right", "bound"))
    # Least squares over the draws d: M = (sum y x') (sum x x')^-1, so an error e_d of y_d moves M by e_d (G^-1 x_d)'.
    weights = np.einsum("...ij,d...j->d...i", _inverse(np.einsum("d...i,d...j->...ij", x, x)), x)
    with np.errstate(invalid="ignore", over="ignore"):
        matrix, truth = (np.einsum("d...i,d...j->...ij", values, weights) for values in (y, right))
        unit = torch.finfo(first.case.inputs[0].dtype).eps
        rounding = 2 * bound + 4 * unit * (abs(y) + abs(x).sum(-1, keepdims=True))
        error = np.einsum("d...i,d...j->...ij", rounding, abs(weights))
        left = abs(np.einsum("...ij,d...j->d...i", matrix, x) - y)
        alone = (left <= rounding + np.einsum("...ij,d...j->d...i", error, abs(x))).all((0, -1))
    return Maps(first, matrix, truth, error, alone)


def _inverse(m: np.ndarray) -> np.ndarray:
    """Return the inverses of symmetric matrices ``[..., 2, 2]``."""
    (a, b), d = np.moveaxis(m[..., 0, :], -1, 0), m[..., 1, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.stack((d, -b, -b, a), -1).reshape(m.shape) / (a * d - b * b)[..., None, None]


# ------------------------------------------------------------------------------------------------------- positions


class Reader:
    """Finds the position whose cosines, or sines, of all pairs are the numbers of an entry."""

    def __init__(self, maps: Maps):
        case = maps.seen.case
        self.maps = maps
        self.frequencies = maps.seen.frequencies / case.interpolation
        self.axes = np.array(case.axes if case.axes is not None else [0] * len(self.frequencies))
        at = np.unique(maps.seen.positions)
        sixteen = [torch.from_numpy(at).to(dtype).double().numpy() for dtype in (torch.bfloat16, torch.float16)]
        wrapped = [at % 2**bits for bits in range(3, 17)]
        near = (at[:, None] + np.arange(-40, 41)).flatten() if len(at) < 400 else at
        found = np.concatenate((near, 2 * at, -at, at / case.interpolation, at * case.interpolation,
                                np.arange(-9, 100), *sixteen, *wrapped))  # fmt: skip
        self.candidates = np.unique(found[np.isfinite(found)]).astype(EXACT)
        angles = self.candidates[:, None] * self.frequencies
        self.tables = {0: np.cos(angles), 1: np.sin(angles)}
        self.angle_error = FLOAT32_UNIT * 8 * abs(angles)

    def read(self, place: tuple[int, int, int], *, right: bool = False) -> dict[str, tuple]:
        """Return for each of `ENTRIES` a position for each axis of positions, None where none fits.

        A position that fits all entries is preferred: cosines of small angles alone tell little.

        Args:
            place: sequence, token and head.
            right: read the right matrix, not the measured one.
        """
        fits = {name: self._fits(place, entry, right) for name, entry in ENTRIES.items()}
        every = np.logical_and.reduce([*fits.values()])
        expected, found = self.maps.seen.positions[place[:2]], []
        for axis in np.unique(self.axes):
            of_axis = self.axes == axis
            at = float(expected[of_axis][0] if len(expected) > 1 else expected[0])
            joint = every[:, of_axis].all(1)
            alone = (joint if joint.any() else fit[:, of_axis].all(1) for fit in fits.values())
            found.append(
                [min(map(float, self.candidates[fit]), key=partial(_unlikely, at), default=None) for fit in alone]
            )
        return {name: tuple(axis[n] for axis in found) for n, name in enumerate(ENTRIES)}

    def _fits(self, place: tuple[int, int, int], entry: tuple[int, int], right: bool) -> np.ndarray:
        """Return which candidates have the numbers of an entry of each pair: bool ``[candidates, R/2]``."""
        maps, (row, column) = self.maps, entry
        values = (maps.right if right else maps.matrix)[place][:, row, column]
        values = values * ({(0, 1): -1, (1, 0): 1}[entry] * maps.seen.sign if row != column else 1)
        length = self._length(place, right)
        with np.errstate(invalid="ignore"):
            off = abs(self.tables[int(row != column)] - values / length) - self.angle_error
        return (off <= maps.error[place][:, row, column] / length) & (right | maps.alone[place])

    def _length(self, place: tuple[int, int, int], right: bool) -> float:
        """Return the factor of the tables, or another length that all pairs of a token have in common."""
        factor, length = self.maps.seen.case.factor, self.maps.length[place]
        near, common = 4 * self.maps.error[place].max((-1, -2)), float(np.median(length))
        alike = not right and common > 0 and (abs(length - common) <= near).all()
        return common if alike and (abs(length - factor) > near).any() else factor


def _unlikely(expected: float, position: float) -> tuple[bool, float]:
    """Return the order in which positions with the same numbers are preferred: the nearest of the same sign first."""
    return position < 0 <= expected, abs(position - expected)


def rows(reader: Reader, sequence: int, tokens: Sequence[int]) -> dict[tuple, list[tuple[int, str]]]:
    """Return the positions of some tokens of a sequence, row -> the heads and entries that have it."""
    found: dict[tuple, list[tuple[int, str]]] = {}
    for head in range(reader.maps.matrix.shape[2]):
        read = [reader.read((sequence, token, head)) for token in tokens]
        for name in ENTRIES:
            found.setdefault(tuple(one[name] for one in read), []).append((head, name))
    return found


# ----------------------------------------------------------------------------------------------------- linear forms

MOST_TERMS = 100
"""The numbers that one element may depend on, so that its form is measured; each takes a call."""


Term = tuple[float, str, tuple[int, ...]]
"""A factor, and the name and place of the feature that it belongs to; the name is empty for a constant."""


def form(first: Seen, ask: Ask, place: tuple[int, ...], of: str = "actual") -> list[Term] | None:
    """Return the linear form of an element in the numbers that went in, the largest terms first.

    The features of its own head are tried first, then those of its token in all heads and inputs, of its head in all
    tokens, in all sequences, and at last all. None if no form of at most `MOST_TERMS` numbers has its values.

    Args:
        first, ask, place: a call, how to ask for it with other numbers, and the place of the element in the result.
        of: ``"actual"``, or ``"right"`` for the form that it should have.
    """
    labels, at = _places(first)
    own = labels == (first.which or 0)
    b, s, h = (at[:, axis] == place[axis] for axis in range(3))
    drawn = [first]
    for where in (own & b & s & h, b & s, own & b & h, own & s & h, own, own | ~own):
        count = int(where.sum()) + 1
        if count > MOST_TERMS:
            continue
        while len(drawn) < count + 3:
            if (another := ask(len(drawn))) is None or another.given.shape != first.given.shape:
                return None
            drawn.append(another)
        some = drawn[: count + 3]
        x = np.array([[*_numbers(one)[where], 1.0] for one in some])
        y = np.array([getattr(one, of)[place] for one in some], float)
        if not np.isfinite(y).all():
            return None
        factors, *_ = np.linalg.lstsq(x, y, rcond=None)
        unit = torch.finfo(first.case.inputs[0].dtype).eps
        if abs(x @ factors - y).max() <= 64 * unit * (abs(x) @ abs(factors) + abs(y)).max():
            named = ["gradient of " * first.gradient + names(first.case)[n] for n in labels[where]]
            found = zip(factors.tolist(), [*named, ""], [*map(tuple, at[where].tolist()), ()], strict=True)
            least = 256 * unit * max(abs(factors).max(), 1e-30)
            return sorted((term for term in found if abs(term[0]) > least), key=lambda term: -abs(term[0]))
    return None


def _tensors(seen: Seen) -> tuple[torch.Tensor, ...]:
    return seen.case.cotangents if seen.gradient else seen.case.inputs


def _numbers(seen: Seen) -> np.ndarray:
    """Return all that went into a call, the numbers of the watched input as they were before it."""
    parts = (seen.given if n == seen.which else exact(x) for n, x in enumerate(_tensors(seen)))
    return np.concatenate([part.flatten() for part in parts]).astype(float)


def _places(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the input and the place of each of `_numbers`."""
    shapes = [seen.given.shape if n == seen.which else x.shape for n, x in enumerate(_tensors(seen))]
    labels = np.concatenate([np.full(math.prod(shape), n) for n, shape in enumerate(shapes)])
    return labels, np.concatenate([np.argwhere(np.ones(shape, bool)) for shape in shapes])


def elements(seen: Seen) -> Iterator[tuple[int, ...]]:
    """Yield the places of wrong elements, those at a position other than 0 first."""
    hits = np.argwhere(seen.wrong)
    positions = seen.positions[hits[:, 0], hits[:, 1]].max(-1) if len(hits) else np.empty(0)
    for at in np.argsort(positions == 0, kind="stable"):
        yield tuple(map(int, hits[at]))
