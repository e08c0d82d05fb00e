"""Inverse frequencies, always in float64: float32 angles are off by position * frequency * 6e-8 rad."""

import torch

from ropelab.layout import check_rotary_dim


def inverse_frequencies(rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """``theta_i = base ** (-2i / rotary_dim)`` rad per position, for ``i`` in ``[0, rotary_dim/2)``.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    Returns:
        float64 ``[rotary_dim/2]`` on the CPU.

    Raises:
        ValueError: ``rotary_dim`` not a positive even number, or ``base`` not positive.
    """
    check_rotary_dim(rotary_dim)
    if not base > 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return base**-exponents
