"""Rotate in torch operations: by the formula of Hugging Face, also compiled, and by complex numbers."""

import torch
import torch._functorch.config

from ropelab.bench.peers.peer import Rotate, from_bhsd, to_bhsd
from ropelab.bench.workloads import Workload
from ropelab.interop.broadcast import formula
from ropelab.layout import pairing
from ropelab.layout.seq_format import from_bshd, to_bshd


def hugging_face(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, compiled: bool = False) -> Rotate:
    wide_cos, wide_sin = (pairing.join(t, t, workload.layout).to(workload.dtype) for t in (cos, sin))
    fmt, layout = workload.seq_format, workload.layout

    def one(x):
        if x is None:
            return None
        return from_bhsd(formula(to_bhsd(x, fmt), wide_cos, wide_sin, layout), fmt)

    def rotate(q, k):
        return one(q), one(k)

    if not compiled:
        return rotate
    # Every shape needs a compilation. Without the reset, torch.compile reaches its limit of recompilations.
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # donated buffers forbid a second backward
    return torch.compile(rotate, dynamic=False, fullgraph=True)


def complex_product(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Rotate:
    turns = torch.complex(cos.float(), sin.float()).unsqueeze(1)

    def one(x):
        if x is None:
            return None
        x = to_bshd(x, workload.seq_format)
        rotary, tail = x[..., : workload.rotary_dim], x[..., workload.rotary_dim :]
        z = torch.view_as_complex(rotary.float().unflatten(-1, (-1, 2)))
        y = torch.view_as_real(z * turns).flatten(-2).to(x.dtype)
        return from_bshd(torch.cat((y, tail), dim=-1) if tail.shape[-1] else y, workload.seq_format)

    return lambda q, k: (one(q), one(k))
