"""Long work says how far it is: a line that changes on a terminal, plain lines in a log."""

import io
import sys

import pytest

from ropelab import progress
from ropelab.progress import ProgressLine
from tests.study.sentences import numbers


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the module reads; a test moves them."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_shows_one_line_at_a_time(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    line = ProgressLine(terminal)
    line.show("first")
    line.show("a text that is wider than the terminal")
    line.end()
    *shown, gone = terminal.getvalue().split("\r")[1:]
    assert shown == ["first\x1b[K", "a text that is wide\x1b[K"] and gone == "\x1b[K"
    assert "\n" not in terminal.getvalue()


def test_a_log_gets_a_line_now_and_then(clock):
    log = io.StringIO()
    line = ProgressLine(log, every=30)
    for seconds in (10, 25, 5, 29, 1):  # since the start: 10, 35, 40, 69, 70
        clock[0] += seconds
        line.show(f"after {clock[0] - 100:.0f} s")
    line.end()
    assert log.getvalue() == "after 35 s\nafter 69 s\n"
    every = io.StringIO()
    line = ProgressLine(every, every=0)
    line.show("one")
    line.show("two")
    assert every.getvalue() == "one\ntwo\n"


def test_the_rest_is_estimated_from_what_is_done(clock):
    line = ProgressLine(io.StringIO())
    clock[0] += 10
    assert numbers(line.left(0, 4)) == numbers(line.left(4, 4)) == [0, 10]
    assert numbers(line.left(1, 4)) == [0, 10, 0, 30]
    clock[0] += 175
    assert numbers(line.left(3, 4)) == [3, 5, 1, 1]


def test_a_stream_that_is_closed_stops_nothing(monkeypatch):
    closed = io.StringIO()
    line = ProgressLine(closed, every=0)
    closed.close()
    line.show("text")
    line.end()
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    ProgressLine(every=0).show("text")


def test_verify_tells_of_the_laws(tmp_path, monkeypatch):
    """The line names the law under way, and the number of laws with a result grows."""
    from ropelab.command import process
    from ropelab.command.apart import hold_apart

    monkeypatch.setattr(process, "PAUSE", 0.05)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_rope.py").write_text(
        "import time\nfrom ropelab.study.faults.correct import plain\n"
        "def rope(x, positions):\n    time.sleep(0.02)\n    return plain(x, positions)\n"
    )
    told = []
    names = ["isometry", "definition"]
    outcome = hold_apart(
        "slow_rope:rope", {"convention": "plain", "laws": names, "dtype": "float32"}, process.Limits(),
        lambda begun, held, asked: told.append((begun, held)),
    )  # fmt: skip
    assert outcome.verdict == "right", outcome
    held = [number for _, number in told]
    assert held == sorted(held) and held[0] == 0 and held[-1] <= 2
    assert told[0][0] == process.START and any(name in begun for begun, _ in told for name in names)


def test_a_broken_law_counts_once(monkeypatch):
    """Its result is noted before and after the search for a smaller counterexample."""
    from ropelab.command import apart, process

    notes, told = [("begun", "the law a"), ("result", {"law": "a"}), ("result", {"law": "a"})], []
    monkeypatch.setattr(apart, "run", lambda task, arguments, limits, tell: tell(notes) or process.Run(notes, ""))
    apart.hold_apart("a:b", {}, process.Limits(), lambda begun, held, asked: told.append((begun, held)))
    assert told == [("the law a", 1)]


@pytest.mark.process
def test_notebooks_tell_how_many_have_run(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    runner = pytest.importorskip("ropelab.study.engine.runner")
    from nbformat.v4 import new_code_cell, new_notebook

    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    sources, told = [], []
    for name, number in (("01_first", 1), ("02_second", 0)):  # each ends once this number of ended notebooks was told
        answer = str(tmp_path / "told" / str(number))
        waits = f"import os, time\nwhile not os.path.exists({answer!r}): time.sleep(0.05)"
        cells = [new_code_cell("smoke: bool = False", metadata={"tags": ["parameters"]}), new_code_cell(waits)]
        sources.append(tmp_path / f"{name}.ipynb")
        nbformat.write(new_notebook(cells=cells, metadata=metadata), sources[-1])

    (tmp_path / "told").mkdir()

    def tell(done):
        told.append(done)
        (tmp_path / "told" / str(done)).touch()

    runs = list(runner.run_notebooks(sources, tmp_path / "build", {}, together=2, tell=tell))
    assert [run.name for run in runs] == ["01_first", "02_second"] and not any(run.failure for run in runs)
    assert told == sorted(told) and set(told) == {0, 1}
