"""The code of the rotation kernel: wide accesses, no spills, for GPUs that need not be there."""

import pytest

from tests.support import compile_for


@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_accesses_are_wide_and_registers_suffice(target):
    compile_for(target, "compile_kernel")


@pytest.mark.parametrize("target", ["gfx942"])
def test_amd_gpus_get_no_option_that_only_nvidia_has(target):
    compile_for(target, "compile_kernel")
