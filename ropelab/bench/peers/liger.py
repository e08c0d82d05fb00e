"""This file calls Liger-Kernel's rotation."""

import torch

from ropelab.bench import packages
from ropelab.bench.peers.peer import Rotate, from_bhsd, require_pair, to_bhsd
from ropelab.bench.workloads import Workload
from ropelab.layout import pairing


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    module = packages.load_file("liger-kernel", version, "liger_kernel/ops/rope.py")
    wide_cos, wide_sin = (pairing.join(t, t, "split_half").unsqueeze(0).to(workload.dtype) for t in (cos, sin))
    fmt = workload.seq_format

    def rotate(q, k):
        require_pair(k, "liger-kernel")
        q, k = module.LigerRopeFunction.apply(to_bhsd(q, fmt), to_bhsd(k, fmt), wide_cos, wide_sin)
        return from_bhsd(q, fmt), from_bhsd(k, fmt)

    return rotate
