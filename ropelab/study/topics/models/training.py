"""Train one-layer Llamas that must emit the token three places before, with three rotations on the same fresh data.

A model with a wrong backward is the control: a comparison that it passes would show nothing.
"""

import math
from contextlib import nullcontext

import pandas as pd
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from ropelab.interop.huggingface import patch
from ropelab.kernels import INTERPRETED, use_backend
from ropelab.study.topics.gradients.wrong_backward import with_wrong_backward

PLAIN, OURS, WRONG = "Transformers' rotation", "patch(model)", "wrong backward (control)"
_OFFSET, _TOKENS, _BATCH, _WIDTH = 3, 24, 16, 32
VOCABULARY = 16
CHANCE = math.log(VOCABULARY)
"""The cross entropy (nats) of a model that guesses."""


def compare(*, seeds: int, steps: int) -> pd.DataFrame:
    """The cross entropy (nats) of each step: columns backward (the rotation), seed, step, loss.

    Two runs of a seed have the same weights and the same data, which no step repeats.
    """
    with use_backend("torch") if INTERPRETED else nullcontext():  # the interpreter takes a second for a call
        rows = [
            {"backward": way, "seed": seed, "step": step, "loss": loss}
            for way in (PLAIN, OURS, WRONG)
            for seed in range(seeds)
            for step, loss in enumerate(_losses(way, seed, steps))
        ]
    return pd.DataFrame(rows)


def _losses(way: str, seed: int, steps: int) -> list[float]:
    generator = torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=_WIDTH, intermediate_size=2 * _WIDTH, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, attention_bias=True, max_position_embeddings=2 * _TOKENS,
    ))  # fmt: skip
    own = modeling_llama.apply_rotary_pos_emb
    if way == OURS:
        patch(model)
    elif way == WRONG:
        one = with_wrong_backward(lambda x, cos, sin: own(x, x, cos, sin)[0])
        modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, *_: (one(q, cos, sin), one(k, cos, sin))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    try:
        for _ in range(steps):
            tokens = torch.randint(VOCABULARY, (_BATCH, _TOKENS), generator=generator)
            logits = model(tokens, use_cache=False).logits[:, _OFFSET:]
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-_OFFSET].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    finally:
        modeling_llama.apply_rotary_pos_emb = own
    return history
