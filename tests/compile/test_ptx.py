"""The code of the rotation kernel: wide accesses, no spills, for GPUs that need not be there."""

import pytest

from ropelab.bench.records import ROOT
from ropelab.bench.unavailable import Unavailable
from tests.support import compile_for

NEWEST = ROOT / "build" / "triton-3.9.0"
"""``pip install --no-deps --target build/triton-3.9.0 triton==3.9.0`` puts the newest Triton here."""


@pytest.mark.parametrize(
    "target", [pytest.param("80", marks=pytest.mark.full), "90", pytest.param("100", marks=pytest.mark.full)]
)
def test_accesses_are_wide_and_registers_suffice(target):
    compile_for(target, "compile_kernel")


@pytest.mark.peers
def test_the_newest_triton_makes_such_code_too():
    if not NEWEST.is_dir():
        raise Unavailable(f"Triton in {NEWEST}")
    compile_for("100", "compile_kernel", str(NEWEST))


@pytest.mark.parametrize("target", ["gfx942"])
def test_amd_gpus_get_no_option_that_only_nvidia_has(target):
    compile_for(target, "compile_kernel")
