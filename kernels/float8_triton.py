"""Convert to 8-bit floats within a Triton kernel, with the bits of `float8.to_float8`."""

import torch
import triton
import triton.language as tl

from ropelab.kernels.backends import INTERPRETED
from ropelab.kernels.float8 import FLOAT8_DTYPES, SMALLEST_SCALE
from ropelab.kernels.stages_triton import narrow

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


_BEYOND = tl.constexpr(2.0**16)
"""A number larger than every finite 8-bit float."""


@triton.jit
def round_to(x, SOURCE: tl.constexpr, CONVERSION: tl.constexpr):
    """``x`` rounded to SOURCE, as float32.

    One instruction rounds two numbers to 16 bits. The compiler would use an instruction, and a slower one, for each.
    """
    if x.dtype == SOURCE:
        return x.to(tl.float32)
    elif CONVERSION == "instruction" and SOURCE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }""",
            "=r,=r,r,r", [x.to(tl.float32)], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return narrow(x, SOURCE).to(tl.float32)


_SMALLEST_SCALE, _MOST = tl.constexpr(SMALLEST_SCALE), tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def magnitude(x, CONVERSION: tl.constexpr):
    """The magnitudes of numbers for `scale_of_row`, in float32. A maximum leaves out NaN."""
    size = tl.abs(x.to(tl.float32))
    if CONVERSION != "instruction":  # the interpreter's maximum keeps NaN, and a GPU's maximum leaves it out
        size = tl.where(size == size, size, 0.0)
    return size


@triton.jit
def scale_of_row(size, LARGEST: tl.constexpr, CONVERSION: tl.constexpr):
    """The scale of each row from the magnitudes of its largest number, ``[rows, 1, 1]``, as `float8.scale_of_rows`.

    A GPU corrects the product with the reciprocal, as in `divide`. Where this underflows, the smallest scale is larger.
    """
    size = tl.minimum(tl.maximum(size, 0.0), _MOST)
    if CONVERSION == "instruction":
        RECIPROCAL: tl.constexpr = 1.0 / LARGEST
        scale = size * RECIPROCAL
        scale = tl.fma(
            tl.fma(scale, tl.full(size.shape, -LARGEST, tl.float32), size),
            tl.full(size.shape, RECIPROCAL, tl.float32),
            scale,
        )
    else:
        scale = tl.div_rn(size, tl.full(size.shape, LARGEST, tl.float32))
    return tl.maximum(scale, _SMALLEST_SCALE)


@triton.jit
def divide(x, scale, SOURCE: tl.constexpr, CONVERSION: tl.constexpr):
    """The quotient of the float32 ``x`` and a positive ``scale`` that broadcasts against it, for `to_float8`.

    A division takes a branch for every quotient. The GPU computes the reciprocal of a scale once, and corrects each
    product by its excess over ``x``, which a fused multiply-add computes exactly. The first correction leaves an error
    below one unit in the last place of a float32, and the second correction rounds correctly (Markstein 1990; Muller et
    al., Handbook of Floating-Point Arithmetic, section 4.7). One correction leads to the same 8-bit floats if ``x`` is
    a number of SOURCE with 16 bits: ``test_float8.py`` tries every significand, with the scales whose quotients
    lie closest to the middle between two 8-bit floats.

    An excess that underflows belongs to a quotient that becomes zero, unless the scale is below 2^-64. A correction of
    an infinity would be NaN, so the quotient is limited. A correction keeps the sign of a zero, because it subtracts
    from the quotient. The interpreter has no fused multiply-add.
    """
    if CONVERSION == "instruction":
        reciprocal = tl.div_rn(scale * 0 + 1.0, scale)
        quotient = x * reciprocal
        CORRECTIONS: tl.constexpr = 1 if SOURCE.primitive_bitwidth == 16 else 2
        for _ in tl.static_range(CORRECTIONS):
            quotient = tl.clamp(quotient, -_BEYOND, _BEYOND)
            # -x is 0 - x in Triton, a subtraction; a product with -1 becomes a sign of an operand.
            excess = tl.fma(quotient, tl.broadcast_to(scale, x.shape), -1.0 * x)
            quotient = tl.fma(excess, tl.broadcast_to(-reciprocal, x.shape), quotient)
        return quotient
    else:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def to_float8(x, CONVERSION: tl.constexpr):
    """The float32 ``x``, which a store converts by an instruction; or the bits of ``x`` as an 8-bit float, uint8."""
    if CONVERSION == "instruction":
        return x
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


@triton.jit
def from_float8(x, CONVERSION: tl.constexpr):
    """The value of an 8-bit float, or of its bits, as float32."""
    if CONVERSION == "e4m3":
        # The bits of the exponent, 7 of them for e4m3, are those of a float32 with a bias that is larger by 120.
        word = x.to(tl.int32)
        size = ((word & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        size = tl.where((word & 0x7F) == 0x7F, float("nan"), size)
        return tl.where(word >= 0x80, -1.0 * size, size)
    elif CONVERSION == "e5m2":
        # An e5m2 is the upper half of a float16.
        return (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return x.to(tl.float32)
