"""The code of the rotation kernel: wide accesses, no spills, for GPUs that need not be there."""

import pytest

from ropelab.bench import other_triton
from ropelab.bench.unavailable import Unavailable
from tests.support import compile_for


@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_accesses_are_wide_and_registers_suffice(target):
    compile_for(target, "compile_kernel")


@pytest.mark.peers
def test_the_newest_triton_makes_such_code_too():
    if not other_triton.at_hand(other_triton.NEWEST):
        raise Unavailable(f"Triton {other_triton.NEWEST} (python -m ropelab.bench.other_triton {other_triton.NEWEST})")
    compile_for("100", "compile_kernel", str(other_triton.folder(other_triton.NEWEST)))


@pytest.mark.parametrize("target", ["gfx942"])
def test_amd_gpus_get_no_option_that_only_nvidia_has(target):
    compile_for(target, "compile_kernel")
