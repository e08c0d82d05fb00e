"""Measure every study on the GPU at hand and write its records."""

import contextlib
import importlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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

UNTIMED = ("conformance",)
"""Measured while the others are compiled: it has processes of its own and looks at no clock."""

_PEERS = (*peers.PEERS, peers.TORCHEMBED_API)


def measure(directory: Path = records.MEASUREMENTS, *, smoke: bool = False, only: Sequence[str] | None = None) -> None:
    """Measure and record, printing a line for each step: first what looks at no clock, while the rest is compiled.

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
    wanted = list(only or [name for name in known if name not in ON_REQUEST])
    timed = [study for study in wanted if study not in UNTIMED]

    def recorded(study: str) -> bool:
        print(f"  {study}", flush=True)
        started = time.monotonic()
        try:
            frame = known[study](smoke=smoke)
        except Unavailable as error:
            print(f"    not measured: {error}")
            return True
        except Exception:
            traceback.print_exc()
            return False
        seconds = time.monotonic() - started
        parameters = {"smoke": smoke, "seconds": round(seconds, 1)}
        record = records.write(study, frame, directory, parameters=parameters, peers=_versions(), not_run=missing)
        print(f"    {len(record.frame)} rows, {seconds:.1f} s", flush=True)
        return True

    with _compiling(timed if torch.cuda.is_available() and not smoke else ()):
        broken = [study for study in wanted if study in UNTIMED and not recorded(study)]
    broken += [study for study in timed if not recorded(study)]
    if broken:
        raise RuntimeError(f"not measured, for the reasons above: {', '.join(broken)}")


@contextlib.contextmanager
def _compiling(studies: Sequence[str]) -> Iterator[None]:
    """Meanwhile, and before the end, run studies side by side with the clock stopped.

    Their kernels are then found on disk when they are timed: compiling keeps one core busy for as long as all the
    measuring takes. What fails here will fail again, and says so then.
    """
    if len(studies) < 2:
        yield
        return
    started = time.monotonic()
    done = spread([], [(_without_clock, (study,)) for study in studies])
    print("  compiling", flush=True)
    yield
    with contextlib.suppress(BrokenProcessPool):
        for study, seconds in done:
            print(f"    {study:20} {seconds:6.1f} s", flush=True)
    print(f"  compiled, {time.monotonic() - started:.1f} s", flush=True)


def _without_clock(study: str) -> tuple[str, float]:
    started = time.monotonic()
    with timing.stopped(), contextlib.suppress(Exception), contextlib.redirect_stdout(None):
        all_studies()[study]()
    return study, time.monotonic() - started


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
