"""Every operator computes its definition, up to the roundings that its arithmetic cannot avoid."""

import pytest
import torch

from ropelab.layout.seq_format import SEQ_FORMATS
from tests.ops.specs import CASES, OPERATORS, call_of, copied, excess, results

BOUNDED = [(operator, where) for operator, where in CASES if OPERATORS[operator].roundings]
FORMS = [
    ("split_half", torch.float32), ("interleaved", torch.bfloat16), ("split_half", torch.float16),
    ("interleaved", torch.float64),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "where"), BOUNDED)
@pytest.mark.parametrize("seq_format", SEQ_FORMATS)
@pytest.mark.parametrize(("layout", "dtype"), FORMS, ids=str)
def test_results_are_within_the_roundings_of_the_definition(torch_backend, operator, where, seq_format, layout, dtype):
    call = call_of(operator, where, layout, seq_format=seq_format, dtype=dtype)
    given = copied(call)
    assert excess(operator, given, results(operator, call)) <= 1


@pytest.mark.parametrize(("operator", "where"), BOUNDED)
def test_the_roundings_do_not_cover_the_other_layout(torch_backend, operator, where):
    call = call_of(operator, where)
    assert excess(operator, copied(call), results(operator, call | {"layout": "interleaved"})) > 10
