"""The report on a function: the verdict of all laws, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from ropelab import __version__
from ropelab.conformance.markdown import markdown
from ropelab.conformance.result import Result
from ropelab.conformance.screen import Screen
from ropelab.conformance.words import failure

VERDICTS = ("right", "wrong", "not judged")
"""The verdict of all laws together. It is "not judged" if no law is known to fail, and either nothing was compared with
the definition or the run ended before the last law."""


FORMAT = 2
"""The version of the format of a report as JSON. A new key keeps the version; a key that changes or goes raises it."""


class ConformanceError(AssertionError):
    """A function does not conform: a law does not hold, or nothing was compared with the definition."""


@dataclass(frozen=True)
class Report:
    """The outcome of all laws.

    Attributes:
        about: the declaration of the function, name by name.
        results: the result of each law, in the order of `LAWS`.
        measuring: measures what a wrong function does; None if nobody wants to know.
    """

    about: dict[str, Any]
    results: tuple[Result, ...]
    measuring: Callable[[], Screen | None] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return text(self)

    @cached_property
    def screen(self) -> Screen | None:
        """What a wrong function does, measured; None for any other function.

        The first use of the attribute calls the function some hundred times.
        """
        return self.measuring() if self.failed and self.measuring is not None else None

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``: ``"wrong"`` if a law failed, ``"right"`` if a law compared a result with the definition.

        Laws of consistency alone do not make a rotation, because the identity keeps most of them.
        """
        return verdict(bool(self.failed), sum(result.compared for result in self.results))

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``"right"``: no law failed, and a law compared a result with the definition."""
        return self.verdict == "right"

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the laws that do not hold."""
        return tuple(result.law for result in self.results if result.failed)

    def __getitem__(self, law: str) -> Result:
        """Return the result of the law of this name."""
        return next(result for result in self.results if result.law == law)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the numbers in the tensors, in the format of ``report.schema.json``."""
        measured = None if self.screen is None else self.screen.as_dict()
        return as_dict(self.verdict, self.about, [result.as_dict() for result in self.results], screen=measured)

    def to_json(self) -> str:
        """Return `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def to_markdown(self) -> str:
        """Return the report as a text for an issue or a comment on a pull request."""
        return markdown(self.as_dict())

    def raise_if_failed(self) -> None:
        """Raise ConformanceError unless the verdict is ``"right"``; its message is ``text(report)``."""
        if not self.passed:
            raise ConformanceError(text(self))


def verdict(failed: bool, compared: int) -> str:
    """Return one of ``VERDICTS`` for a function that was held to all laws.

    Args:
        failed: whether a law does not hold.
        compared: the number of elements that were compared with the definition.
    """
    if failed:
        return "wrong"
    return "right" if compared else "not judged"


def as_dict(
    verdict: str,
    about: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    stopped: str = "",
    screen: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a report in the format of ``report.schema.json``, a JSON Schema beside this file.

    Args:
        verdict: one of ``VERDICTS``.
        about: the declaration of the function, name by name.
        results: `Result.as_dict` of each law.
        stopped: why the run ended early; empty if it did not.
        screen: `Screen.as_dict`; None if the function was not measured.
    """
    found: dict[str, Any] = {"format": FORMAT, "versions": versions()}
    found |= {"passed": verdict == "right", "verdict": verdict, "stopped": stopped}
    found |= {"about": {name: str(value) for name, value in about.items()}}
    return found | {"results": list(results), "screen": screen, "diagnosis": [], "identification": None}


def versions(*others: str) -> dict[str, str]:
    """Return the versions of ropelab, of torch and of those other packages that are installed."""
    found = {"ropelab": __version__, "torch": torch.__version__}
    return found | {name: metadata.version(name) for name in others if find_spec(name) is not None}


def text(report: Report) -> str:
    """Return what a wrong function does, and every law that it breaks with its counterexample, in several lines."""
    if report.passed:
        return f"{sum(result.status == 'pass' for result in report.results)} laws hold"
    if report.verdict == "not judged":
        return f"nothing was compared with the definition: {why_not_judged([r.as_dict() for r in report.results])}"
    measured = () if report.screen is None else (str(report.screen),)
    return "\n\n".join((*measured, *(failure(result) for result in report.results if result.failed)))


def why_not_judged(results: Sequence[Mapping[str, Any]]) -> str:
    """Return why nothing was compared with the definition, and which laws hold all the same.

    Args:
        results: `Result.as_dict` of each law; none of them failed.
    """
    held = [result["law"] for result in results if result["status"] == "pass" and result["law"] != "bad_input"]
    done = f"functions that do not rotate keep these laws, too: {', '.join(held)}" if held else ""
    reasons = [result["message"] for result in results if result["status"] == "not applicable"]
    return "; ".join(filter(None, (*reasons[:1], done)))
