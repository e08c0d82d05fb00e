"""Derive how far QK norm with a rotation, and its gradients, may be from exact arithmetic; it continues `inexact`.

The steps are those of `ropelab.kernels.qk_norm_triton`, whose docstring has the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ropelab.conformance.bounds import Arithmetic
from ropelab.conformance.cache_bounds import RSQRT_UNITS
from ropelab.conformance.inexact import Inexact


class Pass(NamedTuple):
    """The results of a norm and a rotation, each with its exact value and its bound: y, dx, and dw summed over rows."""

    y: tuple[np.ndarray, np.ndarray]
    dx: tuple[np.ndarray, np.ndarray]
    dw: tuple[np.ndarray, np.ndarray]


def norm_rope(
    x: np.ndarray, g: np.ndarray, w: np.ndarray, c: np.ndarray, s: np.ndarray, eps: float, arithmetic: Arithmetic,
    table_error: np.ndarray | float, roundings: int | None = None,
) -> Pass:  # fmt: skip
    """Bound forward and backward of rows whose pairs are halves, ``(i, i + D/2)``.

    Args:
        x, g: the rows and the gradients of the results, ``EXACT``, ``[rows, D]``.
        w: the weights ``[D]``.
        c, s: the exact cosine and sine ``[rows, D/2]``.
        arithmetic: the roundings of the function.
        table_error: how far an entry of the tables is off before its rounding.
        roundings: the roundings that a square passes in the sum of the forward; by default those of any order.
    """
    compute, dim = arithmetic.compute, x.shape[-1]

    def rotated(a: Inexact, sign: int) -> Inexact:
        halves = (np.split(part, 2, -1) for part in (a.value, a.error))
        a0, a1 = (Inexact(value, error, compute) for value, error in zip(*halves, strict=True))
        cos, sin = (Inexact(t, table_error + arithmetic.table.of(abs(t) + table_error), compute) for t in (c, sign * s))
        y0, y1 = a0 * cos - a1 * sin, a1 * cos + a0 * sin
        value, error = (np.concatenate(halves, -1) for halves in ((y0.value, y1.value), (y0.error, y1.error)))
        return Inexact(value, error, compute)

    rows, weights = Inexact.exact(x, compute), Inexact.exact(w, compute)
    number = Inexact(np.asarray(eps, x.dtype), compute.of(np.asarray(eps, x.dtype)), compute)
    rstd = ((rows * rows).sum(-1, roundings).divided(dim) + number).rsqrt(RSQRT_UNITS)
    unit = rows * rstd
    y = rotated(weights * unit, 1)
    gn = rotated(Inexact.exact(g, compute), -1)
    weighted = weights * gn
    mean = (weighted * unit).sum(-1).divided(dim)
    dx, dw = rstd * (weighted - unit * mean), (gn * unit).sum(0)
    return Pass(*((z.value, z.stored(arithmetic.store)) for z in (y, dx, dw)))
