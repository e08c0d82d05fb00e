"""Which law sees which fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from ropelab.conformance.faults import AGREEMENT, FAULTS, Control, Fault, runs_on
from ropelab.conformance.laws import LAWS
from ropelab.conformance.result import Report
from ropelab.conformance.verify import verify

KILLED = ("fail", "error")


def hold_to_laws(fault: Fault | Control, laws: Iterable[str] | None = None, **more: Any) -> Report:
    """`verify` for an entry of the catalogue, with what it declares of itself; ``more`` as for ``verify``."""
    return verify(fault.function, fault.convention, laws=laws, **{**fault.options, **more})


def laws_for(fault: Fault, device: str = "cpu") -> tuple[str, ...]:
    """Those that are checked by default and those that the fault has to fail.

    Compilation is left out for kernels that are interpreted: it takes long to find out that they cannot be compiled.
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
    """Hold every fault to every law.

    Args:
        faults: by default all of the catalogue that can run on ``device``.
        laws: names; by default `laws_for` each fault.
        progress: called with the name of each fault before its turn.

    Returns:
        A row for each fault and a column for each law, both by name: ``"pass"``, ``"fail"``, ``"error"`` (it raised,
        which no law allows) or ``"not applicable"``; missing where a law was not checked.
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
    """Where a law does not hold: the matrix as booleans."""
    return matrix.isin(KILLED)


def only_by_agreement(matrix: pd.DataFrame) -> set[str]:
    """Faults that no law sees but those that compare with the definition."""
    seen = kills(matrix)
    others = seen.drop(columns=[law for law in AGREEMENT if law in seen])
    return set(seen.index[seen.any(axis=1) & ~others.any(axis=1)])
