"""A report as JSON, and on one screen: what a wrong function does, and what it raises."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from ropelab.command.vocabulary import FAMILY

VERDICTS = ("right", "wrong", "not judged")
"""The verdict of all laws together. It is "not judged" if no law is known to fail, and either nothing was compared with
the definition or the run ended before the last law."""
FORMAT = 2
"""The version of the format of a report as JSON. A new key keeps the version; a key that changes or goes raises it."""
NOTED = {"right": "Notes, although every documented call returns a correct result", "wrong": "Notes, besides"}
"""The heading of the notes, by the verdict."""
LINES = 21
"""The lines of a screen, which stand below a verdict."""
FEW = 3
"""The number of broken families that are named with their laws."""
PACKAGE = Path(__file__).parents[1]
LONGEST = 400
"""The number of characters of an exception's message that are told."""


def versions(*others: str) -> dict[str, str]:
    """Return the versions of ropelab, of torch and of those other packages that are installed."""
    ours = getattr(sys.modules["ropelab"], "__version__", None) or metadata.version("ropelab")
    found = {"ropelab": ours, "torch": metadata.version("torch")}
    return found | {name: metadata.version(name) for name in others if find_spec(name) is not None}


def verdict(results: Sequence[Mapping[str, Any]], stopped: str = "") -> str:
    """Return one of ``VERDICTS``. A run that ended early can prove a function wrong, but not right.

    Args:
        results: `Result.as_dict` of each law.
        stopped: why the run ended early; empty if it did not.
    """
    if failed(results):
        return "wrong"
    return "right" if not stopped and any(result["compared"] for result in results) else "not judged"


def failed(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the results of the laws that do not hold; a function that raises does not keep a law."""
    return [result for result in results if result["status"] in ("fail", "error")]


def as_dict(
    about: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    stopped: str = "",
    screen: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a report in the format of ``conformance/report.schema.json``, a JSON Schema.

    Args:
        about: the declaration of the function, name by name.
        results, stopped: as for `verdict`.
        screen: `Screen.as_dict`; None if the function was not measured.
    """
    said = verdict(results, stopped)
    found: dict[str, Any] = {"format": FORMAT, "versions": versions(), "passed": said == "right", "verdict": said}
    found |= {"stopped": stopped, "about": {name: str(value) for name, value in about.items()}}
    return found | {"results": list(results), "screen": screen, "diagnosis": [], "identification": None}


def why_not_judged(results: Sequence[Mapping[str, Any]]) -> str:
    """Return why nothing was compared with the definition, and which laws hold all the same."""
    held = [result["law"] for result in results if result["status"] == "pass" and result["law"] != "bad_input"]
    done = f"these laws hold, but they also hold for functions that do not rotate: {', '.join(held)}" if held else ""
    reasons = [result["message"] for result in results if result["status"] == "not applicable"]
    return "; ".join(filter(None, (*reasons[:1], done)))


def in_words(screen: Mapping[str, Any]) -> str:
    """Return a screen in lines, from its attributes by name."""
    otherwise = f"with {screen['declared']} the broken laws hold" if screen["declared"] else ""
    parts = [screen["law"], screen["smallest"], *screen["reading"], otherwise, *screen["calls"], screen["elements"]]
    parts += [*screen["positions"], *screen["matrices"], screen["form"]]
    return "\n".join([part for part in parts if part][:LINES])


def summary(results: Sequence[Mapping[str, Any]], screen: Mapping[str, Any] | None) -> str:
    """Return what a wrong function does, without the verdict; empty for any other function.

    Args:
        results: `Result.as_dict` of each law, with its failure in ``words``.
        screen: `Screen.as_dict`; None if the run ended before the function was measured.
    """
    broken = failed(results)
    parts: list[str] = []
    if wrong := [result for result in broken if result["status"] == "fail"]:
        parts.append(wrong[0]["words"] if screen is None else in_words(screen))
    if raised := [result for result in broken if result["status"] == "error"]:
        told = list(_raised(raised[0]["traceback"])) or [raised[0]["message"]]
        parts.append("\n".join((f"It raises, during the law {raised[0]['law']}:", *told)))
    families: dict[str, list[str]] = {}
    for result in broken:
        families.setdefault(FAMILY[result["law"]], []).append(result["law"])
    told = [f"{family} ({', '.join(laws)})" for family, laws in families.items()]
    told[FEW:] = [*families][FEW:]
    parts += [f"Broken: {', '.join(told)}; -v shows each with its counterexample."] if told else []
    return "\n\n".join(parts)


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
    """Return 2 for a file of the user, 1 for an installed package or this one, 0 for torch."""
    torch = find_spec("torch")
    if torch is not None and torch.origin and file.is_relative_to(Path(torch.origin).parent):
        return 0
    return 2 - (PACKAGE in file.parents or any(part in ("site-packages", "dist-packages") for part in file.parts))


def to_note(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the laws with something to note, and what; the exception that `summary` tells is there by its type."""
    raised = [_begins(result["message"]) for result in failed(results) if result["status"] == "error"][:1]
    found = []
    for law, said in ((result["law"], result["message"]) for result in results if result["status"] == "note"):
        before, _, error = said.partition(" (")
        found.append((law, f"{before} (the {_begins(error)[0]} above)" if error and _begins(error) in raised else said))
    return found


def _begins(message: str) -> tuple[str, str]:
    """Return the type of an exception and the beginning of its message, without extents and addresses."""
    kind, _, said = message.partition(": ")
    return kind, re.split(r"[\[\d]", said)[0]
