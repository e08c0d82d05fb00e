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


def right_with(declaration: Declaration, broken: Sequence[Law], subject: Callable[[Declaration], Subject]) -> str:
    """Return the options of a declaration under which every broken law holds; empty if none of those tried is one.

    Args:
        declaration: the declaration that the function broke.
        broken: the laws that do not hold, the definition first.
        subject: returns the function as the subject of a declaration, without state of earlier calls.
    """
    for words, other in _others(declaration, subject(declaration).convention):
        if all(_holds(law, subject(other), other) for law in broken):
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


def _holds(law: Law, subject: Subject, declaration: Declaration) -> bool:
    try:
        compared = law.compare(subject, declaration.sizes)
        return all((found.excess <= 1).all() for found in compared if isinstance(found, Comparison))
    except Noted:
        return True
    except NotApplicable:
        return law.name != "definition"
    except Exception:  # another call than the function takes
        return False
