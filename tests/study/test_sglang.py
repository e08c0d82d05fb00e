"""SGLang#14302: its rule, its evidence, its models, and the measurements."""

import pandas as pd
import pytest
import torch

from ropelab import reference, rotary_table
from ropelab.bench import records
from ropelab.bench.unavailable import Unavailable
from ropelab.layout.pairing import LAYOUTS, join
from ropelab.study.documents.sglang import (
    evidence,
    measure,
    models,
    operators,
    steps,
    studies,
)
from ropelab.study.documents.sglang.names import FLASH_FULL
from ropelab.study.engine.ledger import ledger
from ropelab.study.engine.verdict import Outcome
from tests.study.conftest import slower
from tests.study.sentences import states
from tests.support import change


def e2e(new=14716.08):
    change_percent = 100 * (new / 14600.17 - 1)
    return change(evidence.published_e2e(), "row == 'E2E Latency'", new=new, change_percent=change_percent)


PROTOCOLS = "sglang_protocols"


@pytest.mark.parametrize(
    "new, outcome",
    [(14716.08, Outcome.UNTOLD), (14620.0, Outcome.HOLDS), (15300.0, Outcome.FAILS), (13900.0, Outcome.FAILS)],
)
def test_a_change_of_the_whole_is_held_to_the_stages(new, outcome):
    (row,) = ledger({"sglang_published_e2e": e2e(new)}, document="sglang", only=["SG-12"]).itertuples()
    assert row.outcome == outcome and (row.measured or row.needs)


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
    first, second, flashinfer = (grids[grids.grid == name] for name in ("first", "second", "flashinfer"))
    published = set(first[["batch", "q_heads", "k_heads", "head_dim"]].itertuples(index=False, name=None))
    assert set(measure.FIRST_GRID) == published
    grid = ["batch", "head_dim", "q_heads", "k_heads"]
    every = set(flashinfer[grid].itertuples(index=False, name=None))
    assert {tuple(getattr(cell, name) for name in grid) for cell in measure.flashinfer_cells()} == every
    cells_of = (measure.first_cells, first), (measure.second_cells, second), (measure.flashinfer_cells, flashinfer)
    for cells, rows in ((of(), rows) for of, rows in cells_of):
        assert len({(cell.name, cell.layout) for cell in cells}) == len(cells)
        for cell in cells:
            assert cell.batch in set(rows.batch)
            assert rows.first_seq_len.min() <= cell.seq_len <= rows.last_seq_len.max()


# ------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, q_heads, k_heads, head_dim, rotary_dim", [(3, 5, 1, 8, 8), (5, 4, 2, 24, 20)])
def test_the_model_is_the_definition(layout, tokens, q_heads, k_heads, head_dim, rotary_dim):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cos, sin = (t[3:].contiguous().to(device) for t in rotary_table(tokens + 3, rotary_dim))
    q, k = (torch.randn(tokens, heads, head_dim, device=device) for heads in (q_heads, k_heads))
    query, key = q.clone(), k.clone()
    models.rotate_heads(query, key, cos, sin, interleaved=layout == "interleaved", blocks=2)
    for found, x in ((query, q), (key, k)):
        exact = reference.rotate(x, cos, sin, layout=layout, seq_format="thd")
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_launches_are_those_of_the_public_source():
    """32 heads of 128: threads, pairs a thread and blocks a token, by hand from the source that `models` names."""
    shape = 32, 64
    first, second, third, last = models.VERSIONS.values()
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
    # Few tokens get blocks as large as other tokens: 32 heads of 128 are one block of work, 64 heads are two.
    assert last(1, *shape) == last(5, *shape) == third(5, *shape) and last(4, *shape, True) == models.Launch(512, 4)
    assert last(4, 64, 64, True) == models.Launch(512, 4, 2) and last(5, 64, 64, True) == models.Launch(512, 4)
    assert last(4, 64, 64, True, policy=False) == models.Launch(512, 4)
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


# --------------------------------------------------------------------------------------- the measurements run


TIMED = [name for name, study in studies.STUDIES.items() if study.timed]


def test_the_same_call_tells_how_a_timer_repeats():
    """flash-attn is given as many heads of k as of q: cells that differ in those alone are one call."""
    frame = records.load(PROTOCOLS, gpu="nvidia-h200").frame
    frame = frame.query("cell in ('1x2048 32/8 128', '1x2048 32/1 128')")
    frame = change(frame, f"contender == '{FLASH_FULL}'", median_us=100.0)
    frame = slower(frame, f"contender == '{FLASH_FULL}' and timer == 'do_bench' and k_heads == 1", 3.0)
    assert states(steps.timer(frame), 3.00, 1.00)
    assert not steps.timer(frame.query("k_heads == 1"))  # no two cells are the same call
    said = steps.timer(records.load(PROTOCOLS, gpu="nvidia-h200").frame)
    found = ledger(document="sglang", only=["SG-04", "SG-05"], records=records.Selection(gpu="nvidia-h200"))
    assert all(said in remarks for remarks in found.remarks)


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for study in studies.STUDIES.values():
        with pytest.raises(Unavailable):
            study(smoke=True)


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.parametrize("study", studies.STUDIES)
def test_the_studies_run_on_a_gpu(study):
    frame = studies.STUDIES[study](smoke=True)
    if study not in TIMED:
        assert len(frame)
        return
    expected = "FlashInfer" if study == "sglang_flashinfer_calls" else "ropelab"
    found = frame[frame.contender.str.startswith(expected)]
    assert len(found) and (found.status == "ok").all(), found[["contender", "status"]].to_string()


def test_tensors_that_lie_elsewhere_are_checked_there():
    def aligned_only(x):
        return (x.add_(x.data_ptr() % 16),)

    memory = torch.zeros(17)
    assert measure._same_results(aligned_only, memory[:16]) and not measure._same_results(aligned_only, memory[1:])
