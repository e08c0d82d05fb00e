"""Find inputs whose error comes near the bounds of `ropelab.conformance.cache_bounds`.

A bound that no input comes near would hide a fault as large as the gap.
"""

import numpy as np
import pandas as pd
import torch

from ropelab.bench.workers import spread
from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, NO_ROUNDING, Arithmetic, Rounding, exact, rotate_exactly
from ropelab.conformance.cache.case import numbers
from ropelab.conformance.cache_bounds import cache_bound, float8_bound, norm_bound, norm_error, own_roundings, rms_norm
from ropelab.kernels import INTERPRETED, use_backend
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8
from ropelab.qk_norm import apply_qk_norm_rope

FLOAT32 = Rounding.nearest(torch.float32)


def norms(head_dims: tuple[int, ...] = (64, 128, 256), rows: int = 128) -> pd.DataFrame:
    """The largest error of the norm of `ropelab.apply_qk_norm_rope`, in the order of its own sums, among random heads.

    The heads are in float32, the weights are 1 and the angle is 0, so nothing but the norm rounds. Without a GPU the
    kernel is interpreted, in a process of its own.

    Returns:
        A row for each size of a head: ``head_dim``; ``any order`` and ``own order``, bounds of the relative error in
        units of float32; ``error``, the largest; and ``fraction``, the error divided by the bound of the own order.
    """
    jobs = [(largest_norm_error, (head_dim, rows)) for head_dim in head_dims]
    errors = dict(spread([], jobs, here=INTERPRETED or torch.cuda.is_available()))
    found = []
    for head_dim in head_dims:
        order = {"any order": None, "own order": own_roundings(head_dim)}
        row = {name: norm_error(head_dim, FLOAT32, roundings=n) / FLOAT32_UNIT for name, n in order.items()}
        fraction = errors[head_dim] / row["own order"]
        found.append({"head_dim": head_dim, **row, "error": errors[head_dim], "fraction": fraction})
    return pd.DataFrame(found)


def largest_norm_error(head_dim: int, rows: int) -> tuple[int, float]:
    """The size of a head, and the largest relative error of the kernel's norm of random heads in units of float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = 1 + torch.rand(1, rows, 1, head_dim, generator=torch.Generator().manual_seed(head_dim))
    x, weight = x.to(device), torch.ones(head_dim, device=device)
    cos, sin = torch.ones(rows, head_dim // 2, device=device), torch.zeros(rows, head_dim // 2, device=device)
    with use_backend("triton"):
        y, _ = apply_qk_norm_rope(x, x, weight, weight, eps=0.0, cos=cos, sin=sin)
    right = rms_norm(exact(x), np.ones(head_dim, EXACT), 0.0)
    return head_dim, float(abs(exact(y) / right - 1).max()) / FLOAT32_UNIT


def stages(count: int = 200_000, seed: int = 0) -> pd.DataFrame:
    """The largest error that ``count`` random values reach on each way into a cache, as a fraction of the bound.

    Returns:
        A row for each way: ``way`` in words, and ``fraction``.
    """
    rows = {}
    generator = torch.Generator().manual_seed(seed)
    x0, x1 = torch.randn(2, count, generator=generator).bfloat16().float()
    angle = 2 * np.pi * torch.rand(count, generator=generator, dtype=torch.float64)
    c, s = angle.cos().float(), angle.sin().float()
    turned = (x0 * c - x1 * s).bfloat16()
    arithmetic = Arithmetic(NO_ROUNDING, FLOAT32, Rounding.nearest(torch.bfloat16))
    operands = [exact(x) for x in (x0, x1, c, s)]
    (right, _), (bound, _) = rotate_exactly(*operands), cache_bound(*operands, arithmetic)
    rows["k, rotated, in bfloat16"] = _largest(exact(turned) - right, bound)
    for dtype in FLOAT8_DTYPES:
        name, largest = str(dtype).removeprefix("torch."), EXACT(torch.finfo(dtype).max)
        scale = np.float32(0.37)
        stored = numbers(to_float8(turned.float() / float(scale), dtype))
        limit = float8_bound(right, bound, EXACT(scale), dtype, FLOAT32)
        rows[f"k, rotated, in {name}"] = _largest(stored - np.clip(right / EXACT(scale), -largest, largest), limit)
        value = exact(x0)
        stored = numbers(to_float8(x0 / float(scale), dtype))
        limit = float8_bound(value, np.zeros_like(value), EXACT(scale), dtype, FLOAT32)
        rows[f"v in {name}"] = _largest(stored - np.clip(value / EXACT(scale), -largest, largest), limit)
    rows["k, rotated and then normalized, in bfloat16"] = _normalized_last(x0, x1, c, s)
    return pd.DataFrame({"way": rows.keys(), "fraction": rows.values()})


def _normalized_last(x0: torch.Tensor, x1: torch.Tensor, c: torch.Tensor, s: torch.Tensor, pairs: int = 32) -> float:
    """The largest fraction of the bound for heads that turn and are then normalized; the arguments are pairs."""
    x0, x1, c, s = (x[: len(x) // pairs * pairs].view(-1, pairs) for x in (x0, x1, c, s))
    turned = torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), -1)
    normed = (turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    operands, weight = [exact(x) for x in (x0, x1, c, s)], np.ones(2 * pairs, EXACT)
    z = np.concatenate(rotate_exactly(*operands), -1)
    error = np.concatenate(cache_bound(*operands, Arithmetic(NO_ROUNDING, FLOAT32, NO_ROUNDING)), -1)
    right = rms_norm(z, weight, 1e-6)
    bound = norm_bound(z, error, weight, 1e-6, norm_error(2 * pairs, FLOAT32), FLOAT32)
    bound += Rounding.nearest(torch.bfloat16).of(abs(right) + bound)
    return _largest(exact(normed) - right, bound)


def _largest(error: np.ndarray, bound: np.ndarray) -> float:
    return float((abs(error) / bound).max())
