"""Recover rows and frequencies from measured cosines and sines."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np

CLOSE = 2e-4
"""Measured and computed cosines agree if they differ by less; proofs use the derived bound instead."""


def rows(
    values: np.ndarray, table: np.ndarray, first: int, near: np.ndarray, close: float = CLOSE
) -> np.ndarray | None:
    """Return for each vector of cosines or sines the number of the table's row with the same numbers.

    Args:
        values: ``[K, pairs]``.
        table: ``[P, pairs]``, whose first row has the number ``first``.
        near: ``[K]``, the numbers of rows that win a tie, such as the positions.
        close: the largest difference of numbers that are the same.

    Returns:
        ``[K]`` integers; None if a vector is in no row.
    """
    found = []
    for value, guess in zip(values, near, strict=True):
        hits = np.arange(len(table))
        for column, number in zip(table.T, value, strict=True):
            hits = hits[abs(column[hits] - number) < close]
        if not len(hits):
            return None
        hits = hits + first
        found.append(hits[np.argmin(abs(hits - guess))])
    return np.array(found)


@lru_cache(maxsize=16)
def waves(rates: tuple[float, ...], limit: int) -> np.ndarray:
    """Return the cosines, then the sines of the angles of the rows from ``-limit`` to ``limit - 1``.

    Args:
        rates: rad per row, for each pair.
        limit: the number of rows on each side of 0.

    Returns:
        ``[2 limit, 2 pairs]`` in float32; the rows of a column are adjacent in memory.
    """
    angles = np.array(rates)[:, None] * np.arange(-limit, limit)
    return np.concatenate((np.cos(angles), np.sin(angles))).astype(np.float32).T


def slopes(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return slope (rad per token) and intercept (rad) of angles modulo 2 pi.

    Args:
        angles: ``[tokens, pairs]``, for consecutive positions from 0 on.
    """
    if len(angles) < 2:  # a single token shows no slope
        return np.zeros(angles.shape[1]), angles[0]
    slope = np.median(_wrapped(np.diff(angles, axis=0)), axis=0)
    for token in range(2, len(angles)):  # each later token has a longer lever
        slope = slope + _wrapped(angles[token] - angles[0] - token * slope) / token
    return slope, angles[0]


def refined(slope: np.ndarray, intercept: np.ndarray, angles: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return slopes corrected by angles ``[K, pairs]`` at larger and larger positions ``[K]``."""
    for angle, position in zip(angles, positions, strict=True):
        off = _wrapped(angle - intercept - position * slope)
        if (abs(off) > 1).any():
            return slope
        slope = slope + off / position
    return slope


def simple(value: float, close: float = CLOSE) -> float:
    """Return a number with few digits near ``value`` if there is one within half of ``close``, relative to it."""
    for candidate in (float(Fraction(value).limit_denominator(12)), float(f"{value:.2g}"), float(f"{value:.4g}")):
        if abs(candidate - value) <= close / 2 * abs(value) + 1e-7:
            return candidate
    return value


def _wrapped(angle: np.ndarray) -> np.ndarray:
    return (angle + np.pi) % (2 * np.pi) - np.pi
