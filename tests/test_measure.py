"""Measuring all studies: every one is registered once, and none keeps the others from being recorded."""

import inspect
from functools import partial

import pandas as pd
import pytest
import torch

from ropelab.bench import records, timing
from ropelab.study import measure, verdicts


def test_every_study_takes_smoke_and_every_documents_are_registered():
    studies = measure.all_studies()
    for name, study in studies.items():
        assert "smoke" in inspect.signature(study).parameters, name
    for document in verdicts.documents():
        assert document.studies.startswith("ropelab.study.")
    assert {"dense", "deepspeed_callers"} <= studies.keys()


def test_studies_are_compiled_with_the_clock_stopped_while_the_untimed_one_runs(tmp_path, monkeypatch):
    def spread(plain, kernels):
        return iter([function(*arguments) for function, arguments in kernels])

    def study(name, *, smoke=False):
        ran.append((name, timing.gpu_times is not clock))
        return pd.DataFrame({"cell": [name]})

    ran, clock = [], timing.gpu_times
    names = ("one", "two", *measure.UNTIMED)
    monkeypatch.setattr(measure, "all_studies", lambda: {name: partial(study, name) for name in names})
    monkeypatch.setattr(measure, "spread", spread)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(records, "_gpu", lambda: {"name": "a GPU"})
    measure.measure(tmp_path)
    (untimed,) = measure.UNTIMED
    assert ran == [("one", True), ("two", True), (untimed, False), ("one", False), ("two", False)]
    ran.clear()
    measure.measure(tmp_path, only=["one"])
    measure.measure(tmp_path, smoke=True, only=["one", "two"])
    assert ran == [("one", False), ("one", False), ("two", False)]


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
