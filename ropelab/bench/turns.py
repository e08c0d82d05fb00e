"""Let processes prepare side by side on one GPU, while each of them times alone.

Two locked files decide. A process that prepares holds ``gpu`` shared. A process that times holds ``gpu`` alone, so no
other process computes meanwhile. A process that waits for its time holds ``waiting`` shared, and no process begins to
prepare before all waiting processes have timed. The preparations therefore overlap, and the timings follow each other.

A timing waits until each process that prepares gives way. A long preparation therefore consists of short pieces, with
`give_way` between the pieces. Work of the host alone, like an import or a compilation, belongs into `off_the_gpu`.

The operating system unlocks the files of a process that dies.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # Windows: no two processes share a GPU there, because a study runs alone without `taking_part`
    fcntl = None  # type: ignore[assignment]


@dataclass
class Seconds:
    """The seconds that a process has had the GPU to itself, and has waited for other processes."""

    alone: float = 0.0
    waiting: float = 0.0


class _Does(Enum):
    """What a process does with the GPU."""

    NOTHING, PREPARING, TIMING = range(3)


class _Turns:
    """The part of this process; ``folder`` holds the locked files."""

    def __init__(self, folder: Path):
        self.seconds, self.does = Seconds(), _Does.NOTHING
        self._gpu, self._waiting = open(folder / "gpu", "w"), open(folder / "waiting", "w")

    def change(self, to: _Does) -> None:
        """Wait until this process may do something else."""
        fcntl.flock(self._gpu, fcntl.LOCK_UN)
        if to is _Does.PREPARING:
            self._wait(fcntl.LOCK_EX, fcntl.LOCK_SH)
        elif to is _Does.TIMING:
            self._wait(fcntl.LOCK_SH, fcntl.LOCK_EX)
        self.does = to

    def _wait(self, waiting: int, gpu: int) -> None:
        began = time.monotonic()
        fcntl.flock(self._waiting, waiting)
        fcntl.flock(self._gpu, gpu)
        fcntl.flock(self._waiting, fcntl.LOCK_UN)
        self.seconds.waiting += time.monotonic() - began

    def close(self) -> None:
        self._gpu.close()  # which unlocks the files
        self._waiting.close()


_turns: _Turns | None = None


@contextmanager
def taking_part(folder: Path) -> Iterator[Seconds]:
    """Within the context this process prepares beside the other processes that name the same folder."""
    global _turns
    _turns = _Turns(folder)
    try:
        _turns.change(_Does.PREPARING)
        yield _turns.seconds
    finally:
        _turns.close()
        _turns = None


@contextmanager
def alone() -> Iterator[None]:
    """Within the context no other process that takes part computes. Without `taking_part` nothing happens."""
    if _turns is None or _turns.does is _Does.TIMING:
        yield
        return
    _synchronize()
    before = _turns.does
    _turns.change(_Does.TIMING)
    began = time.monotonic()
    try:
        yield
    finally:
        _synchronize()
        _turns.seconds.alone += time.monotonic() - began
        _turns.change(before)


def give_way() -> None:
    """Let the waiting processes time now, if this process prepares. Without `taking_part` nothing happens."""
    if _turns is not None and _turns.does is _Does.PREPARING:
        _synchronize()
        _turns.change(_Does.PREPARING)


@contextmanager
def off_the_gpu() -> Iterator[None]:
    """Within the context this process leaves the GPU alone, so others may time.

    Without `taking_part` nothing happens, and within `alone` this process keeps its turn. The times of eager calls
    suffer from the work of other processes on the host.
    """
    if _turns is None or _turns.does is _Does.TIMING:
        yield
        return
    _synchronize()
    before = _turns.does
    _turns.change(_Does.NOTHING)
    try:
        yield
    finally:
        _turns.change(before)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
