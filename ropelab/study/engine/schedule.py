"""Decide the order of the studies. Those without times run side by side; then the others are timed, one after another.

Each timed study has a process of its own. After a fault on the GPU no kernel of a process runs, so the fault of one
package would become the result of every later study. ``torch.compile`` treats the shapes of a function as dynamic once
it has compiled the function for other shapes, so one study would change the times of the next.
"""

import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ropelab.bench import packages, paged_cache
from ropelab.bench.peers import flashinfer
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.study import GIB, Study
from ropelab.study.engine.expected import Progress
from ropelab.study.engine.jobs import compile_flashinfer, compile_only, measured, measured_whole, without_timing
from ropelab.study.engine.outcome import JobResult


def outcomes(wanted: Mapping[str, Study], smoke: bool, progress: Progress) -> Iterator[JobResult]:
    """Yield the outcome of each study as soon as it is there, and of one whose table grows for each table."""
    beside, left = {}, list(wanted)
    apart = torch.cuda.is_available() and not smoke and len(wanted) > 1
    if apart:
        progress.beside(list(wanted))
        for outcome in _side_by_side(wanted, progress.seconds_beside):
            if not wanted[outcome.study].timed and outcome.found is not None:
                left.remove(outcome.study)
                yield outcome
            else:
                beside[outcome.study] = _added(beside.get(outcome.study), outcome)
    for study in left:
        print(f"  {study}", flush=True)
        before = beside.get(study, JobResult(study))
        # A table that grows is recorded as it grows, which only this process can do.
        grows = inspect.isgeneratorfunction(wanted[study].table)
        for outcome in (
            _apart(before, wanted[study])
            if apart and not grows
            else measured(study, wanted[study], before.found, smoke)
        ):
            yield replace(outcome, seconds_beside=before.seconds_beside, gpu_bytes_beside=before.gpu_bytes_beside)


def _apart(before: JobResult, study: Study) -> Iterator[JobResult]:
    """The outcome of a study in a process of its own, which begins and ends here."""
    job = Job(before.study, measured_whole, (before.study, study, before.found))
    ((_, outcome),) = side_by_side([job], sys.maxsize)
    yield _outcome(job, outcome)


def _outcome(job: Job, outcome: Any) -> JobResult:
    if isinstance(outcome, BaseException):  # it did not start, or its process died
        return JobResult(job.name, error=f"{type(outcome).__name__}: {outcome}")
    return outcome


def _added(before: JobResult | None, outcome: JobResult) -> JobResult:
    """The outcome of two jobs of one study together: its compilation and its untimed part."""
    if before is None:
        return outcome
    return replace(
        before,
        found=outcome.found if before.found is None else before.found,
        seconds_beside=before.seconds_beside + outcome.seconds_beside,
        gpu_bytes_beside=max(before.gpu_bytes_beside, outcome.gpu_bytes_beside),
        kernels=before.kernels | outcome.kernels,
        peers={**before.peers, **outcome.peers},
    )


def _side_by_side(wanted: Mapping[str, Study], seconds: Mapping[str, float]) -> Iterator[JobResult]:
    """Run studies and parts of studies that time nothing; run all others with the clock stopped.

    The timed studies then find their kernels on disk. All compilations would keep one core busy for as long as all
    measurements take. A study that finds nothing here, for example for lack of memory, runs again alone.

    Args:
        seconds: study -> the seconds that it takes side by side with others, by the records.
    """
    started = time.monotonic()
    print("  side by side: what times nothing, and compiling", flush=True)
    # The longest jobs come first: untimed parts, then whole studies by their seconds in the records. Studies without
    # such seconds come in the order of their memory, so that as many as possible fit.
    parts = [study for study in wanted if wanted[study].timed and wanted[study].untimed]
    whole = sorted(wanted, key=lambda study: (-seconds.get(study, 0.0), wanted[study].gpu_gib))
    jobs = [Job(f"FlashInfer {version}", compile_flashinfer, (version, how)) for version, how in _flashinfers(wanted)]
    jobs += [Job(study, without_timing, (study, wanted[study]), wanted[study].gpu_bytes) for study in parts]
    for study in whole:
        function = compile_only if wanted[study].timed else without_timing
        jobs.append(Job(study, function, (study, wanted[study]), wanted[study].gpu_bytes))
    free, _ = torch.cuda.mem_get_info()
    for job, outcome in side_by_side(jobs, free):
        outcome = _outcome(job, outcome)
        compiles = job.function in (compile_only, compile_flashinfer)
        what = "compiled" if compiles else "untimed part" if wanted[job.name].timed else "measured"
        what = outcome.reason or outcome.error.strip().rpartition("\n")[2][:200] or what
        memory = f"{outcome.gpu_bytes_beside / GIB:5.1f} GiB of {job.gpu_bytes / GIB:5.1f}"
        print(f"    {job.name:22}{outcome.seconds_beside:6.1f} s  {memory}  {what}", flush=True)
        if job.name in wanted:
            yield outcome
    print(f"  all that, {time.monotonic() - started:.1f} s", flush=True)


def _flashinfers(wanted: Collection[str]) -> list[tuple[str, Callable[[str], object]]]:
    """The versions of FlashInfer at hand, and what compiles the kernels that the studies need.

    nvcc takes a minute or so for each version.
    """
    found = list(packages.installations(flashinfer.PACKAGE)) if torch.cuda.is_available() else []
    appends = {"paged_cache", "one_pass_cells"} & set(wanted)
    with_norm = [version for version in found if appends and version == paged_cache.FLASHINFER_VERSION]
    return [(v, flashinfer.compile_kernel) for v in found] + [(v, flashinfer.compile_norm_append) for v in with_norm]
