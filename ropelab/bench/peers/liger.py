"""Call Liger-Kernel's rotation."""

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
        q, k = to_bhsd(q, fmt), to_bhsd(k, fmt)
        require_rows(q)
        require_rows(k)
        q, k = module.LigerRopeFunction.apply(q, k, wide_cos, wide_sin)
        return from_bhsd(q, fmt), from_bhsd(k, fmt)

    return rotate


def require_rows(x: torch.Tensor) -> None:
    """Refuse ``[B, H, 1, D]`` for which Liger-Kernel overwrites memory beside the tensor.

    Liger-Kernel takes the distance between rows from the axis of the tokens, after ``x.transpose(1, 2).contiguous()``.
    The result of ``contiguous`` may have any stride along an axis of length 1: for sbhd it is B times too large.

    Raises:
        NotImplementedError: the distance is not the size of a row.
    """
    rows = x.transpose(1, 2)
    if rows.shape[0] > 1 and rows.is_contiguous() and rows.stride(1) != rows[0, 0].numel():
        raise NotImplementedError("liger-kernel: takes the distance between rows from an axis of one token")
