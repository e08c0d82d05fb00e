"""The host's view of addresses: grids, strides, alignments, and the choices of a kernel that follow from them."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from ropelab.kernels.rotation import MAX_BATCH, Rotation, pairs_of_head
from ropelab.kernels.tiles import axis_group, next_power_of_2

_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}
_MAX_GRID_X, _MAX_GRID_YZ = 2**31 - 1, MAX_BATCH


def turning(
    t: Any,
    rotation: Rotation,
    compute_dtype: torch.dtype,
    heads: Sequence[torch.Tensor],
    block_tokens: int,
    access: int,
    shares_columns: bool = False,
) -> dict[str, Any]:
    """The choices of `choices.Turning` that do not depend on the lanes of a head.

    Args:
        t: the tensors of a kernel, with tables and positions.
        heads: the tensors that a tile addresses.
        block_tokens: the tokens of a tile.
        access: the most adjacent features that a thread means to move at once.
        shares_columns: see `tiles.Tile`.
    """
    cos_strides, sin_strides = table_strides(t.cos), table_strides(t.sin)
    return {
        "ROTARY_DIM": rotation.rotary_dim, "INTERLEAVED": rotation.interleaved,
        "OUT_INTERLEAVED": rotation.out_interleaved, "TRANSPOSE": rotation.transpose,
        "FULL_WIDTH": rotation.full_width, "TABLE_FREE": rotation.table_free,
        "SHARED_COLUMNS": rotation.table_free or shares_columns,
        "POSITIONS": "none" if t.positions is None else "sequence" if rotation.offsets else "token",
        **axes_of_pairs(rotation), "COMPUTE_DTYPE": _TL_DTYPE[compute_dtype],
        "ALIGN": min(common_alignment(heads), access),
        "TABLE_ALIGN": alignment([*cos_strides, *sin_strides]), "SAME_TABLES": cos_strides == sin_strides,
        "OFFSETS_64": any(_max_tile_offset(x, block_tokens) >= 2**31 for x in heads),
    }  # fmt: skip


def whole_heads(head_dim: int, rotation: Rotation, pairs_per_access: int, pieces: int = 1) -> dict[str, Any]:
    """The choices of `choices.Turning` for lanes that hold whole heads, in so many pieces."""
    pairs = pairs_of_head(head_dim, rotation)
    divided = rotation.rotary_dim // 2, pairs - rotation.rotary_dim // 2, rotation.first
    return {
        "LANE_DIM": head_dim, "FIRST": rotation.first, "BLOCK_PAIRS": next_power_of_2(-(-pairs // pieces)),
        "GROUP": min(alignment(divided), pairs_per_access),
    }  # fmt: skip


def axes_of_pairs(rotation: Rotation) -> dict[str, int]:
    """The choices of `choices.Turning` for the axis of each pair.

    PAIR_BITS has a row of bits for each axis, and UNIT_BITS for each pair in a unit and each axis: see
    `place_triton.has_bit`. SAME_AXIS has two bits for each of four pairs. Examples are 16, 24 and 24 pairs along three
    axes (Qwen2-VL), and axes that take turns (Qwen3-VL)::

        pair         0 .. 7, 8 .. 15    16 .. 23, 24 .. 31, 32 .. 39    40 .. 47, 48 .. 55, 56 .. 63
        axis         0                  1                               2
        AXIS_UNIT    8: no unit reads two axes
        UNIT_BITS    0b00000011         0b00011100                      0b11100000   for each pair in a unit
        SAME_AXIS    0, 0, 0, 0: one read of a table serves four pairs

        pair         0 1 2 3   4 5 6 7   8 ..
        axis         0 1 2 0   1 2 0 1   2 ..
        AXIS_UNIT    4
        SAME_AXIS    0, 1, 2, 0: pair 3 of a unit reads the axis of pair 0, so three reads serve four pairs
    """
    axes = rotation.axes or (0,)
    count, unit = max(axes) + 1, max(4, axis_group(rotation))
    padded = axes + axes[-1:] * (-len(axes) % unit)
    columns = [padded[i::unit] for i in range(4)]
    return {
        "AXES": count, "PAIR_BITS": _rows_of_bits([axes], count),
        "AXIS_UNIT": unit, "UNIT_BITS": _rows_of_bits(columns, count),
        "SAME_AXIS": sum(columns.index(column) << (2 * i) for i, column in enumerate(columns)),
    }  # fmt: skip


def _rows_of_bits(columns: Sequence[Sequence[int]], count: int) -> int:
    """For each column and each of ``count`` axes a row of whole words of 32 bits, in which the axis has its bits."""
    width = -(-len(columns[0]) // 32) * 32
    bits = ((j * count + axis, i) for j, column in enumerate(columns) for i, axis in enumerate(column))
    return sum(1 << (row * width + i) for row, i in bits)


def heads_of(t: Any) -> list[torch.Tensor]:
    """The tensors ``[B, S, H, D]`` among the tensors of a kernel."""
    return [x for x in t if x is not None and x.ndim == 4]


def strides_of(t: Any) -> Any:
    """The strides of the tensors of a kernel, as its named tuple; the features of heads and tables are adjacent."""
    strides = [None if x is None else x.stride()[:3] for x in t]
    return type(t)(*strides)._replace(cos=table_strides(t.cos), sin=table_strides(t.sin))


def launch_grid(batch: int, token_blocks: int, head_blocks: int, order: str) -> tuple[tuple[int, int, int], str]:
    """The grid of a launch and its order: ``order``, or "heads" if the grid axis of "batches" is too short.

    Args:
        batch, token_blocks, head_blocks: the number of batches, of blocks of tokens and of blocks of heads.
        order: see ``innermost`` of `Tile`.

    Raises:
        ValueError: more blocks than a grid can hold.
    """
    if order == "batches" and token_blocks > _MAX_GRID_YZ:
        order = "heads"
    grid = {
        "heads": (token_blocks * head_blocks, 1, batch),
        "tokens": (token_blocks, head_blocks, batch),
        "batches": (batch * head_blocks, token_blocks, 1),
    }[order]
    return fitting("q", *grid), order


def fitting(name: str, programs: int, y: int = 1, z: int = 1) -> tuple[int, int, int]:
    """The grid of so many programs along each axis; a ValueError about the argument ``name`` if there are too many."""
    if programs > _MAX_GRID_X:
        raise ValueError(f"{name}: expected fewer than 2**31 programs, got {programs}")
    return programs, y, z


def innermost(x: torch.Tensor) -> str:
    """The axis of ``x [B, S, H, D]`` whose neighbours are adjacent in memory: "heads", "tokens" or "batches".

    "tokens" means that the tokens of a head are adjacent (bhsd). Otherwise the heads of a token are adjacent, and the
    next axis decides: "batches" if the batches of a token follow (sbhd), "heads" if its sequence follows (bshd).
    """
    strides = zip(x.stride()[:3], x.shape[:3], strict=True)
    batch, seq, head = (stride if size > 1 else float("inf") for stride, size in strides)
    if seq < head:
        return "tokens"
    return "batches" if batch < seq < float("inf") else "heads"


def table_strides(table: torch.Tensor) -> tuple[int, int]:
    """The strides of the batches and of the rows of a table; the first is 0 if all batches share the table."""
    return (table.stride(0) if table.ndim == 3 and len(table) > 1 else 0), table.stride(-2)


def _max_tile_offset(x: torch.Tensor, block_tokens: int) -> int:
    """An upper bound of the offsets in a tile of ``block_tokens`` tokens, with all heads padded to a power of two."""
    return block_tokens * x.stride(1) + 2 * x.shape[2] * x.stride(2) + x.shape[3]


def common_alignment(heads: Sequence[torch.Tensor]) -> int:
    """The largest power of two, up to 16, that divides all strides of heads but the last, which is 1."""
    return alignment([stride for x in heads for stride in x.stride()[:3]])


def alignment(numbers: Sequence[int]) -> int:
    """The largest power of two, up to 16, that divides every number.

    Triton itself distinguishes only multiples of 16 from other strides. It would read heads of 72 elements (8 x 9)
    element by element, although reads of 16 bytes are possible.
    """
    bits = 16
    for number in numbers:
        bits |= number
    return bits & -bits
