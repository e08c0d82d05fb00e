"""This file calls vLLM's operator, which works in place."""

import importlib

import torch

from ropelab.bench.peers.cos_sin_cache import flat, positions
from ropelab.bench.peers.peer import Rotate
from ropelab.bench.workloads import Workload


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Bind the operator, with a cache in the dtype of q."""
    apply = importlib.import_module("vllm._custom_ops").rotary_embedding
    rows = positions(workload, cos.device, torch.int64)
    cache = torch.cat((cos, sin), dim=-1).to(workload.dtype)
    is_neox = workload.layout == "split_half"

    def rotate(q, k):
        q, k = (None if x is None else x.detach() for x in (q, k))
        flat_q, flat_k = flat(q, workload, "vllm"), flat(k, workload, "vllm")
        apply(rows, flat_q, flat_k, workload.head_dim, cache, is_neox)
        return q, k

    return rotate
