"""Every operator computes its definition, up to the roundings that its arithmetic cannot avoid."""

import pytest
import torch

from tests.ops.specs import (
    CASES,
    FORMS,
    OPERATORS,
    arguments,
    call_of,
    copied,
    excess,
    has_position,
    recorded,
    results,
    same,
)

BOUNDED = [(operator, where) for operator, where in CASES if OPERATORS[operator].roundings]


@pytest.mark.parametrize(("operator", "where"), BOUNDED)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_results_are_within_the_roundings_of_the_definition(torch_backend, operator, where, form):
    call = call_of(operator, where, *form)
    given = copied(call)
    assert excess(operator, given, results(operator, call)) <= 1


@pytest.mark.parametrize(("operator", "where"), BOUNDED)
def test_the_roundings_do_not_cover_the_other_layout(torch_backend, operator, where):
    call = call_of(operator, where)
    assert excess(operator, copied(call), results(operator, call | {"layout": "interleaved"})) > 10


def spoiled(call):
    """The call, with NaN and large numbers in what rotates of the tokens that have no position."""
    found = copied(call)
    for name in {"q", "k", "k_pe", "q_pe"} & call.keys():
        x, where = call[name], call if "seq_format" in call else call | {"seq_format": "thd"}
        heads = x if x.ndim == len(where["seq_format"]) else x.unsqueeze(-2)
        nowhere = ~has_position(heads, where).view(*x.shape[:-1], 1)
        found[name][..., ::2].masked_fill_(nowhere, torch.nan)
        found[name][..., 1::2].masked_fill_(nowhere, 1000.0)
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for NaN that a kernel makes and drops
@pytest.mark.parametrize("where", ["positions", "offsets", "axes"])
@pytest.mark.parametrize("operator", [x for x in OPERATORS if {"q", "q_pe", "k_pe"} & arguments(x).keys()])
def test_what_a_token_without_a_position_holds_does_not_matter(device, operator, where):
    """Its results are zeros, and it adds nothing to a gradient. Some features of a head do not rotate."""
    call = call_of(operator, where, seq_format="bshd", rest=5, device=device)
    assert same(recorded(operator, spoiled(call)), recorded(operator, copied(call)))
