"""Prepare a notebook's process: figures in the page, and no more threads than small operations can use."""

import os
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import seaborn as sns
import torch

from ropelab.study.plots.looks import COLORBLIND

T = TypeVar("T")


def begin() -> None:
    """Call this in the first cell, before anything is drawn or computed.

    On a CPU the operations of the notebooks are small. A second thread makes some of them ten times slower, because the
    threads wait for each other. ``OMP_NUM_THREADS`` sets another number. matplotlib draws into the page, in the
    colours of the book.
    """
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    get_ipython().run_line_magic("matplotlib", "inline")  # type: ignore[name-defined]  # noqa: F821
    style = {
        "svg.fonttype": "none",
        "axes.grid": True,
        "grid.color": "0.9",
        "legend.frameon": False,
        "figure.figsize": (7, 3.4),
    }
    sns.set_theme("paper", "ticks", COLORBLIND, font_scale=1.1, rc=style)  # SVG keeps text as text


def watched(runs: Iterable[T], count: int, what: str) -> Iterator[T]:
    """Yield ``runs``, of which there are ``count``, and say in a line of the cell how many have ended."""
    from IPython.display import Markdown, display

    started, line = time.monotonic(), display(Markdown(f"*0 of {count} {what}*"), display_id=True)
    for number, run in enumerate(runs, start=1):
        yield run
        if line:  # none outside of a notebook
            line.update(Markdown(f"*{number} of {count} {what}, {time.monotonic() - started:.0f} s*"))
