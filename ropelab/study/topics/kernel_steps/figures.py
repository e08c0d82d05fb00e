"""Draw the steps: which thread touches which memory, how close a step comes to a copy, and how the tile decides."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ropelab.study.plots import marks, ticks
from ropelab.study.plots.looks import COLORBLIND
from ropelab.study.topics.kernel_steps.layout import WARP
from ropelab.study.topics.kernel_steps.threads import SECTOR, Access

_HEADS = 16
"""The heads of a drawing of memory."""
_OTHERS, _LATER, _EMPTY = "#d9d9d9", "#a8c8e8", "#f7f7f7"
_THREADS = "viridis"


def turned(tables: tuple[torch.Tensor, torch.Tensor], pairs: Sequence[int] = (0, 8, 16)) -> Figure:
    """Where the pair (1, 0) lies at each position of tables of cosines and sines ``[positions, pairs]``."""
    cos, sin = (table.numpy() for table in tables)
    fig, axes = _drawn((6.3, 2.7), "A pair turns by an angle for each position", columns=len(pairs))
    colors = mpl.colormaps[_THREADS](np.linspace(0, 1, len(cos)))
    for ax, pair in zip(axes, pairs, strict=True):
        zero = np.zeros(len(cos))
        x, y = cos[:, pair], sin[:, pair]
        ax.quiver(zero, zero, x, y, color=colors, angles="xy", scale_units="xy", scale=1, width=0.015)
        for position in (0, len(cos) - 1):
            ax.text(1.14 * x[position], 1.14 * y[position], str(position), ha="center", va="center", size=8)
        ax.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title=f"pair {pair}", xlabel="$x_0$")
        for axis in (ax.xaxis, ax.yaxis):
            ticks.at(axis, (-1, 0, 1))
    axes[0].set_ylabel("$x_1$")
    return fig


def lying(access: Access, head_dim: int, title: str) -> Figure:
    """The memory of 16 heads of a token: which thread of the first warp touches it with the first instruction.

    Args:
        access: a load of x, or a store of y.
    """
    fig, (ax,) = _drawn((6.2, 2.6), title)
    picture = np.tile(mpl.colors.to_rgb(_EMPTY), (_HEADS, head_dim, 1))
    palette = mpl.colormaps[_THREADS].resampled(WARP)
    moved = (access.place >= 0) & (access.place < _HEADS * head_dim)
    for which, color in (moved, _OTHERS), (moved & (access.thread < WARP), _LATER):
        picture[np.divmod(access.place[which], head_dim)] = mpl.colors.to_rgb(color)
    first = moved & access.first
    picture[np.divmod(access.place[first], head_dim)] = palette(access.thread[first])[:, :3]
    ax.imshow(picture, aspect="auto", interpolation="nearest", extent=(0, head_dim, _HEADS, 0))
    for at in range(0, head_dim, SECTOR // access.itemsize):
        ax.axvline(at, color="white", linewidth=1)
    ax.set_yticks(np.arange(0.5, _HEADS, 5), range(0, _HEADS, 5))
    ticks.at(ax.xaxis, range(0, head_dim + 1, SECTOR // access.itemsize))
    ax.grid(False)
    ax.set(xlabel="feature (a white line begins a sector of 32 bytes)", ylabel="head")
    handles = [mpl.patches.Patch(color=palette(n), label=f"thread {n}") for n in (0, WARP // 2, WARP - 1)]
    for color, label in ((_LATER, "later instructions"), (_OTHERS, "other warps")):
        handles.append(mpl.patches.Patch(color=color, label=label))
    ax.legend(handles=handles, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8,
              handlelength=1, columnspacing=1)  # fmt: skip
    return fig


def ladder(rows: pd.DataFrame, title: str, footer: str, now: str = "") -> Figure:
    """The speed of steps as a part of a copy's speed, a bar a step, and the limit of each: its highest roof, or a copy.

    Args:
        rows: columns step, speed (NaN where it is not timed), roof (NaN where it is not known) and by, its resource.
        now: the step whose bar has another colour.
    """
    fig, (ax,) = _drawn((6.2, 0.27 * len(rows) + 1.3), title, footer)
    place = marks.places(rows.step)
    colors = [COLORBLIND[0 if step == now or not now else 7] for step in rows.step]
    ax.barh(place, rows.speed.fillna(0), 0.62, color=colors)
    limit = rows.roof.clip(upper=1)
    ax.vlines(limit, place - 0.36, place + 0.36, color="black", linewidth=2, label="limit: the highest roof, or a copy")
    for y, one in zip(place, rows.itertuples(), strict=True):
        limited = one.speed < one.roof < _NEAR
        if one.speed > _INSIDE:
            ax.annotate(f"{one.speed:.2f}", (one.speed, y), (-4, 0), ha="right", color="white", **_TEXT)
        said = ["not timed"] if np.isnan(one.speed) else [] if one.speed > _INSIDE else [f"{one.speed:.2f}"]
        said += [f"limit {one.roof:.2f}: {one.by}"] * limited
        ax.annotate(", ".join(said), (one.roof if limited else np.nan_to_num(one.speed), y), (5, 0), **_TEXT)
    marks.one(ax)
    marks.rows(ax, place)
    ax.set_xlim(0, _END)
    ax.grid(False, axis="y")
    ax.set_xlabel("speed of a copy of the same bytes")
    if rows.roof.notna().any():
        fig.legend(loc="outside lower left", frameon=False, fontsize=8)
    return fig


_END, _NEAR, _INSIDE = 1.08, 0.8, 0.2
"""The end of the axis of `ladder`, the roof below which it names the resource, the least bar that holds its number."""
_TEXT = {"textcoords": "offset points", "va": "center", "size": 8}


def tiles(points: pd.DataFrame, title: str, footer: str) -> Figure:
    """The time of programs against the pairs that a thread holds, over the roofs, with registers and occupancy.

    Args:
        points: columns pairs, median_us, low and high (over the median), registers, occupancy, and the roofs.
    """
    fig, (ax,) = _drawn((6.2, 3.9), title, footer)
    for name, place, style in ("bytes", 2, "-"), ("instructions", 3, "--"), ("starts", 4, ":"), ("waits", 5, "-."):
        ax.plot(points.pairs, points[name], style, color=COLORBLIND[place], linewidth=1.4, label=f"roof: {name}")
    spread = [(1 - points.low) * points.median_us, (points.high - 1) * points.median_us]
    ax.errorbar(points.pairs, points.median_us, spread, fmt="o", color=COLORBLIND[0], capsize=2, label="measured")
    ax.set_xscale("log", base=2)
    texts = {one.pairs: f"{one.pairs:g}\n{one.registers}\n{one.occupancy:.0%}" for one in points.itertuples()}
    ticks.at(ax.xaxis, points.pairs, texts.__getitem__)
    ax.set(ylim=(0, None), ylabel="microseconds")
    ax.set_xlabel("pairs a thread, its registers, the part of the warps that fit")
    ax.legend(loc="upper right", ncols=2, frameon=False)
    return fig


def _drawn(size: tuple[float, float], title: str, footer: str = "", columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """A figure of ``size`` (inches) with a title and, at its foot, where its numbers come from."""
    fig = Figure(figsize=size, layout="constrained")
    fig.suptitle(title, x=0.01, ha="left", size=12, weight="bold")
    fig.supxlabel(footer, x=0.99, ha="right", size=8, color="0.35")
    return fig, fig.subplots(1, columns, sharey=True, squeeze=False)[0]
