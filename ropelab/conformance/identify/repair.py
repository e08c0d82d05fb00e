"""This file changes the call of a function so that a description's deviations cancel, and holds it to laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.convention import Arguments, Convention
from ropelab.conformance.identify.deviation import Deviation
from ropelab.conformance.laws import LAWS
from ropelab.conformance.subject import Subject

PROOF = ("definition", "offsets", "isometry", "adjoint")
"""The laws that a repaired function is held to."""


@dataclass(frozen=True)
class Repair:
    """A change of the call or of the declaration.

    Attributes:
        words: the change.
        laws: the laws that the function keeps with the change.
    """

    words: str
    laws: tuple[str, ...]


class Changed(Convention):
    """A convention whose calls are those of another convention for a changed case."""

    def __init__(self, original: Convention, change: Callable[[Case], Case]):
        self.original, self.change = original, change

    def __getattribute__(self, name: str) -> Any:
        own = ("original", "change", "translate", "__class__", "__dict__")
        return object.__getattribute__(self, name) if name in own else getattr(self.original, name)

    def translate(self, implementation, case: Case) -> Arguments:
        """Return the arguments of the changed case."""
        return self.original.translate(implementation, self.change(case))


def repaired(subject: Subject, sizes: Sizes, description: tuple[Deviation, ...]) -> Repair | None:
    """Return a change that makes the function keep the laws of ``PROOF``; None if none was found."""
    words, fixed, changes = [], subject, []
    for deviation in description:
        found = _undo(fixed, deviation)
        if found is None:
            return None
        words.append(found[0])
        fixed, change = found[1], found[2]
        changes += [change] if change is not None else []

    def change_all(case: Case) -> Case:
        for change in changes:
            case = change(case)
        return case

    if changes:
        fixed = replace(fixed, convention=Changed(fixed.convention, change_all))
    kept = []
    for name in PROOF:
        status = _status(name, fixed, sizes)
        if status not in ("pass", "not applicable"):
            return None
        kept += [name] if status == "pass" else []
    return Repair(" and ".join(words), tuple(kept)) if "definition" in kept else None


def _undo(subject: Subject, deviation: Deviation) -> tuple[str, Subject, Callable[[Case], Case] | None] | None:
    scope, kind, parameters = deviation.scope, deviation.kind, deviation.parameters
    if scope.words or scope.gradient or scope.name not in ("", "x"):
        return None
    if kind == "sign":
        other = "standard" if subject.reversed else "reversed"
        return f"negate the sines, or declare sign={other!r}", replace(subject, reversed=not subject.reversed), None
    if kind == "layout" and parameters["rotary_dim"] == 0:
        return None
    if kind == "layout":
        declared = replace(subject, layout=parameters["layout"], out_layout=parameters["out_layout"])
        return f"declare layout={parameters['layout']!r}, out_layout={parameters['out_layout']!r}", declared, None
    if kind == "offset" and float(parameters["offset"]).is_integer():
        offset = int(parameters["offset"])
        return f"pass positions {'-' if offset > 0 else '+'} {abs(offset)}", subject, lambda c: _moved(c, -offset)
    if kind == "factor" and "factor" in parameters and "members" not in deviation.words:
        factor = parameters["factor"]
        if "sines" in deviation.words or "cosines" in deviation.words:
            return None
        return f"divide the tables by {factor:.6g}", subject, lambda c: replace(c, factor=c.factor / factor)
    if kind == "frequencies" and "base" in parameters and parameters["multiple"] == 1:
        return f"declare base={parameters['base']:g}", replace(subject, base=parameters["base"]), None
    return None


def _moved(case: Case, by: int) -> Case:
    if case.lengths is not None or case.shard is not None:
        raise NotApplicable("the repair moves positions of dense sequences only")
    if case.positions is not None:
        return replace(case, positions=case.positions + by)
    if isinstance(case.offsets, tuple):
        return replace(case, offsets=tuple(start + by for start in case.offsets))
    return replace(case, offsets=case.offsets + by)


def _status(name: str, subject: Subject, sizes: Sizes) -> str:
    """Return the status of a law for a subject; see `Result`."""
    try:
        for comparison in LAWS[name].compare(subject, sizes):
            if not isinstance(comparison, str) and comparison.excess.max() > 1:
                return "fail"
    except NotApplicable:
        return "not applicable"
    except Exception:  # an exception of the function is a finding
        return "error"
    return "pass"
