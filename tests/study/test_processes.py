"""Whatever starts processes ends them, and all that they have started, on every way out."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial

import pandas as pd
import pytest

from ropelab.bench import in_parts, processes, side_by_side, workers
from ropelab.bench.side_by_side import Job
from tests.support import wait_for_the_end

pytest.importorskip("psutil")

pytestmark = pytest.mark.process

LIMIT = 120
"""The seconds after which a wait has failed. Nothing waits for so long unless it hangs."""


def until(there):
    ends = time.monotonic() + LIMIT
    while not there():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path):
    """A folder with a file for each process that `note` has noted. All of them have ended when the test ends.

    A call that hangs goes on after the limit, when every process has been killed.
    """
    (tmp_path / "pids").mkdir()
    hung = threading.Timer(LIMIT, lambda: [kill(pid) for pid in noted(tmp_path)])
    hung.start()
    yield tmp_path
    in_time = hung.is_alive()
    hung.cancel()
    assert in_time
    wait_for_the_end(noted(tmp_path))


def noted(folder):
    return [int(name) for name in os.listdir(folder / "pids")]


def kill(pid=None):
    with suppress(ProcessLookupError):
        os.kill(pid or os.getpid(), signal.SIGKILL)


def note(folder, pid=None):
    (folder / "pids" / f"{pid or os.getpid()}").touch()


def waits(folder):
    """A part that runs until it is killed."""
    note(folder)
    (folder / "waits").touch()
    time.sleep(10 * LIMIT)


def raises(folder):
    until((folder / "waits").exists)
    note(folder)
    raise ModuleNotFoundError("No module named 'missing'", name="missing")


def dies(folder, how):
    until((folder / "waits").exists)
    note(folder)
    how()


def part(function, *arguments):
    function(*arguments)
    return pd.DataFrame({"part": [0]})


def stays(folder, how):
    """A part whose process does not exit, because something that it has started never ends."""
    note(folder)
    if how == "thread":
        threading.Thread(target=time.sleep, args=(10 * LIMIT,)).start()
    elif how == "process":
        child = processes.forked().Process(target=time.sleep, args=(10 * LIMIT,))
        child.start()
        note(folder, child.pid)
    else:
        program = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({10 * LIMIT})"])
        note(folder, program.pid)
    return os.getpid()


def study(folder, function):
    """A study that compiles in two parts, of which one never ends."""
    note(folder)
    (folder / "study").write_text(str(os.getpid()))
    in_parts.compiled(part, [(waits, folder), (function, folder)])


FAILURES = {
    "raises": ((raises,), ModuleNotFoundError),
    "exits": ((dies, partial(os._exit, 3)), BrokenProcessPool),
    "is killed": ((dies, kill), BrokenProcessPool),
}
"""A part that fails while another runs, and the exception that the caller gets."""


@pytest.mark.parametrize("failure", FAILURES)
def test_a_part_that_fails_ends_the_other_parts(failure, folder):
    (function, *arguments), error = FAILURES[failure]
    with pytest.raises(error):
        in_parts.compiled(part, [(waits, folder), (function, folder, *arguments)])


def test_a_study_whose_part_fails_ends_with_that_exception(folder):
    [(_, outcome)] = side_by_side.side_by_side([Job("study", study, (folder, raises))], sys.maxsize)
    assert isinstance(outcome, ModuleNotFoundError) and outcome.name == "missing"


def test_a_study_that_dies_takes_its_parts_along(folder):
    def kill_study():
        until((folder / "waits").exists)
        kill(int((folder / "study").read_text()))

    killer = threading.Thread(target=kill_study)
    killer.start()
    [(_, outcome)] = side_by_side.side_by_side([Job("study", study, (folder, waits))], sys.maxsize)
    killer.join()
    assert isinstance(outcome, BrokenProcessPool)


@pytest.mark.parametrize("how", ["thread", "process", "program"])
def test_a_job_that_has_given_its_result_is_killed_if_it_does_not_exit(how, folder, monkeypatch):
    monkeypatch.setattr(processes, "EXIT_SECONDS", 0.5)
    [(_, pid)] = side_by_side.side_by_side([Job("stays", stays, (folder, how))], sys.maxsize)
    assert str(pid) in os.listdir(folder / "pids")


@pytest.mark.parametrize("start", ["side by side", "spread"])
def test_an_iterator_that_is_closed_ends_the_jobs_that_run(start, folder):
    if start == "spread":
        jobs = workers.spread([(waits, (folder,)), (note_and_return, (folder,))], [])
    else:
        each = [Job("waits", waits, (folder,)), Job("ends", note_and_return, (folder,))]
        jobs = side_by_side.side_by_side(each, sys.maxsize)
    next(jobs)
    jobs.close()
    assert (folder / "waits").exists()


def note_and_return(folder):
    until((folder / "waits").exists)
    note(folder)


def test_a_job_that_runs_for_long_is_named(monkeypatch, folder):
    """The job ends when the line has been printed."""
    said = []

    def say(text, flush):
        said.append(text)
        (folder / "said").touch()

    monkeypatch.setattr(side_by_side, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(side_by_side, "print", say, raising=False)
    [(_, outcome)] = side_by_side.side_by_side([Job("te_layer", until, ((folder / "said").exists,))], sys.maxsize)
    assert outcome is None and "still running: te_layer for 0:0" in said[0]
