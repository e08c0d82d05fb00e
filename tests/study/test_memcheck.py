"""`python -m ropelab.study memcheck` runs every kernel."""

import importlib
import pkgutil

import pytest

from ropelab import kernels
from ropelab.kernels import HAS_TRITON, INTERPRETED

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: a GPU runs the same calls in `memcheck`")
def test_every_kernel_is_run(monkeypatch):
    from tests.gpu import memcheck

    ran = set()

    def noting(name, run):
        def noted(*arguments, **options):
            ran.add(name)
            return run(*arguments, **options)

        return noted

    every = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        if module.name.endswith("_triton"):
            found = vars(importlib.import_module(f"ropelab.kernels.{module.name}"))
            every |= {f"{module.name}.{name}": x for name, x in found.items() if name.endswith("_kernel")}
    for name, kernel in every.items():
        monkeypatch.setattr(kernel, "run", noting(name.partition(".")[2], kernel.run))
    assert memcheck.operators() + memcheck.products() + memcheck.rotations([(1, 5, 2, 1, 16)]) > 80
    assert memcheck.packed(wild=[]) == 1  # a CPU refuses wild boundaries
    assert len(every) >= 11 and {name.partition(".")[2] for name in every} == ran
