"""Read facts about the public files of claims (``data/sources.toml``), and the cases of their tests."""

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache

from ropelab.bench.records import ROOT

SOURCES = ROOT / "data" / "sources.toml"


@cache
def _content() -> Mapping[str, list[dict]]:
    return tomllib.loads(SOURCES.read_text(encoding="utf-8"))


def facts(kind: str, document: str) -> list[dict]:
    """The entries of a kind (``"test"``, ``"dispatch"``, ``"caller"``) about a document, which its key names."""
    return [entry for entry in _content()[kind] if entry["document"] == document]


def cases(test: Mapping) -> Iterator[dict]:
    """Every combination of a test's parameters: name -> value. The combinations that the test skips are among them."""
    parameters = test["parameters"]
    for values in itertools.product(*parameters.values()):
        yield dict(zip(parameters, values, strict=True))


def where(entry: Mapping) -> str:
    """The commit of an entry and the part that was read: ``"09867ff, the file"``."""
    return ", ".join(filter(None, (entry.get("commit", "")[:7], entry["read_in"])))
