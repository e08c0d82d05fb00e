"""Which part of a layer's forward a rotation takes, by the bytes and operations of the layer."""

from collections.abc import Mapping, Sequence
from functools import cache

import pandas as pd
import torch

from ropelab.bench.model_steps import ARCHITECTURES
from ropelab.bench.projection_law import Machine
from ropelab.study.topics.kernel_steps.predicted import Traffic

LLAMA, QWEN = (next(one for one in ARCHITECTURES if one.name.startswith(name)) for name in ("Llama", "Qwen"))


@cache
def in_transformers(tokens: int = 4096, q_heads: int = 32, k_heads: int = 8, head_dim: int = 128) -> float:
    """How many times Transformers' function moves the bytes of q and k in 16 bits, each operation through memory."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, table = (
        torch.empty(1, heads, tokens, head_dim, dtype=torch.bfloat16, device="meta") for heads in (q_heads, k_heads, 1)
    )
    with Traffic() as traffic:
        apply_rotary_pos_emb(q, k, table[:, 0], table[:, 0])
    return traffic.bytes / (2 * (q.nbytes + k.nbytes))


def part(machine: Machine, tokens: int, passes: float, sizes: Mapping[str, int] = LLAMA.sizes) -> float:
    """The part of the forward of a layer in 16 bits that a rotation takes, in a causal model with gated MLP.

    Args:
        machine: the rates of the GPU.
        tokens: of one sequence.
        passes: how many times the rotation reads and writes q and k.
        sizes: ``hidden_size``, ``intermediate_size`` and the numbers of heads, as a configuration has them.
    """
    hidden, q_heads, k_heads = (sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = sizes.get("head_dim", hidden // q_heads)
    widths = 2 * (q_heads + k_heads) * head_dim + 3 * sizes["intermediate_size"]  # q, k, v, output; gate, up, down
    products = 2 * tokens * hidden * widths
    attention = 2 * tokens**2 * q_heads * head_dim  # two products, and half of their entries are masked
    rotation = passes * 4 * tokens * (q_heads + k_heads) * head_dim / machine.bandwidth
    return rotation / ((products + attention) / machine.flops + rotation)


def parts(machine: Machine, tokens: Sequence[int]) -> pd.DataFrame:
    """The part in a layer of Llama 3 8B: a row for each number of tokens, columns for a copy and for Transformers."""
    passes = {"at the speed of a copy": 1, "the bytes of Transformers' function": in_transformers()}
    columns = {words: [part(machine, count, times) for count in tokens] for words, times in passes.items()}
    return pd.DataFrame(columns, index=pd.Index(tokens, name="tokens"))
