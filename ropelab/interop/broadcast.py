"""Rotate by tables that broadcast against the tensors, as callers of Hugging Face and DeepSpeed pass them.

The callers do not name the axis of the sequence. The sequence is the axis along which the tables change.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ropelab.arguments import DTYPES, dtype_name, tensor
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import Layout, join, pairs
from ropelab.layout.seq_format import SEQ_AXIS, SeqFormat
from ropelab.qk_norm import apply_qk_norm_rope
from ropelab.rope import apply_rope


class Axes(NamedTuple):
    """The places of batch, sequence and heads among the axes of a tensor; None for an axis that the tensor lacks."""

    batch: int | None
    seq: int | None
    heads: int | None


def formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout = "split_half") -> torch.Tensor:
    """``x cos + turned(x) sin`` in torch operations, where ``turned`` takes every pair ``(x0, x1)`` to ``(-x1, x0)``.

    Every operation rounds to the dtype to which torch promotes ``x`` and the tables. The result has this dtype.

    Args:
        x: ``[..., D]``.
        cos, sin: ``[..., R]`` with ``R <= D``, a column for each feature. They broadcast against ``x[..., :R]``.
            Features from R on pass unchanged.
        layout: as for `ropelab.apply_rope`.
    """
    rotary_dim = cos.shape[-1]
    rotary, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    x0, x1 = pairs(rotary, layout)
    rotary = rotary * cos + join(-x1, x0, layout) * sin
    return torch.cat((rotary, tail), dim=-1) if tail.shape[-1] else rotary


def check_tables(xs: Mapping[str, torch.Tensor], tables: Mapping[str, torch.Tensor]) -> None:
    """Check that the tables can rotate every tensor.

    Args:
        xs, tables: map the name of each argument, for the message, to the tensor.

    Raises:
        TypeError: an argument is not a tensor, a tensor holds bools or 8-bit floats, or a table is not floating.
        ValueError: a table has a wrong number of columns, does not broadcast against a tensor or is on another device;
            or an argument is a scalar.
    """
    for name, x in (*xs.items(), *tables.items()):
        if not tensor(name, x).ndim:
            raise ValueError(f"{name}: expected at least one axis, got a scalar")
        if x.dtype in FLOAT8_DTYPES:
            raise TypeError(f"{name}: expected a dtype that torch promotes, got {dtype_name(x.dtype)}")
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
            raise ValueError(f"{name}: expected {cos.shape[-1]} columns, as {first} has, got shape {shape}")
        for rotated, x in xs.items():
            if not broadcasts(table, x):
                expected = f"a shape that broadcasts against {rotated} {tuple(x.shape)}"
                raise ValueError(f"{name}: expected {expected}, got shape {shape}")


def broadcasts(table: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a table broadcasts against ``x`` along all axes but the last."""
    sizes = zip(reversed(table.shape[:-1]), reversed(x.shape[:-1]), strict=False)
    return all(rows == tokens or 1 in (rows, tokens) for rows, tokens in sizes)


def rotate_in_one_launch(
    xs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    layout: Layout = "split_half",
    out_layout: Layout | None = None,
    per_pair: bool = False,
    inverse: bool = False,
    trailing: bool = False,
) -> list[torch.Tensor] | None:
    """The rotation of one or two tensors in one launch of the kernel, or None where one launch cannot rotate them.

    The result is None if:

    - a tensor has more than four axes
    - the tables differ from head to head, would enlarge a tensor, or differ from each other in shape or dtype
    - the tensors and tables have several devices, the tensors have several dtypes, or the kernel lacks a dtype

    Args:
        xs: one or two tensors ``[..., D]`` with the same axes in the same order. Their sizes differ along one axis at
            most.
        cos, sin: tables that broadcast against ``xs``, as for `formula`.
        layout, out_layout: as for `ropelab.apply_rope`.
        per_pair: the tables have a column for each pair, ``R/2`` columns, instead of a column for each feature.
        inverse: apply the transposed matrices, as for `ropelab.apply_rope`.
        trailing: the last features rotate, and the features before them pass unchanged.

    Returns:
        Tensors of the shapes and dtypes of ``xs``, computed in float32 or wider, and differentiable.
    """
    views = _Views.of(xs, cos, sin, per_pair, trailing)
    if views is None:
        return None
    ys = apply_rope(*views.xs, **views.where, layout=layout, out_layout=out_layout, inverse=inverse)
    return views.back((ys,) if isinstance(ys, torch.Tensor) else ys)


def rotate(
    xs: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, layout: Layout = "split_half"
) -> list[torch.Tensor]:
    """`rotate_in_one_launch` of the tensors in the dtypes to which they and the tables promote; else `formula`."""
    ys = as_joined(rotate_in_one_launch([promoted(x, cos) for x in xs], cos, sin, layout=layout), cos)
    return [formula(x, cos, sin, layout) for x in xs] if ys is None else ys


def as_joined(ys: list[torch.Tensor] | None, cos: torch.Tensor) -> list[torch.Tensor] | None:
    """Results of `rotate_in_one_launch`, contiguous where `formula` joins the features that rotate with the others."""
    return ys if ys is None or cos.shape[-1] == ys[0].shape[-1] else [y.contiguous() for y in ys]


def norm_and_rotate_in_one_launch(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    layout: Layout = "split_half",
    per_pair: bool = False,
) -> list[torch.Tensor] | None:
    """`ropelab.apply_qk_norm_rope` with tables that broadcast, or None where one launch cannot compute the results.

    The result is None where `rotate_in_one_launch` returns None, and if a table requires grad.

    Args:
        xs: q and k, as for `rotate_in_one_launch`.
        weights: the weights of the RMS norms of q and of k, ``[D]`` each, of one floating dtype.
        cos, sin, layout, per_pair: as for `rotate_in_one_launch`.
        eps: as for `ropelab.apply_qk_norm_rope`.
    """
    views = _Views.of(xs, cos, sin, per_pair)
    if views is None or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)):
        return None
    return views.back(apply_qk_norm_rope(*views.xs, *weights, **views.where, eps=eps, layout=layout))


def promoted(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype to which torch promotes ``x`` and the table."""
    return x.to(torch.promote_types(x.dtype, table.dtype))


class _Views(NamedTuple):
    """Tensors and tables as `ropelab.apply_rope` takes them.

    Attributes:
        where: the arguments of `ropelab.apply_rope` for the tables and the axes.
        axes: the axes of the tensors that the views were made of; None for the tensors themselves.
    """

    xs: Sequence[torch.Tensor]
    where: dict[str, Any]
    axes: Axes | None

    @classmethod
    def of(
        cls, xs: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, per_pair: bool, trailing: bool = False
    ) -> "_Views | None":
        """Return the views, or None where one launch cannot rotate the tensors.

        Most models pass tensors and tables in a format of `apply_rope`. That call names the axes at once, because
        finding them takes the host longer than the launch.
        """
        x, rotary_dim = xs[0], cos.shape[-1] * (2 if per_pair else 1)
        if cos.shape != sin.shape or cos.dtype != sin.dtype or cos.device != sin.device:
            return None
        if cos.dtype not in DTYPES or x.dtype not in DTYPES:
            return None
        for y in xs:
            if y.dtype != x.dtype or y.device != cos.device:
                return None
        seq_format = _format_of(xs, cos.shape)
        axes = _named_axes([y.shape for y in xs], cos.shape) if seq_format is None else None
        if seq_format is None and axes is None:
            return None
        features = x.shape[-1]
        if not 0 < rotary_dim <= features or rotary_dim % 2:
            return None
        where: dict[str, Any] = {"rotary_slice": None if per_pair else (0, rotary_dim)}
        if trailing:
            where["rotary_slice"] = features - rotary_dim, features
        if axes is None:
            heads = 1 if seq_format == "bhsd" else 2
            return cls(
                xs, where | {"cos": _without(cos, heads), "sin": _without(sin, heads), "seq_format": seq_format}, None
            )
        seq_len = 1 if axes.seq is None else x.shape[axes.seq]
        where |= {"cos": _rows(cos, seq_len), "sin": _rows(sin, seq_len)}
        return cls([_to_bshd(y, axes) for y in xs], where, axes)

    def back(self, ys: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results with the axes of the tensors that the views were made of."""
        return list(ys) if self.axes is None else [_from_bshd(y, self.axes) for y in ys]


def _format_of(xs: Sequence[torch.Tensor], table: torch.Size) -> SeqFormat | None:
    """``"bhsd"`` or ``"bshd"`` where tables ``[B or 1, 1, S, W]`` or ``[B or 1, S, 1, W]`` serve all tensors, or None.

    A table of one token serves in either format, and the results are the same.
    """
    first = xs[0].shape
    if len(table) != 4 or len(first) != 4:
        return None
    seq_format: SeqFormat = "bhsd" if table[1] == 1 and table[2] == first[2] else "bshd"
    seq = SEQ_AXIS[seq_format]
    if table[3 - seq] != 1 or table[0] not in (1, first[0]):
        return None
    for y in xs:
        shape = y.shape
        if len(shape) != 4 or shape[0] != first[0] or shape[seq] != table[seq] or shape[3] != first[3]:
            return None
    return seq_format


def _without(table: torch.Tensor, heads: int) -> torch.Tensor:
    """The table without the axis of the heads, and without an axis of one batch: ``[B, S, W]`` or ``[S, W]``."""
    rows = table.select(heads, 0)
    return rows if len(rows) != 1 else rows[0]


def _named_axes(shapes: Sequence[torch.Size], table: torch.Size) -> Axes | None:
    """Batch, sequence and heads of tensors of these shapes, or None if the table leaves the axes open."""
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
    # Heads share a row of the tables. They are the axis along which q and k differ, or else the last shared axis that
    # has several elements.
    heads = next(iter(differing or [axis for axis in reversed(shared) if first[axis] != 1] or shared[-1:]), None)
    others = [axis for axis in range(rank - 1) if axis != heads]
    seq = (along or others)[-1] if others else None
    return Axes(next((axis for axis in others if axis != seq), None), seq, heads)


def _rows(table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The table as ``[S, W]``, or as ``[B, S, W]`` where it differs between batches: without its axes of size 1."""
    sizes = [size for size in table.shape[:-1] if size != 1]
    rows = table.reshape(*sizes, table.shape[-1])
    return rows if sizes else rows.expand(seq_len, -1)


def _to_bshd(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """View ``x`` as ``[B, S, H, D]``. An axis that ``x`` lacks has size 1."""
    if axes == (0, 1, 2):
        return x
    x = x.permute(*(axis for axis in axes if axis is not None), -1)
    for place, axis in enumerate(axes):
        x = x.unsqueeze(place) if axis is None else x
    return x


def _from_bshd(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The inverse of `_to_bshd`."""
    if axes == (0, 1, 2):
        return x
    for place in (2, 1, 0):
        x = x.squeeze(place) if axes[place] is None else x
    present = [axis for axis in axes if axis is not None]
    return x.permute(*(present.index(axis) for axis in range(len(present))), -1)
