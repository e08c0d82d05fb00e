"""The study of block scales: its check accepts our functions and rejects the faults of such operators."""

import sys
from unittest import mock

import pytest
import torch

import ropelab
from ropelab.bench import packages
from ropelab.bench.block_scales import BLOCK_SIZE, Indexer, Input, Output
from ropelab.bench.peers import vllm_triton
from ropelab.kernels.block_scales_torch import rows_of_cache

CASES = [Output(5, 64), Output(5, 64, packed=True), Indexer(5), Input(70, 64)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.columns.get('scales', '')}")
def test_our_functions_pass(torch_backend, case):
    for call in case.tensors(2, "cpu"):
        assert case.check(call, case.ours(call)) == "ok"


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
    assert case.check(call, case.ours(call)) == "ok"
    assert case.check(call, FAULTS[fault](*case.ours(call))).startswith("wrong")


def test_a_rotation_that_is_not_inverted_is_wrong(torch_backend):
    case = Output(5, 64)
    (call,) = case.tensors(1, "cpu")
    found = ropelab.rope_and_quantize(call["x"], groups=case.groups, **case.where(call))
    assert case.check(call, found).startswith("wrong")


def test_exponents_in_another_order_are_wrong(torch_backend):
    case = Output(5, 64, packed=True)
    (call,) = case.tensors(1, "cpu")
    call["x"] *= torch.logspace(-2, 2, 4).repeat_interleave(128)
    out, scales = case.ours(call)
    turned = scales.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2).view(torch.int32)
    assert case.check(call, (out, scales)) == "ok" and case.check(call, (out, turned)).startswith("wrong")


@pytest.mark.parametrize("part", ["q", "tail", "scale", "row"])
def test_a_wrong_cache_is_wrong(torch_backend, part):
    case = Input(BLOCK_SIZE, 64)
    (call,) = case.tensors(1, "cpu")
    (q,) = case.ours(call)
    assert case.check(call, (q,)) == "ok"
    data, scales = rows_of_cache(call["cache"], case.page)
    if part == "q":
        q = q * 1.01
    elif part == "tail":
        data[..., 449::2] ^= 0x40  # the exponents of the features that rotate
    elif part == "scale":
        scales += 1
    else:
        data.copy_(data.roll(1, 1))
    assert case.check(call, (q,)).startswith("wrong")


def test_a_machine_without_vllm_says_so(torch_backend):
    missing = mock.patch.object(packages, "locate", side_effect=packages.NotInstalled("vllm not installed"))
    vllm_triton.operators.cache_clear()
    with missing, pytest.raises(packages.NotInstalled, match="vllm not installed"):
        Output(1, 64).vllm()


def test_a_launcher_fills_the_parameters_of_a_kernel():
    """Arguments by name, without ``_ptr``, or as the method says; the rest are options."""
    found = {}

    class Kernel(vllm_triton._JitKernel["key"]):
        kernel = mock.MagicMock(arg_names=["x_ptr", "tokens", "WIDTH"])

        @vllm_triton._launcher
        def __call__(self, x, *, tokens):
            return (tokens, 2), {"WIDTH": 8, "num_warps": 1}

    Kernel.kernel.__getitem__ = lambda self, grid: lambda **given: found.update(given, grid=grid)
    Kernel()("address", tokens=3)
    assert found == {"x_ptr": "address", "tokens": 3, "WIDTH": 8, "num_warps": 1, "grid": (3, 2)}
    assert "vllm.platforms" not in sys.modules
