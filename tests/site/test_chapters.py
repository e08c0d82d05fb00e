"""What the chapters teach: their laws beside the records, and what a reader sees who changes something."""

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("IPython")

from ropelab.bench.projection_law import Machine, Product  # noqa: E402
from ropelab.bench.records import Record  # noqa: E402
from ropelab.study import shown  # noqa: E402
from ropelab.study.topics.projection import findings as projection  # noqa: E402
from tests.site.cells import cells_of, run  # noqa: E402


def test_both_ramps_of_yarn(monkeypatch):
    """Plane 24 and 32 of Llama 3 at 8 times its context: the paper's ramp over turns, and the code's over planes."""
    slowed = run(monkeypatch, "02", "scalings-table").slowed
    assert slowed["YaRN, the paper"][[24, 32]].tolist() == pytest.approx([2.74, 6.72], abs=0.005)
    assert slowed["YaRN, the code"][[24, 32]].tolist() == pytest.approx([1.45, 3.58], abs=0.005)


def test_large_positions_come_no_nearer_to_the_bounds(monkeypatch):
    near, far = (run(monkeypatch, "01", "evidence-figure", first_position=first).evidence for first in (4000, 100_000))
    assert near.fraction.max() <= 1 and far.fraction.max() <= 1
    assert far.fraction.max() < 1.05 * near.fraction.max()


def test_a_smaller_base_costs_bf16_positions_nothing(monkeypatch):
    """The angle of the fastest plane is the position, whatever the base; slower planes lose by the frequency."""
    found = [run(monkeypatch, "02", "picture", smoke=True, base=base).found for base in (5e5, 1e4)]
    errors = [frame.groupby("method").angle_error.max() for frame in found]
    change = errors[1] / errors[0]
    assert change["bf16 positions"] == pytest.approx(1) and change.max() > 1.02


def test_slow_planes_are_nearly_right_under_the_wrong_backward(monkeypatch):
    errors = run(monkeypatch, "03", "picture", positions=1024).errors
    last = errors[errors.position == 1023]
    assert last.error.iloc[-1] < 0.3 and last.error.iloc[0] > 0.3


def test_other_lengths_keep_the_bits(monkeypatch):
    checks = run(monkeypatch, "06", "live-laws", lengths=[16, 0, 48, 8], padding=0).checks
    assert checks.all(axis=None)


def test_orthogonal_rows_commute_and_no_map_serves_all_heads(monkeypatch):
    """Of both obstacles to absorb a rotation, orthogonal rows remove that of one head."""
    made = "torch.randn(128, 512).double()\nq_pe"
    before = run(monkeypatch, "07", "mla-absorption")
    edit = "mla-absorption", made, made.replace("\n", "\nW = torch.linalg.qr(W.T).Q.T\n")
    after = run(monkeypatch, "07", "mla-absorption", edit=edit)
    apart = [(names.both_sides - names.gram).norm() / names.gram.norm() for names in (before, after)]
    assert apart[0] > 0.1 and apart[1] < 1e-12
    missed = (after.heads @ after.best - after.wanted).norm() / after.wanted.norm()
    assert missed > 0.5


def test_more_key_heads_make_the_pass_a_smaller_share(monkeypatch):
    few, many = (run(monkeypatch, "08", "law-cell", k_heads=count).rates["pass / product, %"] for count in (8, 32))
    assert many < few


def test_the_law_of_the_pass_holds_where_the_record_can_tell(monkeypatch):
    agreement = run(monkeypatch, "08", "law-cell", "law-figure").agreement
    assert agreement.median() == pytest.approx(1, abs=0.1) and agreement.between(0.6, 1.1).all()


@pytest.mark.parametrize("chapter, cells", [("08", ("law-cell", "law-figure")), ("15", ("law",))])
def test_the_law_of_the_pass_is_drawn_as_it_is_between_the_points(monkeypatch, chapter, cells):
    """A hyperbola: straight segments from product to product lie above it."""
    names = run(monkeypatch, chapter, *cells)
    (line,) = (line for line in names.ax.lines if line.get_label() == "the law")
    widths, drawn = line.get_data()
    for inputs in (2500, 3000, 6000):
        law = 100 * Product(int(names.many.tokens.max()), inputs, **projection.MODEL).most_loss(names.machine)
        assert np.interp(inputs, widths, drawn) == pytest.approx(law, rel=0.01)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_another_model_keeps_the_laws(monkeypatch, capsys, model):
    run(monkeypatch, "10", "live", edit=("live", '"qwen3"', f'"{model}"'))
    said = capsys.readouterr().out
    assert "right" in said and "wrong" not in said


def test_equal_sequences_with_a_table_of_their_length_leave_no_block_empty(monkeypatch):
    empty = [(~run(monkeypatch, "11", "picture", lengths=[4] * 4, rows=rows).launch).sum() for rows in (4, 64)]
    assert empty == [0, 240]


def test_the_law_of_the_empty_blocks_holds_in_every_packing(monkeypatch):
    """One price of an empty block for all packings, and from it the ratio of the grids for packings of all ranks."""
    names = run(monkeypatch, "11", "blocks-figure", "skew-figure")
    assert names.off.max() < 0.15 and names.off.median() < 0.05
    predicted = pd.Series(np.interp(names.skewed.e, names.e_of_law, names.ratio_of_law), names.skewed.index)
    assert (predicted / names.skewed.ratio).between(0.7, 1.3).all() and names.agree > 0.9 * len(names.skewed)


def test_a_kernel_of_small_blocks_takes_the_price_of_empty_blocks(monkeypatch):
    price = run(monkeypatch, "11", "blocks-figure").price
    assert run(monkeypatch, "14", "starts-figure").ns.tolist() == pytest.approx([price] * 2, rel=0.1)


def test_other_ranks_get_the_same_bits(monkeypatch):
    assert run(monkeypatch, "11", "bits-live", live_shards=[[2, 0], [4, 3]]).equal_bits.all()


def test_the_part_of_a_rotation_follows_from_bytes_and_operations(monkeypatch):
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 512}
    weights = 256 * (2 * 256 + 2 * 128 + 3 * 512)  # head_dim 128: q and output, k and v, MLP
    products, attention = 2 * 100 * weights, 2 * 2 * 100**2 / 2 * 256
    moved = 3 * 100 * (256 + 128) * 2 * 2  # three times: read and write, two bytes each
    machine = Machine(flops=8e14, bandwidth=3e12)
    rotation = moved / machine.bandwidth
    names = run(monkeypatch, "10", "picture", "share-code")
    whole = (products + attention) / machine.flops + rotation
    assert names.part(machine, 100, 3, sizes) == pytest.approx(rotation / whole)
    assert (names.without.to_numpy() / list(names.computed.values())).tolist() == pytest.approx([1, 1], abs=0.3)


def test_no_rotation_is_faster_than_none_within_noise(monkeypatch):
    """The limit of the chapter: a step without a rotation bounds the rotation alone."""
    names = run(monkeypatch, "10", "picture", "share-code", "times")
    both = names.steady[[names.OURS, names.NONE]].dropna()
    assert len(both) and (both[names.OURS] < both[names.NONE] + 0.01).all()


def test_a_traced_llama_gets_a_mask_and_an_eager_one_does_not(monkeypatch):
    masks = run(monkeypatch, "10", "picture", "share-code", "times", "compiled-code").masks
    assert masks[False, "compiled"] is not None
    assert masks[False, "eager"] is masks[True, "eager"] is None


def test_no_call_beats_the_roof(monkeypatch):
    """The law of the chapter: a copy of the same bytes bounds every call, up to what no copy can tell."""
    calls = run(monkeypatch, "05", "picture").calls
    assert calls.fraction_of_limit.max() < 1.1 and (calls.fraction_of_limit > 1.05).mean() < 0.01


def test_the_calls_of_a_model_are_listed_with_their_facts(monkeypatch):
    named = run(monkeypatch, "05", "picture", "model-table", model="phi-2").named
    assert set(named.model) == {"microsoft/phi-2"} and named.fraction_of_limit.is_monotonic_decreasing
    assert run(monkeypatch, "05", "picture", "model-table", model="no such model").named.empty


@pytest.mark.parametrize(
    "chapter, cells", [("00", ("packing-code", "roof-code")), ("05", ("picture", "causes-tables"))]
)
def test_another_gpu_brings_its_own_numbers(monkeypatch, chapter, cells):
    one, other = (run(monkeypatch, chapter, *cells, gpu=f"nvidia-{gpu}") for gpu in ("h100-80gb-hbm3", "h200"))
    assert one.findings_shown and one.findings_shown != other.findings_shown


@pytest.mark.parametrize("lacking", ["liger", "hf_compiled", "flash_attn"])
def test_chapter_05_reads_a_record_without_a_peer(monkeypatch, lacking):
    names = run(monkeypatch, "05")
    less = {
        name: Record(record.study, record.frame[record.frame.contender != lacking], record.provenance)
        for name, record in (("speeds", names.speeds), ("heads", names.heads), ("contexts", names.contexts))
    }
    cells = "picture", "ridge", "heads-tables", "peer-figure", "lengths-figure"
    said = run(monkeypatch, "05", *cells, instead=less).findings_shown
    assert len(said) == 3 and not any("nan" in sentence for sentence in said)


def test_one_ratio_of_bytes_is_exactly_two_for_any_heads(monkeypatch):
    """Three launches against one pass: with a cache of 16 bits always twice the bytes, with one of 8 bits more."""
    moved = [run(monkeypatch, "07", "bytes-figure", k_heads=count).moved.iloc[0] for count in (1, 8, 32)]
    assert [row["16-bit cache, passes"] for row in moved] == [2, 2, 2]
    narrow = [row["8-bit cache, passes"] for row in moved]
    assert narrow == sorted(narrow) and narrow[0] > 2


def test_another_broken_line_is_seen_by_other_laws(monkeypatch, capsys):
    """The answer has the minus in the wrong half, which keeps scores; a key that does not turn changes them."""
    before = run(monkeypatch, "09", "answer-3").report.failed
    unturned = "answer-3", "k * cos + turned(k) * sin", "k"
    after = run(monkeypatch, "09", "answer-3", edit=unturned).report.failed
    assert {*after} > {*before} and "relative_position" in {*after} - {*before}


def test_a_function_that_the_parameters_name_is_judged(monkeypatch, capsys):
    target = "ropelab.interop.huggingface:apply_rotary_pos_emb"
    judged = run(monkeypatch, "09", "judge-code", function=target, convention="huggingface").judged
    assert not judged.failed


def test_tables_cost_a_batch_of_one_a_third(monkeypatch, capsys):
    for batch, once in ((1, 0.67), (8, 0.94)):
        run(monkeypatch, "12", "bytes-of", batch=batch)
        assert f"read once: at most {once} of a copy; read for every batch element: 0.67" in capsys.readouterr().out


def test_the_ratio_of_bytes_depends_on_the_heads_and_not_on_the_tokens(monkeypatch, capsys):
    for heads, ratio in ((8, "2.00"), (32, "1.25"), (1, "2.42")):
        for tokens in (64, 4096):
            run(monkeypatch, "13", "bytes-of", k_heads=heads, tokens=tokens)
            assert f"ratio of {ratio}" in capsys.readouterr().out


def test_the_gate_opens_where_the_wrong_gradient_is_right(monkeypatch):
    cells = "correctness-live", "gate-of"
    found = {tokens: run(monkeypatch, "14", *cells, tokens=tokens) for tokens in (1, 2, 4096)}
    assert [names.opens for names in found.values()] == [True, False, False]
    assert found[1].error == 0 and found[2].error > 0.1 and found[4096].error == pytest.approx(2**0.5, abs=0.1)
    assert found[4096].error == pytest.approx(found[4096].closed, rel=0.01)


def test_norm_and_rotation_keep_below_the_limits_of_their_bytes(monkeypatch):
    names = run(monkeypatch, "07", "norm-figure")
    fastest = names.steps.groupby("step").fraction_of_copy.max()
    assert all(fastest[step] <= 1.03 * limit for step, limit in names.LIMITS.items())


def test_one_launch_keeps_below_a_copy(monkeypatch):
    rows = run(monkeypatch, "07", "picture").rows
    assert rows[rows.contender == "ropelab, one launch"].fraction_of_copy.max() <= 1.03


@pytest.mark.parametrize("chapter", ["11", "12", "13", "14"])
def test_the_columns_of_tables_have_words(monkeypatch, chapter):
    tables = []
    monkeypatch.setattr(shown, "styled", lambda frame, styled=shown.styled: tables.append(styled(frame)) or tables[-1])
    run(monkeypatch, chapter, *cells_of(chapter))
    columns = {str(name) for table in tables for name in table.columns}
    assert columns and not [name for name in columns if "_" in name]


@pytest.mark.parametrize(
    "chapter, given",
    [
        ("05", {}), ("06", {}), ("08", {}),
        *(pytest.param(n, {"smoke": True}, marks=pytest.mark.full) for n in ("01", "02", "03", "07", "09", "10")),
        *(pytest.param(n, {}, marks=pytest.mark.full) for n in ("11", "12", "13", "14")),
    ],
)  # fmt: skip
def test_every_cell_runs_again_and_finds_the_same(monkeypatch, chapter, given):
    """Exploring is to run cells again: in the state after the whole chapter each finds what it found before."""
    told = run(monkeypatch, chapter, *(2 * cells_of(chapter)), **given).told.splitlines()
    assert told and told[: len(told) // 2] == told[len(told) // 2 :]
