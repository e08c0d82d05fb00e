"""cos/sin tables: one row per position, one column per rotated plane."""

from collections.abc import Sequence

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.arguments import DTYPES, POSITION_DTYPES, check_tensor, dtype_name, integer, integers, number, tensor
from ropelab.arguments import device as usable
from ropelab.kernels import NO_POSITION

MOST_ROWS = 2**31
"""Every position is an int32, or an int64 that would be one."""

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
        dtype: of the result: bfloat16, float16, float32 or float64. The rotation computes in float32 or wider
            whatever is given here.
        device: of the result, by default torch's default device.

    Returns:
        ``(cos, sin)``, each ``[seq_len, rotary_dim/2]``. Rows ``[m:m+S]`` serve tokens at positions m, m+1, ...

    Raises:
        TypeError: a number of another type, or another ``dtype``.
        ValueError: ``seq_len`` not in ``[0, 2**31]``, ``rotary_dim`` not a positive even number, ``base`` not positive.
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
        frequencies: float64 ``[R/2]``, rad per position: see `ropelab.angles.frequencies`.
        attention_factor: of cos and sin, by whose square the scores grow (YaRN, LongRoPE); positive.

    Raises:
        TypeError, ValueError: as `rotary_table`, and for frequencies of another shape or of integers.
    """
    check_tensor("frequencies", tensor("frequencies", frequencies), (1,), "[rotary_dim/2]")
    if not len(frequencies) or frequencies.device.type == "meta":
        got = f"{tuple(frequencies.shape)} on {frequencies.device}"
        raise ValueError(f"frequencies: expected those of at least one plane, with values, got {got}")
    seq_len = integer("seq_len", seq_len, at_least=0, below=MOST_ROWS + 1)
    check_dtype(dtype)
    attention_factor = number("attention_factor", attention_factor, above=0, at_most=torch.finfo(dtype).max)
    device = usable("device", device)
    cos, sin = (torch.empty(seq_len, len(frequencies), dtype=dtype, device="cpu") for _ in range(2))
    for first in range(0, seq_len, _ROWS_AT_ONCE):
        rows = slice(first, min(seq_len, first + _ROWS_AT_ONCE))
        positions = torch.arange(rows.start, rows.stop, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies.cpu())
        cos[rows], sin[rows] = attention_factor * angles.cos(), attention_factor * angles.sin()
    return cos.to(device), sin.to(device)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError for a dtype that tables cannot have."""
    if dtype not in DTYPES:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise TypeError(f"dtype: expected one of {', '.join(map(dtype_name, DTYPES))}, got {got}")


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
            the host waits; a tensor that is there already is taken as it is, int32 or int64.

    Returns:
        ``(cos, sin)``: ``[S, R/2]`` or ``[B, S, R/2]``, differentiable in the tables. Zeros for ``NO_POSITION``, NaN
        for a position without a row, and on a GPU for an axis that ``positions`` does not have: nothing is read that is
        not there.

    Raises:
        TypeError: not tensors, tables that are not of one floating dtype, positions that are not int32 or int64.
        ValueError: tables of two shapes, axes that are not one for each column, or that ``positions`` does not have.
    """
    check_tensor("cos", tensor("cos", cos), (2,), "[positions, columns]")
    check_tensor("sin", tensor("sin", sin), (2,), "[positions, columns]")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected cos's shape {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if sin.dtype != cos.dtype:
        raise TypeError(f"sin: expected cos's dtype {dtype_name(cos.dtype)}, got {dtype_name(sin.dtype)}")
    check_tensor("positions", tensor("positions", positions), (2, 3), "[axes, S] or [axes, B, S]", POSITION_DTYPES)
    for name, x in (("sin", sin), ("positions", positions)):
        if x.device != cos.device:
            raise ValueError(f"{name}: expected cos's device {cos.device}, got {x.device}")
    count, columns = positions.shape[0], cos.shape[1]
    if not count:
        raise ValueError("positions: expected at least one axis, got none")
    known = None
    if isinstance(axes, torch.Tensor):
        check_tensor("axes", tensor("axes", axes), (1,), "[columns]", POSITION_DTYPES)
        known = (axes >= 0) & (axes < count)
        if axes.device.type == "cpu" and not torch.compiler.is_compiling() and not known.all():
            raise ValueError(f"axes: expected axes below the {count} of positions, got {axes.tolist()}")
        axes = axes.where(known, 0)
    else:
        axes = torch.tensor(integers("axes", axes, at_least=0, below=count), dtype=torch.int64, device=positions.device)
    if axes.shape[0] != columns:
        raise ValueError(f"axes: expected one for each of the {columns} columns of cos, got {axes.shape[0]}")
    place = positions.long()[axes].movedim(0, -1)
    nowhere, missing = place == NO_POSITION, (place >= len(cos)) | (place <= -len(cos))
    if known is not None:
        missing = missing | ~known
    row = place.abs().masked_fill(missing, 0)
    column = torch.arange(cos.shape[-1], device=cos.device)
    cos, sin = (table[row, column].masked_fill(missing, float("nan")).masked_fill(nowhere, 0) for table in (cos, sin))
    return cos, torch.where(place < 0, -sin, sin)
