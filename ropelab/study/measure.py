"""Measure every study on the GPU at hand and write its records."""

import contextlib
import importlib
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pandas as pd
import torch

from ropelab.bench import packages, peers, records, studies, timing
from ropelab.bench.workers import spread
from ropelab.study import precision_gpu
from ropelab.study.verdicts import Unavailable, documents

ON_REQUEST = ("tiles",)
"""Measured if named only: what a choice in the kernels rests on, and no figure of speed or verdict."""

SPREAD = ("conformance",)
"""Studies with processes of their own."""

_PEERS = (*peers.PEERS, peers.TORCHEMBED_API)


def measure(directory: Path = records.MEASUREMENTS, *, smoke: bool = False, only: Sequence[str] | None = None) -> None:
    """Measure and record, printing a line for each step.

    Args:
        directory: where the records go: ``<directory>/<gpu>/<study>.csv`` and ``.json``.
        smoke: the smallest cells and few rounds, to see that everything runs; the numbers mean nothing.
        only: names out of ``all_studies()``; by default all but ``ON_REQUEST``.

    A study that raises does not keep the others from being measured.

    Raises:
        ValueError: an unknown study.
        RuntimeError: afterwards, if a study raised.
    """
    known = all_studies()
    unknown = set(only or ()) - known.keys()
    if unknown:
        raise ValueError(f"only: expected names out of {list(known)}, got {sorted(unknown)}")
    _, missing = peers.available(_PEERS)
    for name, reason in missing.items():
        print(f"  {name}: {reason}")
    broken = []
    wanted = list(only or [name for name in known if name not in ON_REQUEST])
    if len(wanted) > 1 and torch.cuda.is_available() and not smoke:
        _compile(wanted)
    for study in wanted:
        print(f"  {study}", flush=True)
        started = time.monotonic()
        try:
            frame = known[study](smoke=smoke)
        except Unavailable as error:
            print(f"    not measured: {error}")
            continue
        except Exception:
            traceback.print_exc()
            broken.append(study)
            continue
        record = records.write(
            study,
            frame,
            directory,
            parameters={"smoke": smoke, "seconds": round(time.monotonic() - started, 1)},
            peers=_versions(),
            not_run=missing,
        )
        print(f"    {len(record.frame)} rows, {time.monotonic() - started:.1f} s", flush=True)
    if broken:
        raise RuntimeError(f"not measured, for the reasons above: {', '.join(broken)}")


def _compile(studies: Sequence[str]) -> None:
    """Run studies side by side with the clock stopped: kernels are then found on disk when they are timed.

    Compiling keeps one core busy for longer than all the measuring takes. What fails here will again, and says so then.
    """
    started = time.monotonic()
    print("  compiling", flush=True)
    with contextlib.suppress(BrokenProcessPool):
        list(spread([], [(_without_clock, (study,)) for study in studies if study not in SPREAD]))
    print(f"    {time.monotonic() - started:.1f} s", flush=True)


def _without_clock(study: str) -> None:
    with timing.stopped(), contextlib.suppress(Exception), contextlib.redirect_stdout(None):
        all_studies()[study]()


def all_studies() -> dict[str, Callable[..., pd.DataFrame]]:
    """Study -> the function of ``smoke`` that measures it: benchmarks, precision, then what each document needs.

    A document's are the ``STUDIES`` of the module that its file of claims names.

    Raises:
        ValueError: two studies of one name.
    """
    found = studies.STUDIES | precision_gpu.STUDIES
    for document in documents():
        module = importlib.import_module(document.studies)
        if taken := found.keys() & module.STUDIES.keys():
            raise ValueError(f"{module.__name__}: expected names of studies of its own, got {sorted(taken)}")
        found |= module.STUDIES
    return found


def _versions() -> dict[str, str]:
    """Every version at hand of the packages compared with."""
    names = sorted({peer.package for peer in _PEERS if peer.package})
    return {name: ", ".join(packages.installations(name)) for name in names}
