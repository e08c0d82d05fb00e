"""The code of the kernels of `assemble_mla`: wide accesses, no spills, for GPUs that need not be there."""

import pytest

from tests.support import compile_for


@pytest.mark.parametrize("target", [pytest.param("80", marks=pytest.mark.full), "90"])
def test_accesses_are_wide_and_registers_suffice(target):
    compile_for(target, "compile_latent")
