"""Measure whole models with random weights, with and without ropelab: see `ropelab.bench.model_steps`.

Eager calls are timed in rounds. Each round times every way, in a new random order, so a drift of the machine affects
all ways alike. Compiled calls are timed way after way, because the compiler would compile again at every change.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
import torch

from ropelab.bench import gpu_memory, timing
from ropelab.bench.cells import progress
from ropelab.bench.model_steps import (
    ARCHITECTURES,
    NONE,
    NORMS,
    OURS,
    PLAIN,
    PREFILL,
    TRAINING,
    VOCABULARY,
    WAYS,
    Architecture,
    in_way,
    steps,
)
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.study import GIB

LOSS = "loss"
_TIME = {"quantity": "time", "unit": "ms"}
ROUNDS, SHORT_ROUNDS, LOSSES, LEARNING_RATE = 10, 5, 100, 1e-4
_LEAST_MS = 50.0
"""A way is called in a round until its calls have taken this time together."""

Call = Callable[[], Any]


def whole_models(*, smoke: bool = False, short: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Measure all architectures. Needs Transformers.

    The short form measures the first architecture in `SHORT_ROUNDS` rounds, and under the compiler its prefill alone.

    On a GPU the architectures follow each other, each in a process of its own, because no kernel of a process runs
    after a fault.

    Returns:
        A row for each value. Columns: model, mode (``"eager"`` or ``"compiled"``), way, step, quantity (``"time"``,
        ``"kernel time"``, ``"launches"``, ``"peak memory"`` or ``"loss"``), place (the number of the round of a time,
        of the profile of a kernel time, or of the training step of a loss, else 0), value, unit, status (``"ok"``, or
        why there is no value).
    """
    columns = ["model", "mode", "way", "step", "quantity", "place", "value", "unit", "status"]
    if timing.is_stopped():  # there is nothing to compile ahead: every step is called before it is timed
        return pd.DataFrame(columns=columns)
    numbers = [0] if short else [1] if smoke else range(len(ARCHITECTURES))
    found = dict(_outcomes(numbers, device, smoke, short))
    frames = []
    for number in numbers:
        architecture = ARCHITECTURES[number]
        outcome = found[architecture.name]
        if isinstance(outcome, BaseException):
            row = {"mode": "eager", "way": OURS, "step": TRAINING, "quantity": "time", "place": 0, "unit": "ms"}
            outcome = [row | {"status": timing.failure(outcome)}]
        frames.append(pd.DataFrame(outcome).assign(model=architecture.name))
    return pd.concat(frames, ignore_index=True).reindex(columns=columns)


def _outcomes(
    numbers: Iterable[int], device: torch.device | str, smoke: bool, short: bool
) -> Iterator[tuple[str, Any]]:
    """The name of each architecture, and its rows or its exception, in the order in which the architectures end."""
    if smoke or torch.device(device).type == "cpu":
        for number in progress(list(numbers), lambda i: ARCHITECTURES[i].name):
            try:
                yield ARCHITECTURES[number].name, _rows(number, device, smoke, short)
            except (ImportError, RuntimeError) as error:  # the package is missing, or a step failed
                yield ARCHITECTURES[number].name, error
        return
    jobs = [Job(ARCHITECTURES[number].name, _rows, (number, device, smoke, short)) for number in numbers]
    for job, outcome in side_by_side(jobs, sys.maxsize, most=1):
        print(f"    {job.name}", flush=True)
        yield job.name, outcome


def _rows(number: int, device: torch.device | str, smoke: bool, short: bool) -> list[dict[str, Any]]:
    """The rows of one of `ARCHITECTURES`, without the column model.

    Raises:
        ImportError: the package of the model is not installed.
    """
    architecture = ARCHITECTURES[number]
    model = architecture.build(device, smoke)
    # cuDNN's attention faults in the backward of Flux without ropelab (torch 2.11, H100), so no model may choose it.
    torch.backends.cuda.enable_cudnn_sdp(False)
    rounds = 2 if smoke else SHORT_ROUNDS if short else ROUNDS
    rows = list(_eager(model, smoke, rounds))
    if architecture.compiled and not smoke:
        rows += _compiled(model, rounds, (PREFILL,) if short else (TRAINING, PREFILL))
    if architecture.losses:
        rows += _losses(architecture, model, smoke)
    return rows


def _eager(model: torch.nn.Module, smoke: bool, rounds: int) -> Iterator[dict[str, Any]]:
    """Times, launches and peak memory of each eager step, in each way."""
    works: set[tuple[str, str]] = set()
    for way in WAYS:
        row = {"mode": "eager", "way": way, "place": 0, "status": "ok"}
        try:
            context = in_way(way, model)
        except ValueError as reason:
            yield row | {"step": TRAINING, "quantity": "time", "unit": "ms", "status": f"not offered: {reason}"}
            continue
        with context:
            for step, call in steps(model, model, smoke, decode=True).items():
                try:
                    yield from _resources(model, call, row | {"step": step}, rounds // 2)
                    works.add((way, step))
                except Exception as error:
                    yield row | {"step": step, "quantity": "time", "unit": "ms", "status": timing.failure(error)}
        model.zero_grad(set_to_none=True)
    for (way, step), found in _in_rounds(model, works, smoke, rounds).items():
        row = {"mode": "eager", "way": way, "status": "ok", "step": step}
        yield from (row | {"place": place, **_TIME, "value": ms} for place, ms in enumerate(found))


def _in_rounds(
    model: torch.nn.Module, works: Collection[tuple[str, str]], smoke: bool, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Way and step -> the milliseconds of a call, the median of each round."""
    ways = [way for way in WAYS if any(way == other for other, _ in works)]
    calls = {}
    for way in ways:
        with in_way(way, model):  # decoding begins with a cache of the way's own
            found = steps(model, model, smoke, decode=True).items()
            calls |= {(way, step): call for step, call in found if (way, step) in works}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(ways)
        for way in ways:
            with in_way(way, model):
                for key, call in calls.items():
                    if key[0] == way:
                        samples[key].append(statistics.median(_milliseconds(call)))
        model.zero_grad(set_to_none=True)
    return samples


def _compiled(model: torch.nn.Module, rounds: int, compiled: Collection[str]) -> Iterator[dict[str, Any]]:
    """Times, launches and peak memory of these steps compiled, in some of the ways."""
    for way in _ways_compiled(model):
        with in_way(way, model):
            torch._dynamo.reset()
            run = torch.compile(model, dynamic=False)
            calls = steps(model, run, smoke=False, decode=False)
            for step, call in ((step, calls[step]) for step in compiled):
                row = {"mode": "compiled", "way": way, "place": 0, "status": "ok", "step": step}
                try:
                    yield from _resources(model, call, row, rounds // 2)
                    for place in range(rounds):
                        yield row | {"place": place, **_TIME, "value": statistics.median(_milliseconds(call))}
                except Exception as error:
                    yield row | {"quantity": "time", "unit": "ms", "status": timing.failure(error)}
        model.zero_grad(set_to_none=True)


def _resources(model: torch.nn.Module, call: Call, row: Mapping[str, Any], profiles: int) -> Iterator[dict[str, Any]]:
    """The peak memory of a call, its launches and the time of its kernels, on a GPU.

    The first call compiles and allocates. The kernels of a call follow each other, so the time of a step beyond the sum
    of theirs is waiting for the host.
    """
    call()
    if model.device.type != "cuda":
        return
    gpu_memory.forget_peak()
    call()
    yield {**row, "quantity": "peak memory", "value": torch.cuda.max_memory_allocated() / GIB, "unit": "GiB"}
    found = [_kernels_ms(call) for _ in range(profiles)]
    yield {**row, "quantity": "launches", "value": len(found[0]), "unit": "kernels"}
    for place, each in enumerate(found):
        yield {**row, "quantity": "kernel time", "place": place, "value": sum(each), "unit": "ms"}


def _kernels_ms(call: Call) -> list[float]:
    """The milliseconds of each kernel, copy and fill that one call runs on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.time_range.elapsed_us() / 1e3 for event in on_gpu]


def _ways_compiled(model: torch.nn.Module) -> tuple[str, ...]:
    """Three ways, as compiling takes half a minute for each: of the two ways with ropelab, the one that fuses more."""
    try:
        with in_way(NORMS, model):
            return PLAIN, NORMS, NONE
    except ValueError:
        return PLAIN, OURS, NONE


def _milliseconds(call: Call) -> list[float]:
    """The times of some calls, after a call that is not counted."""
    call()
    (first,) = _times(call, 1)
    return [first, *_times(call, math.ceil(_LEAST_MS / first) - 1)]


def _times(call: Call, count: int) -> list[float]:
    """The milliseconds of each of so many calls in a row."""
    return _events_ms(call, count) if torch.cuda.is_available() else _clock_ms(call, count)


def _events_ms(call: Callable[[], Any], rounds: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    torch.cuda.synchronize()
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _clock_ms(call: Callable[[], Any], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begin))
    return times


def _losses(architecture: Architecture, model: torch.nn.Module, smoke: bool) -> Iterator[dict[str, Any]]:
    """The losses of training steps on the same random tokens, from the same weights, in each way that rotates."""
    begin = {name: x.detach().clone() for name, x in model.state_dict().items()}
    device = next(model.parameters()).device
    count, tokens = (3, 16) if smoke else (LOSSES, 512)
    for way in (PLAIN, OURS, NORMS):
        model.load_state_dict(begin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator(device).manual_seed(2)
        ids = torch.randint(1, VOCABULARY, (4, tokens), generator=generator, device=device)
        row = {"mode": "eager", "way": way, "step": TRAINING, "quantity": LOSS, "unit": "nats", "status": "ok"}
        try:
            context = in_way(way, model)
        except ValueError:
            continue
        with context:
            found = []
            for _ in range(count):
                optimizer.zero_grad(set_to_none=True)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
        yield from (row | {"place": place, "value": float(loss)} for place, loss in enumerate(found))
    model.load_state_dict(begin)
