"""FlashInfer's and vLLM's operators: a cache of cosines beside sines, a position for each token, no gradient."""

import importlib

import torch

from ropelab.bench.peers.peer import Rotate, require_pair
from ropelab.bench.workloads import Workload


def bind_flashinfer(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Into new tensors; the cache is in float32."""
    apply = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache
    positions, cache = _positions(workload, cos.device, torch.int32), torch.cat((cos, sin), dim=-1)
    is_neox = workload.layout == "split_half"

    def rotate(q, k):
        flat_q, flat_k = _flat(q, workload, "flashinfer"), _flat(k, workload, "flashinfer")
        new_q, new_k = apply(positions, flat_q, flat_k, workload.head_dim, cache, is_neox)
        return new_q.view(q.shape), new_k.view(k.shape)

    return rotate


def bind_vllm(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """In place; the cache is in the dtype of q."""
    apply = importlib.import_module("vllm._custom_ops").rotary_embedding
    positions = _positions(workload, cos.device, torch.int64)
    cache = torch.cat((cos, sin), dim=-1).to(workload.dtype)
    is_neox = workload.layout == "split_half"

    def rotate(q, k):
        q, k = (None if x is None else x.detach() for x in (q, k))
        flat_q, flat_k = _flat(q, workload, "vllm"), _flat(k, workload, "vllm")
        apply(positions, flat_q, flat_k, workload.head_dim, cache, is_neox)
        return q, k

    return rotate


def _positions(workload: Workload, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """Of each token, as rows of the tables."""
    packed = workload.positions(device)
    if packed is not None:
        return packed.to(dtype)
    return torch.arange(workload.seq_len, device=device, dtype=dtype).repeat(workload.batch)


def _flat(x: torch.Tensor | None, workload: Workload, package: str) -> torch.Tensor:
    """``[tokens, heads * head_dim]`` over the memory of x."""
    require_pair(x, package)
    if workload.seq_format not in ("bshd", "thd") or workload.storage != "contiguous":
        raise NotImplementedError(f"{package}: takes tokens one after another")
    return x.view(-1, x.shape[-2] * x.shape[-1])
