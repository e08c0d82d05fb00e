"""Draw the figures of the kernel family: every format, packed sequences, few tokens, QK norm, memory.

Each function takes the tables of the records and returns a figure. The title is computed from the tables, and
``family_findings`` says whether a bar is met.
"""

from collections.abc import Callable
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.plots import drawing, marks, ticks
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS
from ropelab.study.plots.panels import CELLS, LAYOUT, facet
from ropelab.study.topics.performance import findings as family_findings
from ropelab.study.topics.performance.comparison import OURS
from ropelab.study.topics.performance.findings import (
    FORMATS,
    LEAST_OF_COPY_NORM,
    LEAST_OVER_COMPILED,
    MANY,
    ONE,
    SKEWED,
    toward_worse,
)

_FORMATS = {
    name: f"{'q and k as views of qkv (bshd)' if name == 'qkv' else name} (right: ropelab's slowest)"
    for name in FORMATS
}
_MISSED = COLORBLIND[3]
# A pass over q and k reads and writes q and k once. The backward of a norm reads the input and the cotangent and writes
# the gradient: three tensors, where a copy moves two. Forward and backward together move five.
_CEILINGS = {"forward": 1, "backward": 2 / 3, "forward and backward": 2 / 5}


def formats(dense: pd.DataFrame, others: pd.DataFrame, footer: str = "") -> Figure:
    """Fraction of the copy in every format and cell: ropelab in both layouts and directions, peers faint."""
    frame = family_findings.in_all_formats(dense, others)
    times = drawing.timed(frame)
    bars = {bar.what.split()[-1]: bar for bar in family_findings.format_bars(dense, others)}
    met = [name for name, bar in bars.items() if bar.met]
    title = (
        f"The bar of {next(iter(bars.values())).limit} of a copy is met in {len(met)} of {len(bars)} formats; "
        "ropelab's slowest cell runs at "
        + ", ".join(f"{bar.number} in {name}" + f" ({bar.verdict})" * (not bar.met) for name, bar in bars.items())
    )
    place = marks.places(times.cell)
    reach = times.groupby("contender").fraction_of_copy
    left = min(0.5, reach.min()[OURS] - 0.05)
    size = (5.8, 0.46 * len(place) + 1.0)
    panels = facet(times, size, title, footer, column="format", wrap=2, words=_FORMATS, sharex=True, sharey=True)
    for ax, panel, name in panels:
        for peer, points in drawing.contenders(panel):
            if peer != OURS:  # the slowest peers are left of the axes, so the legend has their values
                span = f"{drawing.label(peer)} ({drawing.value_range(reach.get_group(peer), '.2f')})"
                ax.plot(points.fraction_of_copy, place[points.cell], linestyle="none", markersize=6, alpha=0.55,
                        markeredgecolor="none", **CONTENDERS(peer) | {"label": span})  # fmt: skip
        ours = panel[panel.contender == OURS]
        for i, (layout, direction) in enumerate(product(LAYOUT, ("forward", "backward"))):
            points = ours[(ours.layout == layout) & (ours.direction == direction)]
            color = CONTENDERS.color(OURS)
            ax.plot(points.fraction_of_copy, place[points.cell] + 0.13 * (1.5 - i), "os"[layout == "interleaved"],
                    color=color, markerfacecolor=color if direction == "forward" else "white", markersize=5.5, zorder=5,
                    label=f"ropelab, {LAYOUT[layout]}, {direction}")  # fmt: skip
        for cell, worst in ours.groupby("cell").fraction_of_copy.min().items():
            missed = worst < bars[name].limit
            marks.beside(ax, [1], [place[cell]], [toward_worse(worst, at_least=True) + " below" * missed], gap=5,
                         xycoords=marks.ACROSS, color=_MISSED if missed else "0.25",
                         fontweight="bold" if missed else "normal")  # fmt: skip
        ax.axvline(bars[name].limit, color="black", linewidth=1.6, label=f"bar, {bars[name].limit}", zorder=3)
        marks.one(ax)
        marks.rows(ax, place, left=left)
    return panels.finish("fraction of the best copy of the same bytes", CELLS, legend=4, untimed=frame)


def packed(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The time of 65,536 packed tokens against the number of sequences, and in the skewed case."""
    times = drawing.timed(frame)
    bars = family_findings.packed_bars(frame)
    title = "Packed sequences, worst cases of ropelab: " + "; ".join(bar.phrase() for bar in bars)
    if growth := _growth(times):
        title += "\nThe others, time over their time for one sequence: " + "; ".join(growth)
    lengths = frame.drop_duplicates("case").set_index("case")
    equal = lengths[lengths.index != SKEWED].sort_values("n_seqs").index.tolist()
    cases = equal + [SKEWED] * (SKEWED in lengths.index)
    ticks_of = [_case_tick(case, lengths.loc[case]) for case in cases]
    place = pd.Series(range(len(cases)), cases)
    size = (5.8, 3.5)
    panels = facet(times, size, title, footer, row="direction", column="layout", sharex=True, sharey=True)
    for ax, panel, _ in panels:
        copy = drawing.copies(panel).groupby("case").median_us.min().reindex(cases)
        ax.plot(range(len(cases)), copy, **marks.COPY)
        for name, points in drawing.contenders(panel):
            look = CONTENDERS(name) | {"label": _with_tables(name, points), "zorder": 5 if name == OURS else 3}
            # A line joins points with the same tables only, because the time of some kernels follows their length.
            for _, rows in points.groupby(points.get("freqs_len", pd.Series(0, points.index)).fillna(0)):
                rows = rows.set_index("case").median_us
                joined = rows.reindex(equal).dropna()
                marks.line(ax, place[joined.index], joined, look, markersize=8)
                marks.dots(ax, place[rows.index], rows, look, markersize=8)
        if SKEWED in cases and equal:
            ax.axvline(len(equal) - 0.5, color="0.6", linewidth=1)
        ax.set(yscale="log", xlim=(-0.4, len(cases) - 0.5))
        ax.set_xticks(range(len(cases)), ticks_of, size=8)
        ticks.plain_log(ax.yaxis)
    label = "number of sequences in 65,536 tokens, and tokens of each sequence"
    return panels.finish(label, "GPU time (µs)", legend=4, untimed=frame)


def _growth(times: pd.DataFrame) -> list[str]:
    """The largest ratio of each peer's time in the other cases to the peer's time for one sequence."""
    phrases = []
    for name, rows in drawing.contenders(times):
        table = rows.pivot_table(index=["layout", "direction"], columns="case", values="median_us", aggfunc="max")
        if name.startswith(OURS) or ONE not in table:
            continue
        ratios = {
            words: (table[case] / table[ONE]).max()
            for case, words in ((MANY, "for 2,401"), (SKEWED, "skewed"))
            if case in table
        }
        if ratios:
            parts = " and ".join(f"{_short(ratio)} {words}" for words, ratio in ratios.items())
            phrases.append(f"{drawing.label(name)} {parts}")
    return phrases


def _with_tables(name: str, points: pd.DataFrame) -> str:
    """The label, with the number of rows of the tables where the record has the number."""
    rows = points.get("freqs_len", pd.Series()).dropna()
    return drawing.label(name) + (f", tables of {drawing.value_range(rows, ',.0f')} rows" if len(rows) else "")


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def _case_tick(case: str, row: pd.Series) -> str:
    if case == SKEWED:
        return f"{row.n_seqs:,}:\none of {row.longest:,},\nthe rest of 13"
    return f"{row.n_seqs:,}\nof {'up to ' if row.n_seqs * row.longest > row.tokens else ''}{row.longest:,}"


def few_tokens(frame: pd.DataFrame, footer: str = "") -> Figure:
    """GPU time of 1 to 8 tokens as a multiple of the time of a copy."""
    times = drawing.timed(frame)
    times = times.assign(tokens=times.batch * times.seq_len, over_copy=1 / times.fraction_of_copy)
    (bar,) = family_findings.few_tokens_bars(frame)
    title = f"With few tokens ropelab takes at worst {bar.phrase()}"
    size = (4.8, 3.2)
    panels = facet(times, size, title, footer, row="direction", column="layout", sharex=True, sharey=True)
    for ax, panel, _ in panels:
        marks.one(ax, upright=False, label="best copy")
        ax.axhline(bar.limit, color="black", linewidth=1.6, label=f"bar, {bar.limit}")
        for name, points in drawing.contenders(panel):
            points, zorder = points.sort_values("tokens"), 5 if name == OURS else 3
            marks.line(ax, points.tokens, points.over_copy, CONTENDERS(name), markersize=8, zorder=zorder)
        ax.set(xscale="log", yscale="log")
        ticks.at(ax.xaxis, sorted(times.tokens.unique()), "{:g}".format)
        ticks.plain_log(ax.yaxis)
    return panels.finish("tokens", "GPU time (best copies)", legend=4, untimed=frame)


def qk_norm(frame: pd.DataFrame, footer: str = "") -> Figure:
    """QK norm and rotation as a fraction of the copy of q and k, per step, with the limit that the bytes set."""
    times = drawing.timed(frame)
    bars = family_findings.qk_norm_bars(frame)
    title = "QK norm and rotation in one pass: " + "; ".join(bar.phrase() for bar in bars)
    times = times.assign(row=list(zip(times.cell, times.layout, strict=True)))
    place = marks.places(times.row)
    labels = [f"{cell}, {LAYOUT[layout]}" for cell, layout in place.index]
    times = times.sort_values("step", key=lambda steps: steps.map(list(_CEILINGS).index), kind="stable")
    panels = facet(times, (4.3, 0.4 * len(place) + 1.6), title, footer, column="step", sharey=True)
    for ax, panel, step in panels:
        for name, points in drawing.contenders(panel):
            marks.dots(ax, points.fraction_of_copy, points.row.map(place), CONTENDERS(name), zorder=5,
                       markersize=8 if name == OURS else 7)  # fmt: skip
        if (wanted := _qk_norm_bar(step, panel)) is not None:
            marks.band(ax, pd.Series([place[row] for row in wanted.index]), wanted, 0.36)
        marks.one(ax, at=_CEILINGS[step], label="limit set by the bytes")
        marks.rows(ax, place, labels)
    label = "fraction of the best copy of q and k"
    return panels.finish(label, "cell, layout", legend=5, untimed=frame)


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


def memory(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The peak memory of a call: the results, and the memory beyond the results."""
    shown = frame[frame.status == "ok"] if "status" in frame else frame
    title = "Peak memory: " + "; ".join(bar.phrase() for bar in family_findings.memory_bars(frame))
    place = marks.places(shown.contender)
    panels = facet(shown, (5.4, 0.5 * len(place) + 1.4), title, footer, column="step", sharex=True, sharey=True)
    for ax, rows, _ in panels:
        height, results = place[rows.contender], rows.result_bytes / 2**20
        beyond = rows.peak_bytes - rows.result_bytes
        marks.bars(ax, height, results, 0.6, label="outputs and gradients")
        more = beyond.clip(lower=0) / 2**20
        marks.bars(ax, height, more, 0.6, place=1, left=results, texts=map(_size, beyond), label="beyond the results")
        ax.set_yticks(place, place.index.map(drawing.label))
        ax.margins(x=0.2)
    return panels.finish("MiB at the peak, above the memory before the call", legend=6)


def _size(beyond: float) -> str:
    if not beyond:
        return "nothing beyond"
    return f"{beyond:+,.0f} bytes" if abs(beyond) < 2**16 else f"{beyond / 2**20:+,.1f} MiB"


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "formats": (("dense", "formats"), formats),
    "packed": (("packed",), packed),
    "few_tokens": (("few_tokens",), few_tokens),
    "qk_norm": (("qk_norm",), qk_norm),
    "memory": (("memory",), memory),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
