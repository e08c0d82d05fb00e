"""The report on a function: the verdict of all laws, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ropelab.command import summary
from ropelab.command.markdown import markdown
from ropelab.conformance.result import Result
from ropelab.conformance.screen import Screen
from ropelab.conformance.words import failure


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
        return summary.verdict([result.as_dict() for result in self.results])

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
        return summary.as_dict(self.about, [result.as_dict() for result in self.results], screen=measured)

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


def text(report: Report) -> str:
    """Return what a wrong function does, and every law that it breaks with its counterexample, in several lines."""
    if report.passed:
        return f"{sum(result.status == 'pass' for result in report.results)} laws hold"
    if report.verdict == "not judged":
        return (
            f"nothing was compared with the definition: {summary.why_not_judged([r.as_dict() for r in report.results])}"
        )
    measured = () if report.screen is None else (str(report.screen),)
    return "\n\n".join((*measured, *(failure(result) for result in report.results if result.failed)))
