"""Find the evidence of each claim, let the rule of the claim judge it, and list the verdicts in one table.

A rule is a function of its claim and of named evidence, each a :class:`pandas.DataFrame`, and returns a
:class:`Verdict`; no other code can set a verdict. The engine finds evidence by name, in this order. First comes a frame
that the caller hands to :func:`ledger`, then a computation that a document registered with
`ropelab.study.engine.computed.evidence`, and last the committed record of that name under ``data/measurements/``.
Without evidence a claim cannot be told, and its verdict names the evidence that would tell. A record that cannot be
believed (`ropelab.bench.record_checks`) is no evidence, and the verdict says why.

A ledger has the records of one GPU. ``by_gpu`` makes a ledger for each GPU, and ``disagreements`` lists where they
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pandas as pd

from ropelab.bench import records as measurements
from ropelab.bench.records import MEASUREMENTS, Selection, Where
from ropelab.study.engine.claims import Claim, load_claims
from ropelab.study.engine.computed import Evidence, computed
from ropelab.study.engine.repeats import between_runs
from ropelab.study.engine.verdict import Basis, Outcome, Untold, Verdict, of_model, untold


@dataclass(frozen=True)
class _Rule:
    judge: Callable[..., Verdict]
    evidence: tuple[str, ...]
    basis: Basis


_RULES: dict[str, _Rule] = {}


def rule(
    claim_id: str, *evidence_names: str, basis: Basis
) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Register a function of the claim and the named frames, in that order, as the rule of a claim.

    The function returns the verdict. It may raise `Untold` in place of a verdict "cannot be told".

    Args:
        basis: the basis of the evidence, unless the verdict states another basis (`Verdict.on`). A verdict on a model
            becomes "cannot be told", with the model's verdict beside it.
    """

    def register(judge: Callable[..., Verdict]) -> Callable[..., Verdict]:
        _RULES[claim_id] = _Rule(judge, evidence_names, basis)
        return judge

    return register


def find_evidence(
    name: str,
    given: Mapping[str, pd.DataFrame] | None = None,
    records: Where = MEASUREMENTS,
    *,
    compute: Callable[[str], Evidence | None] | None = None,
) -> Evidence | None:
    """The evidence of that name: given, computed now, or recorded under ``records``; else None.

    Args:
        compute: a function that finds computed evidence by name, used in place of `computed`.

    Raises:
        Damaged: there is a record, but it cannot be believed.
    """
    if given is not None and name in given:
        return Evidence(name, given[name], "given by the caller")
    if found := (compute or computed)(name):
        return found
    try:
        record = measurements.load(name, records)
    except measurements.Missing:
        return None
    if record.provenance.get("parameters", {}).get("smoke"):
        raise measurements.Damaged(f"{name}: expected a measurement, got a trial run (--smoke)")
    frame = record.frame
    if "median_us" in frame:
        frame = frame.assign(between_runs=between_runs(name, frame))
    return Evidence(name, frame, f"record, {record.footer}", measured=True)


def judge(claim: Claim, find: Callable[[str], Evidence | None] = find_evidence) -> tuple[Verdict, list[Evidence]]:
    """The verdict on one claim, and the evidence it rests on."""
    if claim.id not in _RULES:
        raise ValueError(f"claim {claim.id}: no rule is registered, expected one in the package its file names")
    rule = _RULES[claim.id]
    found, missing, damaged = [], [], []
    for name in rule.evidence:
        try:
            piece = find(name)
        except measurements.Damaged as error:
            damaged.append(str(error))
            continue
        if piece is None or piece.frame.empty:
            missing.append(name)
        else:
            found.append(piece)
    if damaged:
        return untold(f"records that can be believed ({'; '.join(damaged)})").with_basis(Basis.NONE), []
    if missing:
        return untold(f"{claim.needs} (missing: {', '.join(missing)})").with_basis(Basis.NONE), []
    try:
        verdict = rule.judge(claim, *(piece.frame for piece in found))
    except Untold as missing_piece:
        verdict = untold(str(missing_piece))
    if (verdict.basis or rule.basis) is Basis.MODEL:
        return of_model(verdict, claim.needs), found
    return replace(verdict, basis=verdict.basis or rule.basis), found


COLUMNS = [
    "id", "document", "statement", "quote", "quantifier", "outcome", "words", "basis", "measured", "needs", "remarks",
    "evidence", "on_gpu",
]  # fmt: skip


def ledger(
    given: Mapping[str, pd.DataFrame] | None = None,
    *,
    document: str | None = None,
    only: Iterable[str] | None = None,
    records: Where = MEASUREMENTS,
    compute: Callable[[str], Evidence | None] | None = None,
) -> pd.DataFrame:
    """All claims with their verdicts, one row each.

    Args:
        given: evidence by name, used in place of computations and records.
        document: one document's claims (``"deepspeed"``); all documents when None.
        only: ids of the claims to judge; all when None.
        records: where the records are; if no GPU is chosen, the first GPU of `records.gpus`.
        compute: as for ``find_evidence``.

    Returns:
        Columns as in `COLUMNS`. outcome and basis are the two axes, and words is the outcome with its numbers. needs
        names the evidence that would tell, if the outcome is "cannot be told". on_gpu says whether a record is among
        the evidence.
    """
    claims = load_claims(document)
    if only is not None:
        unknown = sorted(set(only) - {claim.id for claim in claims})
        if unknown:
            raise ValueError(f"only: expected ids of claims, got {unknown}")
        claims = [claim for claim in claims if claim.id in set(only)]
    where = measurements.selection(records)
    if where.gpu is None:
        where = Selection(where.directory, next(iter(measurements.gpus(where.directory)), None))
    find = cache(partial(find_evidence, given=given, records=where, compute=compute))
    rows = []
    for claim in claims:
        verdict, pieces = judge(claim, find)
        rows.append(
            {
                "id": claim.id,
                "document": claim.document,
                "statement": claim.statement,
                "quote": claim.quote,
                "quantifier": str(claim.quantifier),
                "outcome": str(verdict.outcome),
                "words": verdict.words,
                "basis": str(verdict.basis),
                "measured": verdict.measured,
                "needs": verdict.needs,
                "remarks": "; ".join(verdict.remarks),
                "evidence": "; ".join(f"{p.name}: {p.source}" for p in pieces),
                "on_gpu": any(piece.measured for piece in pieces),
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def by_gpu(directory: Path = MEASUREMENTS, *, document: str | None = None) -> dict[str, pd.DataFrame]:
    """GPU (as `records.gpus` names and orders them) -> its ledger."""
    compute = cache(computed)  # evidence that needs no GPU is the same for all GPUs
    return {
        gpu: ledger(document=document, records=Selection(Path(directory), gpu), compute=compute)
        for gpu in measurements.gpus(directory)
    }


def disagreements(ledgers: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The claims whose outcomes differ between GPUs. "Cannot be told" on a GPU does not count as a difference.

    Args:
        ledgers: GPU -> ledger, as ``by_gpu`` returns them.

    Returns:
        A row for each claim that differs: id, document, statement, and a column for each GPU with the outcome and the
        measured figures; "" where the claim is not measured on that GPU.
    """
    said = {}
    for gpu, rows in ledgers.items():
        rows = rows[rows.on_gpu].set_index("id")
        said[gpu] = pd.DataFrame({"outcome": rows.outcome, "words": rows.words + ": " + rows.measured})
    outcomes = pd.DataFrame({gpu: found.outcome for gpu, found in said.items()})
    differing = outcomes.index[outcomes[outcomes != Outcome.UNTOLD].nunique(axis=1) > 1]
    words = pd.DataFrame({gpu: found.words for gpu, found in said.items()}).reindex(differing).fillna("")
    if not len(ledgers):
        return pd.DataFrame(columns=["id", "document", "statement"])
    about = next(iter(ledgers.values())).set_index("id")[["document", "statement"]]
    return about.join(words, how="right").reset_index(names="id").sort_values("id", ignore_index=True)


def counts(ledger: pd.DataFrame, axis: str) -> str:
    """The number of claims of each outcome or basis, the largest number first, in words.

    Args:
        axis: ``"outcome"`` or ``"basis"``.
    """
    return ", ".join(f"{name} {count}" for name, count in ledger[axis].value_counts().items())
