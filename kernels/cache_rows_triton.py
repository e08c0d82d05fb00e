"""The stages of the kernels that write rows into a paged cache, where a row is a head of a token.

A program takes the same heads of a few neighbouring tokens. In further passes it takes further heads of these tokens,
which rotate by the same cosines and sines. Slot ``s`` is row ``s % PAGE`` of page ``s // PAGE`` of a cache.

Loads come first (`stages_triton`): a program reads the rows of all passes, computes all results, and then writes them.
The tuples of all passes hold named tuples whose names Triton 3.6 forgets, so a pass names them anew.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ropelab.kernels.angles_triton import read_angles
from ropelab.kernels.choices import Choices, Turning
from ropelab.kernels.float8_triton import divide, magnitude, round_to, scale_of_row, to_float8
from ropelab.kernels.head_sums_triton import sum_of_pieces, sum_of_products
from ropelab.kernels.place_triton import InCache, Tokens, cached_at, rows_at, slots_of
from ropelab.kernels.stages_triton import narrow, normalize, read_heads, turn, write_heads


@dataclass(frozen=True)
class Kind(Choices):
    """The choices for rows of one kind: heads of q, heads of k, heads of v, or features of q that lie apart.

    Attributes:
        HEADS: the heads of a token.
        DIM: the features of a head that is only moved.
        PARTS, PIECES: the rows that a wide head of DIM features makes, and the pieces of a row; one of them is 1.
        PROGRAMS: the programs of a block of tokens; 0 leaves the kind out.
        TOKENS, PASSES: the tokens of a program, and its passes.
        CACHED: the destination is a cache.
        COPIED: the rows are also written to a tensor of their own dtype.
        SCALES: "head" or "tensor" for one scale a head or for all heads; "row" for scales that the kernel makes and
            writes; else "none".
        APART: the kind of features that lie apart and share the scale of a row, or None. The program of the row, of one
            pass, moves them too.
        CONVERSION: the way to 8-bit floats, see `float8_triton.conversion`.
        LARGEST: the largest 8-bit float of the destination.
        ALIGN: a power of two that divides all strides of the kind.
    """

    HEADS: int
    DIM: int
    PARTS: int
    PIECES: int
    PROGRAMS: int
    TOKENS: int
    PASSES: int
    CACHED: bool
    COPIED: bool
    SCALES: str
    APART: Any
    CONVERSION: str
    LARGEST: float
    ALIGN: int


@dataclass(frozen=True)
class Caching(Turning):
    """The choices of a kernel that writes rows into a paged cache.

    Attributes:
        PAGE: the slots of a page of the cache.
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


class KindTensors(NamedTuple):
    """The tensors of a kind, most of them as pairs of an address and strides.

    Attributes:
        source, copy: the rows, and the tensor of their dtype that gets a copy.
        target: the tensor or the cache that gets the converted rows.
        weight, scale: the addresses of the weights of the norm, and of given scales.
        made_scales: the scales that the kernel makes.
    """

    source: tuple
    copy: tuple
    target: tuple
    weight: tl.tensor
    scale: tl.tensor
    made_scales: tuple


class Rows(NamedTuple):
    """The rows of a pass: their `Tokens`, ``[1]`` if all rows belong to one token; and for each row its head and
    whether it exists, ``[rows]``.
    """

    tokens: Tokens
    head: tl.tensor
    exists: tl.tensor


class Heads(NamedTuple):
    """The rows of a pass with both members of the pairs of each piece: the head of each row, ``[rows]``, whether it
    exists, ``[rows, 1, 1]``, and its scale.
    """

    head: tl.tensor
    exists: tl.tensor
    pieces: tuple
    scale: tl.tensor


class Shared(NamedTuple):
    """What the passes share: `Columns` and weights of a norm for each piece, and whether tokens have a position.

    A pass has as many heads of each token as any other pass, except that the last pass may lack some.
    """

    columns: tuple
    weights: tuple
    has_position: tl.tensor


class Piece(NamedTuple):
    """A piece of rows that are only moved: the features, whether they exist, and their values, ``[rows, 1, n]``."""

    feature: tl.tensor
    exists: tl.tensor
    x: tl.tensor


class Features(NamedTuple):
    """The rows of a pass that are only moved, as `Heads` with each `Piece`. Where the kernel makes scales, ``size`` is
    the largest magnitude of each row.
    """

    head: tl.tensor
    exists: tl.tensor
    pieces: tuple
    scale: tl.tensor
    size: tl.tensor


class Destinations(NamedTuple):
    """The tokens of all passes, and their slots if the rows go to a cache."""

    tokens: Tokens
    slots: InCache | None


@triton.jit
def rows_of_program(block, HEADS: tl.constexpr, PASS: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """The `Rows` of a pass: as many heads of each of ``K.TOKENS`` tokens.

    All passes take the same tokens, so they share the rotations. The rows of one token share the arithmetic that finds
    the token's position, slot and row of the tables.
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
    return Rows(Tokens(block.batch, block.first, distance, is_token), head, exists)


@triton.jit
def turn_rows(t, apart, slots, angles, block, K: tl.constexpr, C: tl.constexpr):
    """Read the heads of all passes out of the `KindTensors`, normalize and turn them, and write them.

    Args:
        apart: the tensors of the features that lie apart, for a kind that has ``K.APART``.
    """
    if K.APART is not None:
        rows = rows_of_program(block, K.HEADS, 0, K, C)
        features = _read_features(apart, rows, None, K.APART, C)
    read = ()
    for i in tl.static_range(K.PASSES):
        rows = rows_of_program(block, K.HEADS, i, K, C)
        read += (_read_heads(t, rows, K, C),)
    tokens = rows.tokens
    shared = _read_shared(t, Heads(*read[0]), tokens, angles, block, C)
    turned = ()
    for i in tl.static_range(K.PASSES):
        turned += (_turned(Heads(*read[i]), shared, K, C),)
    to = Destinations(tokens, slots_of(slots, tokens, block.seq_len) if K.CACHED else None)
    for i in tl.static_range(K.PASSES):
        heads = Heads(*turned[i])
        if K.COPIED:
            _write_copy(t, heads, tokens, shared.has_position, C)
        if K.SCALES == "row":
            heads, size = _rounded(t, heads, shared.has_position, K)
            size = size if K.APART is None else tl.maximum(size, features.size)
            scale = _make_scale(t, heads, to, size, K, C)
            heads = Heads(heads.head, heads.exists, heads.pieces, scale)
        _write_heads(t, heads, to, shared.has_position, K, C)
        if K.APART is not None:
            _write_features(apart, features, heads.scale, to, K.APART, C)


@triton.jit
def move_rows(t, slots, block, K: tl.constexpr, C: tl.constexpr):
    """Read the features of all passes out of the `KindTensors`, and write them as they are."""
    # The order of these instructions decides the order in which the assembler puts the loads.
    within, read = None if K.SCALES == "row" else _features_of_piece(t, C), ()
    for i in tl.static_range(K.PASSES):
        rows = rows_of_program(block, K.HEADS * K.PARTS, i, K, C)
        read += (_read_features(t, rows, within, K, C),)
    to = Destinations(rows.tokens, slots_of(slots, rows.tokens, block.seq_len) if K.CACHED else None)
    for i in tl.static_range(K.PASSES):
        features = Features(*read[i])
        scale = features.scale
        if K.SCALES == "row":
            scale = _make_scale(t, features, to, features.size, K, C)
        _write_features(t, features, scale, to, K, C)


@triton.jit
def _read_heads(t, rows, K: tl.constexpr, C: tl.constexpr):
    """The `Heads` of a pass."""
    scale, exists = read_scale(t.scale, rows, K.SCALES), rows.exists[:, None, None]
    row = rows_at(t.source, rows.tokens, rows.head, C.ALIGN, C)
    return Heads(rows.head, exists, _read_pieces(row, exists, "", C), scale)


@triton.jit
def _read_shared(t, first, tokens, angles, block, C: tl.constexpr):
    """What all passes have in common with the heads of the first pass, which is never the one that lacks some."""
    columns = ()
    for i in tl.static_range(C.HEAD_PIECES):
        of_piece, has_position = read_angles(angles, tokens, first.exists, block.seq_len, C, i)
        columns += (of_piece,)
    weights = ()
    if C.NORM != "none":
        row = t.weight + first.head[:, None, None] * C.LANE_DIM if C.NORM == "token" else t.weight
        weights = _read_pieces(row, first.exists, "evict_last", C)
    return Shared(columns, weights, has_position)


@triton.jit
def _features_of_piece(t, C: tl.constexpr):
    """The features of the first piece of a head that is only moved, ``[1, 1, features]``.

    A thread reads 16 bytes at once. Without the hint the compiler would give the threads that store 8-bit floats twice
    as many features, and exchange all features through shared memory.
    """
    ACCESS: tl.constexpr = 128 // t.source[0].dtype.element_ty.primitive_bitwidth
    within = tl.multiple_of(tl.max_contiguous(tl.arange(0, 2 * C.BLOCK_PAIRS), ACCESS), ACCESS)[None, None, :]
    return tl.multiple_of(tl.max_contiguous(within, [1, 1, ACCESS]), [1, 1, ACCESS])


@triton.jit
def _read_features(t, rows, within, K: tl.constexpr, C: tl.constexpr):
    """The `Features` of rows, each of which is a part of a head, or a head whose scale the kernel makes.

    Args:
        within: the features of the first piece, or None.
    """
    if within is None:
        within = _features_of_piece(t, C)
    if K.SCALES != "row":
        head, part = rows.head // K.PARTS, (rows.head % K.PARTS)[:, None, None]
        rows, within = Rows(rows.tokens, head, rows.exists), part * (2 * C.BLOCK_PAIRS) + within
    scale = read_scale(t.scale, rows, K.SCALES)
    pieces, size = (), 0.0
    for i in tl.static_range(K.PIECES):
        feature = 2 * i * C.BLOCK_PAIRS + within
        exists = rows.exists[:, None, None] & (feature < K.DIM)
        x = tl.load(rows_at(t.source, rows.tokens, rows.head, K.ALIGN, C) + feature, mask=exists, other=0)
        pieces += (Piece(feature, exists, x),)
    if K.SCALES == "row":
        size = _largest_of_pieces(pieces, K)
    return Features(rows.head, rows.exists[:, None, None], pieces, scale, size)


@triton.jit
def read_scale(scale, rows, SCALES: tl.constexpr):
    """The scale of each row, ``[rows, 1, 1]``; without given scales, a number that the kernel does not use."""
    if SCALES == "head":
        return tl.load(scale + rows.head, mask=rows.exists, other=1.0)[:, None, None]
    elif SCALES == "tensor":
        return tl.load(scale)
    else:
        return 1.0


@triton.jit
def _read_pieces(row, exists, EVICTION: tl.constexpr, C: tl.constexpr):
    """Both members of every pair of heads, for each piece."""
    pieces = ()
    for i in tl.static_range(C.HEAD_PIECES):
        pieces += (read_heads(row, exists, EVICTION, C, i),)
    return pieces


@triton.jit
def _turned(heads, shared, K: tl.constexpr, C: tl.constexpr):
    """The heads, turned, and normalized before or after."""
    pieces = heads.pieces
    if C.NORM != "none" and C.NORM_FIRST:
        pieces = _normalized(pieces, shared.weights, K, C)
    turned = ()
    for i in tl.static_range(C.HEAD_PIECES):
        x0, x1 = pieces[i]
        y0, y1 = turn_some(x0, x1, shared.columns[i], C, i)
        if C.NORM != "none" and not C.NORM_FIRST:
            pair = i * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS)
            inside = heads.exists & (pair < (C.LANE_DIM + 1) // 2)[None, None, :]
            y0, y1 = tl.where(inside, y0, 0.0), tl.where(inside, y1, 0.0)
        turned += ((y0, y1),)
    if C.NORM != "none" and not C.NORM_FIRST:
        turned = _normalized(turned, shared.weights, K, C)
    return Heads(heads.head, heads.exists, turned, heads.scale)


@triton.jit
def turn_some(x0, x1, columns, C: tl.constexpr, PIECE: tl.constexpr = 0):
    """The pairs, turned where they rotate. A pair that does not rotate keeps its bits."""
    y0, y1 = turn(x0, x1, columns, False)
    if C.LANE_DIM > C.ROTARY_DIM:  # the sum of a product and a zero may change the sign of a zero
        rotates = (PIECE * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS) < C.ROTARY_DIM // 2)[None, None, :]
        y0, y1 = tl.where(rotates, y0, x0), tl.where(rotates, y1, x1)
    return y0, y1


@triton.jit
def _normalized(heads, weights, K: tl.constexpr, C: tl.constexpr):
    """The pieces of heads times weights and ``1 / sqrt(mean + EPS)``, with the mean over a head or over a token."""
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
def _rounded(t, heads, has_position, K: tl.constexpr):
    """The heads rounded to the dtype of their source, and the largest magnitude of each row."""
    SOURCE: tl.constexpr = t.source[0].dtype.element_ty
    rounded, size = (), 0.0
    for i in tl.static_range(len(heads.pieces)):
        y0, y1 = heads.pieces[i]
        y0, y1 = round_to(y0, SOURCE, K.CONVERSION), round_to(y1, SOURCE, K.CONVERSION)
        rounded += ((y0, y1),)
        of_piece = largest_of_pairs(y0, y1, has_position, K)
        size = of_piece if i == 0 else tl.maximum(size, of_piece)
    return Heads(heads.head, heads.exists, rounded, heads.scale), size


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
def _largest_of_pieces(pieces, K: tl.constexpr):
    """The largest magnitude of each row of features."""
    size = magnitude(Piece(*pieces[0]).x, K.CONVERSION)
    for i in tl.static_range(1, len(pieces)):
        size = tl.maximum(size, magnitude(Piece(*pieces[i]).x, K.CONVERSION))
    return largest(size)


@triton.jit
def _make_scale(t, x, to, size, K: tl.constexpr, C: tl.constexpr):
    """Write the scale of rows of these largest magnitudes, and return it; ``x`` are their `Heads` or `Features`."""
    scale = scale_of_row(size, K.LARGEST, K.CONVERSION)
    row, goes = _target(t.made_scales, x.head, to, x.exists, 1, K, C)
    tl.store(row, scale, mask=goes)
    return scale


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
def _target(target, head, to, exists, ALIGN: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """The address of each row in its target, ``[rows, 1, 1]``, and which of the elements ``exists`` go there."""
    if K.CACHED:
        row, in_cache = cached_at(target, to.slots, head, ALIGN, C)
        return row, exists & in_cache
    else:
        return rows_at(target, to.tokens, head, ALIGN, C), exists


@triton.jit
def _write_copy(t, heads, tokens, has_position, C: tl.constexpr):
    row = rows_at(t.copy, tokens, heads.head, C.ALIGN, C)
    _write_pieces(row, heads.exists, has_position, heads.pieces, C)


@triton.jit
def _write_heads(t, heads, to, has_position, K: tl.constexpr, C: tl.constexpr):
    """Write heads in the dtype of their target."""
    converted = ()
    for i in tl.static_range(C.HEAD_PIECES):
        y0, y1 = heads.pieces[i]
        converted += ((_stored(y0, heads.scale, t, K), _stored(y1, heads.scale, t, K)),)
    row, goes = _target(t.target, heads.head, to, heads.exists, C.ALIGN, K, C)
    _write_pieces(row, goes, has_position, converted, C)


@triton.jit
def _write_pieces(row, exists, has_position, pieces, C: tl.constexpr):
    for i in tl.static_range(C.HEAD_PIECES):
        y0, y1 = pieces[i]
        write_heads(row, exists, has_position, y0, y1, C.INTERLEAVED, C, i)


@triton.jit
def _write_features(t, features, scale, to, K: tl.constexpr, C: tl.constexpr):
    """Write features, and copies of them, with this scale of each row."""
    for i in tl.static_range(K.PIECES):
        piece = Piece(*features.pieces[i])
        if K.COPIED:
            copy = rows_at(t.copy, to.tokens, features.head, K.ALIGN, C)
            tl.store(copy + piece.feature, piece.x, mask=piece.exists)
        row, goes = _target(t.target, features.head, to, piece.exists, K.ALIGN, K, C)
        tl.store(row + piece.feature, _stored(piece.x, scale, t, K), mask=goes)


@triton.jit
def _stored(y, scale, t, K: tl.constexpr):
    return convert(y, scale, t.source[0].dtype.element_ty, t.target[0].dtype.element_ty, K)
