"""Measure the time that the host takes for a call with few tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from ropelab.bench import peers, timing
from ropelab.bench.compare import bind, checked, progress, tidy
from ropelab.bench.workloads import DENSE_CELLS, Buffers
from ropelab.layout.pairing import LAYOUTS

NO_GRAD, PLAIN, RECORDED, BOTH = "no_grad", "plain tensors", "recorded", "forward and backward"
"""Calls under ``torch.no_grad()``; calls in grad mode with tensors that need no gradient; calls that autograd records,
because the tensors need a gradient; and such calls with their backward."""
CALLS = NO_GRAD, PLAIN, RECORDED, BOTH


def host(*, smoke: bool = False) -> pd.DataFrame:
    """Measure the host time of an eager call with few tokens, for each of `CALLS` that a contender offers.

    Columns: the columns of the workload, call, contender, status, median_us, q20_us, q80_us, samples.
    """
    frames = []
    shapes = [replace(DENSE_CELLS[-1].workload, layout=layout) for layout in LAYOUTS]
    for shape in progress(shapes, lambda shape: shape.description):
        (buffers,) = shape.buffers()
        bound, status = bind(shape, [peer for peer in peers.PEERS if peer.own_host_time], buffers)
        for name in CALLS:
            work, outcome = replace(shape, direction="backward" if name == BOTH else "forward"), dict(status)
            contenders = {
                peer.name: partial(_call, rotate, buffers, name)
                for peer, rotate in checked(bound, work, buffers, outcome).items()
                if name in (NO_GRAD, PLAIN) or "backward" in peer.directions
            }
            with torch.set_grad_enabled(name != NO_GRAD):
                frame = timing.host_times(contenders, rounds=3 if smoke else 25, batch=40)
            frames.append(tidy(frame, work.columns, outcome).assign(call=name))
    return pd.concat(frames, ignore_index=True)


def _call(rotate: peers.Rotate, buffers: Buffers, name: str) -> Callable[[], object]:
    if name == BOTH:
        return lambda: torch.autograd.grad(rotate(*buffers.inputs), buffers.inputs, buffers.cotangents)
    return partial(rotate, *(x if name == RECORDED else x.detach() for x in buffers.inputs))
