"""The calls of other libraries on the page for those who come from them return what ours beside them return."""

import math
import re
import sys
from types import ModuleType

import pytest
import torch

from ropelab.study.faults import correct
from ropelab.study.site import summary

BLOCKS = re.findall(
    r"^```(py|python)\n(.*?)^```$", (summary.GUIDE / "coming_from.md").read_text(), re.DOTALL | re.MULTILINE
)


def make_interleaved_inv_freq(inv_freq, rotated, rest):
    """quack's table ``[N]``: two numbers whose sum is the turns of a pair, and zeros for v."""
    turns = inv_freq / (2 * math.pi)
    pairs = torch.stack((turns.float(), (turns - turns.float()).float()), dim=1).flatten()
    return torch.cat((pairs.repeat(rotated // len(pairs)), pairs.new_zeros(rest)))


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return correct.huggingface(q, k, cos, sin, unsqueeze_dim)


STAND_INS = {
    "flash_attn.layers.rotary": {"apply_rotary_emb": correct.flash_attn},
    "liger_kernel.transformers.rope": {"liger_rotary_pos_emb": liger_rotary_pos_emb},
    "quack.epilogue.rotary": {
        "make_interleaved_inv_freq": make_interleaved_inv_freq, "rope_posfreq_epi": correct.rope_posfreq_epi,
    },
}  # fmt: skip
"""A module that a CPU does not have -> right functions with the signatures of its functions."""


@pytest.fixture
def stand_ins(monkeypatch):
    pytest.importorskip("transformers.models.llama.modeling_llama")  # before it looks for flash_attn
    for name, functions in STAND_INS.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(functions)


def test_both_calls_return_the_same(stand_ins, torch_backend):
    here, theirs, compared = {}, None, 0
    for language, code in BLOCKS:
        exec(code, here)
        if language == "py":
            theirs = here.pop("q_out"), here.pop("k_out")
        elif theirs is not None:
            for mine, other in zip((here["q_out"], here["k_out"]), theirs, strict=True):
                torch.testing.assert_close(mine.reshape(other.shape), other)
            theirs, compared = None, compared + 1
    assert compared == sum(language == "py" for language, _ in BLOCKS) >= 6
