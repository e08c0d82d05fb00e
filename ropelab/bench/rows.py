"""Select the rows of a record whose results were right."""

import pandas as pd


def is_right(frame: pd.DataFrame) -> pd.Series:
    """Whether each row's contender ran and gave a right result; True in a table without the column ``status``."""
    return frame.status == "ok" if "status" in frame else pd.Series(True, frame.index)


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that are right and have a time."""
    return frame[is_right(frame) & frame.median_us.notna()]
