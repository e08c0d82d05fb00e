"""Find, without a tolerance, on which inputs a result depends, and whether a function is linear at all.

Each finding compares two answers of the function bit by bit, so that no bound is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.identify.questions import FORWARD, GRADIENT, Question
from ropelab.conformance.law import names
from ropelab.conformance.subject import Subject
from ropelab.conformance.tensors import copied, unexpanded

AXES = {0: "sequence", 1: "token", 2: "head"}

Answers = tuple[np.ndarray, ...] | None


def findings(subject: Subject, question: Question) -> list[str]:
    """Return in words what contradicts a linear map of each head: each is a fact about the answers to a question.

    Args:
        subject: the function.
        question: a call, or a gradient.
    """
    given = question.case.cotangents if question.kind == GRADIENT else question.case.inputs
    first = _answer(subject, question, given)
    if first is None:
        return []
    again = _answer(subject, question, given)
    if again is not None and not all(map(_equal, first, again)):
        return ["the same call gives different results: they depend on other memory, on earlier calls or on chance"]
    return [*_nonlinear(subject, question, given, first), *_mixing(subject, question, given, first)]


def remembers(subject: Subject, sizes: Sizes) -> bool:
    """Return whether a call with other tables than the call before, and the same shapes, gives the results before.

    A call with the same tables and other shapes must be right, so that the memory alone explains the results.
    """
    for number, where in enumerate(({"factor": 1.25}, {"inverse": True}, {"offsets": 3})):
        first, other = (subject.draw(replace(sizes, tokens=61 + 2 * number + i)) for i in range(2))
        calls = [replace(other, **where), first, replace(first, **where)]  # type: ignore[arg-type]
        if not subject.can(calls[0]):
            continue
        alone, before, after = (
            _answer(subject, Question("", call, FORWARD, lambda s, c: s(c)), call.inputs) for call in calls
        )
        if alone is None or before is None or after is None or not all(map(_equal, before, after)):
            continue
        right = zip(alone, subject.expected(calls[0]), strict=True)
        if all((abs(y - expected) <= bound).all() for y, (expected, bound) in right):
            return True
    return False


def recalls(fresh: Callable[[], Subject], sizes: Sizes) -> tuple[str, ...]:
    """Return in words which calls change the results of later calls, for a function that had small calls only.

    A small call is repeated after each other call. The results have to agree within twice the bound.

    Args:
        fresh: returns the subject, without state that belongs to a module.
        sizes: the extents of most calls.
    """
    subject = fresh()
    try:
        small = subject.draw(sizes)
        bounds = [bound for _, bound in subject.expected(small)]
        first = [exact(y) for y in subject(_copy(small))]
    except Exception:  # the laws will say so
        return ()
    found = []
    far = 100_001 if subject.convention.computes_cosines else 4099
    others: dict[str, dict[str, Any]] = {
        "a longer call in bfloat16": {"tokens": 8 * sizes.tokens, "dtype": torch.bfloat16},
        "a call at larger positions": {"offsets": far},
        "a call with another factor of the tables": {"factor": 1.5},
        "a call with a longer sequence": {"tokens": 8 * sizes.tokens},
    }
    for words, where in others.items():
        extents = replace(sizes, tokens=where.pop("tokens", sizes.tokens))
        try:
            fresh()(subject.draw(extents, seed=3, **where))
            now = [exact(y) for y in fresh()(_copy(small))]
        except Exception:
            continue
        apart = zip(first, now, bounds, strict=True)
        if any((abs(one - other) > 2 * bound).any() for one, other, bound in apart):
            found.append(f"{words} changes the results of every later call: the function keeps something of it")
            break
    return tuple(found)


def _copy(case: Case) -> Case:
    return replace(case, inputs=tuple(map(copied, case.inputs)))


def _answer(subject: Subject, question: Question, given) -> Answers:
    given = tuple(given)
    case = question.case
    case = replace(case, cotangents=given) if question.kind == GRADIENT else replace(case, inputs=given)
    try:
        answer = replace(question, case=case).answer(subject)
    except NotApplicable:
        return None
    return None if isinstance(answer, str) else answer


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(((one == other) | (np.isnan(one) & np.isnan(other))).all())


def _nonlinear(subject: Subject, question: Question, given, first) -> Iterator[str]:
    """Yield where a linear map is contradicted.

    A power of two scales every rounding, and a sign changes none. So twice the input gives twice the result exactly.
    """
    said = _named(question)
    for factor, words in ((2.0, "twice the input does not give twice the result"),
                          (-1.0, "minus the input does not give minus the result")):  # fmt: skip
        scaled = _answer(subject, question, [_times(x, factor) for x in given])
        if scaled is None:
            continue
        for name, y, other in zip(said, first, scaled, strict=True):
            off = abs(other - factor * y)
            if np.nanmax(off, initial=0) > 0:
                yield f"{name} is not linear: {words}; the largest difference is {float(np.nanmax(off)):.3g}"


def _named(question: Question) -> tuple[str, ...]:
    return tuple(f"the gradient of {n}" if question.kind == GRADIENT else n for n in names(question.case))


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor times a factor, with the same strides: the layout in memory is no part of a linear map."""
    return copied(unexpanded(x)).mul_(factor).expand(x.shape)


def _mixing(subject: Subject, question: Question, given, first) -> Iterator[str]:
    """Yield which results change although neither the own input nor the own sequence, token or head changes."""
    said = _named(question)
    if any(0 in x.stride() for x in given):  # an expanded tensor cannot change in one place
        return
    for source, x in enumerate(given):
        for axis, noun in AXES.items():
            reached: dict[int, set[int]] = {}
            across = set()
            for index in range(x.shape[axis]):
                changed = _times(x, 1.0)
                part = changed.select(axis, index)
                part.copy_(part.flip(-1) + 1)
                answer = _answer(subject, question, [changed if i == source else v for i, v in enumerate(given)])
                if answer is None:
                    return
                for which, (y, other) in enumerate(zip(first, answer, strict=True)):
                    differs = (y != other) & ~(np.isnan(y) & np.isnan(other))
                    hit = np.flatnonzero(differs.any(axis=tuple(k for k in range(4) if k != axis)))
                    if which != source and len(hit):
                        across.add(which)
                    if which == source:
                        reached[index] = {int(i) for i in hit} - {index}
            if axis == 0:
                yield from (f"{said[which]} depends on {said[source]}" for which in sorted(across))
            others = {index: sorted(hit) for index, hit in reached.items() if hit}
            if others:
                first_index, changed_too = next(iter(others.items()))
                yield (f"{said[source]} mixes {noun}s: {noun} {first_index} changes "
                       f"{noun}{'s' * (len(changed_too) > 1)} {', '.join(map(str, changed_too))}")  # fmt: skip
