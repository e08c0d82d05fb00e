"""The steps of the chapter that writes the kernel: each is right, has the bits of the library, and is what is timed."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from ropelab.bench import timing  # noqa: E402
from ropelab.kernels import INTERPRETED  # noqa: E402
from ropelab.kernels.rotate_triton import tile_for  # noqa: E402
from ropelab.kernels.rotation import Rotation  # noqa: E402
from ropelab.kernels.tensors import RotateTensors  # noqa: E402
from ropelab.study.engine import registered  # noqa: E402
from ropelab.study.topics.kernel_steps import machine_code, plans, timed  # noqa: E402
from ropelab.study.topics.kernel_steps.plans import STEPS  # noqa: E402

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
    for wrong in (
        replace(halves, layout="interleaved"),
        replace(halves, inverse=True),
        replace(halves, positions=True),
    ):
        assert timed.check(wrong, inputs).startswith("wrong")


@interpreted
def test_a_step_writes_every_element_and_none_beside():
    (inputs,) = CASE.inputs(1, "cpu", torch.float16)
    for name, step in STEPS.items():
        if step.plan is not None:
            room = torch.full((7, 17, 24), float("nan"), dtype=torch.float16)
            step.plan(inputs, room[1:6])()
            assert torch.equal(room[1:6], step.in_library(inputs)), name
            assert room[0].isnan().all() and room[6].isnan().all(), name


@interpreted
def test_a_position_without_a_row_gives_nan():
    (inputs,) = CASE.inputs(1, "cpu", torch.float32)
    expected = STEPS["7 in order"].in_library(inputs)
    inputs.positions[2], inputs.positions[3] = 5, -1  # of a table with rows 0 to 4
    for name in ("6 positions", "6 positions, heads first", "7 in order"):
        y = STEPS[name](inputs)
        assert y[2:4].isnan().all() and torch.equal(y[:2], expected[:2]), name


def test_the_last_step_is_launched_as_the_library_launches():
    """With adjacent pairs and positions the library chooses the tile of the last step, so all else is the same."""
    x, table = torch.empty(1, 4096, 32, 128, dtype=torch.bfloat16, device="meta"), torch.empty(4096, 64, device="meta")
    tensors = RotateTensors.of([x], [torch.empty_like(x)], table, table, torch.empty(1, 4096, dtype=torch.int32))
    chosen = tile_for(tensors, Rotation(128, interleaved=True, out_interleaved=True))
    assert chosen == plans.tile_of(1, 8, 2)


@interpreted
def test_the_study_times_every_step_beside_the_library_and_a_copy(monkeypatch):
    monkeypatch.setattr(timed, "CASES", (CASE,))
    with timing.stopped():
        frame = timed.kernel_steps(device="cpu")
    assert list(frame.contender) == [*STEPS, *timed.LIBRARY_AS, timed.COPY]
    assert (frame.status == "ok").all()
    assert timed.RECORD in registered.all_studies()


def test_machine_code_of_a_gpu_that_need_not_be_there():
    names = ["2 shared row", "3 wide accesses", "8 stages, adjacent pairs"]
    found = machine_code.compiled_facts(names, 4096, 32, 128)
    assert [found[name]["store_bytes"] for name in names] == [2, 16, 16]
    assert found[names[0]]["instructions"] > found[names[1]]["instructions"]
    assert all(facts["local"] == 0 for facts in found.values())
    with pytest.raises(RuntimeError, match="the compiler failed: .*KeyError"):
        machine_code.compiled_facts(["9 another"], 4096, 32, 128)


@pytest.mark.parametrize(
    "registers, warps, share",
    [(32, 4, 1.0), (33, 4, 0.75), (40, 4, 0.75), (64, 4, 0.5), (128, 4, 0.25), (255, 4, 0.125), (16, 1, 0.5)],
)  # fmt: skip
def test_occupancy(registers, warps, share):
    assert machine_code.occupancy(registers, warps) == share
