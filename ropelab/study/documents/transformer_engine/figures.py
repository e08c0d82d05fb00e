"""Figures of TransformerEngine#3057: each takes its records and returns a figure with a title computed from them."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ropelab.study.documents.transformer_engine import findings
from ropelab.study.documents.transformer_engine.dispatch import HEURISTICS
from ropelab.study.documents.transformer_engine.evidence import published_a, published_b
from ropelab.study.documents.transformer_engine.grids import ALL, FORCED, NEW, OLD, PACKAGES, Grids, chosen
from ropelab.study.documents.transformer_engine.layer import WITHOUT
from ropelab.study.documents.transformer_engine.measure import GIVEN, INTEROP, SUMMED
from ropelab.study.plots import drawing, marks, ticks
from ropelab.study.plots.drawing import value_range
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS, Looks
from ropelab.study.plots.panels import facet, grid

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
    """The time against the number of sequences, without and with the sum, and the measured and published speed-ups."""
    published = published_b().set_index("n_seqs").speedup
    tables = {step: _of(findings.times(kernels, step), "table B") for step in (GIVEN, SUMMED)}
    ratios = {step: (table[OLD] / table[NEW]).dropna() for step, table in tables.items()}
    last = max(published.index)
    told = [f"{ratio[last]:.0f} {_STEPS[step]}" for step, ratio in ratios.items() if last in ratio]
    title = (
        f"Equal packings: the old grid and the new grid. At {last:,} sequences the old grid takes so many "
        f"times as long: {', '.join(told) or 'not measured'} "
        f"(published {published[last]:.0f} with sum()); ropelab's own time varies by {_spread(tables[GIVEN])} over the "
        f"packings{_with_sum(kernels)}"
    )
    panels = grid(1, 3, (4.7, 3.9), title, footer)
    for ax, (step, table) in zip(panels.axes[0], tables.items(), strict=False):
        _lines(ax, table, _looks(kernels))
        ax.set(title=f"GPU time of both passes, {_STEPS[step]}")
    panels.axes[0, 1].sharey(panels.axes[0, 0])
    ax = panels.axes[0, 2]
    marks.published(ax, published.index, published, _PUBLISHED, width=22)
    for (step, ratio), marker in zip(ratios.items(), ("o", "^"), strict=False):
        ax.plot(ratio.index, ratio, marker, color=COLORBLIND[0], label=f"here, {_STEPS[step]}", markersize=7,
                markerfacecolor=COLORBLIND[0] if step == SUMMED else "white")  # fmt: skip
    ax.set(title="speed-up of the new grid over the old grid", yscale="log", ylabel="old time / new time")
    ticks.plain_log(ax.yaxis)
    counts = sorted(published.index)
    counts = [n for n, before in zip(counts, [0, *counts], strict=False) if n > 1.3 * before]  # room for each number
    for ax in panels.axes[0]:
        ax.set(xscale="log")
        ticks.at(ax.xaxis, counts)
        ax.tick_params(axis="x", labelsize=8)
    return panels.finish("sequences in 65,536 tokens", legend=4, untimed=kernels)


def dead_blocks(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """The legacy grid's time beyond its live blocks, against the number of blocks without a token."""
    fit = findings.dead_block_fit(kernels)
    if fit.empty:
        raise ValueError("kernels: expected times of both grids with many dead blocks")
    ns = fit.ns_per_dead_block.dropna()
    stated = published_b().ns_per_dead_block
    off = (fit[OLD] / fit.fitted_us - 1).abs()
    title = (
        f"An empty block costs {ns.median():.2f} ns in each pass. Published, on an H100: "
        f"{value_range(stated[stated.index > 2], '.2f')}. This one number explains {len(fit)} cells within "
        f"{off.max():.0%}, half of them within {off.median():.0%}"
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
    """Time against the length of the table, for equal sequences."""
    table = findings.times(kernels)
    equal = table[table.part.isin(("freqs_len", "table B")) & (table.kind.isin(("balanced", "remainder last")))]
    counts = sorted(table[table.part == "freqs_len"].n_seqs.unique())
    phrases, cut = [], []
    for n in counts:
        rows = equal[(equal.n_seqs == n) & (equal.part == "freqs_len")].sort_values("freqs_len")
        ratio = rows[OLD] / rows[NEW]
        if ratio.notna().any():
            cut.append(ratio.iloc[0])
            phrases.append(f"{ratio.iloc[0]:.2f} times as long for {n:,} of {rows.longest.max():,}")
    suffer = "only with a longer table" if max(cut, default=0) <= 1 else "even with a table of their own length"
    title = (
        f"Equal sequences lose time {suffer}. With a table of their own length, the old grid takes "
        + " and ".join(phrases)
        + " as the new grid"
    )
    words = {n: f"{n:,} equal sequences" for n in counts}
    shown = equal[equal.n_seqs.isin(counts)].sort_values(["n_seqs", "freqs_len", "part"])
    panels = facet(shown, (4.6, 3.7), title, footer, column="n_seqs", words=words, sharey=True)
    for ax, rows, _ in panels:
        rows = rows.drop_duplicates("freqs_len")
        for name in (OLD, NEW, "ropelab"):
            ax.plot(rows.freqs_len, rows[name], **_looks(kernels)(name), markersize=7, markeredgecolor="white")
        ax.set(xscale="log", yscale="log")
        ticks.at(ax.xaxis, rows.freqs_len)
        ax.tick_params(axis="x", labelsize=8, labelrotation=30)
        ticks.plain_log(ax.yaxis)
    return panels.finish("rows of freqs", "GPU time (µs)", legend=6)


def skew(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """One long sequence among short sequences, with the shortest possible table, and the choice of each heuristic."""
    table = findings.choices(kernels)
    shown = table[table.kind == "skewed"]
    panels = [panel for _, panel in shown.groupby(["cp_size", "longest"], sort=True)]
    phrases = [f"the {name} heuristic {findings.missed_words(shown, name)}" for name in HEURISTICS]
    title = (
        "One long sequence needs a long table. Of the choices, "
        + "; ".join(phrases)
        + f". ropelab launches by tokens and searches "
        f"nothing: its time varies by {_spread(shown[shown.cp_size == 1])}"
    )
    columns = -(-len(panels) // 2) if len(panels) > 3 else max(1, len(panels))
    sheet = grid(-(-len(panels) // columns), columns, (4.6, 3.5), title, footer, shown=len(panels))
    for ax, panel in zip(sheet.axes.flat, panels, strict=False):
        panel = panel.sort_values("n_seqs").reset_index(drop=True)  # a place for each count: 63 and 64 are apart
        _lines(ax, panel, _looks(kernels, FORCED), (OLD, NEW, "ropelab", "flash_attn", PACKAGES.new))
        for name, (marker, size) in _RINGS.items():
            taken = [row[findings.grid_of(row[name])] for _, row in panel.iterrows()]
            ax.plot(panel.index, taken, marker, markersize=size, markerfacecolor="none", markeredgecolor="0.2",
                    markeredgewidth=1, label=f"the {name} heuristic's choice", zorder=6)  # fmt: skip
        ranks = f", {panel.cp_size.iloc[0]} ranks" if panel.cp_size.iloc[0] > 1 else ""
        ax.set(title=f"the longest has {panel.longest.iloc[0]:,} tokens{ranks}", xlabel="sequences")
        ax.set_xticks(panel.index, [f"{n:,}" for n in panel.n_seqs], size=8)
    return sheet.finish(legend=3, untimed=kernels[kernels.part == "skew"])


def layer(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The time of the layer with each rotation, and the rotation's share beside the published share."""
    table = findings.shares(frame)
    times, share = (
        table.pivot_table(index="n_seqs", columns="contender", values=what) for what in ("layer_us", "share")
    )
    without = frame[(frame.status == "ok") & (frame.contender == WITHOUT)].set_index("n_seqs").median_us
    stated = published_a().set_index("n_seqs")
    names = [name for name in (OLD, NEW, "ropelab", PACKAGES.new) if name in times]
    looks = _looks(frame)
    speed = (times[OLD] / times[NEW]).dropna() if {OLD, NEW} <= set(times) else pd.Series(dtype=float)
    title = (
        f"The new grid makes the layer {value_range(speed, '.1f')} times as fast. Published is "
        f"{value_range(stated.speedup, '.1f')}. q and k alone take "
        + ", ".join(f"{value_range(100 * share[name], '.0f')} % of it with {looks.label(name)}" for name in names)
        + f" (published {value_range(stated.old_share_percent, '.0f')} % and "
        f"{value_range(stated.new_share_percent, '.0f')} %)"
    )
    panels = grid(1, 2, (6.2, 3.9), title, footer)
    bars, shares = panels.axes[0]
    place, width = np.arange(len(times)), 0.8 / len(names)
    stated_as = {OLD: "old_share_percent", NEW: "new_share_percent"}
    for i, name in enumerate(names):
        at, look = place + (i - (len(names) - 1) / 2) * width, looks(name)
        bars.bar(at, times[name] / 1000, width * 0.92, color=look["color"], label=look.pop("label"))
        bars.bar(at, times.index.map(without) / 1000, width * 0.92, color="0.8", label=WITHOUT, hatch="//",
                 edgecolor="white")  # fmt: skip
        marks.above(bars, at, times[name] / 1000, (times[name] / 1000).map("{:,.0f}".format))
        shares.plot(at, 100 * share[name], linestyle="none", markersize=8, clip_on=False, zorder=4, **look)
        if name in stated_as:
            dashes = stated[stated_as[name]].reindex(times.index)
            marks.published(shares, at, dashes, _PUBLISHED_LAYER, width=24, weight=2)
    bars.set(title="layer, forward and backward", ylabel="GPU time (ms)")
    shares.set(title="q and k alone, over the layer", ylabel="share (%)", ylim=(-3, 103))
    for ax in (bars, shares):
        ax.set_xticks(place, [f"{n:,}" for n in times.index])
    bars.grid(False, axis="x")
    return panels.finish("sequences in 65,536 tokens", legend=5, untimed=frame)


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


def _spread(table: pd.DataFrame) -> str:
    """The spread of ropelab's times, in percent."""
    if table.ropelab.isna().all():
        return "an unknown amount"
    return f"{table.ropelab.max() / table.ropelab.min() - 1:.0%}"


def _with_sum(kernels: pd.DataFrame) -> str:
    """The effect of the sum on ropelab's and flash-attn's times, as the end of a sentence."""
    effects = findings.sum_effects(kernels).set_index("contender").added
    told = [f"{drawing.label(name)} {effects[name]:+.0%}" for name in ("ropelab", "flash_attn") if name in effects]
    return f"; the sum and its backward: {', '.join(told)}" if told else ""


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "te_table_b": (("te_kernels",), table_b),
    "te_dead_blocks": (("te_kernels",), dead_blocks),
    "te_freqs_len": (("te_kernels",), freqs_len),
    "te_skew": (("te_kernels",), skew),
    "te_layer": (("te_layer",), layer),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
