"""Find from which columns a function reads its cosines and sines, where tables have a column for each feature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Case, Sizes
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.vocabulary import PAIR
from ropelab.conformance.law import names
from ropelab.conformance.laws.algebra import by_feature, others, told_by_feature
from ropelab.conformance.subject import Subject, fill
from ropelab.layout.pairing import pairs

Rule = Callable[[np.ndarray, int], np.ndarray]
"""Returns the column that member 0 or 1 of each pair reads, from the columns ``[2, R/2]`` of all pairs."""

RULES: dict[str, Rule] = {
    "": lambda own, member: own[member],
    "the column of the pair's first feature": lambda own, member: own[0],
    "the column of the pair's second feature": lambda own, member: own[1],
    "the column of the pair's other feature": lambda own, member: own[1 - member],
    "column i for pair i": lambda own, member: np.arange(own.shape[1]),
    "column 2i for pair i": lambda own, member: 2 * np.arange(own.shape[1]),
}


def columns_read(subject: Subject, sizes: Sizes) -> tuple[Deviation, ...]:
    """Return a deviation for each input that reads other columns; none if no rule reproduces the results of an input.

    The law `feature_columns` does not hold for the function, and all other laws do.
    """
    case = subject.draw(replace(sizes, batch=1, tokens=64, q_heads=1, k_heads=1), seed=7)
    other = others(subject)
    tables = []
    for columns in list(zip(subject.cosines(case), other.cosines(case), strict=True))[:2]:
        tables.append(np.empty((case.shape[1], case.rotary_dim), columns[0].dtype))
        fill(tables[-1], case.rotary_dim, subject.out_layout, tuple(table[0, :, 0] for table in columns))
    outputs, told = by_feature(subject, case), told_by_feature(subject, case)
    found: list[Deviation | None] = []
    for name, x, y, (right, _) in zip(names(case), case.inputs, outputs, told, strict=True):
        bound = np.add(*(one.expected(case)[len(found)][1] for one in (subject, other)))
        if (abs(exact(y) - right) <= bound).all():
            found.append(None)
            continue
        rules = ((c, s) for c in RULES for s in RULES)
        fits = (both for both in rules if _near(subject, case, (exact(x), exact(y), bound), tables, both))
        if (both := next(fits, None)) is None:
            return ()
        reads = [f"{table} from {rule}" for table, rule in zip(("cosines", "sines"), both, strict=True) if rule]
        words = f"takes {' and '.join(reads)}, where tables have a column for each feature"
        found.append(Deviation("columns", words, PAIR, lambda plan: None, {"columns": list(both)}, Scope(name)))
    wrong = [deviation for deviation in found if deviation is not None]
    alike = len(wrong) == len(found) and len({deviation.words for deviation in wrong}) == 1
    return (replace(wrong[0], scope=Scope()),) if alike else tuple(wrong)


def _near(subject: Subject, case: Case, given, tables, rules: tuple[str, str]) -> bool:
    x, y, bound = given
    rotates = slice(0, case.rotary_dim)
    own = np.stack(pairs(torch.arange(case.rotary_dim), subject.out_layout))
    before = pairs(x[..., rotates], subject.layout)
    after, near = (pairs(values[..., rotates], subject.out_layout) for values in (y, bound))
    for member, sign in ((0, -1), (1, 1)):
        c, s = (table[:, RULES[rule](own, member)][:, None] for table, rule in zip(tables, rules, strict=True))
        if not (abs(before[member] * c + sign * before[1 - member] * s - after[member]) <= near[member]).all():
            return False
    return True
