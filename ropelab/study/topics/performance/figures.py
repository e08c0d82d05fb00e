"""Draw the figures of the kernel family: every format, and QK norm.

Each function takes the tables of the records and returns a figure. The title is computed from the tables, and
``family_findings`` says whether a bar is met.
"""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.plots import drawing, marks
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.plots.panels import LAYOUT, facet
from ropelab.study.topics.performance import findings as family_findings
from ropelab.study.topics.performance.comparison import OURS
from ropelab.study.topics.performance.findings import (
    LEAST_OF_COPY_NORM,
    LEAST_OVER_COMPILED,
)

# A pass over q and k reads and writes q and k once. The backward of a norm reads the input and the cotangent and writes
# the gradient: three tensors, where a copy moves two. Forward and backward together move five.
_CEILINGS = {"forward": 1, "backward": 2 / 3, "forward and backward": 2 / 5}


def qk_norm(frame: pd.DataFrame, footer: str = "") -> Figure:
    """QK norm and rotation as a fraction of the copy of q and k, per step and GPU, with the limit of the bytes."""
    times = drawing.noisy("qk_norm", frame)
    title = drawing.title(_worst, frame)
    times = times.assign(row=list(zip(times.cell, times.layout, strict=True)))
    place = marks.places(times.row)
    labels = [f"{cell}, {LAYOUT[layout]}" for cell, layout in place.index]
    times = times.sort_values("step", key=lambda steps: steps.map(list(_CEILINGS).index), kind="stable")
    panels = facet(times, (4.6, 0.4 * len(place) + 1.0), title, footer, column="gpu", row="step", sharey=True)
    for ax, panel, (_, step) in panels:
        for name, points in drawing.contenders(panel):
            found = drawing.spans(points, "row", "fraction_of_copy", speed=True)
            marks.spans(ax, place[found.index], found, CONTENDERS(name), upright=False, zorder=5,
                        markersize=8 if name == OURS else 7)  # fmt: skip
        if (wanted := _qk_norm_bar(step, panel)) is not None:
            marks.band(ax, pd.Series([place[row] for row in wanted.index]), wanted, 0.36)
        marks.one(ax, at=_CEILINGS[step], label="limit set by the bytes")
        marks.rows(ax, place, labels)
    label = "fraction of the best copy of q and k"
    return panels.finish(label, legend=4, untimed=frame)


def _worst(frame: pd.DataFrame) -> str:
    return "One pass: " + ", ".join(f"{bar.number} {bar.what}" for bar in family_findings.qk_norm_bars(frame))


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
    "qk_norm": (("qk_norm",), qk_norm),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
