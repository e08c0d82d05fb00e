"""Train one-layer Llamas that must emit the token three places before, with three rotations on the same fresh data.

A model with a wrong backward is the control: a comparison that it passes would show nothing.
"""

import pandas as pd
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from ropelab.interop.huggingface import patch
from ropelab.study.topics.gradients.wrong_backward import with_wrong_backward

WAYS = PLAIN, OURS, WRONG = "Transformers' rotation", "patch(model)", "wrong backward (control)"
_OFFSET, _TOKENS, _BATCH, _WIDTH = 3, 24, 16, 32
VOCABULARY = 16


def with_the_kernel(steps: int = 3) -> pd.DataFrame:
    """The cross entropy (nats) of the first steps on two sequences, with the kernel, forward and backward.

    The kernel runs on the GPU if there is one, else in Triton's interpreter. ``patch`` calls the rotation of a model
    on the CPU to find its convention, so no backend is forced.

    Returns:
        A row for each step, a column for `PLAIN` and one for `OURS`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return pd.DataFrame({way: losses(way, 0, steps, batch=2, device=device) for way in (PLAIN, OURS)})


def losses(way: str, seed: int, steps: int, *, batch: int = _BATCH, device: str = "cpu") -> list[float]:
    """The cross entropy (nats) of each step of a model with one of `WAYS`.

    Two runs of a seed have the same weights and the same data, which no step repeats.
    """
    generator = torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=_WIDTH, intermediate_size=2 * _WIDTH, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, attention_bias=True, max_position_embeddings=2 * _TOKENS,
    )).to(device)  # fmt: skip
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
            tokens = torch.randint(VOCABULARY, (batch, _TOKENS), generator=generator).to(device)
            logits = model(tokens, use_cache=False).logits[:, _OFFSET:]
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-_OFFSET].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    finally:
        modeling_llama.apply_rotary_pos_emb = own
    return history
