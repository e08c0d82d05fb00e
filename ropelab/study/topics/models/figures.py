"""Draw the figures of the record ``whole_models``: the time that ropelab saves, and the losses."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ropelab.bench.model_steps import NONE, NORMS, OURS, PLAIN
from ropelab.study.plots import marks
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.plots.panels import facet, grid
from ropelab.study.topics.models import evidence

LOOKS = CONTENDERS.extended({
    OURS: ("", 0, "o"), NORMS: ("ropelab, norms of q and k fused", 9, "P"), NONE: ("no rotation", 7, "d"),
    PLAIN: ("", 3, "X"),
})  # fmt: skip


def saved(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The share of the time of each step that ropelab saves, beside the share of a model that does not rotate."""
    shares = evidence.savings(frame).drop(evidence.doubtful(frame).index)
    rows = shares.reset_index()
    rows["row"] = rows.model + ": " + rows.step
    title = " ".join(evidence.sentences(frame)[: rows["mode"].nunique()])
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


def losses(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The losses of the training steps of each way, one on top of the other."""
    curves = evidence.losses(frame)
    panels = grid(1, 1, (8, 3.0), evidence.loss_sentence(frame), footer)
    ax = panels.axes[0, 0]
    for width, way in zip((6.0, 3.0, 1.2), curves, strict=False):
        ax.plot(curves.index + 1, curves[way], linewidth=width, label=LOOKS.label(way), color=LOOKS.color(way))
    ax.set(yscale="log")
    return panels.finish("training step", "loss (nats)", legend=3)


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "whole_models": ((evidence.STUDY,), saved),
    "whole_models_losses": ((evidence.STUDY,), losses),
}
"""The name of a figure -> its record, and the function that draws it."""
