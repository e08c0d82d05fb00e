"""This file holds the code that finds the data of a program; the rotation and the fused norm share it.

Tensors are views ``[B, S, H, D]``. A program takes a block of tokens of one batch and a block of heads.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ropelab.kernels.rotation import NO_POSITION, Rotation

TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}
_MAX_GRID_X, _MAX_GRID_YZ = 2**31 - 1, 65535
MAX_BATCH = _MAX_GRID_YZ
"""The most batches of one launch: the grid axis of the batches ends here. More batches take several launches."""
_NO_POSITION = tl.constexpr(NO_POSITION)


@triton.jit
def offsets_of(stride_b, stride_s, stride_h, batch, first_seq, token, head, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """The offsets, in elements, at which the rows of a tile begin, ``[tokens, heads, 1]``.

    The offset of the tile has 64 bits, because B * S * H * D exceeds 2**31 in long-context training. The offsets within
    the tile have 32 bits unless the tile is WIDE: every thread computes them, so short arithmetic pays. All strides are
    multiples of ALIGN. The compiler gets ALIGN as a hint, and without the hint it reads element by element.
    """
    if WIDE:
        token, head = token.to(tl.int64), head.to(tl.int64)
    first = tl.multiple_of(batch.to(tl.int64) * stride_b + first_seq.to(tl.int64) * stride_s, ALIGN)
    token_offset = tl.multiple_of(token * stride_s, ALIGN)
    head_offset = tl.multiple_of(head * stride_h, ALIGN)
    return first + (token_offset[:, None, None] + head_offset[None, :, None])


@triton.jit
def blocks_of_program(HEAD_BLOCKS: tl.constexpr, INNERMOST: tl.constexpr):
    """The head block, the token block and the batch of this program in a grid of `launch_grid`.

    A program number is divided by a constant only. Any other division costs up to 5% of the speed of a copy, because
    no load can begin before the quotient is known.
    """
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if INNERMOST == "heads":
        return x % HEAD_BLOCKS, x // HEAD_BLOCKS, z
    elif INNERMOST == "batches":
        return x % HEAD_BLOCKS, y, x // HEAD_BLOCKS
    else:
        return y, x, z


@triton.jit
def position_of(
    positions_ptr, stride_b, stride_s, first_position, batch, first_seq, token, is_token, POSITIONS: tl.constexpr
):
    """The positions of the tokens, ``[tokens]``; see `ropelab.positions`.

    POSITIONS names the source. ``"token"``: the kernel reads the position of each token. ``"sequence"``: the kernel
    reads the position of the first token of each sequence and adds the token's place in the sequence. ``"none"``: the
    kernel adds the token's place in the sequence to ``first_position``.

    The loads keep positions in the cache, as `load_table` keeps tables: the loads from the tables wait for the
    positions, and all layers share them.
    """
    if POSITIONS == "token":
        at = batch.to(tl.int64) * stride_b + (first_seq + token).to(tl.int64) * stride_s
        return tl.load(positions_ptr + at, mask=is_token, other=0, eviction_policy="evict_last")
    elif POSITIONS == "sequence":
        # In 64 bits no sum wraps around to an existing position. A sum that equals NO_POSITION by chance becomes
        # another position that has no row.
        first = tl.load(positions_ptr + batch.to(tl.int64) * stride_b, eviction_policy="evict_last").to(tl.int64)
        position = first + (first_seq + token)
        position = tl.where(position == _NO_POSITION, _NO_POSITION - 1, position)
        return tl.where(first == _NO_POSITION, _NO_POSITION, position)
    else:
        return first_position + first_seq + token


@triton.jit
def table_rows_of(
    positions, tables, batch, first_seq, token, is_token,
    POSITIONS: tl.constexpr, TABLE_ALIGN: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """The rows of the tables for the tokens; see `ropelab.positions`.

    The host has checked that the rows exist where positions count up from a start.

    Returns:
        The offsets at which the rows of cos and sin begin, whether each row exists, whether each token has a position,
        and whether the position is negative; each ``[tokens]``.
    """
    positions_ptr, positions_stride_b, positions_stride_s, first_position = positions
    table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p = tables
    position = position_of(
        positions_ptr, positions_stride_b, positions_stride_s, first_position, batch, first_seq, token, is_token,
        POSITIONS,
    )  # fmt: skip
    if POSITIONS == "none" or position.dtype == tl.int64:
        row = (position if POSITIONS == "none" else tl.abs(position)).to(tl.int64)
        has_row = (row >= 0) & (row < table_rows)
    else:
        # The magnitude of an int32 fits into 32 bits without a sign, so one comparison suffices.
        magnitude = tl.abs(position).to(tl.uint32)
        row, has_row = magnitude.to(tl.int64), magnitude < table_rows.to(tl.uint32)
    cos_at = tl.multiple_of(batch.to(tl.int64) * cos_stride_b + row * cos_stride_p, TABLE_ALIGN)
    sin_at = cos_at
    if not SAME_STRIDES:
        sin_at = tl.multiple_of(batch.to(tl.int64) * sin_stride_b + row * sin_stride_p, TABLE_ALIGN)
    return cos_at, sin_at, has_row, position != _NO_POSITION, position < 0


@triton.jit
def sign_of(has_row, is_negative, DTYPE: tl.constexpr):
    """The factor of the sines of each token: -1 at a negative position, and NaN without a row.

    Both results of a pair contain a product with a sine, so the factor NaN makes both of them NaN.
    """
    return tl.where(has_row, tl.where(is_negative, -1.0, 1.0), float("nan")).to(DTYPE)


@triton.jit
def load_pairs(row, mask, other, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
                EVICTION: tl.constexpr):  # fmt: skip
    """Both members of every pair, each ``[tokens, heads, BLOCK_PAIRS]``."""
    if INTERLEAVED:
        # The members of a pair are adjacent: one wide load reads both, and the threads separate them in registers.
        feature = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        at = tl.broadcast_to(row + feature, [mask.shape[0], mask.shape[1], 2 * BLOCK_PAIRS])
        x = tl.load(at, mask=mask & (feature < 2 * PAIRS), other=other, eviction_policy=EVICTION)
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], BLOCK_PAIRS, 2]))
    else:
        x0 = _load_columns(row, mask, other, PAIRS, BLOCK_PAIRS, EVICTION)
        return x0, _load_columns(row + PAIRS, mask, other, PAIRS, BLOCK_PAIRS, EVICTION)


@triton.jit
def _load_columns(row, mask, other, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, EVICTION: tl.constexpr):
    pair = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    at = tl.broadcast_to(row + pair, [mask.shape[0], mask.shape[1], BLOCK_PAIRS])
    return tl.load(at, mask=mask & (pair < PAIRS), other=other, eviction_policy=EVICTION)


@triton.jit
def load_table(row, mask, other, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
                FULL_WIDTH: tl.constexpr):  # fmt: skip
    """The columns of both members of every pair, each ``[tokens, heads, BLOCK_PAIRS]``, read again for every head.

    Each thread reads the columns of the pairs that it holds, so threads exchange nothing. The L1 cache serves the
    repeated reads. Layers, heads and batches share a table, whereas q and k are read once, so evict_last keeps the
    table in the cache.
    """
    if FULL_WIDTH:
        return load_pairs(row, mask, other, PAIRS, BLOCK_PAIRS, INTERLEAVED, "evict_last")
    else:
        t = _load_columns(row, mask, other, PAIRS, BLOCK_PAIRS, "evict_last")
        return t, t


@triton.jit
def narrow(y, DTYPE: tl.constexpr):
    """``y`` rounded to DTYPE as torch rounds it: float64 becomes float32 first and then 16 bits."""
    if DTYPE.primitive_bitwidth == 16:
        return y.to(tl.float32).to(DTYPE)
    else:
        return y.to(DTYPE)


@triton.jit
def turn(x0, x1, cos0, cos1, sin0, sin1, TRANSPOSE: tl.constexpr):
    """The product of the matrix ``[[cos0, -sin0], [sin1, cos1]]``, or of its transpose, and the pair ``(x0, x1)``."""
    if TRANSPOSE:
        return x0 * cos0 + x1 * sin1, x1 * cos1 - x0 * sin0
    else:
        return x0 * cos0 - x1 * sin0, x1 * cos1 + x0 * sin1


def launch_grid(batch: int, token_blocks: int, head_blocks: int, order: str) -> tuple[tuple[int, int, int], str]:
    """The grid of a launch and its order: ``order``, or "heads" if the grid axis of "batches" has too few places.

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
    if grid[0] > _MAX_GRID_X:
        raise ValueError(f"q: expected at most {_MAX_GRID_X} blocks of tokens and heads, got {grid[0]}")
    return grid, order


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


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of ``x`` if its features are not adjacent: a kernel reads 16 bytes of adjacent features at once.

    The copy of an expanded ``x`` is expanded too. For example, the gradient of a sum is one number, and its copy takes
    the memory of one head.
    """
    if x.stride(-1) == 1:
        return x
    distinct = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]
    return distinct.contiguous().expand(x.shape)


def mode(positions: torch.Tensor | None, rotation: Rotation) -> str:
    """The constant POSITIONS of the kernels: "none", "token" or "sequence", see `position_of`."""
    if positions is None:
        return "none"
    return "sequence" if rotation.offsets else "token"


def table_strides(table: torch.Tensor) -> tuple[int, int]:
    """The strides of the batches and of the rows of a table; the first is 0 if all batches share the table."""
    return (table.stride(0), table.stride(1)) if table.ndim == 3 else (0, table.stride(0))


def reach(x: torch.Tensor, block_tokens: int) -> int:
    """An upper bound of the offsets in a tile of ``block_tokens`` tokens, with all heads padded to a power of two."""
    return block_tokens * x.stride(1) + 2 * x.shape[2] * x.stride(2) + x.shape[3]


def common_alignment(strides: Sequence[int]) -> int:
    """The largest power of two, up to 16, that divides every stride.

    Triton itself distinguishes only multiples of 16 from other strides. It would read heads of 72 elements (8 x 9)
    element by element, although reads of 16 bytes are possible.
    """
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits
