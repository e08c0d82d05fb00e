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
_LAST = 10
"""The steps whose mean is the final loss of a run."""
VOCABULARY = 16
CHANCE = math.log(VOCABULARY)
"""The cross entropy (nats) of a model that guesses."""


def compare(*, seeds: int, steps: int) -> pd.DataFrame:
    """The cross entropy (nats) of each step: columns backward (the rotation), seed, step, loss.

    Two runs of a seed have the same weights and the same data, which no step repeats. All run on the CPU, where
    ``patch`` takes torch operations; `with_the_kernel` runs the kernel.
    """
    with use_backend("torch") if INTERPRETED else nullcontext():  # the interpreter takes a second for a call
        rows = [
            {"backward": way, "seed": seed, "step": step, "loss": loss}
            for way in (PLAIN, OURS, WRONG)
            for seed in range(seeds)
            for step, loss in enumerate(_losses(way, seed, steps))
        ]
    return pd.DataFrame(rows)


def with_the_kernel(steps: int = 3) -> pd.DataFrame:
    """The cross entropy (nats) of the first steps on two sequences, with the kernel, forward and backward.

    The kernel runs on the GPU if there is one, else in Triton's interpreter. ``patch`` calls the rotation of a model
    on the CPU to find its convention, so no backend is forced.

    Returns:
        A row for each step, a column for `PLAIN` and one for `OURS`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return pd.DataFrame({way: _losses(way, 0, steps, batch=2, device=device) for way in (PLAIN, OURS)})


def near(losses: pd.DataFrame) -> str:
    """How far the losses with ropelab are from the losses of Transformers, in words; a column for each."""
    largest = (losses[OURS] - losses[PLAIN]).abs().max()
    return f"stays within {largest:.1e} nats of Transformers'" if largest else "has the bits of Transformers'"


def sentence(curves: pd.DataFrame) -> str:
    """How far ``patch`` moves a loss of `compare`, and whether the control shows that the comparison can fail."""
    losses = curves.pivot_table(index=["seed", "step"], columns="backward", values="loss")
    tail = curves[curves.step > curves.step.max() - _LAST].groupby(["backward", "seed"]).loss.mean()
    final = tail.groupby("backward").median()
    failed = final[WRONG] > CHANCE / 2 > final[PLAIN]
    return (
        f"With `patch(model)` the loss {near(losses)} at every step, and ends at {final[OURS]:.3f} nats. The control "
        f"ends at {final[WRONG]:.2f} (guessing: {CHANCE:.2f}). "
        + ("So the comparison can fail." if failed else "The control did not fail, so the comparison shows nothing.")
    )


def _losses(way: str, seed: int, steps: int, *, batch: int = _BATCH, device: str = "cpu") -> list[float]:
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
