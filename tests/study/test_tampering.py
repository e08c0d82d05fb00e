"""A change of a record's table keeps it from being read, and the report says which records are old and which bad."""

import json
import re
import shutil
from contextlib import contextmanager

import pytest

from ropelab.bench import records
from ropelab.study.engine.ledger import COLUMNS
from ropelab.study.site import ledgers, report

DATA = records.ROOT / "data"
TABLES = [path.relative_to(DATA).as_posix() for path in DATA.glob("measurements/*/*.csv")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A copy of ``data``; each test leaves it as it was."""
    folder = tmp_path_factory.mktemp("evidence") / "data"
    shutil.copytree(DATA, folder)
    return folder


@contextmanager
def tampered(path, text):
    """The file with another text."""
    before = path.read_bytes()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_bytes(before)


def with_another_digit(text):
    """The text with another last letter or digit."""
    return re.sub(r"(\w)(\W*)$", lambda last: ("2" if last[1] == "1" else "1") + last[2], text)


def test_a_change_of_any_record_keeps_it_from_being_read(data):
    for path in (data / name for name in TABLES):
        with tampered(path, with_another_digit(path.read_text())), pytest.raises(records.Damaged, match=path.stem):
            records.load(path.stem, records.Selection(data / "measurements", path.parent.name))


def test_the_report_names_old_and_bad_records_and_shows_the_ledger(data, tmp_path, monkeypatch):
    row = dict.fromkeys(COLUMNS, "")
    monkeypatch.setattr(
        report, "ledger", lambda document, where: ledgers.Ledger(document.key, "", [row | {"id": "AA-01"}])
    )
    page, path = tmp_path / "index.html", data / "measurements" / "nvidia-h200" / "qk_norm.json"
    where, about = records.Selection(data / "measurements", "nvidia-h200"), json.loads(path.read_text())
    kernels = dict.fromkeys(about["kernels"], "0" * 16)
    pages = {}
    monkeypatch.setattr(report, "_build", lambda files, out, smoke: pages.update(files) or [])
    with tampered(path, json.dumps(about | {"kernels": kernels})):
        assert report.write(page, [], where=where) == []
    assert ":::{claim} AA-01" in pages["ledger.md"]
    text = pages["records.md"]
    assert re.search(r":::{record} qk_norm\n.*Changed since: .*kernels/\w+_triton\.py", text)
    with tampered(path, "{}"):
        (line,) = report.write(page, [], where=where)
    assert "qk_norm" in line and line in pages["index.md"]
