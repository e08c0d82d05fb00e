"""Find deviations that only large tensors show: many tokens, and addresses beyond 32 bits.

The calls take time or address space. So they are made if no ordinary call deviates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from ropelab.conformance.case import NotApplicable, Sizes
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.evidence import Answer
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.questions import FORWARD, Question
from ropelab.conformance.laws.numerics import require_quick
from ropelab.conformance.laws.robustness import far_apart
from ropelab.conformance.subject import Subject

MANY = 65_537
"""One more than the blocks of an axis of a grid that 16 bits count."""
BEYOND = 2**31
FAR = 2**30
"""The distance of two sequences in elements: the third begins at ``BEYOND``."""
SECONDS = 3.0
"""The expected time of a call with many tokens, above which it is not made."""
ALL = "every call that the convention expresses has a result"
OWN = "every element of the result depends on its own token and head only"


def rarely(subject: Subject, sizes: Sizes) -> tuple[tuple[Deviation, ...], list[tuple[Answer, np.ndarray]]]:
    """Return the deviations of calls on large tensors, proven on fresh inputs, and the wrong answers left over."""
    wrong = _wrong(subject, sizes, 0, ())
    if not wrong:
        return (), []
    found: list[Deviation] = [_beyond()]
    for answer, _ in wrong:
        if isinstance(answer.values, str):
            found.insert(0, _too_many(subject, answer))
    description = tuple(d for d in found if len(_wrong(subject, sizes, 0, (d,))) < len(wrong))
    left = _wrong(subject, sizes, 0, description) or _wrong(subject, sizes, 1, description)
    return ((), left) if left else (description, [])


def _wrong(subject: Subject, sizes: Sizes, variant: int, description: tuple[Deviation, ...]):
    found = []
    for question in _questions(subject, sizes, variant):
        try:
            values = question.answer(subject)
        except NotApplicable:
            continue
        for which in range(len(question.case.inputs)):
            answer = Answer(question, which, values if isinstance(values, str) else values[which])
            elements = answer.wrong(subject, description)
            if elements.any():
                found.append((answer, elements))
    return found


def _questions(subject: Subject, sizes: Sizes, variant: int) -> Iterator[Question]:
    many = replace(sizes, batch=1, tokens=MANY + variant, q_heads=1, k_heads=1)
    try:
        require_quick(subject, many, SECONDS)
        yield Question(f"{many.tokens} tokens", subject.draw(many, seed=variant), FORWARD, lambda s, c: s(c))
    except NotApplicable:
        pass
    case = subject.draw(replace(sizes, batch=3), dtype=torch.bfloat16, seed=variant)
    yield Question(f"sequences {FAR} elements apart in memory", case, FORWARD, _far)


def _far(subject: Subject, case):
    far = replace(case, inputs=tuple(map(far_apart, case.inputs)))
    if not subject.in_place:
        return subject(far)
    subject.call(far, subject.arguments(far))
    return tuple(x.contiguous().clone() for x in far.inputs)


def _too_many(subject: Subject, answer: Answer) -> Deviation:
    """Return the deviation of a function that raises for more than a number of tokens; halving finds the number."""
    case, name = answer.question.case, str(answer.values)
    right, wrong = 1, case.shape[1]
    while wrong - right > 1:
        middle = (right + wrong) // 2
        short = replace(case, inputs=tuple(x[:, :middle].clone() for x in case.inputs))
        raises = isinstance(replace(answer.question, case=short).answer(subject), str)
        right, wrong = (right, middle) if raises else (middle, wrong)
    scope = Scope(words=f"in sequences of more than {right} tokens", asked=lambda q, i: q.case.shape[1] > right)
    return Deviation("exception", f"raises {name}", ALL, lambda plan: setattr(plan, "raises", name),
                     {"exception": name, "most_tokens": right}, scope)  # fmt: skip


def _beyond() -> Deviation:
    """Return the deviation of a function whose addresses have 32 bits: it reads nothing beyond, and takes 0."""

    def change(plan: Plan) -> None:
        if "elements apart" in plan.question.name:
            batch, tokens, heads, width = plan.shape
            own = np.arange(batch * tokens * heads * width).reshape(plan.shape)
            own = own + sum(x.numel() for x in plan.question.case.inputs[: plan.which])
            plan.source = np.where(plan.batch * FAR >= BEYOND, -1, own)

    return Deviation("addresses", "takes 0 for elements whose address is 2**31 or more", OWN, change,
                     {"most_elements": BEYOND})  # fmt: skip
