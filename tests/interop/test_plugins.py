"""The plugins of vLLM and SGLang and the override of torchtitan compute what the packages' own classes compute.

Each test runs the package itself in a process of its own and is skipped where the package is not installed. A process
without a GPU calls the classes' own functions in torch operations, and the methods for CUDA of ropelab.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

AGREE = """
import torch
torch.manual_seed(0)


def agree(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        # Both compute two products and a sum, rounded at most three times, and the terms are below 8.
        assert (ours - theirs).abs().max() <= 3 * 16 * torch.finfo(ours.dtype).eps, (ours - theirs).abs().max()
"""
SGLANG = """
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry
from ropelab.interop.sglang_plugin import register

before = {"forward_cuda": RotaryEmbedding.forward_cuda}  # SGLang replaces what modules hold themselves, too
register()
HookRegistry.apply_hooks()
assert RotaryEmbedding.forward_cuda is not before["forward_cuda"]

def bare(kind, head_size, rotary_dim, neox, dtype):
    # The constructor asks for a GPU's kernels; forward_cuda needs what follows alone.
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.head_size, module.rotary_dim, module.is_neox_style = head_size, rotary_dim, neox
    angles = torch.randn(64, rotary_dim // 2)
    module.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1).to(dtype))
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb
    module._apply_rotary_emb_wrapped = apply_rotary_emb
    return module

for kind in (RotaryEmbedding, Llama3RotaryEmbedding):
    for rotary_dim, neox in ((16, True), (16, False), (8, True)):
        module = bare(kind, 16, rotary_dim, neox, torch.float32)
        positions = torch.randint(0, 64, (7,))
        q, k = torch.randn(7, 4 * 16), torch.randn(7, 2 * 16)
        expected = module.forward_native(positions, q, k)
        found = module.forward_cuda(positions, q, k)
        agree(found, expected)
        assert found[0] is q and found[1] is k

from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
for section, interleaved in (([2, 3, 3], False), ([4, 2, 2], True)):
    module = bare(MRotaryEmbedding, 16, 16, True, torch.float32)
    module.mrope_section, module.mrope_interleaved, module.axis_map = section, interleaved, None
    positions = torch.randint(0, 64, (3, 7))
    q, k = torch.randn(7, 4 * 16), torch.randn(7, 2 * 16)
    expected = module.forward_native(positions, q, k)
    agree(module.forward_cuda(positions, q, k), expected)
module, positions = bare(RotaryEmbedding, 16, 16, True, torch.float32), positions[0]

calls = []
from ropelab.interop import sglang_plugin
sglang_plugin.forward_cuda(lambda *given: calls.append(given), module, positions, q, k, None, {"a cache": 1})
assert len(calls) == 1 and calls[0][-1] == {"a cache": 1}

# The rotation that also writes the pool: SGLang's own argument for it, and its own places in the pool.
from types import SimpleNamespace
value, slots = torch.randn(7, 2 * 16), torch.randperm(40)[:7]
pools = [torch.zeros(40, 2 * 16) for _ in "kv"]
fused = SimpleNamespace(value=value, k_buffer=pools[0], v_buffer=pools[1], cache_loc=slots)
expected = module.forward_native(positions, q, k)
found = sglang_plugin.forward_cuda(None, module, positions, q, k, None, fused)
agree(found, expected)
assert found[0] is q and found[1] is k
assert torch.equal(pools[0][slots], k) and torch.equal(pools[1][slots], value)
left = torch.ones(40, dtype=torch.bool)
left[slots] = False
assert not pools[0][left].any() and not pools[1][left].any()
fused.k_buffer = pools[0].to(torch.int8)  # a pool that the one pass does not write: SGLang's own method
sglang_plugin.forward_cuda(lambda *given: calls.append(given), module, positions, q, k, None, fused)
assert len(calls) == 2 and calls[1][-1] is fused
print("sglang", __import__("importlib.metadata").metadata.version("sglang"))
"""
TORCHTITAN = """
from dataclasses import dataclass, fields
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from ropelab.interop import torchtitan as ours

class Layer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        rope: CosSinRoPE.Config | ComplexRoPE.Config

# Tensors are [B, S, H, dim] in 0.3.0, and [T, H, dim] since pytorch/torchtitan#4121.
folded = "max_seq_len" not in {field.name for field in fields(CosSinRoPE.Config)}
length, tokens, rows = ("max_context_length", (7,), [(7,)]) if folded else ("max_seq_len", (2, 7), [(2, 7), (1, 7)])

for kind, factory, expected_kind in ((CosSinRoPE, "cos_sin_rope", ours.KernelCosSinRoPE),
                                     (ComplexRoPE, "complex_rope", ours.KernelComplexRoPE)):
    for scaling in ("none", "yarn") + (("llama",) if kind is ComplexRoPE else ()):
        config = kind.Config(dim=16, scaling=scaling, rope_factor=4.0, **{length: 64})
        layer = Layer.Config(rope=config)
        assert apply_overrides(OverrideConfig(imports=[f"ropelab.interop.torchtitan.{factory}"]), layer)
        replaced = layer.rope
        assert type(replaced) is expected_kind.Config and replaced.scaling == scaling
        own, other = replaced.build(), config.build()
        assert type(own) is expected_kind
        q, k = torch.randn(*tokens, 4, 16), torch.randn(*tokens, 2, 16)
        assert all(map(torch.equal, torch.fx.symbolic_trace(own)(q, k, None), own(q, k)))
        for positions in (None, *(torch.randint(0, 64, shape) for shape in rows)):
            q, k = (torch.randn(*tokens, heads, 16, requires_grad=True) for heads in (4, 2))
            transposed = [x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in (q, k)]
            for given in ((q, k), transposed):
                results = [module(*given, positions) for module in (own, other)]
                agree(*results)
                assert [y.stride() for y in results[0]] == [y.stride() for y in results[1]]
                cotangents = [torch.randn_like(x) for x in (q, k)]
                agree(*(torch.autograd.grad(ys, (q, k), cotangents, retain_graph=True) for ys in results))
for wrong, name in (((None, k), "query"), ((q, k, [0]), "positions"), ((q[0, 0], k), "query"), ((q, k[0, 0]), "key")):
    try:
        own(*wrong)
        raise AssertionError(name)
    except (TypeError, ValueError) as error:
        assert str(error).startswith(f"{name}: expected"), error
print("torchtitan", __import__("importlib.metadata").metadata.version("torchtitan"))
"""
TORCHTITAN_MLA = """
from dataclasses import dataclass
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.deepseek_v3 import deepseekv3_configs
from torchtitan.models.deepseek_v3.model import Attention
from torchtitan.overrides import fused_mla as theirs
from ropelab.interop import torchtitan_mla as ours

class Layer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        attention: Attention.Config

class Inner(torch.nn.Module):
    def forward(self, q, k, v, attention_masks, scale):
        self.value = v
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale).transpose(1, 2)

config = deepseekv3_configs["debugmodel"]("flex", "standard").layers[0].attention
layer = Layer.Config(attention=config)
assert apply_overrides(OverrideConfig(imports=["ropelab.interop.torchtitan_mla.fused_mla"]), layer)
assert theirs.fused_mla_kv is ours.fused_mla_kv and type(layer.attention) is theirs.FusedMLAAttention.Config
theirs.get_spmd_backend = lambda: "default"  # this process has no mesh
stock, own = config.build(), layer.attention.build()
for parameter in stock.parameters():
    torch.nn.init.normal_(parameter, std=0.05)
own.load_state_dict(stock.state_dict())
for module in (stock, own):
    module.double().inner_attention = Inner()
x = torch.randn(2, 7, config.dim, dtype=torch.float64, requires_grad=True)
cotangent = torch.randn_like(x)
for positions in (None, *(torch.randint(0, 64, shape) for shape in ((2, 7), (1, 7)))):
    expected = stock(x, None, positions)
    torch.Tensor.is_cuda = property(lambda self: True)  # on a CPU torchtitan's module takes the stock path
    found = own(x, None, positions)
    del torch.Tensor.is_cuda
    assert own.inner_attention.value.grad_fn.name() == "_AssemblyBackward" and own.inner_attention.value._is_view()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # angles in float32
    gradients = [torch.autograd.grad(y, [x, *module.parameters()], cotangent) for y, module in
                 ((found, own), (expected, stock))]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)

complex_cache = torch.polar(torch.ones(9, 4), torch.rand(9, 4))
q, kv, k_pe = torch.randn(2, 7, 3, 14), torch.randn(2, 7, 3, 11), torch.randn(2, 7, 8)
caches = complex_cache, torch.cat((complex_cache.real, complex_cache.imag), -1)
found = [(ours.fused_mla_q(q, c, None, 6), *ours.fused_mla_kv(kv, k_pe, c, None, 6)) for c in caches]
assert all(torch.equal(y, z) for y, z in zip(*found)) and found[0][2]._base is kv
traced = torch.fx.symbolic_trace(lambda kv, k_pe, cache: ours.fused_mla_kv(kv, k_pe, cache, None, 6))
assert all(map(torch.equal, traced(kv, k_pe, complex_cache), found[0][1:]))
for call, name in ((lambda: ours.fused_mla_q(q, complex_cache, None, 14), "q_nope_dim"),
                   (lambda: ours.fused_mla_kv(kv, k_pe[:, :, None], complex_cache, None, 6), "k_pe"),
                   (lambda: ours.fused_mla_kv(kv, k_pe, complex_cache[:, :3], None, 6), "rope_cache")):
    try:
        call()
        raise AssertionError(name)
    except (TypeError, ValueError) as error:
        assert str(error).startswith(f"{name}: expected"), error

# Of two ranks this one has the first heads, so the gradient of the k_pe that all heads share is a partial sum.
import torch.distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
plain = [x.clone().requires_grad_() for x in (q, kv, k_pe)]
placed = [DTensor.from_local(x, mesh, [p], run_check=False) for x, p in zip(plain, (Shard(2), Shard(2), Replicate()))]
placed = [x.detach().requires_grad_() for x in placed]
results = [(ours.fused_mla_q(q, complex_cache, None, 6), *ours.fused_mla_kv(kv, k_pe, complex_cache, None, 6))
           for q, kv, k_pe in (plain, placed)]
cotangents = [torch.randn_like(y) for y in results[0]]
expected = torch.autograd.grad(results[0], plain, cotangents)
found = torch.autograd.grad([y.to_local() for y in results[1]], placed, cotangents)
assert [y.placements for y in (*results[1], *found)] == [(Shard(2),)] * 5 + [(Partial(),)]
assert all(torch.equal(y.to_local(), z) for y, z in zip((*results[1], *found), (*results[0], *expected)))
print("torchtitan")
"""


def run(code: str) -> str:
    """Run code in a process of its own with this checkout and return what it prints."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def needs(name: str):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs the package {name}")


@pytest.mark.process
@needs("sglang")
def test_sglang_calls_the_kernel():
    assert "sglang" in run(AGREE + SGLANG)


@pytest.mark.process
@needs("torchtitan")
def test_torchtitan_builds_the_modules_over_the_kernel():
    assert "torchtitan" in run(AGREE + TORCHTITAN)


@pytest.mark.process
@needs("torchtitan")
def test_torchtitans_latent_attention_runs_over_the_kernels():
    assert "torchtitan" in run(AGREE + TORCHTITAN_MLA)


ENTRY = """
import sys, types
from importlib.metadata import EntryPoint
groups = {"vllm.general_plugins": "vllm", "sglang.srt.plugins": "sglang"}
for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
    sys.modules[name] = types.ModuleType(name)
hooks = []
registry = sys.modules["sglang.srt.plugins.hook_registry"]
registry.HookRegistry, registry.HookType = types.SimpleNamespace(register=lambda *hook: hooks.append(hook)), EntryPoint
registry.HookType.AROUND = "around"
for group, function in groups.items():
    EntryPoint("ropelab", f"ropelab_plugins:{function}", group).load()()
print("torch" in sys.modules, "ropelab.interop.vllm_plugin" in sys.modules, len(hooks))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "variables, found",
    [
        ({}, "False False 0"),
        ({"VLLM_PLUGINS": "", "SGLANG_PLUGINS": "others,ropelabs"}, "False False 0"),
        ({"VLLM_PLUGINS": "ropelab"}, "True True 0"),
        ({"SGLANG_PLUGINS": "others, ropelab"}, "True False 2"),
        ({"VLLM_PLUGINS": "ropelab", "SGLANG_PLUGINS": "ropelab", "ROPELAB_DISABLE": "1"}, "False False 0"),
    ],
)
def test_an_installed_plugin_waits_for_the_operator(monkeypatch, variables, found):
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS", "ROPELAB_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(ENTRY).split("\n")[-2] == found


def test_the_wheel_names_the_plugins():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert set(groups) == {"vllm.general_plugins", "sglang.srt.plugins", "pytest11"}
    assert groups.pop("pytest11") == {"ropelab": "pytest_ropelab"}
    for (entry,) in (group.values() for group in groups.values()):
        module, _, function = entry.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
