"""This file selects what figures and sentences speak of: rows with a time, copies, contenders, ranges of values."""

from collections.abc import Iterable, Iterator

import pandas as pd

from ropelab.bench.copies import PREFIX
from ropelab.study.plots.looks import CONTENDERS

label = CONTENDERS.label
ORDERS = {
    "layout": ("split_half", "interleaved"),
    "direction": ("forward", "backward", "forward and backward"),
    "dtype": ("bfloat16", "float32"),
}
"""Column -> the order of its values in a figure."""


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a time."""
    return frame[(frame.status == "ok") & frame.median_us.notna()]


def copies(times: pd.DataFrame) -> pd.DataFrame:
    return times[times.contender.str.startswith(PREFIX)]


def contenders(times: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Those that are no copies, in the order of the legend."""
    for name in CONTENDERS.ordered(name for name in times.contender if not name.startswith(PREFIX)):
        yield name, times[times.contender == name]


def ordered(values: Iterable, order: Iterable) -> list:
    """Those of ``order`` that occur, once each."""
    present = set(values)
    return [value for value in dict.fromkeys(order) if value in present]


def value_range(values: pd.Series, spec: str) -> str:
    """``"0.93 to 0.98"``, or one number where they are the same."""
    low, high = format(values.min(), spec), format(values.max(), spec)
    return low if low == high else f"{low} to {high}"
