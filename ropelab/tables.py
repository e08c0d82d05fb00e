"""cos/sin tables: one row per position, one column per rotated plane."""

import torch

from ropelab.frequencies import inverse_frequencies


def rotary_table(
    seq_len: int,
    rotary_dim: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of ``cos(p * theta_i)`` and ``sin(p * theta_i)`` for positions ``p`` in ``[0, seq_len)``.

    Angles and their cosines are computed in float64 on the CPU and rounded once, so the tables are
    the same bits on every device and right to half an ulp of ``dtype`` at any position.

    Args:
        seq_len: number of positions P.
        rotary_dim: number of rotated features R, even; R < head_dim rotates only the first R.
        base: of the geometric frequencies (``rope_theta``).
        dtype: of the result. The rotation computes in float32 or wider whatever is given here.

    Returns:
        ``(cos, sin)``, each ``[seq_len, rotary_dim/2]``. Rows ``[m:m+S]`` serve tokens at positions m, m+1, ...

    Raises:
        ValueError: negative ``seq_len``, ``rotary_dim`` not a positive even number, ``base`` not positive.
    """
    if seq_len < 0:
        raise ValueError(f"seq_len: expected a number of positions >= 0, got {seq_len}")
    positions = torch.arange(seq_len, dtype=torch.float64)
    angles = torch.outer(positions, inverse_frequencies(rotary_dim, base))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
