"""A report in words: what an author needs to fix the bug."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ropelab.conformance.case import Case
from ropelab.conformance.result import Counterexample, Report, Result

FEW = 16
"""Tensors of up to so many numbers are printed."""


def text(report: Report) -> str:
    """Every law that does not hold, with its counterexample, and the diagnosis. Plain text, several lines."""
    if report.passed:
        return f"{_count(report)} laws hold"
    if report.verdict == "not judged":
        return f"nothing was compared with the definition: {why_not_judged([r.as_dict() for r in report.results])}"
    return "\n\n".join((*(failure(r) for r in report.results if r.failed), diagnosis(report)))


def why_not_judged(results: Sequence[Mapping[str, Any]]) -> str:
    """Why nothing was compared with the definition, and what was done instead.

    Args:
        results: none of which failed, as `Result.as_dict` has them.
    """
    held = [result["law"] for result in results if result["status"] == "pass"]
    done = f"all that holds is {', '.join(held)}, which also functions keep that do not rotate" if held else ""
    reasons = [result["message"] for result in results if result["status"] == "not applicable"]
    return "; ".join(filter(None, (*reasons[:1], done)))


def diagnosis(report: Report) -> str:
    """The faults of the catalogue that explain the failures, a line each."""
    if not report.diagnosis:
        return "Diagnosis: no fault of the catalogue does the same on these inputs."
    return "\n".join(("Diagnosis: on these inputs it does what these known faults do:", *_bullets(report.diagnosis)))


def failure(result: Result) -> str:
    """One law that does not hold."""
    lines = [f"{result.law}: {result.statement}"]
    if result.message:
        lines.append(f"  {'raised' if result.status == 'error' else 'but'} {result.message}")
    if result.counterexample is not None:
        lines += [f"  {name:<9} {value}" for name, value in _facts(result.counterexample)]
    return "\n".join(lines)


def _facts(found: Counterexample) -> list[tuple[str, str]]:
    case = found.case
    where = ", ".join(f"{axis} {index}" for axis, index in found.where.items())
    apart = f"{abs(found.actual - found.expected):.3g} apart, at most {found.bound:.3g} allowed"
    facts = [
        ("smallest", f"{found.sizes}: {_asked(case)}"),
        ("where", f"{found.what} at {where}"),
        ("expected", f"{found.expected:.9g}"),
        ("actual", f"{found.actual:.9g} ({apart})"),
    ]
    if found.pattern:
        facts.append(("pattern", f"{found.pattern} (in the first failing input)"))
    if sum(x.numel() for x in case.inputs) <= FEW:
        facts += [("input", _numbers(x)) for x in case.inputs]
        facts += [("cotangent", _numbers(g)) for g in case.cotangents]
    return facts


def _asked(case: Case) -> str:
    """What the call was about."""
    parts = ["shapes " + " and ".join(str(list(x.shape)) for x in case.inputs)]
    parts.append(str(case.inputs[0].dtype).removeprefix("torch."))
    positions = case.token_positions()
    positions = positions[0] if len(positions) and (positions == positions[0]).all() else positions
    if positions.numel() <= FEW:
        parts.append(f"positions {positions.tolist()}")
    parts += [f"documents {case.lengths}"] if case.lengths is not None else []
    parts += [f"rank {case.shard[1]} of {case.shard[0]}"] if case.shard else []
    parts += ["inverse"] if case.inverse else []
    parts += [f"tables times {case.factor}"] if case.factor != 1 else []
    parts += [f"strides {x.stride()}" for x in case.inputs if not x.is_contiguous()]
    return ", ".join(parts)


def _numbers(x: torch.Tensor) -> str:
    return str([round(value, 4) for value in x.detach().double().flatten().tolist()])


def _bullets(lines) -> list[str]:
    return [f"  - {line}" for line in lines]


def _count(report: Report) -> int:
    return sum(result.status == "pass" for result in report.results)
