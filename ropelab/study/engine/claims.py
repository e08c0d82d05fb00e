"""Read the documents and their claims.

A document is one file ``data/claims/<key>.toml``, one module, whose name the file states, and one notebook. A claim
that compares times or counts has its tests in the file (`ropelab.study.engine.comparisons`). A claim whose document's
protocol nobody has run has tests beyond the document alone. The module holds what data cannot say:

- a rule for every other claim, and remarks (`ropelab.study.engine.ledger`); a document may have none
- the evidence that a CPU can compute (`ropelab.study.engine.computed`), if there is any
- the measurements of its records, ``STUDIES``

In a package these stand in the modules ``rules``, ``evidence`` and ``studies``.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from ropelab.bench.records import slug
from ropelab.study.engine.builds import Built
from ropelab.study.engine.comparisons import DOCUMENT, LIMITS, Comparison
from ropelab.study.engine.computed import Evidence
from ropelab.study.engine.verdict import Basis, Quantifier

CLAIMS = Path(__file__).resolve().parents[3] / "data" / "claims"
TABLES = CLAIMS.parent / "documents"
REQUIRED = {"id", "by", "statement", "quote", "quantifier", "basis", "needs"}
OPTIONAL = {"says", "matters", "gpu", "lost", "weak", "test", "beyond", "remarks"}
AUTHOR, REVIEWER = "author", "reviewer"


@dataclass(frozen=True)
class Claim:
    """One claim of a document.

    Attributes:
        id, document: the id of the claim, and the name of its document.
        by: `AUTHOR`, or `REVIEWER` for the finding of a reviewer.
        statement: the claim in our words.
        quote: the claim in the document's words, shortened.
        quantifier: the cells that the claim speaks of; it decides whether one counterexample ends the claim.
        basis: the kind of evidence that a test of the claim has.
        needs: the evidence that a test of the claim needs.
        says: the sentence that names the decisive numbers, with placeholders (`ropelab.study.engine.decisive`).
        matters: why an engineer should care; "" for a claim that a chapter shows folded.
        gpu: the GPU that the document names for the claim; "" where it names none, so that every GPU counts.
        lost: the code of the claim that cannot be had; "" where the study has all code.
        weak: why the evidence is weak; "" where it is not. The report says it beside the verdict.
        test, beyond: the tests of the claim as the document has it, and the tests that the study adds.
        built: the contenders of the document that this project compiled.
        remarks: further facts for the reader.
    """

    id: str
    by: str
    document: str
    statement: str
    quote: str
    quantifier: Quantifier
    basis: Basis
    needs: str
    says: str = ""
    matters: str = ""
    gpu: str = ""
    lost: str = ""
    weak: str = ""
    test: tuple[Comparison, ...] = ()
    beyond: tuple[Comparison, ...] = ()
    built: Built = Built()
    remarks: tuple[str, ...] = ()

    def is_of(self, gpu: str | None) -> bool:
        """Whether times on this GPU (a name as `records.gpus` has it) can decide the claim; None stands for any GPU."""
        return not self.gpu or gpu is None or gpu.startswith(slug(self.gpu))

    @property
    def numbers(self) -> list[str]:
        """The numbers and versions that the quotation prints, in order: ``"3,072"`` is ``"3072"``."""
        return [number.replace(",", "") for number in re.findall(r"\d+(?:[.,]\d+)*", self.quote)]


@dataclass(frozen=True)
class Document:
    """A document that makes claims.

    Attributes:
        key: the name of its file.
        name: its own name.
        package: the module, or the package, that holds its code.
        url: its page; "" where the file names none.
        page: the name and the SHA-256 of the text of its page, as it was read.
        entries: the claims as the file states them.
        defaults: the keys of every test of the document that a test does not state.
        built: the contenders that this project compiled, as the file states them.
        unclaimed: statements of the document that the study does not judge: each a quotation and the reason.
        tables: evidence that somebody read and typed: name, file in ``data/documents`` or rows, and source in words.
        paragraphs: each paragraph of the document as it begins -> the claims that it makes, or why it makes none.
        verdict: the answer to the document in a few sentences; ``{SG-04}`` stands for the sentence of that claim.
    """

    key: str
    name: str
    package: str
    entries: tuple[Mapping[str, Any], ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    built: Mapping[str, Any] = field(default_factory=dict)
    unclaimed: tuple[tuple[str, str], ...] = ()
    tables: tuple[Mapping[str, Any], ...] = ()
    paragraphs: Mapping[str, list[str] | str] = field(default_factory=dict)
    url: str = ""
    page: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""

    def modules(self, *names: str) -> list[ModuleType]:
        """The document's module, or those of these names in its package: ``evidence``, ``rules`` or ``studies``."""
        whole = importlib.import_module(self.package)
        if not hasattr(whole, "__path__"):
            return [whole]
        parts = [f"{self.package}.{name}" for name in names]
        return [importlib.import_module(part) for part in parts if importlib.util.find_spec(part)]

    def register(self) -> None:
        """Import the rules and the computed evidence of the document, which register themselves."""
        self.modules("evidence", "rules")

    @property
    def claims(self) -> list[Claim]:
        """The claims, in the order of the file."""
        built = Built.read(self.built, self.defaults)
        return [_claim(self.name, entry, self.defaults, built) for entry in self.entries]


def _claim(document: str, entry: Mapping[str, Any], defaults: Mapping[str, Any], built: Built) -> Claim:
    first = {**defaults, **entry.get("test", [{}])[0]}

    def read(kind: str) -> tuple[Comparison, ...]:
        return tuple(Comparison.read(entry["id"], _like(first, defaults, table)) for table in entry.get(kind, ()))

    known = {"quantifier": Quantifier(entry["quantifier"]), "basis": Basis[entry["basis"].upper()]}
    found = {**entry, **known, "remarks": tuple(entry.get("remarks", ()))}
    if wrong := [test.what or test.record for test in read("test") if test.protocol != DOCUMENT]:
        raise ValueError(
            f"{entry['id']}: expected the document's protocol in a test that decides, got another: {wrong}"
        )
    return Claim(document=document, built=built, **{**found, "test": read("test"), "beyond": read("beyond")})


def _like(first: Mapping[str, Any], defaults: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a test. A table without a record takes what it does not state from its claim's first test."""
    base = defaults if "record" in table else first
    dropped = {*LIMITS, "what"} if table.keys() & {*LIMITS} else {"what"}
    dropped |= {"cells"} if "where" in table or "over" in table else set()
    return {**{key: value for key, value in base.items() if key not in dropped}, **table}


def documents(folder: Path | None = None) -> list[Document]:
    """Every document of ``folder`` (by default `CLAIMS`), in the order of the file names.

    Raises:
        ValueError: a file or a claim lacks a key, or has one that nothing reads.
    """
    found = []
    for path in sorted((folder or CLAIMS).glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if missing := {"document", "package", "claim"} - content.keys():
            raise ValueError(f"{path.name}: expected document, package and claims; missing: {sorted(missing)}")
        for entry in content["claim"]:
            if not REQUIRED <= entry.keys() <= REQUIRED | OPTIONAL or entry["by"] not in (AUTHOR, REVIEWER):
                raise ValueError(
                    f"{path.name}: {entry.get('id')}: expected {sorted(REQUIRED)}, perhaps {sorted(OPTIONAL)}, and by "
                    f"{AUTHOR} or {REVIEWER}; got {sorted(entry)}, by {entry.get('by')}"
                )
        unclaimed = tuple((entry["quote"], entry["reason"]) for entry in content.get("unclaimed", ()))
        found.append(
            Document(
                path.stem, content["document"], content["package"], tuple(content["claim"]),
                content.get("defaults", {}), content.get("built", {}), unclaimed, tuple(content.get("table", ())),
                content.get("paragraphs", {}), content.get("url", ""),
                content.get("page", {}), content.get("verdict", ""),
            )
        )  # fmt: skip
    return found


def typed(name: str) -> Evidence | None:
    """The table of that name that the file of a document names; None where there is none."""
    if name not in (tables := _tables()):
        return None
    table = tables[name]
    frame = pd.DataFrame(table["rows"]) if "rows" in table else pd.read_csv(TABLES / table["file"])
    return Evidence(name, frame, table["source"])


@cache
def _tables() -> dict[str, Mapping[str, Any]]:
    return {table["name"]: table for document in documents() for table in document.tables}


def load_claims(document: str | None = None, folder: Path | None = None) -> list[Claim]:
    """The claims of one document (the name of its file) or of all; the rules that judge them are imported."""
    known = {found.key: found for found in documents(folder)}
    if document is not None and document not in known:
        raise ValueError(f"document: expected one of {list(known)}, got {document!r}")
    claims = []
    for found in known.values() if document is None else [known[document]]:
        found.register()
        claims += found.claims
    return claims
