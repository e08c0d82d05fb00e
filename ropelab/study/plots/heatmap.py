"""Draw a table as a map: a coloured cell for each value, with its text."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes


def heatmap(
    ax: Axes,
    values,
    write: Callable[[int, int], tuple[str, object]],
    *,
    rows: Sequence[str] | None,
    columns: Sequence[str],
    size: float = 9,
    labels: float | None = None,
    **colors,
) -> None:
    """Draw a cell for each entry of ``values``, ``[rows, columns]``.

    Args:
        write: row and column -> the cell's text and the text's colour.
        rows, columns: the names beside and above the map; None leaves the rows unnamed.
        size, labels: the sizes of the cells' texts and of the names, in points.
        colors: further arguments for ``Axes.imshow``.
    """
    ax.imshow(values, aspect="auto", **colors)
    for row, column in np.ndindex(np.shape(values)):
        text, color = write(row, column)
        ax.text(column, row, text, ha="center", va="center", size=size, color=color)
    ax.set_xticks(range(len(columns)), columns, size=labels)
    if rows is not None:
        ax.set_yticks(range(len(rows)), rows, size=labels)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
