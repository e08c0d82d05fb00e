"""Check that the quotations of the claims stand in the documents.

The documents are public pages and no part of this repository. The file of a document has the SHA-256 of its page as it
was read (``page``), and ``data/documents/quotations.csv`` that of each quotation that was found in it. So a changed
quotation is found without the pages.

    python -m ropelab.study.engine.quotations FOLDER

writes the quotations that it finds in the pages of the folder, and names each that is in no page.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from ropelab.bench import whole_file
from ropelab.bench.records import ROOT
from ropelab.study.engine.claims import Document, documents

QUOTATIONS = ROOT / "data" / "documents" / "quotations.csv"


def quoted(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the id of each claim, or ``"unclaimed"``, with each passage that it quotes."""
    for claim in document.claims:
        for passage in passages(claim.quote):
            yield claim.id, passage
    for quote, _ in document.unclaimed:
        yield "unclaimed", quote


def passages(quote: str) -> list[str]:
    """The passages in quotation marks, which may have quotation marks within; words around them are ours."""
    ends = r'(?=\W*$|[;,.] |: "|,? (?:and|to|of|eager|compiled|before|then)\b| \()'
    return [_plain(passage) for passage in re.findall(rf'(?:^|(?<=[\s;,:]))"(.+?)"{ends}', quote)]


def missing(document: Document, table: pd.DataFrame) -> list[str]:
    """A line for each quotation of the document that the table of `QUOTATIONS` lacks."""
    known = set(table[table.document == document.key].sha256)
    return [f"{one}: {passage!r} is no quotation" for one, passage in quoted(document) if _digest(passage) not in known]


def found(document: Document, text: str) -> tuple[list[dict], list[str]]:
    """A row for each quotation that is in the page, and a line for each that is not."""
    text, rows, lines = _plain(text), [], []
    for one, passage in quoted(document):
        if _plain(passage) in text:
            rows.append({"document": document.key, "claim": one, "sha256": _digest(passage)})
        else:
            lines.append(f"{one}: {passage!r} is not in the page")
    return rows, lines


def check(folder: Path) -> tuple[pd.DataFrame, list[str]]:
    """All quotations that are in the pages of a folder, and a line for each page or quotation that is wrong."""
    rows, lines = [], []
    for document in documents():
        content = (folder / document.page["name"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != document.page["sha256"]:
            lines.append(f"{document.page['name']}: another page than that of {document.key}.toml")
        there, wrong = found(document, content.decode())
        rows, lines = rows + there, lines + wrong
    return pd.DataFrame(rows), lines


def _plain(text: str) -> str:
    """The text with single spaces, and with the plain forms of dashes and apostrophes."""
    return re.sub(r"\s+", " ", text.translate({0x2011: "-", 0x2019: "'"})).strip()


def _digest(passage: str) -> str:
    return hashlib.sha256(_plain(passage).encode()).hexdigest()[:16]


if __name__ == "__main__":
    table, wrong = check(Path(sys.argv[1]))
    whole_file.write(QUOTATIONS, table.to_csv(index=False))
    print("\n".join(wrong))
    sys.exit(bool(wrong))
