"""Figures of TransformerEngine#3057: each takes its records and returns a figure with a title computed from them."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ropelab.study.documents.transformer_engine import findings
from ropelab.study.documents.transformer_engine.evidence import published_a, published_b
from ropelab.study.documents.transformer_engine.grids import (
    ALL,
    FORCED,
    GIVEN,
    INTEROP,
    NEW,
    OLD,
    PACKAGES,
    SUMMED,
    WITHOUT,
    Grids,
    chosen,
)
from ropelab.study.plots import marks, ticks
from ropelab.study.plots.drawing import value_range
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS, Looks
from ropelab.study.plots.panels import grid

_PUBLISHED = "published (H100, TransformerEngine)"
_PUBLISHED_LAYER = "published (TransformerEngine, GPU not stated)"
_LOOKS = CONTENDERS.extended({INTEROP: ("ropelab, called as TransformerEngine", 9, "P")})
_STEPS = {GIVEN: "from a given cotangent", SUMMED: "with sum()"}
_RINGS = {"first": ("o", 9), "merged": ("s", 13)}  # heuristic -> the mark around its choice and the mark's size


def _looks(record: pd.DataFrame, allowed: Sequence[Grids] = ALL) -> Looks:
    """The looks of the contenders; the labels of both grids say whose grids they are."""
    whose = chosen(record, allowed).words
    return _LOOKS.extended({OLD: (f"old grid ({whose})", 3, "v"), NEW: (f"new grid ({whose})", 2, "^")})


def table_b(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """The time against the number of sequences, and the measured and published speed-ups, without and with the sum."""
    published = published_b().set_index("n_seqs").speedup
    tables = {step: _of(findings.times(kernels, step), "table B") for step in (GIVEN, SUMMED)}
    ratios = {step: (table[OLD] / table[NEW]).dropna() for step, table in tables.items()}
    last = ratios[SUMMED].index.max()
    title = (
        f"The old grid takes {ratios[SUMMED][last]:.0f} times as long as the new grid at {last:,} sequences "
        f"(published {published[last]:.0f})"
    )
    panels = grid(1, 2, (5.8, 3.9), title, footer)
    lines, ax = panels.axes[0]
    _lines(lines, tables[GIVEN], _looks(kernels))
    lines.set(title=f"GPU time of both passes, {_STEPS[GIVEN]}")
    marks.published(ax, published.index, published, _PUBLISHED, width=22)
    for (step, ratio), marker in zip(ratios.items(), ("o", "^"), strict=False):
        ax.plot(ratio.index, ratio, marker, color=COLORBLIND[0], label=f"here, {_STEPS[step]}", markersize=7,
                markerfacecolor=COLORBLIND[0] if step == SUMMED else "white")  # fmt: skip
    ax.set(title="speed-up of the new grid over the old grid", yscale="log", ylabel="old time / new time")
    ticks.plain_log(ax.yaxis)
    counts = sorted(published.index)
    counts = [n for n, before in zip(counts, [0, *counts], strict=False) if n > 1.3 * before]  # room for each number
    for one in panels.axes[0]:
        one.set(xscale="log")
        ticks.at(one.xaxis, counts)
        one.tick_params(axis="x", labelsize=8)
    return panels.finish("sequences in 65,536 tokens", legend=3, untimed=kernels)


def dead_blocks(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """The legacy grid's time beyond its live blocks, against the number of blocks without a token."""
    fit = findings.dead_block_fit(kernels)
    if fit.empty:
        raise ValueError("kernels: expected times of both grids with many dead blocks")
    ns = fit.ns_per_dead_block.dropna()
    stated = published_b().set_index("n_seqs").ns_per_dead_block
    off = (fit[OLD] / fit.fitted_us - 1).abs()
    title = (
        f"An empty block costs {ns.median():.2f} ns in each pass. Published, on an H100: "
        f"{value_range(stated[stated.index >= 128], '.2f')} from 128 sequences on. This one number explains "
        f"{len(fit)} cells within {off.max():.0%}, half of them within {off.median():.0%}"
    )
    panels = grid(1, 2, (5.6, 3.9), title, footer)
    beyond, each = panels.axes[0]
    for (part, rows), marker, color in zip(fit.groupby("part", sort=False), "os^D", (0, 1, 2, 4), strict=False):
        many = rows[rows.ns_per_dead_block.notna()]
        look = {"color": COLORBLIND[color], "marker": marker, "markersize": 7, "markeredgewidth": 1, "zorder": 2}
        marks.dots(beyond, many.dead_blocks, many.beyond_us, look, label=_PARTS.get(part, part))
        marks.dots(each, many.dead_blocks, many.ns_per_dead_block, look)
    ends = np.array([fit.dead_blocks[fit.ns_per_dead_block.notna()].min(), fit.dead_blocks.max()])
    label = f"{ns.median():.2f} ns a block and pass"
    beyond.plot(ends, ends * 2 * ns.median() / 1000, color="black", linewidth=1, label=label)
    table = published_b().dropna()
    marks.published(each, table.dead_blocks, table.ns_per_dead_block, _PUBLISHED, width=16)
    beyond.set(title="time beyond the time of the blocks with a token", xscale="log", yscale="log",
               ylabel="GPU time, two passes (µs)")  # fmt: skip
    ticks.plain_log(beyond.yaxis)
    each.set(title="time of each empty block", xscale="log", ylabel="ns for each block and pass")
    each.set_ylim(bottom=0)
    return panels.finish("blocks without a token", legend=4)


def freqs_len(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """The old grid's time over the new grid's, against the length of the table, for equal sequences."""
    table = findings.times(kernels)
    equal = table[table.part.isin(("freqs_len", "table B")) & (table.kind.isin(("balanced", "remainder last")))]
    equal = equal.assign(ratio=equal[OLD] / equal[NEW]).sort_values(["n_seqs", "freqs_len", "part"])
    panels = [
        (n, equal[equal.n_seqs == n].drop_duplicates("freqs_len").dropna(subset="ratio"))
        for n in sorted(table[table.part == "freqs_len"].n_seqs.unique())
    ]
    suffer = "only with a longer table" if not equal.ratio.gt(1).all() else "even with a table of their own length"
    sheet = grid(1, 1, (8.5, 3.8), f"Equal sequences lose time {suffer}", footer)
    ax = sheet.axes[0, 0]
    for (n, rows), marker, color in zip(panels, "os^Dv", COLORBLIND, strict=False):
        marks.line(ax, rows.freqs_len, rows.ratio, {"marker": marker, "color": color, "markersize": 7},
                   label=f"{n:,} equal sequences")  # fmt: skip
    marks.one(ax, upright=False)
    ax.set(xscale="log", yscale="log")
    counts = sorted({int(rows) for _, part in panels for rows in part.freqs_len})
    ticks.at(ax.xaxis, [n for n in counts if n >= 1000 or n < 200])
    ticks.plain_log(ax.yaxis)
    return sheet.finish("rows of freqs", "old grid's time / new grid's time", legend=3)


def skew(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """One long sequence among short sequences: the times, and the empty blocks that decide which grid is faster."""
    table = findings.choices(kernels)
    shown = table[table.kind == "skewed"]
    title = "The empty blocks of each token decide which grid is faster"
    sheet = grid(1, 2, (5.8, 4.0), title, footer)
    lines, decided = sheet.axes[0]
    whole = shown[shown.cp_size == 1]
    panel = whole[whole.longest == whole.longest.max()].sort_values("n_seqs").reset_index(drop=True)
    _lines(lines, panel, _looks(kernels, FORCED), (OLD, NEW, "ropelab", "flash_attn", PACKAGES.new))
    if len(panel):  # a place for each count: 63 and 64 are apart
        lines.set(title=f"GPU time, the longest sequence has {panel.longest.iloc[0]:,} tokens", xlabel="sequences")
    lines.set_xticks(panel.index, [f"{n:,}" for n in panel.n_seqs], size=8)
    points = shown.assign(empty_blocks=shown.dead_blocks / shown.tokens, ratio=shown[OLD] / shown[NEW])
    for (ranks, rows), marker, color in zip(points.groupby("cp_size"), "o^sD", (7, 4, 8, 9), strict=False):
        look = {"marker": marker, "color": COLORBLIND[color], "markersize": 6}
        marks.dots(decided, rows.empty_blocks, rows.ratio, look, label=f"{ranks} rank{'s' * (ranks > 1)}")
    for name, (marker, size) in _RINGS.items():
        lost = points[points[f"{name}_slower"]]
        ring = {"markersize": size, "markerfacecolor": "none", "markeredgecolor": "0.2", "zorder": 6}
        decided.plot(lost.empty_blocks, lost.ratio, marker, label=f"the {name} heuristic is wrong", **ring)
    marks.one(decided, upright=False)
    decided.set(title="old grid's time / new grid's time", xlabel="empty blocks for each token", yscale="log")
    decided.set_xscale("symlog", linthresh=0.1)
    decided.set_xlim(-0.05, 2 * points.empty_blocks.max())
    ticks.at(decided.xaxis, [0, 0.1, 1, 10, 100, 1000], "{:g}".format)
    ticks.plain_log(decided.yaxis)
    return sheet.finish(legend=4, untimed=kernels[kernels.part == "skew"])


def layer(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The published and the measured speed-up of the layer, and its time with each rotation that is no old grid."""
    table = findings.shares(frame)
    times = table.pivot_table(index="n_seqs", columns="contender", values="layer_us")
    stated = published_a().set_index("n_seqs")
    names = [name for name in (OLD, NEW, "ropelab", PACKAGES.new) if name in times]
    looks = _looks(frame)
    speed = (times[OLD] / times[NEW]).dropna() if {OLD, NEW} <= set(times) else pd.Series(dtype=float)
    title = (
        f"The new grid makes the layer {value_range(speed, '.1f')} times as fast; published is "
        f"{value_range(stated.speedup, '.1f')}"
    )
    panels = grid(1, 2, (5.6, 3.9), title, footer)
    speeds, near = panels.axes[0]
    place = pd.Series(range(len(times)), times.index)
    marks.published(speeds, place, stated.speedup.reindex(times.index), _PUBLISHED_LAYER, width=34)
    marks.dots(speeds, place[speed.index], speed, looks(NEW) | {"label": "old grid / new grid, here"}, markersize=8)
    speeds.set(title="speed-up of the layer, forward and backward", yscale="log", ylabel="old time / new time")
    ticks.plain_log(speeds.yaxis)
    spans = findings.layer_spans(frame)
    close = [WITHOUT, *(name for name in names if name != OLD)]
    for name, shift in zip(close, np.linspace(-0.24, 0.24, len(close)), strict=True):
        rows = spans[spans.contender == name]
        marks.spans(near, place[rows.n_seqs] + shift, rows, looks(name), markersize=7)
    near.set(title="the layer with other rotations, 20th to 80th percentile", ylabel="GPU time (ms)")
    for ax in panels.axes[0]:
        ax.set_xticks(place, [f"{n:,}" for n in times.index])
        ax.set_xlim(-0.5, len(place) - 0.5)
    return panels.finish("sequences in 65,536 tokens", legend=3, untimed=frame)


_PARTS = {"table B": "table B", "freqs_len": "other lengths of freqs", "skew": "one long sequence",
          "empty": "every other sequence empty"}  # fmt: skip


def _of(table: pd.DataFrame, part: str) -> pd.DataFrame:
    return table[table.part == part].set_index("n_seqs").sort_index()


_CONTENDERS = (OLD, NEW, *PACKAGES.names, "ropelab", INTEROP, "flash_attn")


def _lines(ax: Axes, table: pd.DataFrame, looks: Looks, names: tuple[str, ...] = _CONTENDERS) -> None:
    """A line for each contender, over the number of sequences, on a logarithmic axis of times."""
    for name in names:
        if name in table and table[name].notna().any():
            known = table[name].dropna()
            marks.line(ax, known.index, known, looks(name), markersize=6, zorder=5 if name == "ropelab" else 3)
    ax.set(yscale="log", ylabel="GPU time (µs)")
    ticks.plain_log(ax.yaxis)


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "te_table_b": (("te_kernels",), table_b),
    "te_dead_blocks": (("te_kernels",), dead_blocks),
    "te_freqs_len": (("te_kernels",), freqs_len),
    "te_skew": (("te_kernels",), skew),
    "te_layer": (("te_layer",), layer),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
