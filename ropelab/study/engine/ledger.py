"""Find the evidence of each claim, judge it, and list the verdicts in one table.

A claim is judged by the tests of its file (`ropelab.study.engine.comparisons`) or by a rule, a function of the claim
and of named evidence that returns a :class:`Verdict`; no other code can set a verdict. The engine finds evidence by
name, in this order: a frame that the caller hands to :func:`ledger`, a computation that a document registered with
`ropelab.study.engine.computed.evidence`, a table that the file of a document names, and the committed record of that
name under ``data/measurements/``. Without evidence a claim cannot be told, and its verdict names what would tell; so
does a claim that has tests beyond its document alone. A record that cannot be believed (`ropelab.bench.record_checks`)
is no evidence, and the verdict says why.

Where the published code of a claim is not at hand, its verdict is the one that was kept, and says so
(`ropelab.study.engine.kept`).

A ledger has the records of one GPU. A claim whose document names another GPU cannot be told there; what was measured
stands beyond the document. ``by_gpu`` makes a ledger for each GPU, and ``disagreements`` lists where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pandas as pd

from ropelab.bench import records as measurements
from ropelab.bench.records import MEASUREMENTS, Selection, Where
from ropelab.bench.rows import NotMeasured
from ropelab.study.engine import builds, decisive, kept, provenance
from ropelab.study.engine.claims import AUTHOR, Claim, load_claims, typed
from ropelab.study.engine.comparisons import Comparison, judged
from ropelab.study.engine.computed import Evidence, computed
from ropelab.study.engine.repeats import between_runs, by_any_method
from ropelab.study.engine.verdict import Basis, Outcome, Untold, Verdict, untold
from ropelab.study.engine.words import followed

Judge = Callable[..., Verdict]
WEAK = "weak evidence: "
"""The words with which the first remark on weak evidence begins."""


@dataclass(frozen=True)
class _Rule:
    judge: Judge
    evidence: tuple[str, ...]


_RULES: dict[str, _Rule] = {}
Remark = Callable[..., str | tuple[str, Mapping[str, object]]]
_REMARKS: dict[str, tuple[Remark, tuple[str, ...]]] = {}


def rule(claim_id: str, *evidence_names: str) -> Callable[[Judge], Judge]:
    """Register a function of the claim and the named frames, in that order, as the rule of a claim.

    The function returns the verdict. It may raise `Untold` in place of a verdict "cannot be told".
    """

    def register(judge: Judge) -> Judge:
        _RULES[claim_id] = _Rule(judge, evidence_names)
        return judge

    return register


def remark(claim_id: str, *evidence_names: str) -> Callable[[Remark], Remark]:
    """Register a function of the named frames that makes a remark on a claim; "" is no remark.

    The function may return numbers beside the remark, which the sentence of the claim may name (`engine.decisive`).
    """

    def register(say: Remark) -> Remark:
        _REMARKS[claim_id] = say, evidence_names
        return say

    return register


def find_evidence(
    name: str,
    given: Mapping[str, pd.DataFrame] | None = None,
    records: Where = MEASUREMENTS,
    *,
    compute: Callable[[str], Evidence | None] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Evidence | None:
    """The evidence of that name: given, computed now, typed, or recorded under ``records``; else None.

    Args:
        compute: a function that finds computed evidence by name, used in place of `computed`.
        refused: the name of a record -> why no verdict rests on the record.

    Raises:
        Damaged: there is a record, but it cannot be believed.
    """
    if given is not None and name in given:
        return Evidence(name, given[name], "given by the caller")
    if found := (compute or computed)(name) or typed(name):
        return found
    try:
        record = measurements.load(name, records)
    except measurements.Missing:
        return None
    if record.provenance.get("parameters", {}).get("smoke"):
        raise measurements.Damaged(f"{name}: expected a measurement, got a trial run (--smoke)")
    if name in (refused or {}):
        raise measurements.Damaged((refused or {})[name])
    frame = record.frame
    if "median_us" in frame:
        frame = frame.assign(
            between_runs=between_runs(name, frame), between_ratios=between_runs(name, frame, "ratio")
        )  # fmt: skip
    return Evidence(name, frame, f"record, {record.footer}", measured=True)


def judge(
    claim: Claim, find: Callable[[str], Evidence | None] = find_evidence, gpu: str | None = None
) -> tuple[Verdict, list[Evidence]]:
    """The verdict on one claim, and the evidence it rests on; ``gpu`` is the GPU of the records."""
    if claim.id not in _RULES and not (claim.test or claim.beyond):
        raise ValueError(f"claim {claim.id}: expected a test in its file or a rule in its package, got none")
    says, remarked = _REMARKS.get(claim.id, (None, ()))
    first = _RULES[claim.id].evidence if claim.id in _RULES else _needed_by(claim.test)
    names = list(
        dict.fromkeys(
            (*first, *_needed_by(claim.beyond), *_needed_by(claim.built.controls(*claim.test, *claim.beyond)))
        )
    )
    found, missing, damaged = {}, [], []
    for name in dict.fromkeys((*names, *remarked)):
        try:
            piece = find(name)
        except measurements.Damaged as error:
            damaged.append(str(error))
            continue
        if piece is None or piece.frame.empty:
            missing.append(name)
        else:
            found[name] = piece
    if damaged:
        return untold(f"records that can be believed ({'; '.join(damaged)})").with_basis(Basis.NONE), []
    frames = {name: piece.frame for name, piece in found.items()}
    weak = f"{WEAK}{claim.weak}" if claim.weak else ""
    if missing:
        verdict = untold(f"{claim.needs} (missing: {', '.join(missing)})").with_basis(Basis.NONE)
        if {*_needed_by(claim.beyond), *remarked} & {*missing}:
            return verdict, []
        verdict = _with_beyond(verdict, claim, claim.beyond, frames).with_text("", weak, *claim.remarks)
        return replace(verdict, says=decisive.sentence(claim, frames, verdict)), [*found.values()]
    own_gpu = bool(claim.gpu) and claim.is_of(gpu)
    verdict = _first(claim, frames, own_gpu)
    lost = claim.lost or ("" if claim.is_of(gpu) else f"times on an {claim.gpu}")
    if lost:  # what was measured without it lies beyond the document
        elsewhere = _with_beyond(verdict, claim, (*claim.test, *claim.beyond), frames).beyond or verdict
        verdict = untold(lost).beside(elsewhere)
    else:
        verdict = _with_beyond(verdict, claim, claim.beyond, frames)
    lacking = ""
    try:
        told = says(*(frames[name] for name in remarked)) if says else ""
    except NotMeasured as error:
        told = lacking = str(error)
    text, numbers = (told, {}) if isinstance(told, str) else told
    more = [*claim.remarks, text, claim.built.said(claim.test, frames)]
    if verdict.outcome is not Outcome.UNTOLD:
        more.append(_by_another_method(claim, frames, own_gpu, verdict.outcome))
    verdict = verdict.with_text(verdict.measured, weak, *more, **numbers)
    says_it = "" if lacking else decisive.sentence(claim, frames, verdict)
    return replace(verdict, basis=verdict.basis or claim.basis, says=says_it), [found[name] for name in names]


def _needed_by(tests: Iterable[Comparison]) -> list[str]:
    return [name for test in tests for name in test.evidence]


def _by_another_method(claim: Claim, frames: Mapping[str, pd.DataFrame], own_gpu: bool, outcome: Outcome) -> str:
    """The outcome if runs lie as far apart as those of two timers or builds, where it is another one; else ""."""
    wider = {name: by_any_method(name, frame) if "between_runs" in frame else frame for name, frame in frames.items()}
    other = _first(claim, wider, own_gpu)
    said = f"earlier records by another timer or build lie so far apart that it could also be: {other.words}"
    return "" if other.outcome is outcome else said


def _first(claim: Claim, frames: Mapping[str, pd.DataFrame], own_gpu: bool) -> Verdict:
    """The verdict on a claim as the document has it."""
    try:
        if claim.id in _RULES:
            rule = _RULES[claim.id]
            return rule.judge(claim, *(frames[name] for name in rule.evidence))
        if not claim.test:
            return untold(claim.needs)
        return judged(
            claim.test, frames, claim.quantifier, claim.needs, own_gpu=own_gpu, off_by=claim.built.off_in(frames)
        )
    except (Untold, NotMeasured) as missing:
        return untold(str(missing))


def _with_beyond(
    verdict: Verdict, claim: Claim, tests: Sequence[Comparison], frames: Mapping[str, pd.DataFrame]
) -> Verdict:
    """The verdict with the verdict of these tests beyond the document, if there are any."""
    if not tests:
        return verdict
    try:
        return verdict.beside(judged(tests, frames, claim.quantifier, claim.needs, off_by=claim.built.off_in(frames)))
    except Untold as missing:
        return verdict.beside(untold(str(missing)))


COLUMNS = [
    "id", "by", "document", "statement", "quote", "quantifier", "outcome", "words", "says", "basis", "measured",
    "needs", "beyond", "remarks", "evidence", "names", "on_gpu", "fetched",
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
        Columns as in `COLUMNS`. outcome and basis are the two axes, words is the outcome with its numbers, and says the
        sentence with the decisive numbers. needs names the evidence that would tell, if the outcome is "cannot be
        told". beyond is the verdict on what the study adds, with its figures. names has the names of the evidence.
        on_gpu says whether a record is among the evidence, and fetched whether published code is.
    """
    claims = load_claims(document)
    if only is not None:
        unknown = sorted(set(only) - {claim.id for claim in claims})
        if unknown:
            raise ValueError(f"only: expected ids of claims, got {unknown}")
        claims = [claim for claim in claims if claim.id in set(only)]
    where = measurements.of_one_gpu(records)
    lines = (line.partition(": ") for line in provenance.contradictions(where.directory))
    refused = {name.rpartition("/")[2]: why for name, _, why in lines if name.startswith(f"{where.gpu}/")}
    find = cache(partial(find_evidence, given=given, records=where, compute=compute, refused=refused))
    rows = []
    for claim in claims:
        verdict, pieces = judge(claim, find, where.gpu)
        if not given:
            verdict = kept.instead(claim, verdict)
            compiled = dict.fromkeys(test.record for test in claim.test if claim.built.runs_in(test))
            elsewhere = [f"an {short(gpu)}" for gpu in builds.others(compiled, where)]
            said = followed("another build of the compiled code ran on ", elsewhere)
            verdict = verdict.with_text(verdict.measured, said)
        beyond = verdict.beyond
        rows.append(
            {
                "id": claim.id,
                "by": claim.by,
                "document": claim.document,
                "statement": claim.statement,
                "quote": claim.quote,
                "quantifier": str(claim.quantifier),
                "outcome": str(verdict.outcome),
                "words": verdict.words,
                "says": verdict.says,
                "basis": str(verdict.basis),
                "measured": verdict.measured,
                "needs": verdict.needs,
                "beyond": f"{beyond.words}: {beyond.measured or beyond.needs}" if beyond else "",
                "remarks": "; ".join(verdict.remarks),
                "evidence": "; ".join(f"{p.name}: {p.source}" for p in pieces),
                "names": tuple(p.name for p in pieces),
                "on_gpu": any(piece.measured for piece in pieces),
                "fetched": kept.FETCHED in claim.needs and not claim.lost,
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


REVIEWERS = "findings of reviewers"


def tally(ledgers: Mapping[str, pd.DataFrame], axis: str, names: Sequence[str]) -> pd.DataFrame:
    """The number of claims of each outcome or basis, in words: a row for the authors of a document, one for reviewers.

    Args:
        ledgers: GPU -> ledger, as ``by_gpu`` returns them.
        axis: ``"outcome"`` or ``"basis"``, whose values are ``names``.

    Returns:
        A column for each name. Where GPUs differ, an entry has a number for each: ``"4 / 5"``.
    """
    found = {}
    for gpu, rows in ledgers.items():
        who = rows.document.where(rows.by == AUTHOR, REVIEWERS)
        order = [*dict.fromkeys(who[who != REVIEWERS]), REVIEWERS]
        found[gpu] = pd.crosstab(who, rows[axis]).reindex(index=order, columns=names, fill_value=0)
    index = next(iter(found.values())).index.rename(f"claims, on an {' / '.join(map(short, ledgers))}")
    return pd.DataFrame(
        {
            name: [side_by_side(str(each.at[who, name] or "") for each in found.values()) for who in index]
            for name in names
        },
        index,
    )


def side_by_side(words: Iterable[str]) -> str:
    """The words once if they are the same on all GPUs, else for each GPU: ``"4 / 5"``."""
    words = list(words)
    return words[0] if len(set(words)) == 1 else " / ".join(word or "–" for word in words)


def short(gpu: str) -> str:
    """``"nvidia-h100-80gb-hbm3"`` -> ``"H100"``."""
    return gpu.removeprefix("nvidia-").split("-")[0].upper()


def counts(ledger: pd.DataFrame, axis: str) -> str:
    """The number of claims of each outcome or basis, the largest number first, in words.

    Args:
        axis: ``"outcome"`` or ``"basis"``.
    """
    return ", ".join(f"{name} {count}" for name, count in ledger[axis].value_counts().items())
