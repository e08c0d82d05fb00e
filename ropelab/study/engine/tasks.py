"""Compile studies side by side, then time one after another; what is done stays done after an interruption.

Each timed study has a process of its own. After a fault on the GPU no kernel of a process runs, so the fault of one
package would become the result of every later study. ``torch.compile`` treats the shapes of a function as dynamic once
it has compiled the function for other shapes, so one study would change the times of the next.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch

from ropelab.bench import cache_operations, gpu_memory, packages, timing, tuning
from ropelab.bench.peers import flashinfer
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.study import GIB, Study
from ropelab.study.engine.results import Result, growing, run
from ropelab.study.engine.unfinished import Run

WHAT = UNTIMED, MEASURED, COMPILED = "untimed part", "measured", "compiled"
"""What is done with a study beside others: its part that times nothing, all of it, or its compilation."""


def results(
    wanted: Mapping[str, Study], state: Run, *, apart: bool, smoke: bool, seconds: Mapping[str, float]
) -> Iterator[tuple[str, Result]]:
    """Yield the name and the result of each study, and of one whose table grows for each table.

    Args:
        state: keeps the results of what ran side by side until the run has ended.
        apart: whether all studies are compiled first, and each has a process of its own.
        seconds: study -> the seconds that it takes side by side with others, by the records.
    """
    beside = _side_by_side(wanted, state, seconds) if apart and wanted else {}
    for name, study in wanted.items():
        parts = tuple(beside[task] for what in WHAT if (task := (name, what)) in beside)
        found = next((part.found for part in parts if part.found is not None), None)
        if found is not None and not study.timed:
            yield name, Result(found, beside=parts)
            continue
        print(f"  {name}", flush=True)
        measure = partial(study if found is None else partial(study.table, found), smoke=smoke)
        # A table that grows is recorded as it grows, which only this process can do.
        here = not apart or inspect.isgeneratorfunction(study.table)
        for result in growing(measure) if here else _apart(name, measure):
            yield name, replace(result, beside=parts)


def _apart(name: str, measure: Callable[[], Any]) -> Iterator[Result]:
    """The result of a study in a process of its own, which begins and ends here."""
    ((_, outcome),) = side_by_side([Job(name, run, (measure,))], sys.maxsize)
    yield _result(outcome)


def _result(outcome: Any) -> Result:
    if isinstance(outcome, BaseException):  # the job did not start, or its process died
        return Result(error=f"{type(outcome).__name__}: {outcome}")
    return outcome


def _side_by_side(
    wanted: Mapping[str, Study], state: Run, seconds: Mapping[str, float]
) -> dict[tuple[str, str], Result]:
    """Run studies and parts of studies that time nothing; run all others with the clock stopped.

    The timed studies then find their kernels on disk. All compilations would keep one core busy for as long as all
    measurements take. A study that finds nothing here, for example for lack of memory, runs again alone.

    Returns:
        The study and what was done with it, one of `WHAT` -> the result.
    """
    started = time.monotonic()
    # The longest tasks come first: FlashInfer's, untimed parts, then studies by their seconds in the records. Studies
    # without such seconds come in the order of their memory, so that as many as possible fit.
    ordered = sorted(wanted, key=lambda name: (-seconds.get(name, 0.0), wanted[name].gpu_gib))
    tasks = [(name, UNTIMED) for name in wanted if wanted[name].timed and wanted[name].untimed]
    tasks += [(name, COMPILED if wanted[name].timed else MEASURED) for name in ordered]
    jobs = {(f"FlashInfer {version}", what): Job(f"FlashInfer {version}", beside_others, (compiles, timing.stopped))
            for version, what, compiles in _flashinfers(wanted)}  # fmt: skip
    for name, what in tasks:
        study = wanted[name]
        compiles = partial(study.table, {}) if study.untimed else study
        called = {UNTIMED: study.untimed, MEASURED: study, COMPILED: compiles}
        clock = timing.stopped if what == COMPILED else timing.refused
        jobs[name, what] = Job(name, beside_others, (called[what], clock), study.gpu_bytes)
    kept = {task: state.kept(": ".join(task)) for task in jobs}
    found = {task: result for task, result in kept.items() if result is not None}
    todo = {job: task for task, job in jobs.items() if task not in found}
    if todo:
        print("  side by side: what times nothing, and compiling", flush=True)
        for job, outcome in side_by_side(todo, torch.cuda.mem_get_info()[0]):
            task = todo[job]
            found[task] = result = _result(outcome)
            if not result.error:
                state.keep(": ".join(task), result)
            said = result.reason or result.error.strip().rpartition("\n")[2][:200] or task[1]
            memory = f"{result.gpu_bytes / GIB:5.1f} GiB of {job.gpu_bytes / GIB:5.1f}"
            print(f"    {job.name:22}{result.seconds:6.1f} s  {memory}  {said}", flush=True)
        print(f"  all that, {time.monotonic() - started:.1f} s", flush=True)
    return found


def beside_others(function: Callable[[], Any], clock: Callable[[], AbstractContextManager[None]]) -> Result:
    """The result of a task that times nothing, and shares the GPU.

    The task has no result if memory ran out, because other tasks may have used it.

    Args:
        clock: `timing.stopped`, where each contender is called once and so compiled, and the result has no table; or
            `timing.refused`.
    """
    # The output goes to a file and not to None, because packages that compile flush it.
    with clock(), tuning.not_kept(), gpu_memory.shared(), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        result = run(function)
    if isinstance(result.found, pd.DataFrame) and _speaks_of_memory(result.found):
        result = replace(result, found=None, error="a row of it ran out of memory")
    return replace(result, found=None) if clock is timing.stopped else result


def _speaks_of_memory(table: pd.DataFrame) -> bool:
    """Whether a row says that a contender ran out of memory; studies that catch errors write them in their rows."""
    words = table.select_dtypes(exclude=["number", "bool"])
    said = words.apply(lambda column: column.astype(str).str.contains(gpu_memory.OUT_OF_MEMORY, case=False))
    return bool(said.any(axis=None))


def _flashinfers(wanted: Collection[str]) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """The versions of FlashInfer at hand, and what compiles the kernels that the studies need.

    nvcc takes a minute or so for each.
    """
    for version in packages.installations(flashinfer.PACKAGE) if torch.cuda.is_available() else ():
        yield version, "compiled", partial(flashinfer.compile_kernel, version)
        if {"paged_cache", "one_pass_cells"} & set(wanted) and version == cache_operations.FLASHINFER_VERSION:
            yield version, "the norm compiled", partial(flashinfer.compile_norm_append, version)
