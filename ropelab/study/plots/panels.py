"""Lay a figure out: a title over a grid of panels, labels at its edges, a legend and remarks at its foot."""

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
_STYLE = {"font.size": 10, "axes.titlesize": 10, "axes.titleweight": "bold", "figure.titlesize": 12}
_LONGEST_TITLE = 126
"""The most letters of a title, which stands in one line; a narrow figure grows to its title."""
BETWEEN_RECORDS = " / "
"""The footers of several records stand in one text with these letters between them, and in a line each at the foot."""
_SMALL_LINE = 10 / 72
"""The height of a line of 8 points, in inches."""
_LEGEND_LINE = 0.23
"""The height of a line of the legend, in inches."""
_SMALL = {"va": "bottom", "size": 8, "color": "0.35"}
_FOOTER, _UNTIMED, _NOTE = "footer", "untimed", "note"
"""The texts of the foot: at its right end, beside it, and above both."""
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
        height: the inches of the figure without its foot.
    """

    figure: Figure
    axes: np.ndarray
    height: float
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
        if untimed is not None:
            _say_untimed(self.figure, untimed)
        _lay_foot(self.figure, self.height, _legend(self.figure, self.axes, legend, size) if legend else 0)
        return self.figure


def grid(
    rows: int, columns: int, size: tuple[float, float], title: str, footer: str, *, shown: int | None = None, **share
) -> Panels:
    """A figure of ``rows`` by ``columns`` panels, each of ``size`` (inches); only the first ``shown`` are visible.

    Args:
        title: one sentence for the line above the panels; further sentences become a note below them.
        footer: where the numbers come from; `BETWEEN_RECORDS` begins a new line.

    Raises:
        ValueError: the first sentence of the title is too long for one line.
    """
    with sns.axes_style("whitegrid", rc=_STYLE), mpl.rc_context(_STYLE):
        head, _, note = " ".join(title.split()).partition(". ")
        if len(head) > _LONGEST_TITLE:
            raise ValueError(f"title: expected a first sentence of at most {_LONGEST_TITLE} letters, got {head!r}")
        width, height = max(columns * size[0], len(head) / _TITLE_LETTERS_PER_INCH), rows * size[1] + 0.5
        fig = Figure(figsize=(width, height), layout="constrained")
        axes = fig.subplots(rows, columns, squeeze=False, **share)
        fig.set_label(" ".join(title.split()))
        fig.suptitle(head, x=0.01, ha="left", fontweight="bold")
        if note:
            width = int(_SMALL_LETTERS_PER_INCH * fig.get_figwidth())
            fig.text(0.01, 0, textwrap.fill(note, width), ha="left", gid=_NOTE, va="bottom", size=8)
        if footer:
            fig.text(0.99, 0, footer.replace(BETWEEN_RECORDS, "\n"), ha="right", gid=_FOOTER, **_SMALL)
        _lay_foot(fig, height, 0)
    for ax in axes.flat[shown:] if shown is not None else ():
        ax.set_visible(False)
    return Panels(fig, axes, height)


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
    return Panels(found.figure, found.axes, found.height, tuple(parts))


def said(fig: Figure) -> str:
    """The sentence of a figure, in one line: its title and the note under its panels."""
    return str(fig.get_label())


def _lay_foot(fig: Figure, height: float, legend: int) -> None:
    """Put the texts of the foot and a legend of so many lines above each other, and let the figure grow by them."""
    lines = {text.get_gid(): text.get_text().count("\n") + 1 for text in fig.texts if text.get_gid()}
    beside = _SMALL_LINE * max(lines.get(_FOOTER, 1), lines.get(_UNTIMED, 0)) + 0.08
    note = beside + (_SMALL_LINE * lines[_NOTE] + 0.08 if _NOTE in lines else 0)
    foot = note + (_LEGEND_LINE * legend + 0.12 if legend else 0)
    fig.set_figheight(height + foot)
    for text in fig.texts:
        if text.get_gid():
            text.set_y((beside if text.get_gid() == _NOTE else 0.03) / (height + foot))
    for entries in fig.legends:
        entries.set_bbox_to_anchor((0.5, note / (height + foot)), fig.transFigure)
    fig.get_layout_engine().set(rect=(0, foot / (height + foot), 1, height / (height + foot)))


def _legend(fig: Figure, axes: np.ndarray, columns: int, size: float | None) -> int:
    """One legend for all panels, below them; returns its lines. It has at most ``columns`` columns, if they fit."""
    entries: dict[str, object] = {}
    for ax in axes.flat:
        for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    while columns > 1 and _legend_letters(list(entries), columns) > _LETTERS_PER_INCH * fig.get_figwidth():
        columns -= 1
    options = {"loc": "lower center", "borderaxespad": 0, "frameon": False}
    found = fig.legend(entries.values(), entries.keys(), ncols=columns, **options)
    for handle in found.legend_handles if size is not None else ():
        handle.set_markersize(size)
    return -(-len(entries) // columns)


def _legend_letters(texts: Sequence[str], columns: int) -> int:
    """The width of a legend that is filled column by column, in letters; a marker and its gaps are as wide as five."""
    return sum(
        5 + max(map(len, column), default=0) for column in np.array_split(np.array(texts, dtype=object), columns)
    )


def _say_untimed(fig: Figure, frame: pd.DataFrame) -> None:
    """Name the contenders without a time in any row, or with wrong results, at the foot, left of the footer."""
    timed = frame.contender.isin(frame.contender[frame.status == "ok"])
    untimed = frame[~timed | frame.status.str.startswith("wrong")]
    reasons = untimed.status.str.split(" has relative error").str[0]
    pairs = dict.fromkeys(zip(untimed.contender, reasons, strict=True))
    found = [f"{CONTENDERS.label(name)} ({textwrap.shorten(why, 60, placeholder=' …')})" for name, why in pairs]
    if not found:
        return
    footer = next((text.get_text() for text in fig.texts if text.get_gid() == _FOOTER), "")
    width = max(40, int(_SMALL_LETTERS_PER_INCH * fig.get_figwidth()) - max(map(len, footer.split("\n"))))
    said = textwrap.fill("not shown: " + ", ".join(found), width)
    fig.text(0.01, 0, said, ha="left", gid=_UNTIMED, **_SMALL)
