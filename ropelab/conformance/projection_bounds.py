"""Derive how far the projection with a rotation, and its gradient, may be from exact arithmetic; it continues `bounds`.

With the hidden states x, the weight W and the bias b, `ropelab.qkv_rope` computes ``R (x W^T + b)``. A feature of q or
k goes through these roundings; "pass" and "product" are the paths of `ropelab.call.projection`::

    pass:     store(R store(compute(x W^T + b)))
    product:  store(R compute(x W^T + b))

The gradient has the roundings of ``dqkv = store(R^T g)``, ``dx = store(compute(dqkv W))``,
``dW = store(compute(dqkv^T x))`` and ``db = store(compute(sum of dqkv))``. The bounds exclude overflow, products in
TF32, and partial sums that a library rounds to the dtype of x
(``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ropelab.conformance.bounds import EXACT, NO_ROUNDING, REFERENCE, Arithmetic, inexact_rotation_bound


def product_bound(
    a: np.ndarray,
    b: np.ndarray,
    arithmetic: Arithmetic,
    *,
    a_error: np.ndarray | float = 0.0,
    added: np.ndarray | float = 0.0,
    added_error: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Return the largest error of ``store(compute(a b + added))``, elementwise.

    A sum of n products and of ``added``, in any order, passes each of its terms through at most n + 1 roundings
    (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1). Tensor cores truncate their sums, so
    a rounding has up to two units u (Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science
    2021, section 4)::

        |fl(a' b + added') - (a b + added)| <= D + ((1 + 2u)^(n + 1) - 1) (|a'| |b| + |added'|) + (n + 1) e =: E
        D = a_error |b| + added_error
        |store(...) - (a b + added)| <= E + unit_store (|a b + added| + E) + underflow_store

    Args:
        a, b: the exact factors, ``EXACT``, ``[..., n]`` and ``[n, m]``.
        arithmetic: the roundings of the function; the product computes in ``arithmetic.compute``.
        a_error: the largest error of each element of ``a``.
        added, added_error: what is added to the product, which broadcasts against it, and its largest error.
    """
    terms = a.shape[-1] + 1
    growth = (1 + 2 * EXACT(arithmetic.compute.unit)) ** terms - 1 + terms * REFERENCE.unit
    passed_on = (np.zeros_like(a) + a_error) @ abs(b) + added_error
    magnitude = (abs(a) + a_error) @ abs(b) + abs(added) + added_error
    error = passed_on + growth * magnitude + terms * arithmetic.compute.underflow
    return error + arithmetic.store.of(abs(a @ b + added) + error)


def projected_pair_bound(
    x: np.ndarray,
    weights: tuple[np.ndarray, np.ndarray],
    biases: tuple[np.ndarray, np.ndarray],
    c: np.ndarray,
    s: np.ndarray,
    arithmetic: Arithmetic,
    *,
    rounds_product: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest errors of a pair of features that a projection makes and a rotation turns, elementwise.

    Args:
        x: the hidden states, ``EXACT``, ``[tokens, K]``.
        weights, biases: the rows of both members of the pairs, ``EXACT``, ``[pairs, K]``, and their biases ``[pairs]``.
        c, s: the exact cosine and sine, ``EXACT``, which broadcast against ``[tokens, pairs]``.
        arithmetic: the roundings of the function.
        rounds_product: the product is stored before the rotation (path "pass"); otherwise it is not ("product").
    """
    before = arithmetic if rounds_product else replace(arithmetic, store=NO_ROUNDING)
    members = [(x @ w.T + b, product_bound(x, w.T, before, added=b)) for w, b in zip(weights, biases, strict=True)]
    (y0, d0), (y1, d1) = members
    return inexact_rotation_bound(y0, y1, d0, d1, c, s, arithmetic)
