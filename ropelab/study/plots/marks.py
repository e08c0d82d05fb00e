"""Draw the marks that figures share: dots, bars, lines of reference, numbers beside marks."""

from collections.abc import Iterable, Mapping

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

COPY = {"color": "black", "linestyle": "--", "linewidth": 1.2, "zorder": 1, "label": "best copy"}
"""The look of the line at the time, or at the bytes per second, of a copy."""
_LIGHT = {"Blues": (0.0, 0.5), "PuOr": (0.275, 0.725), "PuOr_r": (0.275, 0.725), "RdBu_r": (0.275, 0.725)}
"""A colour map -> its part on which black text has a contrast of 4.5 (WCAG 2.2), on light and on dark pages."""
_WHITE = {"markeredgecolor": "white", "markeredgewidth": 0.5}


def places(names: Iterable) -> pd.Series:
    """The height of each row of a panel, with the first row on top. The index has each of the ``names`` once."""
    names = list(dict.fromkeys(names))
    return pd.Series(range(len(names))[::-1], pd.Index(names, tupleize_cols=True), dtype=int)


def rows(ax: Axes, place: pd.Series, labels: Iterable[str] | None = None, *, left: float = 0, **style) -> None:
    """Write the names of the rows at their heights, fit the axes to the rows and begin the x axis at ``left``."""
    ax.set_yticks(place, place.index if labels is None else labels, **style)
    ax.set(ylim=(-0.6, len(place) - 0.4))
    ax.set_xlim(left=left)


def dots(ax: Axes, x, y, look: Mapping, **style) -> None:
    """Draw points with a white edge and no line."""
    ax.plot(x, y, **({"linestyle": "none", "zorder": 4} | _WHITE | dict(look) | style))


def line(ax: Axes, x, y, look: Mapping, **style) -> None:
    """Draw points with a white edge, joined by a line."""
    ax.plot(x, y, **({"linewidth": 1.4} | _WHITE | dict(look) | style))


def spans(ax: Axes, at, found: pd.DataFrame, look: Mapping, *, upright: bool = True, **style) -> None:
    """Draw each row (columns least, middle, most) as a bar from the least to the most, with a dot at the middle."""
    (ax.vlines if upright else ax.hlines)(at, found.least, found.most, color=look["color"], linewidth=1.2)
    dots(ax, *((at, found.middle) if upright else (found.middle, at)), look, **style)


def one(ax: Axes, *, at: float = 1, upright: bool = True, **style) -> None:
    """Draw a dashed line at a ratio, by default at 1, the speed of a copy; ``upright`` if the ratios run along x."""
    (ax.axvline if upright else ax.axhline)(at, **({"color": "grey", "linestyle": "--", "linewidth": 1} | style))


def published(ax: Axes, x, y, label: str, *, width: float) -> None:
    """Mark the values that a document prints: a black dash of ``width`` points at each value."""
    ax.plot(x, y, "_k", markersize=width, markeredgewidth=2.5, label=label)


def beside(ax: Axes, xs, ys, texts: Iterable[str], *, gap: float = 4, **style) -> None:
    """Write each text right of its point, ``gap`` points away."""
    style = {"textcoords": "offset points", "va": "center", "size": 8} | style
    for x, y, text in zip(xs, ys, texts, strict=True):
        ax.annotate(text, (x, y), (gap, 0), **style)


def cells(ax: Axes, table: pd.DataFrame, texts=True, *, cmap: str, labels: float = 8, **limits) -> None:
    """Draw a table as a map: a coloured cell for each value, with its text.

    Args:
        texts: a text for each cell; by default the values with two digits.
        cmap: a colour map of `_LIGHT`.
        labels: the size of the texts beside the map, in points.
        limits: ``vmin`` and ``vmax``, the values with the first and the last colour.
    """
    shown = {"annot": texts, "fmt": ".2f" if texts is True else "", "annot_kws": {"size": 8, "color": "black"}}
    light = ListedColormap(mpl.colormaps[cmap](np.linspace(*_LIGHT[cmap], 256)))
    sns.heatmap(table, ax=ax, cbar=False, linewidths=0.5, cmap=light, **shown, **limits)
    ax.set(xlabel="", ylabel="")
    ax.tick_params(length=0, rotation=0, labelsize=labels)
    ax.grid(False)


def map_of(table: pd.DataFrame, texts, *, cmap: str, size: tuple[float, float] = (7, 3.4), **limits) -> Axes:
    """`cells` in a figure of its own, of ``size`` inches."""
    _, ax = plt.subplots(figsize=size)
    cells(ax, table, texts, cmap=cmap, **limits)
    return ax
