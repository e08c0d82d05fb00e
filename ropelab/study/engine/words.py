"""Write numbers, names and cells in one way for README.md, the notebooks, the figures and the report."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from ropelab.study.engine.noise import Interval


def value_range(values: Iterable[float | Interval], spec: str = ".2f") -> str:
    """A range as text, ``"0.93 to 0.98"``: one number if both ends read the same, and "" if there is no number."""
    numbers = pd.Series([x.value if isinstance(x, Interval) else x for x in values]).dropna()
    low, high = (format(number, spec) for number in (numbers.min(), numbers.max())) if len(numbers) else ("", "")
    return low if low == high else f"{low} to {high}"


def listed(values: Iterable[object]) -> str:
    """A list as text, ``"96, 128"``, with each value once; ``"none"`` if there are no values."""
    return ", ".join(dict.fromkeys(map(str, values))) or "none"


def followed(words: str, values: Iterable[object]) -> str:
    """The words and then the list of the values; "" if there are no values, so that there is no remark."""
    values = list(values)
    return words + listed(values) if values else ""


def by_count(values: Iterable[Interval], counts: Iterable[int], spec: str = ".4g") -> str:
    """Each value with its count, ``"1.881 for 128, 4.732 for 1,024"``."""
    return ", ".join(f"{value.value:{spec}} for {n:,}" for value, n in zip(values, counts, strict=True))


def how_many(found: Iterable[bool | None]) -> str:
    """The number of cells that hold, ``"4 of 10 cells (2 cannot be told)"``; None is a cell that cannot be told."""
    found = list(found)
    open_ = sum(x is None for x in found)
    return f"{sum(x is True for x in found)} of {len(found)} cells" + (f" ({open_} cannot be told)" if open_ else "")
