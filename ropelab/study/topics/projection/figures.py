"""Draw the law of the pass beside its measurements, and the products that rotate, for every GPU."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ropelab.bench.projection import BY_QUACK, COMPUTED, KERNEL, OURS, PRODUCT, QUACK
from ropelab.study.plots import drawing, gpus, marks, ticks
from ropelab.study.plots.looks import COLORBLIND
from ropelab.study.plots.panels import grid
from ropelab.study.topics.projection import findings
from ropelab.study.topics.projection.findings import INPUTS, MANY, MODEL

LOOKS = {
    OURS: ("a product, then a pass", 7, "D"), PRODUCT: ("our product, nothing rotates", 8, "v"),
    KERNEL: ("one kernel, tables", 0, "o"),
    COMPUTED: ("one kernel, angles computed", 3, "s"), QUACK: ("quack, one kernel", 2, "^"),
    BY_QUACK: ("quack, called by qkv_rope", 4, "p"),
}  # fmt: skip
"""Contender -> its words, the place of its colour, and its marker; the contrast to white is at least 3."""

_CASE = f"{MODEL['q_heads']}/{MODEL['k_heads']} heads, K = {INPUTS:,}"


def law(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The pass over the product for many tokens, against K: the law as lines, the records as points."""
    rows = findings.passes(frame)
    rows = rows[(rows.tokens >= MANY) & (rows[list(MODEL)] == list(MODEL.values())).all(axis=1)]
    panels = grid(1, 1, (5.6, 3.4), "The share of the pass falls with the width of x", footer)
    ax = panels.axes[0, 0]
    for number, (_, points, look) in enumerate(gpus.parts(rows)):
        wide = points[points.tokens == points.tokens.max()].sort_values("inputs")
        ax.plot(wide.inputs, wide.predicted, color=look["color"], linewidth=1.4, label=f"{look['label']}, law")
        at = points.inputs * (0.97 + 0.06 * number)  # beside each other
        named = look | {"label": f"{look['label']}, measured", "markersize": 4, "linestyle": "none"}
        gpus.upright(ax, at, points.measured, points.low, points.high, named)
    ax.set(xscale="log", yscale="log")
    ticks.at(ax.xaxis, sorted(rows.inputs.unique()))
    ticks.plain_log(ax.yaxis)
    ax.yaxis.set_major_formatter(lambda x, _: f"{100 * x:g}%")  # a tick below 1 % keeps its digits
    return panels.finish("K, the features of a token in x", "pass / product", legend=2)


def by_tokens(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The pass over the product against the tokens: the law with its launch, and the record."""
    rows = findings.passes(frame)
    rows = rows[(rows.inputs == INPUTS) & (rows[list(MODEL)] == list(MODEL.values())).all(axis=1)]
    panels = grid(1, 1, (5.6, 3.4), f"Few tokens: the pass is a launch ({_CASE})", footer)
    ax = panels.axes[0, 0]
    for _, points, look in gpus.parts(rows.sort_values("tokens")):
        ax.plot(points.tokens, points.predicted, color=look["color"], linewidth=1.4, label=f"{look['label']}, law")
        named = look | {"label": f"{look['label']}, measured", "markersize": 4, "linestyle": "none"}
        gpus.upright(ax, points.tokens, points.measured, points.low, points.high, named)
    ax.set(xscale="log", ylim=(0, 1.15 * rows[["measured", "predicted"]].max().max()))
    ticks.at(ax.xaxis, sorted(rows.tokens.unique()))
    ax.tick_params(axis="x", rotation=45)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    return panels.finish("tokens", "pass / product", legend=2)


def contenders(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Every way to rotate over the plain product of cuBLAS, against the tokens, with intervals."""
    rows = drawing.noisy(findings.RECORD, frame)
    rows = rows[(rows.inputs == INPUTS) & (rows[list(MODEL)] == list(MODEL.values())).all(axis=1)]
    names = list(dict.fromkeys(rows.gpu))
    title = f"Each way to rotate, and our product alone ({_CASE})"
    panels = grid(len(names), 1, (5.6, 3.1), title, footer, sharex=True, sharey=True)
    for ax, gpu in zip(panels.axes[:, 0], names, strict=True):
        for name, (words, place, marker) in LOOKS.items():
            points = rows[(rows.gpu == gpu) & (rows.contender == name)].sort_values("tokens")
            if len(points):
                look = {"label": words, "color": COLORBLIND[place], "marker": marker, "markersize": 5}
                ratio = points.over_product
                gpus.upright(ax, points.tokens, ratio, ratio * points.low, ratio * points.high, look)
        marks.one(ax, upright=False)
        ax.set(xscale="log", yscale="log", title=gpu)
        ticks.at(ax.xaxis, sorted(rows.tokens.unique()))
        ticks.at(ax.yaxis, (1, 1.1, 1.2, 1.5, 2, 3), "{:g}".format)
        ax.tick_params(axis="x", rotation=45)
    return panels.finish("tokens", "time / cuBLAS alone", legend=2)


def winners(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The fastest kernel without a pass over the product with a pass, for every product; below 1 it wins."""
    rows = findings.best(frame)
    names = list(dict.fromkeys(rows.gpu))
    lines = sorted(set(zip(rows.q_heads, rows.k_heads, rows.inputs, strict=True)))
    panels = grid(len(names), 1, (5.6, 0.3 * len(lines) + 0.9), "Below 1 the pass is not worth making", footer)
    for ax, gpu in zip(panels.axes[:, 0], names, strict=True):
        table = rows[rows.gpu == gpu].pivot_table(
            index=["q_heads", "k_heads", "inputs"], columns="tokens", values="ratio"
        )
        table = table.set_axis([f"{q}/{k}, {inputs:,}" for q, k, inputs in table.index]).rename(columns="{:,}".format)
        marks.cells(ax, table, cmap="RdBu_r", vmin=0.8, vmax=1.2)
        ax.set(title=gpu, ylabel="heads, K")
    return panels.finish("tokens")


FIGURES = {
    "projection_law": ((findings.RECORD,), law),
    "projection_by_tokens": ((findings.RECORD,), by_tokens),
    "projection_contenders": ((findings.RECORD,), contenders),
    "projection_winners": ((findings.RECORD,), winners),
}
"""The name of a figure -> its record, and the function that draws the tables of all GPUs in one."""
