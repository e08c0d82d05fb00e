"""Apply the laws of `ropelab.conformance` to the catalogue of faults and to implementations at hand."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import pandas as pd
import torch

from ropelab.bench import records
from ropelab.bench.conformance import NOT_RUN, held, left_out
from ropelab.bench.subjects import CONTENDERS
from ropelab.bench.workers import Job, spread
from ropelab.conformance import LAWS
from ropelab.conformance.laws import THEMES as LAW_THEMES
from ropelab.kernels import use_backend
from ropelab.study.engine.words import listed
from ropelab.study.faults import AGREEMENT, FAULTS, NOT_EXPRESSED, THEMES
from ropelab.study.topics.conformance.kill_matrix import kills, only_by_agreement

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
TOLD = "torchembed 0.3.0"
"""The implementation whose counterexample another chapter has."""
VIOLATED = ("fail", "error")
MOST_BROKEN = 3
SHOWN = (
    DEFINITION, *SELF_CONSISTENCY, "layout", "table_gradients", "packed", "keys_independent", "inputs_unchanged"
)  # fmt: skip
"""The laws of the table: those of a rotation, its gradient, a format, and two of memory."""


# -------------------------------------------------------------------------------------------- faults against laws


def theme_of(fault: str) -> str:
    """The theme of the catalogue that a fault belongs to."""
    return next(theme for theme, module in THEMES.items() if FAULTS[fault] in vars(module).values())


def sentence(matrix: pd.DataFrame) -> str:
    """The score in words, for titles and the report's first page."""
    killed, total = kills(matrix), len(matrix)
    some = killed.any(axis=1).sum()
    other = killed.drop(columns=DEFINITION, errors="ignore").any(axis=1).sum()
    return (
        f"{total} of {len(FAULTS) + len(NOT_EXPRESSED)} known faults ran as code. {'All' if some == total else some} "
        f"are killed by some law, {other} by a law other than definition, and "
        f"{without_agreement(killed).any(axis=1).sum()} by a law that needs no reference"
    )


def without_agreement(killed: pd.DataFrame) -> pd.DataFrame:
    """The kills of the laws that need no reference."""
    return killed.drop(columns=list(NEEDS_TRUTH), errors="ignore")


def shortcomings(matrix: pd.DataFrame) -> list[str]:
    """A line on each shortcoming: a fault that survives, or that only agreement with the definition kills.

    There is also a line on each fault that an expected law does not kill.
    """
    lines = []
    agreed, killed = only_by_agreement(matrix), kills(matrix)
    for name, row in killed.iterrows():
        fault = FAULTS[name]
        asked = [law for law in fault.must_fail if law in row]
        if not row.any():
            lines.append(f"`{name}` survives every law")
        elif name in agreed:
            why = fault.only_definition or "no reason is given"
            lines.append(f"`{name}` is killed by agreement with the definition alone: {why.rstrip('.')}")
        if missed := [law for law in asked if not row[law]]:
            lines.append(f"`{name}` should be killed by {', '.join(missed)}, and is not")
    return lines


# -------------------------------------------------------------------------------------------------------- blindness


def alone(killed: pd.DataFrame) -> pd.Series:
    """The number of faults that a law alone kills, for each law with such faults; those with the most come first."""
    once = killed[killed.sum(axis=1) == 1].sum()
    return once[once > 0].sort_values(ascending=False).rename("faults killed alone")


def unseen(killed: pd.DataFrame, laws: Iterable[str] = SELF_CONSISTENCY) -> list[str]:
    """The faults that none of these laws kills, although agreement with the definition is broken."""
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
    laws = None if laws is None else tuple(laws)
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


def violations(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows where a law does not hold."""
    return frame[frame.status.isin(VIOLATED)]


def peers_sentence(frame: pd.DataFrame, where: str) -> str:
    """The sentence that counts the configurations that keep every law, and the laws that most of the others break."""
    rows = frame[frame.status != NOT_RUN]
    broken = violations(rows)
    subjects = list(dict.fromkeys(rows.subject))
    right = [name for name in subjects if name not in set(broken.subject)]
    often = broken.drop_duplicates(["subject", "law"]).law.value_counts().head(MOST_BROKEN)
    text = f"On {where}, {len(right)} of {len(subjects)} configurations keep every law that applies to them."
    laws = ", ".join(f"`{law}` ({n})" for law, n in often.items())
    others = listed(name.partition(", ")[0] for name in subjects if name not in right)
    return text + (f" The others ({others}) break most often: {laws}." if laws else "")


def violations_in_words(live: pd.DataFrame, record: records.Record | None = None) -> list[tuple[str, str]]:
    """The headline and the counterexample of the first violation of a forward, a gradient and memory.

    A GPU's record precedes a CPU's record.
    """
    tables = [live] if record is None else [record.frame, live]
    frame = violations(pd.concat(tables, ignore_index=True)).drop_duplicates(["subject", "law"])
    frame = frame[frame.subject != TOLD]
    theme = frame.law.map(
        lambda law: next(name for name, module in LAW_THEMES.items() if LAWS[law] in vars(module).values())
    )
    rows = frame.groupby(theme, sort=False).head(1).head(3).itertuples()
    return [(f"{row.subject} ({row.device}, {row.dtype})", row.message) for row in rows]


# ------------------------------------------------------------------------------------------------------- the laws


def law_table(frame: pd.DataFrame, subject: str) -> pd.DataFrame:
    """Every law: name, statement, latex, bound, and the violation of one contender.

    Args:
        frame: a table with the rows of the contender. Its bound is the bound at the worst element, and 0 where bits
            must be equal.
        subject: the contender.
    """
    numbers = frame[frame.subject == subject].drop_duplicates("law").set_index("law")[["bound", "violation"]]
    laws = pd.DataFrame([{"law": law.name, "statement": law.statement, "latex": law.latex} for law in LAWS.values()])
    return laws.join(numbers, on="law")


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
