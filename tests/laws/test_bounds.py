"""The derived bounds hold for `apply_rope` in every dtype, are tight, and reject faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import ropelab
from ropelab.conformance import bounds
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.topics.gradients import bound_evidence, latent_evidence

CASE = bound_evidence.Case(seq_len=4)


@pytest.fixture(scope="module")
def rotary():
    return bound_evidence.rotary_evidence(CASE)


@pytest.fixture(scope="module")
def gradients():
    return bound_evidence.gradient_evidence(CASE)


def test_every_law_holds_in_every_dtype_and_layout(rotary, gradients):
    for evidence in (rotary, gradients):
        assert (evidence.fraction <= 1).all(), evidence[evidence.fraction > 1]
        assert set(evidence.layout) == set(LAYOUTS) and evidence.dtype.nunique() == len(bound_evidence.DTYPES)


def test_the_bounds_are_tight(rotary, gradients):
    """A bound that the largest error does not come near would prove little."""
    for evidence, law in ((rotary, "definition"), (gradients, "gradient = R(-θ) g")):
        assert (evidence[evidence.law == law].fraction > 0.3).all()


def _shifted(seq_len, *args, **kwargs):
    return tuple(table[1:] for table in ropelab.angles.tables.rotary_table(seq_len + 1, *args, **kwargs))


def _negated(*args, **kwargs):
    cos, sin = ropelab.angles.tables.rotary_table(*args, **kwargs)
    return cos, -sin


@pytest.mark.parametrize("wrong", [_shifted, _negated])
def test_the_reference_is_independent_of_the_librarys_tables(monkeypatch, wrong):
    """The definition makes its angles itself, so wrong tables of the library are errors in every dtype."""
    monkeypatch.setattr(ropelab, "rotary_table", wrong)
    evidence = bound_evidence.rotary_evidence(CASE)
    assert (evidence[evidence.law == "definition"].fraction > 1000).all()
    latent = latent_evidence.latent_evidence((torch.float32,)).set_index("law").fraction
    assert (latent[["key = (k, R pe)", "∂L/∂pe = Rᵀ Σ g"]] > 1000).all(axis=None)


def test_layouts_agree_bit_for_bit(rotary):
    assert (rotary[rotary.law == "layouts agree"].fraction == 0).all()


def test_the_bounds_reject_faults():
    faults = bound_evidence.fault_evidence(replace(CASE, seq_len=256))
    assert (faults.fraction > 1).all(), faults


@pytest.mark.parametrize("dtype", bound_evidence.DTYPES, ids=str)
def test_rounding_is_the_dtypes(dtype):
    """A rounding is off by half a unit in the last place at 1, and by half the smallest subnormal below."""
    nearest = bounds.Rounding.nearest(dtype)
    one, zero = (torch.tensor(value, dtype=dtype) for value in (1.0, 0.0))
    up = torch.nextafter(one, 2 * one) - one
    assert nearest.unit == up.item() / 2
    assert nearest.underflow == torch.nextafter(zero, one).double().item() / 2
    assert bounds.Rounding.truncating(dtype).unit == 2 * nearest.unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_bound_holds_where_results_underflow(dtype):
    """Inputs around the smallest normal number: the relative terms alone would be too small."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 4096, generator=generator) * torch.finfo(dtype).tiny).to(dtype)
    angle = torch.rand(4096, generator=generator, dtype=torch.float64)
    c, s = angle.cos(), angle.sin()
    wide = torch.float32
    y0 = (x[0].to(wide) * c.to(wide) - x[1].to(wide) * s.to(wide)).to(dtype)
    arithmetic = bounds.Arithmetic.of_kernel(dtype, interpreted=False)
    arguments = [bounds.exact(t) for t in (x[0], x[1], c, s)]
    truth, _ = bounds.rotate_exactly(*arguments)
    bound, _ = bounds.rotation_bound(*arguments, arithmetic)
    assert bounds.fraction(bounds.exact(y0) - truth, bound) <= 1
    relative_only = bounds.Arithmetic(
        *(replace(rounding, underflow=0.0) for rounding in (arithmetic.table, arithmetic.compute, arithmetic.store))
    )
    without, _ = bounds.rotation_bound(*arguments, relative_only)
    assert bounds.fraction(bounds.exact(y0) - truth, without) > 1


def test_only_the_interpreter_truncates():
    on_gpu, interpreted = (
        bounds.Arithmetic.of_kernel(torch.bfloat16, interpreted=flag).store for flag in (False, True)
    )
    assert (on_gpu.unit, interpreted.unit) == (2.0**-8, 2.0**-7)


def test_fraction_lets_nothing_pass():
    one = np.ones(3, dtype=bounds.EXACT)
    assert bounds.fraction(np.array([0.5, -2, 0], dtype=bounds.EXACT), one) == 2
    assert bounds.fraction(np.array([0, 1e-30, 0], dtype=bounds.EXACT), 0 * one) == float("inf")
    assert bounds.fraction(0 * one, 0 * one) == 0
    with pytest.raises(ValueError, match="finite"):
        bounds.fraction(np.array([0, np.nan, 0], dtype=bounds.EXACT), one)


def test_changed_tails_are_not_the_definition():
    rotation = bound_evidence.MeasuredRotation.of(CASE, torch.float32, "split_half")
    rotation.outputs[1][..., -1] += 1
    assert bound_evidence.definition(rotation) == float("inf")
