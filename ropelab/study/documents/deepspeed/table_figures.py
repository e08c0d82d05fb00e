"""This file draws the table of DeepSpeed#8052: times at the document's shapes, and its speed-ups beside ours."""

from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ropelab.bench import records
from ropelab.study.plots import drawing
from ropelab.study.topics.performance.comparison import OURS

PUBLISHED = records.ROOT / "data" / "documents" / "deepspeed_8052_table.csv"

_CELL = ["cell", "layout", "dtype", "direction"]
_BASELINES = {"eager": "the eager formula", "compile": "torch.compile"}
_PUBLISHED_LABEL = "published (GB10)"


def document_table(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Latency against sequence length at the document's shapes, with the copy, per dtype and direction."""
    dtypes = drawing.ordered(frame.dtype, ("bfloat16", "float32"))
    directions = drawing.ordered(frame.direction, drawing.DIRECTIONS)
    times = drawing.timed(frame)
    ratios = {
        name: (times[times.contender == name].set_index(_CELL).median_us / _ours(times)).dropna() for name in _BASELINES
    }
    title = "At the document's shapes ropelab is " + " and ".join(
        f"{drawing.value_range(ratio, '.2f')} times as fast as {_BASELINES[name]}"
        for name, ratio in ratios.items()
        if len(ratio)
    )
    fig, axes = drawing.grid(len(directions), len(dtypes), (4.6, 3.3), title, footer, sharex=True, sharey="row")
    for row, direction in zip(axes, directions, strict=True):
        for ax, dtype in zip(row, dtypes, strict=True):
            panel = times[(times.direction == direction) & (times.dtype == dtype)]
            copy = drawing.copies(panel).groupby("seq_len").median_us.min()
            ax.plot(copy.index, copy, color="black", linestyle="--", linewidth=1.2, label="best copy", zorder=1)
            for name, line in drawing.contenders(panel):
                line = line.sort_values("seq_len")
                ax.plot(line.seq_len, line.median_us, **drawing.look(name), markersize=6, linewidth=1.4)
                ax.fill_between(
                    line.seq_len, line.q20_us, line.q80_us, color=drawing.look(name)["color"], alpha=0.2, linewidth=0
                )
            ax.set(xscale="log", yscale="log", title=f"{dtype}, {direction}")
            ax.xaxis.set_major_locator(FixedLocator(sorted(panel.seq_len.unique())))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            drawing.plain_log(ax.yaxis)
    for ax in axes[-1]:
        ax.set_xlabel("sequence length (tokens)")
    for ax in axes[:, 0]:
        ax.set_ylabel("GPU time (µs)")
    drawing.legend(fig, axes, columns=3)
    drawing.say_untimed(fig, frame)
    return fig


def published_speedups(frame: pd.DataFrame, published: pd.DataFrame, footer: str = "") -> Figure:
    """The document's speed-ups of torchembed's kernel beside those measured here, forward."""
    times = drawing.timed(frame)
    times = times[times.direction == "forward"]
    wide = times.pivot_table(index=["seq_len", "dtype"], columns="contender", values="median_us").reset_index()
    baselines = [name for name in _BASELINES if name in wide]
    measured = [name for name in ("torchembed", OURS) if name in wide]
    series, phrases = {}, []
    for baseline in baselines:
        stated = published.set_index("seq_len")
        stated = stated[f"{baseline}_ms"] / stated.triton_ms
        rows = {_PUBLISHED_LABEL: stated}
        for (dtype, cells), name in product(wide.set_index("seq_len").groupby("dtype"), measured):
            rows[f"{name} here, {dtype}"] = cells[baseline] / cells[name]
        series[baseline] = pd.DataFrame(rows)
        here = series[baseline].filter(like="torchembed here").stack()
        ratio = f"{drawing.value_range(here, '.1f')}x" if len(here) else "not measured"
        phrases.append(f"{ratio} over {_BASELINES[baseline]} (published {drawing.value_range(stated, '.1f')}x)")
    title = "torchembed's kernel, forward, measured here:\n" + ", ".join(phrases)
    fig, axes = drawing.grid(1, max(1, len(baselines)), (5.2, 3.8), title, footer, sharey=True)
    for ax, baseline in zip(axes[0], baselines, strict=True):
        table = series[baseline].sort_index()
        place = np.arange(len(table))
        ax.plot(
            place,
            table.pop(_PUBLISHED_LABEL),
            "_k",
            markersize=60,
            markeredgewidth=2.5,
            label=_PUBLISHED_LABEL,
        )
        for name in sorted(table):
            bf16 = "bfloat16" in name
            ax.plot(
                place + (-0.1 if bf16 else 0.1), table[name], "o" if bf16 else "s", label=name, markersize=8,
                markeredgecolor="white", markeredgewidth=0.5, color=drawing.look(name.split()[0])["color"],
            )  # fmt: skip
        ax.axhline(1, color="grey", linewidth=0.8)
        ax.set_xticks(place, [f"{s:,}" for s in table.index])
        ax.set(
            title=f"over {_BASELINES[baseline]}",
            xlabel="sequence length (tokens)",
            xlim=(-0.5, len(place) - 0.5),
        )
        ax.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("speed-up (times)")
    drawing.legend(fig, axes, columns=3, size=7)
    return fig


def _ours(times: pd.DataFrame) -> pd.Series:
    return times[times.contender == OURS].set_index(_CELL).median_us


FIGURES = {
    "document_table": (("deepspeed_table",), document_table),
    "published_speedups": (
        ("deepspeed_table",),
        lambda frame, footer: published_speedups(frame, pd.read_csv(PUBLISHED), footer),
    ),
}
"""As ``ropelab.study.plots.registry.FIGURES``."""
