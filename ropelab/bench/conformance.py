"""Hold our rotation and the peers' rotations to the laws of `ropelab.conformance`."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
import torch

from ropelab.bench import gpu_memory
from ropelab.bench.records import ROOT
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.study import GIB
from ropelab.bench.subjects import CONTENDERS, Contender
from ropelab.bench.workers import MOST_PROCESSES
from ropelab.conformance import LAWS, Report, verify
from ropelab.conformance.report import failure

COLUMNS = ["subject", "convention", "layout", "dtype", "device", "law", "status", "violation", "bound", "message"]
DTYPES = (torch.float32, torch.bfloat16)
NOT_RUN = "not run"
_FOLDERS = re.compile(rf"{re.escape(str(ROOT))}/|/[^\s,]*/(?:site|dist)-packages/")
FEW_LAWS = ("definition", "isometry", "adjoint", "inputs_unchanged")
PROCESS_GIB = 0.5
"""The most GiB that torch reserves for a contender; the CUDA context of the process comes on top."""
_GPU_FAULT = re.compile("CUDA error|CUDA driver error|illegal memory access|misaligned address", re.IGNORECASE)


def conformance(*, smoke: bool = False, device: str = "cuda") -> pd.DataFrame:
    """All contenders of `ropelab.bench.subjects` on a GPU, held to all laws that are not opt-in.

    Returns:
        A row for each contender, dtype and law, with the columns ``COLUMNS``. ``violation`` and ``bound`` describe the
        element that exceeds its bound most or, if the law holds, comes nearest to its bound. ``message`` is the
        counterexample in words, the error, or the reason why a law does not apply. A contender that is not installed
        has one row for each dtype, with the status ``"not run"`` and no law.

    A fault on the GPU ends all further work of a process. Every contender therefore has a process of its own. If the
    process ends, or a law ends with such a fault, each law of the contender is held again in a process of its own.
    """
    laws = FEW_LAWS if smoke else tuple(name for name, law in LAWS.items() if law.by_default)
    whole = [_Run(contender, dtype, laws) for contender in CONTENDERS for dtype in (DTYPES[:1] if smoke else DTYPES)]
    if smoke:
        return pd.concat([held(run.contender, laws=laws, device=device, dtype=run.dtype) for run in whole])
    outcomes = _in_processes(whole, device)
    parts = [part for run in whole for part in (run.by_law() if outcomes[run.name].faulted else [run])]
    outcomes |= _in_processes([part for part in parts if part.name not in outcomes], device)
    found = pd.concat([outcomes[part.name].rows(part, device) for part in parts], ignore_index=True)
    # This process itself reserves nothing on the GPU.
    found.attrs["gpu_bytes"] = sum(sorted(outcome.gpu_bytes for outcome in outcomes.values())[-MOST_PROCESSES:])
    return found


@dataclass(frozen=True)
class _Run:
    """A contender that is held to laws in one process."""

    contender: Contender
    dtype: torch.dtype
    laws: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name that no other run has."""
        return ", ".join((self.contender.name, str(self.dtype), *(self.laws if len(self.laws) == 1 else ())))

    def by_law(self) -> "list[_Run]":
        return [_Run(self.contender, self.dtype, (law,)) for law in self.laws]


@dataclass(frozen=True)
class _Outcome:
    """The table of a run; or the error of its process, if the process ended."""

    table: pd.DataFrame
    gpu_bytes: int = 0
    error: str = ""

    @property
    def faulted(self) -> bool:
        """Whether a fault on the GPU makes the table say too little."""
        return bool(self.error) or bool(self.table.message.fillna("").str.contains(_GPU_FAULT).any())

    def rows(self, run: _Run, device: str) -> pd.DataFrame:
        """The table, or a row for each law if the process ended."""
        if not self.error:
            return self.table
        rows = [{"law": law, "status": "error", "message": self.error} for law in run.laws]
        return _table(run.contender, device, run.dtype, rows)


def _in_processes(runs: Sequence[_Run], device: str) -> dict[str, _Outcome]:
    """The name of each run -> its outcome. Nothing is timed, so the processes share the GPU."""
    free = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else 64 * GIB
    jobs = [Job(run.name, _outcome, (run, device), round(PROCESS_GIB * GIB)) for run in runs]
    outcomes = {}
    for number, (job, outcome) in enumerate(side_by_side(jobs, free), 1):
        if isinstance(outcome, BaseException):
            outcome = _Outcome(pd.DataFrame(), error=f"its process ended: {type(outcome).__name__}: {outcome}")
        outcomes[job.name] = outcome
        print(f"    {number:2}/{len(runs)} {job.name:60} {outcome.error[:60]}", flush=True)
    return outcomes


def _outcome(run: _Run, device: str) -> _Outcome:
    gpu_memory.watch()
    table = held(run.contender, laws=run.laws, device=device, dtype=run.dtype)
    return _Outcome(table, gpu_memory.peak_reserved() + gpu_memory.CONTEXT_BYTES)


def held(contender: Contender, *, laws: Iterable[str] | None = None, device: str, dtype: torch.dtype) -> pd.DataFrame:
    """The rows of one contender.

    Args:
        laws: the names of the laws; by default all laws that are not opt-in.
    """
    if reason := contender.missing():
        return left_out(contender, reason, device=device, dtype=dtype)
    skip = contender.not_claimed
    skip += contender.not_interpreted if contender.triton and not device.startswith("cuda") else ()
    report = verify(contender.function, contender.convention, laws=laws, skip=skip, device=device, dtype=dtype,
                    **contender.options)  # fmt: skip
    return _table(contender, device, dtype, _rows(report))


def left_out(contender: Contender, reason: str, *, device: str, dtype: torch.dtype) -> pd.DataFrame:
    """The row of a contender that was not held to any law."""
    return _table(contender, device, dtype, [{"law": "", "status": NOT_RUN, "message": reason}])


def _table(contender: Contender, device: str, dtype: torch.dtype, rows: Iterable[dict]) -> pd.DataFrame:
    layout = contender.options.get("layout", "split_half")
    about = {"subject": contender.name, "convention": contender.convention, "layout": layout, "device": device}
    about["dtype"] = str(dtype).removeprefix("torch.")
    return pd.DataFrame([about | row for row in rows]).reindex(columns=COLUMNS)


def _rows(report: Report) -> Iterator[dict]:
    for result in report.results:
        row = {"law": result.law, "status": result.status, "message": result.message}
        if result.status == "pass" or result.counterexample is not None:
            row |= {"violation": result.violation, "bound": result.bound}
        if result.failed:
            row["message"] = _FOLDERS.sub("", failure(result))
        yield row
