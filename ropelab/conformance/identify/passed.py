"""Say what becomes of a result that passes by contract, such as v beside q and k that rotate."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Sizes
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.plain import plain
from ropelab.conformance.identify.read_off import NOUNS
from ropelab.conformance.projection_conventions import passing
from ropelab.conformance.subject import Subject
from ropelab.conformance.words import unequal

PASSES = "v is not rotated"


def alone(subject: Subject, part: str) -> Subject:
    """Return a subject whose result for k is k by itself, or the result that passes by itself."""
    convention = copy(subject.convention)
    convention.part = part
    return replace(subject, convention=convention)


def passed(subject: Subject, sizes: Sizes) -> tuple[Deviation, str] | None:
    """Return what a function does to the result that passes, and an example in words; None if it passes.

    The words hold for three calls, whose first tokens have different positions.
    """
    name = subject.convention.passes
    if not name:
        return None
    words: list[str] | None = None
    example = ""
    for seed, offset in enumerate((0, 7, 3)):
        case = subject.draw(replace(sizes, tokens=sizes.tokens + seed), seed=seed, offsets=offset)
        try:
            y = exact(alone(subject, name)(case)[1])
        except Exception:  # the laws say so
            return None
        given = exact(passing(case.inputs[1]))
        wrong = y != given
        if not wrong.any():
            return None
        right, bound = subject.expected(case, [given])[0]
        said = ["is rotated by the positions of its tokens"] * bool((abs(y - right) <= bound).all())
        k, near = subject.expected(case)[1]
        sources = [(name, given, np.zeros_like(given)), ("k", k, near)]
        said += list(plain(y, wrong, sources, {}, NOUNS, case.rotary_dim))
        words = said if words is None else [w for w in words if w in said]
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        actual, expected = unequal(float(y[at]), float(given[at]))
        count = f"{wrong.sum()} of {wrong.size} elements are wrong"
        example = f"{name} {list(y.shape)}: {count}, such as {list(at)}: {actual} in place of {expected}"
    found = words[0] if words else "is not as it came"
    return Deviation("passing", found, PASSES, lambda plan: None, scope=Scope(name)), example
