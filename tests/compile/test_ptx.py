"""The code of the kernels: wide accesses, no spills, no waits in a product, for GPUs that need not be there."""

import pytest

from ropelab.bench.records import ROOT
from ropelab.bench.unavailable import Unavailable
from tests.support import compile_for

NEWEST = ROOT / "build" / "triton-3.9.0"
"""``pip install --no-deps --target build/triton-3.9.0 triton==3.9.0`` puts the newest Triton here."""


CODE = {
    "compile_kernel": ("80", "90", "100"),
    "compile_paged_cache": ("80", "90", "100"),
    "compile_block_scales": ("80", "90", "100"),
    "compile_latent": ("80", "90"),
    "compile_projection": ("90",),
}
"""Module -> the GPUs for which it compiles. Those before sm_89 convert to 8-bit floats by integers."""


@pytest.mark.parametrize(
    ("module", "target"),
    [
        pytest.param(module, target, marks=[pytest.mark.full] * (target != "90"))
        for module, targets in CODE.items()
        for target in targets
    ],
)
def test_accesses_are_wide_and_registers_suffice(module, target):
    compile_for(target, module)


@pytest.mark.peers
def test_the_newest_triton_makes_such_code_too():
    if not NEWEST.is_dir():
        raise Unavailable(f"Triton in {NEWEST}")
    compile_for("100", "compile_kernel", str(NEWEST))


@pytest.mark.parametrize("target", ["gfx942"])
def test_amd_gpus_get_no_option_that_only_nvidia_has(target):
    compile_for(target, "compile_kernel")
