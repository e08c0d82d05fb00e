"""Derive how far `ropelab.rope_and_cache` may be from exact arithmetic; it continues `bounds`.

One feature of k passes these roundings. A call without a norm leaves out the first line, and a cache of more than 8
bits leaves out the last line::

    n  = compute(compute(w + offset) * compute(x * compute_rsqrt(compute(compute(sum x^2 / D) + eps))))
    z  = store(compute(compute(n0 * table(c)) - compute(n1 * table(s))))
    y8 = float8(clamp(compute(z / scale)))

A scale that the call makes of a head of a token, with the largest 8-bit float L, is::

    scale = max(compute(max |z| / L), SMALLEST_SCALE)

A norm after the rotation has the same roundings in another order: the norm reads the rotated features before they are
stored, and its result is stored. Under a norm across heads D is the number of features of all heads.

The bounds exclude overflow of the arithmetic and squares that underflow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, Arithmetic, Rounding, rotation_bound
from ropelab.conformance.inexact import DIVISION_UNITS
from ropelab.kernels.float8 import SMALLEST_SCALE

RSQRT_UNITS = 4
"""The relative error of a reciprocal square root in units of float32: the PTX ISA states at most 2^-22.9 for
``rsqrt.approx.f32``, and 4 units are 2^-22. A reciprocal square root of float64 is more accurate than 4 units of it."""


def norm_error(head_dim: int, compute: Rounding, *, offset: bool = False, roundings: int | None = None) -> float:
    """Return the largest relative error of a feature after the RMS norm, before it is rounded or rotated.

    The sum has D squares, which are not negative, and each square passes at most D roundings: its own and D - 1
    additions, in any order. The mean is a quotient with an error of 4 units (`inexact.DIVISION_UNITS`). The sum with
    eps rounds once. The square root halves the exponent of a relative error. With the unit u of the arithmetic, the
    reciprocal square root has the error::

        (1 + u)^((D + 1) / 2) (1 + 4 u)^(1 / 2) (1 + 4 u) - 1

    and the products with x and with the weight, and the sum of weight and offset, each multiply by 1 + u. The sum of
    weight and offset is exact to u relative to its own result, which is the weight of the norm.

    Args:
        head_dim: D, the features of a head, or of all heads for a norm across heads.
        compute: the rounding of the arithmetic.
        roundings: the roundings that a square passes up to the sum, in place of D; see `own_roundings`.
        offset: whether an offset is added to the weights.
    """
    u = EXACT(compute.unit)
    # 1 / sqrt(1 - a) exceeds sqrt(1 + a), so the bound takes the reciprocal of 1 - u.
    passed = head_dim if roundings is None else roundings
    mean = (1 / (1 - u)) ** ((passed + 1) / 2) * (1 / (1 - DIVISION_UNITS * u)) ** EXACT(0.5)
    rstd = mean * (1 + RSQRT_UNITS * u)
    return float(rstd * (1 + u) ** (3 if offset else 2) - 1)


def own_roundings(head_dim: int) -> int:
    """Return the roundings that a square passes in the order of `ropelab.kernels.head_sums_triton`.

    Two for the squares of a pair, and one for each level of the sums of neighbours.
    """
    return 2 + (head_dim // 2 - 1).bit_length()


def cache_bound(
    n0: np.ndarray,
    n1: np.ndarray,
    c: np.ndarray,
    s: np.ndarray,
    arithmetic: Arithmetic,
    relative_error: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest error of the rotated pair ``(y0, y1)`` as the cache has it, elementwise, without 8-bit floats.

    A relative error ``r`` of a normalized feature multiplies each product as the error of its cosine does. With the
    bound of `bounds.rotation_bound` for a table error ``t``, the table error ``(1 + t)(1 + r) - 1`` covers both.

    Args:
        n0, n1: the members of each pair after the norm, exact, ``EXACT``; broadcast with
        c, s: the exact cosine and sine, ``EXACT``.
        arithmetic: the roundings of the rotation; ``store`` is the rounding to the dtype of k.
        relative_error: ``r``, see `norm_error`; 0 without a norm.
    """
    table = arithmetic.table
    unit = (1 + EXACT(table.unit)) * (1 + EXACT(relative_error)) - 1
    widened = replace(arithmetic, table=Rounding(float(unit), table.underflow * (1 + relative_error)))
    return rotation_bound(n0, n1, c, s, widened)


def rms_norm(z: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return ``weight * z / sqrt(mean(z^2) + eps)`` in ``EXACT`` arithmetic.

    Args:
        z: ``[..., H, D]``, ``EXACT``.
        weight: ``[D]`` for a mean over each head, or ``[H D]`` for a mean over all heads of a token, ``EXACT``.
        eps: the number that is added to the mean of the squares.
    """
    rows = _rows(z, weight)
    return (weight * rows / _root(rows, eps)).reshape(z.shape)


def norm_bound(
    z: np.ndarray, error: np.ndarray, weight: np.ndarray, eps: float, relative_error: float, compute: Rounding
) -> np.ndarray:
    """Return the largest error, elementwise, of a norm of inexact features, such as a norm after the rotation.

    Let ``rho = sqrt(mean(z^2) + eps)``, and let the computed features be off by at most E. The number rho is the length
    of the vector of ``z / sqrt(D)`` and ``sqrt(eps)``. By the triangle inequality the computed features change rho by
    at most ``e = sqrt(mean(E^2))``. With the relative error r of the norm itself (`norm_error`)::

        |n' - n| <= |w| (|z| (r rho + e) / (rho (rho - e)) + E (1 + r) / (rho - e)) + 2 (1 + |w|) underflow

    The first summand is the error of ``1 / rho``, and the second summand is E, normalized. Two products may underflow.
    The bound needs ``e < rho``, and is larger than r and E alone by terms of second order.

    Args:
        z: the exact features before the norm, ``[..., H, D]``, ``EXACT``.
        error: E, elementwise.
        weight, eps: as for `rms_norm`.
        relative_error: r.
        compute: the rounding of the arithmetic.
    """
    rows, errors = _rows(z, weight), _rows(error, weight)
    rho, change = _root(rows, eps), _root(errors, 0.0)
    inexact_rho = abs(rows) * (relative_error * rho + change) / (rho * (rho - change))
    found = abs(weight) * (inexact_rho + errors * (1 + relative_error) / (rho - change))
    return (found + 2 * (1 + abs(weight)) * compute.underflow).reshape(z.shape)


def _rows(z: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the features that share a mean as the last axis."""
    return z.reshape(*z.shape[:-2], -1, weight.size)


def _root(rows: np.ndarray, eps: float) -> np.ndarray:
    return np.sqrt((rows * rows).mean(-1, keepdims=True) + EXACT(eps))


def float8_bound(
    y: np.ndarray, error: np.ndarray, scale: np.ndarray, dtype: torch.dtype, compute: Rounding
) -> np.ndarray:
    """Return the largest ``|y8 - clamp(y / scale)|`` for the 8-bit float ``y8`` that a cache has, elementwise.

    The value before the division is off by at most E. The division in float32 rounds once, with the unit u and the
    underflow e. Clamping to the finite numbers enlarges no difference. The 8-bit float rounds once more, by at most
    half a unit in its last place, and this unit grows with the magnitude::

        Q = E / scale + u (|y| + E) / scale + e
        |y8 - clamp(y / scale)| <= Q + half_unit(|clamp(y / scale)| + Q)

    Args:
        y: the exact value, ``EXACT``; for v, which only moves, the value itself.
        error: E, the bound of the value in the dtype of its source; 0 for v.
        scale: the positive scale, ``EXACT``, broadcast with ``y``.
        dtype: float8_e4m3fn or float8_e5m2.
        compute: the rounding of the division.
    """
    largest = EXACT(torch.finfo(dtype).max)
    quotient = (error + compute.unit * (abs(y) + error)) / scale + compute.underflow
    return quotient + half_unit(np.minimum(abs(y) / scale, largest) + quotient, dtype)


DIVIDE = Rounding(2 * FLOAT32_UNIT + FLOAT32_UNIT**2, 2 * Rounding.nearest(torch.float32).underflow)
"""The rounding of a division in float32. An operator may multiply by a reciprocal, which rounds as well."""


def row_scale(y: np.ndarray, error: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale of each row of ``y [..., features]``, and how far a right operator may be from it.

    The values z that the operator has are off by at most E. A maximum changes by at most the largest change of its
    operands, and the maximum with `SMALLEST_SCALE` does not increase a difference. The division rounds once::

        |scale - max |y| / L| <= max E / L + rounding((max |y| + max E) / L)

    Args:
        y: the exact values, ``EXACT``.
        error: E, elementwise.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    largest = EXACT(torch.finfo(dtype).max)
    size, change = abs(y).max(-1), error.max(-1)
    scale = np.maximum(size / largest, EXACT(np.float32(SMALLEST_SCALE)))
    return scale, change / largest + DIVIDE.of((size + change) / largest)


def half_unit(magnitude: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return half a unit in the last place of a dtype at a magnitude: the largest error of rounding to nearest.

    In the binade ``[2^n, 2^(n+1))`` the unit is ``2^n eps``. Below the smallest normal number it stays as it is there:
    2^-9 for e4m3 and 2^-16 for e5m2.
    """
    info = torch.finfo(dtype)
    # frexp has significands in [1/2, 1).
    _, exponent = np.frexp(np.maximum(magnitude, EXACT(float(info.smallest_normal))))
    return np.ldexp(EXACT(info.eps / 2), exponent - 1)
