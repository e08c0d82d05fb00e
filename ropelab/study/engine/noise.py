"""Give a measured number its interval.

Three sources of noise enter. The samples of one process give a spread (columns ``q20_us`` and ``q80_us`` of a record).
Records of the same code at other hours give the distance between runs (``data/repeats.csv``). `FLOOR` covers noise that
no record shows, such as the noise of another host.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

FLOOR = 0.01
"""The relative half-width of the interval of any measured time. A change of 1 % in one time is never a finding."""


@dataclass(frozen=True)
class Interval:
    """A measured number, and the least and the largest value that the noise allows."""

    low: float
    value: float
    high: float

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __truediv__(self, other: Interval) -> Interval:
        """The ratio of two positive numbers."""
        return Interval(self.low / other.high, self.value / other.value, self.high / other.low)

    def __str__(self) -> str:
        exact = self.low == self.value == self.high
        return f"{self.value:.4g}" if exact else f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def exact(value: float) -> Interval:
    """A number without noise, such as a count."""
    return Interval(value, value, value)


def relative(value: float, noise: float) -> Interval:
    """A number that is off by up to ``noise`` of itself."""
    return Interval(value * (1 - noise), value, value * (1 + noise))


def time(row: pd.Series) -> Interval:
    """The interval of a timed row.

    Args:
        row: has ``median_us`` and, if the evidence has them, ``q20_us``, ``q80_us`` and ``between_runs``. The engine
            adds ``between_runs``, the relative distance of the medians of two runs, to every record
            (`ropelab.study.engine.repeats`).

    Returns:
        Microseconds. The half-width is the largest of the distance from the median to the quantiles, the distance
        between runs, and `FLOOR`.
    """
    median = float(row.median_us)
    low, high, between_runs = (row.get(name, float("nan")) for name in ("q20_us", "q80_us", "between_runs"))
    apart = 1 + max(FLOOR, 0.0 if pd.isna(between_runs) else float(between_runs))
    low, high = (median if pd.isna(x) else float(x) for x in (low, high))
    return Interval(min(low, median / apart), median, max(high, median * apart))


def mean(intervals: list[Interval]) -> Interval:
    """The mean of numbers. Its noise does not average out, because it may be common to all numbers."""
    count = len(intervals)
    return Interval(
        sum(x.low for x in intervals) / count, sum(x.value for x in intervals) / count,
        sum(x.high for x in intervals) / count,
    )  # fmt: skip


def difference(first: Interval, second: Interval) -> Interval:
    """The first number minus the second number."""
    return Interval(first.low - second.high, first.value - second.value, first.high - second.low)
