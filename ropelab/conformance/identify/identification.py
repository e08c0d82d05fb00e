"""An identification: its steps and its result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.identify.dependence import findings, remembers
from ropelab.conformance.identify.deviation import Deviation, simulate
from ropelab.conformance.identify.evidence import Answer, Evidence, OutOfTime
from ropelab.conformance.identify.larger import larger, thresholds
from ropelab.conformance.identify.passed import alone, passed
from ropelab.conformance.identify.questions import FORWARD, GRADIENT, questions
from ropelab.conformance.identify.rare import (
    beyond,
    broken_questions,
    extents_of,
    length_question,
    longest_of_right,
    rare_questions,
)
from ropelab.conformance.identify.read_off import read_off
from ropelab.conformance.identify.repair import Repair, repaired
from ropelab.conformance.identify.scopes import scopes
from ropelab.conformance.identify.search import search
from ropelab.conformance.identify.shared import shared
from ropelab.conformance.subject import Subject
from ropelab.conformance.words import unequal

SECONDS = 10.0
"""The time limit of an identification. It is CPU time of the thread, so that other work cannot end the search."""


RARE_SECONDS = 4.0
"""The additional limit of CPU time where all ordinary answers are right."""
SHRINK_SECONDS = 1.0
"""The limit of CPU time of the search for a smaller example."""
FEW = 4
"""The number of unexplained answers that are listed."""
REMEMBERED = "results follow the tables of an earlier call with the same shapes"
ROUNDS = 3
"""The number of searches, each with the fresh answers that refuted the description of the search before."""


@dataclass(frozen=True)
class Identification:
    """The behaviour of a function, as deviations from the definition.

    Attributes:
        deviations: the deviations; empty if nothing deviates or nothing was identified.
        proven: whether there are deviations, and they reproduce the answers of the function to all questions, also to
            fresh ones.
        unexplained: the answers that the description does not reproduce, in words with their share of elements.
        repair: a change of the call that makes the function right; None if no such change was found.
        example: the smallest call among the questions whose answer deviates, in words.
        facts: for a function that no description reproduces: which results depend on inputs that the definition's
            results do not depend on, and which results are not linear.
        right: the inputs without a deviating answer, where answers for another input deviate.
    """

    deviations: tuple[Deviation, ...] = ()
    proven: bool = False
    unexplained: tuple[str, ...] = ()
    repair: Repair | None = None
    example: str = ""
    right: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether no answer deviates from the definition."""
        return not (self.deviations or self.unexplained or self.facts)

    def words(self) -> list[str]:
        """Return the description in lines of plain text; empty if there is nothing to say."""
        if self.silent:
            return ["nothing deviates from the definition in any answer"]
        if not self.proven:
            return [*self.facts, *(f"unexplained: {line}" for line in self.unexplained)]
        lines = [f"{deviation} (breaks: {deviation.line})" for deviation in self.deviations]
        lines += [f"{name} is right" for name in self.right]
        lines += [f"smallest example: {self.example}"] if self.example else []
        return lines + ([f"repair: {self.repair.words}"] if self.repair is not None else [])

    def as_dict(self) -> dict[str, Any]:
        """Return the identification for JSON."""
        found = [
            {"words": str(d), "kind": d.kind, "breaks": d.line, "input": d.scope.name,
             "gradient": d.scope.gradient, "where": d.scope.words, "parameters": _plain(d.parameters)}
            for d in self.deviations
        ]  # fmt: skip
        repair = None if self.repair is None else self.repair.words
        facts = self.words() if self.proven and not found else list(self.facts)
        return {"proven": self.proven and bool(found), "deviations": found, "unexplained": list(self.unexplained),
                "facts": facts,
                "example": self.example, "right": list(self.right), "repair": repair}  # fmt: skip


def identify(
    subject: Subject,
    sizes: Sizes | None = None,
    seconds: float = SECONDS,
    history: tuple[str, ...] = (),
    failed: tuple[Case, ...] = (),
) -> Identification:
    """Measure what a function does, and describe it by the fewest deviations from the definition.

    Args:
        subject: the function.
        sizes: the extents of most calls; by default `Sizes`, with heads that rotate as a whole unless the convention
            is partial.
        seconds: the limit of CPU time. A search that is not done by then has an identification without a proof.
        history: what `recalls` found before any other call of the function. The answers then describe the function
            after such calls.
        failed: calls that broke a law. They are measured if all other answers are right.

    Returns:
        A description that reproduces every answer, to questions that led to it and to fresh questions; or else the
        answers that remain unexplained.
    """
    if history:
        after = identify(subject, sizes, seconds, failed=failed)
        then = tuple(f"after such calls {d}" for d in (after.deviations if after.proven else after.facts))
        return Identification((), False, facts=(*history, *then))
    if sizes is None:
        sizes = Sizes() if subject.convention.partial else Sizes(rotary_dim=Sizes.head_dim)
    if subject.convention.part == "" and (found := passed(subject, sizes)) is not None:
        deviation, example = found
        others = identify(alone(subject, "k"), sizes, seconds)
        if not (others.proven or others.silent):
            return replace(others, facts=(str(deviation), *others.facts))
        right = others.right or (() if others.deviations else ("q", "k"))
        every = (*others.deviations, deviation)
        return Identification(every, True, example=others.example or example, right=right)
    if subject.convention.shared and not subject.convention.part:
        parts, example = shared(subject, sizes)
        if parts:
            others = identify(alone(subject, subject.convention.shared), sizes, seconds)
            if others.proven or others.silent:
                return Identification((*others.deviations, *parts), True, example=others.example or example)
            return replace(others, facts=(*map(str, parts), *others.facts))
    deadline = time.thread_time() + seconds
    best: tuple[Deviation, ...] = ()
    evidence: Evidence | None = None
    try:
        evidence = Evidence(subject, sizes, deadline)
        if remembers(subject, sizes):  # the answers depend on the order of the questions
            left = evidence.wrong(())
            return Identification((), False, tuple(_unexplained(left, evidence.answers)), facts=(REMEMBERED,))
        for variant in range(1, ROUNDS + 1):
            for description in search(evidence, best):
                best = description
            if evidence.wrong(best):
                return _undone(evidence, sizes, best, variant)
            fresh = Evidence(subject, sizes, deadline, variant)
            left = fresh.wrong(best)
            if not left and not best and variant == 1:
                return _rare(subject, sizes, deadline + RARE_SECONDS, evidence, failed)
            if not left:
                fresh.answers += larger(subject, sizes, deadline, variant, best)
                fresh.answers += thresholds(subject, sizes, deadline, variant, best)
                left = fresh.wrong(best)
            if not left:
                repair = repaired(subject, sizes, best)
                wrong = evidence.wrong(())
                right = _right((*wrong, *fresh.wrong(())), evidence.answers)
                told = tuple(_retold(d, subject, right) for d in best)
                return Identification(told, True, (), repair, _example(subject, sizes, wrong), right)
            evidence.answers += fresh.answers  # the search goes on until it explains these answers as well
        return _undone(evidence, sizes, best, ROUNDS)
    except OutOfTime:
        late = f"the search did not end within {seconds:g} s of CPU time"
        if evidence is None or not seconds:
            return Identification(best, False, (late,))
        return _undone(evidence, sizes, best, 1, late)


def _undone(evidence: Evidence, sizes: Sizes, best: tuple[Deviation, ...], variant: int, *late: str) -> Identification:
    """Return what is known of a function that no description reproduces: a partial one, and what single answers show.

    Args:
        evidence: the answers.
        sizes: the extents of fresh calls.
        best: the best description.
        variant: the variant of the fresh calls.
        late: why the search ended early.
    """
    evidence.deadline = math.inf
    if not evidence.wrong(best := _needed(evidence, best)):  # no other calls could refute the description
        best = ()
    left = evidence.wrong(best)
    fresh = Evidence(evidence.subject, sizes, math.inf, variant) if best else None
    facts = (*_partly(evidence, fresh, best), *_facts(evidence, left, best))
    return Identification(best, False, (*late, *_unexplained(left, evidence.answers)), facts=facts)


def _rare(subject: Subject, sizes: Sizes, deadline: float, usual: Evidence, failed: tuple[Case, ...]) -> Identification:
    """Return the identification of a function whose ordinary answers are all right.

    Args:
        subject, sizes: as for `identify`.
        deadline: the limit of CPU time.
        usual: the ordinary answers. A description has to leave them right.
        failed: as for `identify`.
    """
    evidence = Evidence(subject, sizes, deadline, 0, rare_questions)
    wrong = evidence.wrong(())
    if not wrong:
        evidence = Evidence(subject, sizes, math.inf, 0, lambda *of: broken_questions(failed))
        return _undone(evidence, sizes, (), 0) if evidence.wrong(()) else Identification()
    best: tuple[Deviation, ...] = (beyond(),)
    if evidence.left(best, 0) == 0:
        return Identification(best, True, example=_told(subject, *wrong[0]))
    limit = longest_of_right(evidence.answers, subject, wrong)
    if limit is not None:  # calls on both sides of the threshold give the search its number
        for tokens in (limit[0], limit[0] + 1):
            question = length_question(subject, replace(extents_of(wrong[0][0].question.case), tokens=tokens))
            values = question.answer(subject)
            evidence.answers += [
                Answer(question, i, values if isinstance(values, str) else values[i])
                for i in range(len(question.case.inputs))
            ]
    evidence.answers += usual.answers
    try:
        for description in search(evidence):
            best = description
    except OutOfTime:
        pass
    evidence.deadline = math.inf
    left = evidence.wrong(best)
    if not left:
        fresh = Evidence(subject, sizes, math.inf, 1, rare_questions)
        fresh.answers += larger(subject, sizes, math.inf, 1, best)
        left = fresh.wrong(best)
    if not left:
        told = tuple(_limited(d, *limit) if limit else d for d in best)
        return Identification(told, True, example=_told(subject, *wrong[0]), right=_right(wrong, evidence.answers))
    first = (f"calls of more than {limit[1]} are wrong, shorter calls are right",) if limit else ()
    found = _undone(evidence, sizes, (), 0)
    return replace(found, facts=(*first, *found.facts))


def _limited(deviation: Deviation, longest: int, limit: str) -> Deviation:
    """Return a deviation with the limit of calls of any extents in its words, for that of calls of some extents."""
    tokens = f"in sequences of more than {longest} tokens"
    calls = tokens if limit == f"{longest} tokens" else f"in calls of more than {limit}"
    return replace(deviation, scope=replace(deviation.scope, words=deviation.scope.words.replace(tokens, calls)))


def _needed(evidence: Evidence, best: tuple[Deviation, ...]) -> tuple[Deviation, ...]:
    """Return a description that leaves answers unexplained, without deviations that explain no answer."""
    left = len(evidence.wrong(best))
    for deviation in best if len(best) > 1 else ():
        shorter = tuple(d for d in best if d is not deviation)
        if len(evidence.wrong(shorter)) <= left:
            return _needed(evidence, shorter)
    return best


def _partly(evidence: Evidence, fresh: Evidence | None, best: tuple[Deviation, ...]) -> tuple[str, ...]:
    """Return the deviations that explain all answers for one of two inputs, also fresh ones, with that reach."""
    if fresh is None or not best or any(d.scope.fitted for d in best):
        return ()
    before = {answer.name for answer, _ in evidence.wrong(())}
    left = {answer.name for part in (evidence, fresh) for answer, _ in part.wrong(best)}
    reached, rest = sorted(before - left), sorted(left)
    if not reached:
        results = all(answer.question.kind == GRADIENT for part in (evidence, fresh) for answer, _ in part.wrong(best))
        own = [d for d in best if results and not d.scope.gradient]
        return tuple(f"{d} (holds for all results; gradients unexplained)" for d in own)
    own = [d for d in best if d.scope.name in ("", *reached)]
    reach = f"holds for all answers of {', '.join(reached)}; {', '.join(rest)} unexplained"
    return tuple(f"{d} ({reach})".replace("each input", reached[0], 1) for d in own)


def _facts(evidence: Evidence, wrong, best: tuple[Deviation, ...]) -> tuple[str, ...]:
    """Return what unexplained answers show, what the simplest of them depends on, and whether it is linear.

    Args:
        evidence: the answers.
        wrong: those that a description does not reproduce.
        best: the description.
    """
    told = [answer for answer, _ in wrong if not isinstance(answer.values, str)]
    told = [answer for answer in told if answer.question.kind in (FORWARD, GRADIENT)]
    if not told:
        return ()

    def ease(answer: Answer) -> tuple:
        case = answer.question.case
        return answer.question.kind != FORWARD, case.shape[1] < 3 or case.inputs[0].shape[2] < 2, answer.size

    simplest = min(told, key=ease)
    facts = findings(evidence.subject, simplest.question)
    if len({answer.question.name for answer, _ in wrong}) < len({a.question.name for a in evidence.answers}) / 2:
        facts = [f"{fact} for {simplest.question.name.removeprefix('the gradient for ')}" for fact in facts]
    return (*read_off(evidence.subject, wrong, best), *facts)


def _told(subject: Subject, answer: Answer, elements: np.ndarray) -> str:
    """Return a deviating call in words, with its first wrong element."""
    shape = list(answer.question.case.inputs[answer.which].shape)
    of = "," if answer.question.name.startswith("the ") else " for"
    told = f"{answer.name} {shape}{of} {answer.question.name}: {elements.sum()} of {answer.size} elements are wrong"
    right = simulate(subject, answer.question, answer.which, ())
    if isinstance(answer.values, str) or isinstance(right, str) or answer.question.kind not in (FORWARD, GRADIENT):
        return told
    at = tuple(int(i) for i in np.argwhere(elements)[0])
    actual, expected = unequal(float(answer.values[at]), float(right[0][at]))
    return f"{told}, such as {list(at)}: {actual} in place of {expected}"


def _example(subject: Subject, sizes: Sizes, wrong) -> str:
    """Return the smallest deviating call that a greedy search finds: fewest sequences, tokens, heads and features."""
    if not wrong:
        return ""
    asked = {question.name for question in questions(subject, sizes)}  # larger calls do not shrink
    wrong = [w for w in wrong if w[0].question.name in asked] or wrong
    answer, elements = min(wrong, key=lambda w: (isinstance(w[0].values, str), w[0].size))
    deadline = time.thread_time() + SHRINK_SECONDS
    while smaller := next(_smaller(subject, sizes, answer, deadline), None):
        sizes, answer, elements = smaller
    return _told(subject, answer, elements)


def _smaller(subject: Subject, sizes: Sizes, answer: Answer, deadline: float) -> Iterator[tuple[Sizes, Answer, Any]]:
    for candidate in sizes.smaller():
        if time.thread_time() > deadline:
            return
        for question in questions(subject, candidate):
            if question.name == answer.question.name and question.kind == answer.question.kind:
                try:
                    found = question.answer(subject)
                except NotApplicable:
                    continue
                if isinstance(found, str) or isinstance(answer.values, str) or answer.which >= len(found):
                    continue
                small = Answer(question, answer.which, found[answer.which])
                elements = small.wrong(subject, ())
                if elements.any() and small.size < answer.size:
                    yield candidate, small, elements


def _retold(deviation: Deviation, subject: Subject, right: tuple[str, ...]) -> Deviation:
    """Return the deviation in the words of the call: what it is in this convention, and beside the other input."""
    if deviation.kind == "inputs" and subject.in_place:
        return replace(deviation, words="stays as it was, and the result is in other memory")
    if deviation.scope.gradient and deviation.words in subject.convention.gradients_mean:
        return replace(deviation, words=subject.convention.gradients_mean[deviation.words])
    other = {"q": "k", "k": "q"}.get(deviation.scope.name)
    if deviation.kind != "layout" or other not in right:
        return deviation
    words = f"{deviation.words}, and {other} as {subject.layout}: scores between q and k mix features of other pairs"
    return replace(deviation, words=words)


def _right(wrong, answers) -> tuple[str, ...]:
    hit = {answer.name for answer, _ in wrong}
    return tuple(dict.fromkeys(answer.name for answer in answers if hit and answer.name not in hit))


def _unexplained(wrong, answers) -> Iterator[str]:
    """Yield in words to which calls the unexplained answers are confined, and the size of the first of them."""
    if wrong and (words := _confined(wrong, answers)):
        yield words
    for answer, elements in wrong[:FEW]:
        yield f"{answer.name} for {answer.question.name}: {elements.mean():.0%} of the elements"
    if len(wrong) > FEW:
        yield f"and {len(wrong) - FEW} other answers"


def _confined(wrong, answers) -> str:
    """Return in words the narrowest scope that contains all unexplained answers; empty if it contains all answers.

    Fewer than three calls have a limit of tokens in common by chance.
    """
    few = len({answer.question.name for answer, _ in wrong}) < 3
    possible = [s for s in scopes(wrong, answers) if s.mask is None and not (few and "more than" in s.words)]
    possible = [s for s in possible if all(_has(s, answer) for answer, _ in wrong)]
    narrowest = min(possible, key=lambda s: sum(_has(s, answer) for answer in answers), default=None)
    if narrowest is None or all(_has(narrowest, answer) for answer in answers):
        return ""
    who = narrowest.name or "each input"
    who = f"the gradient of {who}" if narrowest.gradient else who
    return f"all that is unexplained: {who}{' ' if narrowest.words else ''}{narrowest.words}"


def _has(scope, answer: Answer) -> bool:
    question = answer.question
    reaches = scope.name in ("", answer.name) and (question.kind == GRADIENT or not scope.gradient)
    return reaches and scope.asked(question, answer.which)


def _plain(parameters) -> dict[str, Any]:
    return {name: value if isinstance(value, (int, str, list)) else float(value) for name, value in parameters.items()}
