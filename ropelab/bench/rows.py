"""Select the rows of a record whose results were right."""

from collections.abc import Iterable

import pandas as pd

from ropelab.bench.names import PREFIX
from ropelab.bench.records import Unusable


class NotMeasured(Unusable):
    """The record lacks a contender: it came later than the record, or it could not run."""


def need(present: Iterable[str], *names: str) -> None:
    """Refuse to speak of contenders that a record does not have.

    Args:
        present: the contenders with a right result.

    Raises:
        NotMeasured: one of ``names`` is not among them.
    """
    if lacking := [name for name in names if name not in set(present)]:
        raise NotMeasured(f"Not measured in this record: {', '.join(lacking)}")


def is_right(frame: pd.DataFrame) -> pd.Series:
    """Whether each row's contender ran and gave a right result; True in a table without the column ``status``."""
    return frame.status == "ok" if "status" in frame else pd.Series(True, frame.index)


def are_copies(frame: pd.DataFrame) -> pd.Series:
    """Whether each row is that of a copy."""
    return frame.contender.str.startswith(PREFIX)


def timed(frame: pd.DataFrame, *needed: str) -> pd.DataFrame:
    """The rows that are right and have a time.

    Raises:
        NotMeasured: no such row is of one of these contenders.
    """
    found = frame[is_right(frame) & frame.median_us.notna()]
    if needed:
        need(found.contender, *needed)
    return found
