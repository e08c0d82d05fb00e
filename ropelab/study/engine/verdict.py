"""The two axes of a verdict: the outcome of a claim, and the basis of the evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Outcome(StrEnum):
    """The first axis: the evidence decides it, and remarks never change it."""

    HOLDS = "holds"
    OTHER_SIZE = "holds with another size"
    SOME_CELLS = "holds in some cells"
    FAILS = "does not hold"
    UNTOLD = "cannot be told"


class Basis(StrEnum):
    """The second axis, from the strongest to the weakest."""

    PACKAGE = "the package was run"
    CODE = "the code at its commit was run"
    DOCUMENT = "the document's own numbers"
    SOURCE = "the source was read"
    MODEL = "our model was run"
    NONE = "no evidence yet"


class Quantifier(StrEnum):
    """The cells that a claim speaks of. A counterexample ends a claim of ALL, ONLY or NEVER; else cells are counted."""

    ALL = "all"
    ONLY = "only"
    NEVER = "never"
    CELLS = "cells"
    """The claim names or means cells (shapes, dtypes, versions), each of which may hold or not."""
    ONE = "one"
    """The claim states one fact or one number."""

    @property
    def strict(self) -> bool:
        """Whether one counterexample ends the claim."""
        return self in (Quantifier.ALL, Quantifier.ONLY, Quantifier.NEVER)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim.

    Attributes:
        outcome: the first axis.
        basis: the second axis; None until the engine adds the basis that the rule states.
        measured: the measured figures in words.
        size: with OTHER_SIZE, the measured size divided by the stated size.
        cells: with SOME_CELLS, the number of cells that hold, and the number of cells.
        needs: with UNTOLD, the evidence that would tell.
        remarks: further facts for the reader: a cause, a later fix, a limit of the evidence.
        model: with the basis MODEL, the outcome of our model in words.
    """

    outcome: Outcome
    basis: Basis | None = None
    measured: str = ""
    size: float | None = None
    cells: tuple[int, int] | None = None
    needs: str = ""
    remarks: tuple[str, ...] = ()
    model: str = ""

    def __post_init__(self):
        if (self.outcome is Outcome.OTHER_SIZE) != (self.size is not None):
            raise ValueError(f"size: expected a number with {Outcome.OTHER_SIZE!r} alone, got {self.size}")
        if (self.outcome is Outcome.SOME_CELLS) != (self.cells is not None):
            raise ValueError(f"cells: expected a pair with {Outcome.SOME_CELLS!r} alone, got {self.cells}")
        if self.outcome is Outcome.UNTOLD and not self.needs:
            raise ValueError("needs: expected what would tell, got nothing")

    @property
    def words(self) -> str:
        """The outcome with its numbers: "holds with another size (times 0.87)"."""
        if self.size is not None:
            return f"{self.outcome} (times {self.size:.2f})"
        if self.cells is not None:
            return f"holds in {self.cells[0]} of {self.cells[1]} cells"
        return f"{self.outcome} (our model: {self.model})" if self.model else str(self.outcome)

    def with_text(self, measured: str, *remarks: str) -> Verdict:
        """The same verdict with the measured figures in words, and with remarks (empty ones are left out)."""
        return replace(self, measured=measured, remarks=(*self.remarks, *filter(None, remarks)))

    def with_basis(self, basis: Basis) -> Verdict:
        """The same verdict on another basis than the rule's."""
        return replace(self, basis=basis)


HOLDS, FAILS = Verdict(Outcome.HOLDS), Verdict(Outcome.FAILS)


def fact(holds: bool) -> Verdict:
    """The verdict on a single fact that evidence without noise decides."""
    return HOLDS if holds else FAILS


def untold(needs: str) -> Verdict:
    """The verdict where evidence is missing or too noisy; ``needs`` names the evidence that would tell."""
    return Verdict(Outcome.UNTOLD, needs=needs)


class Untold(Exception):
    """Raised by a rule where evidence is missing; the message names the evidence that would tell."""


def of_model(verdict: Verdict, needs: str) -> Verdict:
    """The verdict on a package by our model alone: "cannot be told", because a model confirms and refutes nothing."""
    measured = f"our model: {verdict.words}; {verdict.measured}"
    return Verdict(Outcome.UNTOLD, Basis.MODEL, measured, needs=needs, remarks=verdict.remarks, model=verdict.words)
