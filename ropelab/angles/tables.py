"""Compute tables of cosines and sines, with a row for each position and a column for each rotated plane."""

from collections.abc import Sequence

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.arguments import DTYPES, POSITION_DTYPES, check_tensor, dtype_name, integer, integers, number, tensor
from ropelab.arguments import device as usable
from ropelab.foreign import hinted
from ropelab.kernels.rotate_torch import entries
from ropelab.kernels.rotation import INVALID_POSITION

MOST_ROWS = 2**31
"""The largest number of rows: one for each position, from 0 on, that int32 can hold."""

_ROWS_AT_ONCE = 2**16
"""The number of rows that are computed at once. In float64 an entry needs 40 bytes meanwhile, ten times its float32."""


@hinted
def rotary_table(
    seq_len: int,
    rotary_dim: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of ``cos(p * theta_i)`` and ``sin(p * theta_i)`` for positions ``p`` in ``[0, seq_len)``.

    Example: ``cos, sin = rotary_table(4096, 128, base=500_000.0)``.

    The function computes angles, cosines and sines in float64 on the CPU and rounds once, so tables have the same bits
    on every device. An entry is off by half an ulp of ``dtype`` and by 1e-16 of the angle, 5e-10 at position four
    million.

    Args:
        seq_len: the number of positions.
        rotary_dim: the number of features that rotate, even. With ``rotary_dim < head_dim`` the first features rotate.
        base: the base of the frequencies, ``rope_theta`` in configurations.
        dtype: the dtype of the tables: bfloat16, float16, float32 or float64. The rotation computes in float32 or wider
            for every dtype of the tables.
        device: the device of the tables, by default torch's default device.

    Returns:
        ``(cos, sin)``, each ``[seq_len, rotary_dim/2]``. Rows ``[m:m+S]`` belong to the positions m, m+1, ..., m+S-1:
        see `ropelab.positions`.

    Raises:
        TypeError: a number has another type, or ``dtype`` is another dtype.
        ValueError: ``seq_len`` is not in ``[0, 2**31]``, ``rotary_dim`` is not a positive even number, or ``base`` is
            not positive.
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
    """The tables of any inverse frequencies, multiplied by ``attention_factor`` before the only rounding.

    Args:
        frequencies: float64 ``[R/2]``, rad per position: see `ropelab.angles.frequencies`.
        seq_len, dtype, device: as for `rotary_table`.
        attention_factor: a positive factor of cos and sin (YaRN, LongRoPE). Scores grow by its square.

    Returns:
        ``(cos, sin)``, each ``[seq_len, R/2]``.

    Raises:
        TypeError, ValueError: as `rotary_table`; or ``frequencies`` has another shape or holds integers.
    """
    check_tensor("frequencies", tensor("frequencies", frequencies), (1,), "[rotary_dim/2]")
    if not len(frequencies) or frequencies.device.type == "meta":
        got = f"shape {tuple(frequencies.shape)} on {frequencies.device}"
        raise ValueError(f"frequencies: expected values for at least one plane, got {got}")
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


@hinted
def axial_tables(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables with a row for each token, for positions along several axes: see `ropelab.positions`.

    Example: ``cos, sin = axial_tables(cos, sin, positions, mrope_axes((16, 24, 24)))``.

    Call this function once for a batch: all layers and the backward share the tables, as in ``apply_rope(q, k, cos=c,
    sin=s)``. ``axes`` is ``[0] * 16 + [1] * 24 + [2] * 24`` for the sections ``[16, 24, 24]`` of Qwen2-VL, 0 1 2 0 1 2
    ... 0 0 for the interleaved sections of Qwen3-VL, and ``[0] * 8 + [1] * 28 + [2] * 28`` for the three axes of Flux.

    Args:
        cos, sin: ``[P, R/2]``, with a row for each position.
        positions: ``[axes, S]``, ``[axes, B, S]`` or, for packed tokens, ``[axes, T]``; int32 or int64.
        axes: ``[R/2]``, the axis of each column of the tables. The function checks a list and copies it to the device,
            for which the host waits. It takes a tensor, int32 or int64 on the device of ``cos``, as it is.

    Returns:
        ``(cos, sin)``, each ``[S, R/2]`` or ``[B, S, R/2]``, differentiable in the tables. The host does not read
        ``axes`` on a GPU: a column whose axis ``positions`` lacks becomes NaN there.

    Raises:
        TypeError: an argument is not a tensor, the tables are not of one floating dtype, or the positions are neither
            int32 nor int64.
        ValueError: the tables differ in shape, ``axes`` does not have an axis for each column, or ``positions`` lacks
            an axis that ``axes`` names.
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
            raise ValueError(f"axes: expected axes below {count}, the number of axes of positions, got {axes.tolist()}")
        axes = axes.where(known, 0)
    else:
        axes = torch.tensor(integers("axes", axes, at_least=0, below=count), dtype=torch.int64, device=positions.device)
    if axes.shape[0] != columns:
        raise ValueError(f"axes: expected an axis for each of the {columns} columns of cos, got {axes.shape[0]}")
    place = positions.long()[axes].movedim(0, -1)
    return entries(cos, sin, place if known is None else place.where(known, INVALID_POSITION))
