"""Turns on a shared GPU: preparations overlap, and nothing runs beside a timing."""

import os
import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

import pytest
import torch

from ropelab.bench import tuning, turns

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


def long_preparation(folder):
    """Prepare in short pieces, while another process waits for its time. Returns the pieces that were done by then."""
    with turns.taking_part(folder):
        (folder / "prepares").touch()
        wait_for(folder / "will time")
        for piece in range(2000):
            time.sleep(0.005)
            turns.give_way()
            if (folder / "timed").exists():
                return piece
    return None


def away(folder):
    """Leave the GPU alone until another process has timed. Returns whether it has."""
    with turns.taking_part(folder):
        with turns.off_the_gpu():
            (folder / "prepares").touch()
            return wait_for(folder / "timed")


def times_once(folder):
    wait_for(folder / "prepares")
    with turns.taking_part(folder):
        (folder / "will time").touch()
        with turns.alone():
            (folder / "timed").touch()


def wait_for(file, seconds=60):
    until = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.001)
    return file.exists()


@pytest.mark.parametrize("prepare", [long_preparation, away])
def test_a_timing_does_not_wait_for_the_end_of_a_long_preparation(prepare, tmp_path):
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        prepared, timed = pool.submit(prepare, tmp_path), pool.submit(times_once, tmp_path)
        timed.result(timeout=120)
        found = prepared.result(timeout=120)
    assert found is True or found is not None and found < 100


def test_a_compiler_chooses_a_tile_in_a_turn_of_its_own(monkeypatch):
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    happened = []

    @contextmanager
    def alone():
        happened.append("begins")
        yield
        happened.append("ends")

    monkeypatch.setattr(turns, "alone", alone)
    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", lambda self: happened.append("chooses"))
    with tuning.in_turns():
        CachingAutotuner.benchmark_all_configs(None)
    assert happened == ["begins", "chooses", "ends"]
    CachingAutotuner.benchmark_all_configs(None)
    assert happened == ["begins", "chooses", "ends", "chooses"]


def test_a_compilation_leaves_the_gpu_to_others(monkeypatch):
    """The backward is compiled at its first call, and a reset of dynamo forgets its own callbacks."""
    happened = []

    @contextmanager
    def off_the_gpu():
        happened.append("leaves")
        yield
        happened.append("is back")

    monkeypatch.setattr(turns, "off_the_gpu", off_the_gpu)
    x = torch.ones(3, requires_grad=True)
    with tuning.in_turns():
        torch._dynamo.reset()
        double = torch.compile(lambda x: 2 * x, backend="aot_eager", dynamic=False)
        double(x).sum().backward()
        compiled = list(happened)
        double(x)
    assert (
        compiled == happened
        and compiled[::2] == ["leaves"] * (len(compiled) // 2)
        and set(compiled[1::2]) == {"is back"}
    )
    torch._dynamo.reset()
    torch.compile(lambda x: 3 * x, backend="aot_eager")(x)
    assert compiled == happened


def test_a_turn_within_a_compilation(tmp_path):
    """A process that leaves the GPU alone may take a turn, and leaves the GPU alone afterwards."""
    with turns.taking_part(tmp_path) as seconds:
        other = turns._Turns(tmp_path)
        with turns.off_the_gpu():
            with turns.alone():
                time.sleep(0.01)
            turns.give_way()
            other.change(turns._Does.TIMING)  # would wait forever for a process that prepares
            other.change(turns._Does.NOTHING)
        assert turns._turns.does is turns._Does.PREPARING
        with turns.alone(), turns.alone(), turns.off_the_gpu():
            turns.give_way()
            assert turns._turns.does is turns._Does.TIMING
        assert turns._turns.does is turns._Does.PREPARING
    other.close()
    assert 0.01 <= seconds.alone < 5 and seconds.waiting >= 0


def test_a_choice_beside_other_processes_is_not_kept(tmp_path):
    """A choice that is saved within the context leaves no file; outside it does."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from triton import Config

    def saved(name):
        cache = AutotuneCache.create({"autotune_local_cache": True}, str(tmp_path / name / "kernel.py"), "hash")
        cache.save(Config({"XBLOCK": 1}), 1)
        return list((tmp_path / name).glob("*.best_config"))

    with tuning.not_kept():
        assert saved("within") == []
    assert len(saved("outside")) == 1


def test_what_is_kept_within_the_context_is_read_outside(tmp_path):
    """The code that torch.compile keeps holds the bound method ``save``."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    with tuning.not_kept():
        kept = pickle.dumps(AutotuneCache("hash").save)
    assert pickle.loads(kept).__func__ is AutotuneCache.save
