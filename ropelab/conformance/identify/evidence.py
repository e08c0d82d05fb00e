"""Compare the answers of a function with the answers of a description."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import NotApplicable, Sizes
from ropelab.conformance.identify.deviation import Deviation, alternatives, effective, planned
from ropelab.conformance.identify.plan import last_row
from ropelab.conformance.identify.questions import FORWARD, GRADIENT, Question, questions
from ropelab.conformance.law import names
from ropelab.conformance.subject import Subject
from ropelab.kernels import NO_POSITION

Ask = Callable[[Subject, Sizes, int], Iterator[Question]]
"""Yields the questions of a variant."""


class OutOfTime(Exception):
    """The time of the identification is over."""


@dataclass(eq=False)
class Answer:
    """The answer of a function for one input of one call."""

    question: Question
    which: int
    values: np.ndarray | str
    _definition: tuple[Subject, np.ndarray] | None = field(default=None, repr=False)
    """The subject, and the elements that differ from the definition."""

    @property
    def name(self) -> str:
        """The name of the input."""
        return names(self.question.case)[self.which]

    @cached_property
    def given(self) -> np.ndarray:
        """The input, or the cotangent for a gradient."""
        case = self.question.case
        return exact((case.cotangents if self.question.kind == GRADIENT else case.inputs)[self.which])

    def wrong(self, subject: Subject, deviations: tuple[Deviation, ...]) -> np.ndarray:
        """Return which elements differ from the description by more than the bound allows, ``[B, S, H, D]``."""
        deviations = effective(subject, self.question, self.which, deviations) if deviations else ()
        if deviations:
            return self._wrong(subject, deviations)
        if self._definition is None or self._definition[0] is not subject:
            self._definition = subject, self._wrong(subject, ())
        return self._definition[1]

    def _wrong(self, subject: Subject, deviations: tuple[Deviation, ...]) -> np.ndarray:
        near: np.ndarray | None = None
        if isinstance(self.values, str) and (self._refused or (deviations and self._outside(subject, deviations))):
            return np.zeros((1, 1, 1, 1), bool)
        for told in alternatives(subject, self.question, self.which, deviations):
            if isinstance(self.values, str) or isinstance(told, str):
                return np.full((1, 1, 1, 1), not (isinstance(self.values, str) and told == self.values))
            y, bound = told
            with np.errstate(all="ignore"):
                hit: np.ndarray = (
                    abs(np.asarray(self.values) - y) <= max((d.rounds for d in deviations), default=1) * bound
                )
            hit |= (np.isnan(self.values) & np.isnan(y)) | (np.isinf(y) & np.equal(self.values, y))
            near = hit if near is None else np.logical_or(near, hit)
            if near.all():
                break
        assert near is not None, "there is at least one side"
        nowhere = (self.question.case.token_positions() == NO_POSITION).numpy()
        if nowhere.any() and self.question.kind in (FORWARD, GRADIENT):  # such a token may also pass unchanged
            passed = np.equal(self.values, self.given)[nowhere]
            near[nowhere] |= passed | subject.convention.ends_with_documents
        return ~near

    @property
    def _refused(self) -> bool:
        """Whether the call has tokens after the last packed document: a function may refuse them."""
        case = self.question.case
        return case.lengths is not None and bool((case.token_positions() == NO_POSITION).any())

    def _outside(self, subject: Subject, deviations: tuple[Deviation, ...]) -> bool:
        """Return whether a description reads rows beyond the tables of the call, so that an exception follows."""
        if subject.convention.computes_cosines or self.question.case.lengths is None:
            return False
        plan = planned(subject, self.question, self.which, deviations)
        return bool((plan.row > last_row(plan)).any())

    @cached_property
    def size(self) -> int:
        """The number of elements."""
        return 1 if isinstance(self.values, str) else self.values.size


class Evidence:
    """The answers of a function to all questions that its convention can express.

    Attributes:
        subject: the function.
        answers: the answers, one for each input of each call.
    """

    def __init__(self, subject: Subject, sizes: Sizes, deadline: float, variant: int = 0, ask: Ask = questions):
        self.subject, self.deadline = subject, deadline
        self.answers: list[Answer] = []
        for question in ask(subject, sizes, variant):
            self.in_time()
            try:
                found = question.answer(subject)
            except NotApplicable:
                continue
            for which in range(len(question.case.inputs)):
                self.answers.append(Answer(question, which, found if isinstance(found, str) else found[which]))

    def of(self, name: str) -> Evidence:
        """Return the answers for one input."""
        own = copy(self)
        own.answers = [answer for answer in self.answers if answer.name == name]
        return own

    def in_time(self) -> None:
        """Raise OutOfTime after the deadline."""
        if time.thread_time() > self.deadline:
            raise OutOfTime

    def wrong(self, deviations: tuple[Deviation, ...]) -> list[tuple[Answer, np.ndarray]]:
        """Return the answers that a description does not reproduce, with their wrong elements."""
        found = []
        for answer in self.answers:
            self.in_time()
            elements = answer.wrong(self.subject, deviations)
            if elements.any():
                found.append((answer, elements))
        return found

    def left(self, deviations: tuple[Deviation, ...], least: float = np.inf) -> float:
        """Return the unexplained part: the sum over answers of the share of wrong elements; stop beyond ``least``."""
        total = 0.0
        for answer in self.answers:
            self.in_time()
            elements = answer.wrong(self.subject, deviations)
            total += float(elements.mean()) + 0.05 * bool(elements.any())
            if total > least:
                break
        return total
