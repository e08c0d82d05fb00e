"""Select the rows that figures and sentences speak of, in the order in which they speak of them."""

from collections.abc import Iterable, Iterator

import pandas as pd

from ropelab.bench.copies import PREFIX
from ropelab.bench.host import CALLS
from ropelab.bench.rows import timed
from ropelab.study.engine.words import value_range
from ropelab.study.plots.looks import CONTENDERS

__all__ = ["ORDERS", "contenders", "copies", "label", "ordered", "timed", "value_range"]

label = CONTENDERS.label
ORDERS = {
    "layout": ("split_half", "interleaved"),
    "direction": ("forward", "backward", "forward and backward"),
    "dtype": ("bfloat16", "float32"),
    "call": CALLS,
}
"""Column -> the order of its values in a figure."""


def copies(times: pd.DataFrame) -> pd.DataFrame:
    """The rows of the copies."""
    return times[times.contender.str.startswith(PREFIX)]


def contenders(times: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The name and the rows of every contender that is no copy, in the order of the legend."""
    for name in CONTENDERS.ordered(name for name in times.contender if not name.startswith(PREFIX)):
        yield name, times[times.contender == name]


def ordered(values: Iterable, order: Iterable) -> list:
    """The elements of ``order`` that occur in ``values``, once each."""
    present = set(values)
    return [value for value in dict.fromkeys(order) if value in present]
