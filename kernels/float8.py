"""The 8-bit floats of caches, and how a number becomes an 8-bit float.

A tensor of 8-bit floats has scales in float32: a value is the stored number times its scale. To store a value, the
kernels divide the value by its scale in float32, round the quotient to nearest even, and replace a quotient beyond the
largest finite number by that number. NaN stays NaN. vLLM stores values in this way
(``csrc/quantization/w8a8/fp8/nvidia/quant_utils.cuh``). Torch's own conversion differs: it makes infinity or NaN of a
quotient that is too large, depending on the dtype and on the version of torch.
"""

import torch

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in an 8-bit float, by torch operations: rounded to nearest even, and finite unless ``x`` is NaN."""
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)
