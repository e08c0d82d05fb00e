"""Call Hugging Face's own functions: Llama's for halves, GPT-J's for adjacent pairs."""

import importlib

import torch

from ropelab.bench.peers.peer import Rotate, from_bhsd, require_full_width, require_pair, to_bhsd
from ropelab.bench.workloads import Workload
from ropelab.layout import pairing
from ropelab.layout.seq_format import from_bshd, to_bshd


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    require_full_width(workload, "transformers")
    model = "llama" if workload.layout == "split_half" else "gptj"
    apply = importlib.import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    cos, sin = (table.to(workload.dtype).unsqueeze(0) for table in (cos, sin))
    fmt = workload.seq_format
    if workload.layout == "interleaved":  # one tensor, sines first, a column for each pair

        def rotate_pairs(q, k):
            return tuple(None if x is None else from_bshd(apply(to_bshd(x, fmt), sin, cos), fmt) for x in (q, k))

        return rotate_pairs
    wide_cos, wide_sin = (pairing.join(table, table, "split_half") for table in (cos, sin))

    def rotate(q, k):
        require_pair(k, "transformers")
        q, k = apply(to_bhsd(q, fmt), to_bhsd(k, fmt), wide_cos, wide_sin)
        return from_bhsd(q, fmt), from_bhsd(k, fmt)

    return rotate
