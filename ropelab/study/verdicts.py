"""Claims, the evidence for them, and verdicts computed from that evidence.

A document's claims lie in ``data/claims/<document>.toml``: what is claimed (in our words), the published
figure, and what a test would need. That file names the module that holds the document's rules, and the one that
measures its records. A rule is a function of named evidence, each a :class:`pandas.DataFrame`, and returns a
:class:`Verdict`; nothing else can set one.

Evidence is found by name, in this order: what the caller hands to :func:`ledger`; a computation registered
with :func:`evidence`; the committed record of that name under ``data/measurements/``. A rule whose evidence
is nowhere to be found yields "not testable here" with what it would need; a record that cannot be believed
(`ropelab.bench.record_checks`) is no evidence either, and the verdict says why.

Records are those of one GPU in one ledger; ``by_gpu`` has a ledger for each, and ``disagreements`` what differs.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path

import pandas as pd

from ropelab.bench import records as measurements
from ropelab.bench.records import MEASUREMENTS, Selection, Where

CLAIMS = Path(__file__).resolve().parents[2] / "data" / "claims"


class Status(StrEnum):
    """What the evidence says about a claim."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    CORRECTED = "confirmed with a correction"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True)
class Document:
    """A document that makes claims.

    Attributes:
        key: the name of its file.
        name: its own.
        rules: the module that judges the claims.
        studies: the module whose ``STUDIES`` measure the records that only this document needs.
        entries: the claims as the file has them.
    """

    key: str
    name: str
    rules: str
    studies: str
    entries: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Claim:
    """One claim of a document: ``published`` is its figure as printed, ``needs`` what a test of it takes."""

    id: str
    document: str
    statement: str
    published: str
    needs: str


@dataclass(frozen=True)
class Verdict:
    """A status, the measured figure it rests on, and the correction, the reason or the missing means."""

    status: Status
    measured: str
    note: str = ""

    @classmethod
    def confirmed(cls, measured: str) -> Verdict:
        return cls(Status.CONFIRMED, measured)

    @classmethod
    def refuted(cls, measured: str, reason: str) -> Verdict:
        return cls(Status.REFUTED, measured, reason)

    @classmethod
    def corrected(cls, measured: str, correction: str) -> Verdict:
        return cls(Status.CORRECTED, measured, correction)

    @classmethod
    def not_testable(cls, needs: str) -> Verdict:
        return cls(Status.NOT_TESTABLE, "", needs)

    def of_model(self, correction: str) -> Verdict:
        """The same where the evidence is code of ours that stands in for what the claim speaks of.

        A model does what it was written to do: it shows that the claim can hold, so what it confirms is confirmed with
        the correction that says so.
        """
        if self.status != Status.CONFIRMED:
            return Verdict(self.status, self.measured, "; ".join(filter(None, (self.note, correction))))
        return Verdict.corrected(self.measured, correction)


@dataclass(frozen=True)
class Evidence:
    """A data frame and where it came from, in words fit for the report; ``measured``: it is the record of a GPU."""

    name: str
    frame: pd.DataFrame
    source: str
    measured: bool = False


def agrees(measured, stated, tolerance: float, *, at_least: bool = False):
    """Whether a measured number is the stated one, elementwise: the same rule for every claim with a number.

    Args:
        tolerance: relative. A ratio of times may be off by it in either direction.
        at_least: for claims that say "at least", or "up to" of a largest value: more is right as well.
    """
    ratio = measured / stated
    return (ratio >= 1 - tolerance) & (at_least | (ratio <= 1 + tolerance))


class Unavailable(RuntimeError):
    """Raised by an evidence computation that cannot run on this machine; the record is read instead."""


@dataclass(frozen=True)
class _Rule:
    judge: Callable[..., Verdict]
    evidence: tuple[str, ...]


_RULES: dict[str, _Rule] = {}
_COMPUTATIONS: dict[str, tuple[Callable[[], pd.DataFrame], str]] = {}


def rule(claim_id: str, *evidence_names: str) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Register a function of the named frames, in that order, as the rule of a claim."""

    def register(judge: Callable[..., Verdict]) -> Callable[..., Verdict]:
        _RULES[claim_id] = _Rule(judge, evidence_names)
        return judge

    return register


def evidence(name: str, how: str) -> Callable[[Callable[[], pd.DataFrame]], Callable[[], pd.DataFrame]]:
    """Register a computation as evidence: it runs in seconds on a CPU, or raises :class:`Unavailable`.

    ``how`` tells the reader where it comes from; a frame that knows better says so in
    ``frame.attrs["source"]``.
    """

    def register(compute: Callable[[], pd.DataFrame]) -> Callable[[], pd.DataFrame]:
        _COMPUTATIONS[name] = (compute, how)
        return compute

    return register


def documents(folder: Path = CLAIMS) -> list[Document]:
    """Every document of ``data/claims``, by name of the file."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if missing := {"document", "rules", "studies", "claim"} - content.keys():
            raise ValueError(f"{path.name}: expected document, rules, studies and claims; missing: {sorted(missing)}")
        about = (content[name] for name in ("document", "rules", "studies"))
        found.append(Document(path.stem, *about, tuple(content["claim"])))
    return found


def load_claims(document: str | None = None, folder: Path = CLAIMS) -> list[Claim]:
    """Claims of one document (the name of its file), or of all, and import the rules that judge them."""
    known = {found.key: found for found in documents(folder)}
    if document is not None and document not in known:
        raise ValueError(f"document: expected one of {list(known)}, got {document!r}")
    claims = []
    for found in known.values() if document is None else [known[document]]:
        importlib.import_module(found.rules)
        claims += [Claim(document=found.name, **entry) for entry in found.entries]
    return claims


def find_evidence(
    name: str,
    given: Mapping[str, pd.DataFrame] | None = None,
    records: Where = MEASUREMENTS,
    *,
    compute: Callable[[str], Evidence | None] | None = None,
) -> Evidence | None:
    """The evidence of that name: given, computed now, or recorded under ``records``; else None.

    Args:
        compute: in place of computing it now.

    Raises:
        Damaged: there is a record, but it cannot be believed.
    """
    if given is not None and name in given:
        return Evidence(name, given[name], "given by the caller")
    if found := (compute or _computed)(name):
        return found
    try:
        record = measurements.load(name, records)
    except measurements.Missing:
        return None
    if record.provenance.get("parameters", {}).get("smoke"):
        raise measurements.Damaged(f"{name}: expected a measurement, got a trial run (--smoke)")
    return Evidence(name, record.frame, f"record, {record.footer}", measured=True)


def _computed(name: str) -> Evidence | None:
    """The evidence of that name, computed now; None where that cannot be."""
    if name not in _COMPUTATIONS:
        return None
    compute, how = _COMPUTATIONS[name]
    try:
        frame = compute()
    except Unavailable:
        return None
    return Evidence(name, frame, frame.attrs.get("source", how))


def judge(claim: Claim, find: Callable[[str], Evidence | None] = find_evidence) -> tuple[Verdict, list[Evidence]]:
    """Verdict of one claim and the evidence it rests on."""
    if claim.id not in _RULES:
        raise ValueError(f"claim {claim.id}: no rule is registered, expected one in the module its file names")
    found, missing, damaged = [], [], []
    for name in _RULES[claim.id].evidence:
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
        return Verdict.not_testable(f"records that can be believed ({'; '.join(damaged)})"), []
    if missing:
        return Verdict.not_testable(f"{claim.needs} (missing: {', '.join(missing)})"), []
    return _RULES[claim.id].judge(*(piece.frame for piece in found)), found


COLUMNS = ["id", "document", "statement", "published", "measured", "verdict", "note", "evidence", "on_gpu"]


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
        records: where the records are; where no GPU is chosen, those of the first of `records.gpus`.
        compute: as for ``find_evidence``.

    Returns:
        Columns id, document, statement, published, measured, verdict, note, evidence, and on_gpu: whether a record is
        among the evidence.
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
                "published": claim.published,
                "measured": verdict.measured,
                "verdict": str(verdict.status),
                "note": verdict.note,
                "evidence": "; ".join(f"{p.name}: {p.source}" for p in pieces),
                "on_gpu": any(piece.measured for piece in pieces),
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def by_gpu(directory: Path = MEASUREMENTS, *, document: str | None = None) -> dict[str, pd.DataFrame]:
    """GPU (as `records.gpus` names and orders them) -> its ledger."""
    compute = cache(_computed)  # what no GPU is needed for is the same for all
    return {
        gpu: ledger(document=document, records=Selection(Path(directory), gpu), compute=compute)
        for gpu in measurements.gpus(directory)
    }


def disagreements(ledgers: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The claims whose verdicts differ between GPUs on which both were measured.

    Args:
        ledgers: as of ``by_gpu``.

    Returns:
        A row for each such claim: id, document, statement, and a column for each GPU: the verdict and what was
        measured; "" where the claim is not measured there.
    """
    said = {}
    for gpu, rows in ledgers.items():
        rows = rows[rows.on_gpu].set_index("id")
        said[gpu] = pd.DataFrame({"verdict": rows.verdict, "words": rows.verdict + ": " + rows.measured})
    verdicts = pd.DataFrame({gpu: found.verdict for gpu, found in said.items()})
    differing = verdicts.index[verdicts.nunique(axis=1) > 1]
    words = pd.DataFrame({gpu: found.words for gpu, found in said.items()}).reindex(differing).fillna("")
    if not len(ledgers):
        return pd.DataFrame(columns=["id", "document", "statement"])
    about = next(iter(ledgers.values())).set_index("id")[["document", "statement"]]
    return about.join(words, how="right").reset_index(names="id").sort_values("id", ignore_index=True)
