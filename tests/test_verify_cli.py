"""``ropelab verify``: what it prints, its exit codes, its time."""

import json
import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from ropelab.conformance.cli import app  # noqa: E402

MODULE = """
import torch

def rope(x, positions):
    frequencies = 10000.0 ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1])
    angles = (positions.double()[..., None] * frequencies)[..., None, :]
    x0, x1 = x.chunk(2, dim=-1)
    return torch.cat((x0 * angles.cos() - x1 * angles.sin(), x1 * angles.cos() + x0 * angles.sin()), -1).to(x.dtype)

def wrong(x, positions):
    return rope(x, positions + 1)

class Namespace:
    rope = staticmethod(rope)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "somebodys.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "somebodys", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["verify", *arguments])


def test_exit_code_0_and_a_row_for_each_law(run):
    result = run("somebodys:Namespace.rope", "--convention", "plain", "--layout", "split_half")
    assert result.exit_code == 0, result.output
    assert "definition" in result.output and "not applicable" in result.output
    assert "all laws that apply hold" in result.output


def test_exit_code_1_counterexample_and_json(run, tmp_path):
    out = tmp_path / "report.json"
    result = run(
        "somebodys:wrong", "--convention", "plain", "--law", "identity", "--law", "isometry", "--json", str(out)
    )
    assert result.exit_code == 1
    for part in ("identity", "fail", "expected", "actual", "Diagnosis"):
        assert part in result.output
    assert [r["status"] for r in json.loads(out.read_text())["results"]] == ["pass", "fail"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("somebodys:nothing", "--convention", "plain"),
        ("nowhere:rope", "--convention", "plain"),
        ("somebodys", "--convention", "plain"),
        ("somebodys:rope",),
        ("somebodys:rope", "--convention", "jax"),
        ("somebodys:rope", "--convention", "plain", "--law", "nothing"),
        ("somebodys:rope", "--convention", "plain", "--dtype", "int8"),
        ("somebodys:rope", "--convention", "plain", "--layout", "neox"),
    ],
)
def test_exit_code_2_for_wrong_usage(run, arguments):
    assert run(*arguments).exit_code == 2


def test_the_laws_are_listed():
    result = CliRunner().invoke(app, ["laws"])
    assert result.exit_code == 0 and "relative_position" in result.output


def test_as_a_module_within_a_minute():
    started = time.monotonic()
    command = [sys.executable, "-m", "ropelab", "verify", "ropelab:apply_rope", "--convention", "ropelab"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < 60
