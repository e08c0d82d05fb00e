"""This file holds our rotation and the peers' rotations to the laws of `ropelab.conformance`."""

import re
import time
from collections.abc import Iterable, Iterator

import pandas as pd
import torch

from ropelab.bench import gpu_memory
from ropelab.bench.records import ROOT
from ropelab.bench.subjects import CONTENDERS, Contender
from ropelab.bench.workers import MOST_PROCESSES, spread
from ropelab.conformance import Report, verify
from ropelab.conformance.report import failure

COLUMNS = ["subject", "convention", "layout", "dtype", "device", "law", "status", "violation", "bound", "message"]
DTYPES = (torch.float32, torch.bfloat16)
NOT_RUN = "not run"
_FOLDERS = re.compile(rf"{re.escape(str(ROOT))}/|/[^\s,]*/(?:site|dist)-packages/")
FEW_LAWS = ("definition", "isometry", "adjoint", "inputs_unchanged")


def conformance(*, smoke: bool = False, device: str = "cuda") -> pd.DataFrame:
    """All contenders of `ropelab.bench.subjects` on a GPU, held to all laws that are not opt-in.

    Returns:
        A row for each contender, dtype and law, with the columns ``COLUMNS``. ``violation`` and ``bound`` describe the
        element that exceeds its bound most or, if the law holds, comes nearest to its bound. ``message`` is the
        counterexample in words, the error, or the reason why a law does not apply. A contender that is not installed
        has one row for each dtype, with the status ``"not run"`` and no law.
    """
    laws = FEW_LAWS if smoke else None
    runs = [(contender, dtype) for contender in CONTENDERS for dtype in (DTYPES[:1] if smoke else DTYPES)]
    # Nothing is timed, and compilation takes longest, so several processes may share the GPU.
    jobs = [(_numbered, (number, contender, laws, device, dtype)) for number, (contender, dtype) in enumerate(runs)]
    frames, reserved = {}, []
    for number, frame, seconds, gpu_bytes in spread([], jobs, here=smoke):
        frames[number] = frame
        reserved.append(gpu_bytes)
        about = f"{runs[number][0].name}, {runs[number][1]}"
        print(f"    {len(frames):2}/{len(runs)} {about:50} {seconds:6.1f} s", flush=True)
    found = pd.concat([frames[number] for number in range(len(runs))], ignore_index=True)
    found.attrs["gpu_bytes"] = sum(sorted(reserved)[-MOST_PROCESSES:])  # this process itself reserves nothing
    return found


def _numbered(
    number: int, contender: Contender, laws: Iterable[str] | None, device: str, dtype: torch.dtype
) -> tuple[int, pd.DataFrame, float, int]:
    """``(number, table, seconds, bytes of the GPU)`` of a run. Runs end in any order; ``number`` tells them apart."""
    started = time.monotonic()
    gpu_memory.watch()
    frame = held(contender, laws=laws, device=device, dtype=dtype)
    return number, frame, time.monotonic() - started, gpu_memory.peak_reserved() + gpu_memory.CONTEXT_BYTES


def held(contender: Contender, *, laws: Iterable[str] | None = None, device: str, dtype: torch.dtype) -> pd.DataFrame:
    """The rows of one contender.

    Args:
        laws: the names of the laws; by default all laws that are not opt-in.
    """
    if reason := contender.missing():
        return left_out(contender, reason, device=device, dtype=dtype)
    skip = contender.not_interpreted if contender.triton and not device.startswith("cuda") else ()
    report = verify(contender.function, contender.convention, laws=laws, skip=skip, device=device, dtype=dtype,
                    diagnose=False, **contender.options)  # fmt: skip
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
