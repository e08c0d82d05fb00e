"""Find another declaration under which a function is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ropelab.conformance.case import NotApplicable, Noted
from ropelab.conformance.declared import Declaration
from ropelab.conformance.law import Comparison, Law
from ropelab.conformance.subject import Subject
from ropelab.layout.pairing import LAYOUTS

COLUMNS = "feature_columns"
"""The law about tables whose two columns of a pair differ."""


def right_with(declaration: Declaration, broken: Sequence[Law], subject: Callable[[Declaration], Subject]) -> str:
    """Return the options of a declaration under which every broken law holds; empty if none of those tried is one.

    Args:
        declaration: the declaration that the function broke.
        broken: the laws that do not hold and the definition, the fastest first.
        subject: returns the function as the subject of a declaration, without state of earlier calls.
    """
    asked: dict[str, int] = {}

    def held(law: Law, other: Declaration) -> bool:
        """Return whether a law holds, in as many comparisons: to be unable to express a wrong call is not right."""
        count, holds = _held(law, subject(other), other)
        if holds and law.name not in asked:
            asked[law.name] = _held(law, subject(declaration), declaration)[0]
        return holds and (count == asked[law.name] or (law.name == COLUMNS and not count))  # equal columns are declared

    for words, other in _others(declaration, subject(declaration).convention):
        if all(held(law, other) for law in broken):
            return words
    return ""


def _others(declaration: Declaration, kind: Any) -> Iterator[tuple[str, Declaration]]:
    claims, kept = declaration.claims, declaration.kept

    def claimed(**changed: Any) -> Declaration:
        return replace(declaration, claims=claims | changed)

    signs = {True: "reversed", False: "standard"}
    layouts = {f"--layout {layout}": {"layout": layout, "out_layout": layout} for layout in LAYOUTS}
    yield f"--sign {signs[not claims['reversed']]}", claimed(reversed=not claims["reversed"])
    for words, both in layouts.items():
        if claims["layout"] != both["layout"] or claims["out_layout"] != both["out_layout"]:
            yield words, claimed(**both)
            yield f"{words} --sign {signs[not claims['reversed']]}", claimed(**both, reversed=not claims["reversed"])
    for layout in LAYOUTS:
        if layout != claims["out_layout"]:
            yield f"--out-layout {layout}", claimed(out_layout=layout)
    for columns in kind.columns:
        if kept.get("columns") != columns:
            yield f"--columns {columns}", replace(declaration, kept=kept | {"columns": columns})
    for seq_format in kind.seq_formats:
        if seq_format != claims["seq_format"]:
            yield f"--seq-format {seq_format}", claimed(seq_format=seq_format)
    maths = "wide" if claims["narrow"] else "narrow"
    yield f"--maths {maths}", claimed(narrow=not claims["narrow"])


def _held(law: Law, subject: Subject, declaration: Declaration) -> tuple[int, bool]:
    """Return how many comparisons a law makes, up to an exception, and whether it holds."""
    count, holds = 0, True
    try:
        for found in law.compare(subject, declaration.sizes):
            if isinstance(found, Comparison):
                count, holds = count + 1, holds and bool((found.excess <= 1).all())
    except (Noted, NotApplicable):
        pass
    except Exception:  # another call than the function takes
        holds = False
    return count, holds
