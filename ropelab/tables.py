"""cos/sin tables: one row per position, one column per rotated plane."""

from collections.abc import Sequence

import torch

from ropelab.frequencies import inverse_frequencies
from ropelab.kernels import NO_POSITION

_ROWS_AT_ONCE = 2**16
"""In float64: 40 bytes an entry are needed while it is made, ten times the float32 that is kept."""


def rotary_table(
    seq_len: int,
    rotary_dim: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of ``cos(p * theta_i)`` and ``sin(p * theta_i)`` for positions ``p`` in ``[0, seq_len)``.

    Angles and their cosines are computed in float64 on the CPU and rounded once, so the tables are the same bits on
    every device, and off by half an ulp of ``dtype`` and 1e-16 of the angle: 5e-10 at four million.

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
    return frequency_tables(inverse_frequencies(rotary_dim, base), seq_len, dtype=dtype, device=device)


def frequency_tables(
    frequencies: torch.Tensor,
    seq_len: int,
    attention_factor: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rotary_table` for any inverse frequencies, times ``attention_factor`` before the one rounding.

    Args:
        frequencies: float64 ``[R/2]``, rad per position: see `ropelab.frequencies`.
        attention_factor: of cos and sin, by whose square the scores grow (YaRN, LongRoPE).

    Raises:
        ValueError: negative ``seq_len``.
    """
    if seq_len < 0:
        raise ValueError(f"seq_len: expected a number of positions >= 0, got {seq_len}")
    cos, sin = (torch.empty(seq_len, len(frequencies), dtype=dtype, device="cpu") for _ in range(2))
    for first in range(0, seq_len, _ROWS_AT_ONCE):
        rows = slice(first, min(seq_len, first + _ROWS_AT_ONCE))
        positions = torch.arange(rows.start, rows.stop, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies.cpu())
        cos[rows], sin[rows] = attention_factor * angles.cos(), attention_factor * angles.sin()
    return cos.to(device), sin.to(device)


def axial_tables(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of each token for positions along several axes: every plane reads the axis that it belongs to.

    Built once for a batch and shared by all layers and the backward, as in ``apply_rope(q, k, cos=c, sin=s)``.
    ``axes`` is ``[0] * 16 + [1] * 24 + [2] * 24`` for the sections ``[16, 24, 24]`` of Qwen2-VL, 0 1 2 0 1 2 ... 0 0
    for the interleaved ones of Qwen3-VL, and ``[0] * 8 + [1] * 28 + [2] * 28`` for the three axes of Flux, whose
    tables are those of the axes side by side.

    Args:
        cos, sin: ``[P, R/2]``; row ``p`` serves the positions ``p`` and, with the sine negated, ``-p``.
        positions: ``[axes, S]``, ``[axes, B, S]`` or, for packed tokens, ``[axes, T]``; int32 or int64.
        axes: ``[R/2]``: the axis of each column of the tables. A list is checked and copied to the device, for which
            the host waits; a tensor that is there already is taken as it is.

    Returns:
        ``(cos, sin)``: ``[S, R/2]`` or ``[B, S, R/2]``, differentiable in the tables. Zeros for ``NO_POSITION``, NaN
        for a position without a row: nothing is read that is not there.

    Raises:
        ValueError: axes that are not one for each column, or that ``positions`` does not have.
        TypeError: positions that are not int32 or int64.
    """
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions: expected int32 or int64, got {positions.dtype}")
    if positions.ndim not in (2, 3):
        raise ValueError(f"positions: expected shape [axes, S] or [axes, B, S], got {tuple(positions.shape)}")
    if len(axes) != cos.shape[-1]:
        raise ValueError(f"axes: expected one for each of the {cos.shape[-1]} columns of cos, got {len(axes)}")
    if not isinstance(axes, torch.Tensor):
        if not set(axes) <= set(range(len(positions))):
            raise ValueError(f"axes: expected axes below the {len(positions)} of positions, got {sorted(set(axes))}")
        axes = torch.tensor(axes, device=positions.device)
    place = positions.long()[axes].movedim(0, -1)
    row = place.abs()
    nowhere, missing = place == NO_POSITION, row >= len(cos)
    row = row.masked_fill(missing, 0)
    column = torch.arange(cos.shape[-1], device=cos.device)
    cos, sin = (table[row, column].masked_fill(missing, float("nan")).masked_fill(nowhere, 0) for table in (cos, sin))
    return cos, torch.where(place < 0, -sin, sin)
