"""Figures of the study of SGLang#14302: each takes the tables of its records, and computes its title from them."""

import textwrap
from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.documents.sglang import findings, steps
from ropelab.study.documents.sglang import kernel_contenders as published
from ropelab.study.documents.sglang import names as of
from ropelab.study.documents.sglang.evidence import published_speedups
from ropelab.study.documents.sglang.names import FIRST_GRID_CELLS, SECOND_GRID_CELLS
from ropelab.study.documents.sglang.steps import APART, PUBLISHED, STEP_NAMES, STEPS, without_models
from ropelab.study.plots import drawing, marks, ticks
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS
from ropelab.study.plots.panels import LAYOUT, facet, grid

_LOOKS = CONTENDERS.extended({
    of.OURS: ("", 0, "o"), of.OURS_CACHE: ("", 9, "P"), of.OURS_FLOAT32: ("", 9, "X"),
    published.FIRST_KERNEL: ("", 2, "v"), published.SECOND_KERNEL: ("", 2, "<"), published.THIRD_KERNEL: ("", 2, "^"),
    published.JUST_IN_TIME: ("", 2, "P"), published.LAST_KERNEL: ("", 2, "D"),
    published.FIRST_KERNEL_GATHER: ("", 2, "1"), published.JUST_IN_TIME_CAST: ("", 2, ">"), of.FLASH: ("", 3, "D"),
    of.FLASH_PACKED: ("", 6, "d"), of.PERSISTENT: ("", 5, "*"), of.EAGER: ("formula, eager", 7, "p"),
    of.COMPILED: ("formula, torch.compile", 7, "X"),
    of.FLASHINFER: ("", 8, "H"), of.FLASHINFER_NEWEST: ("", 4, "h"), of.SGL_KERNEL: ("sglang-kernel's package", 4, "8"),
    of.VLLM: ("", 1, ">"),
})  # fmt: skip
_LARGE = 2048
_FAMILIES = {
    "second kernel": (published.SECOND_KERNEL, 8, "<"),
    "third kernel": (published.THIRD_KERNEL, 4, "^"),
    "last kernel": (published.LAST_KERNEL, 6, "D"),
    "ropelab": (of.OURS, 0, "o"),
}
"""A family of the record sglang_low_tokens -> its label, colour and marker."""
_CLAIMS = {of.VLLM: "SG-04", of.FLASH_FULL: "SG-05"}


def protocol_steps(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The peer's time over the kernel's time, from the published protocol to a fair protocol, one flaw at a time."""
    tables = {peer: steps.ratios(frame, peer) for peer in STEPS}
    names = steps.NAMES
    medians = {names[peer]: table.median() for peer, table in tables.items()}
    told = (f"{peer} from {median.iloc[0]:.2f} to {median.min():.2f}" for peer, median in medians.items())
    title = f"Each flaw taken away in turn, in the median: {', '.join(told)} of the kernel's time"
    stated = published_speedups()
    panels = grid(1, len(tables), (6.4, 4.2), title, _sampled(footer, frame), sharey=True)
    for ax, (peer, table) in zip(panels.axes[0], tables.items(), strict=True):
        large = table.index.map(_tokens) >= _LARGE
        place = np.arange(len(table.columns))
        joined = sum(step.name != APART for step in STEPS[peer])  # APART stands beside the other steps
        for label, color, marker, rows in (
            ("fewer than 2048 tokens", 0, "o", ~large),
            ("2048 tokens and more", 1, "D", large),
        ):
            look = {"color": COLORBLIND[color], "marker": marker, "markersize": 7, "capsize": 3}
            low, middle, high = (table[rows].quantile(part) for part in (0.2, 0.5, 0.8))
            for part, named in ((slice(joined), label), (slice(joined, None), None)):
                reach = [(middle - low)[part], (high - middle)[part]]
                ax.errorbar(place[part] + 0.12 * (color - 0.5), middle[part], reach, label=named, **look)
        ax.plot(place, table.median(), "_k", markersize=34, markeredgewidth=2.5, label="median of all", zorder=5)
        low, high = stated.loc[_CLAIMS[peer], ["low", "high"]]
        if np.isfinite(high):
            ax.axhspan(low, high, color="0.75", alpha=0.6, label=f"claimed, {low:g} to {high:g}", zorder=0)
        else:
            ax.axhline(low, color="0.45", linewidth=2, linestyle=":", label=f"claimed, up to {low:g} and more")
        ax.axhline(1, color="grey", linewidth=0.8)
        labels = map(_step_label, [peer] * len(place), (step.name for step in STEPS[peer]), table.median())
        ax.set_xticks(place, labels, size=8)
        ax.set(yscale="log", xlim=(-0.4, len(place) - 0.6), title=f"{names[peer]} against the first version")
        ticks.at(ax.yaxis, [0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10], "{:,g}".format)
    return panels.finish(ylabel="peer's time / kernel's time", legend=4)


def _step_label(peer: str, step: str, median: float) -> str:
    name = STEP_NAMES[peer].get(step, step)
    joint = {PUBLISHED: "", APART: "or "}.get(step, "+ ")
    return f"{textwrap.fill(joint + name, 14)}\n({median:.2f})"


def _sampled(footer: str, protocols: pd.DataFrame) -> str:
    """The footer, and the number of cells of the first grid that were measured."""
    return " · ".join(filter(None, (f"{protocols.cell.nunique()} of its {FIRST_GRID_CELLS} cells", footer)))


def fractions(first: pd.DataFrame, second: pd.DataFrame, footer: str = "") -> Figure:
    """The speed of every contender in both grids, fairly timed, as a fraction of the copy, by the number of tokens."""
    first, second = without_models(first), without_models(second)
    parts = {
        f"first grid, halves: {first.cell.nunique()} of its {FIRST_GRID_CELLS} cells": steps.timed_alike(first),
        f"later grid, both layouts: {len(second[['cell', 'layout']].drop_duplicates())} of its {SECOND_GRID_CELLS} "
        "cells": second,
    }
    casts = (of.OURS_FLOAT32, published.JUST_IN_TIME_CAST, published.FIRST_KERNEL_GATHER)
    shown = [name for name in _LOOKS.known if name not in casts]
    times = [steps.fastest_persistent(drawing.timed(frame)).assign(part=name) for name, frame in parts.items()]
    both = pd.concat(times, ignore_index=True)
    both = both[both.contender.isin(shown)].assign(tokens=both.batch * both.seq_len)
    large = both[both.tokens >= min(_LARGE, both.tokens.max())].groupby("contender").fraction_of_copy
    told = [f"{name} at {drawing.value_range(large.get_group(name), '.2f')}"
            for name in (of.OURS, published.FIRST_KERNEL, published.LAST_KERNEL) if name in large.groups]  # fmt: skip
    title = f"Of a copy, from {min(_LARGE, both.tokens.max()):,} tokens on: {', '.join(told)}"
    order = both.groupby("contender").fraction_of_copy.median().sort_values(ascending=False).index
    tables = [
        both[both.part == name]
        .pivot_table(index="contender", columns="tokens", values="fraction_of_copy", aggfunc="median")
        .reindex(order)
        for name in parts
    ]
    widths = [max(1, table.shape[1]) for table in tables]
    panels = grid(1, 2, (6.0, 0.36 * len(order) + 0.9), title, footer, sharey=True, width_ratios=widths)
    for ax, name, table in zip(panels.axes[0], parts, tables, strict=True):
        marks.cells(ax, table.rename(index=_LOOKS.label, columns="{:,}".format), cmap="Blues", vmin=0, vmax=1.1)
        ax.set_title(name, size=9)
    untimed = pd.concat(parts.values())
    return panels.finish("tokens (median of the cells)", untimed=untimed)


def low_tokens(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The time of 1 to 8 tokens with each launch policy on and off."""
    times = drawing.timed(frame)
    switched = times[times.family.isin(_FAMILIES) & times.policy.isin(("on", "off"))]
    table = switched.pivot_table(index=["family", "layout", "seq_len"], columns="policy", values="median_us")
    title = drawing.title(findings.low_tokens, frame)
    panels = facet(frame, (5.4, 3.9), title, footer, column="layout", sharey=True)
    for ax, _, layout in panels:
        here = table.xs(layout, level="layout")
        for family, (label, color, marker) in _FAMILIES.items():
            if family in here.index.get_level_values("family"):
                rows, look = here.loc[family], {"color": COLORBLIND[color], "marker": marker, "markersize": 7}
                marks.line(ax, rows.index, rows["on"], look, label=label)
                marks.line(ax, rows.index, rows["off"], look, markerfacecolor="white", markeredgecolor=look["color"],
                           linestyle=":", label="without its policy" if color == 0 else None)  # fmt: skip
        copy = drawing.copies(times[times.layout == layout]).groupby("seq_len").median_us.min()
        ax.plot(copy.index, copy, **marks.COPY)
        ax.set(xscale="log", yscale="log")
        ticks.at(ax.xaxis, sorted(times.seq_len.unique()))
        ticks.at(ax.yaxis, [1, 1.5, 2, 3, 5], "{:g}".format)
    return panels.finish("tokens", "GPU time (µs)", legend=4)


def vector_widths(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The times of narrow and wide accesses, at aligned and at other addresses."""
    times = without_models(drawing.timed(frame[~frame.contender.str.startswith("copy")]))
    title = drawing.title(findings.vector_widths, frame)
    words = {layout: f"{name} (on the bars: bytes per access)" for layout, name in LAYOUT.items()}
    panels = facet(times, (5.2, 3.4), title, footer, column="layout", words=words, sharey=True)
    for ax, panel, _ in panels:
        names = list(dict.fromkeys(panel.contender))
        for shift, (offset, rows) in enumerate(panel.groupby("offset_bytes")):
            at = rows.contender.map(names.index) + (shift - 0.5) * 0.38
            label = "at multiples of 16 bytes" if not offset else f"{offset:g} bytes off"
            ax.bar(at, rows.fraction_of_copy, 0.36, color=COLORBLIND[shift], label=label)
            known = rows.kernel_bytes.dropna()
            marks.above(ax, at[known.index], rows.fraction_of_copy[known.index], known.map("{:.0f} B".format))
        marks.one(ax, upright=False)
        ax.set_xticks(range(len(names)), [textwrap.fill(name, 8) for name in names], size=7)
        ax.grid(False, axis="x")
    return panels.finish(ylabel="fraction of the best copy", legend=6)


def timers(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The ratio of peer and kernel with one timer for both, and with a different timer for each."""
    mixed = {peer: steps.mixed_timers(frame, peer) for peer in STEPS}
    same = {peer: steps.ratios(frame, peer)[STEPS[peer][1].name] for peer in STEPS}
    names = steps.NAMES
    panels = grid(1, 1, (9.0, 3.8), "Mixed timers measure Python's launch as well", _sampled(footer, frame))
    ax = panels.axes[0, 0]
    for peer, color in zip(STEPS, (1, 3), strict=True):
        for values, marker, label in ((mixed[peer], "s", "mixed timers"), (same[peer], "o", "graphs for both")):
            line = values.groupby(values.index.map(_tokens)).median()
            face = COLORBLIND[color] if marker == "o" else "white"
            ax.plot(line.index, line, marker=marker, color=COLORBLIND[color], linewidth=1.2, markersize=7,
                    markerfacecolor=face, label=f"{names[peer]}, {label}")  # fmt: skip
    ax.axhline(1, color="grey", linewidth=0.8)
    ax.set(xscale="log", yscale="log")
    ticks.plain_log(ax.yaxis)
    ax.xaxis.set_major_formatter("{x:,g}")
    return panels.finish("tokens (median of the cells)", "peer's time / kernel's time", legend=2)


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "sglang_protocol_steps": (("sglang_protocols",), protocol_steps),
    "sglang_timers": (("sglang_protocols",), timers),
    "sglang_fractions": (("sglang_protocols", "sglang_second_grid"), fractions),
    "sglang_low_tokens": (("sglang_low_tokens",), low_tokens),
    "sglang_vector_widths": (("sglang_vector_widths",), vector_widths),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""


def _tokens(cell: str) -> int:
    batch, seq_len = cell.split()[0].split("x")
    return int(batch) * int(seq_len)
