"""The machine code of the study's own kernels: models of other grids, and launches that depend on the one before."""

import os
import subprocess
import sys

import pytest

from tests.environments import ROOT


@pytest.mark.process
def test_kernels_access_memory_as_they_say():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), *sys.path))
    command = [sys.executable, "-m", "tests.study.compile_models"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
