"""The sentences of README.md on the records ``dense`` and ``model_heads``."""

import pandas as pd

from ropelab.study.engine.repeats import between_runs
from ropelab.study.topics.performance import model_heads
from ropelab.study.topics.performance.comparison import OURS, timed


def below_their_bar(frame: pd.DataFrame) -> pd.DataFrame:
    """The cells in which ropelab misses its bar: cell, layout, direction, fraction_of_copy, bar, within_noise.

    ``within_noise``: whether a second run may reach the bar, because the medians of two runs lie that far apart.
    """
    ours = _ours(frame)
    missed = ours[ours.fraction_of_copy < ours.bar]
    reach = missed.fraction_of_copy * (1 + between_runs("dense", missed))
    columns = ["cell", "layout", "direction", "fraction_of_copy", "bar", "within_noise"]
    return missed.assign(within_noise=reach >= missed.bar)[columns]


def shortfall_sentence(frame: pd.DataFrame) -> str:
    """The cells in which ropelab misses its bar, with the smallest fraction of a copy and the bar of each cell."""
    missed = below_their_bar(frame)
    if missed.empty:
        return "Every cell meets the bar set for its size."
    return f"{len(missed)} of {len(_ours(frame))} cases miss the bar set for their size: {_each(missed)}."


def _each(missed: pd.DataFrame) -> str:
    """The cells of `below_their_bar` with their smallest fraction of a copy and their bar."""
    return "; ".join(
        f"{cell} {' and '.join(rows.layout.unique())} ({rows.fraction_of_copy.min():.3f} of {rows.bar.iloc[0]})"
        for cell, rows in missed.groupby("cell", sort=False)
    )


def drawn_sentence(frame: pd.DataFrame) -> str:
    """The median of all drawn calls, and how many are far from the limit or below their bar."""
    every = model_heads.judged(frame)
    reached = every.fraction_of_limit
    slow = (reached < 0.9).sum()
    return (
        f"Over {len(every)} randomly drawn calls the median is {reached.median():.3f} of the speed of a copy of all "
        f"their bytes; {slow} are below 0.9, and {(~every.meets).sum()} miss the bar set for their size."
    )


def _ours(frame: pd.DataFrame) -> pd.DataFrame:
    times = timed(frame)
    return times[times.contender == OURS]
