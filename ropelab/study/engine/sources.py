"""Read facts about the public files of claims (``data/sources.toml``), and the cases of their tests.

    python -m ropelab.study.engine.sources

reads the facts that have a pattern from the fetched files (``python -m ropelab.study peers``), and writes them into
``data/documents/facts.csv`` with the line, the pattern and the checksum of the file.
"""

import hashlib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache

import pandas as pd

from ropelab.bench import packages, whole_file
from ropelab.bench.records import ROOT

SOURCES = ROOT / "data" / "sources.toml"
FACTS = ROOT / "data" / "documents" / "facts.csv"
READ = ["repository", "commit", "path", "sha256", "fact", "pattern", "line", "value"]
"""The columns of `FACTS`; line 0 and no value where a pattern is not in the file."""


@cache
def _content() -> Mapping[str, list[dict]]:
    return tomllib.loads(SOURCES.read_text(encoding="utf-8"))


def facts(kind: str, document: str) -> list[dict]:
    """The entries of a kind (``"test"``, ``"dispatch"``, ``"caller"``) about a document, which its key names.

    An entry with patterns has what they found under ``"found"``: fact -> text, ``""`` where the file lacks the pattern.
    """
    table = pd.read_csv(FACTS, dtype=str, keep_default_na=False)

    def found(entry: dict) -> dict:
        rows = table[(table["commit"] == entry["commit"]) & (table["path"] == entry["path"])]
        return entry | {"found": dict(zip(rows["fact"], rows["value"], strict=True))}

    entries = (entry for entry in _content()[kind] if entry["document"] == document)
    return [found(entry) if "reads" in entry else entry for entry in entries]


def read() -> pd.DataFrame:
    """The facts that have a pattern, read from the fetched files: a row for each, columns `READ`.

    Raises:
        NotInstalled: a file is not there, or it was changed.
    """
    rows = []
    for entry in (entry for entries in _content().values() for entry in entries if "reads" in entry):
        file = packages.file_at(entry["repository"], entry["commit"], entry["path"])
        text, digest = file.read_text(encoding="utf-8"), hashlib.sha256(file.read_bytes()).hexdigest()
        for fact, pattern in entry["reads"].items():
            match = re.search(pattern, text)
            line, value = (text.count("\n", 0, match.start(1)) + 1, match[1].strip()) if match else (0, "")
            rows.append((entry["repository"], entry["commit"], entry["path"], digest, fact, pattern, line, value))
    return pd.DataFrame(rows, columns=READ)


def cases(test: Mapping) -> Iterator[dict]:
    """Every combination of a test's parameters: name -> value. The combinations that the test skips are among them."""
    parameters = test["parameters"]
    for values in itertools.product(*parameters.values()):
        yield dict(zip(parameters, values, strict=True))


def where(entry: Mapping) -> str:
    """The commit of an entry and the part that was read: ``"09867ff, the file"``."""
    return ", ".join(filter(None, (entry.get("commit", "")[:7], entry["read_in"])))


if __name__ == "__main__":
    whole_file.write(FACTS, read().to_csv(index=False))
