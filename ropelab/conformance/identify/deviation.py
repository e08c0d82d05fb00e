"""Deviations from the definition, which compose to a description of a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ropelab.conformance.identify.outcome import outcome, sides
from ropelab.conformance.identify.plan import PARTS, Plan
from ropelab.conformance.identify.questions import GRADIENT, Question
from ropelab.conformance.subject import Subject

ADJOINT = "the gradient applies the transposed matrix"


def always(question: Question, which: int) -> bool:
    """Return True: the circumstances of a deviation without restrictions."""
    return True


@dataclass(frozen=True)
class Scope:
    """The part of a function's behaviour to which a deviation is confined.

    Attributes:
        name: q, k or x; empty for all inputs.
        gradient: whether only gradients deviate.
        words: the circumstances, such as ``"for a single token"``; empty for all.
        asked: whether an input of a question has these circumstances.
        mask: the elements that deviate: an array that broadcasts to ``[B, S, H, pairs]``.
    """

    name: str = ""
    gradient: bool = False
    words: str = ""
    asked: Callable[[Question, int], bool] = field(default=always, compare=False)
    mask: Callable[[Plan], np.ndarray] | None = field(default=None, compare=False)

    def covers(self, plan: Plan) -> bool:
        """Return whether the deviation reaches any element of this tensor in this call."""
        if (self.name and self.name != plan.name) or (self.gradient and not plan.is_gradient):
            return False
        return self.asked(plan.question, plan.which)

    @property
    def narrow(self) -> int:
        """The number of restrictions."""
        return bool(self.name) + self.gradient + bool(self.words)

    @property
    def fitted(self) -> bool:
        """Whether the words number places or positions of the calls that were made: others may refute them."""
        return re.search(r"(sequence|token|head|position)s? (\d|[<>])", self.words) is not None


@dataclass(frozen=True)
class Deviation:
    """One change of the definition.

    Attributes:
        kind: the part that changes: ``"sign"``, ``"offset"``, ``"layout"``, ...
        words: the change as a predicate, such as ``"turns by minus the angle"``.
        breaks: the line of the definition that the change breaks.
        change: changes a plan.
        parameters: the values that were recovered, by name.
        scope: the part of the behaviour that changes.
        rotary_dim: the number of features that rotate, if it changes.
        rounds: how many times as often as the definition the function may round.
    """

    kind: str
    words: str
    breaks: str
    change: Callable[[Plan], object] = field(compare=False)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    scope: Scope = Scope()
    rotary_dim: Callable[[Plan], int] | None = field(default=None, compare=False)
    rounds: float = 1.0

    def apply(self, plan: Plan) -> None:
        """Change the plan within the scope."""
        if not self.scope.covers(plan):
            return
        before = {part: getattr(plan, part) for part in PARTS}
        self.change(plan)
        if self.scope.mask is not None:
            mask = self.scope.mask(plan)
            for part, value in before.items():
                if getattr(plan, part) is not value:
                    setattr(plan, part, np.where(mask, getattr(plan, part), value))

    @property
    def line(self) -> str:
        """The line of the definition that the function breaks; a wrong gradient breaks the line about gradients."""
        return ADJOINT if self.scope.gradient else self.breaks

    def __str__(self) -> str:
        who = self.scope.name or "each input"
        who = f"the gradient of {who}" if self.scope.gradient else who
        where = f" {self.scope.words}" if self.scope.words else ""
        return f"{who} {self.words}{where}"


def simulate(
    subject: Subject, question: Question, which: int, deviations: tuple[Deviation, ...]
) -> tuple[np.ndarray, np.ndarray] | str:
    """Return the answer of the definition with deviations to a question and its bound, or the name of an exception."""
    return outcome(lambda number: planned(subject, question, number, deviations), which)


def alternatives(
    subject: Subject, question: Question, which: int, deviations: tuple[Deviation, ...]
) -> Iterator[tuple[np.ndarray, np.ndarray] | str]:
    """Yield the answer of `simulate`, and the answers on the other sides of boundaries of roundings.

    A right answer is in each element within the bound of one of them.
    """
    try:
        found = sides(planned(subject, question, which, deviations))
    except ValueError as error:  # deviations that were found in other calls do not fit this one
        yield f"{type(error).__name__} of the description"  # no function raises it
        return
    for side in found:

        def made(number: int, side=side) -> Plan:
            plan = planned(subject, question, number, deviations)
            plan.side = side
            return plan

        yield outcome(made, which)


def effective(
    subject: Subject, question: Question, which: int, deviations: tuple[Deviation, ...]
) -> tuple[Deviation, ...]:
    """Return the deviations on which the answer for an input depends: the others leave its plan as it is.

    The gradient for an input may depend on the plans of all inputs.
    """
    if any(d.rotary_dim is not None for d in deviations):
        return deviations
    kept = {place for place, deviation in enumerate(deviations) if deviation.rounds != 1}
    try:
        for number in range(len(question.case.inputs)) if question.kind == GRADIENT else (which,):
            plan = Plan.of(subject, question, number)
            for place, deviation in enumerate(deviations):
                before = plan.state() if place not in kept and deviation.scope.covers(plan) else None
                deviation.apply(plan)
                if before is not None and plan.differs(before):
                    kept.add(place)
    except ValueError:  # deviations that were found in other calls do not fit this one
        return deviations
    return tuple(deviations[place] for place in sorted(kept))


def planned(subject: Subject, question: Question, which: int, deviations: tuple[Deviation, ...]) -> Plan:
    """Return the plan of the definition with deviations for an input of a call."""
    plan = Plan.of(subject, question, which)
    for deviation in deviations:
        if deviation.rotary_dim is not None and deviation.scope.covers(plan):
            plan = Plan.of(subject, question, which, deviation.rotary_dim(plan))
    for deviation in deviations:
        deviation.apply(plan)
    return plan
