"""How far a rotated pair may be from the truth: bounds derived from the arithmetic, not tuned to the results.

Every rounding obeys the standard model (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
sections 2.2 and 2.8): ``fl(z) = z (1 + d) + e`` with ``|d| <= unit``, ``|e| <= underflow``. One rotated
feature is::

    store(compute(compute(x0 * table(c)) - compute(x1 * table(s))))

so the table is rounded once, each product once, the difference once and the stored result once. A fused
multiply-add leaves out one of these roundings, which only shrinks the error. Overflow is excluded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# The widest float that NumPy has: 64-bit significand on x86, 113 on AArch64 Linux, 53 on some systems.
# Whatever it has, ``REFERENCE`` enters the bounds, so they hold everywhere.
EXACT = np.longdouble


@dataclass(frozen=True)
class Rounding:
    """Error of one rounding: ``unit * |z| + underflow``."""

    unit: float
    underflow: float

    @classmethod
    def nearest(cls, dtype: torch.dtype) -> Rounding:
        """Round to nearest: half a unit in the last place."""
        info = torch.finfo(dtype)
        return cls(info.eps / 2, info.tiny * info.eps / 2)

    @classmethod
    def truncating(cls, dtype: torch.dtype) -> Rounding:
        """Drop the surplus bits: a whole unit in the last place."""
        info = torch.finfo(dtype)
        return cls(info.eps, info.tiny * info.eps)

    def of(self, magnitude: np.ndarray) -> np.ndarray:
        """Largest error of rounding any number of at most this magnitude."""
        return self.unit * magnitude + self.underflow


NO_ROUNDING = Rounding(0.0, 0.0)
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
        """What ``ropelab.apply_rope`` promises for tensors of ``dtype`` and tables of ``table_dtype(dtype)``.

        Maths in float32 or wider. Triton's interpreter stores bfloat16 by truncation, a GPU to nearest.
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
    """dtype of the cos/sin tables used with tensors of ``dtype``, which is also the dtype of the maths."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(x: torch.Tensor) -> np.ndarray:
    """The same values in the widest float there is (``EXACT``), where sums and products are all but exact."""
    return x.detach().cpu().double().numpy().astype(EXACT)


def rotate_exactly(x0, x1, c, s) -> tuple[np.ndarray, np.ndarray]:
    """The definition on arrays of ``EXACT``, against which even a float64 result has a visible error."""
    return x0 * c - x1 * s, x1 * c + x0 * s


def rotation_bound(
    x0: np.ndarray,
    x1: np.ndarray,
    c: np.ndarray,
    s: np.ndarray,
    arithmetic: Arithmetic,
    angle_error: float | np.ndarray = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Largest possible error of the rotated pair ``(y0, y1)``, elementwise.

    With ``M0 = |x0 c| + |x1 s|``, table error ``t``, compute unit ``u``, underflow ``e``, before the store::

        |z0 - y0| <= ((1 + t)(1 + u)^2 - 1) M0 + (1 + u)^2 a (|x0| + |x1|) + 2 (1 + u) e =: E
        |store(z0) - y0| <= E + unit_store (|y0| + E) + underflow_store

    Args:
        x0, x1: the pair as read from memory, ``EXACT``; broadcast with
        c, s: the cosine and sine meant, ``EXACT``, before they were rounded into a table.
        angle_error: ``a``, an absolute error of c and s (rad) beyond the table's rounding.

    Returns:
        Bounds for ``y0`` and ``y1``. The bound for their rotation by the inverse is the same with ``-s``.
    """
    u, e = arithmetic.compute.unit, arithmetic.compute.underflow
    relative = (1 + EXACT(arithmetic.table.unit)) * (1 + EXACT(u)) ** 2 - 1 + 2 * REFERENCE.unit
    absolute = (1 + u) ** 2 * (angle_error + arithmetic.table.underflow) * (abs(x0) + abs(x1)) + 2 * (1 + u) * e

    def stored(magnitude, y):
        error = relative * magnitude + absolute
        return error + arithmetic.store.of(abs(y) + error)

    y0, y1 = rotate_exactly(x0, x1, c, s)
    return stored(abs(x0 * c) + abs(x1 * s), y0), stored(abs(x1 * c) + abs(x0 * s), y1)


def table_angle_error(angles: np.ndarray) -> np.ndarray:
    """Absolute error of a cosine or sine computed in float64 at the rounded angle ``p * theta`` (rad).

    The product is off by ``u |angle|``, the library cosine by less than one unit in the last place, 2u.
    """
    u = Rounding.nearest(torch.float64).unit + REFERENCE.unit
    return u * (abs(angles) + 2)


def fraction(error: np.ndarray, bound: np.ndarray) -> float:
    """Largest ``|error| / bound``; at most 1 if the bound holds, and near 1 if the bound is tight.

    Raises:
        ValueError: an error that is not a number, which no maximum would show.
    """
    error = abs(error)
    if not np.isfinite(error).all():
        raise ValueError("error: expected finite values, got NaN or infinity")
    return float(np.max(np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0).astype(EXACT), where=bound > 0)))
