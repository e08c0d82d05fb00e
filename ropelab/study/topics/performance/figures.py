"""Figures of the kernel family: every format, packed sequences, few tokens, QK norm, memory.

As in ``figures``: each takes the tables of its records and returns a figure, whose title is computed from them;
whether a bar is met is said by ``family_findings``.
"""

from collections.abc import Callable
from itertools import product

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ropelab.study.plots import drawing
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

_FORMAT_TITLES = {name: name for name in FORMATS} | {"qkv": "q and k as views of qkv (bshd)"}
_MISSED = drawing.COLORBLIND[3]
# A pass over q and k reads and writes them once. The backward of a norm reads its input as well as the cotangent and
# writes the gradient: three tensors where a copy moves two. Forward and backward together: five.
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
    cells = list(dict.fromkeys(times.cell))
    place = pd.Series(range(len(cells))[::-1], cells)
    panels = [name for name in FORMATS if (times.format == name).any()]
    columns = min(2, len(panels))
    size = (5.8, 0.46 * len(cells) + 1.0)
    reach = times.groupby("contender").fraction_of_copy
    left = min(0.5, reach.min()[OURS] - 0.05)
    fig, axes = drawing.grid(-(-len(panels) // columns), columns, size, title, footer, sharex=True, sharey=True)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, panels, strict=False):
        panel = times[times.format == name]
        for peer, points in drawing.contenders(panel):
            if peer != OURS:  # the slowest are left of the axes, so the legend says where
                look = drawing.look(peer)
                look["label"] += f" ({drawing.value_range(reach.get_group(peer), '.2f')})"
                ax.plot(points.fraction_of_copy, place[points.cell], linestyle="none", markersize=6, alpha=0.55,
                        markeredgecolor="none", **look)  # fmt: skip
        ours = panel[panel.contender == OURS]
        for i, (layout, direction) in enumerate(product(drawing.LAYOUT, drawing.DIRECTIONS)):
            points = ours[(ours.layout == layout) & (ours.direction == direction)]
            look = drawing.look(OURS) | {"marker": "o" if layout == "split_half" else "s"}
            look["label"] = f"ropelab, {drawing.LAYOUT[layout]}, {direction}"
            face = look["color"] if direction == "forward" else "white"
            ax.plot(points.fraction_of_copy, place[points.cell] + 0.13 * (1.5 - i), linestyle="none", markersize=5.5,
                    markerfacecolor=face, zorder=5, **look)  # fmt: skip
        for cell, worst in ours.groupby("cell").fraction_of_copy.min().items():
            missed = worst < bars[name].limit
            ax.annotate(toward_worse(worst, at_least=True) + " below" * missed, (1, place[cell]), (5, 0), va="center",
                        size=8, xycoords=("axes fraction", "data"), textcoords="offset points",
                        color=_MISSED if missed else "0.25", fontweight="bold" if missed else "normal")  # fmt: skip
        ax.axvline(bars[name].limit, color="black", linewidth=1.6, label=f"bar, {bars[name].limit}", zorder=3)
        ax.axvline(1, color="grey", linestyle="--", linewidth=1)
        ax.set_yticks(place, place.index)
        ax.set(title=f"{_FORMAT_TITLES[name]} (right: ropelab's slowest)", ylim=(-0.6, len(cells) - 0.4))
        ax.set_xlim(left=left)
    for ax in axes[-1]:
        ax.set_xlabel("fraction of the best copy of the same bytes")
    for ax in axes[:, 0]:
        ax.set_ylabel("batch x tokens, q/k heads, head_dim")
    drawing.legend(fig, axes, columns=4)
    drawing.say_untimed(fig, frame)
    return fig


def packed(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Time of 65,536 packed tokens against how many sequences they are, and in the skewed case."""
    times = drawing.timed(frame)
    bars = family_findings.packed_bars(frame)
    title = "Packed, ropelab at worst: " + "; ".join(bar.phrase() for bar in bars)
    if growth := _growth(times):
        title += "\nOthers, times as long as for one: " + "; ".join(growth)
    lengths = frame.drop_duplicates("case").set_index("case")
    equal = lengths[lengths.index != SKEWED].sort_values("n_seqs").index.tolist()
    cases = equal + [SKEWED] * (SKEWED in lengths.index)
    ticks = [_case_tick(case, lengths.loc[case]) for case in cases]
    place = pd.Series(range(len(cases)), cases)
    layouts = drawing.ordered(times.layout, drawing.LAYOUT)
    directions = drawing.ordered(times.direction, drawing.DIRECTIONS)
    fig, axes = drawing.grid(len(directions), len(layouts), (5.8, 3.5), title, footer, sharex=True, sharey=True)
    for (row, direction), (column, layout) in product(enumerate(directions), enumerate(layouts)):
        ax, panel = axes[row, column], times[(times.direction == direction) & (times.layout == layout)]
        copy = drawing.copies(panel).groupby("case").median_us.min().reindex(cases)
        ax.plot(range(len(cases)), copy, color="black", linestyle="--", linewidth=1.2, label="best copy", zorder=1)
        for name, points in drawing.contenders(panel):
            look = drawing.look(name) | {"label": _with_tables(name, points), "zorder": 5 if name == OURS else 3}
            look |= {"markersize": 8, "markeredgecolor": "white", "markeredgewidth": 0.5}
            # Only the same tables are joined by a line: of some kernels their length sets the time.
            for _, line in points.groupby(points.get("freqs_len", pd.Series(0, points.index)).fillna(0)):
                line = line.set_index("case").median_us
                joined = line.reindex(equal).dropna()
                ax.plot(place[joined.index], joined, **look, linewidth=1.4)
                ax.plot(place[line.index], line, **look, linestyle="none")
        if SKEWED in cases and equal:
            ax.axvline(len(equal) - 0.5, color="0.6", linewidth=1)
        ax.set(yscale="log", title=f"{drawing.LAYOUT[layout]}, {direction}", xlim=(-0.4, len(cases) - 0.5))
        ax.set_xticks(range(len(cases)), ticks, size=8)
        drawing.plain_log(ax.yaxis)
    for ax in axes[-1]:
        ax.set_xlabel("sequences that 65,536 tokens are packed of, and tokens of each")
    for ax in axes[:, 0]:
        ax.set_ylabel("GPU time (µs)")
    drawing.legend(fig, axes, columns=4)
    drawing.say_untimed(fig, frame)
    return fig


def _growth(times: pd.DataFrame) -> list[str]:
    """How many times as long each peer takes for the other cases as for one sequence, at most."""
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
    """The label, with the rows of the tables where the record says them."""
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
    tokens = sorted(times.tokens.unique())
    layouts = drawing.ordered(times.layout, drawing.LAYOUT)
    directions = drawing.ordered(times.direction, drawing.DIRECTIONS)
    fig, axes = drawing.grid(len(directions), len(layouts), (4.8, 3.2), title, footer, sharex=True, sharey=True)
    for (row, direction), (column, layout) in product(enumerate(directions), enumerate(layouts)):
        ax, panel = axes[row, column], times[(times.direction == direction) & (times.layout == layout)]
        ax.axhline(1, color="grey", linestyle="--", linewidth=1, label="best copy")
        ax.axhline(bar.limit, color="black", linewidth=1.6, label=f"bar, {bar.limit}")
        for name, points in drawing.contenders(panel):
            points = points.sort_values("tokens")
            ax.plot(points.tokens, points.over_copy, **drawing.look(name), markersize=8, markeredgewidth=0.5,
                    markeredgecolor="white", linewidth=1.4, zorder=5 if name == OURS else 3)  # fmt: skip
        ax.set(xscale="log", yscale="log", title=f"{drawing.LAYOUT[layout]}, {direction}")
        ax.xaxis.set_major_locator(FixedLocator(tokens))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        drawing.plain_log(ax.yaxis)
    for ax in axes[-1]:
        ax.set_xlabel("tokens")
    for ax in axes[:, 0]:
        ax.set_ylabel("GPU time (best copies)")
    drawing.legend(fig, axes, columns=4)
    drawing.say_untimed(fig, frame)
    return fig


def qk_norm(frame: pd.DataFrame, footer: str = "") -> Figure:
    """QK norm and rotation as a fraction of the copy of q and k, per step, with what the bytes of a step allow."""
    times = drawing.timed(frame)
    bars = family_findings.qk_norm_bars(frame)
    title = "QK norm and rotation in one pass: " + "; ".join(bar.phrase() for bar in bars)
    steps = drawing.ordered(times.step, _CEILINGS)
    rows = list(dict.fromkeys(zip(times.cell, times.layout, strict=True)))
    place = pd.Series(range(len(rows))[::-1], pd.MultiIndex.from_tuples(rows))
    fig, axes = drawing.grid(1, len(steps), (4.3, 0.4 * len(rows) + 1.6), title, footer, sharey=True)
    for ax, step in zip(axes[0], steps, strict=True):
        panel = times[times.step == step]
        for name, points in drawing.contenders(panel):
            height = place[pd.MultiIndex.from_frame(points[["cell", "layout"]])]
            ax.plot(points.fraction_of_copy, height, **drawing.look(name), linestyle="none", zorder=5,
                    markersize=8 if name == OURS else 7, markeredgecolor="white", markeredgewidth=0.5)  # fmt: skip
        if (wanted := _qk_norm_bar(step, panel)) is not None:
            at = place[wanted.index]
            ax.vlines(wanted, at - 0.36, at + 0.36, color="black", linewidth=2, label="bar", zorder=3)
        ax.axvline(_CEILINGS[step], color="grey", linestyle="--", linewidth=1, label="all that the bytes allow")
        ax.set_yticks(place, [f"{cell}, {drawing.LAYOUT[layout]}" for cell, layout in rows])
        ax.set(title=step, xlabel="fraction of the best copy of q and k", ylim=(-0.6, len(rows) - 0.4))
        ax.set_xlim(left=0)
    axes[0, 0].set_ylabel("cell, layout")
    drawing.legend(fig, axes, columns=5)
    drawing.say_untimed(fig, frame)
    return fig


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
    """Peak memory of a call: its results, and what it takes beyond them."""
    shown = frame[frame.status == "ok"] if "status" in frame else frame
    title = "Peak memory: " + "; ".join(bar.phrase() for bar in family_findings.memory_bars(frame))
    steps = list(dict.fromkeys(shown.step))
    names = list(dict.fromkeys(shown.contender))
    place = pd.Series(range(len(names))[::-1], names)
    fig, axes = drawing.grid(1, len(steps), (5.4, 0.5 * len(names) + 1.4), title, footer, sharex=True, sharey=True)
    for ax, step in zip(axes[0], steps, strict=True):
        rows = shown[shown.step == step]
        height, results = place[rows.contender], rows.result_bytes / 2**20
        beyond = rows.peak_bytes - rows.result_bytes
        more = beyond.clip(lower=0) / 2**20
        ax.barh(height, results, 0.6, color=drawing.COLORBLIND[0], label="outputs and gradients")
        ax.barh(height, more, 0.6, left=results, color=drawing.COLORBLIND[1], label="beyond them")
        for at, end, size in zip(height, results + more, beyond, strict=True):
            ax.annotate(_size(size), (end, at), (4, 0), textcoords="offset points", va="center", size=8)
        ax.set_yticks(place, [drawing.label(name) for name in names])
        ax.set(title=step, xlabel="peak beyond what was allocated before (MiB)")
        ax.margins(x=0.2)
        ax.grid(False, axis="y")
    drawing.legend(fig, axes)
    return fig


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
"""Figure -> the studies it draws, and how: a function of their tables and the footer."""
