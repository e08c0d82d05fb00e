"""Where a kernel's program finds what it works on: the part that rotation and fused norm have in common.

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
"""Batches are on a grid axis that ends here; more are split over launches."""
_NO_POSITION = tl.constexpr(NO_POSITION)


@triton.jit
def offsets_of(stride_b, stride_s, stride_h, batch, first_seq, token, head, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """Where the rows of a tile begin, ``[tokens, heads, 1]``.

    The tile as a whole begins at a 64-bit offset: B * S * H * D passes 2**31 in long-context training. Within
    the tile 32 bits do unless it is WIDE, and every thread computes that part, so it pays to keep it short. The
    hint says what all strides are multiples of, without which the compiler reads element by element.
    """
    if WIDE:
        token, head = token.to(tl.int64), head.to(tl.int64)
    first = tl.multiple_of(batch.to(tl.int64) * stride_b + first_seq.to(tl.int64) * stride_s, ALIGN)
    token_offset = tl.multiple_of(token * stride_s, ALIGN)
    head_offset = tl.multiple_of(head * stride_h, ALIGN)
    return first + (token_offset[:, None, None] + head_offset[None, :, None])


@triton.jit
def blocks_of_program(HEAD_BLOCKS: tl.constexpr, INNERMOST: tl.constexpr):
    """The head block, token block and batch of this program, for a grid of `launch_grid`.

    No program number is divided but by a constant: that costs up to 5% of the speed of a copy, since nothing can be
    loaded before the result.
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
    """Positions ``[tokens]``: ``first_position`` plus the place in the sequence, unless POSITIONS says that they are
    read: ``"token"``, one for each token, or ``"sequence"``, that of each sequence's first.

    The rows of the tables wait for them, and layers share them: kept in the cache like the tables.
    """
    if POSITIONS == "token":
        at = batch.to(tl.int64) * stride_b + (first_seq + token).to(tl.int64) * stride_s
        return tl.load(positions_ptr + at, mask=is_token, other=0, eviction_policy="evict_last")
    elif POSITIONS == "sequence":
        # In 64 bits, where no sum wraps around to a position that exists; nor is one of them NO_POSITION by chance.
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
    """Where the tokens' rows of cos and sin begin; whether they exist, and have a position, and a negative one.

    All ``[tokens, 1, 1]``. Row ``|p|`` serves the positions ``p`` and ``-p``, which turn in opposite directions. The
    host has checked the rows where positions count up from a start.
    """
    positions_ptr, positions_stride_b, positions_stride_s, first_position = positions
    table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p = tables
    position = position_of(
        positions_ptr, positions_stride_b, positions_stride_s, first_position, batch, first_seq, token, is_token,
        POSITIONS,
    )  # fmt: skip
    row = (position if POSITIONS == "none" else tl.abs(position)).to(tl.int64)
    cos_at = tl.multiple_of(batch.to(tl.int64) * cos_stride_b + row * cos_stride_p, TABLE_ALIGN)[:, None, None]
    sin_at = cos_at
    if not SAME_STRIDES:
        sin_at = tl.multiple_of(batch.to(tl.int64) * sin_stride_b + row * sin_stride_p, TABLE_ALIGN)[:, None, None]
    has_row = ((row >= 0) & (row < table_rows))[:, None, None]
    return cos_at, sin_at, has_row, (position != _NO_POSITION)[:, None, None], (position < 0)[:, None, None]


@triton.jit
def load_pairs(row, mask, other, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
                EVICTION: tl.constexpr):  # fmt: skip
    """The two members of every pair, each ``[tokens, heads, BLOCK_PAIRS]``."""
    if INTERLEAVED:
        # Pairs are adjacent: one wide load for both members, parted in registers.
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
    """The columns of both members of every pair, each ``[tokens, heads, BLOCK_PAIRS]``, read anew for every head.

    So each thread reads what belongs to the pairs it holds, and nothing has to change hands between threads; the
    repeats come from the L1 cache. Layers, heads and batches share a table while q and k pass by once, hence
    evict_last: keep it.
    """
    if FULL_WIDTH:
        return load_pairs(row, mask, other, PAIRS, BLOCK_PAIRS, INTERLEAVED, "evict_last")
    else:
        t = _load_columns(row, mask, other, PAIRS, BLOCK_PAIRS, "evict_last")
        return t, t


@triton.jit
def narrow(y, DTYPE: tl.constexpr):
    """``y`` rounded to DTYPE as torch rounds it: from float64 to 16 bits by way of float32."""
    if DTYPE.primitive_bitwidth == 16:
        return y.to(tl.float32).to(DTYPE)
    else:
        return y.to(DTYPE)


@triton.jit
def turn(x0, x1, cos0, cos1, sin0, sin1, TRANSPOSE: tl.constexpr):
    """The matrix ``[[cos0, -sin0], [sin1, cos1]]`` of a pair, or its transpose, applied to the pair."""
    if TRANSPOSE:
        return x0 * cos0 + x1 * sin1, x1 * cos1 - x0 * sin0
    else:
        return x0 * cos0 - x1 * sin0, x1 * cos1 + x0 * sin1


def launch_grid(batch: int, token_blocks: int, head_blocks: int, order: str) -> tuple[tuple[int, int, int], str]:
    """The grid, and the order that it has: the one asked for, unless that has too many blocks of tokens."""
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
    """Of which axis of ``x [B, S, H, D]`` neighbours lie next to each other: heads, tokens or batches.

    Heads first where they are adjacent, as then the batches of a token follow (sbhd) or its sequence does (bshd).
    """
    strides = zip(x.stride()[:3], x.shape[:3], strict=True)
    batch, seq, head = (stride if size > 1 else float("inf") for stride, size in strides)
    if seq < head:
        return "tokens"
    return "batches" if batch < seq < float("inf") else "heads"


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy if its features do not lie side by side: single elements cannot be read 16 bytes at a time.

    Of an expanded ``x`` only what differs is copied: the gradient of a sum is one number, and its copy one head.
    """
    if x.stride(-1) == 1:
        return x
    distinct = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]
    return distinct.contiguous().expand(x.shape)


def mode(positions: torch.Tensor | None, rotation: Rotation) -> str:
    """The constant POSITIONS of the kernels."""
    if positions is None:
        return "none"
    return "sequence" if rotation.offsets else "token"


def table_strides(table: torch.Tensor) -> tuple[int, int]:
    return table.stride()[:2] if table.ndim == 3 else (0, table.stride(0))


def reach(x: torch.Tensor, block_tokens: int) -> int:
    """An upper bound of the offsets within a tile: all heads, padded to a power of two, of its tokens."""
    return block_tokens * x.stride(1) + 2 * x.shape[2] * x.stride(2) + x.shape[3]


def common_alignment(strides: Sequence[int]) -> int:
    """The largest power of two up to 16 that divides every stride.

    Triton itself only tells multiples of 16 from the rest. Heads of 72 elements (8 x 9) would then be read
    element by element, although 16-byte reads are possible.
    """
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits
