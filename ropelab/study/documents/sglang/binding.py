"""The code that the adapters of the study of SGLang#14302 share.

All adapters rotate q and k in place, forward, on ``[B, S, H, D]`` seen as ``T = B S`` tokens.
"""

from collections.abc import Callable

import torch

from ropelab.bench.peers import Peer, Rotate
from ropelab.bench.workloads import Workload


def tokens(x: torch.Tensor) -> torch.Tensor:
    """``[B, S, H, D]`` -> ``[T, H, D]``, detached, because a leaf that requires grad must not be overwritten."""
    return x.detach().flatten(0, 1)


def token_rows(workload: Workload, table: torch.Tensor) -> torch.Tensor:
    """``[S, R/2]`` float32 -> ``[T, R/2]`` in the dtype of q: a row for each token."""
    return table.to(workload.dtype).repeat(workload.batch, 1)


def token_positions(workload: Workload, device: torch.device) -> torch.Tensor:
    """The row of the tables ``[S, R/2]`` for each token, ``[T]``."""
    return torch.arange(workload.seq_len, device=device).repeat(workload.batch)


def in_place(rotate: Callable[[torch.Tensor, torch.Tensor], object]) -> Rotate:
    """A function that overwrites q and k ``[T, H, D]``, as a function that returns the q and k that it was given."""

    def rotated(q, k):
        rotate(tokens(q), tokens(k))
        return q.detach(), k.detach()

    return rotated


def is_interleaved(workload: Workload) -> bool:
    """Whether the pairs of the workload are adjacent features."""
    return workload.layout == "interleaved"


def contender(name: str, bind, **more) -> Peer:
    """A contender that rotates in place with tables in the dtype of q, unless ``more`` says otherwise."""
    options = {"directions": ("forward",), "in_place": True, "narrow": True}
    return Peer(name, bind, **(options | more))
