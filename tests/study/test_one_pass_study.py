"""The pass from the projections to attention: its bytes, ceilings, proofs, bounds and figures."""

import pandas as pd
import pytest

pytest.importorskip("seaborn")

from ropelab.bench import records  # noqa: E402
from ropelab.conformance import CACHE_LAWS  # noqa: E402
from ropelab.study.plots.panels import said  # noqa: E402
from ropelab.study.topics.algebra import is_zero  # noqa: E402
from ropelab.study.topics.one_pass import derivation, figures, findings, laws, rounding, traffic  # noqa: E402
from ropelab.study.topics.one_pass.findings import ONE, SEPARATE, VLLM  # noqa: E402
from tests.study.sentences import states  # noqa: E402


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
    assert states(findings.ceiling_sentence(32, 8, 128), 1.17)


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


def test_laws_of_a_smoke_run():
    kept = laws.kept(smoke=True)
    assert (kept.status == "pass").all() and list(kept.law) == list(laws.FEW)
    every = laws.variants(smoke=True)
    assert (every.kept == every.laws).all() and (every.laws == len(laws.FEW)).all()
    assert set(laws.OF_A_CACHE) <= set(CACHE_LAWS)


def made_up(**speed: float) -> pd.DataFrame:
    """A record whose copy of 4,096 tokens takes 25 us; ``speed`` is the fraction of the copy of each contender."""
    names = {"one": ONE, "separate": SEPARATE, "vllm": VLLM, "copy": "copy: copy_"}
    cases = [(32, 8, "split_half", "bfloat16", (1, 64, 4096)), (28, 4, "split_half", "bfloat16", (4096,)),
             (32, 8, "interleaved", "float8_e4m3fn", (4096,))]  # fmt: skip
    rows = []
    for q_heads, k_heads, layout, cache, several in cases:
        for tokens in several:
            copy = 1.4 + 25 * tokens / 4096
            rows += [
                {"operation": "QK norm, rotation, cache", "tokens": tokens, "q_heads": q_heads,
                 "k_heads": 2 * k_heads, "head_dim": 128, "dtype": "bfloat16", "layout": layout,
                 "bytes": 24576 * tokens, "contender": names[name], "status": "ok", "median_us": copy / fraction,
                 "fraction_of_copy": fraction, "cache": cache, "q_out": "bfloat16"}
                for name, fraction in {**speed, "copy": 1.0}.items()
            ]  # fmt: skip
    return pd.DataFrame(rows)


def test_figures_with_the_one_launch():
    frame = made_up(separate=0.5, vllm=0.25, one=0.95)
    assert states(said(figures.cases(frame)), 4096, 0.95) and states(said(figures.roof(frame)), 0.95)
    assert states(findings.roof_sentence(frame), 3, 3, 0.9)
    assert states(findings.faster_sentence(frame), 1.90, 3.80)
    assert not states(findings.roof_sentence(frame[frame.tokens == 1]), 1, 1)


def test_the_figures_of_the_records():
    for gpu in records.gpus(records.MEASUREMENTS):
        try:
            frame = records.load(findings.RECORD, records.MEASUREMENTS / gpu).frame
        except records.Unusable:
            continue
        assert said(figures.roof(frame)) and said(figures.cases(frame))
