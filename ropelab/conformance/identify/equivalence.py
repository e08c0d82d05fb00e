"""Prove that two descriptions are the same function, on all inputs at all positions within a range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from ropelab.conformance.case import Sizes
from ropelab.conformance.identify.deviation import Deviation, planned
from ropelab.conformance.identify.outcome import outcome
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.questions import FORWARD, GRADIENT, INPUTS, Question, questions
from ropelab.conformance.subject import Subject

REACH = 1024
"""The range of positions, on both sides of 0, in which two descriptions are compared."""
SAME = 1e-9
"""Two matrix entries are the same if they differ by less. The comparison has 53 bits or more, and angles of up to
``REACH`` rad lose 10 of them; the smallest difference that a float32 can show is 6e-8."""
LARGE = {"most_tokens", "most_elements"}
"""The parameters of deviations of large tensors; see `ropelab.conformance.identify.rare`."""
RANDOM = 3
"""The number of random inputs for each call."""
NOT_LINEAR = ("input", "product", "output")
"""The intermediates whose rounding makes a function that is not linear; see `Plan`."""


def equivalent(
    subject: Subject, sizes: Sizes, first: tuple[Deviation, ...], second: tuple[Deviation, ...], reach: int = REACH
) -> bool:
    """Return whether two descriptions are the same function.

    A description without sums of other elements takes each head of the input from one place, and multiplies each pair
    by a 2 x 2 matrix. Place and matrix depend on the call, the position, the token, the head and the sequence. In two
    inputs all first, then all second members of pairs are 1: the answers are the columns of all matrices. In two more
    inputs these numbers are the number of the head instead of 1: equal answers come from the same places. So equal
    answers to the four, at every position in the range and in every kind of call, are equal answers to all inputs.

    Frequencies, angles and tables that are rounded are part of the matrices. Two descriptions that round inputs,
    products or results are the same function if they round the same of them to the same format, and the matrices are
    the same.

    A description with sums of other elements is linear, too, and has no such columns. It answers random inputs: linear
    maps that differ agree on a random input with probability 0.

    Args:
        subject: any function with the convention and the claims.
        sizes: the extents of the calls.
        first, second: the descriptions.
        reach: the positions from ``-reach`` to ``reach`` are compared, or from 0 on where no position is negative.

    Returns:
        True if the two are proven to be the same; False if they differ, or if the comparison proves nothing.
    """
    both = (first, second)
    if any(LARGE & d.parameters.keys() for description in both for d in description):
        return set(map(str, first)) == set(map(str, second))  # these calls are too small to show the deviations
    for question in _calls(subject, sizes, reach):
        for which in range(len(question.case.inputs)):
            plans = [planned(subject, question, which, description) for description in both]
            summed = any(p.wires is not None or p.source is not None or p.moved is not None for p in plans)
            if summed and any(p.in_turn or p.rounded.keys() & set(NOT_LINEAR) for p in plans):
                return False
            if len({(p.in_turn, *((what, p.rounded.get(what)) for what in NOT_LINEAR)) for p in plans}) > 1:
                return False
            for probe in _random(question) if summed else _probes(question):
                if not _same(*(_linear(subject, probe, which, description) for description in both)):
                    return False
    return True


def _linear(subject: Subject, question: Question, which: int, description: tuple[Deviation, ...]):
    """Return the answer of a description that rounds no input, product or result."""

    def made(number: int) -> Plan:
        plan = planned(subject, question, number, description)
        plan.rounded = {what: name for what, name in plan.rounded.items() if what not in NOT_LINEAR}
        return plan

    return outcome(made, which)


def _same(one, other) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and isinstance(other, str) and one == other
    y, z = one[0], other[0]
    size = np.maximum(1, np.maximum(abs(y), abs(z)))
    return bool(((abs(y - z) <= SAME * size) | (np.isnan(y) & np.isnan(z))).all())


def _calls(subject: Subject, sizes: Sizes, reach: int) -> Iterator[Question]:
    for variant in (0, 1):
        yield from (q for q in questions(subject, sizes, variant) if subject.can(q.case))
    one = replace(sizes, batch=1, tokens=1)
    for least in (-reach, 0):
        positions = torch.arange(least, reach + 1)
        case = subject.draw(replace(one, tokens=len(positions)), positions=positions)
        if not subject.can(case):
            case = subject.draw(replace(one, tokens=reach), offsets=0)
        case = subject.cotangents(case)
        yield Question("all positions", case, FORWARD, _never)
        yield Question("the gradient for all positions", case, GRADIENT, _never)


def _never(subject: Subject, case):
    raise AssertionError("only descriptions answer this question")


def _random(question: Question) -> Iterator[Question]:
    """Yield the question with random inputs in float64."""
    generator = torch.Generator().manual_seed(17)
    for _ in range(RANDOM):
        drawn = tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in question.case.inputs)
        yield replace(question, case=replace(question.case, inputs=drawn, cotangents=drawn))


def _probes(question: Question) -> Iterator[Question]:
    """Yield the question with inputs whose answers are the columns of all matrices."""
    case = question.case
    if question.kind not in (FORWARD, GRADIENT, INPUTS):
        yield question
        return
    for layout in range(4):  # each element of a pair in turn, in either layout
        for numbered in (False, True):
            filled = []
            for x in case.inputs:
                feature = torch.arange(x.shape[-1], device=x.device)
                half = case.rotary_dim // 2
                hit = (feature % 2 == layout, feature // max(half, 1) % 2 == layout - 2)[layout // 2].double()
                heads = torch.arange(1.0, x[..., 0].numel() + 1, dtype=torch.float64, device=x.device)
                heads = heads.view(*x.shape[:3], 1)
                filled.append((hit * heads if numbered else hit).expand(x.shape))
            yield replace(question, case=replace(case, inputs=tuple(filled), cotangents=tuple(filled)))
