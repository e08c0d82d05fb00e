"""This file holds the calling form of inference engines: cosines beside sines in one cache, a position per token."""

import torch

from ropelab.bench.peers.peer import require_pair
from ropelab.bench.workloads import Workload


def positions(workload: Workload, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """``[T]``: the row of the tables for each token."""
    packed = workload.positions(device)
    if packed is not None:
        return packed.to(dtype)
    return torch.arange(workload.seq_len, device=device, dtype=dtype).repeat(workload.batch)


def flat(x: torch.Tensor | None, workload: Workload, package: str) -> torch.Tensor:
    """A view ``[T, heads * head_dim]`` of ``x``.

    Raises:
        NotImplementedError: ``x`` is None, or has no view of this shape.
    """
    require_pair(x, package)
    if workload.seq_format not in ("bshd", "thd") or workload.storage != "contiguous":
        raise NotImplementedError(f"{package}: takes tokens one after another")
    return x.view(-1, x.shape[-2] * x.shape[-1])
