"""The steps of the chapter that writes the kernel: each is right, has the bits of the library, and is what is timed."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402

from ropelab.bench import records, timing  # noqa: E402
from ropelab.kernels import INTERPRETED, tile_of  # noqa: E402
from ropelab.kernels.rotation import Rotation  # noqa: E402
from ropelab.kernels.tensors import RotateTensors  # noqa: E402
from ropelab.study.engine import measuring_code, registered  # noqa: E402
from ropelab.study.topics.kernel_steps import chapter, counted, machine_code, predicted, step, threads, timed  # noqa: E402
from ropelab.study.topics.kernel_steps.layout import Layout  # noqa: E402
from ropelab.study.topics.kernel_steps.step import STEPS  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
CASE = timed.Case(tokens=5, heads=17, head_dim=24)


@interpreted
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_step_agrees_with_the_definition_and_has_the_bits_of_the_library(name, dtype):
    (inputs,) = CASE.inputs(1, "cpu", dtype)
    assert timed.check(STEPS[name], inputs) == "ok"
    assert torch.equal(STEPS[name](inputs), STEPS[name].in_library(inputs))


@interpreted
def test_a_wrong_step_is_found():
    (inputs,) = CASE.inputs(1, "cpu", torch.float16)
    halves = STEPS["3 wide accesses"]
    for wrong in (replace(halves, layout="interleaved"), replace(halves, inverse=True)):
        assert timed.check(wrong, inputs).startswith("wrong")
        assert "elements are others" in chapter.outcome(wrong)
    assert "every bit" in chapter.outcome(halves)


@interpreted
def test_an_edited_kernel_has_no_recorded_time(monkeypatch):
    """The time of the record is that of the chapter's kernel, under which a reader's own may have its name."""
    speeds = []
    monkeypatch.setattr(chapter.figures, "ladder", lambda rows, *said: speeds.append(rows.set_index("step").speed))
    monkeypatch.setattr(chapter, "display", lambda *shown: None)
    judge = chapter.Judge(records.selection(records.MEASUREMENTS, "NVIDIA H200"), timed.CASES[1])
    halves = STEPS["3 wide accesses"]
    for constants in (halves.constants, {"BLOCK_HEADS": 32}, halves.constants):
        judge(halves.kernel, halves.grid, step=halves.name, **constants)
    timed_here = [speed.notna()[halves.name] for speed in speeds]
    assert timed_here == [True, torch.cuda.is_available(), True]
    assert all(speed.notna()["1 one head"] for speed in speeds) or torch.cuda.is_available()


@interpreted
def test_a_step_stands_beside_the_last_of_its_layout_and_its_highest_roof_is_bold(monkeypatch):
    tables = []
    monkeypatch.setattr(chapter, "display", lambda *shown: tables.extend(x for x in shown if hasattr(x, "_compute")))
    judge = chapter.Judge(records.selection(records.MEASUREMENTS, "NVIDIA H200"), timed.CASES[1])
    for name in ("1 one head", "3 wide accesses", "4 strided pairs", "5 backward"):
        each = STEPS[name]
        judge(each.kernel, each.grid, step=name, layout=each.layout, inverse=each.inverse, **each.constants)
    assert [[*table.data] for table in tables][1:] == [
        ["1 one head", "3 wide accesses"], ["3 wide accesses", "4 strided pairs"], ["3 wide accesses", "5 backward"]
    ]  # fmt: skip
    bold = {tables[1].index[row]: tables[1].columns[column] for row, column in tables[1]._compute().ctx}
    assert bold == {"roof: starts, µs": "1 one head", "roof: bytes, µs": "3 wide accesses"}


@interpreted
def test_a_step_writes_every_element_and_none_beside():
    (inputs,) = CASE.inputs(1, "cpu", torch.float16)
    for name, each in STEPS.items():
        if not each.in_torch:
            room = torch.full((7, 17, 24), float("nan"), dtype=torch.float16)
            each.plan(inputs, room[1:6])()
            assert torch.equal(room[1:6], each.in_library(inputs)), name
            assert room[0].isnan().all() and room[6].isnan().all(), name


@interpreted
def test_a_position_without_a_row_gives_nan():
    (inputs,) = CASE.inputs(1, "cpu", torch.float32)
    expected = STEPS["7 in order"].in_library(inputs)
    inputs.positions[2], inputs.positions[3] = 5, -1  # of a table with rows 0 to 4
    for name in ("6 positions", "6 positions, heads first", "7 in order"):
        y = STEPS[name](inputs)
        assert y[2:4].isnan().all() and torch.equal(y[:2], expected[:2]), name


def edited(tmp_path, *changes):
    """The steps of the chapter, after changes of the text of its cells."""
    notebook = json.loads(step.CHAPTER.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
        for old, new in changes:
            cell["source"] = cell["source"].replace(old, new)
    (tmp_path / "edited.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    return {each.name: each for each in step.cells(tmp_path / "edited.ipynb")}


@interpreted
def test_the_other_sign_in_the_first_kernel_turns_back(tmp_path):
    signs = ("x0 * c - x1 * s", "x0 * c + x1 * s"), ("x1 * c + x0 * s", "x1 * c - x0 * s")
    kernel = edited(tmp_path, *signs)["1 one head"]
    assert "elements are others" in chapter.outcome(kernel)
    assert "every bit" in chapter.outcome(replace(kernel, inverse=True))


def test_twice_the_angle_is_another_rotation(tmp_path):
    """It has not the library's bits, and it keeps the length of each pair."""
    at = "    at = token.to(tl.int64) * token_stride + head * head_stride + pair\n"
    twice = at, "    c, s = c * c - s * s, 2 * c * s\n" + at
    kernel = edited(tmp_path, twice)["1 one head"]
    assert "elements are others" in chapter.outcome(kernel)
    (inputs,) = CASE.inputs(1, "cpu", torch.float32)
    lengths = [torch.hypot(*x.chunk(2, dim=-1)) for x in (kernel(inputs), inputs.x)]
    torch.testing.assert_close(*lengths)


def test_triton_finds_wide_accesses_where_strides_are_multiples_of_16(tmp_path):
    kernel = edited(tmp_path, ("(do_not_specialize=STRIDES)", ""))["2 shared row"]
    assert [machine_code.compiled_facts(kernel, 64, 32, dim)["store_bytes"] for dim in (128, 72)] == [16, 2]


def test_fewer_warps_start_as_many_programs():
    kernels = [replace(STEPS["1 one head"], constants={"num_warps": warps}) for warps in (4, 2)]
    four, two = (machine_code.compiled_facts(kernel, 64, 32, 128) for kernel in kernels)
    assert (four["programs"], four["warps"], two["warps"]) == (two["programs"], 4, 2)


def test_an_argument_that_is_not_there_is_named():
    (inputs,) = CASE.inputs(1, "cpu", torch.float32)
    kernel = STEPS["2 sixteen heads"]
    with pytest.raises(ValueError, match="BLOCK_HEADS: expected one of x, cos, .* goes to judge, by"):
        replace(kernel, constants={}).plan(inputs, torch.empty_like(inputs.x))


def test_the_last_step_is_launched_as_the_library_launches():
    """With adjacent pairs and positions the library chooses the tile of the last step, so all else is the same."""
    x, table = torch.empty(1, 4096, 32, 128, dtype=torch.bfloat16, device="meta"), torch.empty(4096, 64, device="meta")
    tensors = RotateTensors.of([x], [torch.empty_like(x)], table, table, torch.empty(1, 4096, dtype=torch.int32))
    chosen = tile_of.rotate(tensors, Rotation(128, interleaved=True, out_interleaved=True))
    assert chosen == STEPS["8 stages, adjacent pairs"].tile


@interpreted
def test_the_study_times_every_step_beside_the_library_and_a_copy(monkeypatch):
    monkeypatch.setattr(timed, "CASES", (CASE,))
    with timing.stopped():
        frame = timed.kernel_steps(device="cpu")
    assert list(frame.contender) == [*STEPS, *timed.LIBRARY_AS, timed.COPY]
    assert (frame.status == "ok").all()
    assert timed.RECORD in registered.all_studies()


def test_an_edit_of_a_cell_is_an_edit_of_the_study(monkeypatch):
    """The kernels lie in the notebook: the hash of the measuring code has to know them."""
    before, cells = measuring_code.hashes(), step.sources()
    edited = {name: source.replace("x0 * c - x1 * s", "x0 * c + x1 * s") for name, source in cells.items()}
    studies = registered.all_studies()
    studies |= {timed.RECORD: replace(studies[timed.RECORD], sources=lambda: edited)}
    monkeypatch.setattr(measuring_code, "all_studies", lambda: studies)
    after = measuring_code.hashes()
    assert {name for name in before if before[name] != after[name]} == {timed.RECORD}


def test_the_page_to_link_to_has_the_cells_of_the_chapter():
    page = step.CHAPTER.with_name("15_a_rope_kernel_step_by_step.ipynb")
    chapter_cells = {name.split()[1]: source for name, source in step.sources().items()}
    assert (cells := {name.split()[1]: source for name, source in step.sources(page).items()})
    assert {**chapter_cells, **cells} == chapter_cells


def test_machine_code_of_a_gpu_that_need_not_be_there():
    names = ["2 shared row", "3 wide accesses", "8 stages, adjacent pairs"]
    found = {name: machine_code.compiled_facts(STEPS[name], 4096, 32, 128) for name in names}
    assert [found[name]["store_bytes"] for name in names] == [2, 16, 16]
    assert found[names[0]]["instructions"] > found[names[1]]["instructions"]
    assert all(facts["local"] == 0 for facts in found.values())
    for facts in list(found.values())[:2]:  # what the drawings say of widths is what the machine code has
        assert {max(move.width for move in facts["moves"] if move.kind == "store")} == {facts["store_bytes"]}
    with pytest.raises(RuntimeError, match="the compiler failed: .*nonsense"):
        machine_code.compiled_facts(replace(STEPS[names[0]], constants={"BLOCK_HEADS": 16, "nonsense": 1}), 5, 17, 24)


@pytest.mark.parametrize(
    "registers, warps, share",
    [(32, 4, 1.0), (33, 4, 0.75), (40, 4, 0.75), (64, 4, 0.5), (128, 4, 0.25), (255, 4, 0.125), (16, 1, 0.5)],
)  # fmt: skip
def test_occupancy(registers, warps, share):
    assert machine_code.occupancy(registers, warps) == share


def test_threads_of_a_layout():
    layout = Layout.of("sizePerThread = [1, 8], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1], order = [1, 0]")
    thread, register = layout.owners((32, 64))
    assert layout.elements((32, 64)) == 16  # two rows of eight
    assert thread[0, 7] == 0 and thread[0, 8] == 1 and thread[1, 0] == 8 and thread[4, 0] == 32
    assert register[0, 7] == 7 and register[16, 0] == 8 and thread[16, 0] == 0
    assert len({*zip(thread.ravel(), register.ravel(), strict=True)}) == 32 * 64  # each element in a place of its own
    few = Layout.of("sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]")
    assert few.owners((64,))[0].max() == 63 and few.elements((64,)) == 1


@interpreted
def test_a_request_asks_for_the_sectors_of_its_threads():
    def asked(name, kind):
        moves = machine_code.compiled_facts(STEPS[name], 4096, 32, 128)["moves"]
        found = threads.accesses(STEPS[name], moves, 32, 128)
        requests = [request for each in found if (each.kind, each.of) in kind for request in each.requests()]
        return np.mean([len(request) for request in requests]), sum(map(len, requests))

    heads = {("load", "x")}, {("store", "y")}
    assert [asked("3 wide accesses", side) for side in heads] == [(16, 128)] * 2
    assert [asked("4 split pairs", side) for side in heads] == [(16, 128)] * 2
    assert asked("4 strided stores", heads[1]) == (4, 256)  # each sector twice
    assert asked("4 strided loads", heads[0]) == (16, 1024)


@interpreted
@pytest.mark.parametrize("name", counted.NAMES)
def test_requests_touch_the_sectors_that_a_gpu_counts(name):
    """What the drawings say of a request of the record, Nsight Compute counted there."""
    record = records.load(counted.RECORD)
    row = record.frame.set_index("contender").loc[name]
    shape = [int(row[size]) for size in ("tokens", "heads", "head_dim")]
    moves = machine_code.compiled_facts(STEPS[name], *shape)["moves"]
    then = threads.strided_in_record(moves)
    found = threads.accesses(STEPS[name], then, *shape[1:])
    assert round(threads.sectors(found, "load"), 2) == row.load_sectors
    assert round(threads.sectors(found, "store"), 2) == row.store_sectors
    if triton.__version__ == record.provenance["triton"]:
        assert then == moves


@pytest.mark.parametrize(
    "case", [case if case.tokens == 4096 and case.head_dim == 128 else pytest.param(case, marks=pytest.mark.full)
             for case in timed.CASES], ids=lambda case: f"{case.tokens}x{case.head_dim}",
)  # fmt: skip
def test_no_recorded_time_is_below_a_roof(case):
    """What the chapter calls a roof is one: bytes, instructions, starts and waits, of every step on every GPU."""
    facts = {name: chapter.Judge(records.Selection(), case).facts(name) for name in STEPS}
    for record in records.of_each_gpu(timed.RECORD):
        gpu = record.provenance["gpu"]["name"]
        judge = chapter.Judge(records.selection(records.MEASUREMENTS, gpu), case)
        judge.record, judge._facts = record, facts
        took = judge.times.median_us
        for name in facts.keys() & took.keys():
            for by, roof in judge.roofs(name).items():
                assert roof <= took[name], f"{gpu}, {name}: {by} take {roof}, measured {took[name]}"


def test_bytes_under_way_are_those_of_loads():
    """Little's law: a copy of 4.2 TB/s loads at half that rate, and a wave of programs waits once."""
    needed = 4.2e12 / 2 / machine_code.MULTIPROCESSORS * predicted.WAIT_US * 1e-6
    assert round(needed) == 14318
    facts = {"instructions": 1, "warps": 4, "registers": 128, "programs": machine_code.MULTIPROCESSORS * 4 * 10}
    gpu = predicted.Gpu("H100", 2.8e6, 1e6)
    assert math.isclose(predicted.roofs(facts, gpu, 1)["waits"], 10 * predicted.WAIT_US)
