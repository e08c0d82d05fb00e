"""This file runs jobs side by side on one GPU, each in its own process, as many at a time as the memory allows."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from ropelab.bench import workers
from ropelab.bench.gpu_memory import CONTEXT_BYTES
from ropelab.bench.study import GIB


@dataclass(frozen=True)
class Job:
    """A module-level function and its arguments, which are pickled; ``gpu_bytes``: that torch reserves at most."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    gpu_bytes: int = 0

    @property
    def takes(self) -> int:
        """Bytes of the GPU, its process's context included."""
        return self.gpu_bytes + CONTEXT_BYTES


class DoesNotFit(Exception):
    """A job that was not started, as it takes more than there is."""


def own_process() -> Executor:
    """A process that starts with the first job, without Triton's interpreter."""
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=workers.quiet)


def side_by_side(
    jobs: Iterable[Job], free_bytes: int, *, most: int = workers.MOST_PROCESSES,
    executor: Callable[[], Executor] = own_process,
) -> Iterator[tuple[Job, Any]]:  # fmt: skip
    """Run the jobs; the iterator yields each as it ends, with its result or with the exception that ended it.

    A job starts as soon as what it takes fits beside what the running ones take, the first in the list first; one that
    does not fit into ``free_bytes`` at all never starts, and ends with `DoesNotFit`. A process that dies takes its own
    job along and no other.

    Args:
        free_bytes: of the GPU, for all jobs together.
        most: processes at a time.
        executor: makes what runs one job.
    """
    waiting, running = list(jobs), {}
    while waiting or running:
        for job in list(waiting):
            taken = sum(other.takes for other, _ in running.values())
            if len(running) < most and taken + job.takes <= free_bytes:
                waiting.remove(job)
                own = executor()
                with workers.environment(interpret=False):  # the process starts now, and inherits it
                    running[own.submit(job.function, *job.arguments)] = job, own
        if not running:
            for job in waiting:
                needs, free = job.takes / GIB, free_bytes / GIB
                yield job, DoesNotFit(f"{job.name} takes {needs:.1f} GiB of the GPU, of which {free:.1f} GiB are free")
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job, own = running.pop(future)
            own.shutdown()  # its process has ended, and with it what it held of the GPU
            yield job, future.exception() or future.result()
