"""This file converts to 8-bit floats within a Triton kernel, with the bits of `float8.to_float8`."""

import torch
import triton
import triton.language as tl

from ropelab.kernels.backends import INTERPRETED
from ropelab.kernels.float8 import FLOAT8_DTYPES

INTEGER_CONVERSIONS = ("e4m3", "e5m2")


def conversion(dtype: torch.dtype, device: torch.device) -> str:
    """The constant CONVERSION of `to_float8` for a destination.

    Returns:
        "none" for a dtype of more than 8 bits; "instruction" where the GPU has an instruction for it (NVIDIA's GPUs
        from sm_89 on); otherwise one of `INTEGER_CONVERSIONS`, and the kernel gets the destination as bytes. Triton's
        interpreter does not round to nearest, so it computes with integers too.
    """
    if dtype not in FLOAT8_DTYPES:
        return "none"
    if device.type == "cuda" and not INTERPRETED and torch.version.hip is None:
        if torch.cuda.get_device_capability(device) >= (8, 9):
            return "instruction"
    return INTEGER_CONVERSIONS[FLOAT8_DTYPES.index(dtype)]


@triton.jit
def divide(x, scale, CONVERSION: tl.constexpr):
    """The quotient of the float32 ``x`` and a positive ``scale`` that broadcasts against it, rounded to nearest.

    A division takes a branch for every quotient, and zeros take the slow branch. The GPU computes the reciprocal of a
    scale once, and corrects each product twice by its remainder. A fused multiply-add computes the remainder exactly.
    The first correction leaves an error below one unit in the last place, and the second correction rounds correctly
    (Markstein 1990; Muller et al., Handbook of Floating-Point Arithmetic, section 4.7). A remainder that underflows
    belongs to a quotient that becomes zero, unless the scale is below 2^-64. The interpreter has no fused multiply-add.
    """
    if CONVERSION == "instruction":
        reciprocal = tl.div_rn(scale * 0 + 1.0, scale)
        first = x * reciprocal
        quotient = first
        for _ in tl.static_range(2):
            remainder = tl.fma(-quotient, tl.broadcast_to(scale, x.shape), x)
            quotient = tl.fma(remainder, tl.broadcast_to(reciprocal, x.shape), quotient)
        # The corrections of an infinity are NaN, and the corrections of a negative zero are a positive zero.
        return tl.where((tl.abs(first) < float("inf")) & (first != 0), quotient, first)
    else:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def to_float8(x, DTYPE: tl.constexpr, CONVERSION: tl.constexpr):
    """The bits, as uint8, of the float32 ``x`` as an 8-bit float; only the instruction uses DTYPE."""
    if CONVERSION == "instruction":
        return x.to(DTYPE).to(tl.uint8, bitcast=True)
    else:
        # Bits of the significand, bias of the exponent, and the largest finite number as a float32.
        BITS: tl.constexpr = 3 if CONVERSION == "e4m3" else 2
        BIAS: tl.constexpr = 7 if CONVERSION == "e4m3" else 15
        LARGEST: tl.constexpr = 0x43E00000 if CONVERSION == "e4m3" else 0x47600000
        DROPPED: tl.constexpr = 23 - BITS
        word = x.to(tl.int32, bitcast=True)
        sign = (word >> 24) & 0x80
        size = word & 0x7FFFFFFF
        is_nan = size > 0x7F800000
        size = tl.minimum(size, LARGEST)
        # Half a unit in the last place less one bit, and the last bit that stays, round to nearest even.
        code = (size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) >> DROPPED
        code -= (127 - BIAS) << BITS
        # The last place of a sum with this power of two is the smallest positive number of the 8-bit float.
        SHIFT: tl.constexpr = (128 - BIAS + DROPPED) << 23
        small = size.to(tl.float32, bitcast=True) + tl.full([1], SHIFT, tl.int32).to(tl.float32, bitcast=True)
        small = small.to(tl.int32, bitcast=True) - SHIFT
        code = tl.where(size < ((128 - BIAS) << 23), small, code)
        return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)
