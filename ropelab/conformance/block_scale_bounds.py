"""Derive how far 8-bit floats with block scales may be from exact arithmetic; it continues `cache_bounds`.

One feature passes these roundings, of which a call with ``round_first`` has the last but one too::

    z  = compute(compute(x0 * table(c)) - compute(x1 * table(s)))
    z  = store(z)
    y8 = float8(clamp(z / scale))

The quotient by a power of two is exact. The scale follows from the computed features, so an error E may move it to the
next power of two: its exponent is one of those that the largest magnitudes ``amax - E`` and ``amax + E`` have. For the
scale that a function chose, `cache_bounds.float8_bound` bounds the stored number.
"""

from __future__ import annotations

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, NO_ROUNDING, fraction
from ropelab.conformance.cache_bounds import float8_bound

E4M3 = torch.float8_e4m3fn


def exponents(amax: np.ndarray, amax_epsilon: float) -> np.ndarray:
    """Return ``ceil(log2(max(amax, amax_epsilon) / 448))``, exactly.

    frexp has ``amax = m 2^k`` with ``1/2 <= m < 1``, and ``448 = 7/8 2^9``.
    """
    significand, exponent = np.frexp(np.maximum(amax, EXACT(amax_epsilon)))
    return exponent - 9 + (significand > EXACT(0.875))


def exponent_range(y: np.ndarray, error: np.ndarray, amax_epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest exponent that the scale of features ``y [..., block_dim]`` may have.

    Args:
        y: the exact features, ``EXACT``.
        error: E, elementwise.
        amax_epsilon: the least ``amax``.
    """
    size = abs(y)
    return exponents((size - error).max(-1), amax_epsilon), exponents((size + error).max(-1), amax_epsilon)


def scaled_fraction(
    values: np.ndarray, scales: np.ndarray, y: np.ndarray, error: np.ndarray, amax_epsilon: float
) -> float:
    """Return the largest ``|error| / bound`` of stored numbers, and infinity for a scale of another exponent.

    Args:
        values: the stored numbers ``[..., D]``, ``EXACT``.
        scales: their scales, ``EXACT``, ``[..., blocks]``; blocks have the same number of features.
        y: the exact features, ``EXACT``.
        error: E, the bound of the features before they become 8-bit floats.
        amax_epsilon: the least ``amax``.
    """
    blocks = (*y.shape[:-1], scales.shape[-1], -1)
    values, y, error = (x.reshape(blocks) for x in (values, y, np.broadcast_to(error, y.shape)))
    lowest, highest = exponent_range(y, error, amax_epsilon)
    found = np.log2(scales)
    if not ((lowest <= found) & (found <= highest)).all():
        return float("inf")
    scale = scales[..., None]
    largest = EXACT(torch.finfo(E4M3).max)
    off = values - np.clip(y / scale, -largest, largest)
    return fraction(off, float8_bound(y, error, scale, E4M3, NO_ROUNDING))
