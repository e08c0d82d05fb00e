"""Draw the steps: how close each comes to a copy."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.engine.words import value_range
from ropelab.study.plots import drawing, gpus, marks, ticks
from ropelab.study.plots.panels import grid


def fractions(frame: pd.DataFrame, names: Sequence[str], footer: str = "") -> Figure:
    """The time of steps over the time of the copy, with the noise of `drawing.noisy`; the second panel is near 1."""
    rows = drawing.noisy("kernel_steps", frame[frame.contender.isin(names)])
    place = marks.places(names)
    title = drawing.title(
        lambda part: f"The steps take {value_range(1 / part.fraction_of_copy)} times as long as a copy", rows
    )
    panels = grid(1, 2, (4.6, 0.36 * len(names) + 1.2), title, footer, sharey=True)
    whole, near = panels.axes[0]
    for ax in (whole, near):
        for number, (_, points, look) in enumerate(gpus.parts(rows)):
            y = place[points.contender] + 0.14 * (rows.gpu.nunique() - 1) - 0.28 * number
            speed = points.fraction_of_copy
            gpus.across(ax, 1 / speed, y, points.low / speed, points.high / speed, look, markersize=5)
        marks.one(ax)
        marks.rows(ax, place, left=0.9)
    whole.set_xscale("log")
    ticks.plain_log(whole.xaxis)
    near.set_xlim(*_NEAR)
    return panels.finish("times as long as a copy of the same bytes", legend=3)


_NEAR = 0.98, 1.16
"""The times of the second panel of `fractions`, where most steps lie."""
