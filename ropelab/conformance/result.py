"""The result of one law: its status, and the counterexample if the law does not hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ropelab.conformance.case import Case, Sizes

STATUSES = ("pass", "note", "fail", "not applicable", "error")


@dataclass(frozen=True)
class Counterexample:
    """The smallest case found for which a law does not hold.

    Attributes:
        sizes: the extents of the tensors.
        what: the numbers that are wrong, such as ``"gradient of k"``.
        where: axis -> index of the element that is furthest beyond its bound.
        expected: the expected value of that element.
        actual: its actual value.
        bound: the largest difference that is allowed.
        case: the call with its inputs; ``subject(case)`` repeats it.
        pattern: the elements that were wrong in the first, larger case, in words.
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
        """Return everything but the numbers in the tensors, for JSON."""
        numbers = {name: json_number(getattr(self, name)) for name in ("expected", "actual", "bound")}
        case = self.case
        sizes = {name: value for name, value in vars(self.sizes).items() if name != "token_counts"}
        asked: dict[str, Any] = {"shapes": [list(x.shape) for x in case.inputs], "dtype": str(case.inputs[0].dtype)}
        asked |= {"positions": case.token_positions().tolist(), "lengths": case.lengths, "shard": case.shard}
        asked |= case.extra()
        return {"sizes": sizes, "what": self.what, "where": self.where, **numbers, **asked,
                "pattern": self.pattern}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """The outcome of one law.

    Attributes:
        law: the name of the law.
        statement: its statement.
        status: one of ``STATUSES``; ``"error"`` if the function raised where it should not, ``"note"`` if the law does
            not hold and no documented call of the function has a wrong result.
        violation: the error of the element that is furthest beyond its bound, or nearest to it.
        bound: the bound of that element.
        counterexample: the smallest case that breaks the law; None where there is no element to point at.
        message: why the law does not apply, what to note, the exception, or the violation where no number expresses it.
        seconds: the time that the law took.
        compared: the number of elements that were compared with the definition, not with another result.
        traceback: the traceback of an exception in the function's own code, and the call; empty without an exception.
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
    traceback: str = ""

    @property
    def failed(self) -> bool:
        """Whether the law does not hold; a function that raises does not keep the law."""
        return self.status in ("fail", "error")

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        found = None if self.counterexample is None else self.counterexample.as_dict()
        numbers = {"violation": json_number(self.violation), "bound": json_number(self.bound)}
        return {"law": self.law, "statement": self.statement, "status": self.status, **numbers,
                "compared": self.compared, "message": self.message, "counterexample": found,
                "traceback": self.traceback, "seconds": round(self.seconds, 3)}  # fmt: skip


def json_number(value: float | None) -> float | str | None:
    """Return the number, or a word for infinity and NaN, which JSON lacks; None stays None."""
    return value if value is None else float(value) if math.isfinite(value) else str(float(value))
