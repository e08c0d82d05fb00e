"""Tables that broadcast against the tensors they rotate, as Hugging Face and DeepSpeed hand them over.

Which axis is the sequence is not said: it is the one along which the tables change.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ropelab.arguments import DTYPES, tensor
from ropelab.layout.pairing import join, pairs
from ropelab.rope import apply_rope


class Axes(NamedTuple):
    """Where batch, sequence and heads are among a tensor's axes; None for one that it has not."""

    batch: int | None
    seq: int | None
    heads: int | None


def formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str = "split_half") -> torch.Tensor:
    """``x cos + turned(x) sin`` in torch operations, where ``turned`` takes every pair ``(x0, x1)`` to ``(-x1, x0)``.

    Every operation rounds to the dtype that torch promotes to, which is that of the result.

    Args:
        x: ``[..., D]``.
        cos, sin: broadcast against ``x[..., :R]``; their last axis R, at most D, has a column for each feature.
            Features from R on pass unchanged.
    """
    rotary_dim = cos.shape[-1]
    rotary, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    x0, x1 = pairs(rotary, layout)
    rotary = rotary * cos + join(-x1, x0, layout) * sin
    return torch.cat((rotary, tail), dim=-1) if tail.shape[-1] else rotary


def check_tables(xs: Mapping[str, torch.Tensor], tables: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError or ValueError, by the names that are the keys, unless the tables can rotate every tensor."""
    for name, x in (*xs.items(), *tables.items()):
        if not tensor(name, x).ndim:
            raise ValueError(f"{name}: expected at least one axis, got a scalar")
    for name, x in xs.items():
        if x.dtype == torch.bool:
            raise TypeError(f"{name}: expected numbers, got {x.dtype}")
    (first, cos), *_ = tables.items()
    for name, table in tables.items():
        columns, shape = table.shape[-1], tuple(table.shape)
        if not table.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating dtype, got {table.dtype}")
        for rotated, x in xs.items():
            features = x.shape[-1]
            if not 0 < columns <= features or columns % 2:
                expected = f"an even number of columns up to the {features} features of {rotated}"
                raise ValueError(f"{name}: expected {expected}, got shape {shape}")
            if table.device != x.device:
                raise ValueError(f"{name}: expected {rotated}'s device {x.device}, got {table.device}")
        if columns != cos.shape[-1]:
            raise ValueError(f"{name}: expected the {cos.shape[-1]} columns of {first}, got shape {shape}")
        for rotated, x in xs.items():
            if not broadcasts(table, x):
                raise ValueError(f"{name}: expected to broadcast against {rotated} {tuple(x.shape)}, got shape {shape}")


def broadcasts(table: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a table broadcasts against ``x`` along all axes but the last."""
    sizes = zip(reversed(table.shape[:-1]), reversed(x.shape[:-1]), strict=False)
    return all(rows == tokens or 1 in (rows, tokens) for rows, tokens in sizes)


def rotate(
    xs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    layout: str = "split_half",
    out_layout: str | None = None,
    per_pair: bool = False,
) -> list[torch.Tensor] | None:
    """The rotation of one or two tensors by the kernel, in one launch; or None where it cannot be one.

    That is where a tensor has more than four axes, tables differ from head to head, would enlarge the tensor or
    differ from each other in shape or dtype, where the tensors are of several dtypes or devices, and for dtypes that
    the kernel does not have.

    Args:
        xs: one or two of ``[..., D]``, with as many axes, in the same order, and sizes that differ at most in one.
        cos, sin: broadcast against ``xs``; see `formula`.
        layout, out_layout: as for `ropelab.apply_rope`.
        per_pair: the last axis has a column for each pair instead, R/2 of them.

    Returns:
        Tensors of the shapes and dtypes of ``xs``, computed in float32 or wider; differentiable.
    """
    axes = _axes([x.shape for x in xs], cos.shape)
    fits = cos.shape == sin.shape and cos.dtype == sin.dtype and cos.dtype in DTYPES and cos.device == sin.device
    fits = fits and all(x.dtype == xs[0].dtype and x.device == cos.device for x in xs) and xs[0].dtype in DTYPES
    rotary_dim = cos.shape[-1] * (2 if per_pair else 1)
    if axes is None or not fits or not 0 < rotary_dim <= xs[0].shape[-1] or rotary_dim % 2:
        return None
    seq_len = 1 if axes.seq is None else xs[0].shape[axes.seq]
    cos, sin = (_table(table, axes, xs[0].ndim, seq_len) for table in (cos, sin))
    rotary_slice = None if per_pair else (0, rotary_dim)
    q, k = _to_bshd(xs[0], axes), None if len(xs) == 1 else _to_bshd(xs[1], axes)
    ys = apply_rope(q, k, cos=cos, sin=sin, layout=layout, out_layout=out_layout, rotary_slice=rotary_slice)
    return [_from_bshd(y, axes) for y in ((ys,) if isinstance(ys, torch.Tensor) else ys)]


def _axes(shapes: Sequence[torch.Size], table: torch.Size) -> Axes | None:
    """Batch, sequence and heads of tensors of these shapes, or None if the table does not allow to name them."""
    first, rank = shapes[0], len(shapes[0])
    if rank > 4 or len(table) > rank or any(len(shape) != rank for shape in shapes):
        return None
    rows = (1,) * (rank - len(table)) + tuple(table)
    along = [axis for axis in range(rank - 1) if rows[axis] != 1]
    if any(shape[axis] != rows[axis] for shape in shapes for axis in along) or len(along) > 2:
        return None
    shared = [axis for axis in range(rank - 1) if axis not in along]
    differing = [axis for axis in shared if any(shape[axis] != first[axis] for shape in shapes)]
    if len(differing) > 1:
        return None
    # Heads share a row of the tables: the axis that q and k may differ in, or the last that has anything to share.
    heads = next(iter(differing or [axis for axis in reversed(shared) if first[axis] != 1] or shared[-1:]), None)
    others = [axis for axis in range(rank - 1) if axis != heads]
    seq = (along or others)[-1] if others else None
    return Axes(next((axis for axis in others if axis != seq), None), seq, heads)


def _table(table: torch.Tensor, axes: Axes, rank: int, seq_len: int) -> torch.Tensor:
    """The table as ``[S, W]``, or as ``[B, S, W]`` where it differs between batches."""
    rows = _to_bshd(table.reshape((1,) * (rank - table.ndim) + table.shape), axes)[:, :, 0]
    rows = rows[0] if len(rows) == 1 else rows
    return rows if rows.shape[-2] == seq_len else rows.expand(*rows.shape[:-2], seq_len, rows.shape[-1])


def _to_bshd(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """View as ``[B, S, H, D]``, axes that it has not of size 1."""
    x = x.permute(*(axis for axis in axes if axis is not None), x.ndim - 1)
    for place, axis in enumerate(axes):
        x = x.unsqueeze(place) if axis is None else x
    return x


def _from_bshd(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The inverse of `_to_bshd`."""
    for place in (2, 1, 0):
        x = x.squeeze(place) if axes[place] is None else x
    present = [axis for axis in axes if axis is not None]
    return x.permute(*(present.index(axis) for axis in range(len(present))), len(present))
