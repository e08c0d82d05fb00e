"""Measuring all studies: every one is registered once, and none keeps the others from being recorded."""

import inspect

import pandas as pd
import pytest

from ropelab.bench import records, timing
from ropelab.study import measure, verdicts


def test_every_study_takes_smoke_and_every_documents_are_registered():
    studies = measure.all_studies()
    for name, study in studies.items():
        assert "smoke" in inspect.signature(study).parameters, name
    for document in verdicts.documents():
        assert document.studies.startswith("ropelab.study.")
    assert {"dense", "deepspeed_callers"} <= studies.keys()


def test_several_studies_are_compiled_side_by_side_before(tmp_path, monkeypatch):
    jobs = []

    def spread(plain, kernels):
        jobs.extend(kernels)
        yield from (function(*arguments) for function, arguments in kernels)

    def timed(*, smoke=False):
        ran.append((timing.cache_bytes(), timing.gpu_times({"it": lambda: [lambda: None]}).median_us[0]))
        raise ZeroDivisionError

    ran = []
    names = ("one", "two", "conformance")
    monkeypatch.setattr(measure, "all_studies", lambda: dict.fromkeys(names, timed))
    monkeypatch.setattr(measure, "spread", spread)
    measure._compile(names)
    assert [arguments for _, arguments in jobs] == [("one",), ("two",)]
    assert ran == [(1, 1.0)] * 2


def test_a_study_that_raises_does_not_keep_the_others_from_being_recorded(tmp_path, monkeypatch, capsys):
    def good(*, smoke):
        return pd.DataFrame({"smoke": [smoke]})

    def broken(*, smoke):
        raise ZeroDivisionError("of a ratio")

    def absent(*, smoke):
        raise verdicts.Unavailable("no GPU")

    known = {"broken": broken, "absent": absent, "good": good}
    monkeypatch.setattr(measure, "all_studies", lambda: known)
    with pytest.raises(RuntimeError, match="not measured, for the reasons above: broken$"):
        measure.measure(tmp_path, smoke=True)
    assert records.load("good", tmp_path).frame.smoke.tolist() == [True]
    assert not list(tmp_path.glob("*/absent*")) and not list(tmp_path.glob("*/broken*"))
    said = capsys.readouterr()
    assert "not measured: no GPU" in said.out and "of a ratio" in said.err
    measure.measure(tmp_path, only=["good"])
    assert records.load("good", tmp_path).frame.smoke.tolist() == [False]
    monkeypatch.setattr(measure, "ON_REQUEST", ("broken", "good"))
    measure.measure(tmp_path, smoke=True)  # neither raises nor writes
    assert records.load("good", tmp_path).frame.smoke.tolist() == [False]
    with pytest.raises(ValueError, match="only: expected names out of .*, got .'nothing'"):
        measure.measure(tmp_path, only=["nothing"])
