"""Run jobs side by side on one GPU, each in its own process, as many at a time as the memory allows."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any

import torch

from ropelab.bench import processes, reached, workers
from ropelab.bench.gpu_memory import CONTEXT_BYTES
from ropelab.bench.study import GIB
from ropelab.progress import minutes

SILENT_SECONDS = 300.0
"""Where no job ends for so long, a line says which jobs run."""


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


def own_process(modules: Sequence[str] = ()) -> processes.Pool:
    """A pool of one process, which starts with the first job. ``modules`` is as in `processes.forked`."""
    compiler = [processes.COMPILER] * torch.cuda.is_available()
    return processes.Pool(1, processes.forked([*modules, *compiler]), initializer=processes.quiet)


def side_by_side(
    jobs: Iterable[Job], free_bytes: int, *, most: int = workers.MOST_PROCESSES
) -> Iterator[tuple[Job, Any]]:
    """Run the jobs, and yield each job when it ends, with its result or its exception.

    A job starts as soon as its memory fits beside the running jobs; earlier jobs of the list come first. A job that
    needs more than ``free_bytes`` never starts, and its exception is `DoesNotFit`. If a process dies, only its own job
    fails. No process outlives its job, and none outlives the iterator. While no job ends, a line names those that run.

    Args:
        free_bytes: the GPU memory for all jobs together, in bytes.
        most: the largest number of processes at a time.
    """
    waiting, running = list(jobs), {}
    modules = sorted({job.function.__module__ for job in waiting})
    try:
        while waiting or running:
            for job in list(waiting):
                taken = sum(other.takes for other, *_ in running.values())
                if len(running) < most and taken + job.takes <= free_bytes:
                    waiting.remove(job)
                    own = own_process(modules)
                    with processes.environment(interpret=False):  # the process starts now and inherits the environment
                        running[own.submit(_noting, job.function, *job.arguments)] = job, own, time.monotonic()
            if not running:
                for job in waiting:
                    needs, free = f"{job.takes / GIB:.1f} GiB", f"{free_bytes / GIB:.1f} GiB"
                    yield job, DoesNotFit(f"{job.name} takes {needs} of the GPU, of which {free} are free")
                return
            while not (ended := wait(running, SILENT_SECONDS, FIRST_COMPLETED).done):
                now = time.monotonic()
                said = ", ".join(f"{job.name} for {minutes(now - began)}" for job, _, began in running.values())
                print(f"    still running: {said}", flush=True)
            for future in ended:
                job, own, _ = running[future]
                own.end()  # the process has ended, and its GPU memory is free
                del running[future]
                if error := future.exception():
                    yield job, error
                    continue
                result, kernels = future.result()
                reached.note(kernels)
                yield job, result
    finally:
        for _, own, _ in running.values():
            own.end(at_once=True)


def _noting(function: Callable[..., Any], *arguments: Any) -> tuple[Any, set[str]]:
    """The result of a job, and the kernels of this project that it launched."""
    with reached.noted() as kernels:
        return function(*arguments), kernels
