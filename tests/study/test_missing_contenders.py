"""A contender that came later than a record leaves a gap in figures, and a verdict that cannot be told."""

import re
from functools import cache, partial

import pytest

from ropelab.bench import records, rows
from ropelab.study.engine import ledger
from ropelab.study.engine.claims import load_claims
from ropelab.study.engine.computed import computed
from ropelab.study.engine.verdict import Outcome
from ropelab.study.site import summary
from ropelab.study.topics.performance import shortfalls
from tests.site.cells import cells_of, run

WHERE = records.Selection(gpu=records.REFERENCE)
NAMES = "contender", "way", "method", "version", "operator"
"""The columns that name a contender; a record has the first of them that its table has."""
CLAIMS = load_claims(None)
COMPUTED, READ = cache(computed), cache(records._read)


def contenders():
    """The study, the column and the name of each contender of each record."""
    for path in sorted((WHERE.directory / WHERE.gpu).glob("*.json")):
        frame = records.load(path.stem, WHERE).frame
        if column := next((name for name in NAMES if name in frame), None):
            yield from ((path.stem, column, name) for name in frame[column].dropna().unique())


STUDIES: dict[str, list[tuple[str, str]]] = {}
for one, *contender in contenders():
    STUDIES.setdefault(one, []).append(tuple(contender))


@pytest.fixture
def without(monkeypatch):
    """A function that takes a contender out of the record of a study."""

    def drop(study, column, name):
        def lacking(path):
            record = READ(path)
            if path.stem != study:
                return record
            frame = record.frame[record.frame[column] != name].reset_index(drop=True)
            return records.Record(record.study, frame, record.provenance)

        monkeypatch.setattr(records, "_read", lacking)

    return drop


def evidence_of(claim):
    rule = ledger._RULES.get(claim.id)
    names = rule.evidence if rule else ledger._needed_by(claim.test)
    return {*names, *ledger._needed_by(claim.beyond), *ledger._REMARKS.get(claim.id, ((), ()))[1]}


@pytest.mark.parametrize("study", STUDIES)
def test_claims_are_judged_without_any_contender(study, without):
    claims = [claim for claim in CLAIMS if study in evidence_of(claim)]
    if not claims:
        pytest.skip("no claim rests on the record")
    for column, name in STUDIES[study]:
        without(study, column, name)
        find = cache(partial(ledger.find_evidence, records=WHERE, compute=COMPUTED))
        for claim in claims:
            verdict, _ = ledger.judge(claim, find, WHERE.gpu)
            assert verdict.outcome != Outcome.UNTOLD or verdict.needs, (claim.id, name)


CHAPTERS = {
    "11": ("te_kernels", "te_layer"),
    "12": ("fairseq2_grid", "fairseq2_inductor"),
    "13": ("sglang_protocols", "sglang_second_grid", "sglang_low_tokens", "sglang_vector_widths"),
    "14": ("deepspeed_correctness", "deepspeed_launches", "deepspeed_callers", "deepspeed_table"),
}
"""A chapter -> the records that its cells draw."""
UNTIMED = "ledger", "bits-live", "flags-table", "shapes-table"
"""Cells that draw no times and take seconds."""
READS = [
    pytest.param(chapter, study, *found, marks=[pytest.mark.full] if number else [], id=f"{chapter}-{study}-{found[1]}")
    for chapter, studies in CHAPTERS.items()
    for study in studies
    for number, found in enumerate(STUDIES.get(study, ()))
]


@pytest.mark.parametrize("chapter, study, column, name", READS)
def test_cells_leave_a_gap_or_say_who_is_missing(chapter, study, column, name, without, monkeypatch):
    without(study, column, name)
    told = run(monkeypatch, chapter, *(cell for cell in cells_of(chapter) if cell not in UNTIMED)).told
    assert told and "nan" not in told


SHOWN = [
    pytest.param(study, *found, marks=[pytest.mark.full] if number > 2 else [], id=f"{study}-{found[1]}")
    for study in (*shortfalls.STUDIES, "projection", "paged_cache", "host", "model_heads", "fairseq2_grid")
    for number, found in enumerate(STUDIES.get(study, ()))
]


@pytest.mark.parametrize("study, column, name", SHOWN)
def test_readme_is_written_without_a_peer_and_refuses_a_record_without_ropelab(study, column, name, without):
    without(study, column, name)
    try:
        texts = [*summary.tables().values(), *summary.figures().values()]
    except rows.NotMeasured as lacking:
        assert "ropelab" in name and name in str(lacking)
    else:
        assert not any(re.search(r"\bnan\b", text) for text in texts)
