"""Lay a figure out: a title over a grid of panels, labels at its edges, a legend and remarks at its foot."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ropelab.study.plots.drawing import ORDERS, ordered
from ropelab.study.plots.looks import CONTENDERS

LAYOUT = {"split_half": "split-half", "interleaved": "interleaved"}
CELLS = "batch x tokens, q/k heads, head_dim"
"""The label of an axis whose ticks name cells."""
_TITLE_LETTERS_PER_INCH, _LETTERS_PER_INCH, _SMALL_LETTERS_PER_INCH = 9, 12, 15  # for texts of bold 12, 10 and 8 points
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.titlesize": 12,
}
BETWEEN_RECORDS = " / "
"""The footers of several records stand in one text with these letters between them, and in a line each at the foot."""
_SMALL_LINE = 0.95 * 10 / 72
"""The height of a line of 8 points, in inches."""
_SMALL = {"va": "bottom", "size": 8, "color": "0.35"}
# An SVG keeps text as text, which takes a quarter of the bytes of outlines. matplotlib reads this setting when a figure
# is written, in any module.
mpl.rcParams["svg.fonttype"] = "none"


@dataclass(frozen=True)
class Panels:
    """A figure and its panels.

    Attributes:
        figure: the figure. pyplot does not know it, so that a notebook shows it once.
        axes: the axes of the panels, ``[rows, columns]``.
        parts: for each panel its axes, its rows of the table and its value (the values of column and row, if there are
            both).
        note: the part of the title that did not fit above the panels.
    """

    figure: Figure
    axes: np.ndarray
    note: str = ""
    parts: tuple[tuple[Axes, pd.DataFrame, object], ...] = ()

    def __iter__(self) -> Iterator[tuple[Axes, pd.DataFrame, object]]:
        return iter(self.parts)

    def finish(
        self,
        xlabel: str = "",
        ylabel: str = "",
        *,
        legend: int = 0,
        size: float | None = None,
        untimed: pd.DataFrame | None = None,
    ) -> Figure:
        """Label the outer edges, then draw the foot.

        Args:
            xlabel, ylabel: the labels of the last row and of the first column; "" leaves the labels as they are.
            legend: the number of columns of the legend of all panels; 0 draws no legend.
            size: the size of the markers in the legend; by default as in the panels.
            untimed: a record. The foot names its contenders without a time.
        """
        for ax in self.axes[-1] if xlabel else ():
            ax.set_xlabel(xlabel)
        for ax in self.axes[:, 0] if ylabel else ():
            ax.set_ylabel(ylabel)
        if legend:
            _legend(self.figure, self.axes, legend, size)
        _say(self.figure, list(filter(None, [self.note, "" if untimed is None else _untimed(untimed)])))
        return self.figure


def grid(
    rows: int, columns: int, size: tuple[float, float], title: str, footer: str, *, shown: int | None = None, **share
) -> Panels:
    """A figure of ``rows`` by ``columns`` panels, each of ``size`` (inches); only the first ``shown`` are visible."""
    with sns.axes_style("whitegrid", rc=_STYLE), mpl.rc_context(_STYLE):
        fig = Figure(figsize=(columns * size[0], rows * size[1] + 1.1), layout="constrained")
        axes = fig.subplots(rows, columns, squeeze=False, **share)
        head, note = _headline(title, int(_TITLE_LETTERS_PER_INCH * fig.get_figwidth()))
        fig.set_label(" ".join(title.split()))
        fig.suptitle(head, x=0.01, ha="left", fontweight="bold")
        lines = footer.split(BETWEEN_RECORDS)
        if footer:
            fig.text(0.99, 0.004, "\n".join(lines), ha="right", **_SMALL)
        margin = (0.3 + _SMALL_LINE * (len(lines) - 1)) / fig.get_figheight()  # inches, for the footer
        fig.get_layout_engine().set(rect=(0, margin, 1, 1 - margin))
    for ax in axes.flat[shown:] if shown is not None else ():
        ax.set_visible(False)
    return Panels(fig, axes, note)


def facet(
    frame: pd.DataFrame,
    size: tuple[float, float],
    title: str,
    footer: str,
    *,
    column: str,
    row: str = "",
    wrap: int = 0,
    words: Mapping = LAYOUT,
    **share,
) -> Panels:
    """A figure with a panel for each value of ``column`` and of ``row``. A panel gets its rows of ``frame``.

    Args:
        wrap: the number of panels beside each other, if there is no ``row``; 0 for all panels.
        words: value -> its words in the title of a panel.
    """
    across, down = (ordered(frame[name], ORDERS.get(name, frame[name])) if name else [None] for name in (column, row))
    keys = [(x, y) for y in down for x in across]
    width = min(wrap or len(across), len(across))
    found = grid(-(-len(keys) // width), width, size, title, footer, shown=len(keys), **share)
    parts = []
    for ax, key in zip(found.axes.flat, keys, strict=False):
        named = [(name, value) for name, value in zip((column, row), key, strict=True) if name]
        part = frame[np.logical_and.reduce([frame[name] == value for name, value in named])]
        ax.set_title(", ".join(str(words.get(value, value)) for _, value in named))
        parts.append((ax, part, key if row else key[0]))
    return Panels(found.figure, found.axes, found.note, tuple(parts))


def said(fig: Figure) -> str:
    """The sentence of a figure, in one line: its title and the note under its panels."""
    return str(fig.get_label())


def _headline(title: str, width: int) -> tuple[str, str]:
    """The longest beginning of a title that ends a clause and fits into a line of ``width`` letters, and the rest."""
    line = " ".join(title.split())
    if len(line) <= width:
        return line, ""
    for mark in ("; ", ". ", ": ", ", ", " "):
        ends = [match.start() for match in re.finditer(re.escape(mark), line[: width + len(mark)])]
        whole = [end for end in ends if line[:end].count("(") == line[:end].count(")")]
        if fits := [end for end in whole if width // 4 <= end < width]:
            return line[: fits[-1]] + " …" * (mark == " "), line[fits[-1] + len(mark) :]
    return line[:width], line[width:]


def _legend(fig: Figure, axes: np.ndarray, columns: int, size: float | None) -> None:
    """One legend for all panels, below them. It has at most ``columns`` columns, fewer if the figure is too narrow."""
    entries: dict[str, object] = {}
    for ax in axes.flat:
        for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    while columns > 1 and _legend_letters(list(entries), columns) > _LETTERS_PER_INCH * fig.get_figwidth():
        columns -= 1
    # The pad, in font sizes, leaves room for the footer below the legend.
    pad = 2 + _SMALL_LINE * (len(_footer(fig)) - 1) * 72 / _STYLE["font.size"]
    options = {"loc": "outside lower center", "borderaxespad": pad, "frameon": False}
    found = fig.legend(entries.values(), entries.keys(), ncols=columns, **options)
    for handle in found.legend_handles if size is not None else ():
        handle.set_markersize(size)


def _legend_letters(texts: Sequence[str], columns: int) -> int:
    """The width of a legend that is filled column by column, in letters; a marker and its gaps are as wide as five."""
    return sum(
        5 + max(map(len, column), default=0) for column in np.array_split(np.array(texts, dtype=object), columns)
    )


def _footer(fig: Figure) -> list[str]:
    """The lines of the footer, at least one."""
    return next((text.get_text() for text in fig.texts if text.get_ha() == "right"), "").split("\n")


def _untimed(frame: pd.DataFrame) -> str:
    """The contenders of a record that have no time, each with the reason; "" if all have one."""
    untimed = frame[frame.status != "ok"]
    reasons = untimed.status.str.split(" has relative error").str[0]
    pairs = dict.fromkeys(zip(untimed.contender, reasons, strict=True))
    found = [f"{CONTENDERS.label(name)} ({textwrap.shorten(why, 60, placeholder=' …')})" for name, why in pairs]
    return "not shown: " + ", ".join(found) if found else ""


def _say(fig: Figure, notes: Sequence[str]) -> None:
    """Write notes at the foot of the figure, above its footer and below its legend."""
    width = int(_SMALL_LETTERS_PER_INCH * fig.get_figwidth())
    lines = [line for note in notes for line in textwrap.wrap(note, width)]
    if not lines:
        return
    above = 0.004 + _SMALL_LINE * len(_footer(fig)) / fig.get_figheight()
    fig.text(0.01, above, "\n".join(lines), **_SMALL | {"ha": "left"})
    more = _SMALL_LINE * len(lines) * 72 / _STYLE["font.size"]  # in font sizes of the legend
    for entries in fig.legends:
        entries.borderaxespad += more
    engine = fig.get_layout_engine()  # the layout engine keeps no room for the pad
    x, y, width, height = engine.get()["rect"]
    room = _SMALL_LINE * len(lines) / fig.get_figheight()
    engine.set(rect=(x, y + room, width, height - room))
