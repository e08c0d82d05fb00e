"""A change of a record's table keeps it from being read, and the report says which records are old and which bad."""

import json
import re
import shutil
from contextlib import contextmanager

import pandas as pd
import pytest

from ropelab.bench import records
from ropelab.study.plots import registry as figures
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


def with_another_number(text):
    """The text with its last number doubled; a text without a number gets another word."""
    if not re.search(r"[1-9]", text):
        return with_another_word(text)
    return with_another_last(r"[1-9]\d*", lambda number: str(2 * int(number)), text)


def with_another_word(text):
    """The text with a letter more in its last word."""
    return with_another_last(r"[A-Za-z]{2,}", lambda word: f"{word}x", text)


def with_another_last(pattern, change, text):
    *_, last = re.finditer(pattern, text)
    return f"{text[: last.start()]}{change(last[0])}{text[last.end() :]}"


def test_a_change_of_any_record_keeps_it_from_being_read(data):
    for path in (data / name for name in TABLES):
        with tampered(path, with_another_number(path.read_text())), pytest.raises(records.Damaged, match=path.stem):
            records.load(path.stem, records.Selection(data / "measurements", path.parent.name))


@pytest.mark.parametrize(
    "study, contender, factor",
    [
        ("sglang_diffusion", "second version (model)", 2.0),
        ("fairseq2_grid", "RE reference", 1.5),
        ("deepspeed_table", "torchembed", 1.5),
    ],
)
def test_times_of_one_contender(study, contender, factor, data):
    path = data / "measurements" / "nvidia-h200" / f"{study}.csv"
    frame = pd.read_csv(path)
    rows = frame.contender == contender
    assert rows.any()
    frame.loc[rows, ["median_us", "q20_us", "q80_us"]] *= factor
    with tampered(path, frame.to_csv(index=False)):
        with pytest.raises(records.Damaged, match=f"{study}.csv: .*describes another table"):
            records.load(study, records.Selection(data / "measurements", "nvidia-h200"))


def test_the_report_names_old_and_bad_records_and_shows_the_ledger(data, tmp_path, monkeypatch):
    row = dict.fromkeys(
        ("statement", "quote", "outcome", "words", "measured", "beyond", "basis", "needs", "by", "names"), ""
    )
    monkeypatch.setattr(figures, "all_figures", lambda: {"host_time": figures.FIGURES["host_time"]})
    monkeypatch.setattr(
        report, "ledger", lambda document, where: ledgers.Ledger(document.key, "", [row | {"id": "AA-01"}])
    )
    page, path = tmp_path / "index.html", data / "measurements" / "nvidia-h200" / "host.json"
    where, about = records.Selection(data / "measurements", "nvidia-h200"), json.loads(path.read_text())
    kernels = dict.fromkeys(about["kernels"], "0" * 16)
    with tampered(path, json.dumps(about | {"kernels": kernels})):
        assert report.write(page, [], where=where) == []
    assert '<dl id="AA-01">' in (tmp_path / "ledger.html").read_text()
    text = (tmp_path / "records.html").read_text()
    assert re.search(r'<tbody id="host">.*<td>host_time</td>.*kernels.rotate_triton._rotate_kernel', text, re.DOTALL)
    with tampered(path, "{}"):
        (line,) = report.write(page, [], where=where)
    assert "host_time is not drawn" in line and line in page.read_text()
