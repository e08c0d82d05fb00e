"""The 8-bit floats of caches, and how a number becomes an 8-bit float.

A tensor of 8-bit floats has scales in float32: a value is the stored number times its scale. To store a value, the
kernels divide the value by its scale in float32, round the quotient to nearest even, and replace a quotient beyond the
largest finite number by that number. NaN stays NaN. vLLM stores values in this way
(``csrc/quantization/w8a8/fp8/nvidia/quant_utils.cuh``). Torch's own conversion differs: it makes infinity or NaN of a
quotient that is too large, depending on the dtype and on the version of torch.

Scales are given, or made of the values: the scale of a row, which is a head of a token, is its largest magnitude
divided by the largest 8-bit float. As in vLLM's caches ``fp8_per_token_head``, no scale is below `SMALLEST_SCALE`
(``vllm/v1/attention/ops/triton_reshape_and_cache_flash.py``), so a row of zeros has that scale. NaN counts as 0 and an
infinity as the largest float32, so every scale is a positive finite number: NaN stays NaN in its own place, and an
infinity becomes the largest 8-bit float beside zeros.
"""

import torch

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


SMALLEST_SCALE = 1e-6


def scale_of_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of each row of ``x [..., features]`` for 8-bit floats of ``dtype``, float32 ``[...]``."""
    most = torch.finfo(torch.float32).max
    size = x.float().abs().nan_to_num(0.0, posinf=most).amax(-1)
    # On a GPU torch multiplies by the reciprocal of a number, so the divisor is a tensor.
    return (size / size.new_full((), torch.finfo(dtype).max)).clamp(min=SMALLEST_SCALE)


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in an 8-bit float, by torch operations: rounded to nearest even, and finite unless ``x`` is NaN."""
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)
