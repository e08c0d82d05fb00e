"""A law, and the comparisons that decide whether a function keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Case, Sizes
from ropelab.conformance.subject import Subject

AXES = ("batch", "token", "head", "feature")


@dataclass(frozen=True)
class Comparison:
    """Two arrays that a law compares.

    Attributes:
        what: the numbers in words: ``"q"``, ``"gradient of k"``, ...
        actual: the numbers of the function, ``EXACT``.
        expected: the numbers that the law expects, of the same shape and dtype.
        bound: how far each number may be from its expected value, broadcast against both; 0 where they must be equal.
        case: the call that led to ``actual``.
        axes: the names of the axes.
        truth: whether ``expected`` is the definition itself; otherwise it is another result of the function.
        tokens: the numbers in the call of the tokens that are compared; None for all.
    """

    what: str
    actual: np.ndarray
    expected: np.ndarray
    bound: np.ndarray
    case: Case
    axes: tuple[str, ...] = AXES
    truth: bool = False
    tokens: Sequence[int] | None = None

    def numbers(self, axis: int) -> np.ndarray:
        """Return the numbers in the call of the elements that are compared along an axis."""
        if self.tokens is not None and self.axes[axis] == "token":
            return np.asarray(self.tokens)
        return np.arange(self.actual.shape[axis])

    @property
    def error(self) -> np.ndarray:
        """``|actual - expected|``; infinite where the difference is NaN."""
        with np.errstate(invalid="ignore"):
            error = np.abs(self.actual - self.expected)
        return np.where(np.isnan(error), np.inf, error)

    @property
    def excess(self) -> np.ndarray:
        """The error divided by its bound, at most 1 where the law holds; infinite where the bound is not finite."""
        error, bound = np.broadcast_arrays(self.error, self.bound)
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(error == 0, 0, error / bound)
        return np.where(np.isnan(excess) | ~np.isfinite(bound), np.inf, excess)


Compare = Callable[[Subject, Sizes], Iterator[Comparison | str]]
"""The code of a law: it yields comparisons, and remarks on all that it had to leave out.

It raises `NotApplicable` if the law cannot be asked of the subject, and `Broken` if the law does not hold and no
comparison can show it.
"""


@dataclass(frozen=True)
class Law:
    """A property that every right rotation has.

    Attributes:
        name: the stable name, in snake_case.
        statement: the law in one sentence.
        latex: the law as a formula, without dollar signs.
        compare: the code of the law.
        by_default: whether functions are checked against the law unless the caller names other laws.
    """

    name: str
    statement: str
    latex: str
    compare: Compare
    by_default: bool = True


def law(statement: str, latex: str, *, by_default: bool = True) -> Callable[[Compare], Law]:
    """Return a decorator that makes a function the law of the function's name."""
    return lambda compare: Law(compare.__name__, statement, latex, compare, by_default)


def names(case: Case) -> tuple[str, ...]:
    """Return the names of the inputs of a case."""
    return ("q", "k")[: len(case.inputs)] if len(case.inputs) == 2 else ("x",)


def against(
    case: Case,
    outputs: Iterable[torch.Tensor],
    expected: Iterable[tuple[np.ndarray, np.ndarray]],
    what: str = "{}",
    *,
    truth: bool = False,
    tokens: Sequence[int] | None = None,
) -> Iterator[Comparison]:
    """Compare each output with an expected value, within a bound.

    Args:
        case: the call that led to the outputs.
        outputs: a tensor for each input of the case.
        expected: ``(value, bound)`` for each output.
        what: the output in words; ``{}`` stands for the name of the input.
        truth, tokens: as for `Comparison`.
    """
    for name, y, (value, bound) in zip(names(case), outputs, expected, strict=True):
        yield Comparison(what.format(name), exact(y), value, bound, case, truth=truth, tokens=tokens)


def against_truth(subject: Subject, case: Case) -> Iterator[Comparison]:
    """Compare the outputs of a case with the definition, computed before the function can overwrite the inputs."""
    expected = subject.expected(case)
    yield from against(case, subject(case), expected, truth=True)


def equal(
    case: Case, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str = "{}"
) -> Iterator[Comparison]:
    """Compare tensors that must be equal; ``against`` describes the other arguments."""
    for name, a, e in zip(names(case), actual, expected, strict=True):
        yield Comparison(what.format(name), exact(a), exact(e), np.zeros(1), case, AXES[: a.ndim])


def counted(case: Case, what: str, number: int = 0) -> Comparison:
    """Return the comparison of a number of things, ``what`` in words, with 0."""
    return Comparison(what, np.array([float(number)]), np.zeros(1), np.zeros(1), case, ("of all",))
