"""Read the documents and their claims.

A document is one file ``data/claims/<key>.toml`` and one package, whose name the file states. The package holds all
code for the document:

- ``rules``: a rule for every claim (`ropelab.study.engine.ledger.rule`), and evidence that a CPU can compute
- ``studies``: the measurements of its records, ``STUDIES``
- ``figures``: the drawings of its records, ``FIGURES``
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ropelab.study.engine.verdict import Quantifier

CLAIMS = Path(__file__).resolve().parents[3] / "data" / "claims"


@dataclass(frozen=True)
class Claim:
    """One claim of a document.

    Attributes:
        id, document: the id of the claim, and the name of its document.
        statement: the claim in our words.
        quote: the claim in the document's words, shortened.
        quantifier: the cells that the claim speaks of; it decides whether one counterexample ends the claim.
        needs: the evidence that a test of the claim needs.
    """

    id: str
    document: str
    statement: str
    quote: str
    quantifier: Quantifier
    needs: str

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
        package: the package that holds its code.
        entries: the claims as the file states them.
    """

    key: str
    name: str
    package: str
    entries: tuple[Mapping[str, str], ...]

    def module(self, name: str) -> ModuleType:
        """A module of the document's package: ``rules``, ``studies`` or ``figures``."""
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def claims(self) -> list[Claim]:
        """The claims, in the order of the file."""
        return [
            Claim(document=self.name, **{**entry, "quantifier": Quantifier(entry["quantifier"])})
            for entry in self.entries
        ]


def documents(folder: Path | None = None) -> list[Document]:
    """Every document of ``folder`` (by default `CLAIMS`), in the order of the file names.

    Raises:
        ValueError: a file or a claim lacks a key.
    """
    found = []
    for path in sorted((folder or CLAIMS).glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if missing := {"document", "package", "claim"} - content.keys():
            raise ValueError(f"{path.name}: expected document, package and claims; missing: {sorted(missing)}")
        expected = {"id", "statement", "quote", "quantifier", "needs"}
        for entry in content["claim"]:
            if entry.keys() != expected:
                raise ValueError(f"{path.name}: {entry.get('id')}: expected {sorted(expected)}, got {sorted(entry)}")
        found.append(Document(path.stem, content["document"], content["package"], tuple(content["claim"])))
    return found


def load_claims(document: str | None = None, folder: Path | None = None) -> list[Claim]:
    """The claims of one document (the name of its file) or of all; the rules that judge them are imported."""
    known = {found.key: found for found in documents(folder)}
    if document is not None and document not in known:
        raise ValueError(f"document: expected one of {list(known)}, got {document!r}")
    claims = []
    for found in known.values() if document is None else [known[document]]:
        found.module("rules")
        claims += found.claims
    return claims
