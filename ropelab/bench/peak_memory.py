"""Measure the peak memory of a rotation, and of a norm with a rotation."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from ropelab.bench import peers, qk_norm
from ropelab.bench.compare import bind, checked, tidy
from ropelab.bench.launches import peak_bytes
from ropelab.bench.workloads import DENSE_CELLS, DIRECTIONS, Buffers, Workload

_OURS = {"ropelab": "ropelab apply_rope"}


def memory(*, smoke: bool = False) -> pd.DataFrame:
    """Measure the peak of the memory that a step allocates.

    The results count. The inputs, the cotangents and the tables do not, because they exist before the step.

    Columns: the columns of the workload without direction; contender; step ("forward" or "forward and backward");
        status; peak_bytes; and result_bytes, the size of the outputs and, with the backward, of the gradients. For a
        peer that rotates in place, result_bytes is 0.
    """
    shape = DENSE_CELLS[-1 if smoke else 1].workload
    (buffers,) = shape.buffers()
    bound, status = bind(shape, peers.of("memory"), buffers)
    for direction in DIRECTIONS:
        bound = checked(bound, replace(shape, direction=direction), buffers, status)
    rows = []
    for peer, rotate in bound.items():
        for step, call, size in _steps(rotate, shape, buffers):
            rows.append((_OURS.get(peer.name, peer.name), step, "ok", peak_bytes(call), 0 if peer.in_place else size))
    fused = qk_norm.contenders(shape, buffers)["ropelab"]
    weights = qk_norm.weights(shape, buffers.q.device)
    reason = qk_norm.status(fused, shape, buffers, weights)
    for step, call, size in _steps(fused, shape, buffers, weights) if reason == "ok" else ():
        rows.append(("ropelab apply_qk_norm_rope", step, reason, peak_bytes(call), size))
    frame = pd.DataFrame(rows, columns=["contender", "step", "status", "peak_bytes", "result_bytes"])
    untimed = {_OURS.get(name, name): why for name, why in status.items()}
    untimed |= {} if reason == "ok" else {"ropelab apply_qk_norm_rope": reason}
    identity = {name: value for name, value in shape.columns.items() if name != "direction"}
    return tidy(frame, identity, untimed)


def _steps(
    rotate: Callable, shape: Workload, buffers: Buffers, weights: list[torch.Tensor] | None = None
) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield the name, the call and the bytes of the results of each step. ``rotate`` takes q, k and the weights."""
    leaves = [x.detach().requires_grad_() for x in (*buffers.inputs, *(weights or ()))]

    def both():
        outputs = rotate(*leaves)
        return outputs, torch.autograd.grad(outputs, leaves, buffers.cotangents)

    outputs = shape.bytes // 2
    yield "forward", partial(rotate, *(x.detach() for x in leaves)), outputs
    yield "forward and backward", both, 2 * outputs + sum(w.nbytes for w in weights or ())
