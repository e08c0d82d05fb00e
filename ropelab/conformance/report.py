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
from ropelab.conformance.identify import Identification
from ropelab.conformance.markdown import markdown
from ropelab.conformance.result import Result
from ropelab.conformance.words import failure

VERDICTS = ("right", "wrong", "not judged")
"""The verdict of all laws together. It is "not judged" if no law is known to fail, and either nothing was compared with
the definition or the run ended before the last law."""


FORMAT = 1
"""The version of the format of a report as JSON. A new key keeps the version; a key that changes or goes raises it."""


class ConformanceError(AssertionError):
    """A function does not conform: a law does not hold, or nothing was compared with the definition."""


@dataclass(frozen=True)
class Report:
    """The outcome of all laws.

    Attributes:
        about: the declaration of the function, name by name.
        results: the result of each law, in the order of `LAWS`.
        diagnosis: the faults of the catalogue that explain the failures, the best explanation first.
        history: which calls change the results of later calls, in words.
        measuring: measures the deviations of the function; None if nobody wants to know them.
    """

    about: dict[str, Any]
    results: tuple[Result, ...]
    diagnosis: tuple[Any, ...] = field(default=())
    history: tuple[str, ...] = field(default=())
    measuring: Callable[[], Identification] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return text(self)

    @cached_property
    def identification(self) -> Identification | None:
        """The measured deviations of a wrong function; None if it is not wrong or nobody wants to know.

        The first use of the attribute calls the function many times, for at most 10 s of CPU time.
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
        results = [result.as_dict() for result in self.results]
        measured = None if self.identification is None else self.identification.as_dict()
        return as_dict(self.verdict, self.about, results, list(map(str, self.diagnosis)), identification=measured)

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
    diagnosis: Sequence[str],
    stopped: str = "",
    identification: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a report in the format of ``report.schema.json``, a JSON Schema beside this file.

    Args:
        verdict: one of ``VERDICTS``.
        about: the declaration of the function, name by name.
        results: `Result.as_dict` of each law.
        diagnosis: a line for each fault.
        stopped: why the run ended early; empty if it did not.
        identification: `Identification.as_dict`; None if the function was not measured.
    """
    found: dict[str, Any] = {"format": FORMAT, "versions": versions()}
    found |= {"passed": verdict == "right", "verdict": verdict, "stopped": stopped}
    found |= {"about": {name: str(value) for name, value in about.items()}}
    return found | {"results": list(results), "diagnosis": list(diagnosis), "identification": identification}


def versions(*others: str) -> dict[str, str]:
    """Return the versions of ropelab, of torch and of those other packages that are installed."""
    found = {"ropelab": __version__, "torch": torch.__version__}
    return found | {name: metadata.version(name) for name in others if find_spec(name) is not None}


def text(report: Report) -> str:
    """Return every law that does not hold, with its counterexample, and the diagnosis: plain text, several lines."""
    if report.passed:
        return f"{sum(result.status == 'pass' for result in report.results)} laws hold"
    if report.verdict == "not judged":
        return f"nothing was compared with the definition: {why_not_judged([r.as_dict() for r in report.results])}"
    measured = () if report.identification is None else (identification(report.identification),)
    return "\n\n".join((*(failure(r) for r in report.results if r.failed), diagnosis(report), *measured))


def why_not_judged(results: Sequence[Mapping[str, Any]]) -> str:
    """Return why nothing was compared with the definition, and which laws hold all the same.

    Args:
        results: `Result.as_dict` of each law; none of them failed.
    """
    held = [result["law"] for result in results if result["status"] == "pass" and result["law"] != "bad_input"]
    done = f"functions that do not rotate keep these laws, too: {', '.join(held)}" if held else ""
    reasons = [result["message"] for result in results if result["status"] == "not applicable"]
    return "; ".join(filter(None, (*reasons[:1], done)))


def diagnosis(report: Report) -> str:
    """Return the faults of the catalogue that explain the failures, in a line each."""
    if not report.diagnosis:
        return "Diagnosis: no fault of the catalogue does the same on these inputs."
    lines = (f"  - {line}" for line in report.diagnosis)
    return "\n".join(("Diagnosis: on these inputs it does what these known faults do:", *lines))


def identification(found: Identification) -> str:
    """Return the measured deviations of a wrong function, in a line each."""
    if found.silent:
        head = "Identification: the measured answers do not show the failure."
    elif not found.proven:
        head = "Identification: no description reproduces all answers of the function."
    else:
        head = "Identification: on fresh inputs, too, the function does this, within the derived bound:"
    return "\n".join((head, *(f"  - {line}" for line in found.words())))
