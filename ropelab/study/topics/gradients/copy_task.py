"""Train a model whose success depends on RoPE's gradient: emit the token ``offset`` places before.

The model has one attention layer with one head. The content of a token does not tell its position, so the query must
learn a relative position. Only the gradient of the rotation teaches the position.
"""

from __future__ import annotations

import math

import pandas as pd
import torch
from torch.nn import functional

from ropelab import rotary_table
from ropelab.study.topics.gradients.wrong_backward import Rotate

VOCABULARY = 16
WIDTH = 32
CHANCE = math.log(VOCABULARY)
"""The cross entropy (nats) of a model that guesses."""


def losses(
    rotate: Rotate,
    *,
    seed: int,
    steps: int,
    offset: int = 3,
    seq_len: int = 32,
    batch: int = 16,
    learning_rate: float = 3e-3,
) -> list[float]:
    """Train with Adam in float64 on the CPU, and return the cross entropy (nats) of each step.

    The seed fixes the initial weights and every batch, so two runs of one seed differ by ``rotate`` alone.
    """
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = WIDTH**-0.5) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).requires_grad_()

    embedding, query_bias, key_bias = (
        weight(VOCABULARY, WIDTH, scale=1),
        weight(WIDTH, scale=1),
        weight(WIDTH, scale=1),
    )
    to_query, to_key, to_value, to_logits = (weight(WIDTH, n) for n in (WIDTH, WIDTH, WIDTH, VOCABULARY))
    weights = [embedding, query_bias, key_bias, to_query, to_key, to_value, to_logits]
    optimizer = torch.optim.Adam(weights, lr=learning_rate)
    cos, sin = rotary_table(seq_len, WIDTH, dtype=torch.float64)

    history = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (batch, seq_len), generator=generator)
        x = embedding[tokens][:, None]  # [B, 1 head, S, WIDTH]
        q, k = rotate(x @ to_query + query_bias, cos, sin), rotate(x @ to_key + key_bias, cos, sin)
        attended = functional.scaled_dot_product_attention(q, k, x @ to_value, is_causal=True)
        logits = (attended[:, 0] @ to_logits)[:, offset:]
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-offset].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def compare(rotations: dict[str, Rotate], *, seeds: int, steps: int) -> pd.DataFrame:
    """Loss curves of each rotation under the same seeds: columns backward, seed, step, loss (nats)."""
    rows = [
        {"backward": name, "seed": seed, "step": step, "loss": loss}
        for name, rotate in rotations.items()
        for seed in range(seeds)
        for step, loss in enumerate(losses(rotate, seed=seed, steps=steps))
    ]
    return pd.DataFrame(rows)
