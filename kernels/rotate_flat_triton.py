"""This file holds the rotation as a kernel whose programs are full for every number and every width of heads.

A thread reads the pairs of an access at once. The accesses of a token form a line, head after head and q before k. Each
program takes the next piece of the line. The length of a piece is a power of two, so a piece may begin within a head
and end in another token. Divisions by constants give the token, the head and the pairs of each access. A program of
`rotate_triton` takes whole heads instead, and some of its threads have nothing to do if the number of heads or of pairs
is no power of two.

Features that do not rotate make further accesses of each head, and the kernel copies these features. Their loads begin
together with all other loads.
"""

from collections.abc import Callable, Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from ropelab.kernels.addressing import (
    TL_DTYPE,
    common_alignment,
    launch_grid,
    mode,
    narrow,
    reach,
    sign_of,
    table_rows_of,
    table_strides,
    turn,
)
from ropelab.kernels.launch import Launch, compiler_options
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.tiles import FlatTile, pairs_per_access


@triton.jit
def _accesses_of_program(
    UNIT: tl.constexpr, PER_HEAD: tl.constexpr, PROGRAMS: tl.constexpr, INNERMOST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, ACCESSES: tl.constexpr,
):  # fmt: skip
    """The batch and the first token of the block; and the token in the block, the head and the place of each access.

    The place of an access counts the accesses of its head. PROGRAMS programs take a block of BLOCK_TOKENS tokens. A
    block has a whole number of pieces. Every division is by a constant, see `addressing.blocks_of_program`.
    """
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if INNERMOST == "batches":
        token_block, batch, head_block = y, x // PROGRAMS, 0
    elif INNERMOST == "tokens":
        token_block, batch, head_block = x // PROGRAMS, z, y
    else:
        token_block, batch, head_block = x // PROGRAMS, z, 0
    ALONG: tl.constexpr = ACCESSES // BLOCK_HEADS
    i = tl.arange(0, ACCESSES)
    place = (x % PROGRAMS) * ALONG + i % ALONG
    if BLOCK_TOKENS == 1:
        token = tl.zeros([ACCESSES], tl.int32)
    else:
        token = place // UNIT
        place = place % UNIT
    head = head_block * BLOCK_HEADS + i // ALONG + place // PER_HEAD
    return batch, token_block * BLOCK_TOKENS, token, head, place % PER_HEAD


@triton.jit
def _rows(
    q, k, batch, first_seq, token, head, is_q,
    K_HEADS: tl.constexpr, Q_HEADS: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The address of the head of each access; ``q`` and ``k`` are pointers and strides.

    All strides are multiples of ALIGN. The compiler drops a hint together with a sum that it simplifies, so the terms
    have hints too.
    """
    if WIDE:
        token, head = token.to(tl.int64), head.to(tl.int64)
    ptr, stride_b, stride_s, stride_h = q
    first = tl.multiple_of(batch.to(tl.int64) * stride_b + first_seq.to(tl.int64) * stride_s, ALIGN)
    row = ptr + first + (tl.multiple_of(token * stride_s, ALIGN) + tl.multiple_of(head * stride_h, ALIGN))
    if K_HEADS > 0:
        ptr, stride_b, stride_s, stride_h = k
        first = tl.multiple_of(batch.to(tl.int64) * stride_b + first_seq.to(tl.int64) * stride_s, ALIGN)
        k_head = tl.multiple_of((head - Q_HEADS) * stride_h, ALIGN)
        row = tl.where(is_q, row, ptr + first + (tl.multiple_of(token * stride_s, ALIGN) + k_head))
    return row


@triton.jit
def _features(
    access, ROTATING: tl.constexpr, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The first feature of each access, and the feature of the second member of its first pair.

    The first ROTATING accesses of a head rotate. The other accesses hold the REST features, before FIRST and after the
    features that rotate. The interleaved features of an access are adjacent, so only the first feature is used.
    """
    WIDTH: tl.constexpr = 2 * CHUNK if INTERLEAVED else CHUNK
    first = FIRST + access * WIDTH
    second = first + ROTARY_DIM // 2
    if REST > 0:
        slot = (access - ROTATING) * WIDTH
        other = slot + REST // 2
        slot += tl.where(slot >= FIRST, ROTARY_DIM, 0)
        other += tl.where(other >= FIRST, ROTARY_DIM, 0)
        first, second = tl.where(access < ROTATING, first, slot), tl.where(access < ROTATING, second, other)
    return tl.multiple_of(first, WIDTH), tl.multiple_of(second, CHUNK)


@triton.jit
def _addresses(row, features, INTERLEAVED: tl.constexpr, CHUNK: tl.constexpr):
    """The addresses of the first and of the second members of each access; interleaved members share the addresses."""
    first, second = features
    if INTERLEAVED:
        at = (row + first)[:, None] + tl.arange(0, 2 * CHUNK)[None, :]
        return at, at
    else:
        pair = tl.arange(0, CHUNK)[None, :]
        return (row + first)[:, None] + pair, (row + second)[:, None] + pair


@triton.jit
def _pairs(x, INTERLEAVED: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """Both members of the pairs of each access, each ``[accesses, CHUNK]``."""
    x0, x1 = x
    if INTERLEAVED:
        x0, x1 = tl.split(tl.reshape(x0, [x0.shape[0], CHUNK, 2]))
    return x0.to(DTYPE), x1.to(DTYPE)


@triton.jit
def _columns(row, access, mask, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, FULL_WIDTH: tl.constexpr,
             CHUNK: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The columns of both members of the pairs of each access, each ``[accesses, CHUNK]``."""
    if FULL_WIDTH and INTERLEAVED:
        at = (row + access * (2 * CHUNK))[:, None] + tl.arange(0, 2 * CHUNK)[None, :]
        t = tl.load(at, mask=tl.broadcast_to(mask, at.shape), eviction_policy="evict_last")
        t0, t1 = tl.split(tl.reshape(t, [t.shape[0], CHUNK, 2]))
        return t0.to(DTYPE), t1.to(DTYPE)
    else:
        at = (row + access * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
        mask = tl.broadcast_to(mask, at.shape)
        t0 = tl.load(at, mask=mask, eviction_policy="evict_last").to(DTYPE)
        t1 = t0
        if FULL_WIDTH:
            t1 = tl.load(at + PAIRS, mask=mask, eviction_policy="evict_last").to(DTYPE)
        return t0, t1


@triton.jit(do_not_specialize=[
    "first_position", "table_rows", "seq_len",
    "q_stride_b", "q_stride_s", "q_stride_h", "k_stride_b", "k_stride_s", "k_stride_h",
    "qy_stride_b", "qy_stride_s", "qy_stride_h", "ky_stride_b", "ky_stride_s", "ky_stride_h",
    "cos_stride_b", "cos_stride_p", "sin_stride_b", "sin_stride_p", "positions_stride_b", "positions_stride_s",
])  # fmt: skip
def _rotate_kernel(
    q_ptr, k_ptr, qy_ptr, ky_ptr, cos_ptr, sin_ptr, positions_ptr,
    first_position, table_rows, seq_len,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    qy_stride_b, qy_stride_s, qy_stride_h, ky_stride_b, ky_stride_s, ky_stride_h,
    cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, IN_PLACE: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, HEADS_FIRST: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, SAME_STRIDES: tl.constexpr, WIDE: tl.constexpr,
    PER_HEAD: tl.constexpr, UNIT: tl.constexpr, PROGRAMS: tl.constexpr, INNERMOST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, ACCESSES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write y0 = x0 cos - x1 sin and y1 = x1 cos + x0 sin for a piece of the line of accesses.

    Positions and tables are used as in `rotate_triton`, and the results have the same bits.
    """
    PAIRS: tl.constexpr = ROTARY_DIM // 2
    ROTATING: tl.constexpr = PAIRS // CHUNK
    HEADS: tl.constexpr = Q_HEADS + K_HEADS
    SIGNED: tl.constexpr = POSITIONS != "none"
    batch, first_seq, token, head, access = _accesses_of_program(
        UNIT, PER_HEAD, PROGRAMS, INNERMOST, BLOCK_TOKENS, BLOCK_HEADS, ACCESSES
    )
    is_q = head < Q_HEADS
    is_token = token >= 0 if BLOCK_TOKENS == 1 else first_seq + token < seq_len
    mask = is_token
    if UNIT == PER_HEAD or UNIT * BLOCK_TOKENS != PROGRAMS * ACCESSES:
        mask = is_token & (head < HEADS)
    mask = mask[:, None]
    rotates = (access < ROTATING)[:, None]

    q = q_ptr, q_stride_b, q_stride_s, q_stride_h
    k = k_ptr, k_stride_b, k_stride_s, k_stride_h
    positions = positions_ptr, positions_stride_b, positions_stride_s, first_position
    tables = table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p
    if not HEADS_FIRST:
        rows = table_rows_of(
            positions, tables, batch, first_seq, token, is_token, POSITIONS, TABLE_ALIGN, SAME_STRIDES
        )  # fmt: skip
    row = _rows(q, k, batch, first_seq, token, head, is_q, K_HEADS, Q_HEADS, ALIGN, WIDE)
    features = _features(access, ROTATING, ROTARY_DIM, FIRST, REST, INTERLEAVED, CHUNK)
    at0, at1 = _addresses(row, features, INTERLEAVED, CHUNK)
    # In place, the features that do not rotate stay as they are, unless their token has no position.
    read = mask & rotates if IN_PLACE and REST > 0 else mask
    x0 = tl.load(at0, mask=tl.broadcast_to(read, at0.shape))
    x1 = x0
    if not INTERLEAVED:
        x1 = tl.load(at1, mask=tl.broadcast_to(read, at1.shape))
    if HEADS_FIRST:
        # The threads exchange nothing here, but the compiler moves no instruction across a barrier. Without the barrier
        # it would move the instructions that wait for the positions in front of the loads of the heads.
        tl.debug_barrier()
        rows = table_rows_of(
            positions, tables, batch, first_seq, token, is_token, POSITIONS, TABLE_ALIGN, SAME_STRIDES
        )  # fmt: skip
    cos_at, sin_at, has_row, has_position, is_negative = rows
    table_mask = mask
    if REST > 0:
        table_mask = mask & rotates
    if SIGNED:
        table_mask = table_mask & has_row[:, None]
    cos_row, sin_row = cos_ptr + cos_at, sin_ptr + sin_at
    cos0, cos1 = _columns(cos_row, access, table_mask, PAIRS, INTERLEAVED, FULL_WIDTH, CHUNK, COMPUTE_DTYPE)
    sin0, sin1 = _columns(sin_row, access, table_mask, PAIRS, INTERLEAVED, FULL_WIDTH, CHUNK, COMPUTE_DTYPE)
    if SIGNED:
        sign = sign_of(has_row, is_negative, COMPUTE_DTYPE)[:, None]
        sin0, sin1 = sin0 * sign, sin1 * sign

    a0, a1 = _pairs((x0, x1), INTERLEAVED, CHUNK, COMPUTE_DTYPE)
    y0, y1 = turn(a0, a1, cos0, cos1, sin0, sin1, TRANSPOSE)
    y0, y1 = narrow(y0, x0.dtype), narrow(y1, x0.dtype)
    if OUT_INTERLEAVED:
        y0 = tl.reshape(tl.join(y0, y1), [ACCESSES, 2 * CHUNK])
    if REST > 0 and not IN_PLACE:
        y0 = tl.where(rotates, y0, x0)
        if not OUT_INTERLEAVED:
            y1 = tl.where(rotates, y1, x1)
    if not IN_PLACE:
        qy, ky = (qy_ptr, q_stride_b, q_stride_s, q_stride_h), (ky_ptr, k_stride_b, k_stride_s, k_stride_h)
        if not SAME_STRIDES:
            qy = qy_ptr, qy_stride_b, qy_stride_s, qy_stride_h
            ky = ky_ptr, ky_stride_b, ky_stride_s, ky_stride_h
        row = _rows(qy, ky, batch, first_seq, token, head, is_q, K_HEADS, Q_HEADS, ALIGN, WIDE)
        if INTERLEAVED != OUT_INTERLEAVED:
            features = _features(access, ROTATING, ROTARY_DIM, FIRST, REST, OUT_INTERLEAVED, CHUNK)
        at0, at1 = _addresses(row, features, OUT_INTERLEAVED, CHUNK)
    written = read
    if SIGNED:
        # A second store costs less than a selection for every element, because a token hardly ever lacks a position.
        written = read & has_position[:, None]
        nowhere = mask & (has_position == 0)[:, None]
        tl.store(at0, tl.zeros_like(y0), mask=tl.broadcast_to(nowhere, at0.shape))
        if not OUT_INTERLEAVED:
            tl.store(at1, tl.zeros_like(y1), mask=tl.broadcast_to(nowhere, at1.shape))
    tl.store(at0, y0, mask=tl.broadcast_to(written, at0.shape))
    if not OUT_INTERLEAVED:
        tl.store(at1, y1, mask=tl.broadcast_to(written, at1.shape))


def plan(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotation: Rotation,
    tile: FlatTile,
) -> Callable[..., None]:
    """The launch of `rotate_triton.plan` for a flat tile, with tables in place of frequencies.

    Results in the other layout must not overwrite an input, because a program would overwrite pairs that another
    program has yet to read. All features of such results must rotate, because copied features have no pairs.
    """
    q, qy = xs[0], outs[0]
    k, ky = xs[-1], outs[-1]
    batch, seq_len, q_heads, head_dim = q.shape
    k_heads = k.shape[2] if len(xs) > 1 else 0
    in_place = all(x is y for x, y in zip(xs, outs, strict=True))
    rest = 0 if in_place and positions is None else head_dim - rotation.rotary_dim
    chunk = min(tile.pairs_per_access, pairs_per_access(rotation, rest))
    per_head = (rotation.rotary_dim + rest) // (2 * chunk)
    heads = q_heads + k_heads
    by_tokens = tile.innermost == "tokens"
    unit = per_head if by_tokens else per_head * heads
    along = tile.accesses // tile.block_heads
    block_tokens, programs = along // gcd(along, unit), unit // gcd(along, unit)
    token_blocks = triton.cdiv(seq_len, block_tokens)
    head_blocks = triton.cdiv(heads, tile.block_heads)
    if by_tokens:
        grid, order = (token_blocks * programs, head_blocks, batch), "tokens"
    else:
        grid, order = launch_grid(batch, token_blocks, programs, tile.innermost)
    x_strides, y_strides = _strides(xs), _strides(outs)
    cos_strides, sin_strides = table_strides(cos), table_strides(sin)
    positions_strides = (0, 0) if positions is None else (*positions.stride(), 0)[:2]
    widest = 2 * chunk if rotation.interleaved or rotation.out_interleaved else chunk
    constants = {
        "Q_HEADS": q_heads, "K_HEADS": k_heads, "ROTARY_DIM": rotation.rotary_dim, "FIRST": rotation.first,
        "REST": rest, "INTERLEAVED": rotation.interleaved, "OUT_INTERLEAVED": rotation.out_interleaved,
        "TRANSPOSE": rotation.transpose,
        "FULL_WIDTH": rotation.full_width, "POSITIONS": mode(positions, rotation), "IN_PLACE": in_place,
        "COMPUTE_DTYPE": TL_DTYPE[compute_dtype(q, cos)],
        "HEADS_FIRST": tile.heads_first and positions is not None,
        "ALIGN": min(common_alignment([*x_strides, *y_strides]), widest),
        "TABLE_ALIGN": common_alignment([*cos_strides, *sin_strides]),
        "SAME_STRIDES": x_strides == y_strides and cos_strides == sin_strides,
        "WIDE": any(reach(x, block_tokens) >= 2**31 for x in (q, k, qy, ky)),
        "PER_HEAD": per_head, "UNIT": unit, "PROGRAMS": programs, "INNERMOST": order,
        "BLOCK_TOKENS": block_tokens, "BLOCK_HEADS": tile.block_heads, "ACCESSES": tile.accesses, "CHUNK": chunk,
    }  # fmt: skip
    numbers = (seq_len, *x_strides, *y_strides, *cos_strides, *sin_strides, *positions_strides)
    options = compiler_options(tile.num_warps, tile.max_registers, fuse=False)
    return Launch(_rotate_kernel, grid, numbers, constants, options, q.device)


def _strides(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [*tensors[0].stride()[:3], *tensors[-1].stride()[:3]]
