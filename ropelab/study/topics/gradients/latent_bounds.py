"""Derive how far the gradient of a shared key may be from exact arithmetic; it continues `bounds`.

In multi-head latent attention all heads share the part k_pe of the key that rotates. With the gradient g_h of head h::

    dk_pe = store(R^T S),   S = compute(sum over h of g_h)

`ropelab.assemble_mla_kv` adds in compute precision: head h joins lane ``h mod 16``, and the lanes are then added in
neighbouring pairs. The bounds exclude overflow.
"""

from __future__ import annotations

from math import ceil, log2

import numpy as np

from ropelab.conformance.bounds import EXACT, REFERENCE, Arithmetic, inexact_rotation_bound

LANES = 16


def additions(heads: int) -> int:
    """The largest number of additions that round and that a head passes: the additions of its lane, and one for each
    level.

    The first addition to a lane adds to zero and is exact.
    """
    return max(0, ceil(heads / LANES) - 1) + int(log2(LANES))


def shared_gradient_bound(
    g0: np.ndarray,
    g1: np.ndarray,
    c: np.ndarray,
    s: np.ndarray,
    arithmetic: Arithmetic,
    angle_error: float | np.ndarray = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest error of the pair ``dk_pe = R^T (sum over h of g_h)``, elementwise.

    An addition of floating-point numbers has no underflow. With n additions, the unit u and ``A = sum over h of |g_h|``
    the sum is off by at most (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2)::

        |S' - S| <= ((1 + u)^n - 1) A =: D

    The rotation of a pair that is off by D errs as in `bounds.inexact_rotation_bound`.

    Args:
        g0, g1: the members of each pair of the gradients of the heads, ``EXACT``, ``[..., heads, pairs]``.
        c, s: the exact cosine and sine of the rotation of the key, ``EXACT``, which broadcast against ``[..., pairs]``.
        arithmetic, angle_error: as for `bounds.rotation_bound`.
    """
    unit = EXACT(arithmetic.compute.unit)
    growth = (1 + unit) ** additions(g0.shape[-2]) - 1 + g0.shape[-2] * REFERENCE.unit
    d0, d1 = (growth * abs(g).sum(-2) for g in (g0, g1))
    s0, s1 = g0.sum(-2), g1.sum(-2)
    return inexact_rotation_bound(s0, s1, d0, d1, c, -s, arithmetic, angle_error)
