"""The code of the kernels with block scales: wide accesses, no spills, for GPUs that need not be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_accesses_are_wide_and_registers_suffice(target):
    """GPUs before sm_89 convert to 8-bit floats by integers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.compile_block_scales", target]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
