"""Measure every study on the GPU at hand, and write its records."""

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ropelab.bench import packages, peers, reached, records, staleness
from ropelab.bench.study import GIB, Study
from ropelab.bench.workers import MOST_PROCESSES
from ropelab.progress import minutes
from ropelab.study.engine import registered, tasks, unfinished
from ropelab.study.engine.results import Result

_PEERS = (*peers.PEERS, peers.TORCHEMBED_API)
_SECONDS = "seconds_beside", "seconds"


@dataclass(frozen=True)
class Measured:
    """The outcome of a run.

    Attributes:
        directory: where the records lie.
        studies: the studies that the run has recorded, before it was interrupted or now.
        missing: what this machine lacks, as a package -> the contenders and studies that did not run for that reason.
        broken: the studies that raised, or whose table is no record.
        state: what the run has kept for the next one.
    """

    directory: Path
    studies: Sequence[str]
    missing: Mapping[str, Sequence[str]]
    broken: Sequence[str]
    state: unfinished.Run

    def over(self, committed: Path, folder: Path) -> records.Selection:
        """Copy the committed records to a folder, where those of this run take the place of the same GPU's."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(committed, folder)
        gpu = records.environment()["gpu"]["name"]
        for study in self.studies:
            pairs = zip(records.files(study, self.directory, gpu), records.files(study, folder, gpu), strict=True)
            for measured, shown in pairs:
                shown.parent.mkdir(exist_ok=True)
                shutil.copy(measured, shown)
        return records.Selection(folder, records.slug(gpu))

    def __str__(self) -> str:
        lines = [f"  missing: {reason} ({', '.join(names)})\n" for reason, names in self.missing.items()]
        if self.broken:
            lines.append(
                f"  not measured, for the reasons above: {', '.join(self.broken)}; the next run goes on with them\n"
            )
        return "".join(lines)


def measure(
    directory: Path = records.MEASUREMENTS, *, smoke: bool = False, only: Sequence[str] | None = None,
    of_the_book: bool = False, build: Path = records.ROOT / "build",
) -> Measured:  # fmt: skip
    """Measure and record, and print a line for each step.

    First the studies that time nothing run, while the kernels of the other studies are compiled. Then the other studies
    are timed, one after the other. A study that raises does not stop the others. Until its state is forgotten, the next
    run does what this one has not done, and says so.

    Args:
        directory: where the records go: ``<directory>/<gpu>/<study>.csv`` and ``.json``.
        smoke: the smallest cells and few rounds, to see that everything runs; the numbers mean nothing.
        only: names of ``registered.all_studies()``; by default all studies but the wide sweeps.
        of_the_book: measure ``registered.of_the_book()``, where some wide sweeps are short; the records say so.
        build: the folder that keeps the state of an unfinished run.

    Raises:
        ValueError: a study is unknown.
    """
    known = registered.of_the_book() if of_the_book else registered.all_studies()
    wanted = list(known) if of_the_book else registered.named(only)
    _, not_run = peers.available(_PEERS)
    missing: dict[str, list[str]] = {}
    for name, status in not_run.items():
        missing.setdefault(status.removeprefix("not run: "), []).append(name)
    tables = {study: records.files(study, directory, records.environment()["gpu"]["name"])[0] for study in wanted}
    state = unfinished.resume(build, studies=wanted, smoke=smoke, directory=str(directory.resolve()))
    done, broken = [study for study in wanted if state.wrote(study, tables[study])], []
    if done:
        print(f"  going on where a run was interrupted: {len(done)} of {len(wanted)} studies are measured", flush=True)
    left = {study: known[study] for study in wanted if study not in done}
    beside, alone = ({} if smoke else seconds(left, [directory, records.MEASUREMENTS], part) for part in _SECONDS)
    apart = torch.cuda.is_available() and not smoke and len(wanted) > 1
    started, ended = time.monotonic(), len(done)
    if apart and left:
        expected = max(*beside.values(), sum(beside.values()) / MOST_PROCESSES) + sum(alone.values())
        print(f"  {len(left)} studies, about {minutes(expected)}", flush=True)
    for name, result in tasks.results(left, state, apart=apart, smoke=smoke, seconds=beside):
        if result.error:
            said = "not measured: it raised"
            print(result.error, file=sys.stderr, flush=True)
            broken.append(name)
        elif result.reason:
            said = f"not measured: {result.reason}"
            missing.setdefault(result.reason, []).append(name)
        else:
            try:
                record(name, known[name], result, directory, smoke=smoke, not_run=not_run)
            except ValueError as error:
                print(error, file=sys.stderr, flush=True)
                broken.append(name)
                continue
            if not result.whole:
                continue
            state.keep_file(name, tables[name])
            done.append(name)
            said = _told(known[name], result, smoke)
        alone.pop(name, None)
        ended += 1
        rest = f"{minutes(time.monotonic() - started)} so far, about {minutes(sum(alone.values()))} left"
        print(f"  [{ended}/{len(wanted)}] {name}: {said}; {rest}", flush=True)
    return Measured(directory, done, missing, broken, state)


def record(
    name: str, study: Study, result: Result, directory: Path, *, smoke: bool, not_run: Mapping[str, str]
) -> None:
    """Write the record of a study. A table that is no times names no code: it is the result of its run."""
    facts = result.facts
    code = {"kernels": reached.reached(facts["kernels"]), "protocol": staleness.numbers(name)}
    if study.kernels_unknown:
        code["kernels_unknown"] = study.kernels_unknown
    records.write(
        name,
        result.found,
        directory,
        parameters={"smoke": smoke, **({"short": True} if study.is_short else {}), **facts["parameters"]},
        peers=facts["peers"],
        built=packages.built(facts["peers"]),
        not_run=not_run,
        **(code if study.timed else {}),
    )


def seconds(studies: Mapping[str, Study], directories: Sequence[Path], part: str) -> dict[str, float]:
    """Study -> the seconds of a part of it, by the first record of any GPU that notes them, else 0.

    A short part of a study that has none of its own counts a minute at most.

    Args:
        part: ``"seconds"`` while its calls are timed, or ``"seconds_beside"``.
    """
    found = dict.fromkeys(studies, 0.0)
    for name, study in studies.items():
        for path in (directory / gpu / f"{name}.json" for directory in directories for gpu in records.gpus(directory)):
            with suppress(OSError, ValueError, KeyError, TypeError):
                noted = json.loads(path.read_bytes())["parameters"]
                if noted.get(part) and not noted.get("smoke"):
                    other = study.is_short and not noted.get("short")
                    found[name] = min(noted[part], 60.0) if other else noted[part]
                    break
    return found


def _told(study: Study, result: Result, smoke: bool) -> str:
    """The rows and the seconds of a study, and where it took more memory, or has other rows, than declared."""
    noted = result.facts["parameters"]
    said = f"{len(result.found)} rows, {noted['seconds'] or noted['seconds_beside']:.1f} s"
    if (took := noted["gpu_bytes"]["beside"]) > study.gpu_bytes:
        said += f" (took {took / GIB:.1f} GiB untimed, {study.gpu_gib:.1f} are declared)"
    other = "" if smoke else study.other_rows(result.found)
    return f"{said}; {other}" if other else said
