"""Call rotary-embedding-torch as its README does, with ``rotate_queries_or_keys`` for each tensor."""

import sys
from functools import cache
from types import ModuleType

import torch

from ropelab.bench import packages, replaced
from ropelab.bench.peers.peer import Rotate, from_bhsd, to_bhsd
from ropelab.bench.workloads import Workload


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    rope = module(version).RotaryEmbedding(workload.rotary_dim, cache_max_seq_len=workload.seq_len).to(cos.device)
    fmt, offset = workload.seq_format, workload.first_position

    def one(x):
        return None if x is None else from_bhsd(rope.rotate_queries_or_keys(to_bhsd(x, fmt), offset=offset), fmt)

    return lambda q, k: (one(q), one(k))


@cache
def module(version: str) -> ModuleType:
    with replaced.entries(sys.modules, _einops()):
        return packages.load_file("rotary-embedding-torch", version, "rotary_embedding_torch/rotary_embedding_torch.py")


def _einops() -> dict[str, ModuleType]:
    """The modules of einops, after a first call: einops imports its module for torch at the first call."""
    found, _ = packages.locate("einops")
    with packages.imported("einops", found, "einops", ".einops", "._torch_specific") as einops:
        einops.rearrange(torch.zeros(1, 1), "a b -> b a")
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "einops"}
