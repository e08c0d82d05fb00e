"""Measure every study on the GPU at hand, and write its records."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropelab.bench import packages, peers, reached, records, staleness
from ropelab.bench.study import GIB, Study
from ropelab.study.engine import expected, registered, schedule, unfinished
from ropelab.study.engine.outcome import JobResult

_PEERS = (*peers.PEERS, peers.TORCHEMBED_API)


@dataclass(frozen=True)
class Measured:
    """The outcome of a run.

    Attributes:
        directory: where the records lie.
        studies: the studies that the run has recorded, before it was interrupted or now.
        missing: what this machine lacks, as a package -> the contenders and studies that did not run for that reason.
        broken: the studies that raised, or whose table is no record.
    """

    directory: Path
    studies: Sequence[str]
    missing: Mapping[str, Sequence[str]]
    broken: Sequence[str]

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
    are timed, one after the other. After an interruption the next run measures the missing studies, and says so. After
    a run that ended, the next run measures all studies. A study that raises does not stop the others.

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
    run = unfinished.resume(build, tables, smoke=smoke, directory=str(directory.resolve()))
    if run.done:
        print(
            f"  going on where a run was interrupted: {len(run.done)} of {len(wanted)} studies are measured", flush=True
        )
    broken = []
    progress = expected.Progress(wanted, run.done, expected.seconds(wanted, [directory, records.MEASUREMENTS], smoke))
    for outcome in schedule.outcomes({name: known[name] for name in wanted if name not in run.done}, smoke, progress):
        said = ""
        if outcome.error:
            said = "not measured: it raised"
            print(outcome.error, file=sys.stderr, flush=True)
            broken.append(outcome.study)
        elif outcome.reason:
            said = f"not measured: {outcome.reason}"
            missing.setdefault(outcome.reason, []).append(outcome.study)
        else:
            try:
                record(known[outcome.study], outcome, directory, smoke=smoke, not_run=not_run)
            except ValueError as error:
                print(error, file=sys.stderr, flush=True)
                broken.append(outcome.study)
                continue
            if not outcome.whole:
                continue
            run.note(outcome.study, tables[outcome.study])
            seconds = outcome.seconds or outcome.seconds_beside
            said = f"{len(outcome.found)} rows, {seconds:.1f} s{_beyond(known[outcome.study], outcome)}"
            if not smoke and (other := known[outcome.study].other_rows(outcome.found)):
                said += f"; {other}"
        print(f"  [{progress.done(outcome.study)}] {outcome.study}: {said}; {progress.left}", flush=True)
    if not broken:
        run.finish()
    return Measured(directory, list(run.done), missing, broken)


def record(study: Study, outcome: JobResult, directory: Path, *, smoke: bool, not_run: Mapping[str, str]) -> None:
    """Write the record of a study. A table that is no times names no code: it is the result of its run."""
    code = {"kernels": reached.reached(outcome.kernels), "protocol": staleness.numbers(outcome.study)}
    if study.kernels_unknown:
        code["kernels_unknown"] = study.kernels_unknown
    records.write(
        outcome.study,
        outcome.found,
        directory,
        parameters={"smoke": smoke, **({"short": True} if study.is_short else {}), **outcome.parameters},
        peers=outcome.peers,
        built=packages.built(outcome.peers),
        not_run=not_run,
        **(code if study.timed else {}),
    )


def _beyond(study: Study, outcome: JobResult) -> str:
    took, declared = outcome.gpu_bytes_beside, study.gpu_bytes
    return f" (took {took / GIB:.1f} GiB untimed, {declared / GIB:.1f} are declared)" if took > declared else ""
