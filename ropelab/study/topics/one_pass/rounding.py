"""Find inputs whose error comes near the bounds of `ropelab.conformance.cache_bounds`.

A bound that no input comes near would hide a fault as large as the gap.
"""

import numpy as np
import pandas as pd
import torch

from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, NO_ROUNDING, Arithmetic, Rounding, exact, rotate_exactly
from ropelab.conformance.cache.case import numbers
from ropelab.conformance.cache_bounds import cache_bound, float8_bound, norm_bound, norm_error, rms_norm
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8

FLOAT32 = Rounding.nearest(torch.float32)


def norms(head_dims: tuple[int, ...] = (64, 128, 256, 1024, 5120)) -> pd.DataFrame:
    """The error of a norm whose squares are added one after another, for the worst head that the sum can get.

    The first feature is 1. The square of every other feature is just below half a unit in the last place of 1, so that
    the sum in float32 stays 1 and loses every other square. 5120 features are all heads of a token (Wan).

    Returns:
        A row for each size of a head: ``head_dim``; ``bound`` and ``error``, relative, in units of float32;
        ``fraction``, the error divided by the bound; ``bound, norm last`` and ``fraction, norm last``: the same where
        the norm follows a rotation, here by an angle of 0.
    """
    rows = []
    for head_dim in head_dims:
        x = np.full(head_dim, np.float32(2.0**-12 * (1 - 2.0**-20)), dtype=np.float32)
        x[0] = 1
        total = np.float32(0)
        for square in x * x:
            total = np.float32(total + square)
        computed = 1 / np.sqrt(EXACT(total) / head_dim)
        truth = 1 / np.sqrt((x.astype(EXACT) ** 2).mean())
        error = float(abs(computed / truth - 1)) / FLOAT32_UNIT
        bound = norm_error(head_dim, FLOAT32) / FLOAT32_UNIT
        last = _bound_behind_a_rotation(x, head_dim) / FLOAT32_UNIT
        rows.append({"head_dim": head_dim, "bound": bound, "error": error, "fraction": error / bound,
                     "bound, norm last": last, "fraction, norm last": error / last})  # fmt: skip
    return pd.DataFrame(rows)


def _bound_behind_a_rotation(x: np.ndarray, head_dim: int) -> float:
    """The relative bound of the first feature of a head that turns by an angle of 0 and is then normalized."""
    z, one = x.astype(EXACT)[None], np.ones(head_dim // 2, EXACT)
    arithmetic = Arithmetic(NO_ROUNDING, FLOAT32, NO_ROUNDING)
    error = np.concatenate(cache_bound(*np.split(z, 2, axis=-1), one, 0 * one, arithmetic), axis=-1)
    weight = np.ones(head_dim, EXACT)
    bound = norm_bound(z, error, weight, 0.0, norm_error(head_dim, FLOAT32), FLOAT32)
    return float((bound / rms_norm(z, weight, 0.0))[0, 0])


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
