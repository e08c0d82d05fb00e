"""Launch the plan of a kernel for tensors of any strides and any number of batches."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ropelab.kernels.rotation import MAX_BATCH, row_count
from ropelab.kernels.tensors import (
    OF_ANY_STRIDE,
    CacheTensors,
    LatentGradients,
    LatentTensors,
    NormTensors,
    RotateTensors,
    TailTensors,
)

_SHARED = {
    "q_weight", "k_weight", "q_scale", "k_scale", "v_scale", "k_cache", "v_cache", "k_scale_cache", "v_scale_cache",
}  # fmt: skip
"""The tensors of kernels that all batches share. Tables ``[P, W]`` and ``[1, P, W]`` are shared too."""


_BATCHED = {
    RotateTensors: "q", NormTensors: "q", CacheTensors: "q", LatentTensors: "kv", LatentGradients: "key_grad",
    TailTensors: "q",
}  # fmt: skip
"""The tensor that has all batches and tokens, for each kernel whose grid has an axis of batches."""
_RESULTS: dict[type, tuple[str, ...]] = {RotateTensors: ("q_out", "k_out"), TailTensors: ("q",)}
"""The results that may be of any strides; those of other kernels have adjacent features."""


def run(plan: Callable[..., Callable[..., None]], t: Any, *arguments: Any, first_position: int = 0) -> None:
    """Launch what ``plan(t, *arguments)`` plans, for any strides and any number of batches.

    A kernel moves 16 bytes of adjacent features at once, so features that are not adjacent cost a copy, and those of a
    result another one. A grid holds ``MAX_BATCH`` batches, so more of them take several launches.

    Args:
        plan: the function ``plan_...`` of a kernel.
        t: the kernel's tensors, a named tuple of `tensors`.
        arguments: the further arguments of the plan.
        first_position: the position of the first token of every sequence, if there are no positions.

    Raises:
        ValueError: more programs than a grid can hold.
    """
    copies = {  # a result in place stays the same object as its input
        id(x): readable(x)
        for name, x in t._asdict().items()
        if x is not None and name not in OF_ANY_STRIDE and x.stride(-1) != 1 != x.shape[-1]
    }
    for part in _parts(type(t)._make(copies.get(id(x), x) for x in t)):
        plan(part, *arguments)(part, first_position, row_count(part.cos))
    for name in _RESULTS.get(type(t), ()):
        y = getattr(t, name)
        if id(y) in copies:
            y.copy_(copies[id(y)])


def _parts(t: Any) -> Iterator[Any]:
    """The tensors of at most ``MAX_BATCH`` batches after another, where the kernel's grid has an axis of batches."""
    batched = _BATCHED.get(type(t))
    if batched is None or len(getattr(t, batched)) <= MAX_BATCH:
        yield t
        return
    batch, seq_len = getattr(t, batched).shape[:2]
    for start in range(0, batch, MAX_BATCH):
        part, stop = t, min(batch, start + MAX_BATCH)
        views: dict[int, torch.Tensor] = {}
        for name, x in t._asdict().items():
            if x is None or name in _SHARED or (name in ("cos", "sin") and (x.ndim == 2 or len(x) == 1)):
                continue
            rows = slice(start * seq_len, stop * seq_len) if name == "slots" else slice(start, stop)
            part = part._replace(**{name: views.setdefault(id(x), x[rows])})
        yield part


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of ``x`` if its features are not adjacent: a kernel reads 16 bytes of adjacent features at once.

    The copy of an expanded ``x`` is expanded too. For example, the gradient of a sum is one number, and its copy takes
    the memory of one head.
    """
    if x.stride(-1) == 1:
        return x
    distinct = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]
    return distinct.contiguous().expand(x.shape)
