"""The rotation in torch operations, for any device and strides, with the bits of `rotate_triton`."""

import torch

from ropelab.kernels.angles_torch import cos_sin
from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION, Rotation
from ropelab.kernels.tensors import RotateTensors


def rotate(t: RotateTensors, rotation: Rotation, first_position: int = 0) -> None:
    """Write the rotation of q and of k to their results.

    The arithmetic has the widest dtype out of float32, the dtype of the input and the dtype of the tables. It follows
    the order of the formula, without fused multiply-add. The Triton kernel rounds at the same places, so both give the
    same bits.
    """
    wide = compute_dtype(t.q, t.cos)
    rows = table_rows(t.cos, t.sin, rotation, t.q.shape[1], t.positions, first_position)
    (c0, c1), (s0, s1) = (_columns(t[:, :, None, :].to(wide), rotation) for t in rows)
    first, end = rotation.first, rotation.first + rotation.rotary_dim
    nowhere = without_position(t.positions)
    for x, out in t.pairs:
        x0, x1 = (half.to(wide) for half in _pairs(x[..., first:end], rotation.interleaved))
        # Both members of a pair are computed before either is stored, because out may be x.
        if rotation.transpose:
            y0, y1 = x0 * c0 + x1 * s1, x1 * c1 - x0 * s0
        else:
            y0, y1 = x0 * c0 - x1 * s0, x1 * c1 + x0 * s1
        for target, y in zip(_pairs(out[..., first:end], rotation.out_interleaved), (y0, y1), strict=True):
            target.copy_(y)
        if out is not x:
            out[..., :first].copy_(x[..., :first])
            out[..., end:].copy_(x[..., end:])
        if nowhere is not None:
            out.masked_fill_(nowhere, 0)


def without_position(positions: torch.Tensor | None) -> torch.Tensor | None:
    """Whether each token lacks a position, ``[B, S or 1, 1, 1]``; None where all tokens count from a start.

    With several axes, a token without a position along any axis has no position.
    """
    if positions is None:
        return None
    nowhere = positions == NO_POSITION
    if nowhere.ndim == 3:
        nowhere = nowhere.all(-1)
    return nowhere[:, :, None, None] if nowhere.ndim == 2 else nowhere[:, None, None, None]


def table_rows(
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    seq_len: int,
    positions: torch.Tensor | None,
    first_position: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the tables for every token, ``[B or 1, S, W]``; NaN without a row. See `ropelab.positions`."""
    if rotation.table_free:
        return _computed_rows(cos, rotation, seq_len, positions, first_position)
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    if positions is None:
        tokens = slice(first_position, first_position + seq_len)
        return cos[:, tokens], sin[:, tokens]
    if rotation.axes is not None:
        return entries(cos, sin, positions[..., list(rotation.axes)])
    positions = _per_token(positions, rotation, seq_len)
    row = positions.long().abs()
    missing = (row < 0) | (row >= cos.shape[1])  # the magnitude of the smallest int64 overflows and is negative
    batch = torch.arange(cos.shape[0], device=cos.device)[:, None]
    row = row.masked_fill(missing, 0)
    cos, sin = (table[batch, row].masked_fill(missing[..., None], float("nan")) for table in (cos, sin))
    return cos, torch.where((positions < 0)[..., None], -sin, sin)


def entries(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of tables ``[P, W]`` or ``[1 or B, P, W]`` at ``positions [..., W]``, one for each column.

    NO_POSITION gives zeros, and any other position without a row gives NaN. See `ropelab.positions`.
    """
    positions = positions.long()
    nowhere, rows = positions == NO_POSITION, cos.shape[-2]
    missing = (positions >= rows) | (positions <= -rows)
    columns = torch.arange(cos.shape[-1], device=cos.device)
    index: tuple[torch.Tensor, ...] = (positions.abs().masked_fill(missing, 0), columns)
    if cos.ndim == 3:
        index = torch.arange(cos.shape[0], device=cos.device)[:, None, None], *index
    cos, sin = (table[index].masked_fill(missing, float("nan")).masked_fill(nowhere, 0) for table in (cos, sin))
    return cos, torch.where(positions < 0, -sin, sin)


def _computed_rows(frequencies, rotation: Rotation, seq_len: int, positions, first_position: int):
    """The rows of `table_rows`, computed from frequencies."""
    if positions is None:
        along = torch.arange(first_position, first_position + seq_len, device=frequencies.device)
        return cos_sin(along[None], frequencies)
    positions = _per_token(positions, rotation, seq_len).long()
    missing = ((positions <= INVALID_POSITION) | (positions >= 2**31))[..., None]
    cos, sin = (t.masked_fill(missing, float("nan")) for t in cos_sin(positions, frequencies))
    if rotation.axes is None:
        return cos, sin
    nowhere, columns = (positions == NO_POSITION)[..., None], range(len(frequencies))
    return tuple(t.masked_fill(nowhere, 0)[..., list(rotation.axes), columns] for t in (cos, sin))


def _per_token(positions: torch.Tensor, rotation: Rotation, seq_len: int) -> torch.Tensor:
    """The position of every token, ``[B, S]``; see `ropelab.positions`."""
    if not rotation.offsets:
        return positions
    along = positions[:, None].long() + torch.arange(seq_len, device=positions.device)
    along = along.masked_fill(along == NO_POSITION, NO_POSITION - 1)  # a sum that equals NO_POSITION by chance
    return along.masked_fill((positions == NO_POSITION)[:, None], NO_POSITION)


def compute_dtype(x: torch.Tensor, cos: torch.Tensor) -> torch.dtype:
    """The dtype of the arithmetic: at least float32, and no narrower than the input or the tables."""
    return torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)


def _columns(table: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    return _pairs(table, rotation.interleaved) if rotation.full_width else (table, table)


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
