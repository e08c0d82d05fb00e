"""Compile the kernels of a study in several processes, because one process takes longest of all."""

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import pandas as pd

from ropelab.bench import gpu_memory, timing, tuning
from ropelab.bench.side_by_side import Job, side_by_side


def compiled(
    function: Callable[..., pd.DataFrame], parts: Iterable[tuple[Any, ...]], *, here: bool = False
) -> pd.DataFrame:
    """Call the function with the arguments of each part, with the clock stopped, each part in a process of its own.

    Args:
        function: a function at module level that returns the table of a part. Function and arguments are pickled.
        here: call the function in this process, which is faster for a small part.

    Returns:
        The tables of all parts. ``attrs["gpu_bytes"]`` has the bytes of GPU memory that the processes took together.

    Raises:
        BaseException: the exception of a part, or of its process.
    """
    jobs = [Job(f"part {number}", _part, (function, part)) for number, part in enumerate(parts)]
    frames, gpu_bytes = [], 0
    done = ((job, _part(*job.arguments)) for job in jobs) if here else side_by_side(jobs, sys.maxsize)
    with closing(done):  # the exception of a part keeps its frames, and so would keep the other parts running
        for _, outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
            frames.append(outcome[0])
            gpu_bytes += outcome[1] + gpu_memory.CONTEXT_BYTES
    frame = pd.concat(frames, ignore_index=True)
    frame.attrs["gpu_bytes"] = gpu_bytes
    return frame


def _part(function: Callable[..., pd.DataFrame], arguments: tuple[Any, ...]) -> tuple[pd.DataFrame, int]:
    """The table of a part, and the most bytes that torch reserved on the GPU."""
    with timing.stopped(), tuning.not_kept():
        return function(*arguments), gpu_memory.peak_reserved()
