"""Call the kernel and the module of torchembed."""

import torch

from ropelab.bench import packages
from ropelab.bench.peers.peer import Rotate, from_bhsd, require_full_width, to_bhsd
from ropelab.bench.workloads import Workload
from ropelab.layout import pairing
from ropelab.layout.seq_format import from_bshd, to_bshd


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Bind a kernel: for split_half the kernel of ``[B, H, S, D]``, for interleaved the kernel of ``[B, S, H, D]``."""
    require_full_width(workload, "torchembed")
    module = packages.load_file("torchembed", version, "torchembed/_triton.py")
    fmt = workload.seq_format
    if workload.layout == "interleaved":
        one = module.fused_rope_bshd_apply

        def rotate_pairs(q, k):
            return tuple(None if x is None else from_bshd(one(to_bshd(x, fmt), cos, sin), fmt) for x in (q, k))

        return rotate_pairs
    wide_cos, wide_sin = (pairing.join(t, t, "split_half") for t in (cos, sin))

    def rotate(q, k):
        q, k = to_bhsd(q, fmt), to_bhsd(k, fmt)
        if k is None:
            # The public function needs a k. Its autograd function rotates one tensor.
            return from_bhsd(module._FusedRoPE.apply(q, wide_cos, wide_sin), fmt), None
        q, k = module.fused_rope_forward(q, k, wide_cos, wide_sin)
        return from_bhsd(q, fmt), from_bhsd(k, fmt)

    return rotate


def bind_module(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Bind the module. If the workload has no k, the module gets q in the place of k, as in DeepSpeed."""
    require_full_width(workload, "torchembed")
    if workload.first_position:
        raise NotImplementedError("torchembed's module starts at position 0")
    names = ("torchembed", version, "torchembed", "._triton", ".positional")
    with packages.imported(*names) as package:
        module = package.RotaryEmbedding(
            workload.rotary_dim, max_seq_len=workload.seq_len, use_fused=True, device=cos.device
        )
    fmt = workload.seq_format

    def rotate(q, k):
        # The module imports its kernel at every call. If the import fails, the module silently takes a slow path.
        with packages.imported(*names):
            new_q, new_k = module(to_bhsd(q, fmt), to_bhsd(q if k is None else k, fmt))
        return from_bhsd(new_q, fmt), None if k is None else from_bhsd(new_k, fmt)

    return rotate
