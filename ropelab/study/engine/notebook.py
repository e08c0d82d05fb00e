"""Prepare a notebook's process: figures in the page, and no more threads than small operations can use."""

import os

import seaborn as sns
import torch

from ropelab.study.plots.looks import COLORBLIND


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
