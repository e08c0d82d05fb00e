"""The stages of the kernels that write rows into a paged cache, where a row is a head of a token.

A program takes the same heads of a few neighbouring tokens. In further passes it takes further heads of these tokens,
which rotate by the same cosines and sines. Slot ``s`` is the place ``s % PAGE`` of block ``s // PAGE`` of a cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from ropelab.kernels import choices as base
from ropelab.kernels.angles_triton import read_angles
from ropelab.kernels.choices import Turning
from ropelab.kernels.float8_triton import divide, magnitude, round_to, scale_of_row, to_float8
from ropelab.kernels.head_sums_triton import sum_of_pieces, sum_of_products
from ropelab.kernels.place_triton import Tokens, cached_at, rows_at, slots_of
from ropelab.kernels.stages_triton import narrow, normalize, read_heads, turn, write_heads


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
        SCALES: "head" or "tensor" for one scale a head or for all heads; "row" for scales that the kernel makes and
            writes; else "none".
        WHOLE: a row shares its scale with features that lie apart, and its program moves them too.
        CONVERSION: the way to 8-bit floats, see `float8_triton.conversion`.
        LARGEST: the largest 8-bit float of the destination.
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
    WHOLE: bool
    CONVERSION: str
    LARGEST: float
    ALIGN: int


@dataclass(frozen=True)
class Caching(Turning):
    """The choices of a kernel that writes rows into a paged cache.

    Attributes:
        PAGE: the slots of a block of the cache.
        NARROW_SLOTS: the cache has fewer than 2**31 slots, and a division of 32 bits is faster.
        BLOCK_TOKENS, BLOCK_ROWS: the tokens of a block, and the rows of a program in one pass.
        HEAD_PIECES: the pieces of BLOCK_PAIRS pairs that cover a head.
    """

    PAGE: int
    NARROW_SLOTS: bool
    BLOCK_TOKENS: int
    BLOCK_ROWS: int
    HEAD_PIECES: int


class Block(NamedTuple):
    """The block of tokens that a program belongs to, and its number among the programs of one kind."""

    batch: tl.tensor
    first: tl.tensor
    seq_len: tl.tensor
    part: tl.tensor


class Rows(NamedTuple):
    """The rows of a kind, as pairs of an address and strides: the source, its copy, the tensor or cache of the
    converted rows, and the scales that the kernel makes. ``scale`` is the address of given scales.
    """

    source: tuple
    copy: tuple
    target: tuple
    scale: tl.tensor
    made_scales: tuple


@triton.jit
def rows_of_program(block, HEADS: tl.constexpr, PASS: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
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
def _destination(target, slot, blocks, tokens, head, exists, ALIGN: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """The address of each row in its destination, ``[rows, 1, 1]``, and which of the elements ``exists`` go there."""
    if K.CACHED:
        at, in_cache = cached_at(target, slot, blocks, head, ALIGN, C)
        return at, exists & in_cache
    else:
        return rows_at(target, tokens, head, ALIGN, C), exists


@triton.jit
def read_scale(scale, head, exists, SCALES: tl.constexpr):
    """The scale of each row, ``[rows, 1, 1]``; without given scales, a number that the kernel does not use."""
    if SCALES == "head":
        return tl.load(scale + head, mask=exists, other=1.0)[:, None, None]
    elif SCALES == "tensor":
        return tl.load(scale)
    else:
        return 1.0


@triton.jit
def convert(y, scale, SOURCE: tl.constexpr, DTYPE: tl.constexpr, K: tl.constexpr):
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
def turn_some(x0, x1, columns, C: tl.constexpr, PIECE: tl.constexpr = 0):
    """The pairs, turned where they rotate. A pair that does not rotate keeps its bits."""
    y0, y1 = turn(x0, x1, columns, False)
    if C.LANE_DIM > C.ROTARY_DIM:  # the sum of a product and a zero may change the sign of a zero
        rotates = (PIECE * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS) < C.ROTARY_DIM // 2)[None, None, :]
        y0, y1 = tl.where(rotates, y0, x0), tl.where(rotates, y1, x1)
    return y0, y1


@triton.jit
def largest(size):
    """The largest of the magnitudes of each row ``[rows, 1, n]``, ``[rows, 1, 1]``."""
    return tl.max(size, axis=2)[:, :, None]


@triton.jit
def largest_of_pairs(y0, y1, has_position, K: tl.constexpr):
    """The largest magnitude of each row of pairs; a token without a position becomes zeros."""
    size = largest(tl.maximum(magnitude(y0, K.CONVERSION), magnitude(y1, K.CONVERSION)))
    return tl.where(has_position, size, 0.0)


@triton.jit
def _normalize(heads, weights, K: tl.constexpr, C: tl.constexpr):
    DIM: tl.constexpr = K.HEADS * C.LANE_DIM if C.NORM == "token" else C.LANE_DIM
    sums = ()
    for i in tl.static_range(C.HEAD_PIECES):
        x0, x1 = heads[i]
        sums += (sum_of_products(x0, x0, x1, x1),)
    squares = sum_of_pieces(sums, 0, triton.next_power_of_2(C.HEAD_PIECES))
    normalized = ()
    for i in tl.static_range(C.HEAD_PIECES):
        x0, x1 = heads[i]
        w0, w1 = weights[i]
        if C.WEIGHT_OFFSET != 0.0:
            w0, w1 = w0 + C.WEIGHT_OFFSET, w1 + C.WEIGHT_OFFSET
        normalized += (normalize(x0, x1, w0, w1, DIM, C.EPS, C.NORM == "token", True, squares),)
    return normalized


@triton.jit
def _read_heads(row, exists, EVICTION: tl.constexpr, C: tl.constexpr):
    """Both members of every pair of heads, for each piece."""
    pieces = ()
    for i in tl.static_range(C.HEAD_PIECES):
        pieces += (read_heads(row, exists, EVICTION, C, i),)
    return pieces


@triton.jit
def _write_heads(row, exists, has_position, pieces, C: tl.constexpr):
    for i in tl.static_range(C.HEAD_PIECES):
        y0, y1 = pieces[i]
        write_heads(row, exists, has_position, y0, y1, C.INTERLEAVED, C, i)


@triton.jit
def _rounded(pieces, has_position, SOURCE: tl.constexpr, K: tl.constexpr):
    """The pieces of heads rounded to SOURCE, and the largest magnitude of each head."""
    rounded, size = (), 0.0
    for i in tl.static_range(len(pieces)):
        y0, y1 = round_to(pieces[i][0], SOURCE, K.CONVERSION), round_to(pieces[i][1], SOURCE, K.CONVERSION)
        rounded += ((y0, y1),)
        of_piece = largest_of_pairs(y0, y1, has_position, K)
        size = of_piece if i == 0 else tl.maximum(size, of_piece)
    return rounded, size


@triton.jit
def _turned(x, weight, scale, angles, block, K: tl.constexpr, C: tl.constexpr):
    """Read the rows of all passes, normalize and rotate them.

    Returns:
        The tokens, whether they have a position, and for each pass the heads, whether the rows exist, both members of
        the pairs of each piece, and the given scales of the rows.
    """
    read = ()
    for i in tl.static_range(K.PASSES):
        tokens, head, exists = rows_of_program(block, K.HEADS, i, K, C)
        if i == 0 or K.SCALES == "head":
            factor = read_scale(scale, head, exists, K.SCALES)
        exists = exists[:, None, None]
        read += ((head, exists, _read_heads(rows_at(x, tokens, head, C.ALIGN, C), exists, "", C), factor),)
    # A pass has as many heads of each token as any other pass, except that the last pass may lack some.
    head, exists = read[0][0], read[0][1]
    columns = ()
    for j in tl.static_range(C.HEAD_PIECES):
        of_piece, has_position = read_angles(angles, tokens, exists, block.seq_len, C, j)
        columns += (of_piece,)
    if C.NORM != "none":
        w_at = weight + head[:, None, None] * C.LANE_DIM if C.NORM == "token" else weight
        weights = _read_heads(w_at, exists, "evict_last", C)
    turned = ()
    for i in tl.static_range(K.PASSES):
        head, exists, pieces, factor = read[i]
        if C.NORM != "none" and C.NORM_FIRST:
            pieces = _normalize(pieces, weights, K, C)
        results = ()
        for j in tl.static_range(C.HEAD_PIECES):
            x0, x1 = pieces[j]
            y0, y1 = turn_some(x0, x1, columns[j], C, j)
            if C.NORM != "none" and not C.NORM_FIRST:
                pair = j * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS)
                inside = exists & (pair < (C.LANE_DIM + 1) // 2)[None, None, :]
                y0, y1 = tl.where(inside, y0, 0.0), tl.where(inside, y1, 0.0)
            results += ((y0, y1),)
        if C.NORM != "none" and not C.NORM_FIRST:
            results = _normalize(results, weights, K, C)
        turned += ((head, exists, results, factor),)
    return tokens, has_position, turned


@triton.jit
def turn_rows(rows, weight, slots, blocks, angles, block, K: tl.constexpr, rest, REST: tl.constexpr, C: tl.constexpr):
    """Read the `Rows` of all passes, normalize and rotate them, and write them.

    All loads come before the first store, because the compiler may not move a load across a store.

    Args:
        rest, REST: the features that lie apart, if ``K.WHOLE``: their rows and kind. There is one pass then.
    """
    SOURCE: tl.constexpr = rows.source[0].dtype.element_ty
    DTYPE: tl.constexpr = rows.target[0].dtype.element_ty
    if K.WHOLE:
        tokens, head, exists = rows_of_program(block, K.HEADS, 0, K, C)
        pieces, rest_size = _read_pieces(rest, tokens, head, exists, REST, C)
    tokens, has_position, turned = _turned(rows.source, weight, rows.scale, angles, block, K, C)
    slot = slots_of(slots, tokens, block.seq_len) if K.CACHED else 0
    for i in tl.static_range(K.PASSES):
        head, exists, y, factor = turned[i]
        if K.COPIED:
            copy_at = rows_at(rows.copy, tokens, head, C.ALIGN, C)
            _write_heads(copy_at, exists, has_position, y, C)
        if K.SCALES == "row":
            y, size = _rounded(y, has_position, SOURCE, K)
            factor = scale_of_row(tl.maximum(size, rest_size) if K.WHOLE else size, K.LARGEST, K.CONVERSION)
            _write_scale(rows, factor, slot, blocks, tokens, head, exists, K, C)
        converted = ()
        for j in tl.static_range(C.HEAD_PIECES):
            y0, y1 = y[j]
            converted += ((convert(y0, factor, SOURCE, DTYPE, K), convert(y1, factor, SOURCE, DTYPE, K)),)
        at, goes = _destination(rows.target, slot, blocks, tokens, head, exists, C.ALIGN, K, C)
        _write_heads(at, goes, has_position, converted, C)
        if K.WHOLE:
            _write_pieces(rest, pieces, factor, slot, blocks, tokens, head, REST, C)


@triton.jit
def _write_scale(rows, scale, slot, blocks, tokens, head, exists, K: tl.constexpr, C: tl.constexpr):
    at, goes = _destination(rows.made_scales, slot, blocks, tokens, head, exists, 1, K, C)
    tl.store(at, scale, mask=goes)


@triton.jit
def _features_of_piece(SOURCE: tl.constexpr, C: tl.constexpr):
    """The features of the first piece of a head that is only moved, ``[1, 1, features]``.

    A thread reads 16 bytes at once. Without the hint the compiler would give the threads that store 8-bit floats twice
    as many features, and exchange all features through shared memory.
    """
    ACCESS: tl.constexpr = 128 // SOURCE.primitive_bitwidth
    within = tl.multiple_of(tl.max_contiguous(tl.arange(0, 2 * C.BLOCK_PAIRS), ACCESS), ACCESS)[None, None, :]
    return tl.multiple_of(tl.max_contiguous(within, [1, 1, ACCESS]), [1, 1, ACCESS])


@triton.jit
def move_rows(rows, slots, blocks, block, K: tl.constexpr, C: tl.constexpr):
    """Read the `Rows` of all passes, whose features do not rotate, and write them; see `turn_rows`.

    A wide head makes several rows, its pieces.
    """
    within = _features_of_piece(rows.source[0].dtype.element_ty, C)
    read = ()
    for i in tl.static_range(K.PASSES):
        tokens, piece, exists = rows_of_program(block, K.HEADS * K.PIECES, i, K, C)
        head, feature = piece // K.PIECES, (piece % K.PIECES)[:, None, None] * (2 * C.BLOCK_PAIRS) + within
        factor = read_scale(rows.scale, head, exists, K.SCALES)
        inside = exists[:, None, None] & (feature < K.DIM)
        x_at = rows_at(rows.source, tokens, head, K.ALIGN, C) + feature
        read += ((head, (feature, inside, tl.load(x_at, mask=inside, other=0)), factor),)
    slot = slots_of(slots, tokens, block.seq_len) if K.CACHED else 0
    for i in tl.static_range(K.PASSES):
        head, piece, factor = read[i]
        _write_piece(rows, piece, factor, slot, blocks, tokens, head, K, C)


@triton.jit
def move_heads(rows, slots, blocks, block, K: tl.constexpr, C: tl.constexpr):
    """As `move_rows`, with scales that the kernel makes: a row has all pieces of its head."""
    read = ()
    for i in tl.static_range(K.PASSES):
        tokens, head, exists = rows_of_program(block, K.HEADS, i, K, C)
        pieces, size = _read_pieces(rows, tokens, head, exists, K, C)
        read += ((head, exists[:, None, None], pieces, size),)
    slot = slots_of(slots, tokens, block.seq_len) if K.CACHED else 0
    for i in tl.static_range(K.PASSES):
        head, exists, pieces, size = read[i]
        scale = scale_of_row(size, K.LARGEST, K.CONVERSION)
        _write_scale(rows, scale, slot, blocks, tokens, head, exists, K, C)
        _write_pieces(rows, pieces, scale, slot, blocks, tokens, head, K, C)


@triton.jit
def _read_pieces(rows, tokens, head, exists, K: tl.constexpr, C: tl.constexpr):
    """All pieces of heads, as triples of the features, whether they exist, and their values; and their largest
    magnitude, ``[rows, 1, 1]``.
    """
    within = _features_of_piece(rows.source[0].dtype.element_ty, C)
    pieces = ()
    for i in tl.static_range(K.PIECES):
        feature = 2 * i * C.BLOCK_PAIRS + within
        inside = exists[:, None, None] & (feature < K.DIM)
        y = tl.load(rows_at(rows.source, tokens, head, K.ALIGN, C) + feature, mask=inside, other=0)
        pieces += ((feature, inside, y),)
    size = magnitude(pieces[0][2], K.CONVERSION)
    for i in tl.static_range(1, K.PIECES):
        size = tl.maximum(size, magnitude(pieces[i][2], K.CONVERSION))
    return pieces, largest(size)


@triton.jit
def _write_pieces(rows, pieces, factor, slot, blocks, tokens, head, K: tl.constexpr, C: tl.constexpr):
    for i in tl.static_range(K.PIECES):
        _write_piece(rows, pieces[i], factor, slot, blocks, tokens, head, K, C)


@triton.jit
def _write_piece(rows, piece, factor, slot, blocks, tokens, head, K: tl.constexpr, C: tl.constexpr):
    SOURCE: tl.constexpr = rows.source[0].dtype.element_ty
    DTYPE: tl.constexpr = rows.target[0].dtype.element_ty
    feature, inside, y = piece
    if K.COPIED:
        tl.store(rows_at(rows.copy, tokens, head, K.ALIGN, C) + feature, y, mask=inside)
    at, inside = _destination(rows.target, slot, blocks, tokens, head, inside, K.ALIGN, K, C)
    tl.store(at + feature, convert(y, factor, SOURCE, DTYPE, K), mask=inside)
