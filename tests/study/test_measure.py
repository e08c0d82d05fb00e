"""Measuring all studies: every one is registered once, and none keeps the others from being recorded."""

import dataclasses
import importlib
import inspect
import json
import os
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from ropelab.bench import gpu_memory, in_parts, packages, records, side_by_side, staleness, timing
from ropelab.bench.gpu_memory import CONTEXT_BYTES
from ropelab.bench.peers import flashinfer
from ropelab.bench.side_by_side import DoesNotFit, Job
from ropelab.bench.study import GIB, Study
from ropelab.bench.unavailable import Unavailable
from ropelab.study import __main__ as commands
from ropelab.study.engine import claims as documents
from ropelab.study.engine import ledger, measure, parameters, registered, tasks, unfinished
from ropelab.study.topics.performance import shortfalls
from tests.study.sentences import states

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_every_study_takes_smoke_and_every_documents_are_registered():
    studies = registered.all_studies()
    for name, study in studies.items():
        assert "smoke" in inspect.signature(study).parameters, name
    for document in documents.documents():
        assert all(module.STUDIES.keys() <= studies.keys() for module in document.modules("studies"))
    assert {"dense", "deepspeed_callers"} <= studies.keys()


def test_what_claims_and_the_tables_of_readme_rest_on_is_no_wide_sweep():
    documents.load_claims()
    studies = registered.all_studies()
    evidence = {name for rule in ledger._RULES.values() for name in rule.evidence}
    needed = evidence & studies.keys() | set(shortfalls.STUDIES) | {"dense", "host", "qk_norm", "table_free_error"}
    assert not any(studies[name].wide for name in needed)


def test_the_guide_names_the_wide_sweeps_and_counts_the_others():
    text = (records.ROOT / "docs/7_reproduce.md").read_text()
    wide = [name for name, study in registered.all_studies().items() if study.wide]
    listed = text.partition("The wide sweeps are ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", listed) == wide
    assert f"measures the {len(registered.named(None))} studies of times behind" in text


@pytest.mark.parametrize("options, only", [([], None), (["dense", "host"], ["dense", "host"]), (["--all"], "all")])
def test_the_command_measures_what_it_is_asked_for(options, only, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands.processes, "start_server", lambda modules: None)

    def take(directory, build, smoke, only):
        asked.append((directory, only))
        return measure.Measured(directory, [], {}, [], unfinished.Run(tmp_path / "none"))

    monkeypatch.setattr(commands, "take_measurements", take)
    assert CliRunner().invoke(commands.app, ["measure", *options]).exit_code == 0
    assert asked == [(records.MEASUREMENTS, list(registered.all_studies()) if only == "all" else only)]
    refused = CliRunner().invoke(commands.app, ["measure", "--all", "dense"])
    assert refused.exit_code and "--all: expected no names beside it, got dense" in refused.output


# ------------------------------------------------------------------------------------------- memory of the GPU


class Machine:
    """A GPU whose jobs take memory while they run; none ends before ``first`` of them have begun."""

    def __init__(self, first=1):
        self.begun, self.first, self.running, self.most, self.order = threading.Condition(), first, {}, 0, []

    def run(self, name, gpu_bytes):
        with self.begun:
            self.running[name] = gpu_bytes + CONTEXT_BYTES
            self.most = max(self.most, sum(self.running.values()))
            self.order.append(name)
            self.begun.notify_all()
            assert self.begun.wait_for(lambda: len(self.order) >= self.first, 120)
            del self.running[name]
        return name

    def jobs(self, **gib):
        return [Job(name, partial(self.run, name, size * GIB), (), size * GIB) for name, size in gib.items()]


class Thread(ThreadPoolExecutor):
    """A thread in the place of a process."""

    def __init__(self, modules):
        super().__init__(1)

    def end(self):
        self.shutdown()


def run(jobs, gib, most=14):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "own_process", Thread)
        return list(side_by_side.side_by_side(jobs, round(gib * GIB), most=most))


def test_jobs_share_the_gpu_as_far_as_its_memory_goes():
    machine = Machine(first=4)
    jobs = machine.jobs(a=30, b=30, c=30, d=10, e=0)
    assert {job.name: result for job, result in run(jobs, 80)} == {name: name for name in "abcde"}
    assert machine.most <= 80 * GIB
    assert machine.order[:4] == ["a", "b", "d", "e"]  # c waits, what is smaller does not


def test_every_process_needs_a_context_besides():
    for gib, together in ((21, 1), (22, 2)):
        machine = Machine(first=together)
        run(machine.jobs(a=10, b=10), gib)
        assert machine.most == 11 * together * GIB


def test_what_does_not_fit_never_starts():
    machine = Machine()
    found = {job.name: result for job, result in run(machine.jobs(large=80, small=1), 80)}
    assert found["small"] == "small" and machine.order == ["small"]
    assert isinstance(found["large"], DoesNotFit) and states(str(found["large"]), 81.0, 80.0)


def test_no_more_processes_than_asked_for():
    machine = Machine(first=2)
    run(machine.jobs(**{name: 0 for name in "abcdef"}), 80, most=2)
    assert machine.most == 2 * CONTEXT_BYTES


def test_a_job_that_raises_or_whose_process_dies_takes_no_other_along():
    jobs = [Job("good", int, ("7",)), Job("bad", int, ("seven",)), Job("dead", os._exit, (3,))]
    found = {job.name: result for job, result in side_by_side.side_by_side(jobs, 80 * GIB, most=2)}
    assert found["good"] == 7 and isinstance(found["bad"], ValueError) and isinstance(found["dead"], BrokenProcessPool)


def part(number):
    if number == 7:
        raise ValueError("seven")
    return pd.DataFrame({"number": [number], "stopped": [timing.is_stopped()], "process": [os.getpid()]})


@pytest.mark.parametrize("here", [False, True])
def test_the_parts_of_a_study_are_compiled_with_the_clock_stopped(here):
    found = in_parts.compiled(part, [(1,), (2,)], here=here)
    assert set(found.number) == {1, 2} and found.stopped.all() and found.attrs["gpu_bytes"] == 2 * CONTEXT_BYTES
    assert (found.process == os.getpid()).all() == here and found.process.nunique() == (1 if here else 2)
    with pytest.raises(ValueError, match="seven"):
        in_parts.compiled(part, [(1,), (7,)], here=here)


def test_out_of_memory_beside_others_is_no_result():
    def contender():
        raise OUT_OF_MEMORY

    with gpu_memory.shared(), timing.stopped(), pytest.raises(torch.OutOfMemoryError):
        timing.gpu_times({"one": contender})
    for error in (RuntimeError("CUDA error: out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")):
        assert gpu_memory.ran_out(error)
    assert not gpu_memory.ran_out(RuntimeError("out of resource: shared memory, Required: 262144"))


def beyond_declared(folder):
    """Records of studies that took more memory than is declared. Old records do not count."""
    studies = registered.all_studies()
    for path in sorted(folder.glob("*/*.json")):
        about = json.loads(path.read_text())
        took = about.get("parameters", {}).get("gpu_bytes", {})
        of_today = "study" not in about or not staleness.stale(about)
        if path.stem not in studies or not of_today:
            continue
        study = studies[path.stem]
        if (found := took.get("beside", 0)) > study.gpu_bytes:
            yield f"{path.parent.name}/{path.stem}: {found / GIB:.2f} GiB beside, {study.gpu_gib} declared"


def test_every_study_declares_the_memory_that_its_records_say_it_took(tmp_path):
    assert list(beyond_declared(records.MEASUREMENTS)) == []
    (tmp_path / "a-gpu").mkdir()
    told = {"parameters": {"gpu_bytes": {"beside": 19 * GIB, "alone": 60 * GIB}}}
    for study in ("dense", "te_kernels"):
        (tmp_path / "a-gpu" / f"{study}.json").write_text(json.dumps(told))
    assert [line.partition(":")[0] for line in beyond_declared(tmp_path)] == ["a-gpu/dense", "a-gpu/te_kernels"]


# ------------------------------------------------------------------------------------------- all studies


def clock():
    """How the clock goes: it runs, is stopped, or is refused."""
    if timing.is_stopped():
        return "stopped"
    try:
        timing.gpu_times({"contender": list})
    except RuntimeError as error:
        return "refused" if "contender: nothing can be timed" in str(error) else "runs"


@pytest.fixture
def as_on_a_gpu(tmp_path, monkeypatch):
    """Run jobs as on a GPU, but in this process; every study adds (name, how the clock goes) to the returned list."""
    ran = []

    def run(jobs, free_bytes):
        return [(job, pickle.loads(pickle.dumps(job.function(*job.arguments)))) for job in jobs]

    def study(name, *, smoke=False):
        ran.append((name, clock()))
        return pd.DataFrame({"cell": [name]})

    def untimed(*, smoke=False):
        study("untimed part")
        return {"facts": 7}

    def timed(found, *, smoke=False):
        return study("timed part").assign(facts=found.get("facts"))

    known = {
        name: Study(partial(study, name), gpu_gib=1, timed=name == "one") for name in ("one", "precision", "memory")
    }
    known["parts"] = Study(timed, untimed=untimed, gpu_gib=2)
    known["sweep"] = Study(partial(study, "sweep"), gpu_gib=1, wide=True)
    monkeypatch.setattr(registered, "all_studies", lambda: known)
    monkeypatch.setattr(tasks, "side_by_side", run)
    monkeypatch.setattr(gpu_memory, "watch", lambda: None)
    monkeypatch.setattr(gpu_memory, "peak_reserved", lambda: 3 * GIB)
    monkeypatch.setattr(records, "_gpu", lambda: {"name": "a GPU"})
    monkeypatch.setattr(records, "MEASUREMENTS", tmp_path / "committed")
    for name, answer in (("is_available", True), ("mem_get_info", (80 * GIB, 80 * GIB)), ("get_device_name", "a GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    return ran


WITH_TABLES = ["one", "precision", "memory", "parts"]
"""The studies of `as_on_a_gpu` without the sweep. Those that time nothing are measured only where they are named."""


def recorded(directory, study):
    return pd.read_csv(directory / "a-gpu" / f"{study}.csv")


def test_what_looks_at_no_clock_runs_beside_others_and_the_rest_is_compiled(tmp_path, as_on_a_gpu):
    assert set(measure.measure(tmp_path, build=tmp_path).studies) == {"one", "parts"}
    as_on_a_gpu.clear()
    assert set(measure.measure(tmp_path, only=WITH_TABLES, build=tmp_path).studies) == {*WITH_TABLES}
    parts = [("untimed part", "refused")]
    smallest_first = [("one", "stopped"), ("precision", "refused"), ("memory", "refused"), ("timed part", "stopped")]
    assert as_on_a_gpu[:5] == parts + smallest_first
    assert as_on_a_gpu[5:] == [("one", "runs"), ("timed part", "runs")]
    assert recorded(tmp_path, "parts").facts.tolist() == [7]
    parameters = records.load("parts", tmp_path).provenance["parameters"]
    assert parameters["gpu_bytes"] == {"beside": 3 * GIB, "alone": 3 * GIB}


@pytest.mark.parametrize("how", ["raised", "recorded", "caught"])
def test_what_runs_out_of_memory_beside_others_is_measured_again_alone(how, tmp_path, monkeypatch, as_on_a_gpu, capsys):
    """The error may be raised, become a contender's status, or be caught by the study and told in words."""

    def short_of_memory(*, smoke=False):
        if clock() == "refused":
            if how == "raised":
                raise OUT_OF_MEMORY
            status = timing.failure(OUT_OF_MEMORY) if how == "recorded" else f"it raised {OUT_OF_MEMORY}"
            return pd.DataFrame({"cell": ["beside"], "status": [status]})
        return pd.DataFrame({"cell": ["alone"], "status": ["ok"]})

    studies = {"memory": Study(short_of_memory, gpu_gib=1, timed=False)}
    if how != "caught":  # what an untimed part finds is no table
        studies["parts"] = Study(lambda found, *, smoke=False: short_of_memory(), untimed=short_of_memory, gpu_gib=1)
    known = registered.all_studies() | studies
    monkeypatch.setattr(registered, "all_studies", lambda: known)
    measure.measure(tmp_path, only=["one", *studies], build=tmp_path)
    for name in studies:
        assert recorded(tmp_path, name).cell.tolist() == ["alone"]
    said = capsys.readouterr()
    assert said.out.count("out of memory") == len(studies) and not said.err
    assert not any("memory" in path.read_text() for path in tmp_path.glob("a-gpu/*.csv"))


def test_each_timed_study_has_a_process_of_its_own(tmp_path, monkeypatch, as_on_a_gpu, capsys):
    """They follow each other. A process that dies takes no other study along; a table that grows is recorded here."""
    started, known = [], registered.all_studies()

    def run(jobs, free_bytes):
        started.append([job.name for job in jobs])
        dead = BrokenProcessPool("it died") if started[-1] == ["one"] else None
        return [(job, dead or job.function(*job.arguments)) for job in jobs]

    def grows(*, smoke=False):
        yield from (known["one"].table(smoke=smoke).assign(part=part) for part in range(2))

    studies = {"one": known["one"], "grows": Study(grows, gpu_gib=1), "parts": known["parts"]}
    monkeypatch.setattr(tasks, "side_by_side", run)
    monkeypatch.setattr(registered, "all_studies", lambda: studies)
    measured = measure.measure(tmp_path, build=tmp_path)
    assert measured.broken == ["one"] and set(measured.studies) == {"grows", "parts"}
    assert started[1:] == [["one"], ["parts"]]
    assert recorded(tmp_path, "grows").part.tolist() == [1] and recorded(tmp_path, "parts").facts.tolist() == [7]
    assert "BrokenProcessPool: it died" in capsys.readouterr().err and not (tmp_path / "a-gpu" / "one.csv").exists()


# ------------------------------------------------------------------------------------------- reproduce


def times(us, *contenders):
    return pd.DataFrame([{"cell": cell, "contender": name, "median_us": us} for name in contenders for cell in "ab"])


def test_reproduce_leaves_committed_records_alone_and_shows_its_own_beside_them(tmp_path, monkeypatch, as_on_a_gpu):
    for module in ("nbformat", "papermill", "sphinx"):
        pytest.importorskip(module)
    from ropelab.study.engine import runner
    from ropelab.study.site import ledgers, report

    def absent(*, smoke):
        raise Unavailable("no compiler")

    committed, build = tmp_path / "committed", tmp_path / "build"
    for name, us in {"one": 4.0, "wide": 9.0, "sweep": 7.0}.items():
        records.write(name, times(us, "ropelab", "other") if name == "one" else times(us, "ropelab"), committed)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(records, "_gpu", lambda: {"name": "another GPU"})
        records.write("one", times(8.0, "ropelab"), committed)
    before = {path: path.read_bytes() for path in committed.rglob("*.*")}
    known = {
        "one": Study(lambda *, smoke: times(3.0, "ropelab", "newer"), gpu_gib=1),
        "first": Study(lambda *, smoke: times(5.0, "ropelab"), gpu_gib=1),
        "facts": Study(lambda *, smoke: pd.DataFrame({"right": [True]}), gpu_gib=1, timed=False),
        "compiled": Study(absent, gpu_gib=1),
        "sweep": Study(lambda *, smoke: times(1.0, "ropelab"), gpu_gib=1, wide=True, rows=600,
                       short=lambda *, smoke: times(2.0, "ropelab")),
        "wide": Study(lambda *, smoke: times(1.0, "ropelab"), gpu_gib=1, wide=True),
    }  # fmt: skip
    monkeypatch.setattr(registered, "all_studies", lambda: known)
    monkeypatch.setattr(commands, "MEASUREMENTS", committed)
    monkeypatch.setattr(commands.processes, "start_server", lambda modules: None)
    asked = []
    monkeypatch.setattr(runner, "run_notebooks", lambda *given, **options: asked.append(options["of_one"]) or iter(()))
    monkeypatch.setattr(ledgers, "begun", lambda where: nullcontext(list))
    pages = {}
    monkeypatch.setattr(report, "_build", lambda files, out, smoke: pages.update(files) or [])
    done = CliRunner().invoke(commands.app, ["--build", str(build), "reproduce"])
    assert done.exit_code == 0, done.output
    assert {path: path.read_bytes() for path in committed.rglob("*.*")} == before
    assert {path.stem for path in build.glob("measurements/a-gpu/*.csv")} == {"one", "first", "sweep"}
    page, recorded = pages["measured.md"], pages["records.md"]

    # The book reads the records of this run, else the committed ones. The court, whose claims those decide, does not.
    (of_one,) = asked
    assert not any(name[3:] in {document.key for document in documents.documents()} for name in of_one)
    for chapter in ("04_write_the_kernel", "05_speed", "08_projection", "10_whole_models"):
        where = parameters.chosen_records(**of_one[chapter])
        shown = {study: records.load(study, where) for study in ("one", "sweep", "wide")}
        assert {name: record.frame.median_us.tolist() for name, record in shown.items()} == {
            "one": [3.0] * 4, "sweep": [2.0] * 2, "wide": [9.0] * 2
        }  # fmt: skip
        assert ["a part" in record.footer for record in shown.values()] == [False, True, False]
        assert records.load("one", where, gpu="another-gpu").frame.median_us.tolist() == [8.0] * 2
    asked.clear()
    for options in (["--smoke"], ["--gpu", "another-gpu"]):
        assert CliRunner().invoke(commands.app, ["--build", str(build), "reproduce", *options]).exit_code == 0
        assert not any(asked.pop().values())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert rows[2:] == [
        ["first", "ropelab", "2", "5", "", ""],
        ["one", "ropelab", "2", "3", "4", "0.75"],
        ["one", "newer", "2", "3", "", ""],
        ["sweep", "ropelab", "2", "2", "7", "0.29"],
    ]
    assert "- compiled: no compiler" in page.splitlines()
    assert "{record} one\n" in recorded and "{record} first\n" not in recorded


def test_what_the_book_shows_is_measured():
    """The steps of chapter 04, the headline of 05, the projection of 08 and the whole models of 10 are of this GPU."""
    measured = registered.of_the_book()
    assert {"kernel_steps", "projection", "model_heads", "whole_models"} <= measured.keys()
    assert measured.keys() - {name for name, study in measured.items() if study.is_short} == {*registered.named(None)}
    assert all(study.rows == 0 for study in measured.values() if study.is_short)


# ------------------------------------------------------------------------------------------- interrupted


def interrupted(monkeypatch, at):
    """The studies with one that is interrupted once."""
    known = registered.all_studies()

    def study(*found, smoke=False):
        if clock() == "runs":
            monkeypatch.setattr(registered, "all_studies", lambda: known)
            raise KeyboardInterrupt
        return known[at].table(*found, smoke=smoke)

    monkeypatch.setattr(registered, "all_studies", lambda: known | {at: dataclasses.replace(known[at], table=study)})


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path, monkeypatch, as_on_a_gpu, capsys):
    """It neither measures nor compiles again what is done, so that the sum of its parts is its time."""
    known, flashinfers = registered.all_studies(), []
    monkeypatch.setattr(packages, "installations", lambda *_: {"1.0": tmp_path})
    monkeypatch.setattr(flashinfer, "compile_kernel", lambda version: flashinfers.append(version) or json)
    more = {name: dataclasses.replace(known["one"], table=partial(known["one"].table.func, name)) for name in "ab"}
    again = partial(measure.measure, tmp_path, only=[*WITH_TABLES, *more], build=tmp_path)
    monkeypatch.setattr(registered, "all_studies", lambda: known | more)
    interrupted(monkeypatch, "a")
    with pytest.raises(KeyboardInterrupt):
        again()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("a-gpu/*.csv")}
    assert not {"a.csv", "b.csv"} & before.keys() and {"one.csv", "precision.csv", "memory.csv"} <= before.keys()
    compiled = {name for name, how in as_on_a_gpu if how == "stopped"}
    as_on_a_gpu.clear()
    capsys.readouterr()
    whole = again()
    assert set(whole.studies) == {*WITH_TABLES, *more}
    assert as_on_a_gpu == [("a", "runs"), ("b", "runs")] and compiled >= {"b"} and flashinfers == ["1.0"]
    assert states(capsys.readouterr().out, 4, 6)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("a-gpu/*.csv")}
    assert {name: after[name] for name in before} == before
    taken = records.load("b", tmp_path).provenance["parameters"]["gpu_bytes"]
    assert taken == {"beside": 3 * GIB, "alone": 3 * GIB}  # of its compilation before the interruption, too
    as_on_a_gpu.clear()
    whole.state.forget()
    again()
    assert {("one", "stopped"), ("one", "runs")} <= set(as_on_a_gpu)


def test_the_duration_is_told_from_the_seconds_of_records(tmp_path, as_on_a_gpu, capsys):
    for name, seconds, beside in (("one", 100.0, 30.0), ("parts", 300.0, 45.0)):
        noted = {"smoke": False, "seconds": seconds, "seconds_beside": beside}
        records.write(name, pd.DataFrame({"cell": ["a"]}), tmp_path / "committed", parameters=noted)
    measure.measure(tmp_path, build=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert states(lines[0], 2, 7, 25)  # 45 s side by side, then 100 s and 300 s
    after = [line for line in lines if line.startswith("  [")]
    assert states(after[0], 5, 0) and states(after[1], 0, 0)
    a_part = dataclasses.replace(registered.all_studies()["one"], wide=True, short=print)
    found = measure.seconds({"one": a_part.in_short}, [tmp_path / "committed"], "seconds")
    assert found == {"one": 60.0}  # of the whole study is known how long it takes, of its part that it takes a minute


def test_an_untimed_part_is_kept_over_an_interruption(tmp_path, monkeypatch, as_on_a_gpu):
    interrupted(monkeypatch, "parts")
    with pytest.raises(KeyboardInterrupt):
        measure.measure(tmp_path, build=tmp_path)
    as_on_a_gpu.clear()
    measure.measure(tmp_path, build=tmp_path)
    assert as_on_a_gpu == [("timed part", "runs")] and recorded(tmp_path, "parts").facts.tolist() == [7]


@pytest.mark.parametrize("change", ["code", "gpu", "studies", "record"])
def test_what_another_state_has_measured_does_not_count(change, tmp_path, monkeypatch, as_on_a_gpu):
    interrupted(monkeypatch, "parts")
    with pytest.raises(KeyboardInterrupt):
        measure.measure(tmp_path, build=tmp_path)
    as_on_a_gpu.clear()
    match change:
        case "code":
            monkeypatch.setattr(unfinished, "library_hash", lambda: "other code")
        case "gpu":
            monkeypatch.setattr(records, "_gpu", lambda: {"name": "another GPU"})
        case "record":
            (tmp_path / "a-gpu" / "one.csv").write_text("cell\nanother\n")
    measure.measure(tmp_path, build=tmp_path, only=["one", "precision"] if change == "studies" else None)
    assert as_on_a_gpu.count(("one", "runs")) == 1


def test_a_study_that_raises_does_not_keep_the_others_from_being_recorded(tmp_path, monkeypatch, capsys):
    def good(*, smoke):
        return pd.DataFrame({"smoke": [smoke]})

    def broken(*, smoke):
        raise ZeroDivisionError("of a ratio")

    def absent(*, smoke):
        raise Unavailable("no GPU")

    def imports(*, smoke):
        importlib.import_module("a_missing_package.functions")

    def senseless(*, smoke):
        return pd.DataFrame({"median_us": [-1.0]})

    found = {
        "broken": broken,
        "absent": absent,
        "too": absent,
        "imports": imports,
        "good": good,
        "senseless": senseless,
    }
    known = {name: Study(table, gpu_gib=0) for name, table in found.items()}
    monkeypatch.setattr(registered, "all_studies", lambda: known)
    measured = measure.measure(tmp_path, smoke=True, build=tmp_path)
    assert measured.broken == ["broken", "senseless"]
    assert {"  missing: no GPU (absent, too)", "  missing: a_missing_package not installed (imports)"} <= set(
        str(measured).splitlines()
    )
    assert records.load("good", tmp_path).frame.smoke.tolist() == [True]
    assert {path.stem for path in tmp_path.glob("*/*.csv")} == {"good"}
    said = capsys.readouterr()
    assert "of a ratio" in said.err and "expected times above 0" in said.err and "a_missing" not in said.err
    measure.measure(tmp_path, only=["good"], build=tmp_path)
    assert records.load("good", tmp_path).frame.smoke.tolist() == [False]
    known |= {name: dataclasses.replace(known[name], wide=True) for name in ("broken", "good", "senseless")}
    measure.measure(tmp_path, smoke=True, build=tmp_path)  # neither raises nor writes
    assert records.load("good", tmp_path).frame.smoke.tolist() == [False]
    with pytest.raises(ValueError, match="only: expected names out of .*, got nothing"):
        measure.measure(tmp_path, only=["nothing"], build=tmp_path)
