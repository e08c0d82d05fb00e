"""TransformerEngine#3057: strategies, measurements, findings and the chapter."""

import itertools
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from ropelab import PackedSequences
from ropelab.bench import records
from ropelab.bench.unavailable import Unavailable
from ropelab.interop.transformer_engine import apply_rotary_pos_emb
from ropelab.kernels import INTERPRETED
from ropelab.study.documents import transformer_engine as te
from ropelab.study.engine.ledger import ledger
from ropelab.study.engine.sources import facts
from ropelab.study.shown import Shown
from tests.interpreter import any_address
from tests.site.cells import run
from tests.study.conftest import slower
from tests.study.sentences import states
from tests.support import change

OLD, NEW = te.MODELS.names
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs a machine without a GPU: test_the_studies_run has it")


# ------------------------------------------------------------------------------------------------- made-up records

DEAD_NS, LIVE_US, SEARCH_US = 0.6, 14e-3, 0.002e-3


NOT_INSTALLED = "not run: transformer-engine-cu13 not installed"


def kernels(dead_ns=DEAD_NS, search_us=SEARCH_US, summed=1.3, package=None):
    """A record as te.kernels() makes it, by a model of the costs: forward and backward.

    The pull request's file was not compiled. TransformerEngine 2.20 is not installed, or takes ``package`` times as
    long as the faster grid.
    """
    rows = []
    for case in te.kernel_cases():
        blocks = case.freqs_len * case.packing.n_seqs
        live = LIVE_US * case.tokens
        spent = {
            OLD: live + 2e-3 * dead_ns * (blocks - case.tokens),
            NEW: live * (1 + search_us * 1000 * np.log2(case.packing.n_seqs)),
            "ropelab": 0.6 * live,
            "flash_attn": 0.6 * live + 2e-3 * 1.2 * max(0, case.packing.longest * case.packing.n_seqs - case.tokens),
            te.INTEROP: 0.7 * live,
            **dict.fromkeys((*te.CODE.names, *te.PACKAGES.names), np.nan),
        }
        if package:
            spent[te.PACKAGES.new] = package * min(spent[OLD], spent[NEW])
        for step, name in itertools.product(case.steps, case.contenders):
            us = spent[name] + (summed - 1) * live * (step == te.SUMMED)
            rows.append(case.columns | {
                "step": step, "contender": name, "status": NOT_INSTALLED if np.isnan(us) else "ok",
                "median_us": us, "q20_us": us, "q80_us": us,
                "samples": 5, "same_bits": True if name == NEW else np.nan,
            })  # fmt: skip
    return pd.DataFrame(rows)


def layers(dead_ns=0.62, layer_ms=22.0, rope_ms=1.4):
    rows = []
    for n, name in itertools.product(te.N_SEQS, (OLD, NEW, "ropelab", te.WITHOUT)):
        alone = {OLD: rope_ms + 4e-6 * dead_ns * 65536 * (n - 1), NEW: rope_ms, "ropelab": 0.7}.get(name, 0)
        for what, ms in ((te.LAYER, layer_ms + alone), (te.ALONE, alone)):
            if ms:
                rows.append({
                    "what": what, "n_seqs": n, "longest": -(-65536 // n), "tokens": 65536, "freqs_len": 65536,
                    "contender": name, "status": "ok", "median_us": 1000 * ms, "q20_us": 1000 * ms,
                    "q80_us": 1000 * ms, "samples": 3,
                })  # fmt: skip
    return pd.DataFrame(rows)


def past(**changes):
    outcomes = {OLD: "left as allocated", "token-linear, as first proposed": "reads past freqs",
                "token-linear, with the guard": "left as allocated", "ropelab": "zeros"}  # fmt: skip
    frame = pd.DataFrame({"contender": list(outcomes), "rows": 3, "outcome": list(outcomes.values())})
    return change(frame, **changes)


def of_pair(frame, pair):
    """The models' rows under the names of another pair, whose own rows are gone."""
    if "grids" in frame:
        return frame.assign(grids=" and ".join(pair.names))
    if "contender" not in frame:
        return frame
    frame = frame[~frame.contender.isin(pair.names)]
    names = {OLD: pair.old, NEW: pair.new, te.UNGUARDED: te.CODE.new}
    return frame.assign(contender=frame.contender.replace(names))


H200, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
"""The record of the H200 has the pull request's file, the packages and the models; the H100's record has the models."""


def recorded(name, gpu=H200):
    return records.load(name, records.Selection(records.MEASUREMENTS, gpu)).frame


def without(frame, *pairs):
    """The rows of all contenders but those of these pairs."""
    if "grids" in frame:
        return frame[~frame.grids.isin([" and ".join(pair.names) for pair in pairs])]
    return frame[~frame.contender.isin([name for pair in pairs for name in pair.names])]


def alone(name, pair):
    """The record of the H200 without the rows of the other pairs."""
    return without(recorded(name), *(other for other in te.PAIRS if other != pair))


def test_the_dispatch_is_that_of_the_source():
    """The heuristics of data/sources.toml, at either side of their thresholds."""
    for fact in map(te._dispatch, facts("dispatch", "transformer_engine")):
        n, cp_size, tokens = max(2, fact["least_sequences"]), 2, 65536
        blocks = fact["blocks_per_token"] * (cp_size if fact["times_cp_size"] else 1) * tokens
        rows = blocks // n + fact["more_than"]
        chosen = [te.choose(n, rows - less, tokens, cp_size, version=fact["version"]) for less in (0, 1)]
        assert chosen == ["linear", "legacy"], fact
        if fact["least_sequences"] > 1:
            assert te.choose(n - 1, 9 * tokens, tokens, version=fact["version"]) == "legacy"
        assert te.VARIABLES[fact["version"]] == fact.get("variable")


def test_the_published_ratios_follow_from_the_published_times():
    for table in (te.published_a(), te.published_b()):
        assert (table.speedup - table.stated_speedup).abs().max() < 0.003
    ns = te.published_b().set_index("n_seqs").ns_per_dead_block
    assert ns.loc[128:].between(0.64, 0.66).all() and np.isnan(ns[1])


# ------------------------------------------------------------------------------------------- strategies and heuristics


def test_the_environment_variable(monkeypatch):
    for value, expected in (("0", ["legacy"] * 2), ("1", ["linear"] * 2), ("2", ["legacy", "linear"])):
        monkeypatch.setenv(te.OVERRIDE, value)
        monkeypatch.setenv(te.VARIABLES["renamed"], value)
        for version in ("first", "reviewed", "renamed"):
            chosen = [te.choose(n, 65536, 65536, version=version) for n in (2, 128)]
            assert chosen == expected
        assert [te.choose(n, 65536, 65536, version="merged") for n in (2, 128)] == ["legacy", "linear"]
    monkeypatch.setenv(te.OVERRIDE, "1")
    assert te.choose(2, 65536, 0) == "legacy"
    with pytest.raises(ValueError, match="version: expected one of .*, got 'last'"):
        te.choose(1, 1, 1, version="last")


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("make", [te.remainder_last, te.balanced, te.with_empty])
def test_packings_can_be_sharded(make, cp_size):
    multiple = 2 * cp_size if cp_size > 1 else 1
    packing = make(7, 128, multiple)
    assert packing.tokens == 128 and packing.n_seqs == 7
    assert all(length % multiple == 0 for length in packing.lengths)
    for rank in range(cp_size):
        expected = PackedSequences(packing.cu_seqlens("cpu"), 128 // cp_size, cp_size=cp_size, cp_rank=rank).positions
        assert torch.equal(packing.positions(cp_size, rank), expected.long())


def test_packings_are_the_documents():
    b, a = te.remainder_last(2401), te.balanced(2401)
    assert (b.lengths[0], b.longest, b.tokens) == (26, 3136, 65536)
    assert (a.longest, min(a.lengths), a.tokens) == (28, 27, 65536)
    assert te.skewed(3, 100, 120).lengths == (100, 10, 10)
    assert te.with_empty(5, 9).lengths == (0, 5, 0, 4, 0)


def test_cases_are_possible():
    for tokens in (te.TOKENS, 2048):
        for case in te.kernel_cases(tokens):
            assert case.packing.tokens == tokens and case.packing.longest <= case.freqs_len
            multiple = 2 * case.cp_size if case.cp_size > 1 else 1
            assert all(length % multiple == 0 for length in case.packing.lengths), case.description
    rows = pd.DataFrame([case.columns for case in te.kernel_cases()])
    assert not rows.duplicated(te.CELL).any()


# ------------------------------------------------------------------------------------------------------- measurements


@interpreted
def test_a_wrong_rotation_is_not_timed(monkeypatch, called_once):
    right = te.strategies()[te.LINEAR]
    monkeypatch.setitem(te.strategies(), te.LINEAR, lambda x, inverse, **options: right(x, inverse=False, **options))
    case = te.Case("table B", te.remainder_last(2, 8), 8, contenders=(OLD, NEW))
    frame = te.measure_kernels([case], te.Scale(8, 2, 16, rounds=1), "cpu", torch.float32)
    (row,) = frame[frame.contender == NEW].itertuples()
    assert row.status.startswith("wrong: ") and np.isnan(row.median_us) and row.same_bits is False


@interpreted
def test_every_rotation_makes_the_same_layer():
    small = te.LayerScale(tokens=8, hidden=32, heads=2, ffn=48)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    weights = te.Weights.drawn(small, draw)
    x, gradient = draw(8, 32).requires_grad_(), draw(8, 32)
    packing = te.balanced(3, 8)
    truth = te.Truth(8, 16, "cpu")

    def attend(q, k, v):  # of its own within each sequence, so that q and k matter
        return torch.cat([
            torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in parts)).transpose(0, 1)
            for parts in zip(*(t.split(packing.lengths) for t in (q, k, v)), strict=True)
        ])  # fmt: skip

    found = {
        name: te._layer_calls(weights, x, gradient, rotate, attend, small)[0]()
        for name, rotate in te.pairs_of(packing, truth, "cpu")[0].items()
    }
    for name, gradients in found.items():
        for ours, theirs in zip(gradients, found["ropelab"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)


@interpreted
def test_the_grids_give_the_same_bits():
    frame = te.parity()
    assert (frame.same_result & frame.same_gradient).all()
    assert frame[["worst", "worst_ropelab"]].max().max() <= 1
    assert {"float32", "float16"} == set(frame.dtype) and frame.cp_rank.max() > 0
    # ropelab's kernel is right to the same bound, and has most of their bits; float16 hides what its cosines differ by.
    assert (frame.ropelab_same_bits > 0.5).all() and (frame.ropelab_same_bits[frame.dtype == "float16"] > 0.99).all()
    assert (frame["empty"] > 0).any() and (frame.past_end > 0).any() and frame.starts.any()


@pytest.mark.parametrize("layout", ["split_half", "interleaved"])
@pytest.mark.parametrize("cp_size, cp_rank", [(1, 0), (2, 0), (2, 1)])
def test_ropelab_has_the_bits_of_the_grids_where_nothing_is_rounded(cp_size, cp_rank, layout):
    """Positions times 2**-17 have a cosine of 1 and themselves as sine; with integers for x and cotangent all is exact.

    So result and gradient must be the same bits in ropelab's own kernel and in both grids, and any other position has
    others.
    """
    packing = te.with_empty(5, 32, 2 * cp_size)
    angles = 2.0**-17 * torch.arange(packing.longest, dtype=torch.float32, device=DEVICE)
    freqs = angles[:, None, None, None].expand(-1, 1, 1, 8).contiguous()
    assert freqs.cos().eq(1).all() and freqs.sin().equal(freqs)
    generator = torch.Generator().manual_seed(cp_rank)
    x, gradient = (
        torch.randint(-8, 9, (32 // cp_size, 3, 8), generator=generator).float().to(DEVICE) for _ in range(2)
    )
    where = {"cu_seqlens": packing.cu_seqlens(DEVICE), "cp_size": cp_size, "interleaved": layout == "interleaved"}

    def rotated(rotate, rank=cp_rank, table=freqs):
        return te._both(partial(rotate, cp_rank=rank, **where), x, gradient, table, slice(None))

    ours = rotated(partial(apply_rotary_pos_emb, tensor_format="thd"))
    for strategy in te.strategies():
        theirs = rotated(partial(te.rotate_thd, strategy=strategy))
        assert all(map(torch.equal, ours, theirs)), strategy
    elsewhere = rotated(partial(apply_rotary_pos_emb, tensor_format="thd"), table=freqs + 2.0**-17)
    assert not any(map(torch.equal, ours, elsewhere))


@interpreted
def test_rows_past_the_end():
    with any_address():  # the rows past the end lie in a larger tensor
        outcome = te.past_the_end().set_index("contender").outcome
    assert outcome.to_dict() == past().set_index("contender").outcome.to_dict()
    assert not torch.are_deterministic_algorithms_enabled() or DEVICE == "cpu"


def test_the_search_takes_the_steps_that_are_counted():
    table = te.search().set_index("n_seqs")
    assert (table.thread_reads == 256 * np.ceil(np.log2(table.index))).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("study", ["te_kernels", "te_layer"])
def test_times_need_a_gpu(study):
    with pytest.raises(Unavailable, match="times are those of a GPU"):
        te.STUDIES[study](smoke=True)


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.parametrize("study", te.STUDIES)
def test_the_studies_run(study):
    torch.use_deterministic_algorithms(False)  # which would fill fresh memory, in launches of its own
    frame = te.STUDIES[study](smoke=True)
    if "status" in frame:
        lost = frame[frame.status.str.startswith(("wrong", "failed"))]
        assert lost.empty, lost[["contender", "status"]].to_dict("records")
        assert frame[frame.status == "ok"].median_us.gt(0).all()
    if study == "te_parity":
        assert (frame.same_result & frame.same_gradient).all() and frame.worst.max() <= 1


@pytest.mark.gpu
def test_the_attention_is_causal_within_each_sequence():
    q, k, v = (torch.randn(24, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lengths = (5, 16, 3)
    cu = torch.tensor((0, *lengths), device="cuda").cumsum(0, dtype=torch.int32)
    actual = te.attention(q, k, v, cu_seqlens=cu, longest=16)
    pieces = [
        torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1).float() for t in parts), is_causal=True
        ).transpose(0, 1)
        for parts in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(actual.float(), torch.cat(pieces), rtol=2e-2, atol=2e-2)


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    "power, outcome", [(1, "holds"), (0, "does not hold"), (-1, "does not hold"), (0.4, "does not hold")]
)
def test_only_a_time_on_a_rising_line_scales_with_the_blocks(power, outcome):
    frame = of_pair(kernels(), te.CODE)
    old = frame.contender == te.CODE.old
    noise = np.random.default_rng(0).uniform(0.999, 1.001, old.sum())
    frame.loc[old, "median_us"] = 1e4 * (frame.freqs_len * frame.n_seqs / 65536)[old] ** power * noise
    (row,) = ledger({"te_kernels": frame}, document="transformer_engine", only=["TE-01"]).itertuples()
    assert row.outcome == outcome and row.beyond.startswith(f"{outcome}: "), row.measured


def told(monkeypatch, cell, frame):
    """The statements of a cell of the chapter about another table."""
    about = records.load("te_layer", records.Selection(records.MEASUREMENTS, H100)).provenance
    monkeypatch.setattr(Shown, "record", lambda self, name: records.Record(name, frame, about))
    return run(monkeypatch, "11", cell).told


def test_a_layer_with_ropelab_beside_one_with_the_new_grid(monkeypatch):
    frame = slower(layers(), f"contender == 'ropelab' and what == {te.LAYER!r}", 1.1)
    frame.loc[frame.contender == te.WITHOUT, "q80_us"] *= 1.05
    assert states(told(monkeypatch, "layer-figure", frame), 1.07, 5.0)
    assert not states(told(monkeypatch, "layer-figure", frame[frame.contender != "ropelab"]), 1.07)


def test_whose_grids_a_record_has_is_said():
    of = [te.whose(of_pair(kernels(), pair)) for pair in (te.CODE, te.PACKAGES)]
    assert len({*of, te.whose(kernels())}) == 3


def test_what_the_heuristics_miss():
    """The first keeps 63 sequences on the old grid; the merged one allows more empty blocks with more ranks."""
    table = te.choices(kernels())
    first, merged = (te.missed(table, name) for name in ("first", "merged"))
    assert (first.n_seqs < 64)[first.first_costs > 1.1].all() and (first.kind == "skewed").sum() > 5
    worst = merged.iloc[0]
    assert worst.cp_size == 8 and worst.kind == "skewed" and worst.merged == "legacy"
    assert merged.merged_costs.max() < first.first_costs.max()
