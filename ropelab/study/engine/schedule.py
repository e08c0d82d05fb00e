"""Decide the order of the studies, and let studies run beside each other."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ropelab.bench import packages, paged_cache
from ropelab.bench.peers import flashinfer
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.study import GIB
from ropelab.study.engine import registered
from ropelab.study.engine.expected import Progress
from ropelab.study.engine.jobs import compile_flashinfer, compile_only, timed_in_turn, without_timing
from ropelab.study.engine.outcome import JobResult, growing


def outcomes(wanted: Sequence[str], smoke: bool, progress: Progress) -> Iterator[JobResult]:
    """Yield the outcome of each study as soon as it is there, and of one whose table grows for each table."""
    known, beside, left = registered.all_studies(), {}, list(wanted)
    if torch.cuda.is_available() and not smoke and len(wanted) > 1:
        progress.beside(wanted)
        for outcome in _side_by_side(wanted, progress.seconds_beside):
            if not known[outcome.study].timed and outcome.found is not None:
                left.remove(outcome.study)
                yield outcome
            else:
                beside[outcome.study] = _added(beside.get(outcome.study), outcome)
        for outcome in _in_turns(left, beside, progress.seconds_timed):
            left.remove(outcome.study)
            yield outcome
    for study in left:
        print(f"  {study}", flush=True)
        function: Callable[..., Any] = known[study]
        before = beside.get(study, JobResult(study))
        if before.found is not None:
            function = partial(known[study].table, before.found)
        for outcome in growing(study, partial(function, smoke=smoke)):
            yield _after(before, outcome)


def _after(before: JobResult, timed: JobResult) -> JobResult:
    """The outcome of the timed part of a study, with the time and memory of its compilation."""
    return replace(timed, seconds_beside=before.seconds_beside, gpu_bytes_beside=before.gpu_bytes_beside)


def _added(before: JobResult | None, outcome: JobResult) -> JobResult:
    """The outcome of two jobs of one study together: its compilation and its untimed part."""
    if before is None:
        return outcome
    return replace(
        before,
        found=outcome.found if before.found is None else before.found,
        seconds_beside=before.seconds_beside + outcome.seconds_beside,
        gpu_bytes_beside=max(before.gpu_bytes_beside, outcome.gpu_bytes_beside),
    )


def _side_by_side(wanted: Sequence[str], seconds: Mapping[str, float]) -> Iterator[JobResult]:
    """Run studies and parts of studies that time nothing; run all others with the clock stopped.

    The timed studies then find their kernels on disk. All compilations would keep one core busy for as long as all
    measurements take. A study that finds nothing here, for example for lack of memory, runs again alone.

    Args:
        seconds: study -> the seconds that it takes side by side with others, by the records.
    """
    started, known = time.monotonic(), registered.all_studies()
    print("  side by side: what times nothing, and compiling", flush=True)
    timed = [study for study in wanted if known[study].timed]
    # The longest jobs come first: untimed parts, then whole studies by their seconds in the records. Studies without
    # such seconds come in the order of their memory, so that as many as possible fit.
    parts = [study for study in timed if known[study].untimed]
    whole = sorted(wanted, key=lambda study: (-seconds.get(study, 0.0), known[study].gpu_gib))
    jobs = [Job(f"FlashInfer {version}", compile_flashinfer, (version, how)) for version, how in _flashinfers(wanted)]
    jobs += [Job(study, without_timing, (study,), known[study].gpu_bytes) for study in parts]
    for study in whole:
        function = compile_only if known[study].timed else without_timing
        jobs.append(Job(study, function, (study,), known[study].gpu_bytes))
    free, _ = torch.cuda.mem_get_info()
    for job, outcome in side_by_side(jobs, free):
        if isinstance(outcome, BaseException):  # it did not start, or its process died
            outcome = JobResult(job.name, error=f"{type(outcome).__name__}: {outcome}")
        compiles = job.function in (compile_only, compile_flashinfer)
        what = "compiled" if compiles else "untimed part" if known[job.name].timed else "measured"
        what = outcome.reason or outcome.error.strip().rpartition("\n")[2][:200] or what
        memory = f"{outcome.gpu_bytes_beside / GIB:5.1f} GiB of {job.gpu_bytes / GIB:5.1f}"
        print(f"    {job.name:22}{outcome.seconds_beside:6.1f} s  {memory}  {what}", flush=True)
        if job.name in known:
            yield outcome
    print(f"  all that, {time.monotonic() - started:.1f} s", flush=True)


def _in_turns(
    wanted: Sequence[str], beside: Mapping[str, JobResult], seconds: Mapping[str, float]
) -> Iterator[JobResult]:
    """Prepare the studies side by side, time them one at a time, and yield the outcomes that have a table.

    A study without a table, for example for lack of memory, runs again alone.

    Args:
        beside: study -> the outcome of its compilation and of its untimed part.
        seconds: study -> the seconds that its timed part takes, by the records.
    """
    started, known = time.monotonic(), registered.all_studies()
    print("  in turns: prepared side by side, timed one at a time", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(study, timed_in_turn, (study, beside.get(study, JobResult(study)).found, Path(folder)), taken)
            for study in wanted
            if (taken := known[study].timed_bytes) is not None
        ]
        # A long study must not begin last. A study that takes much memory fits beside few others, so its memory counts
        # twice.
        jobs.sort(key=lambda job: -max(1.0, seconds[job.name]) * job.takes**2)
        free, _ = torch.cuda.mem_get_info()
        for job, outcome in side_by_side(jobs, free):
            if isinstance(outcome, BaseException):  # it did not start, or its process died
                outcome = JobResult(job.name, error=f"{type(outcome).__name__}: {outcome}")
            if outcome.found is not None:
                yield _after(beside.get(job.name, JobResult(job.name)), outcome)
            else:
                why = outcome.reason or outcome.error.strip().rpartition("\n")[2][:200]
                print(f"    {job.name:22}{outcome.seconds:6.1f} s  {why}", flush=True)
    print(f"  all that, {time.monotonic() - started:.1f} s", flush=True)


def _flashinfers(wanted: Sequence[str]) -> list[tuple[str, Callable[[str], object]]]:
    """The versions of FlashInfer at hand, and what compiles the kernels that the studies need.

    nvcc takes a minute or so for each version.
    """
    found = list(packages.installations(flashinfer.PACKAGE)) if torch.cuda.is_available() else []
    appends = {"paged_cache", "one_pass_cells"} & set(wanted)
    with_norm = [version for version in found if appends and version == paged_cache.FLASHINFER_VERSION]
    return [(v, flashinfer.compile_kernel) for v in found] + [(v, flashinfer.compile_norm_append) for v in with_norm]
