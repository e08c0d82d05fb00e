"""The Makefile removes what was generated and nothing else, and takes paths as they are or not at all."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED, COMMITTED = ("build/report", ".venv/bin"), ("data/measurements", "ropelab/study", "kernels", "tests", "my")

pytestmark = [pytest.mark.process, pytest.mark.skipif(shutil.which("make") is None, reason="needs make")]


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile and files in each folder, generated or not, and one file beside it."""
    root = tmp_path / "checkout"
    for folder in (*GENERATED, *COMMITTED):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").touch()
    (root / "ropelab" / "study" / "doctor.py").touch()
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


TARGETS = sorted(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
NOT_GENERATED = ["my build", "data my", "data", "./data/", "data/measurements", "data/new", "ropelab/kernels",
                 "new/../data", ".", "..", "/", "", "it's", "x'; touch y; '", "$(shell touch y)",
                 "Makefile"]  # fmt: skip


@pytest.mark.parametrize("variable", ["BUILD", "VENV"])
@pytest.mark.parametrize("path", NOT_GENERATED)
def test_no_target_generates_or_removes_what_is_committed(variable, path, checkout):
    before = files(checkout)
    for target in TARGETS:
        done = make(checkout, target, f"{variable}={path}", "PYTHON=true")
        assert done.returncode != 0 and f"{variable}: expected" in done.stderr, (target, done)
    assert files(checkout) == before


@pytest.mark.parametrize("variable", ["BUILD", "VENV"])
@pytest.mark.parametrize("path", ["../outside", "link"])
def test_clean_removes_nothing_outside(variable, path, checkout):
    before = files(checkout)
    done = make(checkout, "clean", f"{variable}={path}")
    assert done.returncode != 0 and files(checkout) == before and "expected BUILD and VENV" in done.stdout


def test_the_committed_names_are_those_of_git():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        pytest.skip("needs a checkout with its history and git")
    (names,) = re.findall(r"^COMMITTED := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {line.partition("/")[0] for line in listed.splitlines()} <= set(names.replace("\\", "").split())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variable", ["BUILD", "VENV", "PYTHON", "BASE_PYTHON", "GPU"])
def test_no_target_takes_a_path_with_spaces_for_two(variable, target, checkout):
    done = make(checkout, "-n", target, f"{variable}=my build")
    assert done.returncode != 0 and not done.stdout
    assert f"{variable}: expected one name or path without spaces, got 'my build'" in done.stderr


@pytest.mark.parametrize(
    "text", ["x;touch y", "x && touch y", "`touch y`", "$(touch y)", "$(shell touch y)", "x'; touch y; '"]
)
@pytest.mark.parametrize("variable", ["GPU", "ONLY", "LARGE", "OPTIONS"])
def test_no_text_reaches_the_shell(variable, text, checkout):
    """The stand-in for Python says yes to everything, and writes what it gets."""
    python = checkout / "python"
    python.write_text('#!/bin/sh\necho True\nprintf "%s\\n" "$@" >> said\n')
    python.chmod(0o755)
    for target in ("figures", "measure", "peers", "lab"):
        make(checkout, target, f"{variable}={text}", "PYTHON=./python")
    assert not (checkout / "y").exists()


@pytest.mark.parametrize("large", ["no", "false", "off", "00", "yes", "2", "0 1"])
def test_large_is_one_or_zero(large, checkout):
    done = make(checkout, "-n", "peers", f"LARGE={large}", "PYTHON=true")
    assert done.returncode != 0 and not done.stdout and "LARGE: expected" in done.stderr


@pytest.mark.parametrize("python", ["true", "false", "/bin/echo", "no-such-program"])
@pytest.mark.parametrize("variable, target", [("PYTHON", "hub"), ("PYTHON", "test"), ("BASE_PYTHON", "test")])
def test_what_is_no_python_is_refused(variable, target, python, checkout):
    for name in ("pyproject.toml", "constraints.txt"):
        (checkout / name).touch()
    shutil.rmtree(checkout / ".venv")
    done = make(checkout, target, f"{variable}={python}")
    assert done.returncode != 0
    assert f"{variable}: expected a Python >= 3.11, got {python}" in done.stdout


def test_a_file_beside_the_makefile_takes_the_place_of_no_module(checkout):
    """Files that import Python's library alone run with it, also where the checkout has files of the same names."""
    for name in ("json.py", "email.py", "tomllib.py", "zipfile.py"):
        (checkout / name).write_text("raise SystemExit('a file of the checkout')\n")
    for name in ("study/hub/build", "study/doctor", "bench/fetch_peers", "bench/compile_peers"):
        file = f"ropelab/{name}.py"
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, checkout / file)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    (checkout / "ropelab/study/hub/build.py").write_text("import json, email, tomllib, zipfile\nprint('written')\n")
    (checkout / "data" / "peers.toml").write_text("")
    for target, said in (("hub", "written"), ("peers", "")):
        done = make(checkout, target, f"PYTHON={sys.executable}")
        assert done.returncode == 0 and said in done.stdout, done


def test_paths_reach_the_commands_as_they_are(checkout):
    (checkout / ".venv" / ".ready").touch()
    for target in ("reproduce", "smoke", "figures", "measure", "measure-all"):
        done = make(checkout, "-n", target, "PYTHON=true", "BUILD=a;b$c", "GPU=nvidia-h200")
        assert f"--build 'a;b$c{'/smoke' * (target == 'smoke')}'" in done.stdout, done
    assert "--gpu 'nvidia-h200'" in make(checkout, "-n", "figures", "PYTHON=true", "GPU=nvidia-h200").stdout
    assert "--gpu" not in make(checkout, "-n", "figures", "PYTHON=true").stdout


@pytest.mark.parametrize("large, option", [("", []), ("0", ["--no-large"]), ("1", ["--large"])])
def test_peers_come_with_every_python_and_before_every_measurement(large, option, checkout):
    for name in ("pyproject.toml", "constraints.txt", ".venv/.ready"):
        (checkout / name).touch()
    for python, run in (("", ".venv/bin/python"), ("true", "true")):
        for target in ("peers", "reproduce", "measure", "measure-all"):
            commands = make(checkout, "-n", target, f"LARGE={large}", f"PYTHON={python}").stdout.splitlines()
            (fetch,) = (command for command in commands if "fetch_peers" in command)
            assert fetch.split() == [f"'{run}'", "-P", "ropelab/bench/fetch_peers.py", *option]
            compiled = commands[commands.index(fetch) + 1]
            assert compiled.split() == [f"'{run}'", "-P", "ropelab/bench/compile_peers.py"]
            assert compiled == commands[-1] or target != "peers"


def test_what_a_target_needs_is_declared():
    """The names after ``NEEDS :=`` are extras or dependency groups of pyproject.toml, and make installs all of them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = settings["project"]["optional-dependencies"].keys(), settings["dependency-groups"].keys()
    text = (ROOT / "Makefile").read_text()
    needed = {name for line in re.findall(r"NEEDS := (.*)", text) for name in line.split()}
    assert "study" in needed and needed <= extras | groups
    assert set(re.findall(r"--group (\w+)", text)) == groups - {"release"}
    assert re.findall(r"--editable '\.\[([\w,]+)\]'", text) == [",".join(extras)]
