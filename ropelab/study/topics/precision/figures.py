"""Draw the errors of cos and sin beside their bounds, and the effects on scores, models and memory.

Each function takes a result of `precision_findings` and returns a figure. The title states the finding.
"""

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from ropelab.study.plots import drawing, ticks
from ropelab.study.plots.looks import COLORBLIND, Looks
from ropelab.study.plots.panels import Panels, facet, grid
from ropelab.study.topics.precision import findings
from ropelab.study.topics.precision.findings import LOSSES, OURS, TABLE_FREE, USUAL

_LOOKS = Looks(
    {
        "bf16 positions": ("", 3, "v"),
        "bf16 frequencies": ("", 1, "s"),
        "TF32, emulated": ("", 4, "^"),
        "TF32 matmul": ("", 4, "<"),
        "TF32 batched matmul": ("", 8, ">"),
        "TF32 matmul, padded": ("", 6, "p"),
        "fast-math sincos": ("", 5, "D"),
        USUAL: ("", 0, "o"),
        "bf16 tables": ("", 7, "X"),
        OURS: ("", 2, "P"),
        TABLE_FREE: ("", 9, "*"),
    },
    other=(8, "h"),
)
"""The looks of the methods."""
_SIZE = (6.2, 4.6)
_BOUND = {"linestyle": (0, (4, 2)), "linewidth": 1}


def rotations(
    found: pd.DataFrame, footer: str = "", *, title: str | None = None, untimed: pd.DataFrame | None = None
) -> Figure:
    """The largest errors of an angle and of a rotated pair in each octave of positions, with their bounds."""
    panels = grid(1, 2, _SIZE, findings.sentence(found) if title is None else title, footer, sharex=True)
    left, right = panels.axes[0]
    _curves(left, found, "angle")
    _curves(right, found, "output")
    for (name, radians), side in zip(LOSSES.items(), ("top", "center", "bottom"), strict=True):
        _line(left, radians, name, side)
    _line(right, findings.BF16_ROUNDING, "rounding to bf16")
    _line(right, findings.FP32_ROUNDING, "rounding to fp32")
    left.set(ylabel="largest error of an angle (rad)", title="The angle, full turns included")
    right.set(ylabel="largest error over the length of the pair", title="A rotated pair of features")
    return _finish(panels, "position (tokens; largest error of each octave)", untimed)


def on_gpu(found: pd.DataFrame, footer: str = "") -> Figure:
    """The methods that need a GPU, as measured on a GPU, and float32 angles for comparison."""
    shown = found[(found.status == "ok") & found.method.isin([*findings.ON_GPU, USUAL])]
    untimed = found.rename(columns={"method": "contender"})
    return rotations(shown, footer, title=findings.gpu_sentence(found), untimed=untimed)


def ulps(found: pd.DataFrame, footer: str = "") -> Figure:
    """How often an error has a size in units in the last place: cosines and sines, and rotated features."""
    title = drawing.title(findings.ulps_sentence, found)
    panels = facet(found, (4.6, 4.0), title, footer, column="of", words={}, sharey=True)
    for (ax, panel, _), colors in zip(panels, ((0, 3, 2), (1, 4, 9)), strict=True):
        top = max(1.0, math.ceil(math.log2(panel.ulps.max() + 1)))
        edges = np.concatenate(([0.0], 2.0 ** np.arange(-6, top + 0.25, 0.25)))
        for place, (what, errors) in zip(colors, panel.groupby("what", sort=False).ulps, strict=True):
            share = np.histogram(errors, edges)[0] / len(errors)
            ax.stairs(np.where(share > 0, share, np.nan), edges, color=COLORBLIND[place], linewidth=1.6, label=what)
        ax.axvline(0.5, color="black", linestyle="--", linewidth=1, label="half an ulp")
        ax.set(xscale="log", yscale="log", xlim=(edges[1], edges[-1]))
    return panels.finish("error in ulps of the exact value", "share of the values", legend=4)


def law(found: pd.DataFrame, footer: str = "") -> Figure:
    """The change of scores at fixed distances as both tokens move, and the error of the scores."""
    distances = list(found.distance.unique())
    title = findings.law_sentence(found)
    panels = grid(len(distances), 2, (_SIZE[0], 4.0), title, footer, sharex=True, sharey=True)
    for row, distance in zip(panels.axes, distances, strict=True):
        part = found[found.distance == distance]
        tokens = f"{distance:,} token{'s' if distance > 1 else ''} apart"
        quantities = {"moved": "change since position 0: the law", "off": "error: the right score"}
        for ax, (column, what) in zip(row, quantities.items(), strict=True):
            _curves(ax, part, column, error=column)
            ax.set_title(f"{tokens}, {what}")
        row[0].set_ylabel("of the largest possible score")
    return _finish(panels, "position of the key (tokens; largest of each octave)")


def attention(found: pd.DataFrame, footer: str = "") -> Figure:
    """The errors of the scores and of the attention weights of random queries, with their bounds."""
    panels = grid(1, 2, _SIZE, findings.attention_sentence(found), footer, sharex=True)
    left, right = panels.axes[0]
    _curves(left, found, "score")
    _curves(right, found, "weights")
    left.set(ylabel="largest error of a score (logit)", title="Scores before the softmax")
    right.set(ylabel="share of the attention moved", title="Attention weights: share that goes to other keys")
    return _finish(panels, "position of the query (tokens; largest of each octave)")


def right_bits(found: pd.DataFrame) -> Styler:
    """The right bits of models: a row for each longest context and model, and a column for each method."""
    table = found.pivot_table(index=["length", "model"], columns="method", values="bits", sort=False)
    table = table.sort_index(level="length", sort_remaining=False)
    # The light half of the colours: black text has a contrast of 4.5 everywhere.
    return table.style.format("{:.1f}").background_gradient("Blues", high=1, vmin=0, vmax=24, text_color_threshold=0.18)


# ---------------------------------------------------------------------------------------------------------- helpers


def _curves(ax, found: pd.DataFrame, quantity: str, *, error: str | None = None) -> None:
    """Draw measured values with markers and their bounds dashed, against the position."""
    for name, part in found.groupby("method", sort=False):
        part = part.sort_values("position")
        ax.plot(part.position, part[error or f"{quantity}_error"], **_LOOKS(name), markersize=4.5, linewidth=1.3)
        ax.plot(part.position, part[f"{quantity}_bound"], color=_LOOKS.color(name), alpha=0.8, **_BOUND)
    ax.set_yscale("log")
    _positions_axis(ax, found.position)


def _positions_axis(ax, positions: pd.Series) -> None:
    ax.set_xscale("log", base=2)
    first, last = (round(math.log2(value)) for value in (positions.min(), positions.max()))
    ticks.at(ax.xaxis, [2**k for k in range(first, last + 1, 4)])


def _line(ax, height: float, text: str, side: str = "center") -> None:
    """Draw a line of reference, with its name beside the panel, where no curve runs."""
    ax.axhline(height, color="0.25", linewidth=0.9, linestyle=":")
    ax.annotate(text, (1.01, height), xycoords=("axes fraction", "data"), va=side, size=9, color="0.25")


def _finish(panels: Panels, label: str, untimed: pd.DataFrame | None = None) -> Figure:
    panels.axes[0, 0].plot([], [], color="0.3", label="its derived bound", **_BOUND)
    return panels.finish(label, legend=5, untimed=untimed)
