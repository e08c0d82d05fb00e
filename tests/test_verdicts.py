"""The machinery of claims and verdicts, on a document made up here; and that every claim's verdict is computed.

What changes a claim's evidence is in the file of its document, ``tests/test_<document>.py``, as ``CASES``: tuples of
a claim, the evidence given (its name and a function that makes it, or several of them as a dictionary) and the verdict
that must come out. ``ALWAYS`` is what is given besides in every case, if there is anything.
"""

import importlib
import re
from functools import partial

import pandas as pd
import pytest

from ropelab.bench import records
from ropelab.study import verdicts
from ropelab.study.engine.documents import load_claims
from ropelab.study.engine.ledger import Unavailable, ledger
from ropelab.study.engine.verdict import Status, Verdict

DOCUMENT = """
document = "made up"
rules = "ropelab.study.verdicts"
studies = "ropelab.study.deepspeed.measure"
[[claim]]
id = "{id}"
statement = "It is twice as fast."
published = "2x"
needs = "a stopwatch"
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Claims MU-01 (with a rule on evidence ``made_up_times``) and MU-02 (without one)."""
    load_claims()  # what registers itself when it is first imported is to stay
    for name in ("_RULES", "_COMPUTATIONS"):
        monkeypatch.setattr(verdicts, name, dict(getattr(verdicts, name)))

    @verdicts.rule("MU-01", "made_up_times")
    def twice(times):
        ratio = times.old.iloc[0] / times.new.iloc[0]
        return Verdict.confirmed(f"{ratio:.1f}x") if ratio >= 2 else Verdict.refuted(f"{ratio:.1f}x", "too slow")

    (tmp_path / "one.toml").write_text(DOCUMENT.format(id="MU-01"))
    (tmp_path / "two.toml").write_text(DOCUMENT.format(id="MU-02"))
    return tmp_path


def given(times):
    return partial(verdicts.find_evidence, given={"made_up_times": times})


def claim(folder, document="one"):
    return load_claims(document, folder)[0]


def test_the_verdict_follows_the_evidence(made_up):
    for new, status in ((1.0, Status.CONFIRMED), (3.0, Status.REFUTED)):
        verdict, pieces = verdicts.judge(claim(made_up), given(pd.DataFrame({"old": [2.0], "new": [new]})))
        assert verdict.status == status
        assert [piece.source for piece in pieces] == ["given by the caller"]


@pytest.mark.parametrize("find", [verdicts.find_evidence, given(pd.DataFrame())])
def test_without_evidence_nothing_is_confirmed(made_up, find):
    verdict, pieces = verdicts.judge(claim(made_up), find)
    assert verdict.status == Status.NOT_TESTABLE
    assert "a stopwatch" in verdict.note and "made_up_times" in verdict.note
    assert pieces == []


def test_evidence_is_computed_where_it_can_be(made_up):
    @verdicts.evidence("made_up_times", "a thought experiment")
    def times():
        return pd.DataFrame({"old": [4.0], "new": [1.0]})

    verdict, pieces = verdicts.judge(claim(made_up))
    assert (verdict.status, verdict.measured, pieces[0].source) == (
        Status.CONFIRMED,
        "4.0x",
        "a thought experiment",
    )


def test_evidence_that_cannot_be_computed_is_missing(made_up):
    @verdicts.evidence("made_up_times", "a thought experiment")
    def times():
        raise Unavailable("no stopwatch")

    assert verdicts.judge(claim(made_up))[0].status == Status.NOT_TESTABLE


def test_evidence_that_cannot_be_computed_is_read_from_the_record(made_up):
    @verdicts.evidence("made_up_times", "a thought experiment")
    def times():
        raise Unavailable("no stopwatch")

    written = records.write("made_up_times", pd.DataFrame({"old": [4.0], "new": [1.0]}), made_up)
    verdict, pieces = verdicts.judge(claim(made_up), partial(verdicts.find_evidence, records=made_up))
    assert verdict.status == Status.CONFIRMED
    assert pieces[0].source == f"record, {written.footer}"


@pytest.mark.parametrize(
    "measured, at_least, expected", [(2.0, False, True), (2.2, False, True), (2.3, False, False), (2.3, True, True),
                                     (1.8, False, True), (1.7, False, False), (1.7, True, False)]
)  # fmt: skip
def test_a_number_agrees_in_both_directions(measured, at_least, expected):
    """More than claimed is another number too, unless the claim says that it may be more."""
    assert verdicts.agrees(measured, 2.0, 0.1, at_least=at_least) == expected
    found = verdicts.agrees(pd.Series([measured, 2.0]), pd.Series([2.0, 2.0]), 0.1, at_least=at_least)
    assert found.tolist() == [expected, True]


def test_a_model_confirms_nothing_by_itself():
    assert Verdict.confirmed("1").of_model("a model").status == Status.CORRECTED
    assert Verdict.refuted("1", "wrong").of_model("a model") == Verdict.refuted("1", "wrong; a model")


def test_a_claim_without_a_rule_is_an_error(made_up):
    with pytest.raises(ValueError, match="MU-02: no rule"):
        verdicts.judge(claim(made_up, "two"))


def test_names_that_do_not_exist(made_up):
    with pytest.raises(ValueError, match="document: expected one of .*'one', 'two'.*'three'"):
        load_claims("three", made_up)
    with pytest.raises(ValueError, match="only: expected ids of claims, got .'XX-01'"):
        ledger({}, only=["XX-01"])


DOCUMENT_OF = {entry["id"]: document.key for document in verdicts.documents() for entry in document.entries}


def cases(document):
    """(claim, name of evidence -> what makes it, verdict) of all cases of a document's test file."""
    module = importlib.import_module(f"tests.test_{document}")
    for claim_id, *evidence, verdict in module.CASES:
        given = dict([evidence]) if len(evidence) == 2 else evidence[0]
        yield claim_id, getattr(module, "ALWAYS", {}) | given, verdict


@pytest.mark.parametrize("claim_id", DOCUMENT_OF)
def test_changed_evidence_changes_the_verdict(claim_id, tmp_path):
    """Without a record: what is committed does not decide here."""
    document = DOCUMENT_OF[claim_id]
    seen = set()
    for given, verdict in ((given, verdict) for claim, given, verdict in cases(document) if claim == claim_id):
        frames = {name: make() for name, make in given.items()}
        (row,) = ledger(frames, document=document, only=[claim_id], records=tmp_path).itertuples()
        assert row.verdict == verdict, row
        assert not re.search(r"\bobject\b", row.measured + row.note), row  # what pandas calls the dtype of a row
        assert row.measured or verdict == Status.NOT_TESTABLE
        assert row.note or verdict == Status.CONFIRMED
        assert "nan" not in row.measured.lower().split()
        seen.add(verdict)
    assert len(seen) > 1, f"tests/test_{document}.py: expected cases of {claim_id} with different verdicts, got {seen}"


@pytest.mark.parametrize("document", [document.key for document in verdicts.documents()])
def test_no_case_of_a_claim_that_is_not_there(document):
    assert {claim for claim, *_ in cases(document)} <= {claim for claim, key in DOCUMENT_OF.items() if key == document}


def test_a_file_of_claims_says_who_judges_and_who_measures(tmp_path):
    (tmp_path / "one.toml").write_text(DOCUMENT.format(id="MU-01").replace("studies =", "study ="))
    with pytest.raises(ValueError, match=r"one.toml: expected .* missing: \['studies'\]"):
        verdicts.documents(tmp_path)


def test_claims_are_complete_and_unique():
    claims = load_claims()
    ids = [claim.id for claim in claims]
    assert len(set(ids)) == len(ids)
    assert all(claim.statement and claim.published and claim.needs for claim in claims)
    assert {claim.id for claim in claims} <= verdicts._RULES.keys()
