"""Call flash-attn's Triton kernel."""

import torch

from ropelab.bench import packages
from ropelab.bench.peers.peer import Rotate, differentiable
from ropelab.bench.workloads import Workload
from ropelab.layout.seq_format import from_bshd, to_bshd


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Bind the Triton kernel, because the differentiable function of the package imports the CUDA extension."""
    apply_rotary = packages.load_file("flash-attn", version, "flash_attn/ops/triton/rotary.py").apply_rotary
    options = {"interleaved": workload.layout == "interleaved"}
    if workload.lengths:
        options |= {"cu_seqlens": workload.cu_seqlens(cos.device), "max_seqlen": max(workload.lengths)}
        return differentiable(lambda x, inverse: apply_rotary(x, cos, sin, conjugate=inverse, **options))
    fmt = workload.seq_format

    def rotate(x, inverse):
        return from_bshd(apply_rotary(to_bshd(x, fmt), cos, sin, conjugate=inverse, **options), fmt)

    return differentiable(rotate)
