"""Estimate how long the studies of a run will take, from the seconds that earlier records note."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropelab.bench import records
from ropelab.bench.workers import MOST_PROCESSES
from ropelab.progress import minutes
from ropelab.study.engine import registered


class Progress:
    """The number of studies that are done, and the time that is left by the seconds that the records note.

    Args:
        expected: study -> seconds untimed, and seconds timed.
    """

    def __init__(self, studies: Sequence[str], done: Sequence[str], expected: Mapping[str, tuple[float, float]]):
        self._studies, self._done, self._expected = list(studies), set(done), expected
        self._started = time.monotonic()
        self._beside_ends = self._started

    @property
    def seconds_beside(self) -> dict[str, float]:
        """Study -> the seconds that its compilation, or the study that times nothing, is expected to take."""
        return {study: beside for study, (beside, _) in self._expected.items()}

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
        timed = sum(seconds for study, (_, seconds) in self._expected.items() if study not in self._done)
        return f"{minutes(now - self._started)} so far, about {minutes(timed + max(0, self._beside_ends - now))} left"


def seconds(wanted: Sequence[str], directories: Sequence[Path], smoke: bool) -> dict[str, tuple[float, float]]:
    """Study -> seconds untimed and timed, by the first records of any GPU that note them, else 0.

    The time in which a study waited for other studies, which older records note, does not count.
    """
    known, found = registered.all_studies(), {}
    for study in wanted:
        recorded = [
            _parameters(study, directory, gpu, smoke)
            for directory in directories
            for gpu in (None, *records.gpus(directory))
        ]
        alone = next((p["seconds"] - p.get("seconds_waiting", 0.0) for p in recorded if p.get("seconds")), 0.0)
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
