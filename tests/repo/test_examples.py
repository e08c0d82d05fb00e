"""The examples run as README.md of their folder says, and the project that verifies its RoPE fails if RoPE is wrong."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import ROOT, run
from tests.repo.test_projects import step

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NEEDS = {"finetune_patch": "transformers"}


def test_the_table_names_every_example():
    commands = re.findall(r"^\| `([^`]+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    projects = sorted(path.parent for path in EXAMPLES.glob("*/pyproject.toml"))
    expected = [f"python examples/{path.name}" for path in SCRIPTS]
    expected += [f"cd examples/{path.name} && pytest" for path in projects]
    assert sorted(commands) == sorted(expected)


@pytest.mark.process
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    said = run(Path(sys.executable), path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert re.search(r"\b(cpu|cuda)\b", said)


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLES / "verify_in_ci", tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), ".")))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # an installed ropelab would load the plugin once more
    return Path("my_rope.py")


def pytest_of_the_project(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_ropelab", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.process
def test_the_tests_of_the_project_are_the_laws(project):
    done = pytest_of_the_project("-k", "definition or isometry or adjoint")
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout
    left_out = re.search(r"(\d+) deselected", done.stdout)
    assert int(left_out[1]) >= 30, done.stdout


@pytest.mark.process
def test_the_workflow_of_the_project(project):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(Path(".github/workflows/rope.yml").read_text())
    inputs = [one["with"] for one in workflow["jobs"]["rope"]["steps"] if one.get("uses") == "./third_party/ropelab"]
    assert len(inputs) == 2
    for given in inputs:
        done, _ = step("Verify", python=sys.executable, **given)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
def test_a_wrong_sign_and_a_wrong_base_fail(project):
    text = project.read_text()
    project.write_text(text.replace("(-x[..., 1::2]", "(x[..., 1::2]").replace("base=500_000.0", "base=10_000.0"))
    assert project.read_text() != text
    done = pytest_of_the_project("-k", "definition or isometry")
    assert done.returncode == 1 and "my_rope:rotate[isometry]" in done.stdout, done.stdout
    done, _ = step("Verify", python=sys.executable, target="my_rope:Rotary", config="config.json")
    assert done.returncode == 1 and "my_rope:Rotary: wrong" in done.stdout, done.stdout + done.stderr
