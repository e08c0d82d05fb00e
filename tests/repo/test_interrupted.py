"""An interruption ends every process at once, and the next run keeps the notebooks that have ended."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
papermill = pytest.importorskip("papermill")
psutil = pytest.importorskip("psutil")

from ropelab.study.engine import runner  # noqa: E402
from tests.support import wait_for_the_end  # noqa: E402

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
from ropelab.bench import processes
from ropelab.study.engine import runner
if __name__ == "__main__":
    processes.end_on_interruption()
    sources = runner.sources(Path(sys.argv[1]))
    for run in runner.run_notebooks(sources, Path(sys.argv[2]), {}, together=2):
        print(run.name, run.failure, flush=True)
"""
"""A program that runs the notebooks of a folder, as ``make smoke`` does."""
WAITS = """
import multiprocessing, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for pid in (os.getpid(), child.pid):
    open(f"pids/{pid}", "w").close()
time.sleep(600)
"""
"""A cell that has started a program of its own, and does not end."""
MEASURES = """
import os, subprocess, sys, time
from ropelab.bench import in_parts, processes
from ropelab.bench.side_by_side import Job, side_by_side
def waits():
    for pid in (os.getpid(), subprocess.Popen(["sleep", "600"], start_new_session=True).pid):
        open(f"pids/{pid}", "w").close()
    time.sleep(600)
def study():
    in_parts.compiled(waits, [(), ()])
if __name__ == "__main__":
    processes.end_on_interruption()
    list(side_by_side([Job("study", study)], sys.maxsize))
"""
"""A program that measures a study, whose kernels are compiled in two parts."""


@pytest.fixture
def folder(tmp_path):
    """Four notebooks: the first ends at once and counts its runs, the others wait."""
    (tmp_path / "pids").mkdir()
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, code in enumerate(["open('ran', 'a').write('x')", *[WAITS] * 3], 1):
        cells = [nbformat.v4.new_code_cell(code)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / f"{number:02}_one.ipynb")
    return tmp_path


def started(folder, build, code=RUN):
    """The program, once two jobs wait and what has ended is noted, and the processes that descend from it."""
    (folder / "run.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(folder / "run.py"), str(folder), str(build)]
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        cwd=folder,
    )  # fmt: skip
    limit = time.monotonic() + 120
    while len(list((folder / "pids").iterdir())) < 4 or code == RUN and not list(build.glob("unfinished/*/*")):
        assert program.poll() is None and time.monotonic() < limit, program.communicate()
        time.sleep(0.2)
    return program, psutil.Process(program.pid).children(recursive=True)


@pytest.mark.process
def test_one_interruption_ends_every_process_and_the_next_run_keeps_what_has_ended(folder):
    build = folder / "build"
    program, descendants = started(folder, build)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    _, said = program.communicate(timeout=120)
    wait_for_the_end([one.pid for one in descendants])
    assert program.returncode == 130 and said.strip().count("\n") == 0 and said.strip().startswith("interrupted")

    for pid in (folder / "pids").iterdir():
        pid.unlink()
    again, _ = started(folder, build)
    os.killpg(again.pid, signal.SIGINT)
    assert again.communicate(timeout=60)[0] == "01_one None\n"
    assert (folder / "ran").read_text() == "x"


@pytest.mark.process
def test_an_interruption_ends_the_parts_of_a_study(folder):
    program, descendants = started(folder, folder / "build", MEASURES)
    os.killpg(program.pid, signal.SIGINT)
    _, said = program.communicate(timeout=60)
    wait_for_the_end([one.pid for one in descendants])
    assert program.returncode == 130 and said.strip().count("\n") == 0 and said.strip().startswith("interrupted")


@pytest.mark.process
def test_nothing_outlives_a_run_that_was_killed(folder):
    program, descendants = started(folder, folder / "build")
    programs = [
        one for one in descendants if "time.sleep(600)" in " ".join(one.cmdline())
    ]  # of the notebooks themselves
    program.kill()
    program.wait()
    try:
        wait_for_the_end([one.pid for one in descendants if one not in programs])
    finally:
        for one in programs:
            one.kill()
    assert len(programs) == 2


@pytest.mark.parametrize("written", [0, 3], ids=["at the start", "after a cell"])
def test_a_full_disk_leaves_no_half_notebook(written, folder, monkeypatch):
    write, count = papermill.iorw.LocalHandler.write, []

    def full(self, text, path):
        count.append(path)
        if len(count) <= written:
            return write(self, text, path)
        Path(path).write_text(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(papermill.iorw.LocalHandler, "write", full)
    run = runner.run_notebook(folder / "01_one.ipynb", folder / "build", threads=1)
    assert "No space left on device" in run.failure.error
    nbformat.read(run.path, as_version=4)
    assert not list((folder / "build" / "notebooks").iterdir())
