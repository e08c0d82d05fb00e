"""The stages of a rotation between `place` and the end of a program: `read`, `norm`, `turn` and `write`.

Every kernel reads both members of its pairs, may normalize heads, turns the pairs by the cosines and sines of their
tokens, and writes the members. Where the members lie is a matter of `Members`; all other code is the same for both
layouts, for tables and for heads.

Loads first: the compiler may not move a load across a store, so all loads of a kernel come before its first store.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ropelab.kernels.head_sums_triton import sum_of_neighbours, sum_of_products
from ropelab.kernels.place_triton import rows_of_pairs


class Members(NamedTuple):
    """The addresses of the members of pairs, and whether they exist.

    A thread holds both members of its pairs, so a turn needs no exchange. For example, of a head of 16 features, with
    four pairs for each thread::

        adjacent pairs    feature    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
                          pair       0  0  1  1  2  2  3  3  4  4  5  5  6  6  7  7
                          thread     0  0  0  0  0  0  0  0  1  1  1  1  1  1  1  1
                                     first ---------------------------------------

        halves            feature    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
                          pair       0  1  2  3  4  5  6  7  0  1  2  3  4  5  6  7
                          thread     0  0  0  0  1  1  1  1  0  0  0  0  1  1  1  1
                                     first ---------------  second ---------------

    Adjacent pairs have one address for each feature in ``first``, ``[tokens, heads, 2 * pairs]``: one wide access moves
    both members, and the threads separate them in registers. ``second`` then stands for nothing. Otherwise ``first``
    and ``second`` are ``[tokens, heads, pairs]``.
    """

    first: tl.tensor
    first_exists: tl.tensor
    second: tl.tensor
    second_exists: tl.tensor


class Columns(NamedTuple):
    """The cosines and sines of both members of pairs, each ``[tokens, heads, pairs]``."""

    cos0: tl.tensor
    cos1: tl.tensor
    sin0: tl.tensor
    sin1: tl.tensor


@triton.jit
def lane_feature(MEMBER: tl.constexpr, INTERLEAVED: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr = 0):
    """The feature that each pair of a piece has as member 0 or 1, and whether the pair has it, each ``[pairs]``.

    Lanes number the features of a head: the features that rotate come first. The features that do not rotate form pairs
    in the same way as the features that rotate; the last of these pairs may lack its member 1.
    """
    pair = PIECE * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS)
    PAIRS: tl.constexpr = C.ROTARY_DIM // 2
    if INTERLEAVED:
        lane = 2 * pair + MEMBER
        exists = lane < C.LANE_DIM
    elif C.LANE_DIM == C.ROTARY_DIM:
        lane, exists = pair + MEMBER * PAIRS, pair < PAIRS
    else:
        REST: tl.constexpr = (C.LANE_DIM - C.ROTARY_DIM + 1) // 2
        lane = pair + tl.where(pair < PAIRS, MEMBER * PAIRS, PAIRS + MEMBER * REST)
        exists = pair < PAIRS + REST
        if (C.LANE_DIM - C.ROTARY_DIM) % 2:
            exists &= lane < C.LANE_DIM
    return _feature_in(lane, C), exists


@triton.jit
def _feature_in(lane, C: tl.constexpr):
    """The feature in a lane. The first lanes hold ``[FIRST, FIRST + ROTARY_DIM)``, the others all other features."""
    if C.FIRST == 0:
        return lane
    else:
        before = lane < C.ROTARY_DIM + C.FIRST
        return tl.where(lane < C.ROTARY_DIM, C.FIRST + lane, tl.where(before, lane - C.ROTARY_DIM, lane))


@triton.jit
def _addresses(row, feature, exists, GROUP: tl.constexpr):
    """The addresses of features ``[n]`` of every head, ``[tokens, heads, n]``.

    GROUP successive lanes hold adjacent features, and the first of them is a multiple of GROUP. The compiler may not
    find this itself, so it gets a hint. After a wrong hint a GPU reads other features, or faults.
    """
    if GROUP:
        feature = tl.multiple_of(tl.max_contiguous(feature, GROUP), GROUP)[None, None, :]
        feature = tl.multiple_of(tl.max_contiguous(feature, [1, 1, GROUP]), [1, 1, GROUP])
    else:
        feature = feature[None, None, :]
    return tl.broadcast_to(row + feature, [exists.shape[0], exists.shape[1], feature.shape[2]])


@triton.jit
def members_of(row, exists, INTERLEAVED: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr = 0):
    """The `Members` of the pairs of a piece of the heads that begin at ``row``, none for heads that do not exist."""
    if INTERLEAVED:
        lane = 2 * PIECE * C.BLOCK_PAIRS + tl.arange(0, 2 * C.BLOCK_PAIRS)
        GROUP: tl.constexpr = 2 * C.GROUP if C.FIRST % (2 * C.GROUP if C.GROUP else 1) == 0 else C.GROUP
        at = _addresses(row, _feature_in(lane, C), exists, GROUP)
        inside = exists & (lane < C.LANE_DIM)[None, None, :]
        return Members(at, inside, at, inside)
    else:
        feature0, inside0 = lane_feature(0, INTERLEAVED, C, PIECE)
        feature1, inside1 = lane_feature(1, INTERLEAVED, C, PIECE)
        at0, at1 = _addresses(row, feature0, exists, C.GROUP), _addresses(row, feature1, exists, C.GROUP)
        return Members(at0, exists & inside0[None, None, :], at1, exists & inside1[None, None, :])


@triton.jit
def read_pairs(members, OTHER: tl.constexpr, EVICTION: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both members of every pair, in the dtype of the tensor, and OTHER for members that do not exist."""
    x0 = tl.load(members.first, mask=members.first_exists, other=OTHER, eviction_policy=EVICTION)
    if INTERLEAVED:
        return tl.split(tl.reshape(x0, [x0.shape[0], x0.shape[1], x0.shape[2] // 2, 2]))
    else:
        return x0, tl.load(members.second, mask=members.second_exists, other=OTHER, eviction_policy=EVICTION)


@triton.jit
def read_heads(row, exists, EVICTION: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr = 0):
    """Both members of every pair of a piece of heads, in COMPUTE_DTYPE, and zeros for members that do not exist."""
    x0, x1 = read_pairs(members_of(row, exists, C.INTERLEAVED, C, PIECE), 0, EVICTION, C.INTERLEAVED)
    return x0.to(C.COMPUTE_DTYPE), x1.to(C.COMPUTE_DTYPE)


@triton.jit
def _read_table(row, first_pair, exists, C: tl.constexpr, OTHER: tl.constexpr, PIECE: tl.constexpr):
    """The columns of both members of the pairs from ``first_pair`` on, or of a piece."""
    PAIRS: tl.constexpr = C.ROTARY_DIM // 2
    shape: tl.constexpr = [exists.shape[0], exists.shape[1], C.BLOCK_PAIRS]
    if C.FULL_WIDTH and C.INTERLEAVED:
        feature = 2 * (first_pair + PIECE * C.BLOCK_PAIRS) + tl.arange(0, 2 * C.BLOCK_PAIRS)[None, None, :]
        if (PIECE + 1) * C.BLOCK_PAIRS > PAIRS:
            exists = exists & (feature < 2 * PAIRS)
        at = tl.broadcast_to(row + feature, [exists.shape[0], exists.shape[1], 2 * C.BLOCK_PAIRS])
        exists = tl.broadcast_to(exists, at.shape)
        t0, t1 = read_pairs(Members(at, exists, at, exists), OTHER, "evict_last", True)
    else:
        pair = first_pair + PIECE * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS)[None, None, :]
        if (PIECE + 1) * C.BLOCK_PAIRS > PAIRS:
            exists = exists & (pair < PAIRS)
        at = tl.broadcast_to(row + pair, shape)
        exists = tl.broadcast_to(exists, shape)
        t0 = tl.load(at, mask=exists, other=OTHER, eviction_policy="evict_last")
        t1 = t0
        if C.FULL_WIDTH:
            t1 = tl.load(at + PAIRS, mask=exists, other=OTHER, eviction_policy="evict_last")
    return t0.to(C.COMPUTE_DTYPE), t1.to(C.COMPUTE_DTYPE)


@triton.jit
def _read_axis(along, pair, exists, IN_UNIT: tl.constexpr, C: tl.constexpr):
    """Cosines and sines of adjacent pairs at the row of one pair of each unit, see `place_triton.rows_of_pairs`."""
    rows = rows_of_pairs(along, pair, IN_UNIT, C)
    inside = exists & rows.exists
    if C.ROTARY_DIM // 2 % C.BLOCK_PAIRS:
        inside = inside & (pair < C.ROTARY_DIM // 2)
    cos_at, sin_at = tl.broadcast_to(rows.cos, inside.shape), tl.broadcast_to(rows.sin, inside.shape)
    no_row = tl.where(rows.has_position, float("nan"), 0.0)
    cos = tl.load(cos_at, mask=inside, other=0.0, eviction_policy="evict_last").to(C.COMPUTE_DTYPE)
    sin = tl.load(sin_at, mask=inside, other=no_row, eviction_policy="evict_last").to(C.COMPUTE_DTYPE)
    return cos, tl.where(rows.is_negative, -sin, sin)


@triton.jit
def _read_axes(along, first_pair, exists, C: tl.constexpr, PIECE: tl.constexpr):
    """Cosines and sines for `AxialPositions`, with the sign of the position; see `read_columns`.

    Where four adjacent pairs read several axes, a thread reads the four at the row of each of these axes, and keeps of
    each row what it needs. The compiler drops the other reads. If it saw reads of single values, it would give the
    values to other threads than the pairs.
    """
    pair = first_pair + PIECE * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS)[None, None, :]
    cos, sin = _read_axis(along, pair, exists, 0, C)
    for i in tl.static_range(1, 4):
        if (C.SAME_AXIS >> (2 * i)) % 4 == i:
            other_cos, other_sin = _read_axis(along, pair, exists, i, C)
            reads = (C.SAME_AXIS >> (pair % 4 * 2)) % 4 == i
            cos, sin = tl.where(reads, other_cos, cos), tl.where(reads, other_sin, sin)
    return cos, cos, sin, sin


@triton.jit
def _read_rows(rows, first_pair, exists, C: tl.constexpr, FILL: tl.constexpr, PIECE: tl.constexpr):
    """Cosines and sines for `TableRows`, with the sign of the position; see `read_columns`."""
    SIGNED: tl.constexpr = C.POSITIONS != "none"
    inside = exists & rows.exists if SIGNED else exists
    OTHER: tl.constexpr = 0.0 if FILL and not SIGNED else None
    cos0, cos1 = _read_table(rows.cos, first_pair, inside, C, OTHER, PIECE)
    sin0, sin1 = _read_table(rows.sin, first_pair, inside, C, OTHER, PIECE)
    if SIGNED:
        factor = tl.where(rows.exists, tl.where(rows.is_negative, -1.0, 1.0), float("nan")).to(C.COMPUTE_DTYPE)
        sin0, sin1 = sin0 * factor, sin1 * factor
    return cos0, cos1, sin0, sin1


@triton.jit
def read_columns(rows, first_pair, exists, C: tl.constexpr, FILL: tl.constexpr, PIECE: tl.constexpr = 0):
    """The `Columns` of the pairs from ``first_pair`` on, or of a piece of heads, read from tables again for every head.

    Each thread reads the columns of the pairs that it holds, so threads exchange nothing. The L1 cache serves the
    repeated reads. Layers, heads and batches share a table, whereas q and k are read once, so evict_last keeps the
    table in the cache.

    The factor of the sines is -1 at a negative position, and NaN without a row. Both results of a pair contain a
    product with a sine, so the factor NaN makes both of them NaN. Positions that count up from a checked start have
    rows and no sign, so these steps are left out for them. The sines are widened before they are negated, because the
    interpreter has no arithmetic for bfloat16. With several axes, each pair has the sign of its axis. The cosine and
    the sine of a pair whose axis lacks a position are zero.

    Args:
        FILL: pairs that do not exist and pairs that do not rotate get an angle of zero, since a sum over the head
            includes them.
    """
    if C.AXES > 1:
        cos0, cos1, sin0, sin1 = _read_axes(rows, first_pair, exists, C, PIECE)
    else:
        cos0, cos1, sin0, sin1 = _read_rows(rows, first_pair, exists, C, FILL, PIECE)
    if FILL and (PIECE + 1) * C.BLOCK_PAIRS > C.ROTARY_DIM // 2:
        rotates = (PIECE * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS) < C.ROTARY_DIM // 2)[None, None, :]
        cos0, cos1 = tl.where(rotates, cos0, 1.0), tl.where(rotates, cos1, 1.0)
        sin0, sin1 = tl.where(rotates, sin0, 0.0), tl.where(rotates, sin1, 0.0)
    return Columns(cos0, cos1, sin0, sin1)


@triton.jit
def normalize(
    x0, x1, w0, w1, DIM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr, ZEROS: tl.constexpr, squares=None
):
    """The pairs times weights and ``1 / sqrt(mean + EPS)``, with the mean of DIM squares of a head.

    If ACROSS, the mean is over all rows of the tile, which are the heads of one token and rows of zeros. If ZEROS, a
    head of zeros stays zeros where EPS is 0.

    Args:
        squares: the sum of the squares of each head, if the pairs are a piece of the head.
    """
    if squares is None:
        squares = sum_of_products(x0, x0, x1, x1)
    if ACROSS:
        squares = sum_of_neighbours(tl.reshape(squares, [1, 1, squares.shape[0]]))
    mean = squares / DIM
    rstd = tl.rsqrt(mean + EPS)
    if ZEROS and EPS == 0.0:
        rstd = tl.where(mean == 0.0, 0.0, rstd)
    return w0 * (x0 * rstd), w1 * (x1 * rstd)


@triton.jit
def turn(x0, x1, columns, TRANSPOSE: tl.constexpr):
    """The product of the matrix ``[[cos0, -sin0], [sin1, cos1]]``, or of its transpose, and the pair ``(x0, x1)``."""
    cos0, cos1, sin0, sin1 = columns
    if TRANSPOSE:
        return x0 * cos0 + x1 * sin1, x1 * cos1 - x0 * sin0
    else:
        return x0 * cos0 - x1 * sin0, x1 * cos1 + x0 * sin1


@triton.jit
def narrow(y, DTYPE: tl.constexpr):
    """``y`` rounded to DTYPE as torch rounds it: float64 becomes float32 first and then 16 bits."""
    if y.dtype == DTYPE:
        return y
    elif DTYPE.primitive_bitwidth == 16:
        return y.to(tl.float32).to(DTYPE)
    else:
        return y.to(DTYPE)


@triton.jit
def write_pairs(members, y0, y1, INTERLEAVED: tl.constexpr):
    """Write both members of every pair, rounded to the dtype of the tensor.

    One instruction converts two adjacent features, so the conversion of adjacent pairs follows the join.
    """
    dtype = members.first.dtype.element_ty
    if INTERLEAVED:
        y = tl.reshape(tl.join(y0, y1), [y0.shape[0], y0.shape[1], 2 * y0.shape[2]])
        tl.store(members.first, narrow(y, dtype), mask=members.first_exists)
    else:
        tl.store(members.first, narrow(y0, dtype), mask=members.first_exists)
        tl.store(members.second, narrow(y1, dtype), mask=members.second_exists)


@triton.jit
def write_heads(row, exists, has_position, y0, y1, INTERLEAVED: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr = 0):
    """Write a piece of heads, and zeros for the heads of tokens without a position.

    A second store costs less than a selection for every element, because a token hardly ever lacks a position.
    The zeros have the dtype of the destination: ptxas 12.8 converts four constants to 8-bit floats with an instruction
    that leaves bits of another register in two of them.
    """
    if C.POSITIONS != "none":
        nowhere = members_of(row, exists & (has_position == 0), INTERLEAVED, C, PIECE)
        zeros = tl.zeros(y0.shape, nowhere.first.dtype.element_ty)
        write_pairs(nowhere, zeros, zeros, INTERLEAVED)
        exists = exists & has_position
    write_pairs(members_of(row, exists, INTERLEAVED, C, PIECE), y0, y1, INTERLEAVED)


@triton.jit
def read_features(row, exists, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH adjacent features of every head, ``[tokens, heads, BLOCK]``, and zeros after them."""
    feature = tl.arange(0, BLOCK)[None, None, :]
    at = tl.broadcast_to(row + feature, [exists.shape[0], exists.shape[1], BLOCK])
    return tl.load(at, mask=exists & (feature < WIDTH), other=0)


@triton.jit
def write_features(row, exists, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write WIDTH adjacent features of every head."""
    feature = tl.arange(0, BLOCK)[None, None, :]
    tl.store(row + feature, x, mask=exists & (feature < WIDTH))
