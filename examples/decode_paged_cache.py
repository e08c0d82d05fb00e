"""Decode with a paged cache: each step rotates q and k, and writes k and v, in one pass over one token a sequence.

A decode that computes everything again in each step has to choose the same tokens.

It takes some 7 s of CPU time on two cores.
"""

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from ropelab import apply_rope, rope_and_cache, rotary_table

VOCABULARY, Q_HEADS, K_HEADS, HEAD_DIM, LAYERS, BLOCK_SIZE = 64, 4, 2, 16, 2, 8
WIDTH = Q_HEADS * HEAD_DIM
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
prompts = [torch.randint(VOCABULARY, (length,), device=device) for length in (3, 17, 10)]
embedding = torch.randn(VOCABULARY, WIDTH, device=device)
layers = [
    # Weights so large that the tokens depend on the attention, and so on the positions.
    (2 * torch.randn((Q_HEADS + 2 * K_HEADS) * HEAD_DIM, WIDTH, device=device) / WIDTH**0.5,
     4 * torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5)
    for _ in range(LAYERS)
]  # fmt: skip
cos, sin = rotary_table(64, HEAD_DIM, device=device)


def qkv(x, weight):
    heads = (rms_norm(x, (WIDTH,)) @ weight.T).unflatten(-1, (-1, HEAD_DIM))
    return heads.split((Q_HEADS, K_HEADS, K_HEADS), dim=-2)


def next_token(x):
    return (rms_norm(x, (WIDTH,)) @ embedding.T).argmax(-1)


def decode_again(tokens, steps):
    """One sequence ``[T]``, without a cache: every step computes all tokens."""
    for _ in range(steps):
        x = embedding[tokens]
        for weight, out in layers:
            q, k, v = qkv(x, weight)
            q, k = apply_rope(q, k, cos=cos, sin=sin, seq_format="thd")
            q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + attended[0].transpose(0, 1).flatten(-2) @ out.T
        tokens = torch.cat((tokens, next_token(x[-1:])))
    return tokens


def decode_with_cache(prompts, steps):
    """All sequences together. Prompts go through the cache token by token, as generated tokens do."""
    blocks = -(-max(len(prompt) + steps for prompt in prompts) // BLOCK_SIZE)
    block_table = torch.randperm(len(prompts) * blocks, device=device).view(len(prompts), blocks)
    shape = (LAYERS, block_table.numel(), BLOCK_SIZE, K_HEADS, HEAD_DIM)
    key_caches, value_caches = torch.full(shape, torch.nan, device=device), torch.full(shape, torch.nan, device=device)
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=-1)
    tokens = torch.nn.functional.pad(tokens, (0, steps), value=-1)
    for place in range(max(lengths) + steps - 1):
        positions = torch.full((len(prompts),), place, device=device)
        slots = block_table[:, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        x = embedding[tokens[:, place]]
        for (weight, out), key_cache, value_cache in zip(layers, key_caches, value_caches, strict=True):
            q, k, v = qkv(x, weight)
            q = rope_and_cache(q, k, v, key_cache, value_cache, slots, cos=cos, sin=sin, positions=positions)
            keys, values = (cache[block_table].flatten(1, 2)[:, : place + 1] for cache in (key_cache, value_cache))
            q, keys, values = q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2)
            x = x + scaled_dot_product_attention(q, keys, values, enable_gqa=True).flatten(1) @ out.T
        chosen = next_token(x)
        tokens[:, place + 1] = torch.where(tokens[:, place + 1] < 0, chosen, tokens[:, place + 1])
    return [row[: length + steps] for row, length in zip(tokens, lengths, strict=True)]


cached = decode_with_cache(prompts, steps=20)
for prompt, tokens in zip(prompts, cached, strict=True):
    assert torch.equal(tokens, decode_again(prompt, steps=20))
print(f"{device}: {len(prompts)} sequences, {sum(map(len, cached))} tokens, the same with the paged cache as without")
