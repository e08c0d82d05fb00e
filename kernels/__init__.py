"""This package holds the device code, which works on tensors, strides and tiles.

The device code knows nothing of models and autograd, and it does not check arguments. `rotate_triton` for GPUs and
`rotate_torch` for all other devices offer the same function ``rotate(xs, outs, cos, sin, rotation, *, positions,
first_position)``. Both write the rotation of each ``xs[i]`` ``[B, S, H, D]`` to ``outs[i]``, and both give the same
bits. A rotation in place has the same tensor as ``xs[i]`` and ``outs[i]``. `backends` chooses between the two.
"""

from ropelab.kernels.backends import HAS_TRITON, INTERPRETED, backend, use_backend, uses_triton
from ropelab.kernels.rotation import NO_POSITION, Rotation

__all__ = [
    "HAS_TRITON", "INTERPRETED", "NO_POSITION", "Rotation", "backend", "use_backend", "uses_triton",
]  # fmt: skip
