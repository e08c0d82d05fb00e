"""Hold faults to laws, and tabulate the faults that each law kills."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from ropelab.conformance.faults import AGREEMENT, FAULTS, Control, Fault, runs_on
from ropelab.conformance.laws import LAWS
from ropelab.conformance.report import Report
from ropelab.conformance.verify import verify

KILLED = ("fail", "error")


def hold_to_laws(fault: Fault | Control, laws: Iterable[str] | None = None, **more: Any) -> Report:
    """Return the report of `verify` on an entry of the catalogue, with the options that the entry declares.

    Args:
        fault: the entry.
        laws: the names of the laws; by default all laws that are not opt-in.
        more: other arguments of `verify`. They replace options of the entry.
    """
    return verify(fault.function, fault.convention, laws=laws, **{**fault.options, **more})


def laws_for(fault: Fault, device: str = "cpu") -> tuple[str, ...]:
    """Return the names of the laws that are not opt-in, and of the laws that the fault must fail.

    The law ``compile`` is missing for interpreted kernels, because their compilation takes long to fail.
    """
    named = (law.name for law in LAWS.values() if law.by_default or law.name in fault.must_fail)
    interpreted = fault.triton and not device.startswith("cuda")
    return tuple(name for name in named if not (interpreted and name == "compile"))


def kill_matrix(
    faults: Iterable[Fault] | None = None,
    laws: Iterable[str] | None = None,
    *,
    device: str = "cpu",
    progress: Callable[[str], object] = lambda name: None,
) -> pd.DataFrame:
    """Hold faults to laws.

    Args:
        faults: the faults, by default the whole catalogue. Faults that cannot run on ``device`` are left out.
        laws: the names of the laws, by default `laws_for` each fault.
        device: the device of all tensors.
        progress: called with the name of each fault before its turn.

    Returns:
        A row for each fault and a column for each law, both by name. The values are ``"pass"``, ``"fail"``,
        ``"error"`` (the fault raised, which no law allows), ``"not applicable"``, and NaN for laws that the fault was
        not held to.
    """
    faults = FAULTS.values() if faults is None else faults
    laws = None if laws is None else tuple(laws)
    rows = {}
    for fault in (f for f in faults if runs_on(f, device)):
        progress(fault.name)
        report = hold_to_laws(fault, laws or laws_for(fault, device), device=device, diagnose=False, shrink=False)
        rows[fault.name] = {result.law: result.status for result in report.results}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="fault", columns="law")


def kills(matrix: pd.DataFrame) -> pd.DataFrame:
    """Return the matrix as booleans: True where a law does not hold."""
    return matrix.isin(KILLED)


def only_by_agreement(matrix: pd.DataFrame) -> set[str]:
    """Return the faults that are killed only by laws that compare with the definition."""
    seen = kills(matrix)
    others = seen.drop(columns=[law for law in AGREEMENT if law in seen])
    return set(seen.index[seen.any(axis=1) & ~others.any(axis=1)])
