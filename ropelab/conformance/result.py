"""What verification found."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ropelab.conformance.case import Case, Sizes

STATUSES = ("pass", "fail", "not applicable", "error")
VERDICTS = ("right", "wrong", "not judged")
"""Of all laws together. "Not judged": none of them is known to fail, and nothing was compared with the definition, or
not all laws were held."""


class ConformanceError(AssertionError):
    """Laws that do not hold."""


@dataclass(frozen=True)
class Counterexample:
    """The smallest case found for which a law fails.

    Attributes:
        sizes: of the tensors.
        what: which output, such as ``"gradient of k"``.
        where: axis -> index of the worst element; None if nothing was returned to point at.
        expected, actual, bound: there.
        case: the inputs; ``subject(case)`` repeats the failing call.
        pattern: which elements failed in the first, larger case, in words.
    """

    sizes: Sizes
    what: str
    where: dict[str, int]
    expected: float
    actual: float
    bound: float
    case: Case
    pattern: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the tensors, of which the shapes."""
        numbers = {name: _json_number(getattr(self, name)) for name in ("expected", "actual", "bound")}
        case = self.case
        asked: dict[str, Any] = {"shapes": [list(x.shape) for x in case.inputs], "dtype": str(case.inputs[0].dtype)}
        asked |= {"positions": case.token_positions().tolist(), "lengths": case.lengths, "shard": case.shard}
        return {"sizes": vars(self.sizes), "what": self.what, "where": self.where, **numbers, **asked,
                "pattern": self.pattern}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """The outcome of one law.

    Attributes:
        status: one of ``STATUSES``; ``"error"``: the function raised where it should not.
        violation, bound: the error where it is largest in units of its bound, and that bound.
        message: why it does not apply, what was raised, or what is wrong if no number says it.
        compared: elements that were compared with the definition itself, and not with another result.
    """

    law: str
    statement: str
    status: str
    violation: float = 0.0
    bound: float = 0.0
    counterexample: Counterexample | None = None
    message: str = ""
    seconds: float = 0.0
    compared: int = 0

    @property
    def failed(self) -> bool:
        """Whether the law does not hold; a function that raises does not keep it."""
        return self.status in ("fail", "error")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = None if self.counterexample is None else self.counterexample.as_dict()
        numbers = {"violation": _json_number(self.violation), "bound": _json_number(self.bound)}
        return {"law": self.law, "statement": self.statement, "status": self.status, **numbers,
                "compared": self.compared, "message": self.message, "counterexample": found,
                "seconds": round(self.seconds, 3)}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The outcome of all laws.

    Attributes:
        about: what was declared of the function, by name.
        results: law by law, in the order of `LAWS`.
        diagnosis: faults of the catalogue that explain the failures, best first.
    """

    about: dict[str, Any]
    results: tuple[Result, ...]
    diagnosis: tuple[Any, ...] = field(default=())

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``: ``"wrong"`` if a law failed, ``"right"`` if one compared something with the definition.

        The laws of consistency alone make no rotation: the identity keeps most of them.
        """
        return verdict(bool(self.failed), sum(result.compared for result in self.results))

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``"right"``: no law failed, and something was compared with the definition."""
        return self.verdict == "right"

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the laws that do not hold."""
        return tuple(result.law for result in self.results if result.failed)

    def __getitem__(self, law: str) -> Result:
        """The result of a law by its name."""
        return next(result for result in self.results if result.law == law)

    def to_json(self) -> str:
        """Everything but the tensors."""
        results = [result.as_dict() for result in self.results]
        return as_json(self.verdict, self.about, results, [str(fault) for fault in self.diagnosis])

    def raise_if_failed(self) -> None:
        """Raise ConformanceError, with what an author needs to fix it, unless the verdict is ``"right"``."""
        if not self.passed:
            from ropelab.conformance.report import text

            raise ConformanceError(text(self))


def verdict(failed: bool, compared: int) -> str:
    """One of ``VERDICTS``, of laws that were all held; ``compared`` elements with the definition."""
    if failed:
        return "wrong"
    return "right" if compared else "not judged"


def as_json(
    verdict: str,
    about: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    diagnosis: Sequence[str],
    stopped: str = "",
) -> str:
    """The report as JSON.

    Args:
        verdict: one of ``VERDICTS``.
        about: what was declared of the function, by name.
        results: `Result.as_dict` of each law.
        diagnosis: a line for each fault.
        stopped: why not all laws were held; empty if they were.
    """
    found = {"passed": verdict == "right", "verdict": verdict, "stopped": stopped}
    found |= {"about": {name: str(value) for name, value in about.items()}}
    return json.dumps(found | {"results": list(results), "diagnosis": list(diagnosis)}, indent=1)


def _json_number(value: float) -> float | str:
    """JSON has no infinity and no NaN: they are words."""
    return float(value) if math.isfinite(value) else str(float(value))
