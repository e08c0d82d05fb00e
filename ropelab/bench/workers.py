"""This file runs work in other processes, with Triton's interpreter or without it."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch

Job = tuple[Callable[..., Any], tuple[Any, ...]]
INTERPRET = "TRITON_INTERPRET"
MOST_PROCESSES = 14


def spread(plain: Iterable[Job], kernels: Iterable[Job], *, here: bool = False) -> Iterator[Any]:
    """Run jobs side by side, on all cores, from now on; the iterator yields their results as they come.

    Whether Triton interprets is settled when it is imported, and what is interpreted is slow: jobs that need no
    kernel get processes that do not, jobs of kernels get others that do, unless there is a GPU.

    Args:
        plain, kernels: module-level functions and their arguments; pickled.
        here: one after the other in this process, which is faster for a few.
    """
    if here:
        return (function(*arguments) for function, arguments in (*kernels, *plain))
    plain, kernels = list(plain), list(kernels)
    cores = min(os.cpu_count() or 1, MOST_PROCESSES)
    # Interpreted jobs are the longest: they may have every core, and those without kernels then half of them.
    half = max(1, cores // 2) if kernels else cores
    futures: list[Future] = []
    with ExitStack() as opened:
        for jobs, interpret, most in ((kernels, not torch.cuda.is_available(), cores), (plain, False, half)):
            if not jobs:
                continue
            pool = ProcessPoolExecutor(min(most, len(jobs)), get_context("spawn"), initializer=quiet)
            opened.callback(pool.shutdown, cancel_futures=True)
            with environment(interpret):  # the processes start now, and inherit it
                futures += [pool.submit(function, *arguments) for function, arguments in jobs]
        return _results(futures, opened.pop_all())


def _results(futures: Iterable[Future], pools: ExitStack) -> Iterator[Any]:
    with pools:
        for future in as_completed(futures):
            yield future.result()


def quiet() -> None:
    """One thread; what faulty code makes torch and numpy warn of is no news."""
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)
    warnings.simplefilter("ignore")


def environment(interpret: bool):
    """Variables of the processes that start within. Inductor compiles in each: it need not start others from there."""
    changed = {name: value for name, value in os.environ.items() if name != INTERPRET}
    changed |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | ({INTERPRET: "1"} if interpret else {})
    return mock.patch.dict(os.environ, changed, clear=True)
