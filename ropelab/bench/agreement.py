"""This file compares the results of fused operations, tensor by tensor, with results in float64."""

from collections.abc import Mapping

import torch


def disagreement(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], roundings: float) -> str:
    """``"ok"``, or which tensor differs from the right one and by how much.

    A tensor of ``right`` in float64 was computed. Every head (the features of the last axis) may differ from the right
    head by ``roundings`` unit roundoffs of the dtype of the found tensor, relative to the norm of the head. A tensor of
    ``right`` in another dtype was moved, and must have the same bits.
    """
    for name, y in right.items():
        x = found[name]
        if x.shape != y.shape:
            return f"wrong: {name} has the shape {tuple(x.shape)} instead of {tuple(y.shape)}"
        if y.dtype != torch.float64:
            if x.dtype != y.dtype or not torch.equal(x, y):
                return f"wrong: {name} has other bits"
            continue
        error = (x.double() - y).norm(dim=-1) / y.norm(dim=-1)
        limit = roundings * torch.finfo(x.dtype).eps / 2
        if not bool((error <= limit).all()):  # a NaN is wrong
            return f"wrong: a head of {name} has relative error {error.nan_to_num(float('inf')).max().item():.3g}"
    return "ok"
