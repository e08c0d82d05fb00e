"""Draw the steps: how close each comes to a copy, what limits it, and how the tile decides."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from ropelab.study.engine.words import value_range
from ropelab.study.plots import drawing, gpus, marks, ticks
from ropelab.study.plots.panels import grid
from ropelab.study.topics.kernel_steps import machine_code
from ropelab.study.topics.kernel_steps.plans import TILES, tile_name
from ropelab.study.topics.kernel_steps.predicted import Gpu


def fractions(frame: pd.DataFrame, names: Sequence[str], footer: str = "") -> Figure:
    """The time of steps over the time of the copy, with the noise of `drawing.noisy`; the second panel is near 1."""
    rows = drawing.noisy("kernel_steps", frame[frame.contender.isin(names)])
    place = marks.places(names)
    title = drawing.title(
        lambda part: f"The steps take {value_range(1 / part.fraction_of_copy)} times as long as a copy", rows
    )
    panels = grid(1, 2, (4.6, 0.36 * len(names) + 1.2), title, footer, sharey=True)
    whole, near = panels.axes[0]
    for ax in (whole, near):
        for number, (_, points, look) in enumerate(gpus.parts(rows)):
            y = place[points.contender] + 0.14 * (rows.gpu.nunique() - 1) - 0.28 * number
            speed = points.fraction_of_copy
            gpus.across(ax, 1 / speed, y, points.low / speed, points.high / speed, look, markersize=5)
        marks.one(ax)
        marks.rows(ax, place, left=0.9)
    whole.set_xscale("log")
    ticks.plain_log(whole.xaxis)
    near.set_xlim(*_NEAR)
    return panels.finish("times as long as a copy of the same bytes", legend=3)


_NEAR = 0.98, 1.16
"""The times of the second panel of `fractions`, where most steps lie."""


def roofline(
    frame: pd.DataFrame, facts: Mapping[str, Mapping[str, int]], machines: Sequence[Gpu], names: Sequence[str],
    footer: str = "",
) -> Figure:  # fmt: skip
    """Bytes a second against instructions for each kilobyte, under the roofs of memory and of the schedulers."""
    panels = grid(len(machines), 1, (5.6, 3.4), "Two roofs: the memory, and the instructions", footer, sharex=True)
    for ax, machine in zip(panels.axes[:, 0], machines, strict=True):
        rows = frame[(frame.gpu == machine.name) & frame.contender.isin([n for n in names if n in facts])]
        needed = rows.contender.map(
            lambda name: facts[name]["instructions"] * facts[name]["warps"] * facts[name]["programs"]
        )
        density = needed / (rows.bytes / 1000)
        rate = rows.bytes / rows.median_us / 1000  # GB/s
        ax.plot(density, rate, "o", color=gpus.COLORBLIND[0], markersize=4)
        points = pd.DataFrame({"step": rows.contender.str[:1], "x": density, "y": rate}).sort_values("x")
        apart = (points[["x", "y"]].pct_change().abs() > (0.03, 0.1)).any(axis=1).cumsum()
        for number, near in points.groupby(apart):  # labels of neighbours lie in two lines
            text, at = ",".join(sorted(set(near.step))), (near.x.mean(), near.y.min())
            ax.annotate(text, at, (0, -12 - 10 * (number % 2)), textcoords="offset points", ha="center", size=8)
        ridge = 1000 * machine.warps_per_us / machine.bytes_per_us  # where both roofs meet
        across = pd.Series([0.7 * density.min(), ridge, 1.4 * density.max()]).sort_values()
        roof = (machine.warps_per_us / across).clip(upper=machine.bytes_per_us / 1000)
        ax.plot(across, roof, color="black", linewidth=1.4, label="roofs: copy, issue")
        ax.set(xscale="log", yscale="log", title=machine.name, ylim=(0.7 * rate.min(), None))
        ticks.plain_log(ax.xaxis)
        ticks.plain_log(ax.yaxis)
    return panels.finish("instructions of a warp for each kB", "GB/s", legend=1)


def tiles(frame: pd.DataFrame, facts: Mapping[str, Mapping[str, int]], footer: str = "") -> Figure:
    """The speed of programs of four warps against the pairs that a thread holds, with registers and occupancy."""
    names = {tile_name(*size): size for size in TILES if size[2] == 4}
    rows = drawing.noisy("kernel_steps", frame[frame.contender.isin(names)])
    pairs = {name: tokens * heads * frame.head_dim.iloc[0] // 2 / 128 for name, (tokens, heads, _) in names.items()}
    title = drawing.title(
        lambda part: f"By its tile a program runs at {value_range(part.fraction_of_copy)} of a copy", rows
    )
    panels = grid(1, 1, (5.6, 3.4), title, footer)
    ax = panels.axes[0, 0]
    for _, points, look in gpus.parts(rows):
        points = points.assign(pairs=points.contender.map(pairs)).sort_values("pairs")
        speed = points.fraction_of_copy
        gpus.upright(ax, points.pairs, speed, speed / points.high, speed / points.low, look)
    for name, x in pairs.items():
        registers = facts[name]["registers"]
        text = f"{registers}\n{machine_code.occupancy(registers, 4):.0%}"
        ax.annotate(text, (x, 0.02), xycoords=("data", "axes fraction"), ha="center", size=8)
    ax.set_xscale("log", base=2)
    ticks.at(ax.xaxis, pairs.values(), "{:g}".format)
    ax.set_ylim(rows.fraction_of_copy.min() - 0.1, 1.02)
    marks.one(ax, upright=False)
    return panels.finish("pairs a thread (below: its registers, the occupancy)", "fraction of a copy", legend=3)
