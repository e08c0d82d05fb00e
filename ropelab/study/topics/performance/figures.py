"""Draw the figures of the kernel family: every format, and QK norm.

Each function takes the tables of the records and returns a figure. The title is computed from the tables, and
``family_findings`` says whether a bar is met.
"""

from collections.abc import Callable
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.plots import drawing, marks
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS
from ropelab.study.plots.panels import CELLS, LAYOUT, facet
from ropelab.study.topics.performance import findings as family_findings
from ropelab.study.topics.performance.comparison import OURS
from ropelab.study.topics.performance.findings import (
    FORMATS,
    LEAST_OF_COPY_NORM,
    LEAST_OVER_COMPILED,
    toward_worse,
)

_FORMATS = {
    name: f"{'q and k as views of qkv (bshd)' if name == 'qkv' else name} (right: ropelab's slowest)"
    for name in FORMATS
}
_MISSED = COLORBLIND[3]
# A pass over q and k reads and writes q and k once. The backward of a norm reads the input and the cotangent and writes
# the gradient: three tensors, where a copy moves two. Forward and backward together move five.
_CEILINGS = {"forward": 1, "backward": 2 / 3, "forward and backward": 2 / 5}


def formats(dense: pd.DataFrame, others: pd.DataFrame, footer: str = "") -> Figure:
    """Fraction of the copy in every format and cell: ropelab in both layouts and directions, peers faint."""
    frame = family_findings.in_all_formats(dense, others)
    times = drawing.timed(frame)
    bars = {bar.what.split()[-1]: bar for bar in family_findings.format_bars(dense, others)}
    met = [name for name, bar in bars.items() if bar.met]
    title = (
        f"The bar of {next(iter(bars.values())).limit} of a copy is met in {len(met)} of {len(bars)} formats. "
        "ropelab's slowest cell runs at "
        + ", ".join(f"{bar.number} in {name}" + f" ({bar.verdict})" * (not bar.met) for name, bar in bars.items())
    )
    place = marks.places(times.cell)
    reach = times.groupby("contender").fraction_of_copy
    left = min(0.5, reach.min()[OURS] - 0.05)
    size = (5.8, 0.46 * len(place) + 1.0)
    panels = facet(times, size, title, footer, column="format", wrap=2, words=_FORMATS, sharex=True, sharey=True)
    for ax, panel, name in panels:
        for peer, points in drawing.contenders(panel):
            if peer != OURS:  # the slowest peers are left of the axes, so the legend has their values
                span = f"{drawing.label(peer)} ({drawing.value_range(reach.get_group(peer), '.2f')})"
                ax.plot(points.fraction_of_copy, place[points.cell], linestyle="none", markersize=6, alpha=0.55,
                        markeredgecolor="none", **CONTENDERS(peer) | {"label": span})  # fmt: skip
        ours = panel[panel.contender == OURS]
        for i, (layout, direction) in enumerate(product(LAYOUT, ("forward", "backward"))):
            points = ours[(ours.layout == layout) & (ours.direction == direction)]
            color = CONTENDERS.color(OURS)
            ax.plot(points.fraction_of_copy, place[points.cell] + 0.13 * (1.5 - i), "os"[layout == "interleaved"],
                    color=color, markerfacecolor=color if direction == "forward" else "white", markersize=5.5, zorder=5,
                    label=f"ropelab, {LAYOUT[layout]}, {direction}")  # fmt: skip
        for cell, worst in ours.groupby("cell").fraction_of_copy.min().items():
            missed = worst < bars[name].limit
            marks.beside(ax, [1], [place[cell]], [toward_worse(worst, at_least=True) + " below" * missed], gap=5,
                         xycoords=marks.ACROSS, color=_MISSED if missed else "0.25",
                         fontweight="bold" if missed else "normal")  # fmt: skip
        ax.axvline(bars[name].limit, color="black", linewidth=1.6, label=f"bar, {bars[name].limit}", zorder=3)
        marks.one(ax)
        marks.rows(ax, place, left=left)
    return panels.finish("fraction of the best copy of the same bytes", CELLS, legend=4, untimed=frame)


def qk_norm(frame: pd.DataFrame, footer: str = "") -> Figure:
    """QK norm and rotation as a fraction of the copy of q and k, per step, with the limit that the bytes set."""
    times = drawing.timed(frame)
    bars = family_findings.qk_norm_bars(frame)
    title = "QK norm and rotation in one pass. " + "; ".join(bar.phrase() for bar in bars)
    times = times.assign(row=list(zip(times.cell, times.layout, strict=True)))
    place = marks.places(times.row)
    labels = [f"{cell}, {LAYOUT[layout]}" for cell, layout in place.index]
    times = times.sort_values("step", key=lambda steps: steps.map(list(_CEILINGS).index), kind="stable")
    panels = facet(times, (4.3, 0.4 * len(place) + 1.6), title, footer, column="step", sharey=True)
    for ax, panel, step in panels:
        for name, points in drawing.contenders(panel):
            marks.dots(ax, points.fraction_of_copy, points.row.map(place), CONTENDERS(name), zorder=5,
                       markersize=8 if name == OURS else 7)  # fmt: skip
        if (wanted := _qk_norm_bar(step, panel)) is not None:
            marks.band(ax, pd.Series([place[row] for row in wanted.index]), wanted, 0.36)
        marks.one(ax, at=_CEILINGS[step], label="limit set by the bytes")
        marks.rows(ax, place, labels)
    label = "fraction of the best copy of q and k"
    return panels.finish(label, "cell, layout", legend=5, untimed=frame)


def _qk_norm_bar(step: str, panel: pd.DataFrame) -> pd.Series | None:
    """The fraction of the copy that the bar asks for in each row of the figure; the backward alone has none."""
    key = ["cell", "layout"]
    if step == "forward":
        return panel.drop_duplicates(key).set_index(key).fraction_of_copy * 0 + LEAST_OF_COPY_NORM
    if step == "forward and backward":
        compiled = family_findings.fastest_compiled(panel)
        copy = panel.assign(us=panel.fraction_of_copy * panel.median_us).groupby(key).us.first()
        return LEAST_OVER_COMPILED * copy.reindex(compiled.index) / compiled
    return None


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "formats": (("dense", "formats"), formats),
    "qk_norm": (("qk_norm",), qk_norm),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
