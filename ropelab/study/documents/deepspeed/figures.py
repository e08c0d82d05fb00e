"""Draw the figures of DeepSpeed#8052: gradients, launches, and bytes per second.

The titles are computed from the records. ``footer`` names the machine and the date (`ropelab.study.plots.registry`).
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ropelab.bench.rows import need
from ropelab.study.documents.deepspeed import table_figures
from ropelab.study.documents.deepspeed.findings import digits
from ropelab.study.plots import drawing, marks, ticks
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS
from ropelab.study.plots.panels import grid

_LOOKS = CONTENDERS.extended(
    {"raw kernel": CONTENDERS.known["torchembed"], "plain formula": CONTENDERS.known["eager"]},
    other=CONTENDERS.known["torchembed API"][1:],  # of the paths through the package
)


def gradients(correctness: pd.DataFrame, footer: str = "") -> Figure:
    """The error of the gradient against the length, for each version of torchembed."""
    frame = correctness[(correctness.dtype == "float32") & (correctness.table == "whole")]
    ran = frame[frame.outcome == "ran"].sort_values("seq_len")
    longer = ran[ran.seq_len > 1].groupby("version")
    errors = longer.gradient_error.max()
    wrong = list(errors.index[errors > 1e-3])
    norm = (ran[ran.version.isin(wrong)].norm_ratio - 1).abs().max() if wrong else 0
    right = drawing.value_range(errors.drop(wrong), ".0e") if len(errors) > len(wrong) else "none"
    title = (
        f"The gradient of torchembed {', '.join(map(str, wrong))} is off by up to {errors[wrong].max():.2f} times its "
        f"norm. The norm itself is right to {digits(norm)}. The other versions are off by at most {right}, and the "
        f"results of all by at most {longer.forward_error.max().max():.0e}"
        if wrong
        else "The gradient of every version is right"
    )
    panels = grid(1, 1, (8.5, 3.4), title, footer)
    ax = panels.axes[0, 0]
    for place, (version, rows) in enumerate(ran.groupby("version")):
        look = {"marker": "osvD^P"[place], "color": COLORBLIND[place], "markersize": 9 - 2 * place}
        marks.line(ax, rows.seq_len, rows.gradient_error, look, label=f"torchembed {version}")
    rows = ran[ran.version == ran.version.min()]
    ax.plot(rows.seq_len, rows.wrong_backward_error, "--k", linewidth=1, label="derived for a repeated forward")
    ax.axhline(np.sqrt(2), color="grey", linewidth=1, linestyle=":", label="square root of 2")
    ax.set(xscale="log", ylim=(-0.05, 1.6))
    ticks.at(ax.xaxis, sorted(ran.seq_len.unique()))
    return panels.finish("sequence length (tokens)", "relative error (L2), float32", legend=3)


def paths(launches: pd.DataFrame, footer: str = "") -> Figure:
    """The raw kernel beside the ways DeepSpeed reaches it: time in copies, launches and extra memory."""
    need(launches.path, "raw kernel", "DeepSpeed API")
    frame = launches.assign(copies=launches.median_us / launches.copy_us)
    raw, api = (frame[frame.path == name] for name in ("raw kernel", "DeepSpeed API"))
    slower = api.median_us / raw.median_us.iloc[0]
    title = (
        f"Through DeepSpeed's function the kernel takes {drawing.value_range(slower, '.1f')} times as long as alone. "
        f"The function makes {drawing.value_range(api.launches, 'd')} launches and "
        f"{drawing.value_range(api.extra_bytes / api.tensor_bytes, '.0f')} tensors of extra memory"
    )
    panels = grid(1, 1, (11, 0.45 * len(frame) + 1.2), title, footer)
    ax = panels.axes[0, 0]
    place = np.arange(len(frame))[::-1]
    extra = (frame.extra_bytes / frame.tensor_bytes).round()
    texts = [
        f"{row.launches} launch{'es' * (row.launches > 1)}, {more:.0f} extra tensor{'s' * (more != 1)}, "
        f"{row.median_us:.0f} µs"
        for row, more in zip(frame.itertuples(), extra, strict=True)
    ]
    marks.bars(ax, place, frame.copies, 0.6, color=[_LOOKS.color(path) for path in frame.path])
    marks.beside(ax, frame.copies, place, texts, gap=5, size=8.5)
    marks.one(ax)
    ax.set_yticks(place, frame.path + ": " + frame.input)
    ax.set(xlim=(0, 1.5 * frame.copies.max()))
    return panels.finish("time of a call over the time of the best copy of the tensor")


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    **table_figures.FIGURES,
    "deepspeed_gradients": (("deepspeed_correctness",), gradients),
    "deepspeed_paths": (("deepspeed_launches",), paths),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
