"""Change the call of a function so that a description's deviations cancel, and hold it to laws."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.convention import Arguments, Convention
from ropelab.conformance.identify.deviation import Deviation
from ropelab.conformance.identify.evidence import Evidence
from ropelab.conformance.identify.mended import (
    Way,
    apart,
    copies,
    gradient_by_inverse,
    mended,
    outside_autocast,
    tabled,
    without_tf32,
)
from ropelab.conformance.laws import LAWS
from ropelab.conformance.subject import Subject

PROOF = ("definition", "offsets", "isometry", "adjoint")
"""The laws that a repaired function is held to."""
SECONDS = 5.0
"""The limit of CPU time of the questions to a repaired function."""


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
    """A convention that makes the calls of another convention for a changed case."""

    def __init__(self, original: Convention, change: Callable[[Case], Case]):
        self.original, self.change = original, change

    def __getattribute__(self, name: str) -> Any:
        own = ("original", "change", "translate", "__class__", "__dict__")
        return object.__getattribute__(self, name) if name in own else getattr(self.original, name)

    def translate(self, implementation, case: Case) -> Arguments:
        """Return the arguments of the changed case."""
        return self.original.translate(implementation, self.change(case))


def repaired(subject: Subject, sizes: Sizes, description: tuple[Deviation, ...]) -> Repair | None:
    """Return a change that makes the function right in all questions and under ``PROOF``; None if none was found."""
    found = _repaired(subject, description)
    if found is None:
        return None
    words, fixed = found
    kept = []
    for name in PROOF:
        status = _status(name, fixed, sizes)
        if status not in ("pass", "not applicable"):
            return None
        kept += [name] if status == "pass" else []
    if "definition" not in kept:
        return None
    asked = Evidence(fixed, sizes, time.thread_time() + SECONDS, variant=1)
    return None if asked.wrong(()) else Repair(words, tuple(kept))


def _repaired(subject: Subject, description: tuple[Deviation, ...]) -> tuple[str, Subject] | None:
    """Return the words of a repair and the repaired subject."""
    if all(deviation.scope.gradient for deviation in description):
        words = "let the backward call the function itself on the cotangents, with minus the angle"
        return (words, mended(subject, gradient_by_inverse)) if "inverse" in subject.convention.expresses else None
    by_name: dict[str, list[Deviation]] = {}
    for deviation in description:
        by_name.setdefault(deviation.scope.name, []).append(deviation)
    if set(by_name) <= {"", "x"}:
        return _undone(subject, description)
    if "" in by_name or any(deviation.kind == "layout" for deviation in description):  # a call has one layout
        return None
    said, fixed = [], subject
    for name, deviations in by_name.items():
        own = _undone(subject, tuple(replace(d, scope=replace(d.scope, name="")) for d in deviations))
        if own is None:
            return None
        said.append(f"for {name} alone: {own[0]}")
        fixed = mended(fixed, apart(("q", "k").index(name), own[1]))
    return "; ".join(said), fixed


def _undone(subject: Subject, description: tuple[Deviation, ...]) -> tuple[str, Subject] | None:
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
    return " and ".join(words), fixed


def _undo(subject: Subject, deviation: Deviation) -> tuple[str, Subject, Callable[[Case], Case] | None] | None:
    scope, kind, parameters = deviation.scope, deviation.kind, deviation.parameters
    if kind == "inputs" and subject.in_place:
        return None
    if kind == "inputs":
        return "pass copies of the inputs", mended(subject, copies), None
    if scope.words in WAYS and not scope.gradient:
        words, way = WAYS[scope.words]
        return words, mended(subject, way), None
    if scope.words or scope.gradient:
        return None
    if not subject.convention.computes_cosines and (found := _tables(deviation)) is not None:
        words, change = found
        return words, tabled(subject, change), None
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
        negated = subject.convention.name == "plain"  # its caller negates positions for the inverse
        return (f"pass positions {'-' if offset > 0 else '+'} {abs(offset)}", subject,
                lambda c: _moved(c, offset if negated and c.inverse else -offset))  # fmt: skip
    if kind == "factor" and "factor" in parameters and "members" not in deviation.words:
        factor = parameters["factor"]
        if "sines" in deviation.words or "cosines" in deviation.words:
            return None
        return f"divide the tables by {factor:.6g}", subject, lambda c: replace(c, factor=c.factor / factor)
    if kind == "frequencies" and "base" in parameters and parameters["multiple"] == 1:
        return f"declare base={parameters['base']:g}", replace(subject, base=parameters["base"]), None
    return None


WAYS: dict[str, tuple[str, Way]] = {
    "under autocast": ("call the function outside autocast", outside_autocast),
    "where TF32 is allowed": ("forbid TF32 around the call", without_tf32),
}
"""Circumstances -> a way to call the function without them, in words and as a function."""


def _tables(deviation: Deviation):
    """Return the change of the tables that undoes a deviation, in words and as a function; None if there is none."""
    kind, parameters = deviation.kind, deviation.parameters
    if kind == "factor" and "has sines" in deviation.words:
        factor = parameters["factor"]
        return f"divide the sines by {factor:.6g}", lambda cos, sin: (cos, sin / factor)
    if kind == "factor" and "has cosines" in deviation.words:
        factor = parameters["factor"]
        return f"divide the cosines by {factor:.6g}", lambda cos, sin: (cos / factor, sin)
    if kind == "tables swapped":
        return "swap cosines and sines", lambda cos, sin: (sin, cos)
    if kind == "order of frequencies" and parameters.get("order") == "reverse":
        return "reverse the columns of the tables", lambda cos, sin: (cos.flip(-1), sin.flip(-1))
    if kind == "order of frequencies" and "swaps" in deviation.words:
        return "swap the halves of the tables' columns", lambda cos, sin: tuple(
            t.roll(t.shape[-1] // 2, -1) for t in (cos, sin)
        )
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
