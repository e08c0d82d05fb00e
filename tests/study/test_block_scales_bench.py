"""The study of block scales: its check accepts our functions and rejects the faults of such operators."""

import pytest
import torch

import ropelab
from ropelab.bench.block_scales import BLOCK_SIZE, Indexer, Input, Output
from ropelab.kernels.block_scales_torch import rows_of_cache

CASES = [Output(5, 64), Output(5, 64, packed=True), Indexer(5), Input(70, 64)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.columns.get('scales', '')}")
def test_our_functions_pass(torch_backend, case):
    for call in case.tensors(2, "cpu"):
        assert case.agreement(call, case.ours(call)) == "ok"


def in_bytes(x):
    return x.view(torch.uint8)


FAULTS = {
    "floor instead of ceiling": lambda out, scales: (out, scales / 2),
    "scale of the neighbouring block": lambda out, scales: (out, scales.roll(1, -1)),
    "groups in another order": lambda out, scales: (in_bytes(out).roll(1, 1).view(out.dtype), scales.roll(1, 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_wrong(torch_backend, fault):
    case = Output(5, 64)
    (call,) = case.tensors(1, "cpu")
    call["x"] *= torch.logspace(-2, 2, 4).repeat_interleave(128)  # no block has the scale of its neighbour
    assert case.agreement(call, case.ours(call)) == "ok"
    assert case.agreement(call, FAULTS[fault](*case.ours(call))).startswith("wrong")


def test_a_rotation_that_is_not_inverted_is_wrong(torch_backend):
    case = Output(5, 64)
    (call,) = case.tensors(1, "cpu")
    found = ropelab.rope_and_quantize(call["x"], groups=case.groups, **case.where(call))
    assert case.agreement(call, found).startswith("wrong")


def test_exponents_in_another_order_are_wrong(torch_backend):
    case = Output(5, 64, packed=True)
    (call,) = case.tensors(1, "cpu")
    call["x"] *= torch.logspace(-2, 2, 4).repeat_interleave(128)
    out, scales = case.ours(call)
    turned = scales.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2).view(torch.int32)
    assert case.agreement(call, (out, scales)) == "ok" and case.agreement(call, (out, turned)).startswith("wrong")


@pytest.mark.parametrize("part", ["q", "tail", "scale", "row"])
def test_a_wrong_cache_is_wrong(torch_backend, part):
    case = Input(BLOCK_SIZE, 64)
    (call,) = case.tensors(1, "cpu")
    (q,) = case.ours(call)
    assert case.agreement(call, (q,)) == "ok"
    data, scales = rows_of_cache(call["cache"], case.page)
    if part == "q":
        q = q * 1.01
    elif part == "tail":
        data[..., 449::2] ^= 0x40  # the exponents of the features that rotate
    elif part == "scale":
        scales += 1
    else:
        data.copy_(data.roll(1, 1))
    assert case.agreement(call, (q,)).startswith("wrong")
