"""Run work in other processes, with Triton's interpreter or without it."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

import torch

from ropelab.bench import processes

Job = tuple[Callable[..., Any], tuple[Any, ...]]
MOST_PROCESSES = 14


def cores() -> int:
    """The number of CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        return os.cpu_count() or 1


def spread(plain: Iterable[Job], kernels: Iterable[Job], *, here: bool = False) -> Iterator[Any]:
    """Run the jobs side by side on all cores, and yield their results in the order in which the jobs end.

    No process outlives the iterator.

    Triton decides at its import whether it interprets kernels, and interpreted kernels are slow. Without a GPU, jobs
    that need kernels run in processes with the interpreter, and plain jobs run in processes without it.

    Args:
        plain: jobs that need no kernel. Functions must be at module level, because functions and arguments are pickled.
        kernels: jobs that need kernels.
        here: run the jobs one after another in this process, which is faster for a few jobs.
    """
    if here:
        yield from (function(*arguments) for function, arguments in (*kernels, *plain))
        return
    plain, kernels = list(plain), list(kernels)
    most = min(cores(), MOST_PROCESSES)
    # Interpreted jobs take longest, so they may use every core. Plain jobs beside them use at most half of the cores.
    half = max(1, most // 2) if kernels else most
    futures: list[Future] = []
    with ExitStack() as pools:
        for jobs, interpret, at_once in ((kernels, not torch.cuda.is_available(), most), (plain, False, half)):
            if not jobs:
                continue
            modules = sorted({function.__module__ for function, _ in jobs})
            context = get_context("spawn") if interpret else processes.forked(modules)
            pool = pools.enter_context(processes.Pool(min(at_once, len(jobs)), context, initializer=processes.quiet))
            with processes.environment(interpret):  # the processes start now and inherit the environment
                futures += [pool.submit(function, *arguments) for function, arguments in jobs]
        for future in as_completed(futures):
            yield future.result()
