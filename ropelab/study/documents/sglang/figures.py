"""Figures of the study of SGLang#14302: each takes its records' tables; titles are computed from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ropelab.study.documents.sglang.contenders import (
    COMPILED,
    DOCUMENT,
    DOCUMENT_CAST,
    EAGER,
    FLASH,
    FLASH_FULL,
    FLASH_PACKED,
    FLASHINFER,
    FLASHINFER_NEWEST,
    OURS,
    OURS_CACHE,
    OURS_FLOAT32,
    PERSISTENT,
    REAL_VLLM,
    SECOND,
    SGL_KERNEL,
    THIRD,
    VLLM,
)
from ropelab.study.documents.sglang.evidence import published_speedups
from ropelab.study.documents.sglang.measure import FIRST_GRID_CELLS, SECOND_GRID_CELLS
from ropelab.study.documents.sglang.steps import (
    APART,
    FAIR,
    NAMES,
    PUBLISHED,
    STEP_NAMES,
    STEPS,
    fastest_persistent,
    mixed_timers,
    ratios,
    timed_alike,
)
from ropelab.study.plots import drawing
from ropelab.study.plots.drawing import COLORBLIND

# Contender -> colour of the palette, marker.
_LOOKS = {
    OURS: (0, "o"), OURS_CACHE: (9, "P"), OURS_FLOAT32: (9, "X"), DOCUMENT: (2, "v"), SECOND: (2, "<"), THIRD: (2, "^"),
    VLLM: (1, "s"), FLASH: (3, "D"), FLASH_PACKED: (6, "d"), PERSISTENT: (5, "*"), DOCUMENT_CAST: (2, ">"),
    EAGER: (7, "p"), COMPILED: (7, "X"), FLASHINFER: (8, "H"), FLASHINFER_NEWEST: (4, "h"), SGL_KERNEL: (4, "8"),
    REAL_VLLM: (1, ">"),
}  # fmt: skip
_CLAIMS = {VLLM: "SG-04", FLASH_FULL: "SG-05"}


def protocol_steps(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The peer's time over the kernel's, from the published protocol to a fair one, a flaw less at a time."""
    tables = {peer: ratios(frame, peer) for peer in STEPS}
    said = []
    for peer, table in tables.items():
        fair = " or ".join(f"{table[step].median():.2f}" for step in (FAIR, APART) if step in table)
        how = " (q and k packed or apart)" if APART in table else ""
        said.append(f"{NAMES[peer]} {fair}{how}, by the published protocol {table[PUBLISHED].median():.2f}")
    title = "Time over that of the first version's kernel (model), fairly compared, median of the cells:\n" + "; ".join(
        said
    )
    footer = _sampled(footer, frame)
    stated = published_speedups()
    fig, axes = drawing.grid(1, len(tables), (6.4, 4.2), title, footer, sharey=True)
    for ax, (peer, table) in zip(axes[0], tables.items(), strict=True):
        large = table.index.map(_tokens) >= _LARGE
        place = np.arange(len(table.columns))
        steps = sum(step.name != APART for step in STEPS[peer])  # this one does not follow upon the others
        shown = (
            ("fewer than 2048 tokens", 0, "o", ~large),
            ("2048 tokens and more", 1, "D", large),
        )
        for label, color, marker, rows in shown:
            for number, (_, line) in enumerate(table[rows].iterrows()):
                look = {"color": COLORBLIND[color], "marker": marker, "markersize": 5, "linewidth": 0.8, "alpha": 0.6}
                ax.plot(place[:steps], line[:steps], label=label if not number else None, **look)
                ax.plot(place[steps:], line[steps:], **look)
        ax.plot(place, table.median(), "_k", markersize=34, markeredgewidth=2.5, label="median", zorder=5)
        low, high = stated.loc[_CLAIMS[peer], ["low", "high"]]
        if np.isfinite(high):
            ax.axhspan(low, high, color="0.75", alpha=0.6, label=f"claimed, {low:g} to {high:g}", zorder=0)
        else:
            ax.axhline(low, color="0.45", linewidth=2, linestyle=":", label=f"claimed, up to {low:g} and more")
        ax.axhline(1, color="grey", linewidth=0.8)
        ax.set_xticks(place, [_step_label(peer, step.name) for step in STEPS[peer]], size=8)
        ax.set(yscale="log", xlim=(-0.4, len(place) - 0.6), title=f"{NAMES[peer]} against the first version")
        drawing.plain_log(ax.yaxis)
        ax.yaxis.set_major_locator(FixedLocator([0.3, 0.5, 0.7, 1, 1.25, 1.5, 2, 3, 5, 10]))
    axes[0, 0].set_ylabel("peer's time / kernel's time")
    drawing.legend(fig, axes, columns=4)
    return fig


def _step_label(peer: str, step: str) -> str:
    name = STEP_NAMES[peer].get(step, step)
    joint = {PUBLISHED: "", APART: "or "}.get(step, "+ ")
    return (joint + name).replace(" for", "\nfor").replace(", ", ",\n")


def _sampled(footer: str, protocols: pd.DataFrame) -> str:
    """The footer, and how much of the first grid there is."""
    return " · ".join(filter(None, (f"{protocols.cell.nunique()} of its {FIRST_GRID_CELLS} cells", footer)))


def fractions(first: pd.DataFrame, second: pd.DataFrame, footer: str = "") -> Figure:
    """Everybody in both grids, fairly timed, as a fraction of the copy."""
    panels = {("first grid", "split_half", FIRST_GRID_CELLS): timed_alike(first)}
    for layout, frame in second.groupby("layout", sort=False):
        panels["later grid", layout, SECOND_GRID_CELLS // 2] = frame
    shown = (OURS, OURS_CACHE, DOCUMENT, SECOND, THIRD, VLLM, FLASH, FLASH_PACKED, PERSISTENT, EAGER, COMPILED,
             FLASHINFER, FLASHINFER_NEWEST, SGL_KERNEL, REAL_VLLM)  # fmt: skip
    both = fastest_persistent(drawing.timed(pd.concat(panels.values())))
    tokens = both.batch * both.seq_len
    least = min(_LARGE, tokens.max())
    large = both[tokens >= least]
    ours = large[large.contender == OURS].fraction_of_copy
    models = large[large.contender == DOCUMENT].fraction_of_copy
    title = (
        f"From {least:,} tokens on ropelab runs at {drawing.value_range(ours, '.2f')} of a copy, "
        f"the first version's kernel at {drawing.value_range(models, '.2f')} (model)"
    )
    rows = [max(1, frame.cell.nunique()) for frame in panels.values()]
    fig, axes = drawing.grid(
        len(panels), 1, (12.0, 0.42 * sum(rows) / len(rows) + 0.7), title, footer, sharex=True,
        gridspec_kw={"height_ratios": [count + 1 for count in rows]},
    )  # fmt: skip
    for ax, ((name, layout, all_cells), frame) in zip(axes[:, 0], panels.items(), strict=True):
        times = fastest_persistent(drawing.timed(frame))
        cells = sorted(dict.fromkeys(times.cell), key=_cell_order)
        place = {cell: len(cells) - 1 - i for i, cell in enumerate(cells)}
        names = [contender for contender in shown if (times.contender == contender).any()]
        # Each a little lower than the one before: markers of the same value lie beside each other.
        for contender, shift in zip(names, np.linspace(0.33, -0.33, len(names)), strict=True):
            points = times[times.contender == contender]
            ax.plot(points.fraction_of_copy, points.cell.map(place) + shift, linestyle="none", markersize=8,
                    markeredgecolor="white", markeredgewidth=0.4, zorder=5 if contender == OURS else 4,
                    **_look(contender))  # fmt: skip
        for at in place.values():
            ax.axhspan(at - 0.5, at + 0.5, color="0.95" if at % 2 else "white", zorder=0)
        ax.axvline(1, color="grey", linestyle="--", linewidth=1)
        ax.set_yticks(list(place.values()), list(place), size=8)
        ax.grid(False, axis="y")
        said = f"{name}, {drawing.LAYOUT[layout]}: {len(cells)} of its {all_cells} cells"
        ax.set(title=said, ylim=(-0.6, len(cells) - 0.4))
        ax.set_xlim(left=0)
    axes[-1, 0].set_xlabel("fraction of the best copy")
    axes[0, 0].set_ylabel("batch x tokens, q/k heads, head size")
    drawing.legend(fig, axes, columns=5)
    drawing.say_untimed(fig, pd.concat(panels.values()))
    return fig


def low_tokens(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Time against blocks with 1 to 8 tokens, and each launch policy on and off."""
    times = drawing.timed(frame[frame.family.isin(_FAMILIES)])
    processors = int(times.multiprocessors.iloc[0])
    switched = times[times.policy.isin(("on", "off"))].pivot_table(
        index=["family", "layout", "seq_len"], columns="policy", values="median_us"
    )
    title = "Time of 1 to 8 tokens against the blocks of the launch"
    if {"on", "off"} <= set(switched):
        gains = (switched["off"] / switched["on"]).dropna().groupby("family")
        said = [f"{_FAMILIES[name]} {drawing.value_range(gain, '.2f')}" for name, gain in gains]
        title = f"With the launch policy, 1 to 8 tokens are so many times as fast as without: {', '.join(said)}"
    tokens = [int(count) for count in sorted(times.seq_len.unique())]
    layouts = drawing.ordered(times.layout, drawing.LAYOUT)
    fig, axes = drawing.grid(len(layouts), len(tokens), (3.3, 2.8), title, footer, sharex="col", sharey=True)
    for row, layout in zip(axes, layouts, strict=True):
        for ax, count in zip(row, tokens, strict=True):
            here = frame[(frame.seq_len == count) & (frame.layout == layout)]
            _blocks(ax, drawing.timed(here))
            copy = drawing.copies(drawing.timed(here)).median_us.min()
            ax.axhline(copy, color="black", linestyle="--", linewidth=1.2, label="best copy")
            ax.axvline(processors, color="grey", linewidth=1, linestyle=":", label=f"{processors} multiprocessors")
            ax.set(title=f"{count} token{'s' * (count > 1)}, {drawing.LAYOUT[layout]}")
            ax.set_ylim(0, 1.1 * times.median_us.max())
        row[0].set_ylabel("GPU time (µs)")
    for ax in axes[-1]:
        ax.set_xlabel("blocks of the launch")
    drawing.legend(fig, axes, columns=4)
    return fig


def _blocks(ax, times: pd.DataFrame) -> None:
    """A line for each family, and its policy marked."""
    looks = {"model": (2, "v"), "second": (8, "<"), "third": (4, "^"), "ropelab": (0, "o")}
    for family, (color, marker) in looks.items():
        line = times[times.family == family].sort_values("blocks")
        ax.plot(line.blocks, line.median_us, marker, linestyle="-", color=COLORBLIND[color], markersize=6,
                label=_FAMILIES[family], linewidth=1)  # fmt: skip
        for policy, outline in (("off", "o"), ("on", "s")):
            chosen = line[line.policy == policy]
            ax.plot(chosen.blocks, chosen.median_us, outline, markerfacecolor="none", markeredgecolor="0.2",
                    markersize=11, label=f"policy {policy}")  # fmt: skip
    ax.set(xscale="log")
    ax.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8, 16, 32, 64, 128, 256]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())


def vector_widths(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Narrow and wide accesses, aligned and not."""
    times = drawing.timed(frame[~frame.contender.str.startswith("copy")])
    aligned = times[times.offset_bytes == 0].pivot_table(index="layout", columns="access_bytes", values="median_us")
    gain = aligned[2] / aligned[16]
    ours = times[times.contender == OURS].pivot_table(index="layout", columns="offset_bytes", values="median_us")
    shifted = ours[ours.columns.max()] / ours[0]
    title = (
        f"16-byte accesses make the model {drawing.value_range(gain, '.2f')} times as fast as 2-byte ones; "
        f"2 bytes off, where none is possible, ropelab takes {drawing.value_range(shifted, '.2f')} times as long"
    )
    layouts = drawing.ordered(times.layout, drawing.LAYOUT)
    fig, axes = drawing.grid(1, len(layouts), (5.2, 3.4), title, footer, sharey=True)
    for ax, layout in zip(axes[0], layouts, strict=True):
        panel = times[times.layout == layout]
        names = list(dict.fromkeys(panel.contender))
        for shift, (offset, rows) in enumerate(panel.groupby("offset_bytes")):
            values = rows.set_index("contender").fraction_of_copy.reindex(names)
            at = np.arange(len(names)) + (shift - 0.5) * 0.38
            label = "at multiples of 16 bytes" if not offset else f"{offset:g} bytes off"
            ax.bar(at, values, 0.36, color=COLORBLIND[(0, 1)[shift]], label=label)
            widths = rows.set_index("contender").access_bytes.reindex(names)
            for x, value, width in zip(at, values, widths, strict=True):
                if np.isfinite(value) and np.isfinite(width):
                    ax.annotate(f"{width:.0f} B", (x, value), (0, 2), textcoords="offset points", ha="center", size=8)
        ax.axhline(1, color="grey", linestyle="--", linewidth=1)
        ax.set_xticks(np.arange(len(names)), [name.replace("model, ", "model,\n") for name in names], size=8)
        ax.set(title=f"{drawing.LAYOUT[layout]} (on the bars: bytes per access)")
        ax.grid(False, axis="x")
    axes[0, 0].set_ylabel("fraction of the best copy")
    drawing.legend(fig, axes)
    return fig


def head_sizes(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Fraction of the copy against the head size; what does not run is marked at the foot."""
    frame = frame[(frame.layout == "split_half") & ~frame.contender.str.startswith("copy")]
    frame = frame[~frame.status.str.startswith("not run")]
    times = drawing.timed(frame)
    failed = frame[frame.status != "ok"]
    ours = times[times.contender == OURS]
    power = ours.head_dim.map(lambda size: size & (size - 1) == 0)
    uncommon, common = (drawing.value_range(ours[rows].fraction_of_copy, ".2f") for rows in (~power, power))
    title = f"Split-half: ropelab runs at {uncommon} of a copy where the head size is no power of two, "
    title += f"at {common} where it is"
    for name, rows in failed.groupby("contender"):
        title += f";\n{name} fails at {', '.join(map(str, sorted(rows.head_dim)))}"
    fig, axes = drawing.grid(1, 1, (10.0, 4.2), title, footer)
    ax, sizes = axes[0, 0], sorted(frame.head_dim.unique())
    place, foot = {size: i for i, size in enumerate(sizes)}, 0.03
    for name in dict.fromkeys(frame.contender):
        line = times[times.contender == name].set_index("head_dim").fraction_of_copy.reindex(sizes)
        ax.plot(line.index.map(place), line, markersize=7, linewidth=1.2, **_look(name))
        gone = failed[failed.contender == name]
        if len(gone):
            ax.plot(gone.head_dim.map(place), np.full(len(gone), foot), "x", color=_look(name)["color"], markersize=8,
                    markeredgewidth=2.5, label=f"{name} fails")  # fmt: skip
            foot += 0.06
    ax.axhline(1, color="grey", linestyle="--", linewidth=1)
    ax.set_xticks(list(place.values()), sizes)
    ax.set(xlabel="head size (features)", ylabel="fraction of the best copy", ylim=(0, 1.08))
    drawing.legend(fig, axes, columns=4)
    return fig


def diffusion(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The production shape and the Qwen-Image-shaped one."""
    times = fastest_persistent(drawing.timed(frame[~frame.contender.str.startswith("copy")]))
    by_cell = times.pivot_table(index="cell", columns="contender", values="median_us", sort=False)
    fastest = by_cell.drop(columns=[name for name in by_cell if name.startswith(OURS)]).min(axis=1)
    slower = drawing.value_range(fastest / by_cell[OURS], ".2f")
    title = f"Diffusion, 24 heads of 128 features: the fastest other takes {slower} times as long as ropelab"
    if {DOCUMENT, DOCUMENT_CAST} <= set(by_cell):
        cast = by_cell[DOCUMENT_CAST] / by_cell[DOCUMENT]
        title += f";\nconverting the tables in every call makes it {drawing.value_range(cast, '.2f')} times as long"
    cells = list(by_cell.index)
    fig, axes = drawing.grid(1, len(cells), (5.6, 3.8), title, footer, sharey=True)
    order = [name for name in _LOOKS if name in set(times.contender)][::-1]
    for ax, cell in zip(axes[0], cells, strict=True):
        rows = times[times.cell == cell].set_index("contender").reindex(order)
        ax.barh(np.arange(len(order)), rows.fraction_of_copy, 0.7, color=[_look(name)["color"] for name in order])
        for at, row in enumerate(rows.itertuples()):
            if np.isfinite(row.median_us):
                ax.annotate(f"{row.median_us:,.1f} µs", (row.fraction_of_copy, at), (4, 0), textcoords="offset points",
                            va="center", size=8)  # fmt: skip
        ax.axvline(1, color="grey", linestyle="--", linewidth=1)
        ax.set_yticks(np.arange(len(order)), [name for name in order])
        tokens = int(times[times.cell == cell].seq_len.iloc[0])
        named = "Qwen-Image, 1024 x 1024 pixels" if cell == "Qwen-Image" else "seen in production"
        ax.set(title=f"{named}: {tokens:,} tokens", xlabel="fraction of the best copy", xlim=(0, 1.25))
        ax.grid(False, axis="y")
    drawing.say_untimed(fig, frame)
    return fig


def timers(frame: pd.DataFrame, footer: str = "") -> Figure:
    """One timer for the peer and another for the kernel: what is then compared."""
    mixed = {peer: mixed_timers(frame, peer) for peer in STEPS}
    same = {peer: ratios(frame, peer)[STEPS[peer][1].name] for peer in STEPS}
    said = [
        f"{NAMES[peer]} would take {mixed[peer].median():.1f} times as long instead of {same[peer].median():.1f}"
        for peer in STEPS
    ]
    footer = _sampled(footer, frame)
    title = "With do_bench for the peer and CUDA graphs for the kernel, median of the cells: " + "; ".join(said)
    fig, axes = drawing.grid(1, 1, (9.0, 3.8), title, footer)
    ax = axes[0, 0]
    for peer, color in zip(STEPS, (1, 3), strict=True):
        for values, marker, label in ((mixed[peer], "s", "mixed timers"), (same[peer], "o", "graphs for both")):
            line = values.groupby(values.index.map(_tokens)).median()
            face = COLORBLIND[color] if marker == "o" else "white"
            ax.plot(line.index, line, marker=marker, color=COLORBLIND[color], linewidth=1.2, markersize=7,
                    markerfacecolor=face, label=f"{NAMES[peer]}, {label}")  # fmt: skip
    ax.axhline(1, color="grey", linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlabel="tokens (median of the cells)", ylabel="peer's time / kernel's time")
    drawing.plain_log(ax.yaxis)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    drawing.legend(fig, axes, columns=2)
    return fig


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "sglang_protocol_steps": (("sglang_protocols",), protocol_steps),
    "sglang_timers": (("sglang_protocols",), timers),
    "sglang_fractions": (("sglang_protocols", "sglang_second_grid"), fractions),
    "sglang_low_tokens": (("sglang_low_tokens",), low_tokens),
    "sglang_vector_widths": (("sglang_vector_widths",), vector_widths),
    "sglang_head_sizes": (("sglang_head_sizes",), head_sizes),
    "sglang_diffusion": (("sglang_diffusion",), diffusion),
}
"""Figure -> the studies it draws, and how: a function of their tables and the footer."""

_LARGE = 2048
_FAMILIES = {"model": DOCUMENT, "second": SECOND, "third": THIRD, "ropelab": OURS}


def _look(contender: str) -> dict[str, object]:
    color, marker = _LOOKS.get(contender, (7, "h"))
    return {"label": contender, "color": COLORBLIND[color], "marker": marker}


def _tokens(cell: str) -> int:
    batch, seq_len = cell.split()[0].split("x")
    return int(batch) * int(seq_len)


def _cell_order(cell: str) -> tuple:
    """Configurations together, each by its tokens."""
    size, *rest = cell.split()
    return (*rest, *map(int, size.split("x")))
