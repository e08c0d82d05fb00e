"""A report on one screen: what a wrong function does, and what it raises."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import torch

from ropelab.conformance.screen import in_words
from ropelab.conformance.words import unequal

FEW = 3
"""The number of laws that are named."""
LONGEST = 400
"""The number of characters of an exception's message that are told."""
TORCH = Path(torch.__file__).parent
"""The files of torch, whose frames lie between a law and a backward under test."""


def summary(found: Mapping[str, Any]) -> str:
    """Return what a report says about a wrong function, without the verdict; empty for any other function.

    Args:
        found: the report, in the format of ``report.schema.json``.
    """
    broken = [result for result in found["results"] if result["status"] in ("fail", "error")]
    if not broken:
        return ""
    parts: list[list[str]] = []
    failed = [result for result in broken if result["status"] == "fail"]
    if failed and found["screen"] is not None:
        parts.append([in_words(found["screen"])])
    elif failed:  # the run ended before the function was measured
        shown = next((result for result in failed if result["counterexample"] is not None), failed[0])
        parts.append([f"The function breaks the law {shown['law']}: {shown['statement']}", *_counterexample(shown)])
    if raised := [result for result in broken if result["status"] == "error"]:
        told = list(_raised(raised[0]["traceback"])) or [raised[0]["message"]]
        parts.append([f"It raises, during the law {raised[0]['law']}:", *told])
    names = [result["law"] for result in broken]
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    parts.append([f"Broken: {', '.join(names[:FEW])}{more}; -v shows each with its counterexample."])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _raised(traceback: str) -> Iterator[str]:
    """Yield the last frame of a traceback that is the user's, the end of the message's first paragraph, and the call.

    torch.compile tells the user's frame in the message only.
    """
    lines = traceback.splitlines()
    frames = [(n, found[1]) for n, line in enumerate(lines) if (found := re.match(r' *File "(.+)", line \d+', line))]
    if frames:
        at, _ = max(frames, key=lambda frame: (_owned(Path(frame[1])), frame[0]))
        yield from lines[at : at + 1 + lines[at + 1].startswith("    ")]
    message = list(dropwhile(lambda line: line.startswith("  "), lines))
    called = [line for line in lines if line.startswith("The call: ")]
    yield from [line[:LONGEST] for line in takewhile(bool, message) if line not in called][-1:]
    yield from called


def _owned(file: Path) -> int:
    """Return 2 for a file of the user, 1 for an installed package, 0 for torch."""
    if file.is_relative_to(TORCH):
        return 0
    return 2 - any(part in ("site-packages", "dist-packages") for part in file.parts)


def _counterexample(result: Mapping[str, Any]) -> Iterator[str]:
    found = result["counterexample"]
    if found is None:
        yield result["message"]
        return
    where = ", ".join(f"{axis} {index}" for axis, index in found["where"].items())
    shapes = " and ".join(map(str, found["shapes"]))
    numbers = "{} in place of {}".format(*unequal(float(found["actual"]), float(found["expected"])))
    yield f"Smallest example: {found['what']} at {where} of {shapes}: {numbers}"
    yield f"Wrong in the first failing call: {found['pattern']}"
