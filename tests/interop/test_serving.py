"""Layers of a server take norm, rotation and cache write in one pass, or keep their own calls and say why.

The tests of vLLM run its own model classes in a process for each model and are skipped where vLLM is not installed.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ropelab.interop.probe import Refused, StandIn
from ropelab.interop.vllm_layers import Found, probe, random_heads

ROOT = Path(__file__).parents[2]
HEADS, SIZE = 4, 6


class Layer(torch.nn.Module):
    """An attention layer as servers have it; a subclass does something else."""

    rotated_by = staticmethod(lambda positions: positions)

    def forward(self, positions, hidden_states):
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.chunk(3, -1)
        q, k = self.before(q, k)
        q, k = self.rotary_emb(self.rotated_by(positions), q, k)
        q, k = self.after(q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return out

    def before(self, q, k):
        return q, k

    after = before

    def normalized(self, q, k):
        q = self.q_norm(q.view(-1, HEADS, SIZE)).view(q.shape)
        return q, self.k_norm(k.view(-1, HEADS, SIZE)).view(k.shape)


class NormFirst(Layer):
    def before(self, q, k):
        return self.normalized(q, k)


class NormAfter(Layer):
    def after(self, q, k):
        return self.normalized(q, k)


class Scaled(Layer):
    def after(self, q, k):
        return q * 2, k


class QueryNormAlone(Layer):
    def before(self, q, k):
        return self.q_norm(q.view(-1, HEADS, SIZE)).view(q.shape), k


class OtherPositions(Layer):
    rotated_by = staticmethod(lambda positions: positions + 1)


class Gated(Layer):
    def after(self, q, k):
        self.gate(q)
        return q, k


class Fails(Layer):
    def before(self, q, k):
        raise RuntimeError("no GPU")


def probed(kind: type) -> Found:
    width = HEADS * SIZE
    made = {name: random_heads(features) for name, features in (("qkv_proj", 3 * width), ("o_proj", 8), ("gate", 1))}
    parts = {name: lambda x, made=x: (made, None) for name, x in made.items()}
    return probe(
        kind(), rotary="rotary_emb", attention="attn", norms=("q_norm", "k_norm"), parts=parts,
        attention_width=width,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "found"),
    [(Layer, Found()), (NormFirst, Found("q_norm", "k_norm", True)), (NormAfter, Found("q_norm", "k_norm", False))],
)
def test_the_probe_finds_the_norms_and_their_place(kind, found):
    assert probed(kind) == found


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scaled, "something happens to q between its rotation and the attention"),
        (QueryNormAlone, "q and k are not normalized alike"),
        (OtherPositions, "other positions than those of its tokens"),
        (Gated, "gate uses q or k besides the attention"),
        (Fails, "did not run with random numbers: RuntimeError: no GPU"),
    ],
)
def test_the_probe_refuses_a_layer_that_does_something_else(kind, reason):
    with pytest.raises(Refused, match=reason):
        probed(kind)


def test_a_stand_in_has_the_attributes_of_the_layer_and_its_own_parts():
    layer = Layer()
    layer.scale, layer.o_proj = 3, 4
    stand = StandIn(layer, {"o_proj": 5})
    assert (stand.scale, stand.o_proj) == (3, 5)
    with pytest.raises(AttributeError, match="missing"):
        _ = stand.missing


# ---------------------------------------------------------------------------------------------------------------- vLLM

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the package vllm")
MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3-mrope", "gemma2", "gemma3", "glm4", "phi3", "deepseek_v3",
)  # fmt: skip

PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
ENVIRONMENT = os.environ | {
    "PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "",
}  # fmt: skip


def run(*arguments: str) -> dict:
    """What tests/interop/serving_vllm.py finds out about a model."""
    process = subprocess.run(
        [sys.executable, str(ROOT / "tests/interop/serving_vllm.py"), *arguments],
        capture_output=True, text=True, timeout=300, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.process
@needs_vllm
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_vllm_computes_the_same_in_one_pass(model):
    found = run(model, "auto")
    assert found["outcomes"] == {"served": 2} and found["broken"] == [False, False]
    # The norm, two products and a sum of the rotation, each rounded, in two layers. A product with a weight matrix of
    # 64 terms around 0.2 multiplies an error by at most the sum of the magnitudes, less than 64.
    assert found["caches_apart"] <= 64 * 8 * torch.finfo(torch.float32).eps * found["cache_scale"]
    assert found["apart"] <= 64 * 64 * 8 * torch.finfo(torch.float32).eps * found["scale"]
    assert found["compiled_apart"] == 0 and found["ran"] == [True, True]
    # A call that fails leaves the layer with vLLM's own norm, rotation and cache write.
    assert found["fallen"] == [True, True] and found["fallen_apart"] == found["fallen_caches_apart"] == 0


@pytest.mark.process
@needs_vllm
@pytest.mark.parametrize("model", ["qwen3", "llama"])
def test_a_cache_in_8_bit_floats_has_the_nearest_numbers(model):
    """vLLM's own write is no measure here: Triton's interpreter loses a carry when it rounds to 8 bits."""
    found, exact = run(model, "fp8"), run(model, "auto")
    assert found["outcomes"] == {"served": 2} and found["broken"] == [False, False]
    in_float32, in_8_bits = (torch.tensor(each["first_cache"][1]) for each in (exact, found))
    assert torch.equal(in_8_bits, in_float32.to(torch.float8_e4m3fn).float()) and in_8_bits.any()


@pytest.mark.process
@needs_vllm
def test_a_cache_that_the_pass_does_not_write_leaves_the_layers_as_they_are():
    found = run("qwen3", "fp8_e5m2")
    assert found["outcomes"] == {"its cache is in fp8_e5m2": 2} and found["broken"] == found["fallen"] == []


@pytest.mark.process
@needs_vllm
def test_the_environment_switches_the_plugin_off():
    code = """
from ropelab.interop.vllm_plugin import register
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
register()
register()
print(hasattr(BaseModelLoader.load_model, "of_ropelab"))
"""
    for switch, on in (("0", "True"), ("1", "False")):
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
            env=ENVIRONMENT | {"ROPELAB_DISABLE": switch},
        )  # fmt: skip
        assert process.stdout.split()[-1] == on, process.stderr[-2000:]
