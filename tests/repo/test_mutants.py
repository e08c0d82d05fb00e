"""The planted faults still apply to the code; `python -m tests.mutants` sees that tests notice them."""

import pytest

from tests.mutants import ROOT, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_the_fault_applies(mutant):
    text = (ROOT / mutant.file).read_text()
    assert mutant.planted(text) != text
    assert all((ROOT / file).is_file() for file in mutant.tests)
