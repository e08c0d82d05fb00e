"""The pass from the projections to attention: its bytes, ceilings, proofs, bounds and figures."""

import pytest

pytest.importorskip("seaborn")

from ropelab.conformance import CACHE_LAWS  # noqa: E402
from ropelab.study.topics.algebra import is_zero  # noqa: E402
from ropelab.study.topics.one_pass import derivation, laws, rounding, traffic  # noqa: E402
from tests.site.cells import run  # noqa: E402


def test_bytes_of_a_token():
    """48 heads of 128 features are read; 32 heads of q and 16 heads of k and v are written."""
    frame = traffic.bytes_moved(32, 8, 128)
    one_pass = frame.loc["norm, rotation and cache"]
    assert one_pass["16-bit cache, kB"] == 2 * 128 * (48 + 32 + 16) / 1000
    assert one_pass["8-bit cache, kB"] == 2 * 128 * (48 + 32 + 8) / 1000
    assert frame["16-bit cache, passes"].tolist() == pytest.approx([2.0, 7 / 6, 1.0])


def test_ceilings_depend_on_the_heads_that_share_a_key():
    """With r heads of q for a head of k, two launches move 2r + 6 heads, and one pass moves 2r + 4 heads."""
    for ratio in (1, 2, 4, 7, 8, 16):
        three, two, one = traffic.bytes_moved(ratio, 1, 128)["16-bit cache, passes"]
        assert (two, one) == (pytest.approx((2 * (ratio + 1) + 2 + 2) / (ratio + 2 + ratio + 2)), 1)
        assert traffic.bytes_moved(ratio, 1, 128)["8-bit cache, passes"].iloc[0] > three


def test_the_identities_hold_and_a_false_one_is_refused():
    for difference in (derivation.forward_identities() | derivation.gradient_identities()).values():
        assert is_zero(difference)
    assert not is_zero(derivation.order_matters()) and not is_zero(derivation.shifted_scores())


def test_bounds_hold_and_are_reached():
    norms, stages = rounding.norms((64, 128), rows=32), rounding.stages(16)
    assert (
        (norms.fraction <= 1).all() and (norms.fraction > 0.1).all() and (norms["own order"] < norms["any order"]).all()
    )
    assert len(stages) == 13 and (stages.fraction <= 1).all() and (stages.fraction > 0.9).all()


def test_laws_of_a_smoke_run(monkeypatch):
    names = run(monkeypatch, "07", "laws-table", smoke=True)
    assert (names.kept.status == "pass").all() and list(names.kept.law) == list(laws.FEW)
    every = [*laws.variants(laws.FEW)]
    assert [row["kept"] for row in every] == [row["laws"] for row in every] == [len(laws.FEW)] * len(laws.VARIANTS)
    assert set(names.ADDED) <= set(CACHE_LAWS)
