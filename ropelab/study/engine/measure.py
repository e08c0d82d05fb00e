"""This file measures every study on the GPU at hand and writes its records."""

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ropelab.bench import (
    checksums,
    gpu_memory,
    packages,
    paged_cache,
    peer_files,
    peers,
    records,
    staleness,
    studies,
    timing,
    tuning,
    turns,
)
from ropelab.bench.peers import flashinfer
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.study import GIB, Study
from ropelab.bench.unavailable import Unavailable
from ropelab.bench.workers import MOST_PROCESSES
from ropelab.progress import minutes
from ropelab.study.engine import unfinished
from ropelab.study.engine.claims import documents
from ropelab.study.topics.precision import gpu as precision_gpu

_PEERS = (*peers.PEERS, peers.TORCHEMBED_API)


@dataclass(frozen=True)
class Outcome:
    """The result of a study, or the reason why it has none.

    Attributes:
        found: the table of the study, the result of its untimed part, or None.
        reason: why the study cannot run here.
        error: the traceback, if the study raised.
        seconds, gpu_bytes: the time of the study, and the memory that torch reserved, while its calls were timed.
        seconds_beside, gpu_bytes_beside: the same for its compilation and for what measures no time.
        spent: the part of ``seconds`` in which the study had the GPU to itself, and in which it waited for others.
    """

    study: str
    found: Any = None
    reason: str = ""
    error: str = ""
    seconds: float = 0.0
    seconds_beside: float = 0.0
    gpu_bytes: int = 0
    gpu_bytes_beside: int = 0
    spent: turns.Seconds | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The seconds and bytes that a record notes."""
        shared = (
            {} if self.spent is None
            else {"seconds_alone": round(self.spent.alone, 1), "seconds_waiting": round(self.spent.waiting, 1)}
        )  # fmt: skip
        return {
            "seconds": round(self.seconds, 1),
            **shared,
            "seconds_beside": round(self.seconds_beside, 1),
            "gpu_bytes": {"beside": self.gpu_bytes_beside, "alone": self.gpu_bytes},
        }


def measure(
    directory: Path = records.MEASUREMENTS, *, smoke: bool = False, only: Sequence[str] | None = None,
    build: Path = records.ROOT / "build",
) -> list[str]:  # fmt: skip
    """Measure and record, and print a line for each step.

    First the studies that time nothing run, while the kernels of the other studies are compiled. Then the other studies
    are prepared side by side, and timed one at a time (`turns`). After an interruption the next run measures the
    missing studies, and says so. After a run that ended, the next run measures all studies. A study that raises does
    not stop the others.

    Args:
        directory: where the records go: ``<directory>/<gpu>/<study>.csv`` and ``.json``.
        smoke: the smallest cells and few rounds, to see that everything runs; the numbers mean nothing.
        only: names of ``all_studies()``; by default all studies but the wide sweeps.
        build: the folder that keeps the state of an unfinished run.

    Returns:
        The studies that this run has recorded, before it was interrupted or now.

    Raises:
        ValueError: a study is unknown.
        RuntimeError: a study raised; the error follows after the other studies.
    """
    known = all_studies()
    unknown = set(only or ()) - known.keys()
    if unknown:
        raise ValueError(f"only: expected names out of {list(known)}, got {sorted(unknown)}")
    wanted = list(dict.fromkeys(only or [name for name, study in known.items() if not study.wide]))
    _, missing = peers.available(_PEERS)
    for name, reason in missing.items():
        print(f"  {name}: {reason}")
    run = unfinished.resume(build, wanted, directory, smoke=smoke)
    if run.done:
        print(
            f"  going on where a run was interrupted: {len(run.done)} of {len(wanted)} studies are measured", flush=True
        )
    broken = []
    progress = Progress(wanted, run.done, _expected(wanted, directory, smoke), _shares(wanted))
    for outcome in _outcomes([study for study in wanted if study not in run.done], smoke, progress):
        said = ""
        if outcome.error:
            said = "not measured: it raised"
            print(outcome.error, file=sys.stderr, flush=True)
            broken.append(outcome.study)
        elif outcome.reason:
            said = f"not measured: {outcome.reason}"
        else:
            try:
                record = _recorded(known[outcome.study], outcome, directory, smoke=smoke, not_run=missing)
            except ValueError as error:
                print(error, file=sys.stderr, flush=True)
                broken.append(outcome.study)
                continue
            run.note(outcome.study, record)
            seconds = outcome.seconds or outcome.seconds_beside
            said = f"{len(outcome.found)} rows, {seconds:.1f} s{_beyond(known[outcome.study], outcome)}"
        print(f"  [{progress.done(outcome.study)}] {outcome.study}: {said}; {progress.left}", flush=True)
    if broken:
        raise RuntimeError(f"not measured, for the reasons above: {', '.join(broken)}; the next run goes on with them")
    run.finish()
    return list(run.done)


def _recorded(
    study: Study, outcome: Outcome, directory: Path, *, smoke: bool, not_run: Mapping[str, str]
) -> records.Record:
    """Write the record of a study, and its checksums if it lies under ``data``."""
    record = records.write(
        outcome.study,
        outcome.found,
        directory,
        parameters={"smoke": smoke, **outcome.parameters},
        peers=_versions(),
        peer_files=peer_files.checksums(),
        not_run=not_run,
        modules=staleness.module_hashes(study.modules, records.ROOT),
    )
    checksums.update(records.files(outcome.study, directory, record.provenance["gpu"]["name"]), checksums.DATA)
    return record


def _beyond(study: Study, outcome: Outcome) -> str:
    found = [
        f"took {took / GIB:.1f} GiB {when}, {declared / GIB:.1f} are declared"
        for took, declared, when in (
            (outcome.gpu_bytes_beside, study.gpu_bytes, "untimed"), (outcome.gpu_bytes, study.timed_bytes, "timed")
        )
        if declared is not None and took > declared
    ]  # fmt: skip
    return f" ({'; '.join(found)})" if found else ""


class Progress:
    """The number of studies that are done, and the time that is left by the seconds that the records note.

    Args:
        expected: study -> seconds untimed, and seconds timed.
        shares: study -> the part of the GPU's memory that the study takes while it is timed.
    """

    def __init__(
        self, studies: Sequence[str], done: Sequence[str], expected: Mapping[str, tuple[float, float]],
        shares: Mapping[str, float],
    ):  # fmt: skip
        self._studies, self._done, self._expected, self._shares = list(studies), set(done), expected, shares
        self._started = time.monotonic()
        self._beside_ends = self._started

    @property
    def seconds_beside(self) -> dict[str, float]:
        """Study -> the seconds that its compilation, or the study that times nothing, is expected to take."""
        return {study: beside for study, (beside, _) in self._expected.items()}

    @property
    def seconds_timed(self) -> dict[str, float]:
        """Study -> the seconds that its timed part is expected to take."""
        return {study: timed for study, (_, timed) in self._expected.items()}

    def beside(self, studies: Sequence[str]) -> None:
        """Note that these studies begin now, side by side."""
        seconds = [self._expected[study][0] for study in studies]
        self._beside_ends = time.monotonic() + max([*seconds, sum(seconds) / MOST_PROCESSES])

    def done(self, study: str) -> str:
        """Count the study as done, and return how many are done."""
        self._done.add(study)
        return f"{len(self._done)}/{len(self._studies)}"

    @property
    def left(self) -> str:
        now = time.monotonic()
        timed = {study: seconds for study, seconds in self.seconds_timed.items() if study not in self._done}
        # No study ends before its own time, and studies run side by side as far as the memory goes.
        together = max([0.0, *timed.values(), sum(timed[study] * self._shares[study] for study in timed)])
        return (
            f"{minutes(now - self._started)} so far, about {minutes(together + max(0, self._beside_ends - now))} left"
        )


def _shares(wanted: Sequence[str]) -> dict[str, float]:
    """Study -> the part of the GPU's memory that the study takes while it is timed."""
    known = all_studies()
    if not torch.cuda.is_available():
        return dict.fromkeys(wanted, 1.0)
    free, _ = torch.cuda.mem_get_info()
    timed = {study: known[study].timed_bytes for study in wanted}
    return {study: 1.0 if taken is None else min(1.0, taken / free) for study, taken in timed.items()}


def _expected(wanted: Sequence[str], directory: Path, smoke: bool) -> dict[str, tuple[float, float]]:
    """Study -> seconds untimed and timed, by the first records of any GPU that note them, else 0."""
    known, found = all_studies(), {}
    for study in wanted:
        recorded = [_parameters(study, directory, gpu, smoke) for gpu in (None, *records.gpus(directory))]
        alone = next((p["seconds"] for p in recorded if p.get("seconds")), 0.0)
        beside = next((p["seconds_beside"] for p in recorded if p.get("seconds_beside")), 0.0)
        found[study] = (beside, alone) if known[study].timed else (beside or alone, 0.0)
    return found


def _parameters(study: str, directory: Path, gpu: str | None, smoke: bool) -> Mapping[str, Any]:
    """The parameters of the run that a record notes; empty without a record of this kind (``smoke`` or full)."""
    try:
        parameters = records.load(study, records.Selection(directory, gpu)).provenance["parameters"]
    except (records.Unusable, KeyError):
        return {}
    return parameters if parameters.get("smoke", False) == smoke else {}


def _outcomes(wanted: Sequence[str], smoke: bool, progress: Progress) -> Iterator[Outcome]:
    """Yield the outcome of each study as soon as it is there."""
    known, beside, left = all_studies(), {}, list(wanted)
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
        before = beside.get(study, Outcome(study))
        if before.found is not None:
            function = partial(known[study].table, before.found)
        yield _after(before, _outcome(study, partial(function, smoke=smoke)))


def _after(before: Outcome, timed: Outcome) -> Outcome:
    """The outcome of the timed part of a study, with the time and memory of its compilation."""
    return replace(timed, seconds_beside=before.seconds_beside, gpu_bytes_beside=before.gpu_bytes_beside)


def _added(before: Outcome | None, outcome: Outcome) -> Outcome:
    """The outcome of two jobs of one study together: its compilation and its untimed part."""
    if before is None:
        return outcome
    return replace(
        before,
        found=outcome.found if before.found is None else before.found,
        seconds_beside=before.seconds_beside + outcome.seconds_beside,
        gpu_bytes_beside=max(before.gpu_bytes_beside, outcome.gpu_bytes_beside),
    )


def _side_by_side(wanted: Sequence[str], seconds: Mapping[str, float]) -> Iterator[Outcome]:
    """Run studies and parts of studies that time nothing; run all others with the clock stopped.

    The timed studies then find their kernels on disk. All compilations would keep one core busy for as long as all
    measurements take. A study that finds nothing here, for example for lack of memory, runs again alone.

    Args:
        seconds: study -> the seconds that it takes side by side with others, by the records.
    """
    started, known = time.monotonic(), all_studies()
    print("  side by side: what times nothing, and compiling", flush=True)
    timed = [study for study in wanted if known[study].timed]
    # The longest jobs come first: untimed parts, then whole studies by their seconds in the records. Studies without
    # such seconds come in the order of their memory, so that as many as possible fit.
    parts = [study for study in timed if known[study].untimed]
    whole = sorted(wanted, key=lambda study: (-seconds.get(study, 0.0), known[study].gpu_gib))
    jobs = [Job(f"FlashInfer {version}", _compile_flashinfer, (version, how)) for version, how in _flashinfers(wanted)]
    jobs += [Job(study, _without_timing, (study,), known[study].gpu_bytes) for study in parts]
    for study in whole:
        function = _without_clock if known[study].timed else _without_timing
        jobs.append(Job(study, function, (study,), known[study].gpu_bytes))
    free, _ = torch.cuda.mem_get_info()
    for job, outcome in side_by_side(jobs, free):
        if isinstance(outcome, BaseException):  # it did not start, or its process died
            outcome = Outcome(job.name, error=f"{type(outcome).__name__}: {outcome}")
        compiles = job.function in (_without_clock, _compile_flashinfer)
        what = "compiled" if compiles else "untimed part" if known[job.name].timed else "measured"
        what = outcome.reason or outcome.error.strip().rpartition("\n")[2][:200] or what
        memory = f"{outcome.gpu_bytes_beside / GIB:5.1f} GiB of {job.gpu_bytes / GIB:5.1f}"
        print(f"    {job.name:22}{outcome.seconds_beside:6.1f} s  {memory}  {what}", flush=True)
        if job.name in known:
            yield outcome
    print(f"  all that, {time.monotonic() - started:.1f} s", flush=True)


def _in_turns(wanted: Sequence[str], beside: Mapping[str, Outcome], seconds: Mapping[str, float]) -> Iterator[Outcome]:
    """Prepare the studies side by side, time them one at a time, and yield the outcomes that have a table.

    A study without a table, for example for lack of memory, runs again alone.

    Args:
        beside: study -> the outcome of its compilation and of its untimed part.
        seconds: study -> the seconds that its timed part takes, by the records.
    """
    started, known = time.monotonic(), all_studies()
    print("  in turns: prepared side by side, timed one at a time", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(study, _timed_in_turn, (study, beside.get(study, Outcome(study)).found, Path(folder)), taken)
            for study in wanted
            if (taken := known[study].timed_bytes) is not None
        ]
        # A long study must not begin last. A study that takes much memory fits beside few others, so its memory counts
        # twice.
        jobs.sort(key=lambda job: -max(1.0, seconds[job.name]) * job.takes**2)
        free, _ = torch.cuda.mem_get_info()
        for job, outcome in side_by_side(jobs, free):
            if isinstance(outcome, BaseException):  # it did not start, or its process died
                outcome = Outcome(job.name, error=f"{type(outcome).__name__}: {outcome}")
            if outcome.found is not None:
                yield _after(beside.get(job.name, Outcome(job.name)), outcome)
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


def _compile_flashinfer(version: str, compiles: Callable[[str], object]) -> Outcome:
    return replace(_beside_others(f"FlashInfer {version}", partial(compiles, version)), found=None)


def _without_timing(study: str) -> Outcome:
    known = all_studies()[study]
    with timing.refused():
        return _beside_others(study, known.untimed or known)


def _without_clock(study: str) -> Outcome:
    known = all_studies()[study]
    with timing.stopped(), tuning.not_kept():
        return replace(_beside_others(study, partial(known.table, {}) if known.untimed else known), found=None)


def _timed_in_turn(study: str, untimed: Any, folder: Path) -> Outcome:
    known = all_studies()[study]
    with turns.taking_part(folder) as seconds, tuning.in_turns():
        outcome = _sharing(study, known if untimed is None else partial(known.table, untimed))
    return replace(outcome, spent=seconds)


def _beside_others(study: str, function: Callable[[], Any]) -> Outcome:
    """The outcome of a job that times nothing."""
    outcome = _sharing(study, function)
    return replace(
        outcome, seconds=0.0, seconds_beside=outcome.seconds, gpu_bytes=0, gpu_bytes_beside=outcome.gpu_bytes
    )


def _sharing(study: str, function: Callable[[], Any]) -> Outcome:
    """The outcome of a job beside others. It has no table if memory ran out, because other jobs may have used it."""
    # The output goes to a file and not to None, because packages that compile flush it.
    with gpu_memory.shared(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        outcome = _outcome(study, function)
    if isinstance(outcome.found, pd.DataFrame) and _speaks_of_memory(outcome.found):
        outcome = replace(outcome, found=None, error="a row of it ran out of memory")
    return outcome


def _speaks_of_memory(table: pd.DataFrame) -> bool:
    """Whether a row says that a contender ran out of memory; studies that catch errors write them in their rows."""
    words = table.select_dtypes(exclude=["number", "bool"])
    said = words.apply(lambda column: column.astype(str).str.contains(gpu_memory.OUT_OF_MEMORY, case=False))
    return bool(said.any(axis=None))


def _outcome(study: str, function: Callable[[], Any]) -> Outcome:
    gpu_memory.watch()
    started = time.monotonic()
    found, reason, error = None, "", ""
    try:
        found = function()
    except Unavailable as unavailable:
        reason = str(unavailable)
    except Exception:
        error = traceback.format_exc()
    reserved = getattr(found, "attrs", {}).get("gpu_bytes", 0) or gpu_memory.peak_reserved()
    return Outcome(study, found, reason, error, seconds=time.monotonic() - started, gpu_bytes=reserved)


def all_studies() -> dict[str, Study]:
    """Name -> study: the benchmarks, the study of precision, and the ``STUDIES`` of each document's package.

    Raises:
        ValueError: two studies have one name.
    """
    found = studies.STUDIES | precision_gpu.STUDIES
    for document in documents():
        module = document.module("studies")
        if taken := found.keys() & module.STUDIES.keys():
            raise ValueError(f"{module.__name__}: expected names of studies of its own, got {sorted(taken)}")
        found |= module.STUDIES
    return found


def _versions() -> dict[str, str]:
    """Package -> its versions at hand, for the packages that the study compares with."""
    names = sorted({peer.package for peer in _PEERS if peer.package})
    return {name: ", ".join(packages.installations(name)) for name in names}
