"""A function that several patches replace comes back when all of them are undone."""

import sys
from types import ModuleType
from unittest import mock

import pytest
import torch

from ropelab.interop import deepspeed
from ropelab.interop.broadcast import formula
from ropelab.interop.patch import Patch


def original(t, freqs_cos, freqs_sin):
    return formula(t, freqs_cos, freqs_sin)


@pytest.fixture
def layer():
    """DeepSpeed's file of the rotation, with the formula and without torchembed."""
    modules = {name: ModuleType(name) for name in ("deepspeed", "deepspeed.sequence", "deepspeed.sequence.layer")}
    found = modules["deepspeed.sequence.layer"]
    found.apply_rotary_pos_emb, found._torchembed_available = original, False
    with mock.patch.dict(sys.modules, modules | {"deepspeed.sequence.fpdt_layer": None}):
        yield found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_patches_of_deepspeed(torch_backend, layer, order):
    patches = deepspeed.patch(), deepspeed.patch()
    assert patches[1].functions == [] and repr(patches[1]).startswith("<already patched: deepspeed.sequence.layer.")
    patches[order[0]].undo()
    assert layer.apply_rotary_pos_emb is not original and layer._torchembed_available
    patches[order[0]].undo()
    assert layer.apply_rotary_pos_emb is not original
    patches[order[1]].undo()
    assert layer.apply_rotary_pos_emb is original and not layer._torchembed_available


def test_what_other_code_puts_there_stays():
    owner = ModuleType("owner")
    first = Patch({(owner, "f"): torch.sin})
    owner.f = torch.cos
    second = Patch({(owner, "f"): torch.tan})
    first.undo()
    assert owner.f is torch.tan
    second.undo()
    assert owner.f is torch.cos
