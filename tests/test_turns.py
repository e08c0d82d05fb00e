"""Turns on a shared GPU: preparations overlap, and nothing runs beside a timing."""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import pytest

from ropelab.bench import turns

PREPARES, TIMES = 0.08, 0.03
PROCESSES, CELLS = 4, 5


def some_cells(folder):
    """Prepare and time some cells once all processes are here. Returns what was done, and when it began and ended."""
    found = []

    def note(what, seconds):
        began = time.monotonic()
        time.sleep(seconds)
        found.append((what, began, time.monotonic()))

    (folder / f"{os.getpid()} is here").touch()
    while len(list(folder.glob("* is here"))) < PROCESSES:
        time.sleep(0.001)
    with turns.taking_part(folder):
        for _ in range(CELLS):
            note("prepares", PREPARES)
            with turns.alone():
                note("times", TIMES)
    return found


def dies(folder):
    with turns.taking_part(folder), turns.alone():
        os._exit(1)


def a_cell(folder):
    with turns.taking_part(folder), turns.alone():
        return "timed"


def test_preparations_overlap_and_nothing_runs_beside_a_timing(tmp_path):
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        ran = list(pool.map(some_cells, [tmp_path] * PROCESSES))
    done = [(*entry, process) for process, entries in enumerate(ran) for entry in entries]
    assert len(done) == 2 * PROCESSES * CELLS
    for what, began, ended, process in done:
        beside = [other for other, start, end, by in done if by != process and start < ended and end > began]
        if what == "times":
            assert beside == []
    overlapping = [
        begun for what, begun, _, process in done if what == "prepares" and any(
            other == "prepares" and by != process and start <= begun < end for other, start, end, by in done)
    ]  # fmt: skip
    assert len(overlapping) >= (PROCESSES - 1) * CELLS // 2


def test_a_process_that_dies_gives_its_turn_up(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, pytest.raises(BrokenProcessPool):
        pool.submit(dies, tmp_path).result()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(a_cell, tmp_path).result(timeout=60) == "timed"


def test_without_other_processes_there_is_nothing_to_wait_for():
    with turns.alone():
        pass
