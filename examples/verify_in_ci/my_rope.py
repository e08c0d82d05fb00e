"""The RoPE of a project: pairs of adjacent features, and the base of its configuration."""

import torch


class Rotary(torch.nn.Module):
    """Cosines and sines of positions ``[S]`` or ``[B, S]``, each ``[..., S, head_dim]``."""

    def __init__(self, head_dim=64, base=500_000.0):
        super().__init__()
        self.exponents = -torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.base = base

    def forward(self, x, positions):
        angles = positions[..., None].double() * self.base ** self.exponents.to(positions.device)
        return angles.cos().repeat_interleave(2, -1).to(x.dtype), angles.sin().repeat_interleave(2, -1).to(x.dtype)


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate q and k ``[B, H, S, D]`` by tables ``[B, S, D]``."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin
