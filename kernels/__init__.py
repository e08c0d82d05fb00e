"""Rotation of [B, S, H, D] views: `rotate_triton` for GPUs, `rotate_torch` for everything else.

Both modules offer the same ``rotate(xs, outs, cos, sin, *, interleaved, inverse)``, which writes the
rotation of each ``xs[i]`` to ``outs[i]`` (the same tensor for in-place use). They know tensors, strides
and tiles; checking arguments and differentiating is the caller's part (``ropelab.rope``).
"""

import torch

from ropelab.kernels import rotate_torch, rotate_triton


def backend_for(x: torch.Tensor):
    """The module that rotates ``x``: Triton on a GPU, or anywhere under ``TRITON_INTERPRET=1``."""
    return rotate_triton if x.is_cuda or rotate_triton.INTERPRETED else rotate_torch


__all__ = ["backend_for", "rotate_torch", "rotate_triton"]
