"""Pairs of bfloat16 against the correctly rounded rotation: all of them on a GPU, a sample here."""

import torch
from mpmath import mp

from ropelab.bench import all_pairs
from ropelab.bench.studies import STUDIES
from ropelab.kernels import use_backend
from ropelab.layout.pairing import LAYOUTS


def test_a_sample_is_right_within_the_bound():
    on_gpu = torch.cuda.is_available()
    with use_backend("triton" if on_gpu else "torch"):  # the interpreter cuts off where a GPU rounds
        frame = all_pairs.all_pairs(smoke=True, device="cuda" if on_gpu else "cpu")
    assert list(frame.layout) == list(LAYOUTS) and (frame.fraction <= 1).all() and (frame.special == 0).all()
    assert (frame.right + frame.neighbour + frame.undecided <= frame.results).all()
    assert (frame[["position", "plane"]].apply(tuple, axis=1) == list(all_pairs.ANGLES[:2])).all()
    assert (frame.right > 0.9999 * frame.results).all() and frame.right[0] == frame.results[0]


def test_rounds_as_exact_arithmetic():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(-140, 128, (500,))
    middles = torch.tensor(
        [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-40, 2.0**-134, 3 * 2.0**-134, 0.0, 3.4e38]
    )
    x = torch.cat((x, middles.double(), torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)))
    nearest, unit, _ = all_pairs.rounded(x)
    for value, found, step in zip(x.tolist(), nearest.tolist(), unit.tolist(), strict=True):
        if abs(value) < 3.39e38:
            with mp.workprec(200):
                assert found == float(mp.nint(mp.mpf(value) / step) * step)
    assert nearest[-3:].isinf().all(), "3.4e38 is beyond the largest number and its half unit"
    assert torch.equal(nearest[:-3].bfloat16().double(), nearest[:-3])


def test_wrong_tables_exceed_the_bound(monkeypatch):
    """The reference takes its angles from the call, and the kernel takes tables: here those of another angle."""
    rotate = all_pairs.apply_rope
    x = torch.randn(2, 1, 8, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    with use_backend("torch"):
        right = list(all_pairs.compared(*x, 0.6, 0.8, "split_half"))
    assert all(member["fraction"] <= 1 for member in right)
    for wrong in (lambda q, cos, sin, **how: rotate(q, cos=cos, sin=-sin, **how),
                  lambda q, cos, sin, **how: rotate(q, cos=cos * (1 + 2**-7), sin=sin, **how)):  # fmt: skip
        monkeypatch.setattr(all_pairs, "apply_rope", wrong)
        assert any(member["fraction"] > 1 for member in all_pairs.compared(*x, 0.6, 0.8, "split_half"))


def test_is_a_study_of_the_records():
    assert not STUDIES["all_pairs"].timed
