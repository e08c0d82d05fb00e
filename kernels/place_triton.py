"""The stage `place`: the tokens and heads of a program, their addresses and their positions.

Tensors are views ``[B, S, H, D]`` whose features are adjacent. A kernel has a tensor as a pair of its address and the
strides of its first axes. Tiles have three axes: tokens, heads and pairs. Tiles of rows have rows on the first axis,
each a head of a token, and an axis of 1 in place of the heads.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION

_INVALID_POSITION, _NO_POSITION = tl.constexpr(INVALID_POSITION), tl.constexpr(NO_POSITION)


class Tokens(NamedTuple):
    """The tokens of a program: their batch, the first one, and for each its distance to the first and whether it
    exists.

    ``distance`` and ``exists`` are ``[tokens]``, or ``[rows]`` with the token of each row.
    """

    batch: tl.tensor
    first: tl.tensor
    distance: tl.tensor
    exists: tl.tensor


class Angles(NamedTuple):
    """The tables and positions of a call; ``cos``, ``sin`` and ``positions`` are pairs of an address and strides.

    Where the kernel computes cosines and sines, ``cos`` holds frequencies.
    """

    cos: tuple
    sin: tuple
    positions: tuple
    first_position: tl.tensor
    table_rows: tl.tensor


class TableRows(NamedTuple):
    """The rows of the tables for tokens, each ``[tokens, 1, 1]``, or for pairs of tokens, ``[tokens, 1, pairs]``.

    ``cos`` and ``sin`` are the addresses at which the rows begin.
    """

    cos: tl.tensor
    sin: tl.tensor
    exists: tl.tensor
    has_position: tl.tensor
    is_negative: tl.tensor


class AxialPositions(NamedTuple):
    """The positions of tokens along several axes, each ``[tokens, 1, 1]``, and the tables that pairs read by them.

    ``cos`` and ``sin`` are pairs of the address at which the tables of the batch begin and the stride of their rows.
    A token without a position along any axis has no position.
    """

    positions: tuple
    has_position: tl.tensor
    cos: tuple
    sin: tuple
    table_rows: tl.tensor


class Slots(NamedTuple):
    """The slots of the first tokens of a call: their address, stride and number; and the pages of the caches."""

    address: tl.tensor
    strides: tuple
    count: tl.tensor
    pages: tl.tensor


class InCache(NamedTuple):
    """The slot of each token, -1 for a token that has none; and the pages of the caches."""

    slot: tl.tensor
    pages: tl.tensor


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
def block_of_tokens(batch, token_block, seq_len, BLOCK_TOKENS: tl.constexpr):
    """The `Tokens` of a block. A grid is exact for blocks of one token; a larger block may reach past the end."""
    first, distance = token_block * BLOCK_TOKENS, tl.arange(0, BLOCK_TOKENS)
    exists = distance >= 0 if BLOCK_TOKENS == 1 else first + distance < seq_len
    return Tokens(batch, first, distance, exists)


@triton.jit
def heads_of_block(tokens, head_block, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """The heads of a block, and whether they exist, ``[tokens, heads, 1]``."""
    head = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    return head, tokens.exists[:, None, None] & (head < HEADS)[None, :, None]


@triton.jit
def heads_at(x, tokens, head, C: tl.constexpr):
    """The addresses at which heads begin, ``[tokens, heads, 1]``."""
    address, first, of_token, of_head = _terms(x, tokens, head, C.ALIGN, C.OFFSETS_64)
    return address + (first + (of_token[:, None, None] + of_head[None, :, None]))


@triton.jit
def rows_at(x, tokens, head, ALIGN: tl.constexpr, C: tl.constexpr):
    """The addresses at which rows begin, ``[rows, 1, 1]``, each a head of a token."""
    address, first, of_token, of_head = _terms(x, tokens, head, ALIGN, C.OFFSETS_64)
    return address + (first + tl.multiple_of(of_token + of_head, ALIGN)[:, None, None])


@triton.jit
def _terms(x, tokens, head, ALIGN: tl.constexpr, OFFSETS_64: tl.constexpr):
    """The address of ``x``, and the offsets of the block of tokens, of each token and of each head.

    The offset of the block has 64 bits, because B * S * H * D exceeds 2**31 in long-context training. The offsets
    within the tile have 32 bits unless OFFSETS_64: every thread computes them, so short arithmetic pays. All strides
    are multiples of ALIGN. The compiler gets ALIGN as a hint, and without the hint it reads element by element. The
    compiler drops a hint together with a sum that it simplifies, so the terms have hints too.
    """
    address, strides = x
    token = tokens.distance
    if OFFSETS_64:
        token, head = token.to(tl.int64), head.to(tl.int64)
    first = tokens.batch.to(tl.int64) * strides[0] + tokens.first.to(tl.int64) * strides[1]
    of_token, of_head = tl.multiple_of(token * strides[1], ALIGN), tl.multiple_of(head * strides[2], ALIGN)
    return address, tl.multiple_of(first, ALIGN), of_token, of_head


@triton.jit
def position_of(angles, tokens, axis, C: tl.constexpr):
    """The positions of the tokens along ``axis``, ``[tokens]``; see `ropelab.positions`.

    C.POSITIONS names the source. ``"token"``: the kernel reads the position of each token. ``"sequence"``: the kernel
    reads the position of the first token of each sequence and adds the token's number in its sequence. ``"none"``: the
    kernel adds the token's number in its sequence to ``first_position``.

    The loads keep positions in the cache, as `read_angles` keeps tables: the loads from the tables wait for the
    positions, and all layers share them.

    Args:
        axis: an int64, or one for each token; None where there is one axis.
    """
    batch, in_sequence = tokens.batch.to(tl.int64), tokens.first + tokens.distance
    if C.POSITIONS == "none":
        return angles.first_position + in_sequence
    else:
        address, strides = angles.positions
        if C.POSITIONS == "token":
            offset = batch * strides[0] + in_sequence.to(tl.int64) * strides[1]
            if C.AXES > 1:
                offset += axis * strides[2]
            return tl.load(address + offset, mask=tokens.exists, other=0, eviction_policy="evict_last")
        else:
            # In 64 bits no sum wraps around to an existing position. A sum that equals NO_POSITION by chance becomes
            # another position that has no row.
            first = tl.load(address + batch * strides[0], eviction_policy="evict_last").to(tl.int64)
            position = first + in_sequence
            position = tl.where(position == _NO_POSITION, _NO_POSITION - 1, position)
            return tl.where(first == _NO_POSITION, _NO_POSITION, position)


@triton.jit
def table_rows_of(angles, tokens, C: tl.constexpr):
    """The `TableRows` of the tokens, or with several axes their `AxialPositions`; see `ropelab.positions`."""
    if C.AXES > 1:
        return _axial_positions(angles, tokens, C)
    else:
        return _rows_of_one_axis(angles, tokens, C)


@triton.jit
def row_of(position, table_rows, C: tl.constexpr):
    """The row of the tables that a position reads, in int64, and whether the row exists.

    The host has checked that the rows exist where positions count up from a start.
    """
    if C.POSITIONS == "none" or position.dtype == tl.int64:
        row = (position if C.POSITIONS == "none" else tl.abs(position)).to(tl.int64)
        return row, (row >= 0) & (row < table_rows)
    else:
        # The magnitude of an int32 fits into 32 bits without a sign, so one comparison suffices.
        magnitude = tl.abs(position).to(tl.uint32)
        return magnitude.to(tl.int64), magnitude < table_rows.to(tl.uint32)


@triton.jit
def _rows_of_one_axis(angles, tokens, C: tl.constexpr):
    cos, cos_strides = angles.cos
    sin, sin_strides = angles.sin
    position = position_of(angles, tokens, None, C)
    row, exists = row_of(position, angles.table_rows, C)
    batch = tokens.batch.to(tl.int64)
    cos_at = tl.multiple_of(batch * cos_strides[0] + row * cos_strides[1], C.TABLE_ALIGN)[:, None, None]
    sin_at = cos_at
    if not C.SAME_TABLES:
        sin_at = tl.multiple_of(batch * sin_strides[0] + row * sin_strides[1], C.TABLE_ALIGN)[:, None, None]
    has_position = (position != _NO_POSITION)[:, None, None]
    return TableRows(cos + cos_at, sin + sin_at, exists[:, None, None], has_position, (position < 0)[:, None, None])


@triton.jit
def _axial_positions(angles, tokens, C: tl.constexpr):
    cos, cos_strides = angles.cos
    sin, sin_strides = angles.sin
    positions = ()
    has_position = (tokens.distance < 0)[:, None, None]
    for i in tl.static_range(C.AXES):
        position = position_of(angles, tokens, tl.full([], i, tl.int64), C)[:, None, None]
        positions += (_in_32_bits(position),)
        has_position = has_position | (position != _NO_POSITION)
    batch = tokens.batch.to(tl.int64)
    cos, sin = (cos + batch * cos_strides[0], cos_strides[1]), (sin + batch * sin_strides[0], sin_strides[1])
    return AxialPositions(positions, has_position, cos, sin, angles.table_rows)


@triton.jit
def _in_32_bits(position):
    """A position as int32. No table has a row for a position that exceeds 32 bits."""
    narrow = position.to(tl.int32)
    return tl.where(narrow == position, narrow, _INVALID_POSITION)


@triton.jit
def has_bit(index, BITS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr):
    """The bit of each index in a row of BITS. A row has WIDTH bits, in whole words of 32."""
    WORDS: tl.constexpr = (WIDTH + 31) // 32
    bits = tl.full(index.shape, (BITS >> (32 * WORDS * ROW)) & 0xFFFFFFFF, tl.uint32)
    for i in tl.static_range(1, WORDS):
        word = tl.full(index.shape, (BITS >> (32 * (WORDS * ROW + i))) & 0xFFFFFFFF, tl.uint32)
        bits = tl.where(index // 32 == i, word, bits)
    return ((bits >> (index % 32).to(tl.uint32)) & 1) != 0


@triton.jit
def rows_of_pairs(along, pair, IN_UNIT: tl.constexpr, C: tl.constexpr):
    """The `TableRows` of adjacent pairs for `AxialPositions`, with the addresses of the pairs themselves.

    All pairs of a four, or of AXIS_UNIT adjacent pairs, have the row that pair IN_UNIT of each unit reads, so the
    accesses to the tables are as wide as that.
    """
    UNITS: tl.constexpr = (C.ROTARY_DIM // 2 + C.AXIS_UNIT - 1) // C.AXIS_UNIT
    position = along.positions[0]
    for i in tl.static_range(1, C.AXES):
        reads = has_bit(pair // C.AXIS_UNIT, C.UNIT_BITS, IN_UNIT * C.AXES + i, UNITS)
        position = tl.where(reads, along.positions[i], position)
    row = tl.abs(position)
    exists = row.to(tl.uint32) < along.table_rows.to(tl.uint32)
    GROUP: tl.constexpr = C.AXIS_UNIT if C.AXIS_UNIT < C.BLOCK_PAIRS else C.BLOCK_PAIRS
    row = tl.max_constancy(row, [1, 1, GROUP]).to(tl.int64)
    cos, cos_stride = along.cos
    sin, sin_stride = along.sin
    cos_at = tl.multiple_of(row * cos_stride, [1, 1, C.TABLE_ALIGN]) + pair
    sin_at = cos_at
    if not C.SAME_TABLES:
        sin_at = tl.multiple_of(row * sin_stride, [1, 1, C.TABLE_ALIGN]) + pair
    return TableRows(cos + cos_at, sin + sin_at, exists, position != _NO_POSITION, position < 0)


@triton.jit
def slots_of(slots, tokens, seq_len):
    """The `InCache` of tokens; see `Slots`."""
    token = tokens.batch.to(tl.int64) * seq_len + tokens.first + tokens.distance
    has_slot = tokens.exists & (token < slots.count)
    slot = tl.load(slots.address + token * slots.strides[0], mask=has_slot, other=-1)
    return InCache(slot.to(tl.int64), slots.pages)


@triton.jit
def cached_at(cache, slots, head, ALIGN: tl.constexpr, C: tl.constexpr):
    """The address of each row in the cache, ``[rows, 1, 1]``, and whether the cache has the slot of each token."""
    address, strides = cache
    slot, pages = slots
    exists = slot >= 0
    if C.NARROW_SLOTS:
        exists &= slot < 2**31
        slot = tl.where(exists, slot, 0).to(tl.int32)
    else:
        slot = tl.where(exists, slot, 0)
    page, in_page = (slot // C.PAGE).to(tl.int64), (slot % C.PAGE).to(tl.int64)
    within = tl.multiple_of(in_page * strides[1], ALIGN) + tl.multiple_of(head.to(tl.int64) * strides[2], ALIGN)
    offset = tl.multiple_of(tl.multiple_of(page * strides[0], ALIGN) + within, ALIGN)
    return address + offset[:, None, None], (exists & (page < pages))[:, None, None]
