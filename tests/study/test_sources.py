"""The facts about public files: complete, and what is computed from them."""

import re

import pytest

from ropelab.study.engine import sources

DOCUMENTS = ("deepspeed", "fairseq2", "sglang", "transformer_engine")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_fact_says_where_it_was_read(document):
    found = sources.facts("test", document) + sources.facts("dispatch", document)
    assert found
    for entry in found:
        assert entry["path"] and entry["version"] and entry["read_in"]
        if entry["read_in"] == "the file":
            assert re.fullmatch("[0-9a-f]{40}", entry["commit"]), "a file is one of a commit"
            assert sources.where(entry) == f"{entry['commit'][:7]}, the file"
