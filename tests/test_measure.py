"""Measuring all studies: every one is registered once, and none keeps the others from being recorded."""

import inspect
from functools import partial

import pandas as pd
import pytest
import torch

from ropelab.bench import records, timing
from ropelab.bench.studies import PartlyTimed
from ropelab.study import measure, verdicts


def test_every_study_takes_smoke_and_every_documents_are_registered():
    studies = measure.all_studies()
    for name, study in studies.items():
        assert "smoke" in inspect.signature(study).parameters, name
    for document in verdicts.documents():
        assert document.studies.startswith("ropelab.study.")
    assert {"dense", "deepspeed_callers"} <= studies.keys()


@pytest.fixture
def side_by_side(monkeypatch):
    """As on a GPU, but in this process; returns a list to which every study adds (name, how the clock goes)."""
    ran, clock = [], timing.gpu_times

    def spread(plain, kernels):
        return iter([function(*arguments) for function, arguments in kernels])

    def study(name, *, smoke=False):
        how = {clock.__name__: "runs", "_called": "stopped", "_refuse": "refused"}[timing.gpu_times.__name__]
        ran.append((name, how))
        return pd.DataFrame({"cell": [name]})

    def untimed(*, smoke=False):
        study("untimed part")
        return {"facts": 7}

    def timed(found, *, smoke=False):
        return study("timed part").assign(facts=found.get("facts"))

    known = {name: partial(study, name) for name in ("one", measure.SPREAD, "precision", "memory")}
    known["parts"] = PartlyTimed(untimed, timed)
    monkeypatch.setattr(measure, "all_studies", lambda: known)
    monkeypatch.setattr(measure, "spread", spread)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(records, "_gpu", lambda: {"name": "a GPU"})
    return ran


def recorded(directory, study):
    return pd.read_csv(directory / "a-gpu" / f"{study}.csv")


def test_what_looks_at_no_clock_runs_beside_others_and_the_rest_is_compiled(tmp_path, side_by_side):
    measure.measure(tmp_path)
    parts = [("untimed part", "refused")]
    compiled = [("one", "stopped"), ("timed part", "stopped")]
    untimed = [("precision", "refused"), ("memory", "refused"), (measure.SPREAD, "runs")]
    assert side_by_side[:6] == parts + compiled + untimed  # the longest first; what spreads itself begins at once too
    assert side_by_side[6:] == [("one", "runs"), ("timed part", "runs")]
    assert recorded(tmp_path, "parts").facts.tolist() == [7]
    assert all(len(recorded(tmp_path, name)) for name in measure.all_studies())


def test_one_study_alone_and_a_trial_run_in_this_process(tmp_path, side_by_side):
    measure.measure(tmp_path, only=["parts"])
    measure.measure(tmp_path, smoke=True, only=["one", "precision"])
    assert side_by_side == [(name, "runs") for name in ("untimed part", "timed part", "one", "precision")]
    assert recorded(tmp_path, "parts").facts.tolist() == [7]


def test_what_fails_beside_others_is_measured_again(tmp_path, monkeypatch, side_by_side, capsys):
    def out_of_memory(*, smoke=False):
        if timing.gpu_times.__name__ == "_refuse":
            raise MemoryError
        return pd.DataFrame({"cell": ["alone"]})

    known = measure.all_studies() | {"memory": out_of_memory}
    known["parts"] = PartlyTimed(out_of_memory, lambda found, *, smoke=False: pd.DataFrame({"cell": ["alone"]}))
    monkeypatch.setattr(measure, "all_studies", lambda: known)
    measure.measure(tmp_path)
    for name in ("memory", "parts"):
        assert recorded(tmp_path, name).cell.tolist() == ["alone"]
    said = capsys.readouterr()
    assert said.out.count("MemoryError") == 2 and not said.err


def test_the_untimed_are_studies():
    assert set(measure.UNTIMED) <= measure.all_studies().keys()


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
