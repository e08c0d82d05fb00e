"""The bounds of computed sines: their series by intervals, their reduction by Z3, and how near the kernel comes."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from mpmath import mp

pytest.importorskip("z3")

from ropelab.angles.frequencies import inverse_frequencies  # noqa: E402
from ropelab.angles.table_free import fixed_point  # noqa: E402
from ropelab.bench.exact_waves import ulps  # noqa: E402
from ropelab.kernels import angles_torch, angles_triton  # noqa: E402
from ropelab.study.topics.proofs import reduction, series  # noqa: E402
from ropelab.study.topics.proofs.planted import altered  # noqa: E402

ROWS = fixed_point(inverse_frequencies(16, 10_000.0))


@pytest.mark.parametrize("backend", series.FUNCTIONS)
def test_the_series_is_within_an_ulp_on_its_whole_range(backend):
    found = series.bounds(series.FUNCTIONS[backend])
    assert found["sine"] < 0.92 and found["cosine"] < 0.58 and found["sine at head 0"] < 0.55


def test_the_bound_of_the_series_is_near_its_largest_error():
    x = torch.rand(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.pi / 4
    head = torch.round(x * 4096) / 4096
    sine, cosine = angles_torch.sine_and_cosine(head.float(), (x - head).float())
    bound = series.bounds(angles_torch.sine_and_cosine)
    assert 0.8 * bound["sine"] < ulps(sine, x.sin()) <= bound["sine"]
    assert 0.8 * bound["cosine"] < ulps(cosine, x.cos()) <= bound["cosine"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(head + x) * tail", "head * tail"),
        ("(1.0 - leading) - 0.5 * exact", "0.0 * exact"),
        ("0.5 * rest", "0.0 * rest"),
    ],
)
def test_a_wrong_series_exceeds_an_ulp(old, new):
    assert max(series.bounds(altered(angles_torch.sine_and_cosine, old, new), 2).values()) > 1


def test_another_coefficient_exceeds_the_bound(monkeypatch):
    monkeypatch.setattr(angles_torch, "SINE", (*angles_torch.SINE[:2], -1 / 5000, angles_torch.SINE[3]))
    assert series.bounds(angles_torch.sine_and_cosine, 2)["sine"] > 1


def test_rounding_covers_every_float32_between_two_numbers():
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    error = (x.float().double() - x).abs().numpy()
    assert (error <= series.rounding(x.numpy() * 0.999, x.numpy() * 1.001)).all()
    assert (error <= series.rounding(x.numpy(), x.numpy())).all()


@pytest.mark.parametrize("backend", series.FUNCTIONS)
def test_the_reduction_is_exact_for_every_position(backend):
    assert reduction.reduction_is_exact(backend)
    assert all(reduction.turns_are_exact(backend, high, low) for high, low, _ in ROWS.tolist())


@pytest.mark.parametrize(
    ("old", "new"),
    [("x + 2**48", "x + 2**47"), (">> 31) + ((rest_tail", ">> 30) + ((rest_tail"), ("2**31 - 1", "2**30 - 1")],
)
def test_a_wrong_reduction_is_found(monkeypatch, old, new):
    monkeypatch.setattr(angles_torch, "cos_sin", altered(angles_torch.cos_sin, old, new))
    assert not reduction.reduction_is_exact("torch")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [(angles_torch, "(count * low) >> 32", "(count * low) >> 31"), (angles_triton, "<< 32", "<< 31")],
)
def test_wrong_turns_are_found(monkeypatch, module, old, new):
    wrong = altered(module.cos_sin, old, new)
    monkeypatch.setattr(module, "cos_sin", wrong if module is angles_torch else SimpleNamespace(fn=wrong))
    backend = "torch" if module is angles_torch else "Triton"
    assert not reduction.turns_are_exact(backend, *ROWS[3, :2].tolist())


def test_the_position_nearest_to_a_quarter_turn():
    """The continued fraction finds the smallest distance, here among few positions; and the error there is bounded."""
    for high, low, _ in ROWS.tolist():
        turns = Fraction(4 * ((high % 2**64) * 2**32 + low), 2**96)
        every = min(abs(p * turns - round(p * turns)) for p in range(1, 3000))
        assert reduction.nearest_to_a_quarter(high, low, 3000) == every


def test_the_sine_nearest_to_zero_is_off_by_more_than_an_ulp():
    """Of all int32 positions for a base of 10,000: the angle's error of 2^-59 rad shows, and the bound covers it."""
    position, pair = 1_321_034_308, 10
    rows = fixed_point(inverse_frequencies(128, 10_000.0))[pair : pair + 1]
    high, low, _ = rows[0].tolist()
    found = [x.item() for x in angles_torch.cos_sin(torch.tensor([position]), rows)]
    with mp.workprec(200):
        angle = 2 * mp.pi * position * mp.mpf((high % 2**64) * 2**32 + low) / mp.mpf(2) ** 96
        right, error = min(((abs(f(angle)), abs(f(angle) - x)) for f, x in zip((mp.cos, mp.sin), found, strict=True)))
        off = float(error / mp.mpf(2) ** (mp.frexp(right)[1] - 24))
    assert 2 < off <= 0.55 + float(reduction.LIMIT) * 2.0**-61 / (2.0**-24 * float(right))
