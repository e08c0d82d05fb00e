"""Draw the figure of the record ``whole_models``: the time that ropelab saves."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ropelab.bench.model_steps import NONE, NORMS, OURS, PLAIN, PROJECTION
from ropelab.study.plots import marks
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.plots.panels import facet
from ropelab.study.topics.models import evidence

LOOKS = CONTENDERS.extended({
    OURS: ("", 0, "o"), NORMS: ("ropelab, norms of q and k fused", 9, "P"),
    PROJECTION: ("ropelab, with the projection", 6, "s"), NONE: ("no rotation", 7, "d"),
    PLAIN: ("", 3, "X"),
})  # fmt: skip


def saved(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The share of the time of each step that ropelab saves, beside the share of a model that does not rotate."""
    shares = evidence.savings(frame).drop(evidence.doubtful(frame).index)
    rows = shares.reset_index()
    rows["row"] = rows.model + ": " + rows.step
    title = f"ropelab saves up to {shares.drop(columns=NONE, errors='ignore').max(axis=None):.0%} of a step"
    place = marks.places(rows.row)
    panels = facet(
        rows, (4.6, 0.34 * len(place) + 0.9), title, footer, column="mode", words={}, sharex=True, sharey=True
    )
    for ax, panel, _ in panels:
        ax.axvline(0, color="grey", linestyle="--", linewidth=1, label="Transformers, diffusers")
        for way in LOOKS.ordered(shares.columns):
            if way in panel and panel[way].notna().any():
                marks.dots(ax, panel[way], place[panel.row], LOOKS(way), markersize=8)
        marks.rows(ax, place, left=min(-0.02, 1.1 * shares.min().min()))
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return panels.finish("time saved", "", legend=2)


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "whole_models": ((evidence.STUDY,), saved),
}
"""The name of a figure -> its record, and the function that draws it."""
