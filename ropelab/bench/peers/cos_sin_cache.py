"""The calling form of inference engines: cosines beside sines in one cache, a position per token."""

import torch

from ropelab.bench.peers import torch_library
from ropelab.bench.peers.peer import Rotate, require_pair
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


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str, engine: str) -> Rotate:
    """Bind ``rotary_embedding`` of an engine of `torch_library.LIBRARIES`, with a cache in the dtype of q."""
    operator = torch_library.operators(engine, version).rotary_embedding
    package = torch_library.LIBRARIES[engine].packages[0]
    rows = positions(workload, cos.device, torch.int64)
    cache = torch.cat((cos, sin), dim=-1).to(workload.dtype)
    is_neox = workload.layout == "split_half"

    def rotate(q, k):
        q, k = (None if x is None else x.detach() for x in (q, k))
        flat_q, flat_k = flat(q, workload, package), None if k is None else flat(k, workload, package)
        operator(rows, flat_q, flat_k, workload.head_dim, cache, is_neox)
        return q, k

    return rotate
