"""Keep all verdicts in ``data/verdicts.csv``, with their figures.

The file has three tasks. A test computes every verdict again and compares it with the file, so that a change of
evidence shows even where no outcome turns. README.md and the guide show the verdicts of the file, so that the texts are
the same on every machine. And a machine without published code (``python -m ropelab.study peers`` fetches it) has the
verdicts that rest on it: the ledger then takes them from the file, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pandas as pd

from ropelab.bench import whole_file
from ropelab.bench.records import REFERENCE, ROOT, environment
from ropelab.study.engine.claims import Claim, documents
from ropelab.study.engine.verdict import Outcome, Verdict, fact

VERDICTS = ROOT / "data" / "verdicts.csv"
COLUMNS = ["gpu", "id", "outcome", "words", "basis", "measured", "needs", "beyond", "remarks", "commit"]
"""``commit`` is the commit at which a verdict on fetched code was computed."""
COMPARED = COLUMNS[2:-1]
ABOUT = ["id", "by", "document", "statement"]
FETCHED = "python -m ropelab.study peers"
"""The words by which ``needs`` of a claim says that its code is fetched."""
ELSEWHERE = "not computed here, because the code is not at hand"


def instead(claim: Claim, verdict: Verdict) -> Verdict:
    """The verdict itself, or the kept one where the claim cannot be told for lack of its published code."""
    if verdict.outcome is not Outcome.UNTOLD or FETCHED not in verdict.needs:
        return verdict
    rows = read()
    rows = rows[(rows.id == claim.id) & (rows.commit != "")]
    if rows.empty or rows.words.iloc[0] not in (Outcome.HOLDS, Outcome.FAILS):
        return verdict
    row = rows.iloc[0]
    why = f"{ELSEWHERE} ({FETCHED}): the verdict of commit {row.commit}"
    return fact(row.words == Outcome.HOLDS).with_text(row.measured, why).with_basis(claim.basis)


def write(ledgers: Mapping[str, pd.DataFrame], path: Path = VERDICTS) -> None:
    """Write the verdicts of all GPUs. A verdict that was not computed here stays as it is in the file."""
    before, rows, commit = _by_claim(), [], environment()["commit"][:7]
    for gpu in sorted(ledgers, key=lambda gpu: (gpu != REFERENCE, gpu)):  # whatever GPU is at hand
        for row in ledgers[gpu].assign(gpu=gpu).to_dict("records"):
            kept = before.get((gpu, row["id"]), {})
            if kept and (ELSEWHERE in row["remarks"] or all(row[name] == kept[name] for name in COMPARED)):
                rows.append(kept)  # with the commit at which it was computed
            else:
                rows.append(row | {"commit": commit if row["fetched"] and ELSEWHERE not in row["remarks"] else ""})
    whole_file.write(path, pd.DataFrame(rows)[COLUMNS].to_csv(index=False))
    read.cache_clear()


def ledger(gpu: str) -> pd.DataFrame:
    """The verdicts of the file on a GPU, with the claims in words: a row for each claim, in the order of their files.

    Returns:
        Columns id, by, document, statement, and those of the file but the GPU.
    """
    claims = [claim for document in documents() for claim in document.claims]
    about = pd.DataFrame([(one.id, one.by, one.document, one.statement) for one in claims], columns=ABOUT)
    rows = read()
    return about.merge(rows[rows.gpu == gpu].drop(columns="gpu"), on="id")


def changed(ledgers: Mapping[str, pd.DataFrame]) -> list[str]:
    """A line for each figure of a verdict that was computed here and differs from the file."""
    before, lines = _by_claim(), []
    for gpu, ledger in ledgers.items():
        for row in ledger[~ledger.remarks.str.contains(ELSEWHERE)].to_dict("records"):
            kept = before.get((gpu, row["id"]), {})
            differing = [name for name in COMPARED if kept.get(name) != row[name]]
            lines += [f"{row['id']} on {gpu}: {name} was {kept.get(name)!r}, is {row[name]!r}" for name in differing]
    return lines


def _by_claim() -> dict[tuple[str, str], dict[str, str]]:
    return {(row["gpu"], row["id"]): row for row in read().to_dict("records")}


@cache
def read() -> pd.DataFrame:
    """The table of the file."""
    return pd.read_csv(VERDICTS, keep_default_na=False, dtype=str)
