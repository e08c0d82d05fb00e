"""Cosine and sine of ``position x frequency`` within a kernel: the method of `angles_torch`, with the same bits."""

import triton
import triton.language as tl

from ropelab.kernels import angles_torch

_HIGH, _LOW, _FACTOR = (tl.constexpr(row) for row in (angles_torch.HIGH, angles_torch.LOW, angles_torch.FACTOR))
_TWO_PI_HEAD, _TWO_PI_TAIL = tl.constexpr(angles_torch.TWO_PI_HEAD), tl.constexpr(angles_torch.TWO_PI_TAIL)
_S0, _S1, _S2, _S3 = (tl.constexpr(c) for c in angles_torch.SINE)
_C0, _C1, _C2, _C3 = (tl.constexpr(c) for c in angles_torch.COSINE)


@triton.jit
def cos_sin(position, frequencies_ptr, stride, pair, mask):
    """Float32, of the shape of ``position`` and ``pair``; ``stride`` is that of the rows of the frequencies.

    Every factor has 32 bits and says so, which makes one instruction of a product instead of four.
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
    rest = turns - (quarter << 62)  # of a turn, 64 bits behind the point, at most an eighth
    rest_head, rest_tail = (rest >> 31).to(tl.int32).to(tl.int64), (rest & (2**31 - 1)).to(tl.int32).to(tl.int64)
    x = rest_head * _TWO_PI_HEAD + ((rest_head * _TWO_PI_TAIL) >> 31) + ((rest_tail * _TWO_PI_HEAD) >> 31)
    head = (x + 2**48) >> 49
    tail = x - (head << 49)
    sin, cos = _sine_and_cosine(head.to(tl.int32).to(tl.float32) * 2.0**-12, tail.to(tl.float32) * 2.0**-61)
    # A quarter turn makes cos of sin and -sin of cos.
    odd, back = (quarter & 1) != 0, (quarter & 2) != 0
    sin, cos = tl.where(odd, cos, sin), tl.where(odd, -sin, cos)
    sin = tl.where(back != (position < 0), -sin, sin)
    scale = factor.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(back, -cos, cos) * scale, sin * scale


@triton.jit
def _sine_and_cosine(head, tail):
    """Of ``x = head + tail``, at most pi/4."""
    x = head + tail
    exact, rest = head * head, (head + x) * tail
    square = exact + rest
    sine = head + (tail + x * square * (((_S3 * square + _S2) * square + _S1) * square + _S0))
    leading = 1.0 - 0.5 * exact
    lost = (1.0 - leading) - 0.5 * exact
    series = ((_C3 * square + _C2) * square + _C1) * square + _C0
    return sine, leading + ((lost - 0.5 * rest) + square * square * series)
