"""Prepare a notebook's process: figures in the page, and no more threads than small operations can use."""

import os

import torch


def begin() -> None:
    """Call this in the first cell, before anything is drawn or computed.

    On a CPU the operations of the notebooks are small. A second thread makes some of them ten times slower, because the
    threads wait for each other. ``OMP_NUM_THREADS`` sets another number. matplotlib draws into the page: the figures
    are none of pyplot's, so Jupyter has to be told to show them.
    """
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    get_ipython().run_line_magic("matplotlib", "inline")  # type: ignore[name-defined]  # noqa: F821
