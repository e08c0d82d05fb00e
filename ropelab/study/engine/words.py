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
