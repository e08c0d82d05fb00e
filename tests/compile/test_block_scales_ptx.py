"""The code of the kernels with block scales: wide accesses, no spills, for GPUs that need not be there."""

import pytest

from tests.support import compile_for


@pytest.mark.parametrize(
    "target", [pytest.param("80", marks=pytest.mark.full), "90", pytest.param("100", marks=pytest.mark.full)]
)
def test_accesses_are_wide_and_registers_suffice(target):
    """GPUs before sm_89 convert to 8-bit floats by integers."""
    compile_for(target, "compile_block_scales")
