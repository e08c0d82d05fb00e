"""Draw whole models: the part of a layer that rotates, the time that ropelab saves, and loss curves."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ropelab.bench.model_steps import NONE, NORMS, OURS, PLAIN, PROJECTION, TOKENS
from ropelab.study.plots import marks
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS
from ropelab.study.plots.panels import facet, grid
from ropelab.study.topics.models import evidence, share
from ropelab.study.topics.projection.findings import RECORD, machine

LOOKS = CONTENDERS.extended({
    OURS: ("", 0, "o"), NORMS: ("ropelab, norms of q and k fused", 9, "P"),
    PROJECTION: ("ropelab, with the projection", 6, "s"), NONE: ("no rotation", 7, "d"),
    PLAIN: ("", 3, "X"),
})  # fmt: skip


def rotation_share(frame: pd.DataFrame, projection: pd.DataFrame, footer: str = "") -> Figure:
    """The part of a layer of Llama 3 8B that the rotation takes, and what whole models save without any rotation.

    Args:
        projection: the record of that name, from which the rates of the GPU are.
    """
    parts = share.parts(machine(projection), [2**power for power in range(10, 20)])
    panels = grid(1, 1, (7.0, 3.6), "The rotation's part of a layer falls with the context", footer)
    ax = panels.axes[0, 0]
    for place, (words, column) in enumerate(parts.items()):
        ax.plot(column.index, column, color=COLORBLIND[place], label=f"computed, {words}")
    for marker, (name, value) in zip("sD", evidence.measured_shares(frame).items(), strict=False):
        ax.plot([TOKENS], [value], marker, color=COLORBLIND[3], markersize=8, label=f"measured, {name}, eager prefill")
    ax.set(xscale="log", ylim=(0, None))
    ax.set_xticks(parts.index, map("{:,}".format, parts.index), rotation=30)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return panels.finish("tokens of a sequence", "part of the time", legend=2)


def training(curves: pd.DataFrame, guessing: float) -> Figure:
    """Loss curves of `training.compare`, median and range over the seeds, beside the loss of guessing."""
    panels = grid(1, 1, (7.0, 3.6), "Same weights, same data, other rotations", "computed in this run, float32")
    ax = panels.axes[0, 0]
    for place, (name, rows) in enumerate(curves.groupby("backward", sort=False)):
        steps = rows.groupby("step").loss
        style = {"color": COLORBLIND[place], "linestyle": ("-", "--", ":")[place % 3]}
        ax.plot(steps.median().index, steps.median(), label=name, **style)
        ax.fill_between(steps.min().index, steps.min(), steps.max(), color=style["color"], alpha=0.2)
    marks.one(ax, at=guessing, upright=False, label="guessing")
    ax.set_ylim(0, None)
    return panels.finish("training step (Adam)", "cross entropy (nats)", legend=4)


def saved(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The share of the time of each step that ropelab saves, beside the share of a model that does not rotate."""
    shares = evidence.savings(frame).drop(evidence.doubtful(frame).index)
    rows = evidence.rounds(frame).set_index(shares.index.names)
    rows = rows[rows.index.isin(shares.dropna(how="all").index) & (rows.way != PLAIN)].reset_index()
    rows["row"] = rows.model + ": " + rows.step
    title = " and ".join(
        f"{what} up to {shares[way].max():.0%}"
        for way, what in ((OURS, "ropelab's rotation saves"), (NORMS, "with fused norms"))
        if way in shares
    )
    title += " of a step"
    place = marks.places(rows.row)
    panels = facet(
        rows, (4.6, 0.34 * len(place) + 0.9), title, footer, column="mode", words={}, sharex=True, sharey=True
    )
    for ax, panel, _ in panels:
        ax.axvline(0, color="grey", linestyle="--", linewidth=1, label="Transformers, diffusers")
        for way in LOOKS.ordered(panel.way):
            found = panel[panel.way == way]
            marks.spans(ax, place[found.row], found, LOOKS(way), upright=False, markersize=8)
        marks.rows(ax, place, left=min(-0.02, 1.1 * rows.least.min()))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
    return panels.finish("time saved", "", legend=2)


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "whole_models": ((evidence.STUDY,), saved),
    "rotation_share": ((evidence.STUDY, RECORD), rotation_share),
}
"""The name of a figure -> its record, and the function that draws it."""
