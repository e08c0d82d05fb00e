"""Measure every study on the GPU at hand and write its records."""

import contextlib
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ropelab.bench import packages, peers, records, studies, timing
from ropelab.bench.studies import PartlyTimed
from ropelab.bench.workers import spread
from ropelab.study import precision_gpu
from ropelab.study.verdicts import Unavailable, documents

ON_REQUEST = ("tiles",)
"""Measured if named only: what a choice in the kernels rests on, and no figure of speed or verdict."""

SPREAD = "conformance"
"""Untimed too, and spreads over processes of its own."""

UNTIMED = (
    SPREAD, "memory", "table_free_error", "precision", "deepspeed_packages", "deepspeed_correctness",
    "fairseq2_defaults", "te_parity", "te_past_the_end",
)  # fmt: skip
"""No time is in their records: measured beside each other, while the others are compiled."""

_PEERS = (*peers.PEERS, peers.TORCHEMBED_API)


@dataclass(frozen=True)
class Outcome:
    """What a study found, or why it found nothing: ``reason`` if it cannot run here, ``error`` if it raised."""

    study: str
    seconds: float
    found: Any = None
    reason: str = ""
    error: str = ""


def measure(directory: Path = records.MEASUREMENTS, *, smoke: bool = False, only: Sequence[str] | None = None) -> None:
    """Measure and record, printing a line for each step: first what times nothing, while the rest is compiled.

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
    for outcome in _outcomes(list(only or [name for name in known if name not in ON_REQUEST]), smoke):
        if outcome.error:
            print(outcome.error, file=sys.stderr, flush=True)
            broken.append(outcome.study)
        elif outcome.reason:
            print(f"    not measured: {outcome.reason}", flush=True)
        else:
            parameters = {"smoke": smoke, "seconds": round(outcome.seconds, 1)}
            about = {"parameters": parameters, "peers": _versions(), "not_run": missing}
            records.write(outcome.study, outcome.found, directory, **about)
            print(f"    {len(outcome.found)} rows, {outcome.seconds:.1f} s", flush=True)
    if broken:
        raise RuntimeError(f"not measured, for the reasons above: {', '.join(broken)}")


def _outcomes(wanted: Sequence[str], smoke: bool) -> Iterator[Outcome]:
    """Of each study, as they come."""
    known, parts, left = all_studies(), {}, list(wanted)
    if torch.cuda.is_available() and not smoke and len(wanted) > 1:
        for outcome in _side_by_side(wanted):
            if outcome.study in UNTIMED:
                left.remove(outcome.study)
                yield outcome
            else:
                parts[outcome.study] = outcome
    for study in left:
        print(f"  {study}", flush=True)
        function, before = known[study], 0.0
        if study in parts:
            function, before = partial(function.timed, parts[study].found), parts[study].seconds
        outcome = _outcome(study, partial(function, smoke=smoke))
        yield replace(outcome, seconds=before + outcome.seconds)


def _side_by_side(wanted: Sequence[str]) -> Iterator[Outcome]:
    """What times nothing, studies and parts of studies; all others run with the clock stopped.

    Their kernels are then found on disk when they are timed: compiling keeps one core busy for as long as all the
    measuring takes. What finds nothing here, as for want of memory, is run again alone.
    """
    started, known = time.monotonic(), all_studies()
    print("  side by side: what times nothing, and compiling", flush=True)
    apart = [study for study in wanted if study != SPREAD]
    timed = [study for study in apart if study not in UNTIMED]
    partly = [study for study in timed if isinstance(known[study], PartlyTimed)]
    # The longest first: parts, then compiling.
    jobs = [(_without_timing, (study,)) for study in partly] + [(_without_clock, (study,)) for study in timed]
    jobs += [(_without_timing, (study,)) for study in apart if study in UNTIMED]
    done = spread([], jobs)
    if SPREAD in wanted:
        print(f"  {SPREAD}", flush=True)
        outcome = _outcome(SPREAD, known[SPREAD])
        if outcome.found is not None:
            yield outcome
    with contextlib.suppress(BrokenProcessPool):
        for outcome in done:
            what = "compiled" if outcome.found is None else "measured" if outcome.study in UNTIMED else "untimed part"
            what = outcome.reason or outcome.error.strip().rpartition("\n")[2][:200] or what
            print(f"  {outcome.study:22}{outcome.seconds:6.1f} s  {what}", flush=True)
            if outcome.found is not None:
                yield outcome
    print(f"  all that, {time.monotonic() - started:.1f} s", flush=True)


def _without_timing(study: str) -> Outcome:
    function = all_studies()[study]
    function = function.untimed if isinstance(function, PartlyTimed) else function
    with timing.refused(), contextlib.redirect_stdout(None):
        return _outcome(study, function)


def _without_clock(study: str) -> Outcome:
    function = all_studies()[study]
    function = partial(function.timed, {}) if isinstance(function, PartlyTimed) else function
    with timing.stopped(), contextlib.redirect_stdout(None):
        return replace(_outcome(study, function), found=None)


def _outcome(study: str, function: Callable[[], Any]) -> Outcome:
    started = time.monotonic()
    found, reason, error = None, "", ""
    try:
        found = function()
    except Unavailable as unavailable:
        reason = str(unavailable)
    except Exception:
        error = traceback.format_exc()
    return Outcome(study, time.monotonic() - started, found, reason, error)


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
