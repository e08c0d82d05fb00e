"""Draw the steps: which thread touches which memory, how close a step comes to a copy, and how the tile decides."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from ropelab.study.plots import marks, ticks
from ropelab.study.plots.looks import COLORBLIND
from ropelab.study.plots.panels import grid
from ropelab.study.topics.kernel_steps.layout import WARP
from ropelab.study.topics.kernel_steps.threads import SECTOR, Access

_HEADS = 16
"""The heads of a drawing of memory."""
_OTHERS, _LATER, _EMPTY = "#d9d9d9", "#a8c8e8", "#f7f7f7"
_THREADS = "viridis"


def turned(tables: tuple[torch.Tensor, torch.Tensor], pairs: Sequence[int] = (0, 8, 16)) -> Figure:
    """Where the pair (1, 0) lies at each position of tables of cosines and sines ``[positions, pairs]``."""
    cos, sin = (table.numpy() for table in tables)
    panels = grid(1, len(pairs), (2.1, 2.2), "A pair turns by an angle for each position", "", sharey=True)
    colors = mpl.colormaps[_THREADS](np.linspace(0, 1, len(cos)))
    for ax, pair in zip(panels.axes[0], pairs, strict=True):
        zero = np.zeros(len(cos))
        x, y = cos[:, pair], sin[:, pair]
        ax.quiver(zero, zero, x, y, color=colors, angles="xy", scale_units="xy", scale=1, width=0.015)
        for position in (0, len(cos) - 1):
            ax.text(1.14 * x[position], 1.14 * y[position], str(position), ha="center", va="center", size=8)
        ax.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title=f"pair {pair}", xlabel="$x_0$")
        for axis in (ax.xaxis, ax.yaxis):
            ticks.at(axis, (-1, 0, 1))
    panels.axes[0, 0].set_ylabel("$x_1$")
    return panels.figure


def lying(access: Access, head_dim: int, title: str) -> Figure:
    """The memory of 16 heads of a token: which thread of the first warp touches it with the first instruction.

    Args:
        access: a load of x, or a store of y.
    """
    panels = grid(1, 1, (6.2, 2.1), title, "")
    ax = panels.axes[0, 0]
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
    return panels.figure


def ladder(rows: pd.DataFrame, title: str, footer: str, now: str = "") -> Figure:
    """The speed of steps as a part of a copy's speed, a bar a step, and the limit of each: its highest roof, or a copy.

    Args:
        rows: columns step, speed (NaN where it is not timed), roof (NaN where it is not known) and by, its resource.
        now: the step whose bar has another colour.
    """
    panels = grid(1, 1, (6.2, 0.27 * len(rows) + 0.5), title, footer)
    ax = panels.axes[0, 0]
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
    return panels.finish("speed of a copy of the same bytes", legend=1 if rows.roof.notna().any() else 0)


_END, _NEAR, _INSIDE = 1.08, 0.8, 0.2
"""The end of the axis of `ladder`, the roof below which it names the resource, the least bar that holds its number."""
_TEXT = {"textcoords": "offset points", "va": "center", "size": 8}


def tiles(points: pd.DataFrame, title: str, footer: str) -> Figure:
    """The time of programs against the pairs that a thread holds, over the roofs, with registers and occupancy.

    Args:
        points: columns pairs, median_us, low and high (over the median), registers, occupancy, and the roofs.
    """
    panels = grid(1, 1, (6.2, 3.4), title, footer)
    ax = panels.axes[0, 0]
    for name, place, style in ("bytes", 2, "-"), ("instructions", 3, "--"), ("starts", 4, ":"), ("waits", 5, "-."):
        ax.plot(points.pairs, points[name], style, color=COLORBLIND[place], linewidth=1.4, label=f"roof: {name}")
    spread = [(1 - points.low) * points.median_us, (points.high - 1) * points.median_us]
    ax.errorbar(points.pairs, points.median_us, spread, fmt="o", color=COLORBLIND[0], capsize=2, label="measured")
    ax.set_xscale("log", base=2)
    texts = {one.pairs: f"{one.pairs:g}\n{one.registers}\n{one.occupancy:.0%}" for one in points.itertuples()}
    ticks.at(ax.xaxis, points.pairs, texts.__getitem__)
    ax.set_ylim(bottom=0)
    return panels.finish("pairs a thread, its registers, the part of the warps that fit", "microseconds", legend=3)
