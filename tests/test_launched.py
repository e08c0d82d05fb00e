"""Records note the kernels that each row launched, and are stale only where one of these is another today."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import triton
from triton.runtime.jit import serialize_specialization_data

import ropelab
from ropelab.bench import launched, other_triton, records, staleness, timing
from ropelab.bench.unavailable import Unavailable
from ropelab.kernels import INTERPRETED, choices
from ropelab.kernels.choices import plain
from tests.hostile_calls import TARGETS
from tests.support import forget
from tests.test_hostile_calls import VALID

GPU = {"name": "NVIDIA H100", "sm_count": 132, "capability": "9.0"}
OF_THEN = "3.6.0"
"""The version of Triton that the committed records name."""


def rotations():
    """The notes of a rotation of bfloat16 heads and of its backward."""
    q = torch.randn(1, 64, 4, 128, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = ropelab.rotary_table(64, 128)
    with launched.noted() as notes:
        for _ in range(2):  # the second call finds the launch prepared
            y = ropelab.apply_rope(q, cos=cos, sin=sin)
        y.sum().backward()
    return {str(i): note for i, note in enumerate(notes.values())}


def provenance(notes, version=triton.__version__):
    codes = other_triton.code_hashes(list(notes.values()), GPU, version)
    about = {name: note | {"code": code} for (name, note), code in zip(notes.items(), codes, strict=True)}
    return {"gpu": GPU, "triton": version, "triton_launches": about}


@pytest.fixture(scope="module")
def noted():
    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1, so that a CPU launches")
    return rotations()


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, so that a CPU launches")
@pytest.mark.parametrize("name", VALID)
def test_every_launch_can_be_planned_again(name):
    target = TARGETS[name]
    with launched.noted() as notes:
        target.function(**target.arguments)
    for note in notes.values():
        assert launched.of_today(note, {}).items() <= note.items()


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, so that a CPU launches")
@pytest.mark.parametrize("name", VALID)
def test_triton_describes_every_launch_to_a_watch_of_compilations(name, monkeypatch):
    """A server may watch compilations. Triton then writes the constants of a new kernel as JSON before a launch."""
    target = TARGETS[name]
    forget(monkeypatch)
    with launched._launches() as made:
        target.function(**target.arguments)
    monkeypatch.setattr(choices, "INTERPRETED", False)  # fields are constexprs where a kernel is compiled
    for launch in made:
        fixed = [replace(value) if isinstance(value, choices.Choices) else value for value in launch.fixed]
        rest = [SimpleNamespace()] * (len(inspect.signature(serialize_specialization_data).parameters) - 6)
        constants = {(i,): value for i, value in enumerate(fixed)}
        options = SimpleNamespace(**launch.options)
        said = serialize_specialization_data("kernel", {}, constants, {}, options, "key", *rest)
        assert json.loads(said)["constant_vals"] == [plain(value) for value in fixed]


def test_a_call_is_noted_once_and_a_backward_by_itself(noted):
    assert [note["kernel"] for note in noted.values()] == ["rotate_triton._rotate_kernel"] * 2
    assert len({note["constants"] for note in noted.values()}) == 2


def test_a_record_names_the_launches_of_each_row(noted, tmp_path, monkeypatch):
    """From the timer to the foot of a figure, with a contender that launches and one that does not."""
    q, (cos, sin) = torch.randn(1, 8, 2, 16), ropelab.rotary_table(8, 16)
    contenders = {"ropelab": lambda: lambda: ropelab.apply_rope(q, cos=cos, sin=sin), "torch": lambda: q.cos}
    frame = timing.host_times(contenders, rounds=2, batch=2)
    records.write("smoke", frame, tmp_path, modules={"ropelab.bench.timing": "", "ropelab.kernels.tiles": ""})
    record = records.load("smoke", tmp_path)
    (name, note), = record.provenance["triton_launches"].items()  # fmt: skip
    assert name.startswith("_rotate_kernel:") and record.frame.triton_launches.fillna("").tolist() == [name, ""]
    assert note["kernel"] == "rotate_triton._rotate_kernel"
    monkeypatch.setattr(records, "kernels_hash", lambda: "other kernels")
    assert record.stale == ("ropelab.bench.timing",)  # a neighbour of the kernel makes nothing stale
    note["constants"] = "0" * 16
    assert record.stale == ("ropelab.kernels.rotate_triton._rotate_kernel", "ropelab.bench.timing")
    assert record.footer.endswith("kernels changed since: measure again (kernels.rotate_triton._rotate_kernel)")


def test_a_table_without_launches_has_no_column(tmp_path):
    frame = timing.host_times({"torch": lambda: torch.ones(3).cos}, rounds=2, batch=2)
    record = records.write("smoke", frame, tmp_path)
    [written] = tmp_path.glob("*/smoke.csv")
    assert "triton_launches" not in pd.read_csv(written) and record.provenance["triton_launches"] == {}


CHANGES = {
    # file of kernels/, text, its replacement, the launches that are stale: 0 the forward, 1 the backward
    "a comment": ("rotate_triton.py", "    # The computation follows", "    # It follows", ""),
    "a docstring": ("stages_triton.py", "The product of the matrix", "A product of the matrix", ""),
    "a neighbour that was not launched": ("qk_norm_triton.py", "eps", "epsilon", ""),
    "a name that the compiler drops": ("stages_triton.py", "sin0", "sine0", ""),
    "the arithmetic of a branch that one launch takes": ("stages_triton.py", "x0 * cos0 - x1", "x0 * cos0 + x1", "0"),
    "the choice of tiles": ("tile_cost.py", "0.017", "9.0", "01"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_a_launch_stale(change, noted, tmp_path):
    """The changes are made in a copy of the library, which plans and compiles the noted launches for an H100."""
    file, old, new, stale = CHANGES[change]
    root = tmp_path / "root"
    shutil.copytree(records.ROOT / "ropelab", root / "ropelab", ignore=shutil.ignore_patterns("study", "__pycache__"))
    path = root / "ropelab" / "kernels" / file
    assert old in path.read_text(), f"{file}: expected {old!r}"
    path.write_text(path.read_text().replace(old, new))
    program = "import json, sys; from ropelab.bench import staleness; "
    program += "print(json.dumps(staleness.stale_launches(json.load(sys.stdin))))"
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(provenance(noted)), capture_output=True, text=True,
        cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout))
    assert found == set(stale)


@pytest.mark.gpu
def test_a_gpu_launches_the_code_that_is_compiled_without_it():
    """Otherwise a change of the source would count as another kernel, whatever it compiles to."""
    q = torch.randn(1, 64, 4, 128, dtype=torch.bfloat16, device="cuda")
    cos, sin = ropelab.rotary_table(64, 128, device="cuda")
    frame = timing.gpu_times({"ropelab": lambda: [partial(ropelab.apply_rope, q, cos=cos, sin=sin)]}, rounds=2)
    (note,) = json.loads(frame.triton_launches[0])
    gpu = records.environment()["gpu"]
    assert launched.of_today(note, gpu).items() <= note.items()
    assert note["code"] and other_triton.code_hashes([note], gpu, triton.__version__) == [note["code"]]


def test_debug_lines_are_no_code():
    from ropelab.bench.compiled import without_debug_lines

    ptx = "\n".join([
        "//", ".target sm_90a, debug", "\t.loc\t1 306 0 // rotate.py:306:0", "$L__tmp1:", "\tadd.f32 %f1, %f2; // x",
        '\t.file\t1 "/home/rotate.py"', "\t.section\t.debug_info", "\t{", ".b32 17 // Length", "\t}",
        "\t.section\t.debug_macinfo\t{\t}",
    ])  # fmt: skip
    assert without_debug_lines(ptx) == ".target sm_90a, debug\n\tadd.f32 %f1, %f2; "


@pytest.mark.peers
def test_the_version_of_triton_that_a_record_names(noted, monkeypatch):
    """The source is another, so only the code of that version can tell; without it the launch counts as stale."""
    if not other_triton.at_hand(OF_THEN):
        raise Unavailable(f"Triton {OF_THEN} (python -m ropelab.bench.other_triton {OF_THEN})")
    about = provenance(noted, OF_THEN)
    monkeypatch.setattr(launched, "source_hash", lambda kernel: "another")
    assert staleness.stale_launches(about) == {}
    for note in about["triton_launches"].values():
        note["grid"] = [1, 1, 1]
    assert set(staleness.stale_launches(about)) == set(noted)
    monkeypatch.setattr(other_triton, "at_hand", lambda version: False)
    assert set(staleness.stale_launches(about | {"triton_launches": noted})) == set(noted)


def test_an_answer_is_kept_where_files_can_be_written(tmp_path, monkeypatch):
    """The second process to ask reads the file; a changed question, or a folder that takes no file, compiles again."""
    ran = []
    done = SimpleNamespace(stdout='a line before\n["a"]\n')
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: ran.append(1) or done)
    (tmp_path / "file").touch()
    asked = other_triton._compiled.__wrapped__
    for kept, times in ((tmp_path / "kept", 1), (tmp_path / "file" / "kept", 2)):
        monkeypatch.setattr(other_triton, "KEPT", kept)
        ran.clear()
        assert asked("[[1], {}]", "0.0.0") == asked("[[1], {}]", "0.0.0") == ("a",)
        assert len(ran) == times
    assert asked("[[2], {}]", "0.0.0") == ("a",) and len(ran) == 3
