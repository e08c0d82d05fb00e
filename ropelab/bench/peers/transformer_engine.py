"""This file calls TransformerEngine's fused kernel, which takes float32 angles."""

import importlib

import torch

from ropelab.bench.peers.peer import Rotate, float32_angles
from ropelab.bench.workloads import Workload
from ropelab.layout import pairing
from ropelab.layout.seq_format import from_bshd, to_bshd


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    apply = importlib.import_module("transformer_engine.pytorch.attention").apply_rotary_pos_emb
    angles = float32_angles(workload, cos.device)
    freqs = pairing.join(angles, angles, workload.layout)[:, None, None]
    interleaved, fmt = workload.layout == "interleaved", workload.seq_format
    options = {"interleaved": interleaved, "fused": True, "tensor_format": "thd" if workload.lengths else "bshd"}
    if workload.lengths:
        options["cu_seqlens"] = workload.cu_seqlens(cos.device)
        return lambda q, k: tuple(None if x is None else apply(x, freqs, **options) for x in (q, k))

    def one(x):
        return None if x is None else from_bshd(apply(to_bshd(x, fmt), freqs, **options), fmt)

    return lambda q, k: (one(q), one(k))
