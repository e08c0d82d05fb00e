"""DeepSpeed's own files on a GPU, with the kernel of torchembed and with ours, against the definition."""

import pytest
import torch

from ropelab.interop.deepspeed import patch
from ropelab.study.documents import deepspeed
from tests.interop.deepspeed_package import deepspeed_sequence

pytestmark = pytest.mark.gpu


@pytest.fixture
def files():
    """DeepSpeed's sequence layer and FPDT layer."""
    with deepspeed_sequence() as modules:
        yield modules


def draw(case):
    t, cotangent = (torch.randn(case.t, device="cuda", dtype=case.dtype) for _ in range(2))
    return t, cotangent, deepspeed.caller_tables(case, "cuda")


@pytest.mark.peers
@pytest.mark.parametrize("case", deepspeed.calls_of_callers(64), ids=lambda case: case.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_patched_function_is_the_definition_for_every_caller(files, case, direction):
    layer, fpdt_layer = files
    t, cotangent, tables = draw(case)
    with patch():
        for function in (layer.apply_rotary_pos_emb, fpdt_layer.apply_rotary_pos_emb):
            assert deepspeed.checked(function, case, t, cotangent, tables, direction)["status"] == "ok"


@pytest.mark.peers
@pytest.mark.parametrize("case", deepspeed.calls_of_callers(64), ids=lambda case: case.name)
def test_the_patched_backward_of_fpdt_is_the_gradient(files, case):
    layer, fpdt_layer = files
    t, cotangent, tables = draw(case)
    leaf = t.double().requires_grad_()
    y = layer.apply_rotary_pos_emb(leaf, *(table.double() for table in tables))
    (expected,) = torch.autograd.grad(y, leaf, cotangent.double())
    theirs = fpdt_layer.apply_rotary_pos_emb_backward(cotangent, *tables)
    with patch():
        ours = fpdt_layer.apply_rotary_pos_emb_backward(cotangent, *tables)
    assert ours.dtype == theirs.dtype
    assert (ours.double() - expected).norm() <= deepspeed.rounding_bound(ours.dtype) * expected.norm()


@pytest.mark.peers
@pytest.mark.parametrize("version", ["0.3.0", "0.3.1", "0.3.2"])
def test_the_gate_of_deepspeed_reaches_torchembed_on_the_gpu(files, monkeypatch, version):
    """The gate takes tables that follow axis 0. The gradient of 0.3.0 is wrong, and with the patch it is right."""
    layer, _ = files
    kernel = deepspeed.torchembed(version).fused_rope_forward
    monkeypatch.setattr(layer, "_torchembed_available", True)
    monkeypatch.setattr(layer, "_torchembed_rope_forward", kernel, raising=False)
    case, *_ = deepspeed.calls_of_callers(64)
    t, cotangent, tables = draw(case)
    own = layer.apply_rotary_pos_emb
    found = {direction: deepspeed.checked(own, case, t, cotangent, tables, direction)["status"] for direction in
             ("forward", "backward")}  # fmt: skip
    assert found["forward"] == "ok" and (found["backward"] == "ok") == (version != "0.3.0")
    with patch():
        for direction in found:
            for function in (layer.apply_rotary_pos_emb, own):  # `own` goes through the gate to our backend
                assert deepspeed.checked(function, case, t, cotangent, tables, direction)["status"] == "ok"
    assert layer._torchembed_rope_forward is kernel
