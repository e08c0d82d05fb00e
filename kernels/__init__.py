"""The device code: tensors, strides and tiles, and nothing of models, autograd or the checking of arguments.

`rotate_triton` for GPUs and `rotate_torch` for everything else offer the same ``rotate(xs, outs, cos, sin,
rotation, *, positions, first_position)``, which writes the rotation of each ``xs[i]`` ``[B, S, H, D]`` to
``outs[i]`` (the same tensor for in-place use), bit for bit alike. `backends` chooses between the two.
"""

from ropelab.kernels.backends import HAS_TRITON, INTERPRETED, backend, use_backend, uses_triton
from ropelab.kernels.rotation import NO_POSITION, Rotation, position_count

__all__ = [
    "HAS_TRITON", "INTERPRETED", "NO_POSITION", "Rotation", "backend", "position_count", "use_backend", "uses_triton",
]  # fmt: skip
