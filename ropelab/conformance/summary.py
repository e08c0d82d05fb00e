"""A report on one screen: the verdict, what the function does, the smallest example, and the repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ropelab.conformance.words import unequal

FEW = 3
"""The number of known faults, of facts and of laws that are named."""


def summary(found: Mapping[str, Any]) -> str:
    """Return what a report says about a wrong function, without the verdict; empty for any other function.

    Args:
        found: the report, in the format of ``report.schema.json``.
    """
    broken = [result for result in found["results"] if result["status"] in ("fail", "error")]
    if not broken:
        return ""
    raised = [result for result in broken if result["status"] == "error"]
    parts: list[list[str]] = []
    measured = found["identification"]
    if len(raised) < len(broken) or (measured is not None and (measured["proven"] or measured["facts"])):
        parts.append(list(_does(measured, broken)))
        faults = found["diagnosis"][:FEW]
        if faults:
            parts.append(["Known faults with the same answers:", *(f"  - {line}" for line in faults)])
    if raised:
        parts.append([f"It raises, during the law {raised[0]['law']}:", raised[0]["traceback"] or raised[0]["message"]])
    names = [result["law"] for result in broken]
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    parts.append([f"Broken: {', '.join(names[:FEW])}{more}; -v shows each with its counterexample."])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _does(measured: Mapping[str, Any] | None, broken: list[Mapping[str, Any]]) -> Iterator[str]:
    proven = measured is not None and measured["proven"]
    if measured is not None and proven:
        yield "The function does this, on fresh inputs as well:"
        yield from (f"  - {deviation['words']}" for deviation in measured["deviations"])
        yield from (f"  - {name} is right" for name in measured["right"])
    elif measured is not None and (measured["facts"] or measured["unexplained"]):
        yield "No description reproduces all answers of the function. It is known that"
        lines = [*measured["facts"], *measured["unexplained"]]
        yield from (f"  - {line}" for line in sorted(lines, key=lambda line: line.endswith(" is right"))[:FEW])
    else:
        first = next(result for result in broken if result["status"] == "fail")
        yield f"The function breaks the law {first['law']}: {first['statement']}"
    if measured is not None and proven and measured["example"]:
        yield f"Smallest example: {measured['example']}"
        silent = (r for r in broken if r["status"] == "fail" and r["counterexample"] is None and r["message"])
        yield from (f"{r['law']}: {r['message']}" for r in islice(silent, 1))  # no number shows why it does not hold
    else:
        yield from _counterexample(next((r for r in broken if r["counterexample"] is not None), broken[0]))
    if measured is not None and measured["repair"]:
        yield f"Repair: {measured['repair']}"


def _counterexample(result: Mapping[str, Any]) -> Iterator[str]:
    found = result["counterexample"]
    if found is None:
        yield f"It {result['message']}" if not result["message"] else result["message"]
        return
    where = ", ".join(f"{axis} {index}" for axis, index in found["where"].items())
    shapes = " and ".join(map(str, found["shapes"]))
    numbers = "{} in place of {}".format(*unequal(float(found["actual"]), float(found["expected"])))
    yield f"Smallest example: {found['what']} at {where} of {shapes}: {numbers}"
