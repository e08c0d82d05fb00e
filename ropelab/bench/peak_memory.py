"""Measure the peak memory of a rotation, and of a norm with a rotation."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pandas as pd
import torch

from ropelab.bench import peers
from ropelab.bench.launches import peak_bytes
from ropelab.bench.operation import Contender, checked, divided, tidy
from ropelab.bench.qk_norm import QKNorm
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.workloads import DENSE_CELLS, DIRECTIONS, Buffers, Workload

_OURS, _NORM = {"ropelab": "ropelab apply_rope"}, "ropelab apply_qk_norm_rope"


def memory(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Measure the peak of the memory that a step allocates.

    The results count. The inputs, the cotangents and the tables do not, because they exist before the step.

    Columns: the columns of the workload without direction; contender; step ("forward" or "forward and backward");
        status; peak_bytes; and result_bytes, the size of the outputs and, with the backward, of the gradients. For a
        peer that rotates in place, result_bytes is 0.
    """
    shape = DENSE_CELLS[-1 if smoke else 1].workload
    rotation = PeerRotation(shape, peers.of("memory"), count=1)
    sets = rotation.sets(device)
    right, untimed = dict(rotation.contenders(sets, device)), {}
    for direction in DIRECTIONS:
        right, wrong = divided(right, checked(rotation, sets, right, device, direction), direction)
        untimed |= wrong
    norm = QKNorm(shape)
    (call,) = norm.with_weights(sets, device)
    ours = {_NORM: Contender(norm.functions(sets[0])["ropelab"])}
    fused, wrong = divided(ours, checked(norm, [call], ours, device))
    untimed |= wrong
    rows = []
    for name, one in (right | fused).items():
        for step, run, size in _steps(one.run, shape, sets[0], call[1] if name == _NORM else ()):
            rows.append(
                (_OURS.get(name, name), step, "ok", peak_bytes(run), 0 if one.columns.get("in_place") else size)
            )
    frame = pd.DataFrame(rows, columns=["contender", "step", "status", "peak_bytes", "result_bytes"])
    untimed = {_OURS.get(name, name): why for name, why in untimed.items()}
    identity = {name: value for name, value in shape.columns.items() if name != "direction"}
    return tidy(frame, identity, untimed)


def _steps(
    rotate: Callable, shape: Workload, buffers: Buffers, weights: Sequence[torch.Tensor]
) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield the name, the call and the bytes of the results of each step. ``rotate`` takes q, k and the weights."""
    leaves = [x.detach().requires_grad_() for x in (*buffers.inputs, *weights)]

    def both():
        outputs = rotate(*leaves)
        return outputs, torch.autograd.grad(outputs, leaves, buffers.cotangents)

    outputs = shape.bytes // 2
    yield "forward", partial(rotate, *(x.detach() for x in leaves)), outputs
    yield "forward and backward", both, 2 * outputs + sum(w.nbytes for w in weights)
