"""Give a measured number its interval.

Three sources of noise enter. The samples of one process give a spread (columns ``q20_us`` and ``q80_us`` of a record).
Records of the same code at other hours give the distance between runs, of times and of ratios of times
(``data/repeats.csv``). `FLOOR` covers noise that no record shows, such as the noise of another host. An interval is as
wide below its number as above it, as a factor, so that the interval of a ratio is that of the reciprocal.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean

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
        """The ratio of two positive numbers whose noises have nothing in common."""
        return Interval(self.low / other.high, self.value / other.value, self.high / other.low)

    def widened(self, noise: float) -> Interval:
        """The interval, at least as wide as a number that is off by up to ``noise`` of itself."""
        return Interval(
            min(self.low, self.value / (1 + noise)), self.value, max(self.high, self.value * (1 + noise))
        )  # fmt: skip

    def off_by(self, factor: float) -> Interval:
        """The interval of a number that is off by up to ``factor`` of itself besides."""
        return Interval(self.low / (1 + factor), self.value, self.high * (1 + factor))

    def __str__(self) -> str:
        exact = self.low == self.value == self.high
        return f"{self.value:.4g}" if exact else f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def exact(value: float) -> Interval:
    """A number without noise, such as a count."""
    return Interval(value, value, value)


def time(row: pd.Series) -> Interval:
    """The interval of a timed row, in microseconds.

    Args:
        row: has ``median_us`` and, if the evidence has them, ``q20_us``, ``q80_us`` and ``between_runs``. The engine
            adds ``between_runs``, the relative distance of the medians of two runs, to every record
            (`ropelab.study.engine.repeats`).
    """
    return _sampled(row).widened(_apart(row, "between_runs"))


def ratio(over: pd.Series, under: pd.Series) -> Interval:
    """The interval of the ratio of two timed rows of one record.

    What slows a whole run down cancels, so that the distance between runs is that of ratios: ``between_ratios``.
    """
    return (_sampled(over) / _sampled(under)).widened(max(_apart(row, "between_ratios") for row in (over, under)))


def _sampled(row: pd.Series) -> Interval:
    """The interval by the samples of a process alone."""
    median = float(row.median_us)
    low, high = (median if pd.isna(x := row.get(name)) else float(x) for name in ("q20_us", "q80_us"))
    return Interval(low, median, high)


def _apart(row: pd.Series, name: str) -> float:
    return FLOOR if pd.isna(apart := row.get(name)) else max(FLOOR, float(apart))


def mean(ratios: list[Interval]) -> Interval:
    """The geometric mean of ratios, whose reciprocal is the mean of the reciprocals.

    Its noise does not average out, because it may be common to all ratios.
    """
    return Interval(*(geometric_mean(ends) for ends in zip(*((x.low, x.value, x.high) for x in ratios), strict=True)))


def difference(first: Interval, second: Interval) -> Interval:
    """The first number minus the second number."""
    return Interval(first.low - second.high, first.value - second.value, first.high - second.low)
