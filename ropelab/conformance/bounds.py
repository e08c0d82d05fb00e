"""Derive how far a rotated pair may be from the exact rotation; no bound is tuned to results.

Every rounding obeys the standard model (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
sections 2.2 and 2.8): ``fl(z) = z (1 + d) + e`` with ``|d| <= unit``, ``|e| <= underflow``. One rotated
feature is::

    store(compute(compute(x0 * table(c)) - compute(x1 * table(s))))

so the table is rounded once, each product once, the difference once and the stored result once. A fused
multiply-add leaves out one of these roundings, and that only shrinks the error. The bounds exclude overflow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

# The widest float that NumPy has. Its significand has 64 bits on x86, 113 on AArch64 Linux and 53 on some systems.
# The bounds contain its rounding, ``REFERENCE``, so that they hold on each of them.
EXACT = np.longdouble


@dataclass(frozen=True)
class Rounding:
    """The largest error of one rounding: ``unit * |z| + underflow``."""

    unit: float
    underflow: float

    @classmethod
    def nearest(cls, dtype: torch.dtype) -> Rounding:
        """Return the rounding to nearest: at most half a unit in the last place."""
        info = torch.finfo(dtype)
        return cls(info.eps / 2, info.tiny * info.eps / 2)

    @classmethod
    def truncating(cls, dtype: torch.dtype) -> Rounding:
        """Return the rounding that drops surplus bits: at most a whole unit in the last place."""
        info = torch.finfo(dtype)
        return cls(info.eps, info.tiny * info.eps)

    def of(self, magnitude: np.ndarray) -> np.ndarray:
        """Return the largest error of rounding a number of at most this magnitude."""
        return self.unit * magnitude + self.underflow


NO_ROUNDING = Rounding(0.0, 0.0)
FLOAT32_UNIT = Rounding.nearest(torch.float32).unit
_REFERENCE_INFO = np.finfo(EXACT)
REFERENCE = Rounding(float(_REFERENCE_INFO.eps) / 2, float(np.finfo(np.float64).smallest_subnormal))


@dataclass(frozen=True)
class Arithmetic:
    """The roundings between a feature in memory and the rotated feature in memory."""

    table: Rounding
    compute: Rounding
    store: Rounding

    @classmethod
    def of_kernel(cls, dtype: torch.dtype, *, interpreted: bool) -> Arithmetic:
        """Return the roundings that ``ropelab.apply_rope`` promises, for tables of ``table_dtype(dtype)``.

        The maths are in float32 or wider. A GPU stores bfloat16 rounded to nearest; Triton's interpreter truncates it.

        Args:
            dtype: the dtype of the tensors.
            interpreted: whether Triton's interpreter runs the kernel.
        """
        compute = table_dtype(dtype)
        if dtype == compute:
            store = NO_ROUNDING
        elif dtype == torch.bfloat16 and interpreted:
            store = Rounding.truncating(dtype)
        else:
            store = Rounding.nearest(dtype)
        table = NO_ROUNDING if compute == torch.float64 else Rounding.nearest(compute)
        return cls(table, Rounding.nearest(compute), store)


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of tables and maths for tensors of ``dtype``: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(x: torch.Tensor) -> np.ndarray:
    """Return the values of ``x`` in the widest float (``EXACT``), where sums and products are almost exact."""
    return x.detach().cpu().double().numpy().astype(EXACT)


def rotate_exactly(x0, x1, c, s) -> tuple[np.ndarray, np.ndarray]:
    """Return the rotated pair in ``EXACT`` arithmetic, which shows even the error of a float64 result.

    Args:
        x0, x1: the members of each pair, ``EXACT``; broadcast with
        c, s: cosine and sine of its angle, ``EXACT``.
    """
    return x0 * c - x1 * s, x1 * c + x0 * s


def rotation_bound(
    x0: np.ndarray,
    x1: np.ndarray,
    c: np.ndarray,
    s: np.ndarray,
    arithmetic: Arithmetic,
    angle_error: float | np.ndarray = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest possible error of the rotated pair ``(y0, y1)``, elementwise.

    With ``M0 = |x0 c| + |x1 s|``, table error ``t``, compute unit ``u``, underflow ``e``, before the store::

        |z0 - y0| <= ((1 + t)(1 + u)^2 - 1) M0 + (1 + t)(1 + u)^2 a (|x0| + |x1|) + 2 (1 + u) e =: E
        |store(z0) - y0| <= E + unit_store (|y0| + E) + underflow_store

    Args:
        x0, x1: the members of each pair as the function reads them, ``EXACT``; broadcast with
        c, s: the exact cosine and sine, ``EXACT``, before they are rounded into a table.
        arithmetic: the roundings of the function.
        angle_error: ``a``, the largest error that an inexact angle (rad) gives to c and s before the table's rounding.

    Returns:
        The bounds of ``y0`` and of ``y1``. The inverse rotation has the bounds of ``-s``.
    """
    u, e = arithmetic.compute.unit, arithmetic.compute.underflow
    exactly = (1 + EXACT(arithmetic.table.unit)) * (1 + EXACT(u)) ** 2
    relative = float(exactly - 1 + 2 * REFERENCE.unit)
    growth = float(exactly) * (1 + 2 * u)
    absolute = growth * (angle_error + arithmetic.table.underflow) * (abs(x0) + abs(x1)) + 2 * (1 + u) * e

    def stored(magnitude, y):
        error = relative * magnitude + absolute
        return error + arithmetic.store.of(abs(y) + error)

    y0, y1 = rotate_exactly(x0, x1, c, s)
    return stored(abs(x0 * c) + abs(x1 * s), y0), stored(abs(x1 * c) + abs(x0 * s), y1)


def inexact_rotation_bound(
    x0: np.ndarray,
    x1: np.ndarray,
    d0,
    d1,
    c: np.ndarray,
    s: np.ndarray,
    arithmetic: Arithmetic,
    angle_error: float | np.ndarray = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest error of a rotated pair whose members are off by at most ``d0`` and ``d1`` before.

    The rotation passes the error on as ``|c| d0 + |s| d1`` and itself errs as in `rotation_bound`, for a pair of at
    most ``|x| + d``. The store rounds once more. An example is a cached key that turns again: ``d`` is the bound of its
    first rotation.

    Args:
        x0, x1: the exact members of each pair, ``EXACT``.
        d0, d1: the largest errors of the members.
        c, s, arithmetic, angle_error: as for `rotation_bound`.
    """
    # These signs add the magnitudes of both products of the first member, and of the second.
    wide, unstored = (abs(x0) + d0, abs(x1) + d1), replace(arithmetic, store=NO_ROUNDING)
    e0 = rotation_bound(*wide, abs(c), -abs(s), unstored, angle_error)[0] + d0 * abs(c) + d1 * abs(s)
    e1 = rotation_bound(*wide, abs(c), abs(s), unstored, angle_error)[1] + d1 * abs(c) + d0 * abs(s)
    y0, y1 = rotate_exactly(x0, x1, c, s)
    return e0 + arithmetic.store.of(abs(y0) + e0), e1 + arithmetic.store.of(abs(y1) + e1)


def table_angle_error(angles: np.ndarray, frequencies: np.ndarray | None = None) -> np.ndarray:
    """Return the absolute error of a cosine or sine computed in float64 at the rounded angle ``p * theta``.

    The product has an error of at most ``u |angle|``, the library's cosine of less than a unit in the last place, 2u.
    A table that computes ``theta = base ** -e`` rounds the exponent e once, which moves theta by ``u |ln theta|`` of
    itself. The power adds a unit in the last place, 2u of theta.

    Args:
        angles: exact angles in rad.
        frequencies: the exact ``theta``, which broadcasts against ``angles``, if the table computes it in float64; None
            for a table whose frequencies are exact.
    """
    u = Rounding.nearest(torch.float64).unit + REFERENCE.unit
    inexact = 0 if frequencies is None else 2 + abs(np.log(frequencies))
    return u * (1 + 8 * u) * (abs(angles) * (1 + inexact) + 2)


def fraction(error: np.ndarray, bound: np.ndarray) -> float:
    """Return the largest ``|error| / bound``: at most 1 if the bound holds, and near 1 if the bound is tight.

    Raises:
        ValueError: an error is NaN or infinite; the maximum would hide a NaN.
    """
    error = abs(error)
    if not np.isfinite(error).all():
        raise ValueError("error: expected finite values, got NaN or infinity")
    return float(np.max(np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0).astype(EXACT), where=bound > 0)))
