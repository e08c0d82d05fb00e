"""Compare the results of fused operations, tensor by tensor, with results in float64."""

from collections.abc import Mapping

import torch

from ropelab.kernels.float8 import FLOAT8_DTYPES


def disagreement(
    found: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    roundings: float,
    *,
    scale: float | Mapping[str, torch.Tensor] = 1.0,
) -> str:
    """``"ok"``, or which tensor differs from the right one and by how much.

    A tensor of ``right`` in float64 was computed. Every head (the features of the last axis) may differ from the right
    head by ``roundings`` unit roundoffs of the dtype of the found tensor, relative to the norm of the head. A found
    tensor in 8-bit floats holds quotients by ``scale``, or by the scales of its name. It was in bfloat16 before, so
    that it may differ by one unit roundoff of its own and by ``roundings`` of bfloat16. A tensor of ``right`` in
    another dtype was moved, and must have the same bits.
    """
    for name, y in right.items():
        x = found[name]
        if x.shape != y.shape:
            return f"wrong: {name} has the shape {tuple(x.shape)} instead of {tuple(y.shape)}"
        if y.dtype != torch.float64:
            if x.dtype != y.dtype or not torch.equal(x, y):
                return f"wrong: {name} has other bits"
            continue
        unit, is_float8 = torch.finfo(x.dtype).eps / 2, x.dtype in FLOAT8_DTYPES
        limit = unit + roundings * torch.finfo(torch.bfloat16).eps / 2 if is_float8 else roundings * unit
        by = (scale[name] if isinstance(scale, Mapping) else scale) if is_float8 else 1.0
        error = (x.double() * by - y).norm(dim=-1) / y.norm(dim=-1)
        if not bool((error <= limit).all()):  # a NaN is wrong
            return f"wrong: a head of {name} has relative error {error.nan_to_num(float('inf')).max().item():.3g}"
    return "ok"
