"""Draw the records ``dense`` and ``model_heads`` of every GPU.

The figures show bytes a second under the roof of a copy, the speed-up over each peer, and drawn calls by their tokens.
"""

import re

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.plots import drawing, marks, ticks
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS
from ropelab.study.plots.panels import facet, grid
from ropelab.study.topics.performance import dense, model_heads
from ropelab.study.topics.performance.comparison import OURS, against_peers

_SHOWN = (OURS, "liger", "flash_attn", "hf_compiled", "hf_eager")
_LINES = re.compile(r"(?<=-)|, | (?=[\d(.]|own|product|eager|torch)")
"""The places at which the name of a contender may go on in the next line."""


def roofline(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Gigabytes a second against the bytes of a call: a bar from the least to the largest value that noise allows.

    A bar covers both layouts and directions of all cells with as many bytes. The roof is the best copy of each cell.
    """
    times = drawing.noisy("dense", frame)
    times = times.assign(gb_s=times.bytes / 1e3 / times.median_us)
    panels = facet(times, (4.6, 4.0), drawing.title(dense.copy_sentence, frame), footer, column="gpu", sharey=True)
    for ax, panel, _ in panels:
        copies = drawing.copies(panel).groupby("bytes").gb_s.max()
        ax.plot(copies.index, copies, **marks.COPY)
        for step, name in enumerate(_SHOWN):
            found = drawing.spans(panel[panel.contender == name], "bytes", "gb_s", speed=True)
            # The bars stand beside each other, so that none hides another.
            marks.spans(ax, found.index * 1.06 ** (step - len(_SHOWN) // 2), found, CONTENDERS(name))
        ax.set(xscale="log", yscale="log")
        ticks.plain_log(ax.yaxis)
    shown = frame[frame.contender.isin(_SHOWN)]
    return panels.finish("bytes that a call reads and writes", "GB/s", legend=3, untimed=shown)


def speedups(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The time of each peer over the time of ropelab, least value: a map of cells and peers for each GPU."""
    rows = {gpu: against_peers(part).assign(gpu=gpu) for gpu, part in frame.groupby("gpu", sort=False)}
    every = pd.concat(rows.values())
    least = every.pivot_table(index="cell", columns=["gpu", "contender"], values="slower", aggfunc="min", sort=False)
    title = drawing.title(dense.peers_sentence, frame)
    names = CONTENDERS.ordered(every.contender)
    panels = grid(len(rows), 1, (1.2 + 0.78 * len(names), 0.36 * len(least) + 1.4), title, footer)
    for ax, gpu in zip(panels.axes[:, 0], rows, strict=True):
        table = least[gpu].reindex(columns=names)

        columns = [_LINES.sub("\n", CONTENDERS.label(name)) for name in names]
        times = np.log2(table.clip(upper=16)).set_axis(columns, axis=1)
        marks.cells(ax, times, table.map("{:.2f}".format), labels=7, cmap="PuOr", vmin=-4, vmax=4)
        ax.set_title(gpu, loc="left")
    return panels.finish()


def drawn_calls(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The drawn calls of `model_heads` against their tokens: ropelab's fraction of the limit, on each GPU."""
    times = model_heads.judged(drawing.noisy("model_heads", frame))
    times = times.assign(tokens=times.batch * times.seq_len)
    times = times.assign(octave=2 ** (np.floor(np.log2(times.tokens)) + 0.5))
    panels = facet(times, (4.4, 4.0), drawing.title(dense.drawn_sentence, frame), footer, column="gpu", sharey=True)
    for ax, panel, _ in panels:
        for kind, rows in panel.groupby("large"):
            look = {"color": COLORBLIND[0 if kind else 1], "label": f"{'from' if kind else 'below'} 16 MB"}
            speed = rows.fraction_of_limit
            ax.vlines(rows.tokens, speed / rows.high, speed / rows.low, color=look["color"], linewidth=0.6)
            ax.plot(rows.tokens, speed, "o" if kind else "s", markersize=3, **look)
        found = panel.groupby("octave").fraction_of_limit.median()
        ax.plot(found.index, found, "k_", markersize=22, markeredgewidth=2.5, label="median of an octave")
        marks.one(ax, upright=False, label="limit: the copy of the same bytes")
        ax.set(xscale="log", ylim=(0, None))
    return panels.finish("tokens of the call", "fraction of the limit", legend=2)


def context_lengths(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The fraction of a copy against the length of one sequence: a bar over both directions with their noise."""
    times = drawing.noisy("lengths", frame)
    panels = facet(times, (5.2, 3.6), drawing.title(dense.lengths_sentence, frame), footer, column="gpu", sharey=True)
    for ax, panel, _ in panels:
        for step, (name, rows) in enumerate(drawing.contenders(panel)):
            found = drawing.spans(rows, "seq_len", "fraction_of_copy", speed=True)
            found.index *= 1.06 ** (step - 2)  # the bars stand beside each other, so that none hides another
            ax.plot(found.index, found.middle, color=CONTENDERS(name)["color"], linewidth=0.8)
            marks.spans(ax, found.index, found, CONTENDERS(name))
        marks.one(ax, upright=False, label="the best copy of the same bytes")
        ax.set(xscale="log", ylim=(0, None))
        ax.set_xticks(lengths := sorted(panel.seq_len.unique()), [f"{length:,}" for length in lengths], rotation=45)
        ax.minorticks_off()
    return panels.finish("tokens of the sequence", "fraction of a copy", legend=3)


FIGURES = {
    "roofline": (("dense",), roofline),
    "context_lengths": (("lengths",), context_lengths),
    "speedups": (("dense",), speedups),
    "drawn_calls": (("model_heads",), drawn_calls),
}
"""Figures of every GPU that has the record: their functions take its tables in one, with a column ``gpu``."""
