"""The definition: RoPE in float64, in plain torch. The oracle of every test; imports nothing from kernels."""

import torch

from ropelab.layout import join, pairs
from ropelab.seq_format import to_bshd


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    layout: str = "split_half",
    seq_format: str = "bshd",
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate every pair of features of every head by the angle of the token's row in the tables.

    For token ``s``, plane ``i``, with ``c = cos[s, i]`` and ``s = sin[s, i]``::

        y0 = x0 c - x1 s
        y1 = x1 c + x0 s

    (Su et al., RoFormer, equation 34.) Features beyond ``2 * cos.shape[-1]`` pass unchanged.

    Args:
        x: 4-D in ``seq_format``, any floating dtype, any strides.
        cos, sin: ``[P, rotary_dim/2]``, ``P >= S``.
        inverse: apply the transpose of the rotation, i.e. rotate by minus the angle.

    Returns:
        A new float64 tensor of ``x``'s shape. Differentiable by plain autograd.
    """
    x = to_bshd(x.double(), seq_format)
    rotary_dim = 2 * cos.shape[-1]
    c = cos[: x.shape[1], None, :].double()
    s = sin[: x.shape[1], None, :].double()
    if inverse:
        s = -s
    x0, x1 = pairs(x[..., :rotary_dim], layout)
    rotated = join(x0 * c - x1 * s, x1 * c + x0 * s, layout)
    y = torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    return to_bshd(y, seq_format)
