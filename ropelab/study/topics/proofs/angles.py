"""The angles of the definition in arithmetic of 120 bits (mpmath); no code of the library takes part in them.

A table of the library that is shifted by a position, or has negated sines, therefore differs from the definition.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from mpmath import mp

from ropelab.conformance.bounds import EXACT, table_angle_error

_BITS = 120
Tables = tuple[np.ndarray, np.ndarray]


def exact_tables(positions: Iterable[int], rotary_dim: int, base: float = 10000.0) -> tuple[Tables, np.ndarray]:
    """cos and sin of ``p * base ** (-2i / rotary_dim)``, and the largest error of a table that float64 computes.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    Returns:
        ``(cos, sin), error``, each ``EXACT``, ``[positions, 1, rotary_dim/2]``; `table_angle_error` derives the error.
    """
    return _tables(tuple(positions), rotary_dim, base)


@lru_cache(maxsize=8)
def _tables(positions: tuple[int, ...], rotary_dim: int, base: float) -> tuple[Tables, np.ndarray]:
    with mp.workprec(_BITS):
        frequencies = [mp.mpf(base) ** (mp.mpf(-2 * i) / rotary_dim) for i in range(rotary_dim // 2)]
        angles = [[p * frequency for frequency in frequencies] for p in positions]
        cos, sin, angle = (_as_exact([list(map(f, row)) for row in angles]) for f in (mp.cos, mp.sin, mp.mpf))
        theta = _as_exact([frequencies])
    return (cos, sin), table_angle_error(angle, theta)


def _as_exact(rows: list[list]) -> np.ndarray:
    """Numbers of mpmath as ``EXACT``, ``[rows, 1, columns]``: the nearest float64 and the rest."""
    heads = np.array([[float(x) for x in row] for row in rows])
    tails = np.array(
        [[float(x - head) for x, head in zip(*pair, strict=True)] for pair in zip(rows, heads, strict=True)]
    )
    return (heads.astype(EXACT) + tails.astype(EXACT))[:, None]
