"""Select the rows that figures and sentences speak of, in the order in which they speak of them."""

from collections.abc import Callable, Iterable, Iterator

import pandas as pd

from ropelab.bench.names import CALLS, PREFIX
from ropelab.bench.rows import NotMeasured, are_copies, timed
from ropelab.study.engine import noise
from ropelab.study.engine.repeats import between_runs
from ropelab.study.engine.words import value_range
from ropelab.study.plots.looks import CONTENDERS

__all__ = ["ORDERS", "contenders", "copies", "label", "noisy", "ordered", "spans", "timed", "title", "value_range"]

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
    return times[are_copies(times)]


def contenders(times: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The name and the rows of every contender that is no copy, in the order of the legend."""
    for name in CONTENDERS.ordered(name for name in times.contender if not name.startswith(PREFIX)):
        yield name, times[times.contender == name]


def ordered(values: Iterable, order: Iterable) -> list:
    """The elements of ``order`` that occur in ``values``, once each."""
    present = set(values)
    return [value for value in dict.fromkeys(order) if value in present]


def noisy(study: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The timed rows with ``low`` and ``high``: the least and the largest time that noise allows, over the median.

    The record of one GPU gets a column ``gpu`` without a name.
    """
    times = timed(frame)
    times = times.assign(between_runs=between_runs(study, times), **{} if "gpu" in times else {"gpu": ""})
    found = [noise.time(row) for _, row in times.iterrows()]
    return times.assign(low=[one.low / one.value for one in found], high=[one.high / one.value for one in found])


def spans(points: pd.DataFrame, by: str | list[str], value: str, *, speed: bool = False) -> pd.DataFrame:
    """The least, the middle and the most of the values that share ``by``, with the noise of `noisy` around each value.

    Args:
        value: the column of times, or of speeds if ``speed``.

    Returns:
        Columns least, middle (the median) and most.
    """
    low, high = (1 / points.high, 1 / points.low) if speed else (points.low, points.high)
    points = points.assign(least=points[value] * low, most=points[value] * high)
    return points.groupby(by, sort=False).agg(least=("least", "min"), middle=(value, "median"), most=("most", "max"))


def title(say: Callable[..., str], *frames: pd.DataFrame) -> str:
    """The first sentence on the tables of the first GPU, of which findings speak, after its name (a column ``gpu``)."""
    gpu = frames[0].gpu.iloc[0] if "gpu" in frames[0] else ""
    try:
        said = say(*(frame[frame.gpu == gpu] if gpu else frame for frame in frames))
    except NotMeasured as lacking:  # the figure shows what there is
        said = str(lacking)
    return f"{gpu}: {said}".removeprefix(": ").replace("`", "").partition(". ")[0].removesuffix(".")
