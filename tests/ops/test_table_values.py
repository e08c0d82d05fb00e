"""Every operator computes its definition, in every memory, by either backend, whoever called it before."""

import pytest
import torch

from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import SEQ_FORMATS
from tests.ops.specs import CASES, OPERATORS, call_of, copied, excess, results

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(("name", "where"), [case for case in CASES if OPERATORS[case[0]].roundings])
@pytest.mark.parametrize("seq_format", SEQ_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_within_the_roundings_of_the_definition(torch_backend, name, where, seq_format, dtype, layout):
    call = call_of(name, where, layout, seq_format=seq_format, dtype=dtype)
    given = copied(call)
    assert excess(name, given, results(name, call)) <= 1
