"""The device code: tensors, strides and tiles, and nothing of models, autograd or the checking of arguments.

`rotate_triton` for GPUs and `rotate_torch` for everything else offer the same ``rotate(xs, outs, cos, sin,
rotation, *, positions, first_position)``, which writes the rotation of each ``xs[i]`` ``[B, S, H, D]`` to
``outs[i]`` (the same tensor for in-place use), bit for bit alike.
"""

import torch

from ropelab.kernels import rotate_torch, rotate_triton
from ropelab.kernels.launch import INTERPRETED
from ropelab.kernels.rotation import NO_POSITION, Rotation, position_count


def backend_for(x: torch.Tensor):
    """The module that rotates ``x``: Triton on a GPU, or anywhere under ``TRITON_INTERPRET=1``."""
    return rotate_triton if x.is_cuda or INTERPRETED else rotate_torch


__all__ = ["INTERPRETED", "NO_POSITION", "Rotation", "backend_for", "position_count", "rotate_torch", "rotate_triton"]
