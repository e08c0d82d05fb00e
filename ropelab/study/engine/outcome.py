"""Run a study, or a part of a study, and say how it ended."""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from ropelab.bench import gpu_memory, packages, reached
from ropelab.bench.unavailable import Unavailable


@dataclass(frozen=True)
class JobResult:
    """The result of a study, or the reason why it has none.

    Attributes:
        found: the table of the study, the result of its untimed part, or None.
        reason: why the study cannot run here.
        error: the traceback, if the study raised.
        seconds, gpu_bytes: the time of the study, and the memory that torch reserved, while its calls were timed.
        seconds_beside, gpu_bytes_beside: the same for its compilation and for what measures no time.
        whole: whether the study has ended; its table grows otherwise.
        kernels: the kernels of this project that ran (`ropelab.bench.reached.noted`).
        peers: the packages whose code was asked for, and their hashes (`ropelab.bench.packages.used`).
    """

    study: str
    found: Any = None
    reason: str = ""
    error: str = ""
    seconds: float = 0.0
    seconds_beside: float = 0.0
    gpu_bytes: int = 0
    gpu_bytes_beside: int = 0
    whole: bool = True
    kernels: frozenset[str] = frozenset()
    peers: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Any]:
        """The seconds and bytes that a record notes."""
        return {
            "seconds": round(self.seconds, 1),
            "seconds_beside": round(self.seconds_beside, 1),
            "gpu_bytes": {"beside": self.gpu_bytes_beside, "alone": self.gpu_bytes},
        }


def run(study: str, function: Callable[[], Any]) -> JobResult:
    """Call the function, which measures the study or a part of the study, in this process."""
    (*_, last) = growing(study, function)
    return last


def growing(study: str, function: Callable[[], Any]) -> Iterator[JobResult]:
    """Call the function as `run`. A function that yields its table as it grows has an outcome for each table."""
    gpu_memory.watch()
    started = time.monotonic()
    found, reason, error = None, "", ""

    def outcome(whole: bool) -> JobResult:
        reserved = getattr(found, "attrs", {}).get("gpu_bytes", 0) or gpu_memory.peak_reserved()
        seconds = time.monotonic() - started
        ran = {"kernels": frozenset(kernels), "peers": packages.used()}
        return JobResult(study, found, reason, error, seconds=seconds, gpu_bytes=reserved, whole=whole, **ran)

    with reached.noted() as kernels:
        try:
            made = function()
            for found in made if isinstance(made, Iterator) else (made,):
                if made is not found:
                    yield outcome(whole=False)
        except Unavailable as unavailable:
            reason = str(unavailable)
        except Exception as raised:
            if isinstance(raised, ModuleNotFoundError) and raised.name and "." not in raised.name:
                reason = f"{raised.name} not installed"
            else:
                error = traceback.format_exc()
        yield outcome(whole=True)


def beside_others(study: str, function: Callable[[], Any]) -> JobResult:
    """The outcome of a job that times nothing, and shares the GPU.

    The job has no result if memory ran out, because other jobs may have used it.
    """
    # The output goes to a file and not to None, because packages that compile flush it.
    with gpu_memory.shared(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        outcome = run(study, function)
    if isinstance(outcome.found, pd.DataFrame) and _speaks_of_memory(outcome.found):
        outcome = replace(outcome, found=None, error="a row of it ran out of memory")
    return replace(
        outcome, seconds=0.0, seconds_beside=outcome.seconds, gpu_bytes=0, gpu_bytes_beside=outcome.gpu_bytes
    )


def _speaks_of_memory(table: pd.DataFrame) -> bool:
    """Whether a row says that a contender ran out of memory; studies that catch errors write them in their rows."""
    words = table.select_dtypes(exclude=["number", "bool"])
    said = words.apply(lambda column: column.astype(str).str.contains(gpu_memory.OUT_OF_MEMORY, case=False))
    return bool(said.any(axis=None))
