"""Figures of the measurements: each takes a record's table and returns a figure; nothing is measured here.

Titles state what the table says and are computed from it. ``footer`` is ``Record.footer``: machine, date,
versions.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ropelab.bench import records
from ropelab.bench.copies import PREFIX
from ropelab.study.engine.claims import documents
from ropelab.study.plots import drawing
from ropelab.study.topics.conformance import figures as conformance_figures
from ropelab.study.topics.performance import figures as family_figures
from ropelab.study.topics.performance import findings as family_findings
from ropelab.study.topics.performance.comparison import OURS, named_cells
from ropelab.study.topics.precision import figures as precision_figures

_CELL = ["cell", "layout", "dtype", "direction"]


def fraction_of_copy(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Every contender in every dense cell as a fraction of the copy, with the bar that each cell sets."""
    times = drawing.timed(frame.assign(cell=named_cells(frame)))
    cells = list(dict.fromkeys(times.cell))
    layouts, directions = (
        drawing.ordered(times.layout, drawing.LAYOUT),
        drawing.ordered(times.direction, drawing.DIRECTIONS),
    )
    ours = times[times.contender == OURS]
    met = (ours.fraction_of_copy >= ours.bar).sum()
    others = times[~times.in_place & (times.contender != OURS) & ~times.contender.str.startswith(PREFIX)]
    rival = others.groupby(_CELL).fraction_of_copy.max()
    ahead = (ours.set_index(_CELL).fraction_of_copy >= rival.reindex(pd.MultiIndex.from_frame(ours[_CELL]))).sum()
    title = (
        f"ropelab runs at {drawing.value_range(ours.fraction_of_copy, '.2f')} of the speed of a copy "
        f"and reaches the bar in {met} of {len(ours)} cells;\n"
        f"no other out-of-place contender is faster in {ahead} of {len(ours)}"
    )
    fig, axes = drawing.grid(
        len(directions), len(layouts), (5.6, 0.42 * len(cells) + 1.2), title, footer, sharex=True, sharey=True
    )
    for row, direction in zip(axes, directions, strict=True):
        for ax, layout in zip(row, layouts, strict=True):
            panel = times[(times.direction == direction) & (times.layout == layout)]
            place = {cell: len(cells) - 1 - i for i, cell in enumerate(cells)}
            bars = panel.drop_duplicates("cell")
            height = bars.cell.map(place)
            ax.vlines(bars.bar, height - 0.38, height + 0.38, color="black", linewidth=2, label="bar", zorder=3)
            for name, points in drawing.contenders(panel):
                size = 8 if name.startswith(OURS) else 6
                ax.plot(
                    points.fraction_of_copy, points.cell.map(place), **drawing.look(name), linestyle="none",
                    markersize=size, markeredgecolor="white", markeredgewidth=0.5, alpha=0.9,
                    zorder=5 if name == OURS else 4,
                )  # fmt: skip
            ax.axvline(1, color="grey", linestyle="--", linewidth=1)
            ax.set_yticks(list(place.values()), list(place))
            ax.set(title=f"{drawing.LAYOUT[layout]}, {direction}", ylim=(-0.6, len(cells) - 0.4))
            ax.set_xlim(left=0)
    for ax in axes[-1]:
        ax.set_xlabel("fraction of the best copy of the same bytes")
    for ax in axes[:, 0]:
        ax.set_ylabel("batch x tokens, q/k heads, head_dim")
    drawing.legend(fig, axes, columns=4)
    drawing.say_untimed(fig, frame)
    return fig


def host_time(frame: pd.DataFrame, footer: str = "") -> Figure:
    """What an eager call with a few tokens costs the host, with and without autograd."""
    times = drawing.timed(frame)
    modes = [mode for mode in (False, True) if (times.autograd == mode).any()]
    plain = times[(~times.autograd) & (~times.contender.str.contains("in place"))]
    average = plain.groupby("contender").median_us.median()
    if OURS in average and len(average) > 1:
        others = average.drop(OURS)
        title = (
            f"An eager call of ropelab keeps the host busy for {average[OURS]:.0f} µs; "
            f"the others take {drawing.value_range(others, '.0f')} µs"
        )
    else:
        title = "Host time of an eager call"
    if bars := family_findings.host_bars(frame):
        title += ";\nthat is " + ", ".join(bar.phrase() for bar in bars)
    order = times.groupby("contender").median_us.median().sort_values().index.tolist()
    layouts = drawing.ordered(times.layout, drawing.LAYOUT)
    fig, axes = drawing.grid(1, len(modes), (5.4, 0.42 * len(order) + 1.5), title, footer, sharex=True, sharey=True)
    height = 0.8 / len(layouts)
    for ax, mode in zip(axes[0], modes, strict=True):
        for i, layout in enumerate(layouts):
            rows = times[(times.autograd == mode) & (times.layout == layout)].set_index("contender").reindex(order)
            y = np.arange(len(order))[::-1] + (0.5 * (len(layouts) - 1) - i) * height
            spread = [rows.median_us - rows.q20_us, rows.q80_us - rows.median_us]
            ax.barh(
                y, rows.median_us, height * 0.92, xerr=spread, color=drawing.COLORBLIND[(0, 1)[i]],
                label=drawing.LAYOUT[layout], error_kw={"linewidth": 1, "ecolor": "0.25"},
            )  # fmt: skip
            for value, edge, at in zip(rows.median_us, rows.q80_us, y, strict=True):
                if np.isfinite(value):
                    ax.annotate(f"{value:.0f}", (edge, at), (4, 0), textcoords="offset points", va="center", size=8)
        ax.set_yticks(np.arange(len(order))[::-1], [drawing.label(name) for name in order])
        ax.set(title="with autograd" if mode else "without autograd", xlabel="host time of one call (µs)")
        ax.margins(x=0.12)
        ax.grid(False, axis="y")
    drawing.legend(fig, axes)
    return fig


def tile_sweep(frame: pd.DataFrame, footer: str = "") -> Figure:
    """How the kernel fares with other tiles: what the choice in ``kernels/tiles.py`` rests on."""
    times = frame.assign(cell=named_cells(frame))[frame.status == "ok"]
    times = times.assign(thread=_threads(times))
    # What programs in a row share is told apart where the record tries more than one order.
    several = times.innermost.nunique() > 1
    fractions = times.groupby(["cell", "layout"]).fraction_of_copy
    best, worst = fractions.max(), fractions.min()
    chosen = times[times.chosen].set_index(["cell", "layout"]).fraction_of_copy
    loss = (1 - chosen / best).max()
    title = (
        f"In every cell the chosen tile is within {100 * loss:.1f} % of the best of "
        f"{drawing.value_range(fractions.size(), 'd')}; the worst loses up to {100 * (1 - worst / best).max():.0f} %"
    )
    cells, layouts = list(dict.fromkeys(times.cell)), drawing.ordered(times.layout, drawing.LAYOUT)
    fig, axes = drawing.grid(1, len(layouts), (6.0, 0.5 * len(cells) + 1.6), title, footer, sharex=True, sharey=True)
    threads = sorted(times.thread.unique(), key=lambda name: (len(name), name))
    shades = dict(zip(threads, drawing.COLORBLIND, strict=False))
    offsets = dict(zip(threads, np.linspace(-0.2, 0.2, len(threads)), strict=True))
    markers = {"heads": "o", "tokens": "^", "batches": "s"}
    for thread in threads:
        axes[0, 0].plot([], [], "o", color=shades[thread], label=thread)
    for inner in [name for name in markers if several and (times.innermost == name).any()]:
        axes[0, 0].plot([], [], markers[inner], color="grey", label=f"{inner} innermost")
    if times.heads_first.any():
        axes[0, 0].plot([], [], "o", color="grey", mfc="none", label="heads before positions")
    for ax, layout in zip(axes[0], layouts, strict=True):
        panel = times[times.layout == layout]
        place = {cell: len(cells) - 1 - i for i, cell in enumerate(cells)}
        for (thread, inner, heads_first), points in panel.groupby(["thread", "innermost", "heads_first"]):
            height, face = points.cell.map(place) + offsets[thread], "none" if heads_first else None
            ax.plot(points.fraction_of_copy, height, markers[inner], color=shades[thread], mfc=face, markersize=4)
        for row in panel[panel.chosen].itertuples():
            at = (row.fraction_of_copy, place[row.cell] + offsets[row.thread])
            ax.plot(*at, "o", markerfacecolor="none", markeredgecolor="black", markersize=9, label="chosen")
            text = f"{row.block_tokens} x {row.block_heads}, {row.num_warps}w" + f", {row.innermost}" * several
            ax.annotate(text, (1.0, place[row.cell]), (6, 0), xycoords=("axes fraction", "data"),
                        textcoords="offset points", va="center", size=8)  # fmt: skip
        ax.set_yticks(list(place.values()), list(place))
        ax.set(
            title=f"{drawing.LAYOUT[layout]} (right: the chosen tokens x heads, warps)",
            xlabel="fraction of the best copy",
        )
        ax.axvline(1, color="grey", linestyle="--", linewidth=1)
    axes[0, 0].set_ylabel("batch x tokens, q/k heads, head_dim")
    drawing.legend(fig, axes, columns=4)
    return fig


def _threads(tiles: pd.DataFrame) -> pd.Series:
    """In words, what a thread takes at a time and how many registers it may use."""
    limit = tiles.max_registers.map(lambda most: f", at most {most:.0f} registers" if most > 0 else "")
    return tiles.pairs_per_access.astype(str) + " pairs a thread" + limit


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "fraction_of_copy": (("dense",), fraction_of_copy),
    "host_time": (("host",), host_time),
    "tile_sweep": (("tiles",), tile_sweep),
    **family_figures.FIGURES,
    "conformance": (("conformance",), conformance_figures.peers),
    "precision_on_gpu": (("precision",), precision_figures.on_gpu),
}
"""Figure -> the studies it draws, and how: a function of their tables and the footer. Documents add their own."""


def all_figures() -> dict[str, tuple[tuple[str, ...], Callable[..., Figure]]]:
    """`FIGURES`, and the ``FIGURES`` of every document's package.

    Raises:
        ValueError: two figures of one name.
    """
    found = dict(FIGURES)
    for document in documents():
        own = document.module("figures").FIGURES
        if taken := found.keys() & own.keys():
            raise ValueError(f"{document.package}.figures: expected names of its own, got {sorted(taken)}")
        found |= own
    return found


def draw(name: str, where: records.Where = records.MEASUREMENTS) -> Figure:
    """Draw one figure of `all_figures` from the records that ``records.load_together`` finds.

    Raises:
        Missing: a record is missing; says how to make it.
        Damaged: a record cannot be believed; names the file and what is wrong with it.
    """
    known = all_figures()
    if name not in known:
        raise ValueError(f"name: expected one of {tuple(known)}, got {name!r}")
    studies, function = known[name]
    found = records.load_together(studies, where)
    footer = " / ".join(dict.fromkeys(record.footer for record in found))
    return function(*(record.frame for record in found), footer)


def draw_all(directory: Path, where: records.Where = records.MEASUREMENTS) -> tuple[list[Path], list[str]]:
    """Draw every figure whose records can be had into ``directory`` as PNG and SVG.

    Returns:
        The files, and for each figure that is not among them why.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files, missing = [], []
    for name in all_figures():
        try:
            fig = draw(name, where)
        except records.Unusable as error:
            missing.append(f"{name}: {error}")
            continue
        for kind in ("png", "svg"):
            path = directory / f"{name}.{kind}"
            fig.savefig(path, dpi=150)
            files.append(path)
    return files, missing
