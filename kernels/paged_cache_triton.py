"""This file holds the Triton kernel that leads from the projections to attention in one pass.

The kernel normalizes the heads of q and k, rotates them, writes q, and writes k and v into the slots of a paged cache.
Separate launches write k and read it again in between; this kernel reads q, k and v once and writes each result once.

A program takes rows of q, rows of k or rows of v, where a row is a head of a token. All rows of a program share one
code, so no program converts or looks up what another kind of row needs. A program takes the same heads of a few
neighbouring tokens, as few as fill it. In further passes it takes further heads of these tokens, which rotate by the
cosines and sines that the program has read. The programs of q, k and v for the same few tokens are neighbours, because
they share the rows of the tables, and often one packed tensor.

Two kinds of calls make programs of a single token. Under a norm across heads a program takes all heads of q, or all
heads of k, because the heads share a mean. Without tables the heads of a program share the cosines and sines that the
program computes.

With a norm the arithmetic is as in `qk_norm_triton`, and without a norm as in `rotate_triton`.

Where q and the cache are in 8-bit floats, instructions are as scarce as bytes. An H200 executes 25 for each feature
in the time in which it moves the 3 bytes of the feature. A row of q takes 17 for a feature, as
``tests/compile_paged_cache.py`` counts in the machine code. A row of q took 22 while every program had a single pass,
and 31 while `float8_triton.divide` corrected every quotient twice and selected between two results.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from ropelab.kernels.addressing import (
    MAX_BATCH,
    TL_DTYPE,
    common_alignment,
    mode,
    narrow,
    position_of,
    reach,
    readable,
    table_strides,
    turn,
)
from ropelab.kernels.angles_triton import computed_columns
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.kernels.float8_triton import INTEGER_CONVERSIONS, conversion, divide, round_to, to_float8
from ropelab.kernels.head_sums_triton import sum_of_neighbours, sum_of_products
from ropelab.kernels.heads_triton import load_heads, load_rotation, store_heads
from ropelab.kernels.launch import Launch, compiler_options
from ropelab.kernels.paged_cache import Norm, Scales, Tensors, compute_dtype
from ropelab.kernels.rotation import NO_POSITION, Rotation, row_count
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, next_power_of_2

_NO_POSITION = tl.constexpr(NO_POSITION)

_KINDS = ("Q", "K", "V", "NOPE")
"""The kinds of rows, in the order of their programs."""


@dataclass(frozen=True)
class CacheTile:
    """The rows that one program takes, and its warps.

    Attributes:
        block_rows: the rows of a program, a power of two.
        num_warps: the warps of a program.
        pairs_per_access: the pairs whose features, or whose cosines, a thread reads at once.
        passes: how often a program takes that many rows of the same tokens.
    """

    block_rows: int
    num_warps: int
    pairs_per_access: int
    passes: int = 1


@triton.jit
def _rows_of_program(
    part, first_seq, seq_len, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKENS: tl.constexpr,
    PASSES: tl.constexpr, PASS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of a pass of program ``part`` of a block of tokens: as many heads of each of TOKENS tokens.

    All passes take the same tokens, so they share the rotations. The rows of one token share the arithmetic that finds
    the token's position, slot and row of the tables.

    Returns:
        The token within the block and whether it exists, each ``[1]`` if all rows belong to one token, else ``[rows]``;
        the head, and whether the row exists, each ``[rows]``.
    """
    BLOCK_HEADS: tl.constexpr = BLOCK_ROWS // TOKENS
    HEAD_BLOCKS: tl.constexpr = tl.cdiv(HEADS, BLOCK_HEADS * PASSES)
    row = tl.arange(0, BLOCK_ROWS)
    head = (part % HEAD_BLOCKS * PASSES + PASS) * BLOCK_HEADS + row % BLOCK_HEADS
    token = part // HEAD_BLOCKS * TOKENS + (tl.arange(0, 1) if TOKENS == 1 else row // BLOCK_HEADS)
    is_token = token >= 0 if BLOCK_TOKENS == 1 else first_seq + token < seq_len
    is_row = tl.broadcast_to(is_token, [BLOCK_ROWS])
    if HEADS % (BLOCK_HEADS * PASSES):
        is_row &= head < HEADS
    return token, is_token, head, is_row


@triton.jit
def _pieces_of_program(
    part, first_seq, seq_len, HEADS: tl.constexpr, PIECES: tl.constexpr, ACCESS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TOKENS: tl.constexpr, PASSES: tl.constexpr, PASS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """The rows of a pass whose features are only moved. A wide head makes several rows, its pieces.

    Returns:
        The results of `_rows_of_program`, and after the head the features of the piece, ``[rows, 1, 2 * BLOCK_PAIRS]``.
    """
    WIDTH: tl.constexpr = 2 * BLOCK_PAIRS
    token, is_token, piece, is_row = _rows_of_program(
        part, first_seq, seq_len, HEADS * PIECES, BLOCK_TOKENS, TOKENS, PASSES, PASS, BLOCK_ROWS
    )
    # A thread reads ACCESS features at once. Without the hint the compiler would give the threads that store 8-bit
    # floats twice as many features, and exchange all features through shared memory.
    within = tl.multiple_of(tl.max_contiguous(tl.arange(0, WIDTH), ACCESS), ACCESS)[None, None, :]
    within = tl.multiple_of(tl.max_contiguous(within, [1, 1, ACCESS]), [1, 1, ACCESS])
    feature = (piece % PIECES)[:, None, None] * WIDTH + within
    return token, is_token, piece // PIECES, feature, is_row


@triton.jit
def _rows_at(stride_b, stride_s, stride_h, batch, first_seq, token, head, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """The offset, in elements, at which each row begins, ``[rows, 1, 1]``; see `addressing.offsets_of`."""
    if WIDE:
        token, head = token.to(tl.int64), head.to(tl.int64)
    first = tl.multiple_of(batch.to(tl.int64) * stride_b + first_seq.to(tl.int64) * stride_s, ALIGN)
    within = tl.multiple_of(token * stride_s, ALIGN) + tl.multiple_of(head * stride_h, ALIGN)
    return first + tl.multiple_of(within, ALIGN)[:, None, None]


@triton.jit
def _slots_of(slots_ptr, slots, batch, first_seq, seq_len, token, is_token, SLOT_STRIDE: tl.constexpr):
    """The slot of each token, and -1 for a token that has none."""
    at = batch.to(tl.int64) * seq_len + first_seq + token
    return tl.load(slots_ptr + at * SLOT_STRIDE, mask=is_token & (at < slots), other=-1).to(tl.int64)


@triton.jit
def _cached_rows_at(
    slot, blocks, stride_block, stride_place, stride_h, head,
    PAGE: tl.constexpr, ALIGN: tl.constexpr, NARROW_SLOTS: tl.constexpr,
):  # fmt: skip
    """The offset of each row in the cache, ``[rows, 1, 1]``, and whether the cache has the slot of each token."""
    exists = slot >= 0
    if NARROW_SLOTS:  # the cache has fewer than 2**31 slots, and a division of 32 bits is faster
        exists &= slot < 2**31
        slot = tl.where(exists, slot, 0).to(tl.int32)
    else:
        slot = tl.where(exists, slot, 0)
    block, place = (slot // PAGE).to(tl.int64), (slot % PAGE).to(tl.int64)
    within = tl.multiple_of(place * stride_place, ALIGN) + tl.multiple_of(head.to(tl.int64) * stride_h, ALIGN)
    at = tl.multiple_of(tl.multiple_of(block * stride_block, ALIGN) + within, ALIGN)
    return at[:, None, None], (exists & (block < blocks))[:, None, None]


@triton.jit
def _scales_of(scale_ptr, head, is_row, SCALES: tl.constexpr):
    """The scale of each row, ``[rows, 1, 1]``; without scales, a number that the kernel does not use."""
    if SCALES == "head":
        return tl.load(scale_ptr + head, mask=is_row, other=1.0)[:, None, None]
    elif SCALES == "tensor":
        return tl.load(scale_ptr)
    else:
        return 1.0


@triton.jit
def _stored(y, scale, SOURCE: tl.constexpr, DTYPE: tl.constexpr, SCALES: tl.constexpr, CONVERSION: tl.constexpr):
    """``y`` in the dtype of its source, as if a separate launch read it, and then in the dtype of its destination."""
    if CONVERSION != "none":
        y = round_to(y, SOURCE, CONVERSION)
        if SCALES != "none":
            y = divide(y, scale, SOURCE, CONVERSION)
        return to_float8(y, CONVERSION)
    elif DTYPE == SOURCE:
        return narrow(y, SOURCE)
    else:
        return narrow(narrow(y, SOURCE).to(tl.float32), DTYPE)


@triton.jit
def _normalized(x0, x1, w0, w1, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):
    """The pairs times the weights and ``1 / sqrt(mean + EPS)``; the mean of the squares is over a head or a token."""
    squares = sum_of_products(x0, x0, x1, x1)
    if NORM == "token":  # the rows are all heads of one token, and the rows beyond them are zeros
        rows = tl.reshape(squares, [1, 1, squares.shape[0]])
        mean = sum_of_neighbours(rows) / (HEADS * HEAD_DIM)
    else:
        mean = squares / HEAD_DIM
    rstd = tl.rsqrt(mean + EPS)
    if EPS == 0.0:  # zeros stay zeros
        rstd = tl.where(mean == 0.0, 0.0, rstd)
    return w0 * (x0 * rstd), w1 * (x1 * rstd)


@triton.jit
def _turned_rows(
    x_ptr, w_ptr, scale_ptr, strides, part, batch, first_seq, seq_len, positions, tables,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr, NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr, EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, SCALES: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL_WIDTH: tl.constexpr, TABLE_FREE: tl.constexpr, POSITIONS: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, SAME_STRIDES: tl.constexpr,
    GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKENS: tl.constexpr, PASSES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Read the rows of all passes, and normalize and rotate them.

    All loads come before the first store, because the compiler may not move a load across a store.

    Returns:
        For each pass the heads, whether the rows exist, both members of every pair ``[rows, 1, BLOCK_PAIRS]``, and the
        scales of the heads; the token within the block, whether it exists, and whether it has a position.
    """
    positions_ptr, positions_stride_b, positions_stride_s, first_position = positions
    cos_ptr, sin_ptr, table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p = tables
    read = ()
    for i in tl.static_range(PASSES):
        token, is_token, head, is_row = _rows_of_program(
            part, first_seq, seq_len, HEADS, BLOCK_TOKENS, TOKENS, PASSES, i, BLOCK_ROWS
        )
        if i == 0 or SCALES == "head":
            scale = _scales_of(scale_ptr, head, is_row, SCALES)
        mask = is_row[:, None, None]
        x_at = _rows_at(strides[0], strides[1], strides[2], batch, first_seq, token, head, ALIGN, WIDE)
        x0, x1 = load_heads(
            x_ptr + x_at, mask, HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, ""
        )
        read += ((head, mask, x0, x1, scale),)
    # A pass has as many heads of each token as any other pass, except that the last pass may lack some.
    head, mask = read[0][0], read[0][1]
    if TABLE_FREE:
        cos0, cos1, sin0, sin1 = computed_columns(
            cos_ptr, cos_stride_p, positions_ptr, positions_stride_b, positions_stride_s, first_position,
            batch, first_seq, seq_len, ROTARY_DIM // 2, 1, BLOCK_PAIRS, POSITIONS, COMPUTE_DTYPE,
        )  # fmt: skip
        position = position_of(
            positions_ptr, positions_stride_b, positions_stride_s, first_position, batch, first_seq, token, is_token,
            POSITIONS,
        )  # fmt: skip
        has_position = (position != _NO_POSITION)[:, None, None]
    else:
        cos0, cos1, sin0, sin1, has_position = load_rotation(
            cos_ptr, sin_ptr, positions_ptr, first_position, table_rows,
            cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
            batch, first_seq, token, is_token, mask,
            ROTARY_DIM, INTERLEAVED, FULL_WIDTH, POSITIONS, TABLE_ALIGN, SAME_STRIDES, BLOCK_PAIRS,
            COMPUTE_DTYPE,
        )  # fmt: skip
    if NORM != "none":
        w_at = w_ptr + head[:, None, None] * HEAD_DIM if NORM == "token" else w_ptr
        w0, w1 = load_heads(
            w_at, mask, HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, "evict_last"
        )
        if WEIGHT_OFFSET != 0.0:
            w0, w1 = w0 + WEIGHT_OFFSET, w1 + WEIGHT_OFFSET
    turned = ()
    for i in tl.static_range(PASSES):
        head, mask, x0, x1, scale = read[i]
        if NORM != "none" and NORM_FIRST:
            x0, x1 = _normalized(x0, x1, w0, w1, HEADS, HEAD_DIM, NORM, EPS)
        y0, y1 = turn(x0, x1, cos0, cos1, sin0, sin1, False)
        if HEAD_DIM > ROTARY_DIM:  # the sum of a product and a zero may change the sign of a zero
            rotates = (tl.arange(0, BLOCK_PAIRS) < ROTARY_DIM // 2)[None, None, :]
            y0, y1 = tl.where(rotates, y0, x0), tl.where(rotates, y1, x1)
        if NORM != "none" and not NORM_FIRST:
            exists = mask & (tl.arange(0, BLOCK_PAIRS) < (HEAD_DIM + 1) // 2)[None, None, :]
            y0, y1 = tl.where(exists, y0, 0.0), tl.where(exists, y1, 0.0)
            y0, y1 = _normalized(y0, y1, w0, w1, HEADS, HEAD_DIM, NORM, EPS)
        turned += ((head, mask, y0, y1, scale),)
    return turned, token, is_token, has_position


@triton.jit
def _store_turned(
    row, mask, has_position, y0, y1, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr, POSITIONS: tl.constexpr, GROUP: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write rotated rows, and zeros for tokens without a position."""
    if POSITIONS != "none":
        # A second store costs less than a selection for every element, because a token hardly ever lacks a position.
        store_heads(
            row, mask & (has_position == 0), tl.zeros_like(y0), tl.zeros_like(y1),
            HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS,
        )  # fmt: skip
        mask = mask & has_position
    store_heads(row, mask, y0, y1, HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS)


@triton.jit(do_not_specialize=[
    "first_position", "table_rows", "slots", "seq_len", "blocks",
    "q_stride_b", "q_stride_s", "q_stride_h", "k_stride_b", "k_stride_s", "k_stride_h",
    "v_stride_b", "v_stride_s", "v_stride_h", "qy_stride_b", "qy_stride_s", "qy_stride_h",
    "ky_stride_b", "ky_stride_s", "ky_stride_h", "vy_stride_b", "vy_stride_s", "vy_stride_h",
    "nope_stride_b", "nope_stride_s", "nope_stride_h", "nope_y_stride_b", "nope_y_stride_s", "nope_y_stride_h",
    "k_cache_stride_block", "k_cache_stride_place", "k_cache_stride_h",
    "v_cache_stride_block", "v_cache_stride_place", "v_cache_stride_h",
    "cos_stride_b", "cos_stride_p", "sin_stride_b", "sin_stride_p", "positions_stride_b", "positions_stride_s",
])  # fmt: skip
def _paged_cache_kernel(
    q_ptr, k_ptr, v_ptr, nope_ptr, qy_ptr, ky_ptr, vy_ptr, nope_y_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    qw_ptr, kw_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr, positions_ptr,
    first_position, table_rows, slots, seq_len, blocks,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    qy_stride_b, qy_stride_s, qy_stride_h, ky_stride_b, ky_stride_s, ky_stride_h, vy_stride_b, vy_stride_s, vy_stride_h,
    nope_stride_b, nope_stride_s, nope_stride_h, nope_y_stride_b, nope_y_stride_s, nope_y_stride_h,
    k_cache_stride_block, k_cache_stride_place, k_cache_stride_h,
    v_cache_stride_block, v_cache_stride_place, v_cache_stride_h,
    cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_PROGRAMS: tl.constexpr, K_PROGRAMS: tl.constexpr,
    V_PROGRAMS: tl.constexpr, PROGRAMS: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    V_PIECES: tl.constexpr, NOPE_DIM: tl.constexpr, NOPE_PIECES: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr, EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, FULL_WIDTH: tl.constexpr, TABLE_FREE: tl.constexpr,
    POSITIONS: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    WRITE_K: tl.constexpr, WRITE_V: tl.constexpr, PAGE: tl.constexpr, NARROW_SLOTS: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    Q_CONVERSION: tl.constexpr, K_CONVERSION: tl.constexpr, V_CONVERSION: tl.constexpr,
    Q_SCALES: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    ALIGN: tl.constexpr, V_ALIGN: tl.constexpr, NOPE_ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    GROUP: tl.constexpr, SAME_TABLE_STRIDES: tl.constexpr, WIDE: tl.constexpr,
    Q_TOKENS: tl.constexpr, K_TOKENS: tl.constexpr, V_TOKENS: tl.constexpr, NOPE_TOKENS: tl.constexpr,
    Q_PASSES: tl.constexpr, K_PASSES: tl.constexpr, V_PASSES: tl.constexpr, NOPE_PASSES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write rows of q, rows of k to the cache, rows of v to the cache, or features of q that do not rotate."""
    first_seq, part = (tl.program_id(0) // PROGRAMS) * BLOCK_TOKENS, tl.program_id(0) % PROGRAMS
    batch = tl.program_id(1)
    positions = positions_ptr, positions_stride_b, positions_stride_s, first_position
    tables = cos_ptr, sin_ptr, table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p
    # The kinds of rows are not branches of one condition: the compiler would demand that equal names have equal shapes.
    ACCESS: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth  # features of 16 bytes
    if part < Q_PROGRAMS:
        turned, token, is_token, has_position = _turned_rows(
            q_ptr, qw_ptr, q_scale_ptr, (q_stride_b, q_stride_s, q_stride_h), part, batch, first_seq, seq_len,
            positions, tables, Q_HEADS, HEAD_DIM, ROTARY_DIM, FIRST, NORM, NORM_FIRST, EPS, WEIGHT_OFFSET, Q_SCALES,
            INTERLEAVED, FULL_WIDTH, TABLE_FREE, POSITIONS, COMPUTE_DTYPE, ALIGN, TABLE_ALIGN, SAME_TABLE_STRIDES,
            GROUP, WIDE, BLOCK_TOKENS, Q_TOKENS, Q_PASSES, BLOCK_ROWS, BLOCK_PAIRS,
        )  # fmt: skip
        SOURCE_Q: tl.constexpr = q_ptr.dtype.element_ty
        DTYPE_Q: tl.constexpr = qy_ptr.dtype.element_ty
        for i in tl.static_range(Q_PASSES):
            head, mask, y0, y1, scale = turned[i]
            y0 = _stored(y0, scale, SOURCE_Q, DTYPE_Q, Q_SCALES, Q_CONVERSION)
            y1 = _stored(y1, scale, SOURCE_Q, DTYPE_Q, Q_SCALES, Q_CONVERSION)
            y_at = _rows_at(qy_stride_b, qy_stride_s, qy_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
            _store_turned(
                qy_ptr + y_at, mask, has_position, y0, y1,
                HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, POSITIONS, GROUP, BLOCK_PAIRS,
            )  # fmt: skip
    if (part >= Q_PROGRAMS) & (part < Q_PROGRAMS + K_PROGRAMS):
        turned, token, is_token, has_position = _turned_rows(
            k_ptr, kw_ptr, k_scale_ptr, (k_stride_b, k_stride_s, k_stride_h), part - Q_PROGRAMS, batch, first_seq,
            seq_len, positions, tables, K_HEADS, HEAD_DIM, ROTARY_DIM, FIRST, NORM, NORM_FIRST, EPS, WEIGHT_OFFSET,
            K_SCALES, INTERLEAVED, FULL_WIDTH, TABLE_FREE, POSITIONS, COMPUTE_DTYPE, ALIGN, TABLE_ALIGN,
            SAME_TABLE_STRIDES, GROUP, WIDE, BLOCK_TOKENS, K_TOKENS, K_PASSES, BLOCK_ROWS, BLOCK_PAIRS,
        )  # fmt: skip
        slot = _slots_of(slots_ptr, slots, batch, first_seq, seq_len, token, is_token, SLOT_STRIDE)
        SOURCE_K: tl.constexpr = k_ptr.dtype.element_ty
        DTYPE_K: tl.constexpr = k_cache_ptr.dtype.element_ty
        for i in tl.static_range(K_PASSES):
            head, mask, y0, y1, scale = turned[i]
            if WRITE_K:
                y_at = _rows_at(ky_stride_b, ky_stride_s, ky_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
                _store_turned(
                    ky_ptr + y_at, mask, has_position, y0, y1,
                    HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, POSITIONS, GROUP, BLOCK_PAIRS,
                )  # fmt: skip
            at, exists = _cached_rows_at(
                slot, blocks, k_cache_stride_block, k_cache_stride_place, k_cache_stride_h, head,
                PAGE, ALIGN, NARROW_SLOTS,
            )  # fmt: skip
            y0 = _stored(y0, scale, SOURCE_K, DTYPE_K, K_SCALES, K_CONVERSION)
            y1 = _stored(y1, scale, SOURCE_K, DTYPE_K, K_SCALES, K_CONVERSION)
            _store_turned(
                k_cache_ptr + at, exists & mask, has_position, y0, y1,
                HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, POSITIONS, GROUP, BLOCK_PAIRS,
            )  # fmt: skip
    V_FIRST: tl.constexpr = Q_PROGRAMS + K_PROGRAMS
    if (part >= V_FIRST) & (part < V_FIRST + V_PROGRAMS):
        read = ()
        for i in tl.static_range(V_PASSES):
            token, is_token, head, feature, is_row = _pieces_of_program(
                part - V_FIRST, first_seq, seq_len, K_HEADS, V_PIECES, ACCESS,
                BLOCK_TOKENS, V_TOKENS, V_PASSES, i, BLOCK_ROWS, BLOCK_PAIRS,
            )  # fmt: skip
            scale = _scales_of(v_scale_ptr, head, is_row, V_SCALES)
            inside = is_row[:, None, None] & (feature < V_DIM)
            x_at = _rows_at(v_stride_b, v_stride_s, v_stride_h, batch, first_seq, token, head, V_ALIGN, WIDE)
            read += ((head, feature, inside, tl.load(v_ptr + x_at + feature, mask=inside, other=0), scale),)
        slot = _slots_of(slots_ptr, slots, batch, first_seq, seq_len, token, is_token, SLOT_STRIDE)
        for i in tl.static_range(V_PASSES):
            head, feature, inside, x, scale = read[i]
            if WRITE_V:
                y_at = _rows_at(vy_stride_b, vy_stride_s, vy_stride_h, batch, first_seq, token, head, V_ALIGN, WIDE)
                tl.store(vy_ptr + y_at + feature, x, mask=inside)
            at, exists = _cached_rows_at(
                slot, blocks, v_cache_stride_block, v_cache_stride_place, v_cache_stride_h, head,
                PAGE, V_ALIGN, NARROW_SLOTS,
            )  # fmt: skip
            y = _stored(x, scale, v_ptr.dtype.element_ty, v_cache_ptr.dtype.element_ty, V_SCALES, V_CONVERSION)
            tl.store(v_cache_ptr + at + feature, y, mask=inside & exists)
    if NOPE_DIM > 0:
        if part >= V_FIRST + V_PROGRAMS:
            read = ()
            for i in tl.static_range(NOPE_PASSES):
                token, is_token, head, feature, is_row = _pieces_of_program(
                    part - V_FIRST - V_PROGRAMS, first_seq, seq_len, Q_HEADS, NOPE_PIECES, ACCESS,
                    BLOCK_TOKENS, NOPE_TOKENS, NOPE_PASSES, i, BLOCK_ROWS, BLOCK_PAIRS,
                )  # fmt: skip
                scale = _scales_of(q_scale_ptr, head, is_row, Q_SCALES)
                inside = is_row[:, None, None] & (feature < NOPE_DIM)
                x_at = _rows_at(
                    nope_stride_b, nope_stride_s, nope_stride_h, batch, first_seq, token, head, NOPE_ALIGN, WIDE
                )
                read += ((head, feature, inside, tl.load(nope_ptr + x_at + feature, mask=inside, other=0), scale),)
            for i in tl.static_range(NOPE_PASSES):
                head, feature, inside, x, scale = read[i]
                y = _stored(x, scale, nope_ptr.dtype.element_ty, nope_y_ptr.dtype.element_ty, Q_SCALES, Q_CONVERSION)
                y_at = _rows_at(
                    nope_y_stride_b, nope_y_stride_s, nope_y_stride_h, batch, first_seq, token, head, NOPE_ALIGN, WIDE
                )
                tl.store(nope_y_ptr + y_at + feature, y, mask=inside)


def write(
    tensors: Tensors, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation, norm: Norm | None, scales: Scales, *,
    positions: torch.Tensor | None = None, first_position: int = 0, tile: CacheTile | None = None,
) -> None:  # fmt: skip
    """Normalize and rotate q and k, write q, and write k and v into slots of the caches, in one launch.

    The arguments are as for `paged_cache_torch.write`. The features of outputs and caches are adjacent.

    Args:
        tile: for sweeps; by default `choose_tile` decides.
    """
    tensors = tensors.with_readable_inputs(readable)
    cos, sin = readable(cos), readable(sin)
    if norm is not None:
        norm = norm._replace(q_weight=readable(norm.q_weight), k_weight=readable(norm.k_weight))
    seq_len = tensors.q.shape[1]
    for start in range(0, tensors.q.shape[0], MAX_BATCH):
        part = slice(start, start + MAX_BATCH)
        tensors_part = tensors.batches(part, seq_len)
        cos_part, sin_part = (table[part] if table.ndim == 3 else table for table in (cos, sin))
        positions_part = None if positions is None else positions[part]
        launch = plan(tensors_part, cos_part, sin_part, positions_part, rotation, norm, scales, tile)
        launch(tensors_part, cos_part, sin_part, positions_part, first_position, norm, scales)


class PagedCacheLaunch:
    """A launch of the kernel for tensors that agree in everything except contents, addresses and rows of tables.

    Args:
        launch: a launch that takes the kernel's first arguments.
        as_bytes: the kernel gets 8-bit floats as bytes, because its target does not have the dtype.
    """

    def __init__(self, launch: Callable[..., None], *, as_bytes: bool = False):
        self.launch, self.as_bytes = launch, as_bytes

    def __call__(self, t: Tensors, cos, sin, positions, first_position: int, norm: Norm | None, s: Scales) -> None:
        q_out, k_cache, v_cache = t.destinations
        # The kernel ignores the tensors that stand in for missing tensors.
        nope, nope_out = t.nope or (t.q, q_out)
        if self.as_bytes:
            q_out, k_cache, v_cache, nope_out = (
                x.view(torch.uint8) if x.dtype in FLOAT8_DTYPES else x for x in (q_out, k_cache, v_cache, nope_out)
            )
        self.launch(
            t.q, t.k, t.v, nope, q_out, t.k if t.k_out is None else t.k_out, t.v if t.v_out is None else t.v_out,
            nope_out, k_cache, v_cache, t.slots,
            *((cos, cos) if norm is None else (norm.q_weight, norm.k_weight)),
            *(cos if scale is None else scale for scale in s), cos, sin,
            cos if positions is None else positions, first_position, row_count(cos), t.slots.shape[0],
        )  # fmt: skip


def plan(
    t: Tensors, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, rotation: Rotation,
    norm: Norm | None, scales: Scales, tile: CacheTile | None = None,
) -> PagedCacheLaunch:  # fmt: skip
    """The launch that `write` makes for tensors like these; a caller can keep the launch and repeat it.

    The arguments are as for `write`, but have last strides of 1 and at most ``MAX_BATCH`` batches.

    Raises:
        ValueError: more programs than a grid can hold.
    """
    batch, seq_len, q_heads, head_dim = t.q.shape
    k_heads, v_dim = t.v.shape[2:]
    if batch * seq_len * (q_heads + k_heads) == 0:
        return PagedCacheLaunch(_launch_nothing)
    rest_pairs = (head_dim - rotation.rotary_dim + 1) // 2
    block_pairs = _block_pairs(head_dim, rotation)
    conversions = [conversion(x.dtype, x.device) for x in t.destinations]
    across = norm is not None and norm.across_heads(head_dim)
    nope_dim = 0 if t.q_nope is None else t.q_nope.shape[3]
    tile = tile or tile_for(t, rotation, norm)
    v_pieces, nope_pieces = _pieces(t, block_pairs)
    rows = _rows_of_token(t, block_pairs)
    # A program takes so many tokens that no row is idle, but not more tokens than there are.
    most = 1 if across or rotation.table_free else next_power_of_2(seq_len)
    tokens = [min(most, tile.block_rows // gcd(tile.block_rows, heads)) for heads in rows]
    block_tokens = max(tokens)
    head_blocks = [triton.cdiv(heads, tile.block_rows // n) for n, heads in zip(tokens, rows, strict=True)]
    passes = [min(tile.passes, next_power_of_2(max(1, n))) for n in head_blocks]
    programs = [
        block_tokens // n * triton.cdiv(blocks, each)
        for n, blocks, each in zip(tokens, head_blocks, passes, strict=True)
    ]
    grid = triton.cdiv(seq_len, block_tokens) * sum(programs), batch, 1
    if grid[0] >= 2**31:
        raise ValueError(f"q: expected fewer than 2**31 programs, got {grid[0]}")
    turned = [x.stride()[:3] for x in (t.q, t.k, t.q_out, t.k if t.k_out is None else t.k_out, t.k_cache)]
    moved = [x.stride()[:3] for x in (t.v, t.v if t.v_out is None else t.v_out, t.v_cache)]
    kept = [(0, 0, 0)] * 2 if t.nope is None else [x.stride()[:3] for x in t.nope]
    (q, k, qy, ky, k_cache), (v, vy, v_cache), (nope, nope_y) = turned, moved, kept
    cos_strides, sin_strides = table_strides(cos), table_strides(sin)
    positions_strides = (0, 0) if positions is None else (*positions.stride(), 0)[:2]
    per_access = tile.pairs_per_access * (2 if rotation.interleaved else 1)
    dense = [x for x in (t.q, t.k, t.v, t.q_out, t.k_out, t.v_out, t.q_nope, t.q_nope_out) if x is not None]
    constants = {
        "Q_HEADS": max(1, q_heads), "K_HEADS": max(1, k_heads),
        "Q_PROGRAMS": programs[0], "K_PROGRAMS": programs[1], "V_PROGRAMS": programs[2], "PROGRAMS": sum(programs),
        "HEAD_DIM": head_dim, "V_DIM": v_dim, "V_PIECES": v_pieces, "NOPE_DIM": nope_dim, "NOPE_PIECES": nope_pieces,
        "ROTARY_DIM": rotation.rotary_dim, "FIRST": rotation.first,
        "NORM": "none" if norm is None else "token" if across else "head",
        "NORM_FIRST": norm is None or norm.first, "EPS": 0.0 if norm is None else norm.eps,
        "WEIGHT_OFFSET": 0.0 if norm is None else norm.weight_offset,
        "INTERLEAVED": rotation.interleaved, "FULL_WIDTH": rotation.full_width, "TABLE_FREE": rotation.table_free,
        "POSITIONS": mode(positions, rotation), "COMPUTE_DTYPE": TL_DTYPE[compute_dtype(t.q, cos, norm)],
        "WRITE_K": t.k_out is not None, "WRITE_V": t.v_out is not None,
        "PAGE": t.k_cache.shape[1], "NARROW_SLOTS": t.k_cache.shape[0] * t.k_cache.shape[1] < 2**31,
        "SLOT_STRIDE": t.slots.stride(0),
        **{f"{name}_CONVERSION": how for name, how in zip("QKV", conversions, strict=True)},
        **{f"{name}_SCALES": _kind(scale) for name, scale in zip("QKV", scales, strict=True)},
        "ALIGN": min(common_alignment([s for x in turned for s in x]), per_access),
        "V_ALIGN": common_alignment([s for x in moved for s in x]),
        "NOPE_ALIGN": common_alignment([s for x in kept for s in x]),
        "TABLE_ALIGN": common_alignment([*cos_strides, *sin_strides]),
        "GROUP": min(common_alignment([rotation.rotary_dim // 2, rest_pairs, rotation.first]), tile.pairs_per_access),
        "SAME_TABLE_STRIDES": cos_strides == sin_strides,
        "WIDE": any(reach(x, block_tokens) >= 2**31 for x in dense),
        **{f"{name}_TOKENS": n for name, n in zip(_KINDS, tokens, strict=True)},
        **{f"{name}_PASSES": n for name, n in zip(_KINDS, passes, strict=True)},
        "BLOCK_TOKENS": block_tokens, "BLOCK_ROWS": tile.block_rows, "BLOCK_PAIRS": block_pairs,
    }  # fmt: skip
    numbers = (
        seq_len, t.k_cache.shape[0], *q, *k, *v, *qy, *ky, *vy, *nope, *nope_y, *k_cache, *v_cache,
        *cos_strides, *sin_strides, *positions_strides,
    )  # fmt: skip
    # The norm rounds as in `qk_norm_triton`, and the rotation alone as in `rotate_triton`. Computed cosines and sines
    # have the bits of `angles_torch` without fused multiply-add.
    options = compiler_options(tile.num_warps, None, fuse=False)
    launch = Launch(_paged_cache_kernel, grid, numbers, constants, options, t.q.device)
    return PagedCacheLaunch(launch, as_bytes=any(how in INTEGER_CONVERSIONS for how in conversions))


def _block_pairs(head_dim: int, rotation: Rotation) -> int:
    """The pairs of a row: the pairs of a head, also those that do not rotate, padded to a power of two."""
    return next_power_of_2(rotation.rotary_dim // 2 + (head_dim - rotation.rotary_dim + 1) // 2)


def _pieces(t: Tensors, block_pairs: int) -> tuple[int, int]:
    """The rows that a head of v makes, and the rows of a head of q whose features lie apart."""
    nope_dim = 0 if t.q_nope is None else t.q_nope.shape[3]
    return triton.cdiv(t.v.shape[3], 2 * block_pairs), triton.cdiv(nope_dim, 2 * block_pairs)


def _rows_of_token(t: Tensors, block_pairs: int) -> tuple[int, int, int, int]:
    """The rows of a token that hold q, k, v, and features of q that lie apart."""
    q_heads, k_heads = t.q.shape[2], t.k.shape[2]
    v_pieces, nope_pieces = _pieces(t, block_pairs)
    return q_heads, k_heads, k_heads * v_pieces, q_heads * nope_pieces


def tile_for(t: Tensors, rotation: Rotation, norm: Norm | None) -> CacheTile:
    """The tile that `plan` chooses for tensors like these."""
    batch, seq_len, q_heads, head_dim = t.q.shape
    block_pairs = _block_pairs(head_dim, rotation)
    narrow = rotation.interleaved or t.q.itemsize > 2
    if norm is not None and norm.across_heads(head_dim):
        return choose_tile_of_all_heads(block_pairs, max(q_heads, t.k.shape[2]), narrow=narrow)
    if rotation.table_free:
        return choose_table_free_tile(block_pairs, q_heads, narrow=narrow)
    return choose_tile(
        block_pairs, batch * seq_len * sum(_rows_of_token(t, block_pairs)),
        interleaved=rotation.interleaved, itemsize=t.q.itemsize, nope_apart=t.q_nope is not None,
    )  # fmt: skip


def choose_table_free_tile(block_pairs: int, q_heads: int, *, narrow: bool) -> CacheTile:
    """The tile of one token whose heads share computed cosines and sines: each thread computes one angle.

    Args:
        narrow: whether a thread moves 16 bytes of four pairs, not of eight.
    """
    return CacheTile(
        min(_TABLE_FREE_HEADS, next_power_of_2(max(1, q_heads))), min(8, max(1, block_pairs // 32)), _access(narrow)
    )


def choose_tile_of_all_heads(block_pairs: int, heads: int, *, narrow: bool) -> CacheTile:
    """The tile for a norm across ``heads`` heads of q or of k: a program takes all heads of a token.

    The tile does not depend on the number of tokens, so the sum of a norm has one order.
    """
    rows = next_power_of_2(max(1, heads))
    return CacheTile(rows, min(16, max(1, rows * block_pairs // (32 * _PAIRS_OF_A_THREAD))), _access(narrow))


_TABLE_FREE_HEADS = 16
_PAIRS_OF_A_THREAD = 16
"""The pairs that a thread holds under a norm across heads."""


def _access(narrow: bool) -> int:
    return PAIRS_PER_ACCESS if narrow else 2 * PAIRS_PER_ACCESS


def choose_tile(
    block_pairs: int, rows: int, *, interleaved: bool, itemsize: int, nope_apart: bool = False
) -> CacheTile:
    """The tile for ``rows`` rows of all tokens, whose heads have ``block_pairs`` pairs.

    A thread moves 16 bytes at once, as in `tiles.choose_tile`. Each head belongs to the same number of threads whatever
    the tokens are, so the sum of a norm has one order, and a token has the same bits alone and among other tokens.

    A thread of a large call moves 64 bytes, in as many passes as that takes, and a program has one warp: each program
    reads the cosines and sines of its tokens once for all passes. A small call takes one pass, so that no row waits for
    another, and programs of four warps, because fewer programs start sooner. In a small call, heads of up to
    ``_FEW_PAIRS`` pairs take one warp and 32 bytes, unless features of q lie apart. The record `one_pass_tiles` has the
    times of these and of other tiles.

    Args:
        interleaved: whether the pairs are interleaved.
        itemsize: the bytes of an element of q.
        nope_apart: whether features of q that do not rotate are moved too.
    """
    access = _access(interleaved or itemsize > 2)
    bytes_of_pass = 2 * itemsize * max(access, block_pairs // 32)
    warps, passes = 1, max(1, 64 // bytes_of_pass)
    if rows * 2 * block_pairs * itemsize <= _FEW_BYTES:
        if block_pairs > _FEW_PAIRS or nope_apart:
            warps, passes = 4, 1
        else:
            passes = max(1, 32 // bytes_of_pass)
    return CacheTile(max(1, 32 * warps * access // block_pairs), warps, access, passes)


_FEW_BYTES, _FEW_PAIRS = 2**21, 32
"""Calls of `one_pass_tiles` that read up to 1.2 MB are faster as small calls, and from 6.3 MB on as large calls."""


def _kind(scale: torch.Tensor | None) -> str:
    """The constant that tells how a kernel finds the scale of a head: "none", "tensor" or "head"."""
    return "none" if scale is None else "tensor" if scale.numel() == 1 else "head"


def _launch_nothing(*arguments) -> None:
    """Do nothing, because an empty grid cannot be launched."""
