"""Questions for functions whose ordinary answers are right: other dtypes, many tokens, later calls, far addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from ropelab.conformance import limits
from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.identify.deviation import Deviation
from ropelab.conformance.identify.evidence import Answer
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.questions import FORWARD, GRADIENT, Question, forward, gradient
from ropelab.conformance.law import names
from ropelab.conformance.laws.robustness import far_apart, long_call, odd_pairs, sampled, three_heads, wide_heads
from ropelab.conformance.subject import Subject
from ropelab.conformance.tensors import Tensors

BEYOND = 2**31
FAR = 2**30
"""The distance of two sequences in elements: the third begins at ``BEYOND``."""
FAR_POSITIONS = (259, 1027, 4099, 20_011, 32_771)
"""Positions that have too many bits for bfloat16, and the last three for float16 as well."""
SECONDS = 0.5
"""The expected time of a call with many tokens, above which it is not made."""
SAME = 3
"""The position of all tokens of a call that tells numbers of tokens from positions."""
MANY = 65_536
"""The number of blocks of an axis of a grid that 16 bits count."""
OWN = "every element of the result depends on its own token and head only"


def rare_questions(subject: Subject, sizes: Sizes, variant: int) -> Iterator[Question]:
    """Yield the questions; the arguments are those of `questions`."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype != subject.dtype:
            name = str(dtype).removeprefix("torch.")
            case = subject.draw(sizes, dtype=dtype, seed=variant)
            yield Question(f"tokens in {name}", case, FORWARD, forward)
            far = replace(sizes, tokens=5)
            at = torch.tensor(FAR_POSITIONS) + variant
            beyond_16_bits = subject.draw(far, dtype=dtype, positions=at, seed=variant)
            yield Question(f"large positions in {name}", beyond_16_bits, FORWARD, forward)
            if subject.convention.differentiable:
                yield Question(f"the gradient in {name}", subject.cotangents(case), GRADIENT, gradient)
    for tokens in dict.fromkeys((sizes.q_heads, sizes.k_heads, sizes.batch)):  # axes that have one extent
        case = subject.draw(replace(sizes, tokens=tokens), seed=variant)
        yield Question(f"{tokens} tokens", case, FORWARD, forward)
    for other in (three_heads(sizes), odd_pairs(subject, sizes), wide_heads(subject, sizes)):
        if other != sizes:
            yield Question(f"calls of {other}", subject.draw(other, seed=variant), FORWARD, forward)
    if subject.convention.looks_up:
        case = subject.draw(sizes, spare_rows=0, seed=variant)
        yield Question("tables that end with the last token", case, FORWARD, forward)
    case, after = subject.draw(sizes, seed=variant), subject.draw(sizes, seed=variant + 7)
    if not subject.in_place:
        yield Question("a call, read after the next call", case, FORWARD, _handed_over(after), after=after)
    for count in sorted({128, *sizes.token_counts, MANY}):
        try:
            long = long_call(subject, sizes, count + 1 + variant, SECONDS)
        except NotApplicable:
            continue
        yield _long(subject, subject.draw(long, seed=variant))
        if count < MANY:
            yield from same_position(subject, long)
    case = subject.draw(replace(sizes, batch=3), dtype=torch.bfloat16, seed=variant)
    yield Question(f"sequences {FAR} elements apart in memory", case, FORWARD, _far)


def broken_questions(cases: Iterable[Case]) -> Iterator[Question]:
    """Yield the calls that broke a law; a call with cotangents also asks for their gradients."""
    for case in cases:
        shapes = " and ".join(str(list(x.shape)) for x in case.inputs)
        if case.cotangents:
            yield Question(f"the gradient for inputs {shapes}", case, GRADIENT, gradient)
        yield Question(f"inputs {shapes}", case, FORWARD, forward)


def longest_of_right(
    answers: list[Answer], subject: Subject, wrong: list[tuple[Answer, np.ndarray]]
) -> tuple[int, str] | None:
    """Return the largest number of tokens of a call whose results are right, if only longer calls are wrong.

    Returns:
        The number for the heads of the first wrong call, and what the limit counts in words; None if short calls are
        wrong, or calls cannot be made.
    """
    failing = {id(answer) for answer, _ in wrong}
    short = [a for a, _ in wrong if not a.question.tokens]
    lengths = sorted({a.question.tokens for a, _ in wrong})
    if short or not lengths:
        return None
    right = [max(a.question.tokens, a.question.case.shape[1]) for a in answers if id(a) not in failing]
    low, high = max((n for n in right if n < lengths[0]), default=1), lengths[0]
    which, sizes = {a.which for a, _ in wrong}, extents_of(wrong[0][0].question.case)

    def is_wrong(of: Sizes) -> bool | None:
        question = length_question(subject, of)
        try:
            values = question.answer(subject)
        except NotApplicable:
            return None
        found = (Answer(question, i, values if isinstance(values, str) else values[i]) for i in which)
        return any(answer.wrong(subject, ()).any() for answer in found)

    if is_wrong(replace(sizes, tokens=high)) is None:
        return None
    longest = limits.longest_right(lambda n: bool(is_wrong(replace(sizes, tokens=n))), low, high)
    case = answers[0].question.case
    known = limits.counts(names(case)[0], sequences="b" in subject.format(case), pair=subject.convention.pair)
    return longest, limits.limit_in_words(replace(sizes, tokens=longest), known, is_wrong)


def extents_of(case: Case) -> Sizes:
    """Return the extents of a call of one sequence."""
    heads = [x.shape[2] for x in case.inputs]
    return Sizes(1, case.shape[1], heads[0], heads[-1], case.inputs[0].shape[-1], case.rotary_dim)


def length_question(subject: Subject, sizes: Sizes) -> Question:
    """Return the question about some tokens of a call of some extents."""
    return _long(subject, subject.draw(sizes))


def same_position(subject: Subject, extents: Sizes) -> Iterator[Question]:
    """Yield the question about a call whose tokens all have one position: numbers of tokens are no positions."""
    case = subject.draw(extents, positions=torch.full((extents.tokens,), SAME))
    if subject.can(case):
        yield _long(subject, case)


def _long(subject: Subject, long: Case) -> Question:
    """Return the question about some tokens of a long case."""
    count = long.shape[1]
    at = sampled(count - 1)
    positions = at if long.positions is None else long.positions[at]
    few = replace(long, inputs=tuple(x[:, at].clone() for x in long.inputs), positions=positions)

    def ask(subject: Subject, case: Case) -> Tensors:
        inputs = tuple(x.clone() for x in long.inputs)
        for x, some in zip(inputs, case.inputs, strict=True):
            x[:, at] = some
        return tuple(y[:, at] for y in subject(replace(long, inputs=inputs)))

    name = f"some tokens of {count}" + (f", all at position {SAME}" if long.positions is not None else "")
    return Question(name, few, FORWARD, ask, tokens=count, numbers=tuple(at.tolist()))


def _handed_over(after: Case) -> Callable[[Subject, Case], Tensors]:
    """Return a function that reads the results of a call after another call."""

    def ask(subject: Subject, case: Case) -> Tensors:
        kept = subject.call(case, subject.arguments(case))
        subject(after)
        return tuple(y.clone() for y in kept)

    return ask


def _far(subject: Subject, case: Case) -> Tensors:
    far = replace(case, inputs=tuple(map(far_apart, case.inputs)))
    if not subject.in_place:
        return subject(far)
    subject.call(far, subject.arguments(far))
    return tuple(x.contiguous().clone() for x in far.inputs)


def beyond() -> Deviation:
    """Return the deviation of a function whose addresses have 32 bits: it reads nothing beyond, and takes 0."""

    def change(plan: Plan) -> None:
        if "elements apart" in plan.question.name:
            batch, tokens, heads, width = plan.shape
            own = np.arange(batch * tokens * heads * width).reshape(plan.shape)
            own = own + sum(x.numel() for x in plan.question.case.inputs[: plan.which])
            plan.source = np.where(plan.batch * FAR >= BEYOND, -1, own)

    return Deviation("addresses", "takes 0 for elements whose address is 2**31 or more", OWN, change,
                     {"most_elements": BEYOND})  # fmt: skip
