"""The code of the rotation kernel: wide accesses, no spills, for GPUs that need not be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_accesses_are_wide_and_registers_suffice(target):
    compile_for(target)


@pytest.mark.parametrize("target", ["gfx942"])
def test_amd_gpus_get_no_option_that_only_nvidia_has(target):
    compile_for(target)


def compile_for(target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, ROOT / "tests" / "compile_kernel.py", target]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
