"""Find how near the kernels come to the bounds of `ropelab.conformance`, each in the order of its own operations.

A bound that no input comes near would hide a fault as large as the gap. Without a GPU the kernels are interpreted, in a
process of their own. The functions that write caches are for inference and have no backward.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch

import ropelab
from ropelab.bench.workers import spread
from ropelab.conformance.block_scale_bounds import scaled_fraction
from ropelab.conformance.bounds import (
    EXACT,
    FLOAT32_UNIT,
    NO_ROUNDING,
    Arithmetic,
    Rounding,
    exact,
    fraction,
    inexact_rotation_bound,
    rotate_exactly,
)
from ropelab.conformance.cache.case import numbers
from ropelab.conformance.cache_bounds import cache_bound, float8_bound, norm_bound, norm_error, own_roundings, rms_norm
from ropelab.kernels import INTERPRETED, use_backend
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import pairs

FLOAT32 = Rounding.nearest(torch.float32)
UNSTORED = Arithmetic(NO_ROUNDING, FLOAT32, NO_ROUNDING)
KEPT = Arithmetic(NO_ROUNDING, FLOAT32, Rounding.nearest(torch.float16))
"""The roundings of k in float16, for tables that are given; the interpreter would cut bfloat16 off."""
HEADS, HEAD_DIM, SIZE, ROWS, EPS, SCALE = 8, 64, 8, 4096, 1e-6, 0.37
"""Heads and their features, the slots of a block of the cache, the rows of the tables, and the given scale."""
E4M3 = torch.float8_e4m3fn


def norms(head_dims: tuple[int, ...] = (64, 128, 256), rows: int = 128) -> pd.DataFrame:
    """The largest error of the norm of `ropelab.apply_qk_norm_rope`, in the order of its own sums, among random heads.

    The heads are in float32, the weights are 1 and the angle is 0, so nothing but the norm rounds.
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
    """The size of a head, and the largest relative error of the kernel's norm of random heads in units of float32.

    Args:
        rows: the number of heads, a multiple of `HEADS`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = 1 + torch.rand(1, rows // HEADS, HEADS, head_dim, generator=torch.Generator().manual_seed(head_dim))
    x, weight = x.to(device), torch.ones(head_dim, device=device)
    cos = torch.ones(rows // HEADS, head_dim // 2, device=device)
    with use_backend("triton"):
        y, _ = ropelab.apply_qk_norm_rope(x, x[:, :, :1], weight, weight, eps=0.0, cos=cos, sin=torch.zeros_like(cos))
    right = rms_norm(exact(x), np.ones(head_dim, EXACT), 0.0)
    return head_dim, float(abs(exact(y) / right - 1).max()) / FLOAT32_UNIT


def stages(tokens: int = 64) -> pd.DataFrame:
    """The largest error of each way into a cache, of random heads, as a fraction of its bound.

    Args:
        tokens: their number, a multiple of `SIZE`; each has `HEADS` heads of k and of v.

    Returns:
        A row for each way: ``way`` in words, and ``fraction``.
    """
    here = INTERPRETED or torch.cuda.is_available()
    (found,) = spread([], [(_measured, (tokens,))], here=here)
    return pd.DataFrame(found, columns=["way", "fraction"])


def _measured(tokens: int) -> list[tuple[str, float]]:
    with use_backend("triton"), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return [*_rotated(Heads(tokens)), *_rotated_again(Heads(tokens)), *_others(Heads(tokens))]


class Heads:
    """Random heads of k and v at random positions, and how they turn exactly.

    Attributes:
        k, v: float16 ``[T, H, D]``.
        where: the tables and positions, as arguments.
        y, error: k rotated, and the bound of its error in float16, ``[T, H, D]`` in halves.
    """

    def __init__(self, tokens: int):
        generator = torch.Generator().manual_seed(0)
        draw = torch.randn(2, tokens, HEADS, HEAD_DIM, generator=generator, device="cpu")
        self.k, self.v = draw.to(torch.get_default_device(), torch.float16)
        self.slots = torch.arange(tokens)
        self.tables = dict(zip(("cos", "sin"), ropelab.rotary_table(ROWS, HEAD_DIM), strict=True))
        positions, self.deltas = torch.randint(1, ROWS, (2, tokens), generator=generator, device="cpu").to(
            self.k.device
        )
        self.where = {**self.tables, "positions": positions}
        self.pair = pairs(exact(self.k), "split_half")
        self.angles, self.further = self.waves(positions), self.waves(self.deltas)
        self.y = joined(rotate_exactly(*self.pair, *self.angles))
        self.error = joined(cache_bound(*self.pair, *self.angles, KEPT))

    def waves(self, positions: torch.Tensor) -> list[np.ndarray]:
        """The given cosines and sines at positions, ``[T, 1, D/2]``."""
        return [exact(table[positions])[:, None] for table in self.tables.values()]

    def cached(self, dtype: torch.dtype, **given) -> torch.Tensor:
        """The key cache and the value cache ``[2, blocks, SIZE, H, D]`` that `ropelab.rope_and_cache` wrote."""
        caches = torch.zeros(2, len(self.k) // SIZE, SIZE, HEADS, HEAD_DIM, dtype=dtype)
        ropelab.rope_and_cache(self.k, self.k, self.v, *caches, self.slots, **self.where, **given)
        return caches


def joined(halves) -> np.ndarray:
    """Both members of each pair as a head in halves."""
    return np.concatenate(halves, -1)


def _rows(cache: torch.Tensor) -> np.ndarray:
    """What the slots hold, in their order."""
    return numbers(cache).reshape(-1, *cache.shape[2:])


def _float8(found: np.ndarray, y: np.ndarray, error, scale: np.ndarray, dtype: torch.dtype) -> float:
    """The largest fraction of the bound of 8-bit floats whose scale is known."""
    largest = EXACT(torch.finfo(dtype).max)
    bound = float8_bound(y, np.broadcast_to(error, y.shape), scale, dtype, FLOAT32)
    return fraction(found - np.clip(y / scale, -largest, largest), bound)


def _given(name: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((1,), SCALE)}


def _of_rows(tokens: int) -> dict[str, torch.Tensor]:
    """Room for the scales that a call makes of each head."""
    made = torch.zeros(2, tokens // SIZE, SIZE, HEADS)
    return {"k_scale_cache": made[0], "v_scale_cache": made[1]}


def _rotated(heads: Heads) -> Iterator[tuple[str, float]]:
    y, error, v, scale = heads.y, heads.error, exact(heads.v), EXACT(np.float32(SCALE))
    yield "k, rotated, in float16", fraction(_rows(heads.cached(torch.float16)[0]) - y, error)
    for dtype in FLOAT8_DTYPES:
        name = str(dtype).removeprefix("torch.")
        found = heads.cached(dtype, **_given("k_scale"), **_given("v_scale"))
        yield f"k, rotated, in {name}", _float8(_rows(found[0]), y, error, scale, dtype)
        yield f"v in {name}", _float8(_rows(found[1]), v, 0, scale, dtype)
    made = _of_rows(len(heads.k))
    found = heads.cached(E4M3, **made)
    scale = exact(made["k_scale_cache"]).reshape(-1, HEADS, 1)
    yield "k, rotated, in float8_e4m3fn with a scale for each head", _float8(_rows(found[0]), y, error, scale, E4M3)


def _rotated_again(heads: Heads) -> Iterator[tuple[str, float]]:
    """`ropelab.rotate_cached_keys`: keys that are rounded already turn once more."""
    halves = np.split(heads.y, 2, -1)
    y = rotate_exactly(*halves, *heads.further)

    def again(found: torch.Tensor, **made: torch.Tensor) -> np.ndarray:
        ropelab.rotate_cached_keys(found, heads.slots, heads.deltas, **heads.tables, **made)
        return _rows(found)

    def bound(error: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
        return joined(inexact_rotation_bound(*halves, *np.split(error, 2, -1), *heads.further, arithmetic))

    found = again(heads.cached(torch.float16)[0])
    yield "k, rotated twice, in float16", fraction(found - joined(y), bound(heads.error, KEPT))
    scale = EXACT(np.float32(SCALE))
    first = float8_bound(heads.y, heads.error, scale, E4M3, FLOAT32) * scale
    found = again(heads.cached(E4M3, **_given("k_scale"))[0])
    yield "k, rotated twice, in float8_e4m3fn", _float8(found, joined(y), bound(first, UNSTORED), scale, E4M3)
    made = _of_rows(len(heads.k))
    keys, scales = heads.cached(E4M3, **made)[0], made["k_scale_cache"]
    first = exact(scales).reshape(-1, HEADS, 1)
    error = bound(float8_bound(heads.y, heads.error, first, E4M3, FLOAT32) * first, UNSTORED)
    error = error + FLOAT32.of(abs(joined(y)) + error)  # the scale multiplies once more
    found = again(keys, k_scale_cache=scales)
    second = exact(scales).reshape(-1, HEADS, 1)
    yield "the same with a scale for each head", _float8(found, joined(y), error, second, E4M3)


def _others(heads: Heads) -> Iterator[tuple[str, float]]:
    """A norm after the rotation, the entries of latent attention, and block scales."""
    ones = torch.ones(HEAD_DIM, dtype=torch.float16)
    found = heads.cached(torch.float16, q_weight=ones, k_weight=ones, eps=EPS, norm_first=False)
    error = joined(cache_bound(*heads.pair, *heads.angles, UNSTORED))
    right, relative = rms_norm(heads.y, exact(ones), EPS), norm_error(HEAD_DIM, FLOAT32)
    bound = norm_bound(heads.y, error, exact(ones), EPS, relative, FLOAT32)
    bound = bound + KEPT.store.of(abs(right) + bound)
    yield "k, rotated and then normalized, in float16", fraction(_rows(found[0]) - right, bound)

    right = joined((exact(heads.v[:, 0]), heads.y[:, 0]))
    error = joined((np.zeros_like(heads.error[:, 0]), heads.error[:, 0]))
    for dtype in (torch.float16, E4M3):
        entries = torch.zeros(len(heads.k) // SIZE, SIZE, 2 * HEAD_DIM, dtype=dtype)
        scale = _given("kv_scale") if dtype == E4M3 else {}
        latent = heads.k[:, 0], heads.v[:, 0], entries, heads.slots
        ropelab.mla_rope_and_cache(heads.k.clone(), *latent, **heads.where, **scale)
        if scale:
            yield (
                "latent entry in float8_e4m3fn",
                _float8(_rows(entries), right, error, EXACT(np.float32(SCALE)), dtype),
            )
        else:
            yield "latent entry in float16", fraction(_rows(entries) - right, error)

    adjacent = pairs(exact(heads.k), "interleaved")
    shape = heads.k.shape
    y = np.stack(rotate_exactly(*adjacent, *heads.angles), -1).reshape(shape)
    error = np.stack(cache_bound(*adjacent, *heads.angles, UNSTORED), -1).reshape(shape)
    values, scales = ropelab.rope_and_quantize(heads.k, block_dim=32, **heads.where)
    stored = numbers(values).reshape(shape), exact(scales).reshape(*shape[:2], -1)
    yield "rotated, in float8_e4m3fn with block scales", scaled_fraction(*stored, y, error, 1e-10)
