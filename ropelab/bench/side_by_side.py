"""Run jobs side by side on one GPU, each in its own process, as many at a time as the memory allows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from ropelab.bench import processes, workers
from ropelab.bench.gpu_memory import CONTEXT_BYTES
from ropelab.bench.study import GIB


@dataclass(frozen=True)
class Job:
    """A module-level function and its arguments, both pickled. ``gpu_bytes``: the most bytes that torch reserves."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    gpu_bytes: int = 0

    @property
    def takes(self) -> int:
        """The bytes of GPU memory that the process of the job needs, with its CUDA context."""
        return self.gpu_bytes + CONTEXT_BYTES


class DoesNotFit(Exception):
    """A job that was not started, because it needs more memory than the GPU has free."""


def own_process(modules: Sequence[str] = ()) -> Executor:
    """An executor with one process, which starts with the first job. ``modules`` is as in `processes.forked`."""
    return ProcessPoolExecutor(1, processes.forked([*modules, processes.COMPILER]), initializer=processes.quiet)


def side_by_side(
    jobs: Iterable[Job], free_bytes: int, *, most: int = workers.MOST_PROCESSES,
    executor: Callable[[], Executor] | None = None,
) -> Iterator[tuple[Job, Any]]:  # fmt: skip
    """Run the jobs, and yield each job when it ends, with its result or its exception.

    A job starts as soon as its memory fits beside the running jobs; earlier jobs of the list come first. A job that
    needs more than ``free_bytes`` never starts, and its exception is `DoesNotFit`. If a process dies, only its own job
    fails.

    Args:
        free_bytes: the GPU memory for all jobs together, in bytes.
        most: the largest number of processes at a time.
        executor: returns a new executor for one job, by default `own_process` with the modules of the jobs.
    """
    waiting, running = list(jobs), {}
    start = executor or partial(own_process, sorted({job.function.__module__ for job in waiting}))
    while waiting or running:
        for job in list(waiting):
            taken = sum(other.takes for other, _ in running.values())
            if len(running) < most and taken + job.takes <= free_bytes:
                waiting.remove(job)
                own = start()
                with processes.environment(interpret=False):  # the process starts now and inherits the environment
                    running[own.submit(job.function, *job.arguments)] = job, own
        if not running:
            for job in waiting:
                needs, free = job.takes / GIB, free_bytes / GIB
                yield job, DoesNotFit(f"{job.name} takes {needs:.1f} GiB of the GPU, of which {free:.1f} GiB are free")
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job, own = running.pop(future)
            own.shutdown()  # the process has ended, and its GPU memory is free
            yield job, future.exception() or future.result()
