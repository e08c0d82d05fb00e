"""Measure the GPU time of short calls, and the host time of their launches.

GPU time: a CUDA graph captures the calls of each contender, one call for each set of buffers. The time therefore
contains neither Python nor the launch. If the sets together exceed the L2 cache, no call finds its data in the cache.
Every round replays the graph of each contender once, in a new random order. A drift of clocks or temperature therefore
affects all contenders alike.

The graphs share their memory. No two of them run at once, and nothing reads a result after the replay.
"""

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from ropelab.bench import garbage, gpu_memory

Call = Callable[[], object]

QUANTILES = {"median_us": 0.5, "q20_us": 0.2, "q80_us": 0.8}
_MAX_CALLS_PER_GRAPH = 4096
_WARM_UP = 3
_LONG_MS = 20.0
"""A replay that takes so long varies little from one round to the next."""
_ROUNDS_OF_LONG = 3
_TRIES = 3
_FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")


def cache_bytes() -> int:
    """The size of the L2 cache of the current GPU, in bytes."""
    if any(few_sets for _, few_sets in _replaced):
        return 1
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def summarize(samples_us: Sequence[float]) -> dict[str, float]:
    """``median_us``, ``q20_us``, ``q80_us`` and the number of ``samples``."""
    values = np.asarray(samples_us, dtype=float)
    return {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()} | {"samples": len(values)}


def gpu_times(
    contenders: Mapping[str, Callable[[], Sequence[Call]]],
    *,
    rounds: int = 15,
    graph_ms: float = 0.5,
    seed: int = 0,
) -> pd.DataFrame:
    """Time per call on the GPU.

    Args:
        contenders: the name -> ``prepare()``, which returns one call for each set of buffers. ``prepare`` runs on the
            side stream before the capture: a backward runs its forward there. The result of a call is kept until the
            next call on the same set, so the results take turns in memory as the inputs do.
        rounds: the number of samples for each contender; at most three if a replay of the contender takes 20 ms.
        graph_ms: the least GPU time of one replay, in milliseconds. A graph repeats the sets of buffers until it takes
            this time. The time is long against the resolution of an event, about a microsecond. With few tokens, the
            time of the capture grows with it.
        seed: the seed of the order of contenders.

    Returns:
        A row for each contender: contender, status (``"ok"`` or ``"failed: <reason>"``), median_us, q20_us and
        q80_us (microseconds per call), and samples.
    """
    if _replaced:
        return _replaced[-1][0](contenders)
    stream, memory = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    graphs: dict[str, _Graph] = {}
    status = dict.fromkeys(contenders, "ok")
    for name, prepare in contenders.items():
        try:
            graphs[name] = _graph(prepare, stream, memory, graph_ms)
        except Exception as error:  # one contender that fails must not end the run
            status[name] = failure(error)
            memory = torch.cuda.graph_pool_handle()  # a capture that failed may not have left its pool
    samples = _replay(graphs, stream, rounds, random.Random(seed))
    return _table(status, samples)


def _table(status: Mapping[str, str], samples: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    rows = [
        {"contender": name, "status": outcome, **(summarize(samples[name]) if name in samples else {})}
        for name, outcome in status.items()
    ]
    return pd.DataFrame(rows, columns=["contender", "status", *QUANTILES, "samples"])


@dataclass(frozen=True)
class _Graph:
    """A captured graph and the number of calls in it."""

    graph: torch.cuda.CUDAGraph
    calls: int


def _graph(
    prepare: Callable[[], Sequence[Call]], stream: torch.cuda.Stream, memory: tuple[int, int], graph_ms: float
) -> _Graph:
    """Capture the calls; ``memory`` is the pool for their results."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls = prepare()
        for call in calls[:_WARM_UP]:  # compiles, and lets libraries allocate memory, which the capture forbids
            call()
    stream.synchronize()
    graph = _capture(calls, 1, stream, memory)
    ms = _elapsed_ms(graph, stream)
    repeats = max(1, min(math.ceil(graph_ms / ms), _MAX_CALLS_PER_GRAPH // len(calls)))
    if repeats > 1:
        graph = _capture(calls, repeats, stream, memory)
        with torch.cuda.stream(stream):
            graph.replay()  # the first replay uploads the graph
        stream.synchronize()
    return _Graph(graph, repeats * len(calls))


def _capture(
    calls: Sequence[Call], repeats: int, stream: torch.cuda.Stream, memory: tuple[int, int]
) -> torch.cuda.CUDAGraph:
    # Some versions of ``torch.cuda.graph`` run the garbage collector before every capture.
    graph = torch.cuda.CUDAGraph()
    kept: list[object] = [None] * len(calls)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=memory)
        try:
            for _ in range(repeats):
                for i, call in enumerate(calls):
                    kept[i] = call()
        finally:
            graph.capture_end()
    return graph


def _elapsed_ms(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """The milliseconds of a replay: the least of some replays, because the first one also uploads the graph."""
    ms = math.inf
    for _ in range(_TRIES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record()
            graph.replay()
            end.record()
        end.synchronize()
        ms = min(ms, start.elapsed_time(end))
        if ms >= _LONG_MS:
            break
    return ms


def _replay(graphs: Mapping[str, _Graph], stream: torch.cuda.Stream, rounds: int, order: random.Random):
    """The name of each contender -> its microseconds per call in each round.

    The host queues a whole round while the GPU sleeps. The GPU then runs graph after graph without waiting for the
    host, so the time between two events is the time of one replay.
    """
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    long: set[str] = set()
    for number in range(rounds if graphs else 0):
        names = [name for name in graphs if number < _ROUNDS_OF_LONG or name not in long]
        order.shuffle(names)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(names) + 1)]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # cycles, about half a millisecond
            events[0].record()
            for name, event in zip(names, events[1:], strict=True):
                graphs[name].graph.replay()
                event.record()
        stream.synchronize()
        for name, start, end in zip(names, events, events[1:], strict=False):
            ms = start.elapsed_time(end)
            samples[name].append(1000 * ms / graphs[name].calls)
            if ms >= _LONG_MS:
                long.add(name)
    return samples


def host_times(
    contenders: Mapping[str, Callable[[], Call]],
    *,
    rounds: int = 40,
    batch: int = 50,
    seed: int = 0,
    both: bool = False,
) -> pd.DataFrame:
    """Measure the time for which an eager call keeps the host busy.

    A sample is the time of ``batch`` calls in a row, and the host waits for the GPU only before a sample. The calls
    must be short on the GPU: then its queue never fills up, and no call waits. Contenders take turns as in `gpu_times`.
    The garbage collector waits, as in Python's ``timeit``.

    Args:
        contenders: the name -> ``prepare()``, which returns the call.
        rounds: the number of samples for each contender.
        batch: the number of calls in a sample.
        seed: the seed of the order of contenders.
        both: measure until host and GPU are done with the calls, so that the slower of the two decides.

    Returns:
        The columns of `gpu_times`, in microseconds of host time per call.
    """
    if _replaced:
        return _replaced[-1][0](contenders)
    calls: dict[str, Call] = {}
    status = dict.fromkeys(contenders, "ok")
    for name, prepare in contenders.items():
        try:
            call = prepare()
            for _ in range(batch):
                call()
            _synchronize()
            calls[name] = call
        except Exception as error:  # one contender that fails must not end the run
            status[name] = failure(error)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names, order = list(calls), random.Random(seed)
    with garbage.uncollected():
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                call = calls[name]
                _synchronize()
                start = time.perf_counter_ns()
                for _ in range(batch):
                    call()
                if both:
                    _synchronize()
                samples[name].append((time.perf_counter_ns() - start) / 1000 / batch)
    return _table(status, samples)


Instead = Callable[[Mapping[str, Callable[[], Sequence[Call] | Call]]], pd.DataFrame]


_replaced: list[tuple[Instead, bool]] = []
"""What the contexts of `instead` were given, the innermost last."""


@contextmanager
def instead(times: Instead, *, few_sets: bool = True) -> Iterator[None]:
    """Within the context `gpu_times` and `host_times` time nothing, and return what ``times`` makes of the contenders.

    Args:
        few_sets: `cache_bytes` returns 1, so workloads have few sets of buffers.
    """
    _replaced.append((times, few_sets))
    try:
        yield
    finally:
        _replaced.pop()


def stopped() -> AbstractContextManager[None]:
    """Within the context nothing is timed: one call of every contender is made, and 1 us reported."""
    return instead(_called)


def is_stopped() -> bool:
    """Whether `stopped` is active: calls then only compile, so a study may leave out everything else."""
    return any(times is _called for times, _ in _replaced)


def refused() -> AbstractContextManager[None]:
    """Within the context, `gpu_times` and `host_times` raise RuntimeError: other jobs share the GPU."""
    return instead(_refuse, few_sets=False)


def _refuse(contenders: Mapping[str, Callable]) -> pd.DataFrame:
    raise RuntimeError(
        f"{', '.join(map(str, contenders))}: nothing can be timed here, because other jobs share the GPU"
    )


def _called(contenders: Mapping[str, Callable[[], Sequence[Call] | Call]]) -> pd.DataFrame:
    status = dict.fromkeys(contenders, "ok")
    for name, prepare in contenders.items():
        try:
            calls = prepare()
            (calls[0] if isinstance(calls, Sequence) else calls)()
        except Exception as error:  # one contender that fails must not end the run
            status[name] = failure(error)
    samples = {name: [1.0] for name, outcome in status.items() if outcome == "ok"}
    return _table(status, samples)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def failure(error: Exception) -> str:
    """The status of a contender that raised: ``"failed: <type>: <first line of the message>"``, without folders.

    If the GPU ran out of memory while the contender was alone on the GPU, the status says so.

    Raises:
        BaseException: the error itself, if the GPU ran out of memory while other jobs shared the GPU. The caller must
            measure again without the other jobs.
    """
    if gpu_memory.ran_out(error):
        if gpu_memory.is_shared():
            raise error
        if torch.cuda.is_available():
            return f"failed: {gpu_memory.OUT_OF_MEMORY}, alone on a GPU of {gpu_memory.total_gib():.0f} GiB"
    lines = _FOLDERS.sub("", str(error)).strip().splitlines()
    return f"failed: {type(error).__name__}" + (f": {lines[0][:200]}" if lines else "")
