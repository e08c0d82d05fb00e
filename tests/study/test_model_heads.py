"""The heads of published models: the cells, the studies that time them, and the judgement of the records."""

from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
import torch

from ropelab.bench.model_cells import MOST_TOKENS, Call, Cell, cells, on_meta, smaller
from ropelab.bench.model_shapes import MODELS, SHAPES, Model
from ropelab.bench.rows import NotMeasured
from ropelab.bench.workloads import Workload
from ropelab.kernels import HAS_TRITON, INTERPRETED
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.topics.performance import dense
from ropelab.study.topics.performance import model_heads as judge
from tests.study.sentences import states

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ropelab.bench import model_heads, tile_regret
from ropelab.kernels.tiles import FlatTile, Tile, candidates

DRAWN = cells(600)
needs_kernels = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="kernels need a GPU")


def test_the_cells_cover_every_kind_of_call():
    assert len(set(DRAWN)) == 600 and DRAWN[:7] == cells(7)
    assert {cell.model.name for cell in DRAWN} == {model.name for model in MODELS + SHAPES}
    formats = Counter((cell.workload.seq_format, cell.workload.storage) for cell in DRAWN)
    assert len(formats) == 5 and min(formats.values()) >= 40
    assert {cell.workload.layout for cell in DRAWN} == set(LAYOUTS)
    assert {cell.positions for cell in DRAWN} == {"none", "token", "offsets"}
    for name in ("in_place", "converts", "full_width", "table_free", "wide_positions"):
        assert {getattr(cell, name) for cell in DRAWN} == {False, True}, name
    assert not any(cell.converts and cell.in_place for cell in DRAWN)
    tokens = [cell.workload.batch * cell.workload.seq_len for cell in DRAWN]
    assert min(tokens) == 1 and max(tokens) > MOST_TOKENS / 2 and sum(n % 2 for n in tokens) > 100


def test_necessary_bytes_count_tables_positions_and_sectors():
    model = Model("", 4, 2, 80, 80)
    shape = Workload("", 1, 10, 4, 2, 80, 80)
    heads, tables = 2 * 10 * 6 * 80 * 2, 2 * 10 * 40 * 4
    assert Cell(model, shape).necessary_bytes == heads + tables
    assert Cell(model, shape, "token", wide_positions=True).necessary_bytes == heads + tables + 80
    assert Cell(model, shape, in_place=True, table_free=True).necessary_bytes == heads
    # 32 of 80 features are 64 bytes; every row of 160 bytes begins at a sector of 32 bytes.
    partial = Cell(replace(model, rotary_dim=32), replace(shape, rotary_dim=32), in_place=True, table_free=True)
    assert partial.necessary_bytes == heads * 64 // 160
    # 20 features are 40 bytes: two sectors, whichever sector is first.
    partial = Cell(replace(model, rotary_dim=20), replace(shape, rotary_dim=20), in_place=True, table_free=True)
    assert partial.necessary_bytes == heads * 64 // 160


@pytest.mark.parametrize("number", range(0, 600, 25))
def test_a_plan_on_tensors_without_memory_is_the_plan_of_the_call(number):
    cell = smaller(DRAWN[number])
    (buffers,) = cell.workload.buffers(1, "cpu")
    real, meta = Call(cell, buffers), on_meta(cell)
    assert real.tile == meta.tile in candidates(tile_regret.work_of(meta)) or cell.table_free
    assert constants(real.plan()) == constants(meta.plan())


def constants(launch) -> dict:
    """The last arguments of a launch, without strides: axes of length 1 may have any."""
    named = zip(launch.kernel.arg_names[-len(launch.fixed) :], launch.fixed, strict=True)
    return {name: value for name, value in named if "stride" not in name} | launch.options


@pytest.fixture
def on_cpu(monkeypatch, called_once):
    monkeypatch.setattr(Workload.buffers, "__defaults__", (1, "cpu", 0))


@needs_kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_the_studies_run has the GPU")
def test_the_studies_time_and_compare(on_cpu):
    narrow = [cell for cell in DRAWN if cell.workload.q_heads * cell.workload.head_dim < 1300]
    narrow = [smaller(cell) for cell in narrow if cell.workload.dtype != torch.bfloat16]  # which is interpreted wrongly
    chosen = [next(cell for cell in narrow if cell.positions == kind) for kind in ("none", "token", "offsets")]
    frame = pd.concat([model_heads._timed(cell, (), rounds=3) for cell in chosen])
    assert frame.same_bits.all() and (frame.copy_us == 2).all() and set(frame.contender) == {"ropelab"}
    judged = judge.judged(frame)
    assert len(judged) == 3 and not judged.large.any()
    plain = next(cell for cell in narrow if not cell.table_free)
    tiles = candidates(tile_regret.work_of(on_meta(plain)))
    tried = [next(tile for tile in tiles if isinstance(tile, kind)) for kind in (FlatTile, Tile)]
    frame = tile_regret.sweep(plain, tried, rounds=3)
    assert frame.same_bits.all() and frame.chosen.sum() == 1 and set(frame.kind) == {"flat", "whole"}


@pytest.mark.process
@pytest.mark.gpu
def test_the_studies_run():
    for study, functions in ((model_heads.model_heads, ("ropelab",)), (tile_regret.tile_regret, ())):
        frame = study(smoke=True)
        assert (frame.status == "ok").all() and frame.same_bits.dropna().all() and (frame.median_us > 0).all()
        assert set(functions) <= set(frame.get("contender", []))


def record(**changes) -> pd.DataFrame:
    row = {"model": "m", "cell": "c", "layout": "split_half", "seq_format": "bshd", "storage": "contiguous",
           "dtype": "bfloat16", "positions": "none", "in_place": False, "head_dim": 128, "rotary_dim": 128,
           "contender": "ropelab",
           "status": "ok", "bytes": 32e6, "head_bytes": 32e6, "necessary_bytes": 33e6, "copy_us": 10.0,
           "places_us": float("nan"), "median_us": 10.5, "load_bytes": 16, "store_bytes": 16, "registers": 40,
           "spills": 0, "table_free": False, "converts": False}  # fmt: skip
    return pd.DataFrame([row | changes])


def test_bars():
    large = judge.judged(record()).iloc[0]
    assert large.large and large.limit_us == pytest.approx(10 * 33 / 32) and large.meets
    assert not judge.judged(record(median_us=10.9)).meets.any()
    assert judge.judged(record(median_us=10.9, head_dim=72)).meets.all()
    small = {"bytes": 1e6, "head_bytes": 1e6, "necessary_bytes": 1e6, "copy_us": 2.0}
    assert judge.judged(record(**small, median_us=2.29)).meets.all()
    assert not judge.judged(record(**small, median_us=2.31)).meets.any()
    assert judge.judged(record(**small, median_us=2.59, positions="token, int64")).meets.all()
    with pytest.raises(NotMeasured, match="ropelab"):
        judge.judged(record(status="failed"))


def test_the_limit_where_features_stay_is_the_copy_to_the_same_places():
    partial = {"head_bytes": 16e6, "necessary_bytes": 17e6, "places_us": 7.0}
    (row,) = judge.judged(record(**partial, median_us=7.8)).itertuples()
    assert row.limit_us == pytest.approx(7 * 17 / 16) and row.meets
    assert not judge.judged(record(**partial, median_us=7.9)).meets.any()
    small = partial | {"bytes": 2e6, "copy_us": 3.0, "places_us": 2.0}
    assert judge.judged(record(**small, median_us=2.29)).meets.all()
    assert not judge.judged(record(**small, median_us=2.31)).meets.any()


def test_faster_contenders_are_listed():
    both = pd.concat([record(), record(contender="vllm", median_us=9.0), record(contender="liger", median_us=12.0)])
    (row,) = judge.faster(both).itertuples()
    assert row.contender == "vllm" and row.ours_over_theirs == pytest.approx(10.5 / 9) and not row.leaves_rest
    (row,) = judge.faster(both.assign(rotary_dim=64)).itertuples()
    assert row.leaves_rest
    assert not judge.faster(both.assign(rotary_dim=64, in_place=True)).leaves_rest.any()
    assert not judge.faster(both.replace("vllm", "flashinfer").assign(rotary_dim=64)).leaves_rest.any()


def test_the_limits_of_a_call_are_facts_of_its_record():
    def facts(**changes):
        return judge.facts(record(**changes).iloc[0])

    assert facts() == []
    assert facts(store_bytes=4) == [judge.NARROW]
    assert facts(registers=64) == [] and facts(registers=65) == [judge.REGISTERS]
    assert facts(positions="token", spills=2)[0] == judge.SPILLS
    assert len(facts(rotary_dim=64)) == 1 and facts(rotary_dim=64) != facts(rotary_dim=64, in_place=True)
    assert len(facts(table_free=True, converts=True)) == 2


def test_causes_have_the_median_of_the_calls_with_each_fact():
    small = {"bytes": 1e6, "head_bytes": 1e6, "necessary_bytes": 1e6}
    calls = [
        record(),
        record(median_us=20.0, store_bytes=4),
        record(**small, median_us=12.5),
        record(**small, spills=1),
    ]
    found = judge.causes(pd.concat(calls, ignore_index=True))
    large, few = (found[f"{size}: median"] for size in judge.SIZES)
    assert large[judge.NARROW] == pytest.approx(10 * 33 / 32 / 20) and large[judge.NOTHING] == pytest.approx(33 / 33.6)
    assert few[judge.NOTHING] == pytest.approx(0.8) and few[judge.SPILLS] == pytest.approx(10 / 10.5)
    assert found[f"{judge.SIZES[0]}: calls"][judge.EVERY] == 2


def test_counters_name_the_furthest_calls_and_count_causes():
    rows = [
        ("a", True, 0.9, "memory at 89 % of the peak"), ("a", True, 0.5, "the last wave is 17% full; registers limit"),
        ("b", True, 0.7, "the L2 cache moves 1.2 times the bytes"), ("a", False, 0.4, "launch time: the bytes"),
        ("a", False, 0.3, ""),
    ]  # fmt: skip
    counters = pd.DataFrame(rows, columns=["study", "large", "fraction", "cause"]).assign(call="c", median_us=1.0)
    furthest = judge.furthest(counters)
    assert furthest["of its limit"].tolist() == [0.5, 0.7, 0.3]
    assert furthest["size"].tolist() == [judge.SIZES[0], judge.SIZES[0], judge.SIZES[1]]
    assert states(judge.counted(counters), 1, 2, 16, 3, 1, 89, 1, 1, 1, 0)


def test_regret():
    sweep = [record(median_us=us, chosen=us == 11, direction="forward", converts=False, full_width=False)
             for us in (10.0, 11.0, 15.0)]  # fmt: skip
    (row,) = judge.regret(pd.concat(sweep)).itertuples()
    assert (row.tiles, row.regret) == (3, pytest.approx(0.1))


def test_the_sentence_of_the_readme_counts_the_calls():
    slow, fast = record(median_us=11.0, tile="t"), record(median_us=10.0, tile="t")
    small = record(bytes=1e6, head_bytes=1e6, necessary_bytes=1e6, copy_us=2.0, median_us=2.1, tile="t")
    both = [slow, fast, small, record(contender="vllm", median_us=9.0)]
    frame = pd.concat(both, ignore_index=True).assign(cell=["a", "b", "c", "a"], batch=2, seq_len=[2048, 9, 1, 2048])
    assert states(dense.drawn_sentence(frame), 3, 0.952, 0)
