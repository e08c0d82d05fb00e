"""Tests of the quotient that becomes an 8-bit float: its bits are those of a division that rounds correctly."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from ropelab.kernels import INTERPRETED
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8
from ropelab.kernels.float8_triton import INTEGER_CONVERSIONS, conversion, divide
from ropelab.kernels.float8_triton import to_float8 as to_float8_in_kernel

HALVES = torch.bfloat16, torch.float16
UNITS = 3
"""How far, in units in the last place, a scale lies from the scale whose quotient is halfway between two floats."""


@triton.jit
def quotients(x_ptr, scale_ptr, y_ptr, count, CONVERSION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, scale = tl.load(x_ptr + at, mask=at < count, other=0), tl.load(scale_ptr + at, mask=at < count, other=1.0)
    y = divide(x.to(tl.float32), scale, x_ptr.dtype.element_ty, CONVERSION)
    tl.store(y_ptr + at, to_float8_in_kernel(y, CONVERSION), mask=at < count)


def in_kernel(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x / scale`` as 8-bit floats, as the kernels compute them on the device of ``x``."""
    y, how, block = torch.empty(x.shape, dtype=dtype, device=x.device), conversion(dtype, x.device), 4096
    written = y.view(torch.uint8) if how in INTEGER_CONVERSIONS else y
    quotients[triton.cdiv(len(x), block),](x, scale, written, len(x), how, block)
    return y


def halfway(dtype: torch.dtype) -> torch.Tensor:
    """The numbers halfway between neighbours among the positive finite 8-bit floats, float64."""
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    codes = codes[codes.isfinite()]
    return (codes[1:] + codes[:-1]) / 2


def near_ties(source: torch.dtype, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every significand of ``source`` with the scales for which its quotient is close to halfway between two floats.

    Returns:
        x, of ``source``, in [1, 2), and scale, float32; one-dimensional.
    """
    bits = {torch.bfloat16: 7, torch.float16: 10}[source]
    x = 1 + torch.arange(2**bits, dtype=torch.float64) / 2**bits
    scale = (x[:, None] / halfway(dtype)).float()
    scale = scale.view(torch.int32)[..., None] + torch.arange(-UNITS, UNITS + 1, dtype=torch.int32)
    return x[:, None, None].expand(scale.shape).flatten().to(source), scale.flatten().view(torch.float32)


def corrected(x: np.ndarray, scale: np.ndarray, reciprocal: np.ndarray) -> np.ndarray:
    """The quotient after one correction, as `divide` computes it with fused multiply-adds."""
    quotient = x * reciprocal
    excess = (quotient.astype(np.float64) * scale - x).astype(np.float32)  # exact before it is rounded
    product = -excess.astype(np.float64) * reciprocal  # exact
    total = product + quotient
    part = total - quotient
    lost = (quotient - (total - part)) + (product - part)  # the error of the sum
    # A sum in float64 that is not exact is rounded to an odd number, so that the rounding to float32 is right.
    even = total.view(np.int64) % 2 == 0
    inexact = (lost != 0) & even
    total[inexact] = np.nextafter(total[inexact], np.copysign(np.inf, lost[inexact]))
    return total.astype(np.float32)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("source", HALVES)
def test_one_correction_suffices_for_16_bits(source, dtype):
    x, scale = near_ties(source, dtype)
    wanted = to_float8(x.float() / scale, dtype).view(torch.uint8)
    reciprocal = (1 / scale.double()).float()
    product = to_float8(x.float() * reciprocal, dtype).view(torch.uint8)
    assert (product != wanted).any(), "expected cases that need a correction"
    found = torch.from_numpy(corrected(x.float().numpy(), scale.numpy(), reciprocal.numpy()))
    assert torch.equal(to_float8(found, dtype).view(torch.uint8), wanted)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_the_scale_of_a_row_is_the_correct_quotient(dtype):
    """For every significand of the largest magnitude, as `scale_of_row` computes the scale on a GPU."""
    largest = np.float32(torch.finfo(dtype).max)
    for first in np.arange(1, 2, 2.0**-3, dtype=np.float32):
        size = first + np.arange(2**20, dtype=np.float32) / np.float32(2**23)
        assert np.array_equal(corrected(size, largest, np.float32(1) / largest), size / largest)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("source", [*HALVES, torch.float32])
def test_the_bits_of_a_correct_division(source, dtype):
    device = "cpu" if INTERPRETED else "cuda"
    x, scale = near_ties(torch.bfloat16 if source == torch.float32 else source, dtype)
    if INTERPRETED:
        x, scale = x[::5], scale[::5]  # every distance of UNITS stays
    if source == torch.float32:  # a significand of 24 bits whose quotient is as close to halfway
        x = (scale.double() * (x.double() / scale).float()).float()
    random = torch.randn(10_000).to(source)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 1e-30, 1e-7, -1e-7])
    x = torch.cat((x.to(source), -x.to(source), random, special.to(source).repeat(7))).to(device)
    scales = torch.tensor([1.0, 0.1, 3.0, 2.0**-20, 1e-12, 1e20, 2.0**127]).repeat_interleave(len(special))
    scale = torch.cat((scale, scale, torch.rand(10_000) + 0.01, scales)).to(device)
    wanted, found = to_float8(x.float() / scale, dtype), in_kernel(x, scale, dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    differ = (found.view(torch.uint8) != wanted.view(torch.uint8)) & ~wanted.isnan()
    assert not differ.any(), [(float(a), float(b)) for a, b in zip(x[differ][:5], scale[differ][:5], strict=True)]
