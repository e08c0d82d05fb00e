"""Measure the time that the host takes for a call with few tokens, and for a projection with any number of tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch

from ropelab import apply_rope, qkv_rope, qkv_rope_and_cache, rope_and_cache, rotary_table
from ropelab.bench import peers, timing
from ropelab.bench.cells import progress
from ropelab.bench.names import BOTH, CALLS, NO_GRAD, PLAIN, RECORDED
from ropelab.bench.operation import checked, divided, tidy
from ropelab.bench.projection import Projection
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.workloads import DENSE_CELLS, Buffers
from ropelab.layout.pairing import LAYOUTS

LINEAR, STEPS, ONE_CALL, ON_PATH = "F.linear", "F.linear and apply_rope", "qkv_rope", 'qkv_rope(path="{}")'
CACHED_STEPS, CACHED = "F.linear and rope_and_cache", "qkv_rope_and_cache"
TOKENS = 1, 64, 512, 4096, 16384
PAGE = 16


def host(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Measure the host time of an eager call with few tokens, for each of `CALLS` that a contender offers.

    Columns: the columns of the workload, call, contender, status, median_us, q20_us, q80_us, samples.
    """
    frames, contending, work = [], peers.of("host"), DENSE_CELLS[-1].workload
    cases = [PeerRotation(replace(work, layout=layout), contending, count=1) for layout in LAYOUTS]
    for rotation in progress(cases, lambda rotation: rotation.description):
        sets = rotation.sets(device)
        found = rotation.contenders(sets, device)
        for name in CALLS:
            step = "backward" if name == BOTH else "forward"
            right, wrong = divided(found, checked(rotation, sets, found, device, step), step)
            contenders = {
                peer: partial(_call, one.run, sets[0], name)
                for peer, one in right.items()
                if name in (NO_GRAD, PLAIN) or one.offers("backward")
            }
            with torch.set_grad_enabled(name != NO_GRAD):
                frame = timing.host_times(contenders, rounds=3 if smoke else 25, batch=40)
            frames.append(tidy(frame, rotation.at(step).columns, wrong).assign(call=name))
    return pd.concat(frames, ignore_index=True)


def _call(rotate: peers.Rotate, buffers: Buffers, name: str) -> Callable[[], object]:
    if name == BOTH:
        return lambda: torch.autograd.grad(rotate(*buffers.inputs), buffers.inputs, buffers.cotangents)
    return partial(rotate, *(x if name == RECORDED else x.detach() for x in buffers.inputs))


def projection(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Measure the host time of an eager projection to q, k and v with a rotation, warm, for all of `CALLS` but `BOTH`.

    Columns: tokens, inputs, outputs, q_heads, k_heads, head_dim, call, contender, status, median_us, q20_us, q80_us,
        samples.
    """
    cases, frames = [Projection(tokens, 4096, 32, 8) for tokens in TOKENS], []
    for case in progress(cases[:1] if smoke else cases, lambda case: f"{case.tokens} x {case.inputs}"):
        for name in CALLS[:3]:
            with torch.set_grad_enabled(name != NO_GRAD):
                calls = _projections(case, device, recorded=name == RECORDED)
                frame = timing.host_times(calls, rounds=3 if smoke else 25, batch=20)
            columns = {key: value for key, value in case.columns.items() if key != "block"}
            frames.append(tidy(frame, columns, {}).assign(call=name))
    return pd.concat(frames, ignore_index=True)


def _projections(case: Projection, device: torch.device | str, recorded: bool) -> dict[str, Callable]:
    """A projection in one call and in two; also into a cache, unless autograd records it, and overwrites nothing."""
    x, weight = (
        torch.zeros(*sizes, case.inputs, device=device, dtype=torch.bfloat16)
        for sizes in ((1, case.tokens), (case.outputs,))
    )
    weight.requires_grad_(recorded)
    tables = dict(zip(("cos", "sin"), rotary_table(case.tokens, case.head_dim, device=device), strict=True))
    counts = case.q_heads, case.k_heads, case.k_heads
    heads: dict[str, Any] = {"q_heads": case.q_heads, "k_heads": case.k_heads}
    blocks, slots = -(-case.tokens // PAGE), torch.arange(case.tokens, device=device)
    caches = [x.new_zeros(blocks, PAGE, case.k_heads, case.head_dim) for _ in range(2)]

    def heads_of_product():
        y = torch.nn.functional.linear(x, weight)
        return y.view(*y.shape[:-1], sum(counts), case.head_dim).split(counts, -2)

    def steps():
        q, k, v = heads_of_product()
        return *apply_rope(q, k, inplace=not recorded, **tables), v

    def cached_steps():
        q, k, v = heads_of_product()
        return rope_and_cache(q, k, v, *caches, slots, q_out=q, seq_format="bshd", **tables)

    calls = {LINEAR: partial(torch.nn.functional.linear, x, weight), STEPS: steps}
    calls |= {
        name: partial(qkv_rope, x, weight, path=path, **heads, **tables)
        for name, path in ((ONE_CALL, "auto"), *((ON_PATH.format(path), path) for path in ("pass", "product")))
    }
    if not recorded:
        calls[CACHED_STEPS] = cached_steps
        cached = partial(qkv_rope_and_cache, x, weight, key_cache=caches[0], value_cache=caches[1], slot_mapping=slots)
        calls[CACHED] = partial(cached, seq_format="bshd", **heads, **tables)
    return {name: lambda call=call: call for name, call in calls.items()}
