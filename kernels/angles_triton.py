"""The stage `read` for cosines and sines: read by each thread, or read or computed by a program for its threads.

The method to compute them is as in `angles_torch`, and the results have the same bits.
"""

import triton
import triton.language as tl

from ropelab.kernels import angles_torch
from ropelab.kernels.place_triton import Tokens, has_bit, position_of, row_of, table_rows_of
from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION
from ropelab.kernels.stages_triton import Columns, read_columns

_INVALID_POSITION, _NO_POSITION = tl.constexpr(INVALID_POSITION), tl.constexpr(NO_POSITION)
_HIGH, _LOW, _FACTOR = (tl.constexpr(row) for row in (angles_torch.HIGH, angles_torch.LOW, angles_torch.FACTOR))
_TWO_PI_HEAD, _TWO_PI_TAIL = tl.constexpr(angles_torch.TWO_PI_HEAD), tl.constexpr(angles_torch.TWO_PI_TAIL)
_S0, _S1, _S2, _S3 = (tl.constexpr(c) for c in angles_torch.SINE)
_C0, _C1, _C2, _C3 = (tl.constexpr(c) for c in angles_torch.COSINE)


@triton.jit
def cos_sin(position, frequencies_ptr, stride, pair, mask):
    """Cosine and sine, float32, in the shape of ``position`` and ``pair``.

    ``stride`` is the stride of the rows of the frequencies. Each factor of a product is extended from 32 bits, so that
    the compiler makes one instruction of the product instead of four.
    """
    at = frequencies_ptr + pair * stride
    high = tl.load(at + _HIGH, mask=mask, other=0, eviction_policy="evict_last")
    low = tl.load(at + _LOW, mask=mask, other=0, eviction_policy="evict_last")
    factor = tl.load(at + _FACTOR, mask=mask, other=0, eviction_policy="evict_last")
    count = tl.abs(position).to(tl.uint32)
    whole = (count * (high >> 32).to(tl.uint32)).to(tl.int64) << 32
    turns = whole + count.to(tl.int64) * high.to(tl.uint32).to(tl.int64)
    turns += (count.to(tl.int64) * low.to(tl.uint32).to(tl.int64)) >> 32
    quarter = (turns + 2**61) >> 62
    rest = turns - (quarter << 62)  # in turns, 64 bits behind the binary point, at most an eighth
    rest_head, rest_tail = (rest >> 31).to(tl.int32).to(tl.int64), (rest & (2**31 - 1)).to(tl.int32).to(tl.int64)
    x = rest_head * _TWO_PI_HEAD + ((rest_head * _TWO_PI_TAIL) >> 31) + ((rest_tail * _TWO_PI_HEAD) >> 31)
    head = (x + 2**48) >> 49
    tail = x - (head << 49)
    sin, cos = _sine_and_cosine(head.to(tl.int32).to(tl.float32) * 2.0**-12, tail.to(tl.float32) * 2.0**-61)
    # A quarter turn replaces sin by cos and cos by -sin.
    odd, back = (quarter & 1) != 0, (quarter & 2) != 0
    sin, cos = tl.where(odd, cos, sin), tl.where(odd, -sin, cos)
    sin = tl.where(back != (position < 0), -sin, sin)
    scale = factor.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(back, -cos, cos) * scale, sin * scale


@triton.jit
def shared_columns(angles, tokens, seq_len, PAIRS: tl.constexpr, C: tl.constexpr):
    """The `Columns` of every token, ``[tokens, 1, PAIRS]``; PAIRS is a power of two.

    The program computes or reads the values once for all heads, along one axis over which the compiler spreads all
    threads. The threads then exchange the values through shared memory. Without tables, a thread that computed the
    values for its own pairs would execute a hundred times as many operations. Where adjacent pairs read several axes, a
    thread would read its values one by one.
    """
    if C.TABLE_FREE:
        cos, sin = _computed(angles, tokens, seq_len, PAIRS, C)
    else:
        cos, sin = _gathered(angles, tokens, seq_len, PAIRS, C)
    cos = tl.reshape(cos.to(C.COMPUTE_DTYPE), [tokens.distance.shape[0], 1, PAIRS])
    sin = tl.reshape(sin.to(C.COMPUTE_DTYPE), [tokens.distance.shape[0], 1, PAIRS])
    return Columns(cos, cos, sin, sin)


@triton.jit
def _positions_of_pairs(angles, tokens, distance, pair, seq_len, C: tl.constexpr):
    """The position that each pair of a token reads, and whether the token exists."""
    exists = distance >= 0 if tokens.distance.shape[0] == 1 else tokens.first + distance < seq_len
    axis = tl.zeros_like(pair).to(tl.int64)
    for i in tl.static_range(1, C.AXES):
        axis = tl.where(has_bit(pair, C.PAIR_BITS, i, C.ROTARY_DIM // 2), i, axis)
    return position_of(angles, Tokens(tokens.batch, tokens.first, distance, exists), axis, C), exists


@triton.jit
def _computed(angles, tokens, seq_len, PAIRS: tl.constexpr, C: tl.constexpr):
    """Cosines and sines ``[tokens * PAIRS]``, computed without a table."""
    index = tl.arange(0, tokens.distance.shape[0] * PAIRS)
    pair = index % PAIRS
    position, _ = _positions_of_pairs(angles, tokens, index // PAIRS, pair, seq_len, C)
    frequencies, strides = angles.cos
    cos, sin = cos_sin(position, frequencies, strides[1], pair, pair < C.ROTARY_DIM // 2)
    if C.POSITIONS != "none":
        exists = (position > _INVALID_POSITION) & (position.to(tl.int64) < 2**31)
        cos, sin = tl.where(exists, cos, float("nan")), tl.where(exists, sin, float("nan"))
    if C.AXES > 1:
        is_somewhere = position != _NO_POSITION
        cos, sin = tl.where(is_somewhere, cos, 0.0), tl.where(is_somewhere, sin, 0.0)
    return cos, sin


@triton.jit
def _gathered(angles, tokens, seq_len, PAIRS: tl.constexpr, C: tl.constexpr):
    """Cosines and sines ``[tokens, PAIRS]`` out of tables, with the values of `stages_triton.read_columns`.

    Cosines and sines lie on one axis, so that each of 128 threads has one of the 128 values of a head of 128 features.
    With fewer values than threads the compiler would make every thread read the values of its own pairs.
    """
    index = tl.arange(0, 2 * tokens.distance.shape[0] * PAIRS)
    pair, is_sin = index % PAIRS, index // PAIRS % 2 == 1
    position, exists = _positions_of_pairs(angles, tokens, index // (2 * PAIRS), pair, seq_len, C)
    row, has_row = row_of(position, angles.table_rows, C)
    cos_at, cos_strides = angles.cos
    sin_at, sin_strides = angles.sin
    batch = tokens.batch.to(tl.int64)
    cos_at += batch * cos_strides[0] + row * cos_strides[1]
    sin_at += batch * sin_strides[0] + row * sin_strides[1]
    rotates = pair < C.ROTARY_DIM // 2
    inside = exists & has_row & rotates
    value = tl.load(tl.where(is_sin, sin_at, cos_at) + pair, mask=inside, other=0.0, eviction_policy="evict_last")
    factor = tl.where(has_row, tl.where(is_sin & (position < 0), -1.0, 1.0), float("nan"))
    value = value.to(C.COMPUTE_DTYPE) * factor.to(C.COMPUTE_DTYPE)
    value = tl.where(position == _NO_POSITION, 0.0, value)
    if C.LANE_DIM > C.ROTARY_DIM:
        value = tl.where(rotates, value, tl.where(is_sin, 0.0, 1.0).to(C.COMPUTE_DTYPE))
    value = tl.reshape(value, [tokens.distance.shape[0], 2, PAIRS])
    return tl.split(tl.permute(value, (0, 2, 1)))


@triton.jit
def read_angles(angles, tokens, exists, seq_len, C: tl.constexpr, PIECE: tl.constexpr = 0):
    """The `Columns` of a piece of heads, zero angles for what does not rotate; and whether tokens have a position.

    Heads with shared columns have one piece.
    """
    if C.SHARED_COLUMNS:
        columns = shared_columns(angles, tokens, seq_len, C.BLOCK_PAIRS, C)
        return columns, table_rows_of(angles, tokens, C).has_position
    else:
        rows = table_rows_of(angles, tokens, C)
        return read_columns(rows, 0, exists, C, True, PIECE), rows.has_position


@triton.jit
def _sine_and_cosine(head, tail):
    """Sine and cosine of ``x = head + tail``, where ``x`` is at most pi/4 in magnitude."""
    x = head + tail
    exact, rest = head * head, (head + x) * tail
    square = exact + rest
    sine = head + (tail + x * square * (((_S3 * square + _S2) * square + _S1) * square + _S0))
    leading = 1.0 - 0.5 * exact
    lost = (1.0 - leading) - 0.5 * exact
    series = ((_C3 * square + _C2) * square + _C1) * square + _C0
    return sine, leading + ((lost - 0.5 * rest) + square * square * series)
