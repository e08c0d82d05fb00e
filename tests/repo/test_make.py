"""The Makefile installs what a target needs, removes what was generated, and runs nothing that a setting says."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):.*## ", TEXT, re.MULTILINE)
SETTINGS = ("PYTHON", "BASE_PYTHON", "ONLY", "GPU", "OPTIONS")
STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >> said
test "$2" != venv || { mkdir -p .venv/bin; cp "$0" .venv/bin/python; }
"""
"""A Python that notes what it is asked for, and makes environments of itself."""

pytestmark = [pytest.mark.process, pytest.mark.skipif(shutil.which("make") is None, reason="needs make")]


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile, what it reads, and a Python that stands in for all others."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(checkout, *arguments, **variables):
    """What the Python was asked for."""
    # This make must not be a part of the make that runs the tests and hands its own settings on.
    environment = {
        name: x for name, x in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", *SETTINGS)
    }
    said = checkout / "said"
    said.unlink(missing_ok=True)
    subprocess.run(["make", *arguments], cwd=checkout, env=environment | variables, capture_output=True, timeout=60)
    return said.read_text().splitlines() if said.exists() else []


def installed(said):
    return [line.partition("--group ")[2] for line in said if "--group" in line]


def test_a_target_installs_what_it_needs_and_the_next_one_what_is_missing(checkout):
    assert installed(make(checkout, "test", BASE_PYTHON="./python")) == ["study", "test"]
    assert installed(make(checkout, "lab", BASE_PYTHON="./python")) == ["lab"]
    assert installed(make(checkout, "check", BASE_PYTHON="./python")) == ["check"]
    assert installed(make(checkout, "reproduce", BASE_PYTHON="./python")) == ["peers"]
    assert not installed(make(checkout, "smoke", BASE_PYTHON="./python"))
    os.utime(checkout / "pyproject.toml", (2**32, 2**32))
    assert installed(make(checkout, "test", BASE_PYTHON="./python")) == ["study", "test"]


def test_nothing_comes_into_an_existing_environment(checkout):
    for target in set(TARGETS) - {"help", "clean"}:
        said = make(checkout, target, "PYTHON=./python")
        assert said and not any("pip" in line or "venv" in line for line in said), target
    assert not (checkout / ".venv").exists()


def test_settings_reach_the_commands(checkout):
    assert make(checkout, "measure", "PYTHON=./python", "ONLY=tiles te_layer")[-1].endswith("measure -- tiles te_layer")
    assert make(checkout, "reproduce", "PYTHON=./python", "GPU=nvidia-h200")[-1].endswith("reproduce --gpu nvidia-h200")
    assert make(checkout, "lab", "PYTHON=./python", "OPTIONS=--ip=* --port=1")[-1].endswith("lab -- --ip=* --port=1")


@pytest.mark.parametrize(
    "text", ["; touch y;", "`touch y`", "$(touch y)", "$(shell touch y)", "'; touch y; '", '"; touch y; "']
)
def test_no_setting_runs_a_command(text, checkout):
    expanded = {*re.findall(r"\$\(?(\w+)", TEXT), *SETTINGS, "BUILD", "VENV", "SMOKE"} - {"PYTHON", "PWD"}
    every = ("-k", *set(TARGETS) - {"clean"})
    for name in expanded:
        make(checkout, *every, PYTHON="./python", **{name: text})
    make(checkout, *every, "PYTHON=./python", *(f"{name}={text}" for name in ("BASE_PYTHON", "ONLY", "GPU", "OPTIONS")))
    make(checkout, *every, BASE_PYTHON=text)
    make(checkout, *every, PYTHON=text)
    assert not (checkout / "y").exists()


def test_clean_removes_what_was_generated_and_nothing_else(checkout):
    before = set(checkout.rglob("*"))
    for folder in ("build/report", ".venv/bin"):
        (checkout / folder).mkdir(parents=True)
    (checkout / "kept").mkdir()
    make(checkout, "clean", BUILD="kept", VENV="kept")
    assert set(checkout.rglob("*")) == before | {checkout / "kept"}
