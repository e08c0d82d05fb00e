"""Bounds that follow every operation hold for QK norm and its gradients, and reject faults."""

import numpy as np
import pytest
import torch

from ropelab.conformance.bounds import EXACT, Rounding
from ropelab.conformance.inexact import Inexact
from ropelab.study.topics.gradients.norm_evidence import norm_evidence

FLOAT32 = Rounding.nearest(torch.float32)


@pytest.fixture(scope="module")
def evidence():
    return norm_evidence()


def test_norm_and_gradients_are_within_their_bounds(evidence):
    assert (evidence.fraction <= 1).all() and evidence.dtype.nunique() == 4
    assert (evidence[evidence.dtype.isin(["bfloat16", "float16"])].fraction > 0.5).all()


@pytest.mark.parametrize(("wrong", "law"), [("forward", "∂L/∂x"), ("no mean", "∂L/∂x"), ("last row", "∂L/∂w")])
def test_a_wrong_gradient_exceeds_its_bound(wrong, law):
    found = norm_evidence(("float32",), wrong=wrong)
    assert (found[found.law == law].fraction > 100).all()


def test_operations_of_float32_are_within_their_bounds():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 33)).astype(np.float32) for _ in range(2))
    x, y = (Inexact.exact(t.astype(EXACT), FLOAT32) for t in (a, b))
    near = Inexact((a.astype(EXACT) ** 2).sum(1, keepdims=True), 0, FLOAT32)
    cases = [
        (x + y, a + b), (x - y, a - b), (x * y, a * b), ((x * y) + x, a * b + a), (x.divided(3), a / np.float32(3)),
        ((x * y).sum(1), np.add.accumulate(a * b, axis=1, dtype=np.float32)[:, -1:]),
        (near.rsqrt(4), 1 / np.sqrt(near.value.astype(np.float32))),
    ]  # fmt: skip
    for bound, found in cases:
        assert (abs(found.astype(EXACT) - bound.value) <= bound.error).all()
        assert (abs(found.astype(EXACT) - bound.value) > 0).any(), "without a rounding the case says nothing"


def test_a_root_of_what_may_be_zero_is_refused():
    with pytest.raises(ValueError, match="rsqrt: expected numbers above their error"):
        Inexact(np.ones(1, EXACT), np.ones(1, EXACT), FLOAT32).rsqrt(4)
