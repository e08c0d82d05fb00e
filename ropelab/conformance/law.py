"""What a law is, and how what it compares becomes an outcome."""

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
    """Numbers that a law holds against each other.

    Attributes:
        what: ``"q"``, ``"gradient of k"``, ...
        actual, expected: of one shape; extended precision.
        bound: how far they may be apart, broadcast against them; 0 where they must be equal.
        case: what was asked when they differed.
        axes: names of the axes.
        truth: ``expected`` is the definition itself, and not another result of the function.
    """

    what: str
    actual: np.ndarray
    expected: np.ndarray
    bound: np.ndarray
    case: Case
    axes: tuple[str, ...] = AXES
    truth: bool = False

    @property
    def error(self) -> np.ndarray:
        """``|actual - expected|``; infinite where a number came out as none."""
        with np.errstate(invalid="ignore"):
            error = np.abs(self.actual - self.expected)
        return np.where(np.isnan(error), np.inf, error)

    @property
    def excess(self) -> np.ndarray:
        """The error in units of its bound; a law holds if no element exceeds 1. Infinite where a bound is no number."""
        error, bound = np.broadcast_arrays(self.error, self.bound)
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(error == 0, 0, error / bound)
        return np.where(np.isnan(excess) | ~np.isfinite(bound), np.inf, excess)


Check = Callable[[Subject, Sizes], Iterator[Comparison | str]]


@dataclass(frozen=True)
class Law:
    """Something that is true of every right rotation.

    Attributes:
        name: stable, snake_case.
        statement: in one sentence.
        latex: the law as a formula, without dollar signs.
        check: yields comparisons, and remarks on what it had to leave out; raises ``NotApplicable`` or ``Broken``.
        by_default: checked unless laws are named.
    """

    name: str
    statement: str
    latex: str
    check: Check
    by_default: bool = True


def law(statement: str, latex: str, *, by_default: bool = True) -> Callable[[Check], Law]:
    """Make a check the law of its name."""
    return lambda check: Law(check.__name__, statement, latex, check, by_default)


def names(case: Case) -> tuple[str, ...]:
    """Of the tensors of a case."""
    return ("q", "k")[: len(case.inputs)] if len(case.inputs) == 2 else ("x",)


def against(
    case: Case,
    outputs: Iterable[torch.Tensor],
    expected: Iterable[tuple[np.ndarray, np.ndarray]],
    what: str = "{}",
    *,
    truth: bool = False,
) -> Iterator[Comparison]:
    """Compare each output with an expected value and its bound; ``truth`` as for `Comparison`."""
    for name, y, (value, bound) in zip(names(case), outputs, expected, strict=True):
        yield Comparison(what.format(name), exact(y), value, bound, case, truth=truth)


def against_truth(subject: Subject, case: Case) -> Iterator[Comparison]:
    """Compare the outputs of a case with the definition, computed before the function can write to the inputs."""
    expected = subject.expected(case)
    yield from against(case, subject(case), expected, truth=True)


def equal(
    case: Case, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str = "{}"
) -> Iterator[Comparison]:
    """Compare tensors that must have the same bits."""
    for name, a, e in zip(names(case), actual, expected, strict=True):
        yield Comparison(what.format(name), exact(a), exact(e), np.zeros(1), case, AXES[: a.ndim])


def counted(case: Case, what: str, number: int = 0) -> Comparison:
    """Things of which there may be none."""
    return Comparison(what, np.array([float(number)]), np.zeros(1), np.zeros(1), case, ("of all",))
