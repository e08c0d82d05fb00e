"""Draw the record ``dense`` of every GPU: bytes a second under the roof of a copy, and the speed-up over each peer."""

import re

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.engine import noise
from ropelab.study.engine.repeats import between_runs
from ropelab.study.plots import drawing, marks, ticks
from ropelab.study.plots.heatmap import heatmap
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.plots.panels import facet, grid
from ropelab.study.topics.performance.comparison import OURS, against_peers, timed

_SHOWN = (OURS, "liger", "flash_attn", "hf_compiled", "hf_eager")
_LARGE = 16_000_000
_LINES = re.compile(r"(?<=-)|, | (?=[\d(.]|own|product|eager|torch)")
"""The places at which the name of a contender may go on in the next line."""


def roofline(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Gigabytes a second against the bytes of a call: a bar from the least to the largest value that noise allows.

    A bar covers both layouts and directions of all cells with as many bytes. The roof is the best copy of each cell.
    """
    times = drawing.timed(frame).assign(between_runs=lambda rows: between_runs("dense", rows))
    intervals = [noise.time(row) for _, row in times.iterrows()]
    rate = times.bytes / 1e3
    times = times.assign(
        least=rate / [one.high for one in intervals], most=rate / [one.low for one in intervals],
        gb_s=rate / times.median_us,
    )  # fmt: skip
    large = timed(times).query("contender == @OURS and bytes >= @_LARGE")
    title = (
        f"From 16 MB on, ropelab moves {large.gb_s.min() / 1e3:.1f} to {large.gb_s.max() / 1e3:.1f} TB/s, "
        f"{large.fraction_of_copy.min():.2f} to {large.fraction_of_copy.max():.2f} of a copy"
    )
    panels = facet(times, (5.6, 4.2), title, footer, column="gpu", sharey=True)
    for ax, panel, _ in panels:
        copies = drawing.copies(panel).groupby("bytes").gb_s.max()
        ax.plot(copies.index, copies, **marks.COPY)
        for step, name in enumerate(_SHOWN):
            own = panel[panel.contender == name].groupby("bytes")
            rows = own.agg({"least": "min", "gb_s": "median", "most": "max"})
            look = CONTENDERS(name)
            x = rows.index * 1.06 ** (step - len(_SHOWN) // 2)  # beside each other, so that no bar hides another
            ax.vlines(x, rows.least, rows.most, color=look["color"], linewidth=1.2)
            marks.dots(ax, x, rows.gb_s, look)
        ax.set(xscale="log", yscale="log")
        ticks.plain_log(ax.yaxis)
    shown = frame[frame.contender.isin(_SHOWN)]
    return panels.finish("bytes that a call reads and writes", "GB/s", legend=3, untimed=shown)


def speedups(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The time of each peer over the time of ropelab, least value: a map of cells and peers for each GPU."""
    rows = {gpu: against_peers(part).assign(gpu=gpu) for gpu, part in frame.groupby("gpu", sort=False)}
    every = pd.concat(rows.values())
    least = every.pivot_table(index="cell", columns=["gpu", "contender"], values="slower", aggfunc="min", sort=False)
    behind = (every.slower < 1).sum()
    title = f"No peer is faster in {len(every) - behind} of {len(every)} comparisons"
    names = CONTENDERS.ordered(every.contender)
    panels = grid(len(rows), 1, (1.2 + 0.78 * len(names), 0.36 * len(least) + 1.4), title, footer)
    for ax, gpu in zip(panels.axes[:, 0], rows, strict=True):
        table = least[gpu].reindex(columns=names)

        def write(row: int, column: int, table=table) -> tuple[str, str]:
            value = table.iloc[row, column]
            return ("" if np.isnan(value) else f"{value:.2f}", "white" if value > 3 else "black")

        columns = [_LINES.sub("\n", CONTENDERS.label(name)) for name in names]
        heatmap(ax, np.log2(table.clip(upper=16)), write, rows=table.index, columns=columns, size=8, labels=7,
                cmap="PuOr", vmin=-4, vmax=4)  # fmt: skip
        ax.set_title(gpu, loc="left")
    return panels.finish()


FIGURES = {"roofline": (("dense",), roofline), "speedups": (("dense",), speedups)}
"""Figures of every GPU that has the record: their functions take its tables in one, with a column ``gpu``."""
