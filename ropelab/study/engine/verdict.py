"""The two axes of a verdict: the outcome of a claim, and the basis of the evidence.

A verdict judges a claim as the document has it. `Verdict.beyond` is a second verdict, on what the study adds: other
GPUs, dtypes, sizes and protocols. It never changes the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ropelab.study.engine.words import value_range


class Outcome(StrEnum):
    """The first axis: the evidence decides it, and remarks never change it."""

    HOLDS = "holds"
    LARGER = "larger than stated"
    SMALLER = "smaller than stated"
    """The effect is there, and its size is another one. This refutes nothing."""
    SOME_CELLS = "holds in some cells"
    FAILS = "does not hold"
    UNTOLD = "cannot be told"


class Basis(StrEnum):
    """The second axis: what ran, or else what was read."""

    PACKAGE = "a published package ran"
    CODE = "published code ran at its commit"
    LAYER = "published kernels ran in our layer"
    MODEL = "our model ran"
    DOCUMENT = "the document's own numbers"
    SOURCE = "the study read published files"
    FACT = "a typed fact"
    """Somebody read a public file or text and typed the fact into ``data``, with the commit or the quotation."""
    NONE = "no evidence here"


class Quantifier(StrEnum):
    """The cells that a claim speaks of. A counterexample ends a claim of ALL, ONLY or NEVER; else cells are counted."""

    ALL = "all"
    ONLY = "only"
    NEVER = "never"
    CELLS = "cells"
    """The claim names or means cells (shapes, dtypes, versions), each of which may hold or not."""
    MOST = "most"
    """The claim speaks of most cells: more than half of the cells that can be told must hold."""
    ONE = "one"
    """The claim states one fact or one number."""

    @property
    def strict(self) -> bool:
        """Whether one counterexample ends the claim."""
        return self in (Quantifier.ALL, Quantifier.ONLY, Quantifier.NEVER)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, or on a cell of a claim.

    Attributes:
        outcome: the first axis.
        basis: the second axis; None until the engine adds the basis that the claim states.
        measured: the measured figures in words.
        sizes: with LARGER and SMALLER, the least and the largest size of the effect, in stated sizes (`judging.size`).
        ratio: whether these sizes are those of ratios, whose size is a logarithm, and not of times or shares.
        cells: with SOME_CELLS, the number of cells with each outcome, of those that can be told.
        undecided: the number of cells that the noise leaves open; they count nowhere.
        needs: with UNTOLD, the thing that is missing.
        remarks: further facts for the reader: a cause, a later fix, a limit of the evidence.
        beyond: the verdict on what the study adds to the document.
        numbers: the numbers that the sentence of the claim may name, by placeholder (`engine.decisive`).
        says: the sentence with the decisive numbers; "" where the evidence has none.
    """

    outcome: Outcome
    basis: Basis | None = None
    measured: str = ""
    sizes: tuple[float, float] | None = None
    ratio: bool = True
    cells: Mapping[Outcome, int] | None = None
    undecided: int = 0
    needs: str = ""
    remarks: tuple[str, ...] = ()
    beyond: Verdict | None = None
    numbers: Mapping[str, object] = field(default_factory=dict)
    says: str = ""

    def __post_init__(self):
        if (self.outcome in (Outcome.LARGER, Outcome.SMALLER)) != (self.sizes is not None):
            raise ValueError(f"sizes: expected a pair with another size alone, got {self.sizes}")
        if (self.outcome is Outcome.SOME_CELLS) != (self.cells is not None):
            raise ValueError(f"cells: expected counts with {Outcome.SOME_CELLS!r} alone, got {self.cells}")
        if self.outcome is Outcome.UNTOLD and not self.needs:
            raise ValueError("needs: expected what would tell, got nothing")

    @property
    def words(self) -> str:
        """The outcome with its numbers: "larger than stated (2.41 times the effect)", "holds (2 cells undecided)".

        Cells are counted by outcome: "holds in 1, smaller than stated in 2 of 4 cells".
        """
        said = str(self.outcome)
        if self.cells:
            kept = [f"{each} in {n}" for each, n in self.cells.items() if n and each is not Outcome.FAILS]
            said = f"{', '.join(kept)} of {sum(self.cells.values())} cells"
        if self.sizes and self.sizes[0] < 1 < self.sizes[1]:
            said = "smaller and larger than stated"
        if self.outcome is Outcome.UNTOLD:
            return said
        more = [f"{value_range(self.sizes)} times {'the effect' if self.ratio else 'as much'}"] if self.sizes else []
        if self.undecided:
            more.append(f"{self.undecided} cell{'s' * (self.undecided > 1)} undecided")
        return f"{said} ({'; '.join(more)})" if more else said

    def with_text(self, measured: str, *remarks: str, **numbers: object) -> Verdict:
        """The same verdict with the measured figures in words, with remarks (empty ones are left out) and numbers."""
        remarks = (*self.remarks, *filter(None, remarks))
        return replace(self, measured=measured, remarks=remarks, numbers={**self.numbers, **numbers})

    def with_basis(self, basis: Basis) -> Verdict:
        """The same verdict on another basis than the claim's."""
        return replace(self, basis=basis)

    def beside(self, beyond: Verdict) -> Verdict:
        """The same verdict with another one on what the study adds."""
        return replace(self, beyond=beyond)


HOLDS, FAILS = Verdict(Outcome.HOLDS), Verdict(Outcome.FAILS)


def fact(holds: bool) -> Verdict:
    """The verdict on a single fact that evidence without noise decides."""
    return HOLDS if holds else FAILS


def untold(needs: str) -> Verdict:
    """The verdict where evidence is missing or too noisy; ``needs`` names the evidence that would tell."""
    return Verdict(Outcome.UNTOLD, needs=needs)


class Untold(Exception):
    """Raised by a rule where evidence is missing; the message names the evidence that would tell."""
