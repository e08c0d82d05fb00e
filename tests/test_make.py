"""The Makefile removes what was generated and nothing else, and takes paths as they are or not at all."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED, COMMITTED = ("build/report", ".venv/bin"), ("data/measurements", "ropelab/study", "kernels", "tests", "my")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile and files in each folder, generated or not, and one file beside it."""
    root = tmp_path / "checkout"
    for folder in (*GENERATED, *COMMITTED):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").touch()
    (root / "my build").mkdir()
    (root / "ropelab" / "kernels").symlink_to("../kernels")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (root / "link").symlink_to(tmp_path / "outside")
    shutil.copy(ROOT / "Makefile", root)
    return root


def files(checkout):
    return {str(path.relative_to(checkout.parent)) for path in checkout.parent.rglob("*")}


def make(checkout, *arguments):
    # This make must not be a part of the make that runs the tests and hands its own settings on.
    environment = {name: x for name, x in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment = {name: x for name, x in environment.items() if name not in ("BUILD", "VENV", "PYTHON", "BASE_PYTHON")}
    return subprocess.run(
        ["make", *arguments], cwd=checkout, capture_output=True, text=True, timeout=60, env=environment
    )


def test_clean_removes_what_was_generated(checkout):
    before = files(checkout)
    assert make(checkout, "clean").returncode == 0
    gone = before - files(checkout)
    assert gone == {f"checkout/{name}" for name in ("build", "build/report", "build/report/file",
                                                    ".venv", ".venv/bin", ".venv/bin/file")}  # fmt: skip
    assert make(checkout, "clean").returncode == 0  # where there is nothing to remove


@pytest.mark.parametrize("variable", ["BUILD", "VENV"])
@pytest.mark.parametrize(
    "path", ["my build", "data my", "data", "./data/", "data/measurements", "ropelab/kernels", ".", "..", "../outside",
             "link", "", "it's", "x'; touch y; '", "Makefile"]
)  # fmt: skip
def test_clean_removes_nothing_else(variable, path, checkout):
    before = files(checkout)
    done = make(checkout, "clean", f"{variable}={path}")
    assert done.returncode != 0 and files(checkout) == before
    said = done.stdout + done.stderr
    assert "expected" in said or path == "Makefile"  # which is no directory, as the shell says


@pytest.mark.parametrize(
    "target", ["help", "test", "reproduce", "smoke", "measure", "figures", "lab", "clean", "peers"]
)
@pytest.mark.parametrize("variable", ["BUILD", "VENV", "PYTHON", "BASE_PYTHON"])
def test_no_target_takes_a_path_with_spaces_for_two(variable, target, checkout):
    done = make(checkout, "-n", target, f"{variable}=my build")
    assert done.returncode != 0 and not done.stdout
    assert f"{variable}: expected one path without spaces, got 'my build'" in done.stderr


def test_paths_reach_the_commands_as_they_are(checkout):
    (checkout / ".venv" / ".ready").touch()
    for target in ("reproduce", "smoke", "figures", "measure"):
        done = make(checkout, "-n", target, "PYTHON=true", "BUILD=a;b$$c", "GPU=nvidia-h200")
        assert f"--build 'a;b$c{'/smoke' * (target == 'smoke')}'" in done.stdout, done
    assert "--gpu 'nvidia-h200'" in make(checkout, "-n", "figures", "PYTHON=true", "GPU=nvidia-h200").stdout
    assert "--gpu" not in make(checkout, "-n", "figures", "PYTHON=true").stdout


@pytest.mark.parametrize("large, option", [("", []), ("0", ["--no-large"]), ("1", ["--large"])])
def test_peers_come_with_every_python_and_before_every_measurement(large, option, checkout):
    for name in ("pyproject.toml", "constraints.txt", ".venv/.ready"):
        (checkout / name).touch()
    for python, run in (("", ".venv/bin/python"), ("true", "true")):
        for target in ("peers", "reproduce", "measure"):
            commands = make(checkout, "-n", target, f"LARGE={large}", f"PYTHON={python}").stdout.splitlines()
            (fetch,) = (command for command in commands if "fetch_peers" in command)
            assert fetch.split() == [f"'{run}'", "-P", "ropelab/bench/fetch_peers.py", *option]
            assert fetch == commands[-1] or target != "peers"


def test_what_a_target_needs_is_declared():
    """The names after ``NEEDS :=`` are extras or dependency groups of pyproject.toml, and make installs all of them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = settings["project"]["optional-dependencies"].keys(), settings["dependency-groups"].keys()
    text = (ROOT / "Makefile").read_text()
    needed = {name for line in re.findall(r"NEEDS := (.*)", text) for name in line.split()}
    assert "study" in needed and needed <= extras | groups
    assert set(re.findall(r"--group (\w+)", text)) == groups
    assert re.findall(r"--editable '\.\[([\w,]+)\]'", text) == [",".join(extras)]
