"""Hold faults to laws, and tabulate the faults that each law kills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd
import torch

from ropelab.bench.workers import Job, spread
from ropelab.conformance.laws import LAWS
from ropelab.conformance.report import Report
from ropelab.conformance.verify import verify
from ropelab.study.faults import AGREEMENT, FAULTS, Control, Fault

KILLED = ("fail", "error")


def hold_to_laws(fault: Fault | Control, laws: Iterable[str] | None = None, **more: Any) -> Report:
    """Return the report of `verify` on an entry of the catalogue, with the options that the entry declares.

    Args:
        fault: the entry.
        laws: the names of the laws; by default all laws that are not opt-in.
        more: other arguments of `verify`. They replace options of the entry.
    """
    return verify(fault.function, fault.convention, laws=laws, **{**fault.options, **more})


def laws_for(fault: Fault) -> tuple[str, ...]:
    """Return the names of the laws that are not opt-in, and of the laws that the fault must fail.

    Tracing takes as long as most other laws together, so ``compile`` is asked only where it must kill the fault.
    """
    named = (law.name for law in LAWS.values() if law.by_default or law.name in fault.must_fail)
    return tuple(name for name in named if name != "compile" or name in fault.must_fail)


def kill_matrix(
    faults: Iterable[str] | None = None,
    laws: Iterable[str] | None = None,
    *,
    interpreted: bool = True,
    here: bool = False,
    watch: Callable[[Iterable, int, str], Iterable] = lambda runs, count, what: runs,
) -> pd.DataFrame:
    """Hold faults to laws, several at a time.

    Faults in Triton run on a GPU if the machine has one, else in Triton's interpreter.

    Args:
        faults: the names of faults; by default all faults.
        laws: the names of laws; by default `laws_for` each fault.
        interpreted: whether faults in Triton run in the interpreter; without a GPU they are left out otherwise.
        here: whether everything runs in this process.
        watch: passes the runs on, and may say how many have ended.

    Returns:
        A row for each fault and a column for each law, both by name. The values are ``"pass"``, ``"fail"``,
        ``"error"`` (the fault raised, which no law allows), ``"not applicable"``, and NaN for laws that the fault was
        not held to.
    """
    names = list(FAULTS if faults is None else faults)
    if not (interpreted or torch.cuda.is_available()):
        names = [name for name in names if not FAULTS[name].triton]
    laws = None if laws is None else tuple(laws)
    jobs: dict[bool, list[Job]] = {True: [], False: []}
    for name in names:
        jobs[FAULTS[name].triton].append((_statuses, (name, laws)))
    found = dict(watch(spread(jobs[False], jobs[True], here=here), len(names), "faults"))
    matrix = pd.DataFrame.from_dict({name: found[name] for name in names}, orient="index")
    return matrix[[law for law in LAWS if law in matrix]].rename_axis(index="fault", columns="law")


def _statuses(name: str, laws: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    fault = FAULTS[name]
    device = "cuda" if fault.triton and torch.cuda.is_available() else "cpu"
    report = hold_to_laws(fault, laws or laws_for(fault), shrink=False, device=device)
    return name, {result.law: result.status for result in report.results}


def kills(matrix: pd.DataFrame) -> pd.DataFrame:
    """Return the matrix as booleans: True where a law does not hold."""
    return matrix.isin(KILLED)


def only_by_agreement(matrix: pd.DataFrame) -> set[str]:
    """Return the faults that are killed only by laws that compare with the definition."""
    seen = kills(matrix)
    others = seen.drop(columns=[law for law in AGREEMENT if law in seen])
    return set(seen.index[seen.any(axis=1) & ~others.any(axis=1)])
