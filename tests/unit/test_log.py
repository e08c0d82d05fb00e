"""The log says of the first call of each kind what runs, and why no kernel does."""

import logging
import os
import subprocess
import sys

import pytest
import torch

import ropelab
from ropelab.kernels import INTERPRETED
from tests.environments import ROOT
from tests.support import forget

COS, SIN = ropelab.rotary_table(8, 16)
CALL = """
import torch, ropelab
cos, sin = ropelab.rotary_table(8, 16)
for _ in range(2):
    ropelab.apply_rope(torch.ones(1, 8, 3, 16), cos=cos, sin=sin)
"""


@pytest.mark.process
@pytest.mark.parametrize("value, lines", [("1", 1), ("0", 0), (None, 0)])
def test_the_variable_switches_it_on(value, lines):
    environment = {name: x for name, x in os.environ.items() if name != "ROPELAB_LOG"} | {"PYTHONPATH": str(ROOT)}
    environment |= {} if value is None else {"ROPELAB_LOG": value}
    done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, env=environment)
    found = [line for line in done.stderr.splitlines() if line.startswith("ropelab: ")]
    assert done.returncode == 0 and len(found) == lines, done.stderr
    assert not lines or "q [1, 8, 3, 16] float32" in found[0]


def test_a_line_says_what_runs_and_why(monkeypatch, caplog):
    forget(monkeypatch)
    caplog.set_level(logging.DEBUG, "ropelab")
    for _ in range(2):
        ropelab.apply_rope(torch.ones(1, 8, 2, 16), cos=COS, sin=SIN)
    with ropelab.use_backend("torch"):
        ropelab.apply_rope(torch.ones(1, 8, 2, 16), cos=COS, sin=SIN, layout="interleaved")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("rotate_triton.rotate" if INTERPRETED else "rotate_torch.rotate")
    assert ("one launch" if INTERPRETED else "cpu is no GPU") in first
    assert second.startswith("rotate_torch.rotate") and "interleaved" in second and "use_backend" in second
