"""Call ropelab itself, into new tensors or in place."""

import torch

import ropelab
from ropelab.bench.peers.peer import Rotate
from ropelab.bench.workloads import Workload


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, inplace: bool = False) -> Rotate:
    options = {
        "cos": cos, "sin": sin, "inplace": inplace,
        "layout": workload.layout, "seq_format": workload.seq_format,
    }  # fmt: skip
    if workload.lengths:
        options["positions"] = ropelab.PackedSequences(workload.cu_seqlens(cos.device), workload.seq_len).positions

    def rotate(q, k):
        if inplace and torch.is_grad_enabled():  # a leaf that requires grad cannot be overwritten
            q, k = q.detach(), None if k is None else k.detach()
        if k is None:
            return ropelab.apply_rope(q, **options), None
        return ropelab.apply_rope(q, k, **options)

    return rotate
