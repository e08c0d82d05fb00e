"""What a project uses: the steps of the action, the hook of pre-commit, and the plugin of pytest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("typer")

ROOT = Path(__file__).parents[2]
ROPE = """
from ropelab.study.faults import correct

def rotate(x, positions):
    return correct.plain(x, positions)

def wrong(x, positions):
    return correct.plain(x, positions + 1)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "my_rope.py").write_text(ROPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(tmp_path))))
    return tmp_path


def step(name, **inputs):
    """A step of the action in a shell, with the inputs of a workflow; `pip` is the only step that is not run here."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    given = {key: about.get("default", "") for key, about in action["inputs"].items()} | inputs
    (chosen,) = (one for one in action["runs"]["steps"] if one["name"] == name)
    assert chosen["shell"] == "bash"
    environment = {
        key: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], value)
        for key, value in chosen["env"].items()
    }
    summary = Path("summary.md")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", chosen["run"]], capture_output=True, text=True,
        env=os.environ | environment | {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_ACTION_PATH": str(ROOT)},
    )  # fmt: skip
    return done, summary.read_text() if summary.exists() else ""


@pytest.mark.process
def test_the_action_says_in_its_summary_what_is_wrong(project):
    """Right functions and configurations are those of `test_examples`."""
    options = "--law definition --law identity"
    done, summary = step("Verify", python=sys.executable, target="my_rope:wrong", convention="plain", options=options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "position p + 1" in summary and "my_rope" in done.stdout


@pytest.mark.parametrize(
    "inputs", [{"target": "--help", "convention": "plain"}, {"target": "--help", "config": "--help"}]
)
def test_the_action_takes_neither_a_target_for_an_option_nor_an_option_for_file_names(inputs, project):
    python = project / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    done, _ = step("Verify", python=str(python), options="--law * --sizes 1", **inputs)
    words = done.stdout.split()
    assert words[-5:] == ["*", "--sizes", "1", "--", "--help"]
    assert "--help" not in words[:-1]


def test_the_action_installs_the_checkout():
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    install = action["runs"]["steps"][0]
    assert install["run"] == '"$ROPELAB_PYTHON" -m pip install --quiet "$GITHUB_ACTION_PATH[cli]"'


@pytest.mark.process
def test_the_hook_of_pre_commit(project):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    command = [sys.executable if part == "python" else part for part in hook["entry"].split()]
    arguments = ["my_rope:wrong", "--convention", "plain", "--law", "identity"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "wrong: 1 of 1 laws" in done.stdout
    assert not hook["pass_filenames"]


@pytest.mark.process
def test_without_the_setting_the_plugin_of_pytest_has_no_tests(project, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # an installed ropelab would load the plugin once more
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_ropelab"]
    (project / "pytest.ini").write_text("[pytest]\n")
    assert subprocess.run(command, capture_output=True).returncode == pytest.ExitCode.NO_TESTS_COLLECTED
