"""Figures of fairseq2#1213: each takes the tables of its records and returns a figure whose title is computed.

RE is RotaryEncoder, and RRE is ReferenceRotaryEncoder. Times of the document's GPU enter as ratios only.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.documents.fairseq2 import findings
from ropelab.study.documents.fairseq2.evidence import IMPLEMENTATIONS, log, ratios
from ropelab.study.plots import drawing, marks, ticks
from ropelab.study.plots.looks import COLORBLIND
from ropelab.study.plots.panels import facet, grid

MODES = ("eager", "compiled")
_CELL = ["batch", "seq_len", "encoding_dim", "mode", "direction"]
_RATIO_LABELS = {"llama": "both in pairs\nRRE/RE llama", "reference": "both in halves\nRRE/RE reference",
                 "native": "each in its own layout\nRRE ref./RE llama"}  # fmt: skip
_STATED = "published, 27 cells"
_SERIES = {_STATED: "0.45", "here, forward": COLORBLIND[0], "here, forward and backward": COLORBLIND[1]}
_MODES = {("compiled", "compiled"): 3, ("eager", "eager"): 7, ("kernel", "ropelab"): 0}  # and the name in the legend
_TIMES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.2, 1.5, 2, 3, 4, 5, 7, 10, 15, 20)


def of_a_copy(timings: pd.DataFrame, footer: str = "") -> Figure:
    """The fraction of a copy of x that ropelab's kernel reaches, over the size of the tables, and the limits."""
    found = findings.of_a_copy(timings)
    title = f"ropelab's kernel runs at {drawing.value_range(found.fraction_of_copy)} of a copy, which reads no tables"
    colors = dict(zip(sorted(found.batch.unique()), COLORBLIND, strict=False))
    panels = facet(found, (5.6, 4.0), title, footer, column="direction", sharey=True)
    for ax, rows, _ in panels:
        for place, (batch, part) in enumerate(rows.groupby("batch")):
            at = part.tables_bytes / 1e6 * 1.08 ** (place - 1)  # beside one another
            ax.plot(at, part.fraction_of_copy, "o", color=colors[batch], markersize=5, alpha=0.7, markeredgewidth=0,
                    label=f"B = {batch}")  # fmt: skip
            if batch > 1:
                ax.axhline(part.once.iloc[0], color=colors[batch], linewidth=1.2, linestyle="--",
                           label=f"B = {batch}, if the batches share the tables")  # fmt: skip
        for left in rows.each_batch.unique():
            ax.axhline(
                left, color="grey", linewidth=1.2, linestyle=":", label="if every batch element reads the tables again"
            )
        ax.set(xscale="log", ylim=(0, 1.02))
        ticks.at(ax.xaxis, sorted((rows.tables_bytes / 1e6).unique()), "{:.0f}".format)
    label = "cosines and sines of the S positions, MB"
    return panels.finish(label, "fraction of the best copy of x", legend=3)


def published_ratios(timings: pd.DataFrame, footer: str = "") -> Figure:
    """The document's ratios of each cell beside the ratios measured here, for each mode and ratio."""
    stated = ratios(log(), "ms")
    here = ratios(drawing.timed(timings)[[*_CELL, "contender", "median_us"]], "median_us")
    stated = stated.assign(direction=_STATED)
    every = pd.concat([stated, here.assign(direction="here, " + here.direction)])
    sheet = grid(1, 2, (6.2, 4.0), drawing.title(findings.ratios_sentence, timings), footer)
    spread = np.random.default_rng(0)
    for ax, mode in zip(sheet.axes[0], MODES, strict=True):
        _cloud(ax, every[every["mode"] == mode], "ratio", _RATIO_LABELS, spread, size=9)
        ax.set(title=f"{mode} (above 1: RE is faster)")
    return sheet.finish(ylabel="RRE's time over RE's time", legend=3)


def _cloud(ax, frame: pd.DataFrame, column: str, names: dict[str, str], spread: np.random.Generator, **style) -> None:
    """Each cell's ``times`` by ``column``, published and here, with their means; ``spread`` moves points sideways."""
    for shift, (series, color) in zip((-0.25, 0, 0.25), _SERIES.items(), strict=True):
        for place, name in enumerate(names):
            values = frame[(frame.direction == series) & (frame[column] == name)].times
            at = place + shift + spread.uniform(-0.07, 0.07, len(values))
            ax.plot(at, values, "o", color=color, markersize=4, alpha=0.6, markeredgewidth=0, label=series)
            ax.plot([place + shift - 0.1, place + shift + 0.1], [values.mean()] * 2, color=color, linewidth=2.5)
    marks.one(ax, upright=False)
    ax.set_xticks(range(len(names)), list(names.values()), **style)
    ax.set(yscale="log")
    ax.grid(False, axis="x")
    ticks.at(ax.yaxis, _TIMES, "{:g}".format)


def memory_and_kernels(inductor: pd.DataFrame, footer: str = "") -> Figure:
    """Peak memory and launches of a call at the large shape, float32, per implementation and mode."""
    shown = inductor[(inductor.status == "ok") & (inductor.dtype == "float32")]
    shown = shown.assign(
        peak=shown.peak_bytes / shown.result_bytes,
        label=[f"{c}, {m}" if m != "kernel" else c for c, m in zip(shown.contender, shown["mode"], strict=True)],
    )
    forward = shown[shown.direction == "forward"]
    compiled = forward[(forward["mode"] == "compiled") & forward.contender.isin(IMPLEMENTATIONS)].peak
    first = shown.iloc[0]
    title = (
        f"Compiled calls peak at {drawing.value_range(compiled, '.1f')} times the result, eager calls at "
        f"{drawing.value_range(forward[forward['mode'] == 'eager'].peak, '.1f')}, ropelab's kernel at "
        f"{drawing.value_range(forward[forward['mode'] == 'kernel'].peak, '.1f')}. A forward in {first['dtype']} at "
        f"B{first.batch} S{first.seq_len:,} E{first.encoding_dim:,}"
    )
    place = marks.places(forward.sort_values(["contender", "mode"], ascending=[True, False]).label)
    panels = grid(1, 1, (9.0, 0.36 * len(place) + 1.0), title, footer)
    ax = panels.axes[0, 0]
    for (mode, name), color in _MODES.items():
        part = forward[forward["mode"] == mode]
        texts = [
            f"{row.kernels:.0f} launch{'es' * (row.kernels != 1)}, {row.median_us / 1000:.2f} ms"
            for row in part.itertuples()
        ]
        marks.bars(ax, place[part.label], part.peak, 0.65, place=color, texts=texts, label=name)
    ax.set_yticks(place, place.index)
    ax.margins(x=0.25)
    return panels.finish("peak memory of a forward over the size of its result", legend=6)


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "fairseq2_of_a_copy": (("fairseq2_grid",), of_a_copy),
    "fairseq2_ratios": (("fairseq2_grid",), published_ratios),
    "fairseq2_memory": (("fairseq2_inductor",), memory_and_kernels),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
