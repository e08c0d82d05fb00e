"""The pass from the projections to attention: its bytes, ceilings, proofs, bounds and figures."""

import pandas as pd
import pytest

pytest.importorskip("seaborn")

from ropelab.bench import records  # noqa: E402
from ropelab.study.topics.algebra import is_zero  # noqa: E402
from ropelab.study.topics.one_pass import derivation, figures, findings, laws, rounding, traffic  # noqa: E402
from ropelab.study.topics.one_pass.findings import ONE, SEPARATE, VLLM  # noqa: E402


def test_bytes_of_a_token():
    """48 heads of 128 features are read; 32 heads of q and 16 heads of k and v are written."""
    frame = traffic.bytes_moved(32, 8, 128)
    one_pass = frame.loc["norm, rotation and cache"]
    assert one_pass["16-bit cache, kB"] == 2 * 128 * (48 + 32 + 16) / 1000
    assert one_pass["8-bit cache, kB"] == 2 * 128 * (48 + 32 + 8) / 1000
    assert frame["16-bit cache, passes"].tolist() == pytest.approx([2.0, 7 / 6, 1.0])


def test_ceilings_depend_on_the_heads_that_share_a_key():
    """With r heads of q for a head of k, two launches move 2r + 6 heads, and one pass moves 2r + 4 heads."""
    frame = traffic.ceilings().set_index(["ratio", "cache", "launches"]).ceiling
    for ratio in traffic.RATIOS:
        two = frame[ratio, 16, "norm and rotation; cache"]
        assert two == pytest.approx((2 * (ratio + 1) + 2 + 2) / (ratio + 2 + ratio + 2))
        assert frame[ratio, 8, "norm; rotation; cache"] > frame[ratio, 16, "norm; rotation; cache"]
    assert "1.17 times as fast as two launches" in findings.ceiling_sentence(traffic.ceilings())


def test_the_identities_hold_and_a_false_one_is_refused():
    for difference in (derivation.forward_identities() | derivation.gradient_identities()).values():
        assert is_zero(difference)
    assert not is_zero(derivation.order_matters())


def test_bounds_hold_and_are_reached():
    norms, stages = rounding.norms(), rounding.stages(20_000)
    assert (norms.fraction <= 1).all() and (norms.fraction > 0.8).all() and norms.fraction.iloc[-1] > 0.98
    assert (stages.fraction <= 1).all() and (stages.fraction > 0.95).all()


def test_laws_and_faults_of_a_smoke_run():
    kept = laws.kept(smoke=True)
    assert (kept.status == "pass").all() and list(kept.law) == list(laws.FEW)
    caught = laws.faults(smoke=True)
    assert caught.named.all() and (caught["laws that it breaks"] != "none").all()


def made_up(**speed: float) -> pd.DataFrame:
    """A record whose copy of 4,096 tokens takes 25 us; ``speed`` is the fraction of the copy of each contender."""
    names = {"one": ONE, "separate": SEPARATE, "vllm": VLLM, "copy": "copy: copy_"}
    rows = []
    for layout in ("split_half", "interleaved"):
        for tokens, copy in ((1, 1.4), (4096, 25.0)):
            rows += [
                {"operation": "QK norm, rotation, cache", "tokens": tokens, "q_heads": 32, "k_heads": 16,
                 "head_dim": 128, "dtype": "bfloat16", "layout": layout, "bytes": 24576 * tokens,
                 "contender": names[name], "status": "ok", "median_us": copy / fraction,
                 "fraction_of_copy": fraction}
                for name, fraction in {**speed, "copy": 1.0}.items()
            ]  # fmt: skip
    return pd.DataFrame(rows)


def titles(figure) -> str:
    return figure.get_suptitle() + " ".join(ax.get_title() for ax in figure.axes)


def test_the_figure_without_the_one_launch_says_that_it_is_not_measured():
    frame = made_up(separate=0.5, vllm=0.25)
    assert "not measured yet" in titles(figures.roof(frame)) and findings.faster_sentence(frame) == ""
    assert list(findings.times(frame).columns) == [SEPARATE, VLLM, findings.COPY]


def test_the_figure_with_the_one_launch():
    frame = made_up(separate=0.5, vllm=0.25, one=0.95)
    said = titles(figures.roof(frame))
    assert "one launch runs at 0.95 of the best copy" in said and "interleaved" in said
    assert "1.90 times as fast as ropelab's separate launches and 3.80 times as fast as vLLM's" in said.replace(
        "\n", " "
    )
    assert findings.times(frame)[ONE].iloc[1] == pytest.approx(25 / 0.95)
    few = frame[frame.tokens == 1]
    assert "No case" in findings.roof_sentence(few)


def test_the_figure_of_the_records():
    for gpu in records.gpus(records.MEASUREMENTS):
        try:
            frame = records.load(findings.RECORD, records.MEASUREMENTS / gpu).frame
        except records.Unusable:
            continue
        assert titles(figures.roof(frame))
    assert "at most" in figures.ceilings(traffic.ceilings()).axes[0].get_ylabel()
