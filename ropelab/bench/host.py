"""This file measures the time that the host takes for a call with few tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from ropelab.bench import peers, timing
from ropelab.bench.compare import bind, checked, progress, tidy
from ropelab.bench.workloads import DENSE_CELLS, Buffers
from ropelab.layout.pairing import LAYOUTS


def host(*, smoke: bool = False) -> pd.DataFrame:
    """Measure the host time of an eager forward call with few tokens, with and without autograd.

    Columns: the columns of the workload, autograd, contender, status, median_us, q20_us, q80_us, samples.
    """
    frames = []
    shapes = [replace(DENSE_CELLS[-1].workload, layout=layout) for layout in LAYOUTS]
    for shape in progress(shapes, lambda shape: shape.description):
        sets = shape.buffers()
        bound, status = bind(shape, [peer for peer in peers.PEERS if peer.own_host_time], sets[0])
        for autograd in (True, False):
            ready = checked(bound, shape, sets[0], status)
            contenders = {
                peer.name: partial(_host_call, rotate, sets[0], autograd)
                for peer, rotate in ready.items()
                if not autograd or "backward" in peer.directions
            }
            with torch.set_grad_enabled(autograd):
                frame = timing.host_times(contenders, rounds=3 if smoke else 25, batch=40)
            frames.append(tidy(frame, shape.columns, status).assign(autograd=autograd))
    return pd.concat(frames, ignore_index=True)


def _host_call(rotate: peers.Rotate, buffers: Buffers, autograd: bool) -> Callable:
    q, k = (x if autograd else x.detach() for x in (buffers.q, buffers.k))
    return partial(rotate, q, k)
