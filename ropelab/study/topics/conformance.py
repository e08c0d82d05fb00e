"""Hold the faults of the catalogue, and the implementations at hand, to the laws of `ropelab.conformance`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch

from ropelab.bench.conformance import held, left_out
from ropelab.bench.subjects import CONTENDERS
from ropelab.bench.workers import Job, spread
from ropelab.conformance import LAWS
from ropelab.conformance.report import Report
from ropelab.conformance.verify import verify
from ropelab.kernels import use_backend
from ropelab.study.faults import AGREEMENT, FAULTS, Control, Fault

KILLED = ("fail", "error")
"""The statuses of a law that does not hold."""


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
    interpreted: bool = False,
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


def implementations(
    names: Iterable[str] | None = None,
    laws: Sequence[str] | None = None,
    *,
    interpreted: bool = False,
    here: bool = False,
    watch: Callable[[Iterable, int, str], Iterable] = lambda runs, count, what: runs,
) -> pd.DataFrame:
    """The table of `ropelab.bench.conformance.held` on this machine's CPU, float32.

    Args:
        names: the names of contenders; by default all contenders.
        interpreted: whether Triton kernels are held too, in the interpreter, which takes half a minute each.
        here: whether everything runs in this process.
        watch: passes the runs on, and may say how many have ended.
    """
    chosen = [contender for contender in CONTENDERS if names is None or contender.name in names]
    jobs: dict[bool, list[Job]] = {True: [], False: []}
    for contender in chosen:
        if interpreted or not contender.triton:
            jobs[contender.triton].append((_held_contender, (contender.name, laws)))
    runs = spread(jobs[False], jobs[True], here=here)
    frames = list(watch(runs, sum(map(len, jobs.values())), "implementations"))
    for contender in chosen:
        if contender.triton and not interpreted:
            reason = contender.missing() or "not interpreted; the record of a GPU has it"
            frames.append(left_out(contender, reason, device="cpu", dtype=torch.float32))
    place = {contender.name: i for i, contender in enumerate(chosen)}
    return pd.concat(sorted(frames, key=lambda frame: place[frame.subject.iloc[0]]), ignore_index=True)


def _held_contender(name: str, laws: Sequence[str] | None) -> pd.DataFrame:
    contender = next(contender for contender in CONTENDERS if contender.name == name)
    with nullcontext() if contender.triton else use_backend("torch"):  # also where this process interprets kernels
        return held(contender, laws=laws, device="cpu", dtype=torch.float32)


def law_markdown(table: pd.DataFrame) -> str:
    """A table of laws as markdown with formulas: law, statement, latex, bound and violation, of one contender.

    A bound is that of the worst element, and 0 where bits must be equal.
    """

    def number(value: float, zero: str) -> str:
        return "" if value != value else zero if value == 0 else format(value, ".1e")

    lines = ["| law | statement | formula | bound | ropelab |", "|---|---|---|---|---|"]
    for row in table.itertuples():
        latex = row.latex.replace("|", r"\vert ")  # a bar would end the cell
        numbers = f"{number(row.bound, 'exact')} | {number(row.violation, '0')}"
        lines.append(f"| `{row.law}` | {row.statement} | ${latex}$ | {numbers} |")
    return "\n".join(lines)
