"""Claims SG-01 to SG-15: that every verdict moves with its evidence, and that the measurements run."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from ropelab import reference, rotary_table
from ropelab.bench import packages, records, timing
from ropelab.layout.pairing import LAYOUTS, join, pairs
from ropelab.study.engine.verdict import Status
from ropelab.study.figures import draw
from ropelab.study.sglang import contenders, evidence, figures, findings, measure, models, operators, rules, steps
from ropelab.study.sglang.contenders import (
    DOCUMENT,
    DOCUMENT_CAST,
    DOCUMENT_GATHER,
    FLASH,
    FLASH_FULL,
    FLASH_PACKED,
    OURS,
    REAL_VLLM,
    SECOND,
    THIRD,
    VLLM,
)
from tests.support import change

CONFIRMED, REFUTED, CORRECTED, NOT_TESTABLE = Status
ONE, OTHER = (peer.name for peer in contenders.PERSISTENT_PEERS[:2])
FLASHINFER = contenders.FLASHINFER

without_a_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without a GPU: on one test_the_studies_run_on_a_gpu has it"
)


def protocols(**us):
    """A record of the first grid in which everything takes 100 us but what is said: "contender|timer|clones" -> us."""
    rows = []
    for cell, batch, q_heads in (("1x2048 32/8 128", 1, 32), ("32x2048 8/8 128", 32, 8)):
        what = [(DOCUMENT, "interleaved", "do_bench", True), (VLLM, "split_half", "do_bench", True)]
        what += [(FLASH_FULL, "split_half", "do_bench", True)]
        what += [(DOCUMENT, "interleaved", "graph", clones) for clones in (True, False)]
        what += [(name, "split_half", "graph", clones) for name in (VLLM, FLASH_FULL) for clones in (True, False)]
        what += [
            (name, "split_half", "graph", False)
            for name in (
                DOCUMENT,
                DOCUMENT_GATHER,
                SECOND,
                THIRD,
                FLASH,
                FLASH_PACKED,
                ONE,
                OTHER,
                OURS,
                *({REAL_VLLM, FLASHINFER} & set(us)),
            )
        ]
        for contender, layout, timer, clones in what:
            time = us.get(f"{contender}|{timer}|{clones}", us.get(contender, 100.0))
            rows.append({"cell": cell, "batch": batch, "seq_len": 2048, "q_heads": q_heads, "k_heads": 8,
                         "head_dim": 128, "contender": contender, "layout": layout,
                         "timer": timer, "clones": clones, "status": "ok", "median_us": time,
                         "fraction_of_copy": 50 / time})  # fmt: skip
    return pd.DataFrame(rows)


def times(cells, **us):
    """A record of those cells: contender -> us, or a status."""
    return pd.DataFrame([
        {"cell": cell, "layout": "interleaved", "batch": 1, "seq_len": 4096, "head_dim": head_dim, "contender": name,
         "launches": 1, "status": value if isinstance(value, str) else "ok",
         "median_us": float("nan") if isinstance(value, str) else value, "fraction_of_copy": 0.5}
        for cell, head_dim in cells for name, value in us.items()
    ])  # fmt: skip


def diffusion(**us):
    found = {DOCUMENT: 100.0, SECOND: 80.0, THIRD: 80.0, ONE: 90.0, OTHER: 80.0, DOCUMENT_CAST: 110.0, VLLM: 101.0} | us
    return times((("1x27030 24/24 128", 128), ("Qwen-Image", 128)), **found)


def sizes(**us):
    return times(tuple((f"1x2048 32/8 {size}", size) for size in (64, 80, 96)), **({DOCUMENT: 100.0} | us))


def low(divided=2.0, off=3.0, processors=132):
    rows = [
        {"seq_len": tokens, "layout": "interleaved", "family": family, "blocks": blocks * tokens,
         "multiprocessors": processors, "policy": policy, "contender": f"{family} {blocks} {policy}",
         "status": "ok", "median_us": us}
        for tokens in (1, 2, 4, 8)
        for family, blocks, policy, us in (
            ("model", 1, None, 3.0), ("model", 4, None, divided), ("second", 1, "off", off), ("second", 16, "on", 2.0),
        )
    ]  # fmt: skip
    return pd.DataFrame(rows)


def widths(**us):
    rows = [
        {"layout": layout, "offset_bytes": offset, "pairs_per_thread": pairs_, "access_bytes": 2 * pairs_ if not offset
         else 2, "contender": f"{pairs_}", "status": "ok", "fraction_of_copy": 0.9,
         "median_us": us.get(f"{layout}{pairs_}", us.get(f"x{pairs_}", 100.0))}
        for layout in LAYOUTS for offset in (0, 2) for pairs_ in (1, 8)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def sources(*defines, layouts="adjacent pairs"):
    return pd.DataFrame([
        {"file": f"{i}.py", "commit": "0" * 40, "helper": "f", "defines": value, "layouts": layouts, "tolerance": 0.01}
        for i, value in enumerate(defines)
    ])  # fmt: skip


def e2e(new=14716.08):
    return change(evidence.published_e2e(), "row == 'E2E Latency'", change_percent=100 * (new / 14600.17 - 1))


def kernel(**changes):
    return change(evidence.published_kernel(), **changes)


def others(at_80):
    """A record of head sizes with flash-attn, which runs them all, and FlashInfer."""
    frame = sizes(**{FLASH: 100.0, FLASHINFER: 100.0})
    if isinstance(at_80, str):
        frame = change(frame, f"contender == '{FLASHINFER}' and head_dim == 80", status=at_80)
        if at_80.startswith("not run"):
            frame = change(frame, f"contender in ('{FLASH}', '{FLASHINFER}')", status=at_80)
    return frame


def without(contender):
    return protocols().query("contender != @contender")


SIMPLE = {"sglang_protocols": protocols, "sglang_vector_widths": widths}

CASES = [
    # claim, evidence that is given in place of computations and records, verdict
    ("SG-01", {}, CORRECTED),
    ("SG-01", {"sglang_shapes": lambda: evidence.shapes().query("claimed"),
               "sglang_flags": lambda: change(evidence.flags(), formula="halves", says="halves")}, CONFIRMED),
    ("SG-01", {"sglang_shapes": lambda: change(evidence.shapes(), "rank == 3", outcome="wrong")}, REFUTED),
    ("SG-02", {"sglang_head_sizes": lambda: others("failed: Unsupported head_dim: 80")}, CORRECTED),
    ("SG-02", {"sglang_head_sizes": lambda: others("wrong: far off")}, CORRECTED),
    ("SG-02", {"sglang_head_sizes": lambda: others(90.0)}, CORRECTED),
    ("SG-02", {"sglang_head_sizes": lambda: change(
        others("failed: x"), f"head_dim == 96 and contender == '{DOCUMENT}'", status="failed: x")}, CORRECTED),
    ("SG-02", {"sglang_head_sizes": lambda: sizes(**{DOCUMENT: "wrong: far off"})}, REFUTED),
    ("SG-02", {"sglang_head_sizes": lambda: others("failed: x").query("head_dim != 80")}, NOT_TESTABLE),
    ("SG-02", {"sglang_head_sizes": lambda: others("not run: not installed")}, NOT_TESTABLE),
    ("SG-03", {}, CORRECTED),
    ("SG-03", {"sglang_accuracy": lambda: change(evidence.accuracy(), exact=0.0, float32_angles=0.0)}, CORRECTED),
    ("SG-03", {"sglang_accuracy": lambda: change(evidence.accuracy(), exact=0.0, float32_angles=0.0),
               "sglang_sources": lambda: pd.concat([sources(True), sources(True, layouts="halves")])}, CONFIRMED),
    ("SG-03", {"sglang_accuracy": lambda: change(evidence.accuracy(), same=0.1)}, REFUTED),
    ("SG-04", {"sglang_protocols": lambda: protocols(**{REAL_VLLM: 120.0})}, CONFIRMED),
    ("SG-04", {"sglang_protocols": lambda: protocols(**{REAL_VLLM: 120.0, DOCUMENT_GATHER: 130.0})}, CORRECTED),
    ("SG-04", {"sglang_protocols": lambda: protocols(**{REAL_VLLM: 100.0, f"{VLLM}|do_bench|True": 120.0})}, REFUTED),
    ("SG-04", {"sglang_protocols": lambda: protocols(**{VLLM: 120.0})}, NOT_TESTABLE),
    ("SG-05", {"sglang_protocols": lambda: protocols(**{FLASH_PACKED: 210.0, FLASH: 210.0})}, CONFIRMED),
    ("SG-05", {"sglang_protocols": lambda: protocols(**{FLASH: 210.0})}, CORRECTED),
    ("SG-05", {"sglang_protocols": lambda: protocols(**{FLASH_PACKED: 150.0})}, CORRECTED),
    ("SG-05", {"sglang_protocols": lambda: protocols(**{FLASH_FULL: 210.0})}, REFUTED),
    ("SG-05", {"sglang_protocols": protocols}, REFUTED),
    *(("SG-05", {"sglang_protocols": partial(without, name)}, NOT_TESTABLE) for name in (FLASH, FLASH_PACKED)),
    ("SG-06", {}, CONFIRMED),
    ("SG-06", {"sglang_sources": lambda: sources(True, False)}, REFUTED),
    ("SG-06", {"sglang_sources": lambda: sources(True)}, NOT_TESTABLE),
    ("SG-07", {"sglang_vector_widths": lambda: widths(x8=80.0)}, CONFIRMED),
    ("SG-07", {"sglang_vector_widths": lambda: widths(interleaved8=80.0)}, CORRECTED),
    ("SG-07", {"sglang_vector_widths": widths}, REFUTED),
    ("SG-07", {"sglang_vector_widths": lambda: widths().query("pairs_per_thread == 1")}, NOT_TESTABLE),
    ("SG-08", {"sglang_low_tokens": low}, CONFIRMED),
    ("SG-08", {"sglang_low_tokens": lambda: change(low(), "seq_len == 8", median_us=3.0)}, CORRECTED),
    ("SG-08", {"sglang_low_tokens": lambda: low(divided=3.0)}, REFUTED),
    ("SG-08", {"sglang_low_tokens": lambda: low(processors=1)}, REFUTED),
    ("SG-08", {"sglang_low_tokens": lambda: low().query("family == 'second'")}, NOT_TESTABLE),
    ("SG-09", {"sglang_diffusion": lambda: change(diffusion(), seq_len=4), "sglang_low_tokens": low}, CONFIRMED),
    ("SG-09", {"sglang_diffusion": diffusion, "sglang_low_tokens": low}, CORRECTED),
    ("SG-09", {"sglang_diffusion": lambda: diffusion(**{SECOND: 100.0}),
               "sglang_low_tokens": lambda: low(off=2.0)}, REFUTED),
    ("SG-09", {"sglang_diffusion": lambda: diffusion(**{DOCUMENT: "failed: x"}), "sglang_low_tokens": low},
     NOT_TESTABLE),
    ("SG-10", {"sglang_protocols": protocols}, NOT_TESTABLE),
    *(("SG-10", {"sglang_protocols": partial(protocols, **{FLASHINFER: us})}, verdict)
      for us, verdict in ((124.0, CONFIRMED), (110.0, CORRECTED), (104.0, REFUTED))),
    ("SG-10", {"sglang_protocols": partial(protocols, **{FLASHINFER: 90.0, THIRD: 80.0})}, REFUTED),
    ("SG-11", {"sglang_head_sizes": sizes, "sglang_second_grid": diffusion}, NOT_TESTABLE),
    *(("SG-11", {"sglang_head_sizes": partial(sizes, FlashInfer=at_96),
                 "sglang_second_grid": partial(diffusion, FlashInfer=us)}, verdict)
      for at_96, us, verdict in (("failed: x", 90.0, CONFIRMED), ("wrong: x", 90.0, CONFIRMED),
                                 ("failed: x", 82.0, CORRECTED), (100.0, 90.0, CORRECTED), (100.0, 80.0, REFUTED),
                                 ("not run: x", 90.0, NOT_TESTABLE))),
    ("SG-12", {}, CORRECTED),
    ("SG-12", {"sglang_published_kernel": lambda: kernel(expected_ms=200.0)}, CONFIRMED),
    ("SG-12", {"sglang_published_e2e": lambda: e2e(15000.0)}, REFUTED),
    ("SG-13", {"sglang_diffusion": diffusion}, CONFIRMED),
    ("SG-13", {"sglang_diffusion": lambda: change(diffusion(), "cell == 'Qwen-Image'", median_us=100.0)}, CORRECTED),
    ("SG-13", {"sglang_diffusion": lambda: diffusion(**{DOCUMENT_CAST: 100.0})}, REFUTED),
    ("SG-13", {"sglang_diffusion": lambda: diffusion(**{DOCUMENT_CAST: "failed: x"})}, NOT_TESTABLE),
    ("SG-14", {"sglang_protocols": lambda: protocols(**{REAL_VLLM: 120.0})}, CONFIRMED),
    ("SG-14", {"sglang_protocols": lambda: protocols(**{REAL_VLLM: 120.0, FLASHINFER: 100.0})}, REFUTED),
    ("SG-14", {"sglang_protocols": lambda: change(
        change(protocols(**{FLASHINFER: 100.0}), q_heads=32),
        f"contender == '{FLASHINFER}' and cell.str.startswith('1x')", median_us=120.0)}, CORRECTED),
    ("SG-14", {"sglang_protocols": lambda: protocols(**{VLLM: 120.0})}, NOT_TESTABLE),
    ("SG-14", {"sglang_protocols": partial(without, DOCUMENT_GATHER)}, NOT_TESTABLE),
    ("SG-15", {**SIMPLE, "sglang_diffusion": diffusion}, CONFIRMED),
    ("SG-15", {**SIMPLE, "sglang_diffusion": lambda: diffusion(**{OTHER: 90.0})}, CORRECTED),
    ("SG-15", {**SIMPLE, "sglang_diffusion": diffusion, "sglang_protocols": lambda: protocols(**{THIRD: 90.0})},
     CORRECTED),
    ("SG-15", {**SIMPLE, "sglang_diffusion": diffusion,
               "sglang_alignment": lambda: change(evidence.alignment(), aligned=False)}, CORRECTED),
    ("SG-15", {**SIMPLE, "sglang_diffusion": lambda: diffusion(**{OTHER: 90.0}),
               "sglang_protocols": lambda: protocols(**{THIRD: 90.0}),
               "sglang_alignment": lambda: change(evidence.alignment(), aligned=False)}, REFUTED),
    ("SG-15", {**SIMPLE, "sglang_diffusion": lambda: diffusion(**{THIRD: "failed: x"}),
               "sglang_protocols": partial(without, THIRD)}, NOT_TESTABLE),
]  # fmt: skip


# ----------------------------------------------------------------------------------------------- the evidence


@pytest.mark.usefixtures("torch_backend")
def test_only_the_document_s_flag_is_the_other_way_round():
    table = evidence.flags()
    assert set(table.formula) == {evidence.ADJACENT, evidence.HALVES}
    inverted = table[table.formula != table.says]
    assert set(inverted.implementation) == {evidence.THEIR_OPERATOR} and len(inverted) == 2


@pytest.mark.usefixtures("torch_backend")
def test_ours_takes_every_combination():
    table = evidence.shapes()
    assert (table[table.operator == evidence.OUR_OPERATOR].outcome == "right").all()


def test_the_published_ratios_follow_from_the_published_times():
    (row,) = evidence.published_kernel().itertuples()
    assert round(row.ratio, 3) == evidence.published_speedups().low["SG-09"]
    total = evidence.published_e2e().iloc[0]
    assert round(total.change_percent, 1) == total.stated_change_percent


def test_the_grids_are_the_document_s():
    grids = pd.read_csv(evidence.DOCUMENTS / "sglang_14302_grids.csv")
    first, second = (grids[grids.grid == name] for name in ("first", "second"))
    published = set(first[["batch", "q_heads", "k_heads", "head_dim"]].itertuples(index=False, name=None))
    assert set(measure.FIRST_GRID) == published
    for cells, rows in ((measure.first_cells(), first), (measure.second_cells(), second)):
        assert len({(cell.name, cell.layout) for cell in cells}) == len(cells)
        for cell in cells:
            assert cell.batch in set(rows.batch)
            assert rows.first_seq_len.min() <= cell.seq_len <= rows.last_seq_len.max()


# ------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, q_heads, k_heads, head_dim, rotary_dim", [(3, 5, 1, 8, 8), (5, 4, 2, 24, 20)])
@pytest.mark.parametrize("name", ["one", "wide", "tiles", "positions", "heads"])
def test_the_models_are_the_definition(name, layout, tokens, q_heads, k_heads, head_dim, rotary_dim):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables = [t.to(device) for t in rotary_table(tokens + 3, rotary_dim)]
    cos, sin = (t[3:].contiguous() for t in tables)
    q, k = (torch.randn(tokens, heads, head_dim, device=device) for heads in (q_heads, k_heads))
    options = {"interleaved": layout == "interleaved"}
    query, key = q.clone(), k.clone()
    match name:
        case "one":
            models.rotate_tokens(query, key, cos, sin, **options)
        case "wide":
            models.rotate_tokens(query, key, cos, sin, **options, launch=models.Launch(32, pairs_per_thread=8))
        case "tiles":
            models.rotate_tokens(query, key, cos, sin, **options, launch=models.Launch(32, 2, tiles=3))
        case "positions":
            positions = torch.arange(3, tokens + 3, device=device)
            models.rotate_tokens(query, key, *tables, **options, positions=positions)
        case "heads":
            models.rotate_heads(query, key, cos, sin, **options, blocks=2)
    for found, x in ((query, q), (key, k)):
        exact = reference.rotate(x, cos, sin, layout=layout, seq_format="thd")
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_launches_are_those_of_the_public_source():
    """32 heads of 128: threads, pairs a thread and blocks a token, by hand from the source that `models` names."""
    shape = 32, 64
    first, second, third = models.VERSIONS.values()
    assert first(1, *shape) == first(2048, *shape) == models.Launch(512)
    assert first(1, 1, 16) == models.Launch(32)
    for tokens, tiles in ((1, 16), (4, 16), (5, 1)):
        for interleaved in (False, True):  # bf16: one pair a thread in both layouts
            assert second(tokens, *shape, interleaved) == models.Launch(128, 1, tiles)
    assert second(1, *shape, policy=False) == models.Launch(128)
    assert second(1, 32, 128).threads == 128 and second(1, 32, 160).threads == 256
    assert third(4, *shape) == models.Launch(128, 8, 2) and third(4, *shape, True) == models.Launch(128, 4, 4)
    assert third(5, *shape) == models.Launch(256, 8) and third(5, *shape, True) == models.Launch(512, 4)
    assert third(1, *shape, policy=False) == third(5, *shape)
    assert third(5, 8, 64) == models.Launch(128, 8)
    assert third(5, 1, 36) == models.Launch(128) and third(5, 1, 36, True) == models.Launch(128, 4)  # 36 is no 8s


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operators_are_the_definition(layout):
    x, (cos, sin) = torch.randn(5, 3, 8), (t[1:] for t in rotary_table(6, 8))
    exact = reference.rotate(x, cos, sin, layout=layout, seq_format="thd")
    neox = layout == "split_half"
    document, positions = x.clone(), x.clone()
    tables = (cos, sin) if not neox else [join(t, t, layout) for t in (cos, sin)]
    operators.document(*tables, document, None, 8, not neox)
    operators.positions_operator(torch.arange(5), positions, None, 8, torch.cat((cos, sin), -1), neox)
    for found in (document, positions):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_models_write_as_wide_as_they_say():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_sglang_models.py")
    environment["PYTHONPATH"] = str(script.parents[1])
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# --------------------------------------------------------------------------------------- the measurements run


@pytest.fixture
def stubbed(monkeypatch):
    """Small cells on the CPU: everything is called once and checked, and nothing is timed."""

    def gpu_times(prepared, **options):
        rows = []
        for name, prepare in prepared.items():
            try:
                prepare()[0]()
                rows.append({"contender": name, "status": "ok", "median_us": 1.0, "q20_us": 1.0, "q80_us": 1.0})
            except Exception as error:
                rows.append({"contender": name, "status": timing.failure(error)})
        return pd.DataFrame(rows, columns=["contender", "status", "median_us", "q20_us", "q80_us"])

    def apply_rotary(x, cos, sin, interleaved=False, inplace=False):
        assert inplace
        layout = "interleaved" if interleaved else "split_half"
        x0, x1 = pairs(x.float(), layout)
        cos, sin = (t[: x.shape[1], None].float() for t in (cos, sin))
        return x.copy_(join(x0 * cos - x1 * sin, x1 * cos + x0 * sin, layout))

    def small(batch, seq_len, q_heads, k_heads, head_dim, layout="split_half"):
        return cell(batch, min(seq_len, 4), min(q_heads, 4), min(k_heads, 2), head_dim, layout)

    cell = measure._cell
    monkeypatch.setattr(measure, "_cell", small)
    monkeypatch.setattr(measure, "FIRST_GRID", ((1, 4, 2, 8),))
    monkeypatch.setattr(measure, "QWEN_IMAGE_GRID", (1, 2, 2))
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(measure, "DTYPE", torch.float16)  # the interpreter has no bf16 arithmetic
    monkeypatch.setattr(measure, "_require_gpu", lambda: None)
    monkeypatch.setattr(measure, "_multiprocessors", lambda: 132)
    monkeypatch.setattr(measure, "do_bench", lambda call, **options: (call(), [1.0] * 3)[1])
    monkeypatch.setattr(measure, "kernel_names", lambda call: (call(), ["kernel"])[1])
    monkeypatch.setattr(contenders, "_compiled", lambda layout: partial(contenders._overwrite, layout=layout))
    monkeypatch.setattr(measure, "copy_contenders", lambda *args: {"copy: none": lambda: [lambda: None]})
    monkeypatch.setattr(packages, "locate", lambda package, version=None, **options: _locate(package))
    monkeypatch.setattr(packages, "load_file", lambda *args: SimpleNamespace(apply_rotary=apply_rotary))
    monkeypatch.setattr(timing, "gpu_times", gpu_times)
    monkeypatch.setattr(timing, "cache_bytes", lambda: 1)


def _locate(package):
    if package != "flash-attn":
        raise packages.NotInstalled(f"{package} not installed")
    return "2", Path("nowhere")


@without_a_gpu
@pytest.mark.parametrize("study", measure.STUDIES)
def test_every_contender_is_called_right(stubbed, study):
    frame = measure.STUDIES[study](smoke=True)
    untimed = frame[frame.status != "ok"]
    assert untimed.status.str.startswith("not run").all(), untimed[["contender", "status"]].to_string()
    assert set(untimed.contender) <= {peer.name for peer in contenders.PACKAGES}


@without_a_gpu
def test_the_record_holds_what_the_steps_compare(stubbed):
    frame = measure.protocols(smoke=True)
    for peer in steps.STEPS:
        assert steps.ratios(frame, peer).notna().all(axis=None)
        assert steps.mixed_timers(frame, peer).notna().all()


def test_the_same_call_tells_how_a_timer_repeats():
    """flash-attn is given as many heads of k as of q: cells that differ in those alone are one call."""
    one = protocols(**{f"{FLASH_FULL}|do_bench|True": 150.0}).query("cell == '1x2048 32/8 128'")
    other = one.assign(cell="1x2048 32/1 128", k_heads=1)
    other.loc[(other.contender == FLASH_FULL) & (other.timer == "do_bench"), "median_us"] *= 3
    both = pd.concat([one, other])
    said = steps.timer(both)
    assert "up to 3.00 times as long" in said and "1.00 times by CUDA graphs" in said
    assert said in findings.protocol(both)
    assert said in rules.faster_than_flash_attention(both, evidence.protocol_bytes()).measured
    assert said in rules.faster_than_vllm(both).measured
    assert not steps.timer(protocols())  # no two cells are the same call


@without_a_gpu
def test_figures_and_sentences_from_records(stubbed, tmp_path):
    for name in figures.FIGURES:
        with pytest.raises(FileNotFoundError, match="make measure"):
            draw(name, tmp_path)
    for name, (needed, _) in findings.SENTENCES.items():
        assert bool(findings.sentence(name, tmp_path)) != bool(needed)
    for study, measure_ in measure.STUDIES.items():
        records.write(study, measure_(smoke=True), tmp_path)
    for name in figures.FIGURES:
        figure = draw(name, tmp_path)
        texts = [figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
        assert "nan" not in texts[0] and any("no GPU" in text for text in texts), texts
    for name in findings.SENTENCES:
        assert "nan" not in findings.sentence(name, tmp_path)


def test_a_wrong_contender_is_not_timed(stubbed):
    def nothing(workload, cos, sin):
        return lambda q, k: (q.detach(), k.detach())

    cell = measure._cell(1, 4, 4, 2, 8)
    frame = measure._compared(cell, [contenders._peer("does nothing", nothing)], rounds=1)
    (row,) = frame[frame.contender == "does nothing"].itertuples()
    assert row.status.startswith("wrong") and pd.isna(row.median_us)


class FakeFlashInfer:
    """Its operator, with what it takes for granted asserted: what else it is given may end the process on a GPU."""

    @staticmethod
    def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
        assert cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous() and positions.is_contiguous()
        assert positions.max() + 1 < len(cos_sin_cache), "a thread reads past the end of its row"
        cos, sin = (t[:, None] for t in cos_sin_cache[positions].chunk(2, -1))
        layout = "split_half" if is_neox else "interleaved"
        for x in (query, key):
            x = x.view(len(x), -1, head_size)
            assert (x.data_ptr() % 16, x.stride(1) * x.itemsize % 16) == (0, 0), "16-byte accesses"
            x0, x1 = pairs(x.float(), layout)
            x.copy_(join(x0 * cos - x1 * sin, x1 * cos + x0 * sin, layout))


@pytest.mark.parametrize(
    "head_dim, layout, right",
    [(128, "interleaved", True), (80, "split_half", False)],  # tests/test_bench.py has the others
)
def test_flashinfer_is_not_given_what_it_reads_past(monkeypatch, head_dim, layout, right):
    monkeypatch.setattr(contenders.flashinfer, "module", lambda version: FakeFlashInfer)
    monkeypatch.setattr(measure, "DTYPE", torch.float16)
    monkeypatch.setattr(packages, "locate", lambda package, version=None, **options: (version or "9", Path("nowhere")))
    cell = measure._cell(1, 4, 4, 2, head_dim, layout)
    peers = [peer for peer in contenders.PACKAGES if peer.package == contenders.flashinfer.PACKAGE]
    ready, status = measure._ready(cell, peers, cell.buffers(device="cpu")[0])
    assert (contenders.FLASHINFER_NEWEST in ready) == right and contenders.FLASHINFER in ready
    if not right:
        assert "reads past q's end" in status[contenders.FLASHINFER_NEWEST]


@without_a_gpu
def test_a_package_is_timed_in_the_grid_or_says_why_not(stubbed, monkeypatch):
    def locate(package, version=None, **options):
        return (version or "9", Path("nowhere")) if package == contenders.flashinfer.PACKAGE else _locate(package)

    monkeypatch.setattr(packages, "locate", locate)
    monkeypatch.setattr(contenders.flashinfer, "module", lambda version: FakeFlashInfer)
    for frame in (measure.protocols(smoke=True), measure.second_grid(smoke=True)):
        status = frame.groupby("contender").status.agg(set)
        assert status[FLASHINFER] == {"ok"} and status["vLLM"] == {"not run: vllm not installed"}
    assert status[contenders.FLASHINFER_NEWEST] == {"ok"}  # heads of 128; of 8, in the first grid:
    refused = measure.protocols(smoke=True).query("contender == @contenders.FLASHINFER_NEWEST").status
    assert refused.str.startswith("failed: NotImplementedError").all()


@without_a_gpu
def test_packed_calls_are_checked_before_they_are_timed(stubbed, monkeypatch):
    def too_few_heads(x, cos, sin, interleaved=False, inplace=False):
        return apply(x[:, :, :4] if x.shape[2] > 4 else x, cos, sin, interleaved=interleaved, inplace=inplace)

    apply = packages.load_file().apply_rotary
    monkeypatch.setattr(packages, "load_file", lambda *args: SimpleNamespace(apply_rotary=too_few_heads))
    frame = measure.protocols(smoke=True)
    assert (frame[frame.contender == FLASH].status == "ok").all()
    packed = frame[frame.contender.isin((FLASH_FULL, FLASH_PACKED))]
    assert packed.status.str.startswith("wrong").all() and set(packed.contender) == {FLASH_FULL, FLASH_PACKED}


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for study in measure.STUDIES.values():
        with pytest.raises(rules.evidence.Unavailable):
            study(smoke=True)


@pytest.mark.gpu
@pytest.mark.parametrize("study", measure.STUDIES)
def test_the_studies_run_on_a_gpu(study):
    frame = measure.STUDIES[study](smoke=True)
    ours = frame[frame.contender.str.startswith("ropelab")]
    assert len(ours) and (ours.status == "ok").all(), ours[["contender", "status"]].to_string()


def test_tensors_that_lie_elsewhere_are_checked_there():
    def aligned_only(x):
        return (x.add_(x.data_ptr() % 16),)

    memory = torch.zeros(17)
    assert measure._same_results(aligned_only, memory[:16]) and not measure._same_results(aligned_only, memory[1:])
