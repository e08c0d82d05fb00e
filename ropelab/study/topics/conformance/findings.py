"""Apply the laws of `ropelab.conformance` to the catalogue of faults and to implementations at hand."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch

from ropelab.bench import records
from ropelab.bench.conformance import NOT_RUN, held, left_out
from ropelab.bench.kill_matrix import hold_to_laws, kills, laws_for, only_by_agreement
from ropelab.bench.subjects import CONTENDERS
from ropelab.bench.workers import Job, cores, spread
from ropelab.conformance import LAWS, Report
from ropelab.conformance.faults import AGREEMENT, FAULTS, NOT_EXPRESSED, THEMES

DEFINITION = "definition"
NEEDS_TRUTH = (*AGREEMENT, "huge")
"""The laws that compare with the float64 definition: near, in 16 bits, far out, and in large tensors."""
SELF_CONSISTENCY = ("isometry", "adjoint", "relative_position", "inverse")
"""The laws that tests check most often, because the laws need no reference."""
FEW = (
    ("backward_applies_forward", "layout_flag_ignored", "positions_from_one", "single_head_lost"),
    (DEFINITION, *SELF_CONSISTENCY, "identity", "layout", "single_head"),
    ("ropelab, split-half", "transformers, Llama", "complex product (Llama)", "torchembed 0.3.0"),
)
"""Few faults, laws and contenders, with which everything runs in seconds."""
DIAGNOSED = "torchembed 0.3.0"
VIOLATED = ("fail", "error")
MANY_CORES = 8


# -------------------------------------------------------------------------------------------- faults against laws


@dataclass(frozen=True)
class Catalogue:
    """The faults, held to the laws.

    Attributes:
        matrix: the status for each fault (row) and law (column), missing where a fault was not held to an opt-in law.
        named: fault -> the faults that the diagnosis of the fault names, the likeliest first.
    """

    matrix: pd.DataFrame
    named: dict[str, tuple[str, ...]]

    @property
    def killed(self) -> pd.DataFrame:
        """For each fault (row) and law (column), whether the law does not hold."""
        return kills(self.matrix)

    @property
    def diagnosed(self) -> list[str]:
        """The faults that their own diagnosis names, alone or among others."""
        return [name for name, found in self.named.items() if name in found]


def begun_catalogue(
    faults: Iterable[str] | None = None, laws: Iterable[str] | None = None, *, here: bool = False
) -> Callable[[], Catalogue]:
    """Begin to hold faults to laws and to diagnose each, several at a time; the returned function waits for the end.

    On fewer than ``MANY_CORES`` cores, which the rest of a notebook keeps busy, the returned function begins.

    Faults in Triton run on a GPU if the machine has one, else in Triton's interpreter.

    Args:
        faults: the names of faults; by default all faults.
        laws: the names of laws; by default all laws, but only the opt-in laws that the catalogue expects to kill the
            fault.
        here: whether everything runs in this process.
    """
    names = list(FAULTS if faults is None else faults)
    laws = None if laws is None else tuple(laws)
    jobs: dict[bool, list[Job]] = {True: [], False: []}
    for name in names:
        jobs[FAULTS[name].triton].append((_held_fault, (name, laws)))
    begin = partial(spread, jobs[False], jobs[True], here=here)
    begun = begin() if cores() >= MANY_CORES else None

    def ended() -> Catalogue:
        found = {name: (statuses, named) for name, statuses, named in begun or begin()}
        matrix = pd.DataFrame.from_dict({name: found[name][0] for name in names}, orient="index")
        columns = [law for law in LAWS if law in matrix]
        matrix = matrix[columns].rename_axis(index="fault", columns="law")
        return Catalogue(matrix, {name: found[name][1] for name in names})

    return ended


def catalogue(
    faults: Iterable[str] | None = None, laws: Iterable[str] | None = None, *, here: bool = False
) -> Catalogue:
    """The end of `begun_catalogue`."""
    return begun_catalogue(faults, laws, here=here)()


def _held_fault(name: str, laws: Sequence[str] | None) -> tuple[str, dict[str, str], tuple[str, ...]]:
    fault = FAULTS[name]
    device = "cuda" if fault.triton and torch.cuda.is_available() else "cpu"
    report = hold_to_laws(fault, laws or laws_for(fault, device), shrink=False, device=device)
    return name, _statuses(report), tuple(found.fault.name for found in report.diagnosis)


def _statuses(report: Report) -> dict[str, str]:
    return {result.law: result.status for result in report.results}


def theme_of(fault: str) -> str:
    """The theme of the catalogue that a fault belongs to."""
    return next(theme for theme, module in THEMES.items() if FAULTS[fault] in vars(module).values())


def score(found: Catalogue) -> pd.DataFrame:
    """The score of the catalogue: columns question, faults (the number that the question counts), of (all faults)."""
    killed, total = found.killed, len(found.matrix)
    others = killed.drop(columns=DEFINITION, errors="ignore").any(axis=1)
    alone = without_agreement(killed).any(axis=1)
    expected = [
        set(FAULTS[name].must_fail) & set(killed) <= set(killed.columns[row]) for name, row in killed.iterrows()
    ]
    rows = [
        ("expressed as code that runs", total, total + len(NOT_EXPRESSED)),
        ("killed by some law", killed.any(axis=1).sum(), total),
        ("killed by a law other than definition", others.sum(), total),
        (f"killed by a law that needs no reference (all but {', '.join(NEEDS_TRUTH)})", alone.sum(), total),
        ("killed by every law that the catalogue names", sum(expected), total),
        ("named by its diagnosis, alone or among others", len(found.diagnosed), total),
        ("named first", sum(names[:1] == (name,) for name, names in found.named.items()), total),
    ]
    return pd.DataFrame(rows, columns=["question", "faults", "of"])


def sentence(found: Catalogue) -> str:
    """The score in words, for titles and the report's first page."""
    killed, total = found.killed, len(found.matrix)
    some = killed.any(axis=1).sum()
    other = killed.drop(columns=DEFINITION, errors="ignore").any(axis=1).sum()
    return (
        f"{total} of {total + len(NOT_EXPRESSED)} known faults are written as code. {'All' if some == total else some} "
        f"are killed by some law, {other} by a law other than definition, and "
        f"{without_agreement(killed).any(axis=1).sum()} by a law that needs no reference. The diagnosis names "
        f"{len(found.diagnosed)} ({len(found.diagnosed) / total:.0%})"
    )


def without_agreement(killed: pd.DataFrame) -> pd.DataFrame:
    """The kills of the laws that need no reference."""
    return killed.drop(columns=list(NEEDS_TRUTH), errors="ignore")


def shortcomings(found: Catalogue) -> list[str]:
    """A line on each shortcoming: a fault that survives, or that only agreement with the definition kills.

    There is also a line on each fault that an expected law does not kill, and on each fault that is not named.
    """
    lines = []
    agreed = only_by_agreement(found.matrix)
    for name in found.matrix.index:
        fault, row = FAULTS[name], found.killed.loc[name]
        asked = [law for law in fault.must_fail if law in row]
        if not row.any():
            lines.append(f"`{name}` survives every law")
        elif name in agreed:
            why = fault.only_definition or "no reason is given"
            lines.append(f"`{name}` is killed by agreement with the definition alone: {why.rstrip('.')}")
        if missed := [law for law in asked if not row[law]]:
            lines.append(f"`{name}` should be killed by {', '.join(missed)}, and is not")
        if name not in found.named[name]:
            lines.append(f"`{name}` is not named; its diagnosis: {', '.join(found.named[name]) or 'none'}")
    return lines


# -------------------------------------------------------------------------------------------------------- blindness


def by_law(found: Catalogue) -> pd.DataFrame:
    """For each law, the numbers of faults that it kills, kills alone and lets pass, and to which it does not apply."""
    killed = found.killed
    alone = killed[killed.sum(axis=1) == 1].sum()
    counts = {
        "kills": killed.sum(),
        "alone": alone,
        "lets pass": (found.matrix == "pass").sum(),
        "not applicable": (found.matrix == "not applicable").sum(),
    }
    return pd.DataFrame(counts)


def unseen(found: Catalogue, laws: Iterable[str] = SELF_CONSISTENCY) -> list[str]:
    """The faults that none of these laws kills, although agreement with the definition is broken."""
    killed = found.killed
    return list(killed.index[killed[DEFINITION] & ~killed[list(laws)].any(axis=1)])


def cover(killed: pd.DataFrame) -> pd.DataFrame:
    """A greedy cover: few laws that together kill every fault that any law kills.

    The next law is the law that kills most of the faults left. Among equal laws the first in the list is next.

    Args:
        killed: for each fault (row) and law (column), whether the law kills the fault.

    Returns:
        Columns law, kills (the number of new kills), left (the number of faults left), faults (the names of the kills).
    """
    left, rows = killed[killed.any(axis=1)], []
    while len(left):
        law = left.sum().idxmax()
        kills_now = list(left.index[left[law]])
        left = left[~left[law]]
        rows.append({"law": law, "kills": len(kills_now), "left": len(left), "faults": kills_now})
    return pd.DataFrame(rows, columns=["law", "kills", "left", "faults"])


# ------------------------------------------------------------------------------------------------------------ peers


def peers(
    names: Iterable[str] | None = None,
    laws: Iterable[str] | None = None,
    *,
    interpreted: bool = False,
    here: bool = False,
) -> pd.DataFrame:
    """The table of `ropelab.bench.conformance.held` on this machine's CPU, float32.

    Args:
        names: the names of contenders; by default all contenders.
        interpreted: whether Triton kernels are held too, in the interpreter, which takes half a minute each.
        here: whether everything runs in this process.
    """
    chosen = [contender for contender in CONTENDERS if names is None or contender.name in names]
    laws = None if laws is None else tuple(laws)
    jobs: dict[bool, list[Job]] = {True: [], False: []}
    for contender in chosen:
        if interpreted or not contender.triton:
            jobs[contender.triton].append((_held_contender, (contender.name, laws)))
    frames = list(spread(jobs[False], jobs[True], here=here))
    for contender in chosen:
        if contender.triton and not interpreted:
            reason = contender.missing() or "not interpreted; the record of a GPU has it"
            frames.append(left_out(contender, reason, device="cpu", dtype=torch.float32))
    place = {contender.name: i for i, contender in enumerate(chosen)}
    return pd.concat(sorted(frames, key=lambda frame: place[frame.subject.iloc[0]]), ignore_index=True)


def _held_contender(name: str, laws: Sequence[str] | None) -> pd.DataFrame:
    contender = next(contender for contender in CONTENDERS if contender.name == name)
    return held(contender, laws=laws, device="cpu", dtype=torch.float32)


def violations(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows where a law does not hold."""
    return frame[frame.status.isin(VIOLATED)]


def peers_sentence(frame: pd.DataFrame, where: str) -> str:
    """The sentence that counts the configurations that keep every law, and names the laws that the others break."""
    rows = frame[frame.status != NOT_RUN]
    broken = violations(rows)
    subjects = list(dict.fromkeys(rows.subject))
    right = [name for name in subjects if name not in set(broken.subject)]
    faulty = [
        f"{name}: {', '.join(dict.fromkeys(laws))}" for name, laws in broken.groupby("subject", sort=False).law
    ]  # fmt: skip
    text = f"On {where}, {len(right)} of {len(subjects)} configurations keep every law that applies to them"
    return text + (f"; the others break laws ({'; '.join(faulty)})." if faulty else ".")


def violations_in_words(
    live: pd.DataFrame, record: records.Record | None = None, *, leave_out: str = DIAGNOSED
) -> list[tuple[str, str]]:
    """The headline and the printed counterexample of each contender and law; a GPU's record precedes a CPU's record."""
    tables = [live] if record is None else [record.frame, live]
    frame = violations(pd.concat(tables, ignore_index=True)).drop_duplicates(["subject", "law"])
    rows = frame[frame.subject != leave_out].itertuples()
    return [(f"{row.subject} ({row.device}, {row.dtype})", row.message) for row in rows]


# ----------------------------------------------------------------------------------------------- torchembed 0.3.0


@dataclass(frozen=True)
class Diagnosis:
    """The command that verifies torchembed 0.3.0's kernel, while it runs in a process of its own.

    Attributes:
        command: the command as for a shell.
        process: the running command; None where torchembed is missing.
        missing: why there is no process.
    """

    command: str
    process: subprocess.Popen | None
    missing: str = ""

    def report(self) -> str:
        """Wait for the end of the process, and return the command with its output."""
        if self.process is None:
            return f"{DIAGNOSED} is not diagnosed here: {self.missing}"
        printed, errors = self.process.communicate()
        if self.process.returncode not in (0, 1):
            raise RuntimeError(errors)
        return f"$ {self.command}\n\n{printed}"


def diagnosis_of_torchembed(laws: Iterable[str] | None = None) -> Diagnosis:
    """Start the command that verifies torchembed 0.3.0's kernel.

    Args:
        laws: by default all laws, without compilation where the kernel is interpreted.
    """
    contender = next(contender for contender in CONTENDERS if contender.name == DIAGNOSED)
    if reason := contender.missing():
        return Diagnosis("", None, reason)
    function = contender.function
    words = ["verify", f"{function.__module__}:{function.__name__}", "--convention", contender.convention, "--verbose"]
    for option, value in contender.options.items():
        words += [f"--{option.replace('_', '-')}", value]
    # The interpreter runs a program for every head.
    interpreted = ["--skip", "compile", "--q-heads", "2", "--k-heads", "1"]
    words += ["--device", "cuda"] if torch.cuda.is_available() else interpreted
    for law in laws or ():
        words += ["--law", law]
    # A notebook asks its child processes for colours. A page has no use for colours.
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    plain |= {"COLUMNS": "120", "TERM": "dumb"}
    command = [sys.executable, "-m", "ropelab", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=plain)
    return Diagnosis(f"ropelab {' '.join(words)}", process)


def torchembed_sentence(report: str) -> str:
    """The sentence with the number of laws that do not hold, and the first line of the diagnosis."""
    summary = re.search(r"(\d+) of \d+ laws do(?:es)? not hold", report)
    named = re.search(r"^ *- (.*)$", report.partition("Diagnosis:")[2], re.MULTILINE)
    if not summary:
        return ""
    diagnosis = f"The diagnosis: {named[1]}" if named else "The diagnosis names no fault"
    return f"{DIAGNOSED} breaks {summary[1]} of the laws. {diagnosis}."


# ------------------------------------------------------------------------------------------------------- the laws


def law_table(frame: pd.DataFrame, subject: str) -> pd.DataFrame:
    """Every law: name, statement, latex, bound, and the violation of one contender.

    Args:
        frame: a table with the rows of the contender. Its bound is the bound at the worst element, and 0 where bits
            must be equal.
        subject: the contender.
    """
    numbers = frame[frame.subject == subject].drop_duplicates("law").set_index("law")
    rows = []
    for law in LAWS.values():
        row = {"law": law.name, "statement": law.statement, "latex": law.latex}
        row["bound"] = numbers.bound.get(law.name, float("nan"))
        row["violation"] = numbers.violation.get(law.name, float("nan"))
        rows.append(row)
    return pd.DataFrame(rows)


def law_markdown(table: pd.DataFrame) -> str:
    """The table of ``law_table`` as markdown with formulas, for a notebook."""

    def number(value: float, spec: str = ".1e") -> str:
        return "" if value != value else "exact" if value == 0 else format(value, spec)

    lines = ["| law | statement | formula | bound | ropelab |", "|---|---|---|---|---|"]
    for row in table.itertuples():
        latex = row.latex.replace("|", r"\vert ")  # a bar would end the cell
        found = "" if row.violation != row.violation else f"{row.violation:.1e}" if row.violation else "0"
        lines.append(f"| `{row.law}` | {row.statement} | ${latex}$ | {number(row.bound)} | {found} |")
    return "\n".join(lines)


def count(number: int, one: str, several: str) -> str:
    """A number with its noun: ``"1 law"``, ``"2 laws"``."""
    return f"{number} {one if number == 1 else several}"
