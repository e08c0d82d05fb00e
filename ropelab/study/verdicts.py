"""Claims, the evidence for them, and verdicts computed from that evidence.

A document's claims lie in ``data/claims/<document>.toml``: what is claimed (in our words), the published
figure, and what a test would need. That file names the module that holds the document's rules, and the one that
measures its records. A rule is a function of named evidence, each a :class:`pandas.DataFrame`, and returns a
:class:`Verdict`; nothing else can set one.

Evidence is found by name, in this order: what the caller hands to :func:`ledger`; a computation registered
with :func:`evidence`; the committed record of that name under ``data/measurements/``. A rule whose evidence
is nowhere to be found yields "not testable here" with what it would need.
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

from ropelab.bench.records import MEASUREMENTS, load

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
    """A data frame and where it came from, in words fit for the report."""

    name: str
    frame: pd.DataFrame
    source: str


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
    name: str, given: Mapping[str, pd.DataFrame] | None = None, records: Path | None = None
) -> Evidence | None:
    """The evidence of that name: given, computed now, or recorded under ``records``; else None."""
    if given is not None and name in given:
        return Evidence(name, given[name], "given by the caller")
    if name in _COMPUTATIONS:
        compute, how = _COMPUTATIONS[name]
        try:
            frame = compute()
            return Evidence(name, frame, frame.attrs.get("source", how))
        except Unavailable:
            pass
    try:
        record = load(name, records or MEASUREMENTS)
    except FileNotFoundError:
        return None
    return Evidence(name, record.frame, f"record, {record.footer}")


def judge(claim: Claim, find: Callable[[str], Evidence | None] = find_evidence) -> tuple[Verdict, list[Evidence]]:
    """Verdict of one claim and the evidence it rests on."""
    if claim.id not in _RULES:
        raise ValueError(f"claim {claim.id}: no rule is registered, expected one in the module its file names")
    names = _RULES[claim.id].evidence
    found = {name: find(name) for name in names}
    missing = [name for name in names if found[name] is None or found[name].frame.empty]
    if missing:
        return Verdict.not_testable(f"{claim.needs} (missing: {', '.join(missing)})"), []
    return _RULES[claim.id].judge(*(piece.frame for piece in found.values())), list(found.values())


def ledger(
    given: Mapping[str, pd.DataFrame] | None = None,
    *,
    document: str | None = None,
    only: Iterable[str] | None = None,
    records: Path | None = None,
) -> pd.DataFrame:
    """All claims with their verdicts, one row each.

    Args:
        given: evidence by name, used in place of computations and records.
        document: one document's claims (``"deepspeed"``); all documents when None.
        only: ids of the claims to judge; all when None.
        records: directory of the records; the committed ones when None.

    Returns:
        Columns id, document, statement, published, measured, verdict, note, evidence.
    """
    claims = load_claims(document)
    if only is not None:
        unknown = sorted(set(only) - {claim.id for claim in claims})
        if unknown:
            raise ValueError(f"only: expected ids of claims, got {unknown}")
        claims = [claim for claim in claims if claim.id in set(only)]
    find = cache(partial(find_evidence, given=given, records=records))
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
            }
        )
    columns = ["id", "document", "statement", "published", "measured", "verdict", "note", "evidence"]
    return pd.DataFrame(rows, columns=columns)
