"""Keep the verdicts on claims whose evidence is computed from published code, for machines without that code.

``make peers`` fetches the code. Where it is not at hand, such a claim could not be told. The ledger then has the
verdict of ``data/documents/kept.csv``, which says at which commit it was computed. `update` writes the verdicts that
were computed, and leaves the others as they are.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from functools import cache

import pandas as pd

from ropelab.bench.records import ROOT
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.verdict import Outcome, Verdict, fact

KEPT = ROOT / "data" / "documents" / "kept.csv"
FETCHED = "make peers"
"""The words by which ``needs`` of a claim says that its code is fetched."""


def instead(claim: Claim, verdict: Verdict) -> Verdict:
    """The verdict itself, or the kept one where the claim cannot be told for lack of its published code."""
    if verdict.outcome is not Outcome.UNTOLD or FETCHED not in verdict.needs or claim.id not in _kept().index:
        return verdict
    row = _kept().loc[claim.id]
    why = f"not computed here, because the code is not at hand ({FETCHED}): the verdict of commit {row.commit}"
    return fact(row.outcome == Outcome.HOLDS).with_text(row.measured, why).with_basis(claim.basis)


def update(claims: Iterable[Claim], ledger: pd.DataFrame) -> None:
    """Write the verdicts of a ledger on claims of fetched code, as far as they were computed here."""
    found, rows = ledger.set_index("id"), {}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    for claim in claims:
        if FETCHED not in claim.needs or claim.lost:
            continue
        row = found.loc[claim.id]
        if "not computed here" in row.remarks:
            rows[claim.id] = _kept().loc[claim.id].to_dict()
        elif row.outcome in (Outcome.HOLDS, Outcome.FAILS):
            rows[claim.id] = {"outcome": row.outcome, "measured": row.measured, "commit": head.stdout.strip()}
    pd.DataFrame.from_dict(rows, orient="index").rename_axis("claim").to_csv(KEPT)
    _kept.cache_clear()


@cache
def _kept() -> pd.DataFrame:
    return pd.read_csv(KEPT, index_col="claim", keep_default_na=False, dtype=str)
