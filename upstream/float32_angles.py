"""Right bits of the cosines and sines of a Llama 3.1 configuration: float32 angles, and float64 rounded once."""

import torch
import transformers
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

config = LlamaConfig(
    hidden_size=4096,
    num_attention_heads=32,
    max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
exponents = torch.arange(0, 128, 2, dtype=torch.float64) / 128
frequencies = 500000.0**-exponents
print("transformers", transformers.__version__)
for last in (4096, 32768, 131072):
    positions = torch.arange(last - 4096, last)
    angles = positions[:, None].double() * frequencies
    cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), positions[None])
    exact = torch.stack((angles.cos(), angles.sin()))
    theirs = (torch.stack((cos[0, :, :64], sin[0, :, :64])).double() - exact).abs().max()
    rounded = (exact.float().double() - exact).abs().max()
    bits = (-torch.log2(torch.stack((theirs, rounded)))).tolist()
    print(f"positions up to {last - 1}: {bits[0]:.1f} right bits; float64 angles, rounded once: {bits[1]:.1f}")
