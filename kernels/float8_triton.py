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
        "none" for a dtype of more than 8 bits; "instruction" where the GPU has one (NVIDIA's GPUs from sm_89 on);
        otherwise one of `INTEGER_CONVERSIONS`, and the kernel gets the destination as bytes. Triton's interpreter does
        not round to nearest, so it computes with integers too.
    """
    if dtype not in FLOAT8_DTYPES:
        return "none"
    if device.type == "cuda" and not INTERPRETED and torch.version.hip is None:
        if torch.cuda.get_device_capability(device) >= (8, 9):
            return "instruction"
    return INTEGER_CONVERSIONS[FLOAT8_DTYPES.index(dtype)]


@triton.jit
def to_float8(x, DTYPE: tl.constexpr, CONVERSION: tl.constexpr):
    """The bits, as uint8, of the float32 ``x`` in an 8-bit float; DTYPE matters to the instruction only."""
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
