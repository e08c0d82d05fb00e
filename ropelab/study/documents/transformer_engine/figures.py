"""Figures of TransformerEngine#3057: each takes its records and returns a figure whose title is computed from them."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ropelab.study.documents.transformer_engine import findings
from ropelab.study.documents.transformer_engine.dispatch import HEURISTICS
from ropelab.study.documents.transformer_engine.evidence import published_a, published_b
from ropelab.study.documents.transformer_engine.findings import NEW, OLD
from ropelab.study.documents.transformer_engine.layer import WITHOUT
from ropelab.study.documents.transformer_engine.measure import GIVEN, INTEROP, NAMES, PACKAGE, SUMMED
from ropelab.study.plots import drawing
from ropelab.study.plots.drawing import COLORBLIND, value_range

_PUBLISHED = "published (H100, TransformerEngine)"
_PUBLISHED_LAYER = "published (TransformerEngine, GPU not stated)"
_LOOKS = {INTEROP: {"label": "ropelab, called as TransformerEngine", "color": COLORBLIND[9], "marker": "P"}}
_STEPS = {GIVEN: "from a given cotangent", SUMMED: "with sum()"}
_RINGS = {"first": ("o", "the first heuristic's choice"), "merged": ("s", "the merged heuristic's choice")}


def table_b(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """Time against the number of sequences, without and with the sum, and the speed-up beside the published one."""
    published = published_b().set_index("n_seqs").speedup
    tables = {step: _of(findings.times(kernels, step), "table B") for step in (GIVEN, SUMMED)}
    ratios = {step: (table[OLD] / table[NEW]).dropna() for step, table in tables.items()}
    last = max(published.index)
    told = [f"{ratio[last]:.0f} {_STEPS[step]}" for step, ratio in ratios.items() if last in ratio]
    title = (
        f"The old grid's time for {last:,} sequences over the new one's: {', '.join(told) or 'not measured'} "
        f"(published {published[last]:.0f} with sum()); ropelab's own time moves by {_spread(tables[GIVEN])} over the "
        f"packings{_with_sum(kernels)}"
    )
    fig, axes = drawing.grid(1, 3, (4.7, 3.9), title, footer)
    for ax, (step, table) in zip(axes[0], tables.items(), strict=False):
        _lines(ax, table)
        ax.set(
            title=f"GPU time of both passes, {_STEPS[step]}",
            xlabel="sequences in 65,536 tokens",
            ylabel="GPU time (µs)",
            yscale="log",
        )
        drawing.plain_log(ax.yaxis)
    axes[0, 1].sharey(axes[0, 0])
    ax = axes[0, 2]
    ax.plot(published.index, published, "_k", markersize=22, markeredgewidth=2.5, label=_PUBLISHED)
    for (step, ratio), marker in zip(ratios.items(), ("o", "^"), strict=False):
        ax.plot(ratio.index, ratio, marker, color=COLORBLIND[0], label=f"our models here, {_STEPS[step]}", markersize=7,
                markerfacecolor=COLORBLIND[0] if step == SUMMED else "white")  # fmt: skip
    ax.set(title="speed-up of the new grid over the old", xlabel="sequences in 65,536 tokens", yscale="log",
           ylabel="old time / new time")  # fmt: skip
    drawing.plain_log(ax.yaxis)
    for ax in axes[0]:
        _counts(ax, published.index)
    drawing.legend(fig, axes, columns=4)
    drawing.say_untimed(fig, kernels)
    return fig


def dead_blocks(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """What the legacy grid takes beyond its live blocks, against those without a token."""
    fit = findings.dead_block_fit(kernels)
    if fit.empty:
        raise ValueError("kernels: expected times of both grids with many dead blocks")
    ns = fit.ns_per_dead_block.dropna()
    stated = published_b().ns_per_dead_block
    off = (fit[OLD] / fit.fitted_us - 1).abs()
    title = (
        f"A block without a token costs {ns.median():.2f} ns in each pass (published, on an H100: "
        f"{value_range(stated[stated.index > 2], '.2f')}); this one number explains {len(fit)} cells within "
        f"{off.max():.0%}, half of them within {off.median():.0%}"
    )
    fig, axes = drawing.grid(1, 2, (5.6, 3.9), title, footer)
    beyond, each = axes[0]
    for (part, rows), marker, color in zip(fit.groupby("part", sort=False), "os^D", (0, 1, 2, 4), strict=False):
        many = rows[rows.ns_per_dead_block.notna()]
        look = {"color": COLORBLIND[color], "marker": marker, "linestyle": "none", "markeredgecolor": "white",
                "markersize": 7}  # fmt: skip
        beyond.plot(many.dead_blocks, many.beyond_us, label=_PARTS.get(part, part), **look)
        each.plot(many.dead_blocks, many.ns_per_dead_block, **look)
    ends = np.array([fit.dead_blocks[fit.ns_per_dead_block.notna()].min(), fit.dead_blocks.max()])
    beyond.plot(ends, ends * 2 * ns.median() / 1000, color="black", linewidth=1,
                label=f"{ns.median():.2f} ns a block and pass")  # fmt: skip
    table = published_b().dropna()
    each.plot(table.dead_blocks, table.ns_per_dead_block, "_k", markersize=16, markeredgewidth=2.5, label=_PUBLISHED)
    beyond.set(title="time beyond that of the blocks with a token", yscale="log", ylabel="GPU time, two passes (µs)")
    drawing.plain_log(beyond.yaxis)
    each.set(title="time of each dead block", ylabel="ns for each block and pass")
    each.set_ylim(bottom=0)
    for ax in (beyond, each):
        ax.set(xscale="log", xlabel="blocks without a token")
    drawing.legend(fig, axes, columns=4)
    return fig


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
    suffer = "only under a table longer than they are" if max(cut, default=0) <= 1 else "even under a table as they are"
    title = (
        f"Equal sequences suffer {suffer}: cut to their length, the old grid takes "
        + " and ".join(phrases)
        + " as the new one"
    )
    fig, axes = drawing.grid(1, len(counts), (4.6, 3.7), title, footer, sharey=True)
    for ax, n in zip(axes[0], counts, strict=True):
        rows = equal[(equal.n_seqs == n)].sort_values(["freqs_len", "part"]).drop_duplicates("freqs_len")
        for name in (OLD, NEW, "ropelab"):
            ax.plot(rows.freqs_len, rows[name], **_look(name), markersize=7, markeredgecolor="white")
        ax.set(xscale="log", yscale="log", title=f"{n:,} equal sequences", xlabel="rows of freqs")
        ax.xaxis.set_major_locator(FixedLocator(rows.freqs_len))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticklabels([f"{value:,}" for value in rows.freqs_len], size=8, rotation=30)
        drawing.plain_log(ax.yaxis)
    axes[0, 0].set_ylabel("GPU time (µs)")
    drawing.legend(fig, axes)
    return fig


def skew(kernels: pd.DataFrame, footer: str = "") -> Figure:
    """One long sequence among short ones, under the shortest table there can be; and what each heuristic takes."""
    table = findings.choices(kernels)
    shown = table[table.kind == "skewed"]
    panels = [panel for _, panel in shown.groupby(["cp_size", "longest"], sort=True)]
    phrases = [f"the {name} heuristic {findings.missed_words(shown, name)}" for name in HEURISTICS]
    title = (
        "One long sequence, and no table can be short: " + "; ".join(phrases) + f". ropelab, which launches by tokens "
        f"and searches nothing, moves by {_spread(shown[shown.cp_size == 1])}"
    )
    columns = -(-len(panels) // 2) if len(panels) > 3 else max(1, len(panels))
    fig, axes = drawing.grid(-(-len(panels) // columns), columns, (4.6, 3.5), title, footer)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        panel = panel.sort_values("n_seqs").reset_index(drop=True)  # a place for each count: 63 and 64 are apart
        _lines(ax, panel, (OLD, NEW, "ropelab", "flash_attn"))
        for name, (marker, label) in _RINGS.items():
            taken = [row[NAMES[row[name]]] for _, row in panel.iterrows()]
            ax.plot(panel.index, taken, marker, markersize=9 if marker == "o" else 13, markerfacecolor="none",
                    markeredgecolor="0.2", markeredgewidth=1, label=label, zorder=6)  # fmt: skip
        ranks = f", {panel.cp_size.iloc[0]} ranks" if panel.cp_size.iloc[0] > 1 else ""
        ax.set(title=f"the longest has {panel.longest.iloc[0]:,} tokens{ranks}", yscale="log", xlabel="sequences")
        drawing.plain_log(ax.yaxis)
        ax.set_xticks(panel.index, [f"{n:,}" for n in panel.n_seqs], size=8)
        ax.set_ylabel("GPU time (µs)")
    drawing.legend(fig, axes, columns=3)
    drawing.say_untimed(fig, kernels[kernels.part == "skew"])
    return fig


def layer(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The layer with each rotation, and the rotation's share beside the published one."""
    table = findings.shares(frame)
    times, share = (
        table.pivot_table(index="n_seqs", columns="contender", values=what) for what in ("layer_us", "share")
    )
    without = frame[(frame.status == "ok") & (frame.contender == WITHOUT)].set_index("n_seqs").median_us
    stated = published_a().set_index("n_seqs")
    names = [name for name in (OLD, NEW, "ropelab", PACKAGE) if name in times]
    speed = (times[OLD] / times[NEW]).dropna() if {OLD, NEW} <= set(times) else pd.Series(dtype=float)
    title = (
        f"The new grid makes the layer {value_range(speed, '.1f')} times as fast (published "
        f"{value_range(stated.speedup, '.1f')}); q and k alone take "
        + ", ".join(f"{value_range(100 * share[name], '.0f')} % of it with {drawing.label(name)}" for name in names)
        + f" (published {value_range(stated.old_share_percent, '.0f')} % and "
        f"{value_range(stated.new_share_percent, '.0f')} %)"
    )
    fig, axes = drawing.grid(1, 2, (6.2, 3.9), title, footer)
    bars, shares = axes[0]
    place = np.arange(len(times))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = place + (i - (len(names) - 1) / 2) * width
        color = _look(name)["color"]
        base = times.index.map(without) / 1000
        bars.bar(at, times[name] / 1000, width * 0.92, color=color, label=drawing.label(name))
        bars.bar(at, base, width * 0.92, color="0.8", label=WITHOUT, hatch="//", edgecolor="white")
        for x, value in zip(at, times[name] / 1000, strict=True):
            bars.annotate(f"{value:,.0f}", (x, value), (0, 2), textcoords="offset points", ha="center", size=8)
        shares.plot(at, 100 * share[name], linestyle="none", markersize=8, clip_on=False, zorder=4,
                    **_look(name, label=False))  # fmt: skip
    for column, name in (("old_share_percent", OLD), ("new_share_percent", NEW)):
        if name not in names:
            continue
        at = place + (names.index(name) - (len(names) - 1) / 2) * width
        shares.plot(at, stated[column].reindex(times.index), "_k", markersize=24, markeredgewidth=2,
                    label=_PUBLISHED_LAYER)  # fmt: skip
    bars.set(title="layer, forward and backward", ylabel="GPU time (ms)")
    shares.set(title="q and k alone, over the layer", ylabel="share (%)", ylim=(-3, 103))
    for ax in (bars, shares):
        ax.set_xticks(place, [f"{n:,}" for n in times.index])
        ax.set_xlabel("sequences in 65,536 tokens")
    bars.grid(False, axis="x")
    drawing.legend(fig, axes, columns=5)
    drawing.say_untimed(fig, frame)
    return fig


_PARTS = {"table B": "table B", "freqs_len": "other lengths of freqs", "skew": "one long sequence",
          "empty": "every other sequence empty"}  # fmt: skip


def _of(table: pd.DataFrame, part: str) -> pd.DataFrame:
    return table[table.part == part].set_index("n_seqs").sort_index()


def _look(name: str, *, label: bool = True) -> dict[str, object]:
    look = _LOOKS.get(name) or drawing.look(name)
    return look if label else {key: value for key, value in look.items() if key != "label"}


def _lines(
    ax: Axes, table: pd.DataFrame, names: tuple[str, ...] = (OLD, NEW, "ropelab", INTEROP, "flash_attn", PACKAGE)
) -> None:
    """A line for each contender, over the number of sequences."""
    for name in names:
        if name in table and table[name].notna().any():
            line = table[name].dropna()
            ax.plot(line.index, line, **_look(name), markersize=6, markeredgecolor="white", markeredgewidth=0.5,
                    linewidth=1.4, zorder=5 if name == "ropelab" else 3)  # fmt: skip


def _counts(ax: Axes, counts) -> None:
    """Numbers of sequences as plain numbers on a logarithmic axis."""
    counts = [n for i, n in enumerate(sorted(counts)) if i == 0 or n > 1.3 * sorted(counts)[i - 1]]
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(counts))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.tick_params(axis="x", labelsize=8)


def _spread(table: pd.DataFrame) -> str:
    """How far ropelab's times lie apart, in percent."""
    if table.ropelab.isna().all():
        return "an unknown amount"
    return f"{table.ropelab.max() / table.ropelab.min() - 1:.0%}"


def _with_sum(kernels: pd.DataFrame) -> str:
    """What the sum makes of ropelab's and flash-attn's times, as the end of a sentence."""
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
"""Figure -> the studies it draws, and how: a function of their tables and the footer."""
