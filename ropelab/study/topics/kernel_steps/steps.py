"""The kernels of the chapter that writes the kernel: each step changes one thing of the step before.

``x`` and ``y`` are ``[tokens, heads, 2 * pairs]``. ``cos`` and ``sin`` are float32 ``[rows, pairs]``, contiguous. Up to
step 5 token t turns by row t. `plans` has the launch of each step.
"""

import torch
import triton
import triton.language as tl

from ropelab.kernels.place_triton import Angles, block_of_tokens, blocks_of_program, heads_at, table_rows_of
from ropelab.kernels.stages_triton import members_of, read_columns, read_pairs, turn, write_heads

# ------------------------------------------------------------------------------------------------- 0: lines of torch


def in_torch(x, cos, sin):
    cos, sin = cos[:, None], sin[:, None]  # the same row for every head of a token
    x0, x1 = x.float().chunk(2, dim=-1)
    y0 = x0 * cos - x1 * sin
    y1 = x1 * cos + x0 * sin
    return torch.cat((y0, y1), dim=-1).to(x.dtype)


# ---------------------------------------------------------------------------------------------- 1: a program per head


@triton.jit
def one_head(x, cos, sin, y, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, BLOCK_PAIRS)
    exists = pair < PAIRS  # a block has a power of two of places
    c = tl.load(cos + token * PAIRS + pair, mask=exists)
    s = tl.load(sin + token * PAIRS + pair, mask=exists)
    at = (token * HEADS + head).to(tl.int64) * 2 * PAIRS + pair
    x0 = tl.load(x + at, mask=exists).to(tl.float32)
    x1 = tl.load(x + at + PAIRS, mask=exists).to(tl.float32)
    tl.store(y + at, (x0 * c - x1 * s).to(y.dtype.element_ty), mask=exists)
    tl.store(y + at + PAIRS, (x1 * c + x0 * s).to(y.dtype.element_ty), mask=exists)


# --------------------------------------------------------------------------------------------------- 2: a shared row


@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def shared_row(
    x, cos, sin, y, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    c = tl.load(cos + token * PAIRS + pair, mask=pair < PAIRS)  # [1, pairs] for all heads
    s = tl.load(sin + token * PAIRS + pair, mask=pair < PAIRS)
    at = token.to(tl.int64) * token_stride + head * head_stride + pair
    x0 = tl.load(x + at, mask=exists).to(tl.float32)
    x1 = tl.load(x + at + PAIRS, mask=exists).to(tl.float32)
    tl.store(y + at, (x0 * c - x1 * s).to(y.dtype.element_ty), mask=exists)
    tl.store(y + at + PAIRS, (x1 * c + x0 * s).to(y.dtype.element_ty), mask=exists)


# ------------------------------------------------------------------------------------------------- 3: wide accesses


@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def wide_accesses(
    x, cos, sin, y, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    row = token * PAIRS + tl.broadcast_to(pair, [BLOCK_HEADS, BLOCK_PAIRS])  # each thread reads its own columns
    c = tl.load(cos + row, mask=exists)
    s = tl.load(sin + row, mask=exists)
    of_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)  # both strides are multiples of ALIGN
    at = of_token + tl.multiple_of(head * head_stride, [1, ALIGN]) + pair
    x0 = tl.load(x + at, mask=exists).to(tl.float32)
    x1 = tl.load(x + at + PAIRS, mask=exists).to(tl.float32)
    tl.store(y + at, (x0 * c - x1 * s).to(y.dtype.element_ty), mask=exists)
    tl.store(y + at + PAIRS, (x1 * c + x0 * s).to(y.dtype.element_ty), mask=exists)


# ------------------------------------------------------------------------------------------------- 4: adjacent pairs


@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def strided_pairs(
    x, cos, sin, y, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    row = token * PAIRS + tl.broadcast_to(pair, [BLOCK_HEADS, BLOCK_PAIRS])
    c = tl.load(cos + row, mask=exists)
    s = tl.load(sin + row, mask=exists)
    of_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)
    at = of_token + tl.multiple_of(head * head_stride, [1, ALIGN]) + 2 * pair
    x0 = tl.load(x + at, mask=exists).to(tl.float32)  # every second feature
    x1 = tl.load(x + at + 1, mask=exists).to(tl.float32)
    tl.store(y + at, (x0 * c - x1 * s).to(y.dtype.element_ty), mask=exists)
    tl.store(y + at + 1, (x1 * c + x0 * s).to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def strided_side(
    x, cos, sin, y, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, ALIGN: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """`strided_pairs` with strided loads alone, or with strided stores alone; `split_pairs` has the other side."""
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    row = token * PAIRS + tl.broadcast_to(pair, [BLOCK_HEADS, BLOCK_PAIRS])
    c = tl.load(cos + row, mask=exists)
    s = tl.load(sin + row, mask=exists)
    of_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)
    of_head = of_token + tl.multiple_of(head * head_stride, [1, ALIGN])
    feature = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
    is_feature = (head < HEADS) & (feature < 2 * PAIRS)
    if LOADS:
        x0 = tl.load(x + of_head + 2 * pair, mask=exists).to(tl.float32)
        x1 = tl.load(x + of_head + 2 * pair + 1, mask=exists).to(tl.float32)
        both = tl.reshape(tl.join(x0 * c - x1 * s, x1 * c + x0 * s), [BLOCK_HEADS, 2 * BLOCK_PAIRS])
        tl.store(y + of_head + feature, both.to(y.dtype.element_ty), mask=is_feature)
    else:
        both = tl.load(x + of_head + feature, mask=is_feature).to(tl.float32)
        x0, x1 = tl.split(tl.reshape(both, [BLOCK_HEADS, BLOCK_PAIRS, 2]))
        tl.store(y + of_head + 2 * pair, (x0 * c - x1 * s).to(y.dtype.element_ty), mask=exists)
        tl.store(y + of_head + 2 * pair + 1, (x1 * c + x0 * s).to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def split_pairs(
    x, cos, sin, y, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    row = token * PAIRS + tl.broadcast_to(pair, [BLOCK_HEADS, BLOCK_PAIRS])
    c = tl.load(cos + row, mask=exists)
    s = tl.load(sin + row, mask=exists)
    feature = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
    is_feature = (head < HEADS) & (feature < 2 * PAIRS)
    of_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)
    at = of_token + tl.multiple_of(head * head_stride, [1, ALIGN]) + feature
    both = tl.load(x + at, mask=is_feature).to(tl.float32)  # adjacent features, as wide as in step 3
    x0, x1 = tl.split(tl.reshape(both, [BLOCK_HEADS, BLOCK_PAIRS, 2]))  # in registers
    both = tl.reshape(tl.join(x0 * c - x1 * s, x1 * c + x0 * s), [BLOCK_HEADS, 2 * BLOCK_PAIRS])
    tl.store(y + at, both.to(y.dtype.element_ty), mask=is_feature)


# --------------------------------------------------------------------------------------------------- 5: the backward


@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def either_way(
    x, cos, sin, y, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, ALIGN: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    row = token * PAIRS + tl.broadcast_to(pair, [BLOCK_HEADS, BLOCK_PAIRS])
    c = tl.load(cos + row, mask=exists)
    s = tl.load(sin + row, mask=exists)
    of_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)
    at = of_token + tl.multiple_of(head * head_stride, [1, ALIGN]) + pair
    x0 = tl.load(x + at, mask=exists).to(tl.float32)
    x1 = tl.load(x + at + PAIRS, mask=exists).to(tl.float32)
    y0, y1 = turn(x0, x1, (c, c, s, s), TRANSPOSE)  # a stage of the library
    tl.store(y + at, y0.to(y.dtype.element_ty), mask=exists)
    tl.store(y + at + PAIRS, y1.to(y.dtype.element_ty), mask=exists)


# -------------------------------------------------------------------------------------------- 6: packed sequences


@triton.jit(do_not_specialize=["token_stride", "head_stride", "sequences"])
def packed(
    x, cos, sin, y, cu_seqlens, sequences, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr, ALIGN: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    sequence = tl.arange(0, BLOCK_SEQUENCES)
    starts = tl.load(cu_seqlens + sequence, mask=sequence < sequences, other=0)
    position = token - tl.max(tl.where(starts <= token, starts, 0), axis=0)  # since the last start before the token
    row = tl.multiple_of(position * PAIRS, ALIGN // 2) + tl.broadcast_to(pair, [BLOCK_HEADS, BLOCK_PAIRS])
    c = tl.load(cos + row, mask=exists)
    s = tl.load(sin + row, mask=exists)
    of_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)
    at = of_token + tl.multiple_of(head * head_stride, [1, ALIGN]) + pair
    x0 = tl.load(x + at, mask=exists).to(tl.float32)
    x1 = tl.load(x + at + PAIRS, mask=exists).to(tl.float32)
    y0, y1 = turn(x0, x1, (c, c, s, s), TRANSPOSE)
    tl.store(y + at, y0.to(y.dtype.element_ty), mask=exists)
    tl.store(y + at + PAIRS, y1.to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["token_stride", "head_stride", "table_rows"])
def positions_given(
    x, cos, sin, y, positions, table_rows, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, ALIGN: tl.constexpr, TRANSPOSE: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    of_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)
    at = of_token + tl.multiple_of(head * head_stride, [1, ALIGN]) + pair
    x0 = tl.load(x + at, mask=exists)  # the heads need no position, so their loads begin first
    x1 = tl.load(x + at + PAIRS, mask=exists)
    if HEADS_FIRST:
        tl.debug_barrier()  # the compiler moves no load across it: nothing waits for the position before
    position = tl.load(positions + token).to(tl.int64)
    has_row = (position >= 0) & (position < table_rows)
    row = tl.multiple_of(position * PAIRS, ALIGN // 2) + tl.broadcast_to(pair, [BLOCK_HEADS, BLOCK_PAIRS])
    c = tl.load(cos + row, mask=exists & has_row)
    s = tl.load(sin + row, mask=exists & has_row) * tl.where(has_row, 1.0, float("nan"))
    y0, y1 = turn(x0.to(tl.float32), x1.to(tl.float32), (c, c, s, s), TRANSPOSE)
    tl.store(y + at, y0.to(y.dtype.element_ty), mask=exists)
    tl.store(y + at + PAIRS, y1.to(y.dtype.element_ty), mask=exists)


# ------------------------------------------------------------------------------------------ 7: the order of the grid


@triton.jit(do_not_specialize=["token_stride", "head_stride", "table_rows"])
def in_order(
    x, cos, sin, y, positions, table_rows, token_stride, head_stride, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, ALIGN: tl.constexpr, TRANSPOSE: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0) // HEAD_BLOCKS  # programs that start together read adjacent memory, and one row
    head = tl.program_id(0) % HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (head < HEADS) & (pair < PAIRS)
    of_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)
    at = of_token + tl.multiple_of(head * head_stride, [1, ALIGN]) + pair
    x0 = tl.load(x + at, mask=exists)
    x1 = tl.load(x + at + PAIRS, mask=exists)
    tl.debug_barrier()
    position = tl.load(positions + token).to(tl.int64)
    has_row = (position >= 0) & (position < table_rows)
    row = tl.multiple_of(position * PAIRS, ALIGN // 2) + tl.broadcast_to(pair, [BLOCK_HEADS, BLOCK_PAIRS])
    c = tl.load(cos + row, mask=exists & has_row, eviction_policy=EVICTION)
    s = tl.load(sin + row, mask=exists & has_row, eviction_policy=EVICTION) * tl.where(has_row, 1.0, float("nan"))
    y0, y1 = turn(x0.to(tl.float32), x1.to(tl.float32), (c, c, s, s), TRANSPOSE)
    tl.store(y + at, y0.to(y.dtype.element_ty), mask=exists)
    tl.store(y + at + PAIRS, y1.to(y.dtype.element_ty), mask=exists)


# ------------------------------------------------------------------------------------------- 8: the library's stages


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len"])
def from_stages(at, first_position, table_rows, seq_len, strides, C: tl.constexpr):
    head_block, token_block, batch = blocks_of_program(C.HEAD_BLOCKS, C.INNERMOST)
    tokens = block_of_tokens(batch, token_block, seq_len, C.BLOCK_TOKENS)
    head = head_block * C.BLOCK_Q_HEADS + tl.arange(0, C.BLOCK_Q_HEADS)
    exists = tokens.exists[:, None, None] & (head < C.Q_HEADS)[None, :, None]
    heads = heads_at((at.q, strides.q), tokens, head, C)
    x0, x1 = read_pairs(members_of(heads, exists, C.INTERLEAVED, C), None, "", C.INTERLEAVED)
    tl.debug_barrier()
    positions = at.positions, strides.positions
    angles = Angles((at.cos, strides.cos), (at.sin, strides.sin), positions, first_position, table_rows)
    rows = table_rows_of(angles, tokens, C)
    columns = read_columns(rows, 0, exists, C, False)
    y0, y1 = turn(x0.to(C.COMPUTE_DTYPE), x1.to(C.COMPUTE_DTYPE), columns, C.TRANSPOSE)
    results = heads_at((at.q_out, strides.q), tokens, head, C)
    write_heads(results, exists, rows.has_position, y0, y1, C.OUT_INTERLEAVED, C)
