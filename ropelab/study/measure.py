"""Measure every study on the GPU at hand and write its records."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from ropelab.bench import packages, peers, records, studies
from ropelab.study.deepspeed.measure import STUDIES as DEEPSPEED_STUDIES
from ropelab.study.sglang.measure import STUDIES as SGLANG_STUDIES
from ropelab.study.verdicts import Unavailable

_PEERS = (*peers.PEERS, peers.TORCHEMBED_API)


def measure(directory: Path = records.MEASUREMENTS, *, smoke: bool = False, only: Sequence[str] | None = None) -> None:
    """Measure and record, printing a line for each step.

    Args:
        directory: where the records go: ``<directory>/<gpu>/<study>.csv`` and ``.json``.
        smoke: the smallest cells and few rounds, to see that everything runs; the numbers mean nothing.
        only: names out of ``all_studies()``; by default all.

    Raises:
        ValueError: an unknown study.
    """
    known = all_studies(smoke)
    unknown = set(only or ()) - known.keys()
    if unknown:
        raise ValueError(f"only: expected names out of {list(known)}, got {sorted(unknown)}")
    _, missing = peers.available(_PEERS)
    for name, reason in missing.items():
        print(f"  {name}: {reason}")
    for study in only or known:
        print(f"  {study}", flush=True)
        started = time.monotonic()
        try:
            frame = known[study]()
        except Unavailable as error:
            print(f"    not measured: {error}")
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


def all_studies(smoke: bool = False) -> dict[str, Callable[[], pd.DataFrame]]:
    """Study -> what measures it."""
    with_smoke = studies.STUDIES | SGLANG_STUDIES
    return {name: partial(study, smoke=smoke) for name, study in with_smoke.items()} | DEEPSPEED_STUDIES


def _versions() -> dict[str, str]:
    """Every version at hand of the packages compared with."""
    names = sorted({peer.package for peer in _PEERS if peer.package})
    return {name: ", ".join(packages.installations(name)) for name in names}
