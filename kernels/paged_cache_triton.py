"""The way from the projections to attention in one pass, as a Triton kernel.

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

Where q and the cache are in 8-bit floats, instructions are as scarce as bytes. An H200 executes 25 for each feature
in the time in which it moves the 3 bytes of the feature. A row of q takes 16 for a feature, as
``tests/compile_paged_cache.py`` counts in the machine code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropelab.kernels import choices as base
from ropelab.kernels.addressing import common_alignment, in_parts, readable, strides_of, turning, whole_heads
from ropelab.kernels.angles_triton import computed_columns
from ropelab.kernels.choices import Turning
from ropelab.kernels.float8_triton import INTEGER_CONVERSIONS, conversion, divide, round_to, to_float8
from ropelab.kernels.launch import Launch, LaunchWithBytes, compiler_options, launch_nothing
from ropelab.kernels.paged_cache_torch import compute_dtype
from ropelab.kernels.place_triton import Angles, Tokens, cached_at, rows_at, slots_of, table_rows_of
from ropelab.kernels.rotation import Norm, Rotation, pairs_of_head
from ropelab.kernels.stages_triton import narrow, normalize, read_angles, read_heads, turn, write_heads
from ropelab.kernels.tensors import CacheTensors
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, next_power_of_2


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


@dataclass(frozen=True)
class Kind(base.Choices):
    """The choices for rows of one kind: heads of q, heads of k, heads of v, or features of q that lie apart.

    Attributes:
        HEADS: the heads of a token.
        DIM, PIECES: the features of a head that is only moved, and the rows that a wide head makes of them.
        PROGRAMS: the programs of a block of tokens; 0 leaves the kind out.
        TOKENS, PASSES: the tokens of a program, and its passes.
        CACHED: the destination is a cache.
        COPIED: the rows are also written to a tensor of their own dtype.
        SCALES: "head" or "tensor" for one scale a head or for all heads, else "none".
        CONVERSION: the way to 8-bit floats, see `float8_triton.conversion`.
        ALIGN: a power of two that divides all strides of the kind.
    """

    HEADS: int
    DIM: int
    PIECES: int
    PROGRAMS: int
    TOKENS: int
    PASSES: int
    CACHED: bool
    COPIED: bool
    SCALES: str
    CONVERSION: str
    ALIGN: int


@dataclass(frozen=True)
class Choices(Turning):
    """The choices of `_paged_cache_kernel`.

    Attributes:
        Q, K, V, NOPE: the kinds of rows, in the order of their programs.
        NORM: a norm of each "head", of each "token", or "none".
        NORM_FIRST, EPS, WEIGHT_OFFSET: as in `paged_cache.Norm`.
        PAGE: the slots of a block of the cache.
        NARROW_SLOTS: the cache has fewer than 2**31 slots, and a division of 32 bits is faster.
        BLOCK_TOKENS, BLOCK_ROWS: the tokens of a block, and the rows of a program in one pass.
    """

    Q: Kind
    K: Kind
    V: Kind
    NOPE: Kind
    NORM: str
    NORM_FIRST: bool
    EPS: float
    WEIGHT_OFFSET: float
    PAGE: int
    NARROW_SLOTS: bool
    BLOCK_TOKENS: int
    BLOCK_ROWS: int


class Block(NamedTuple):
    """The block of tokens that a program belongs to, and its number among the programs of one kind."""

    batch: tl.tensor
    first: tl.tensor
    seq_len: tl.tensor
    part: tl.tensor


@triton.jit
def _rows_of_program(block, HEADS: tl.constexpr, PASS: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """The rows of a pass: as many heads of each of ``K.TOKENS`` tokens.

    All passes take the same tokens, so they share the rotations. The rows of one token share the arithmetic that finds
    the token's position, slot and row of the tables.

    Returns:
        The `Tokens` of the rows, ``[1]`` if all rows belong to one token, else ``[rows]``; the head, and whether the
        row exists, each ``[rows]``.
    """
    BLOCK_HEADS: tl.constexpr = C.BLOCK_ROWS // K.TOKENS
    HEAD_BLOCKS: tl.constexpr = tl.cdiv(HEADS, BLOCK_HEADS * K.PASSES)
    row = tl.arange(0, C.BLOCK_ROWS)
    head = (block.part % HEAD_BLOCKS * K.PASSES + PASS) * BLOCK_HEADS + row % BLOCK_HEADS
    distance = block.part // HEAD_BLOCKS * K.TOKENS + (tl.arange(0, 1) if K.TOKENS == 1 else row // BLOCK_HEADS)
    is_token = distance >= 0 if C.BLOCK_TOKENS == 1 else block.first + distance < block.seq_len
    exists = tl.broadcast_to(is_token, [C.BLOCK_ROWS])
    if HEADS % (BLOCK_HEADS * K.PASSES):
        exists &= head < HEADS
    return Tokens(block.batch, block.first, distance, is_token), head, exists


@triton.jit
def _read_scale(scale, head, exists, SCALES: tl.constexpr):
    """The scale of each row, ``[rows, 1, 1]``; without scales, a number that the kernel does not use."""
    if SCALES == "head":
        return tl.load(scale + head, mask=exists, other=1.0)[:, None, None]
    elif SCALES == "tensor":
        return tl.load(scale)
    else:
        return 1.0


@triton.jit
def _convert(y, scale, SOURCE: tl.constexpr, DTYPE: tl.constexpr, K: tl.constexpr):
    """``y`` in the dtype of its source, as if a separate launch read it, and then in the dtype of its destination."""
    if K.CONVERSION != "none":
        y = round_to(y, SOURCE, K.CONVERSION)
        if K.SCALES != "none":
            y = divide(y, scale, SOURCE, K.CONVERSION)
        return to_float8(y, K.CONVERSION)
    elif DTYPE == SOURCE:
        return narrow(y, SOURCE)
    else:
        return narrow(narrow(y, SOURCE).to(tl.float32), DTYPE)


@triton.jit
def _normalize(x0, x1, w0, w1, K: tl.constexpr, C: tl.constexpr):
    DIM: tl.constexpr = K.HEADS * C.LANE_DIM if C.NORM == "token" else C.LANE_DIM
    return normalize(x0, x1, w0, w1, DIM, C.EPS, C.NORM == "token", True)


@triton.jit
def _turn_rows(x, out, target, weight, scale, slots, blocks, angles, block, K: tl.constexpr, C: tl.constexpr):
    """Read the rows of all passes, normalize and rotate them, and write them.

    All loads come before the first store, because the compiler may not move a load across a store.

    Args:
        x, out, target: the rows, the tensor of their copies, and the tensor or cache of the converted rows.
    """
    read = ()
    for i in tl.static_range(K.PASSES):
        tokens, head, exists = _rows_of_program(block, K.HEADS, i, K, C)
        if i == 0 or K.SCALES == "head":
            factor = _read_scale(scale, head, exists, K.SCALES)
        exists = exists[:, None, None]
        x0, x1 = read_heads(rows_at(x, tokens, head, C.ALIGN, C), exists, "", C)
        read += ((head, exists, x0, x1, factor),)
    # A pass has as many heads of each token as any other pass, except that the last pass may lack some.
    head, exists = read[0][0], read[0][1]
    if C.TABLE_FREE:
        columns = computed_columns(angles, tokens, block.seq_len, C)
        has_position = table_rows_of(angles, tokens, C).has_position
    else:
        columns, has_position = read_angles(angles, tokens, exists, C)
    if C.NORM != "none":
        w_at = weight + head[:, None, None] * C.LANE_DIM if C.NORM == "token" else weight
        w0, w1 = read_heads(w_at, exists, "evict_last", C)
        if C.WEIGHT_OFFSET != 0.0:
            w0, w1 = w0 + C.WEIGHT_OFFSET, w1 + C.WEIGHT_OFFSET
    turned = ()
    for i in tl.static_range(K.PASSES):
        head, exists, x0, x1, factor = read[i]
        if C.NORM != "none" and C.NORM_FIRST:
            x0, x1 = _normalize(x0, x1, w0, w1, K, C)
        y0, y1 = turn(x0, x1, columns, False)
        if C.LANE_DIM > C.ROTARY_DIM:  # the sum of a product and a zero may change the sign of a zero
            rotates = (tl.arange(0, C.BLOCK_PAIRS) < C.ROTARY_DIM // 2)[None, None, :]
            y0, y1 = tl.where(rotates, y0, x0), tl.where(rotates, y1, x1)
        if C.NORM != "none" and not C.NORM_FIRST:
            inside = exists & (tl.arange(0, C.BLOCK_PAIRS) < (C.LANE_DIM + 1) // 2)[None, None, :]
            y0, y1 = _normalize(tl.where(inside, y0, 0.0), tl.where(inside, y1, 0.0), w0, w1, K, C)
        turned += ((head, exists, y0, y1, factor),)
    if K.CACHED:
        slot = slots_of(slots, tokens, block.seq_len)
    SOURCE: tl.constexpr = x[0].dtype.element_ty
    DTYPE: tl.constexpr = target[0].dtype.element_ty
    for i in tl.static_range(K.PASSES):
        head, exists, y0, y1, factor = turned[i]
        if K.COPIED:
            out_at = rows_at(out, tokens, head, C.ALIGN, C)
            write_heads(out_at, exists, has_position, y0, y1, C.INTERLEAVED, C)
        y0, y1 = _convert(y0, factor, SOURCE, DTYPE, K), _convert(y1, factor, SOURCE, DTYPE, K)
        if K.CACHED:
            at, in_cache = cached_at(target, slot, blocks, head, C.ALIGN, C)
            exists = exists & in_cache
        else:
            at = rows_at(target, tokens, head, C.ALIGN, C)
        write_heads(at, exists, has_position, y0, y1, C.INTERLEAVED, C)


@triton.jit
def _move_rows(x, out, target, scale, slots, blocks, block, K: tl.constexpr, C: tl.constexpr):
    """Read the rows of all passes, whose features do not rotate, and write them; see `_turn_rows`.

    A wide head makes several rows, its pieces.
    """
    SOURCE: tl.constexpr = x[0].dtype.element_ty
    DTYPE: tl.constexpr = target[0].dtype.element_ty
    ACCESS: tl.constexpr = 128 // SOURCE.primitive_bitwidth  # features of 16 bytes
    WIDTH: tl.constexpr = 2 * C.BLOCK_PAIRS
    # A thread reads ACCESS features at once. Without the hint the compiler would give the threads that store 8-bit
    # floats twice as many features, and exchange all features through shared memory.
    within = tl.multiple_of(tl.max_contiguous(tl.arange(0, WIDTH), ACCESS), ACCESS)[None, None, :]
    within = tl.multiple_of(tl.max_contiguous(within, [1, 1, ACCESS]), [1, 1, ACCESS])
    read = ()
    for i in tl.static_range(K.PASSES):
        tokens, piece, exists = _rows_of_program(block, K.HEADS * K.PIECES, i, K, C)
        head, feature = piece // K.PIECES, (piece % K.PIECES)[:, None, None] * WIDTH + within
        factor = _read_scale(scale, head, exists, K.SCALES)
        inside = exists[:, None, None] & (feature < K.DIM)
        x_at = rows_at(x, tokens, head, K.ALIGN, C) + feature
        read += ((head, feature, inside, tl.load(x_at, mask=inside, other=0), factor),)
    if K.CACHED:
        slot = slots_of(slots, tokens, block.seq_len)
    for i in tl.static_range(K.PASSES):
        head, feature, inside, y, factor = read[i]
        if K.COPIED:
            tl.store(rows_at(out, tokens, head, K.ALIGN, C) + feature, y, mask=inside)
        if K.CACHED:
            at, in_cache = cached_at(target, slot, blocks, head, K.ALIGN, C)
            inside = inside & in_cache
        else:
            at = rows_at(target, tokens, head, K.ALIGN, C)
        tl.store(at + feature, _convert(y, factor, SOURCE, DTYPE, K), mask=inside)


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len", "slot_count", "blocks"])
def _paged_cache_kernel(at, first_position, table_rows, seq_len, slot_count, blocks, strides, C: tl.constexpr):
    """Write rows of q, rows of k to the cache, rows of v to the cache, or features of q that do not rotate."""
    K_FIRST: tl.constexpr = C.Q.PROGRAMS
    V_FIRST: tl.constexpr = K_FIRST + C.K.PROGRAMS
    NOPE_FIRST: tl.constexpr = V_FIRST + C.V.PROGRAMS
    PROGRAMS: tl.constexpr = NOPE_FIRST + C.NOPE.PROGRAMS
    first, part = (tl.program_id(0) // PROGRAMS) * C.BLOCK_TOKENS, tl.program_id(0) % PROGRAMS
    batch = tl.program_id(1)
    positions = at.positions, strides.positions
    angles = Angles((at.cos, strides.cos), (at.sin, strides.sin), positions, first_position, table_rows)
    slots = at.slots, strides.slots, slot_count
    # The kinds of rows are not branches of one condition: the compiler would demand that equal names have equal shapes.
    if part < K_FIRST:
        q_out = at.q_out, strides.q_out
        _turn_rows(
            (at.q, strides.q), q_out, q_out, at.q_weight, at.q_scale, slots, blocks, angles,
            Block(batch, first, seq_len, part), C.Q, C,
        )  # fmt: skip
    if (part >= K_FIRST) & (part < V_FIRST):
        _turn_rows(
            (at.k, strides.k), (at.k_out, strides.k_out), (at.k_cache, strides.k_cache), at.k_weight, at.k_scale,
            slots, blocks, angles, Block(batch, first, seq_len, part - K_FIRST), C.K, C,
        )  # fmt: skip
    if (part >= V_FIRST) & (part < NOPE_FIRST):
        _move_rows(
            (at.v, strides.v), (at.v_out, strides.v_out), (at.v_cache, strides.v_cache), at.v_scale, slots, blocks,
            Block(batch, first, seq_len, part - V_FIRST), C.V, C,
        )  # fmt: skip
    if C.NOPE.PROGRAMS > 0:
        if part >= NOPE_FIRST:
            nope_out = at.q_nope_out, strides.q_nope_out
            _move_rows(
                (at.q_nope, strides.q_nope), nope_out, nope_out, at.q_scale, slots, blocks,
                Block(batch, first, seq_len, part - NOPE_FIRST), C.NOPE, C,
            )  # fmt: skip


def write(
    t: CacheTensors, rotation: Rotation, norm: Norm | None, first_position: int = 0, *, tile: CacheTile | None = None
) -> None:
    """Normalize and rotate q and k, write q, and write k and v into slots of the caches, in one launch.

    The arguments are as for `paged_cache_torch.write`. The features of outputs and caches are adjacent.

    Args:
        tile: for sweeps; by default `tile_for` decides.
    """
    inputs = ("q", "k", "v", "q_nope", "q_weight", "k_weight", "cos", "sin")
    t = t._replace(**{name: readable(x) for name in inputs if (x := getattr(t, name)) is not None})
    in_parts(t, t.q, partial(plan_write, rotation=rotation, norm=norm, tile=tile), first_position)


def plan_write(
    t: CacheTensors, rotation: Rotation, norm: Norm | None, tile: CacheTile | None = None
) -> Callable[..., None]:
    """The launch that `write` makes for tensors like these; a caller can repeat the launch, see `rotate_triton`.

    The arguments are as for `write`, but have last strides of 1 and at most ``MAX_BATCH`` batches.

    Raises:
        ValueError: more programs than a grid can hold.
    """
    batch, seq_len, q_heads, head_dim = t.q.shape
    if batch * seq_len * (q_heads + t.k.shape[2]) == 0:
        return launch_nothing
    tile = tile or tile_for(t, rotation)
    block_tokens, programs, kinds = _kinds(t, rotation, tile)
    grid = triton.cdiv(seq_len, block_tokens) * programs, batch, 1
    if grid[0] >= 2**31:
        raise ValueError(f"q: expected fewer than 2**31 programs, got {grid[0]}")
    tiled = [x for x in (t.q, t.k, t.v, t.q_out, t.k_out, t.v_out, t.q_nope, t.q_nope_out) if x is not None]
    access = tile.pairs_per_access * (2 if rotation.interleaved else 1)
    turned = [x for x in (t.q, t.k, t.q_out, t.k_out, t.k_cache) if x is not None]
    choices = Choices(
        **turning(t, rotation, compute_dtype(t), tiled, block_tokens, access)
        | {"ALIGN": min(common_alignment(turned), access)},
        **whole_heads(head_dim, rotation, tile.pairs_per_access), **kinds, INNERMOST="heads",
        NORM="none" if norm is None else "token" if t.norm_across_heads else "head",
        NORM_FIRST=norm is None or norm.first, EPS=0.0 if norm is None else norm.eps,
        WEIGHT_OFFSET=0.0 if norm is None else norm.weight_offset,
        PAGE=t.k_cache.shape[1], NARROW_SLOTS=t.k_cache.shape[0] * t.k_cache.shape[1] < 2**31,
        BLOCK_TOKENS=block_tokens, BLOCK_ROWS=tile.block_rows,
    )  # fmt: skip
    numbers = seq_len, len(t.slots), len(t.k_cache)
    # The norm rounds as in `qk_norm_triton`, and the rotation alone as in `rotate_triton`. Computed cosines and sines
    # have the bits of `angles_torch` without fused multiply-add.
    options = compiler_options(tile.num_warps, _REGISTERS_ACROSS if t.norm_across_heads else None, fuse=False)
    launch = Launch(_paged_cache_kernel, grid, numbers, strides_of(t), choices, options, t.q.device)
    as_bytes = [conversion(x.dtype, x.device) in INTEGER_CONVERSIONS for x in (t.q_out, t.k_cache, t.v_cache)]
    return LaunchWithBytes(launch, CacheTensors) if any(as_bytes) else launch


def _kinds(t: CacheTensors, rotation: Rotation, tile: CacheTile) -> tuple[int, int, dict[str, Any]]:
    """The tokens of a block, its programs, and the kinds of rows.

    A program takes so many tokens that no row is idle, but not more tokens than there are.
    """
    most = 1 if t.norm_across_heads or rotation.table_free else next_power_of_2(t.q.shape[1])
    # name -> source, destination, copy, scale, whether the destination is a cache, and the rows of a token
    of_q, of_k, of_v, of_nope = _rows_of_token(t, rotation)
    found = {
        "Q": (t.q, t.q_out, None, t.q_scale, False, of_q), "K": (t.k, t.k_cache, t.k_out, t.k_scale, True, of_k),
        "V": (t.v, t.v_cache, t.v_out, t.v_scale, True, of_v),
        "NOPE": (t.q_nope, t.q_nope_out, None, t.q_scale, False, of_nope),
    }  # fmt: skip
    tokens = {name: min(most, tile.block_rows // gcd(tile.block_rows, kind[-1])) for name, kind in found.items()}
    block_tokens, all_programs, kinds = max(tokens.values()), 0, {}
    for name, (x, destination, copy, scale, cached, rows) in found.items():
        head_blocks = triton.cdiv(rows, tile.block_rows // tokens[name])
        passes = min(tile.passes, next_power_of_2(max(1, head_blocks)))
        tensors = [y for y in (x, destination, copy) if y is not None]
        heads = 1 if x is None else max(1, x.shape[2])
        programs = block_tokens // tokens[name] * triton.cdiv(head_blocks, passes)
        all_programs += programs
        kinds[name] = Kind(
            HEADS=heads, DIM=0 if x is None else x.shape[3], PIECES=max(1, rows // heads),
            PROGRAMS=programs,
            TOKENS=tokens[name], PASSES=passes, CACHED=cached, COPIED=copy is not None,
            SCALES="none" if scale is None else "tensor" if scale.numel() == 1 else "head",
            CONVERSION="none" if destination is None else conversion(destination.dtype, destination.device),
            ALIGN=common_alignment(tensors),
        )  # fmt: skip
    return block_tokens, all_programs, kinds


def _block_pairs(t: CacheTensors, rotation: Rotation) -> int:
    """The pairs of a row: the pairs of a head, also those that do not rotate, padded to a power of two."""
    return next_power_of_2(pairs_of_head(t.q.shape[3], rotation))


def _rows_of_token(t: CacheTensors, rotation: Rotation) -> tuple[int, int, int, int]:
    """The rows of a token of q, k, v, and features of q that lie apart. A wide head of the last two has several."""
    width, (q_heads, k_heads) = 2 * _block_pairs(t, rotation), (t.q.shape[2], t.k.shape[2])
    nope_dim = 0 if t.q_nope is None else t.q_nope.shape[3]
    return q_heads, k_heads, k_heads * triton.cdiv(t.v.shape[3], width), q_heads * triton.cdiv(nope_dim, width)


def tile_for(t: CacheTensors, rotation: Rotation) -> CacheTile:
    """The tile that `plan_write` chooses for tensors like these."""
    batch, seq_len, q_heads, _ = t.q.shape
    block_pairs = _block_pairs(t, rotation)
    narrow_access = rotation.interleaved or t.q.itemsize > 2
    if t.norm_across_heads:
        return choose_tile_of_all_heads(block_pairs, max(q_heads, t.k.shape[2]), narrow=narrow_access)
    if rotation.table_free:
        return choose_table_free_tile(block_pairs, q_heads, narrow=narrow_access)
    return choose_tile(
        block_pairs, batch * seq_len * sum(_rows_of_token(t, rotation)),
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


_REGISTERS_ACROSS = 96
"""The limit on the registers of a thread under a norm across heads; the assembler would take up to 113.

It leaves room for a fifth program of 128 threads on a multiprocessor, and no register is spilled."""

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
