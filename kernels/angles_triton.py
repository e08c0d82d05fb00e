"""Cosine and sine of ``position x frequency``, computed in a kernel.

The method is as in `angles_torch`, and the results have the same bits.
"""

import triton
import triton.language as tl

from ropelab.kernels import angles_torch
from ropelab.kernels.place_triton import Tokens, position_of, reads_axis
from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION
from ropelab.kernels.stages_triton import Columns

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
def computed_columns(angles, tokens, seq_len, C: tl.constexpr):
    """The `Columns` of every token and pair, ``[tokens, 1, BLOCK_PAIRS]``, computed without a table.

    The program computes the values once for all heads, along one axis over which the compiler spreads all threads. The
    threads then exchange the values through shared memory. If every thread computed the values for its own pairs, the
    operations would be a hundred times as many.
    """
    BLOCK_TOKENS: tl.constexpr = tokens.distance.shape[0]
    frequencies, strides = angles.cos
    place = tl.arange(0, BLOCK_TOKENS * C.BLOCK_PAIRS)
    distance, pair = place // C.BLOCK_PAIRS, place % C.BLOCK_PAIRS
    exists = distance >= 0 if BLOCK_TOKENS == 1 else tokens.first + distance < seq_len
    axis = tl.zeros_like(pair).to(tl.int64)
    for i in tl.static_range(1, C.AXES):
        axis = tl.where(reads_axis(pair, i, C), i, axis)
    position = position_of(angles, Tokens(tokens.batch, tokens.first, distance, exists), axis, C)
    cos, sin = cos_sin(position, frequencies, strides[1], pair, pair < C.ROTARY_DIM // 2)
    if C.POSITIONS != "none":
        exists = (position > _INVALID_POSITION) & (position.to(tl.int64) < 2**31)
        cos, sin = tl.where(exists, cos, float("nan")), tl.where(exists, sin, float("nan"))
        if C.AXES > 1:
            is_somewhere = position != _NO_POSITION
            cos, sin = tl.where(is_somewhere, cos, 0.0), tl.where(is_somewhere, sin, 0.0)
    cos = tl.reshape(cos.to(C.COMPUTE_DTYPE), [BLOCK_TOKENS, 1, C.BLOCK_PAIRS])
    sin = tl.reshape(sin.to(C.COMPUTE_DTYPE), [BLOCK_TOKENS, 1, C.BLOCK_PAIRS])
    return Columns(cos, cos, sin, sin)


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
