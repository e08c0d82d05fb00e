"""The package for the Hugging Face hub holds nothing but its own code, loads without ropelab, and computes the same."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ropelab.hub import build as hub

ROOT = Path(__file__).parents[2]

BLOCK = """
import sys
from pathlib import Path
sys.modules["ropelab"] = None  # from here on an import of ropelab raises
import torch
folder = Path(sys.argv[1])
"""
"""The first lines of a process that cannot import ropelab."""
TRAIN = """
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from kernels import use_kernelized_func
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama


def with_layer(model, device, layer="RotaryPosEmb"):
    mapping = {"rotary_pos_emb": {device: LocalLayerRepository(folder, layer_name=layer)}}
    mode = Mode.TRAINING | Mode.TORCH_COMPILE
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(model, mode=mode, device=device, use_fallback=False)


if not hasattr(modeling_llama.apply_rotary_pos_emb, "kernel_layer_name"):  # Transformers wants another kernels
    function = use_kernel_forward_from_hub("rotary_pos_emb")(modeling_llama.apply_rotary_pos_emb)
    modeling_llama.apply_rotary_pos_emb = function
    use_kernelized_func(function)(modeling_llama.LlamaAttention)
original = modeling_llama.apply_rotary_pos_emb.forward


def llama(**sizes):
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2, **sizes}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).train()
"""


def run(code: str, folder: Path, timeout: int = 300) -> str:
    """Run code in a process of its own, which finds packages but not this checkout, and return what it prints."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [path for path in paths if Path(path).resolve() != ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-P", "-c", BLOCK + code, str(folder)], capture_output=True, text=True, timeout=timeout,
        env=environment, cwd=folder,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "package"
    hub.build(path)
    return path


def test_a_folder_with_other_files_is_left_as_it_is(tmp_path):
    (tmp_path / "mine").write_text("text")
    with pytest.raises(ValueError, match="folder: expected an empty folder or an earlier package"):
        hub.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "mine").unlink()
    for _ in range(2):
        hub.build(tmp_path)
    assert (tmp_path / "build.toml").exists()


needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("kernels.validate") is None, reason="needs the package kernels"
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the package transformers"
)


def test_a_build_with_another_import_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "package", lambda: {"__init__.py": "import numpy\n"})
    with pytest.raises(ValueError, match="^imports: expected relative ones, .*imports numpy"):
        hub.build(tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.process
def test_it_computes_without_ropelab(folder):
    """Both variants at once in one process: full, partial, one tensor and adjacent pairs, with gradients."""
    run(
        """
import importlib.util

def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

cpu, cuda = (load(folder / "build" / f"torch-{backend}", f"_{backend}") for backend in ("cpu", "cuda"))
for module in (cpu, cuda):
    assert {"apply_rope", "apply_rotary_pos_emb", "apply_rotary_pos_emb_single", "layers"} < set(module.__all__)
torch.manual_seed(0)
q, k = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2))

def turned(x, cos, sin, adjacent):
    rotary, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if adjacent:
        other = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), -1).flatten(-2)
    else:
        first, second = rotary.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    return torch.cat((rotary * cos[:, None] + other * sin[:, None], tail), -1)

def agree(found, expected, *inputs):
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    cotangents = [torch.randn_like(y) for y in expected]
    for x in zip(*(torch.autograd.grad(ys, inputs, cotangents) for ys in (found, expected))):
        torch.testing.assert_close(*x, rtol=1e-13, atol=1e-13)

layers = cuda.layers
for rotary_dim in (8, 4):
    angles = torch.randn(2, 5, rotary_dim // 2, dtype=torch.float64)
    halves, pairs = torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1)
    for layer, table, adjacent in ((layers.RotaryPosEmb, halves, False), (layers.RotaryPosEmbAdjacent, pairs, True),
                                   (layers.RotaryPosEmbAdjacentTwice, halves, True)):
        expected = [turned(x, (pairs if adjacent else halves).cos(), (pairs if adjacent else halves).sin(), adjacent)
                    for x in (q, k)]
        agree(layer()(q, k, table.cos(), table.sin()), expected, q, k)
    agree([layers.RotaryPosEmbSingle()(q, halves.cos(), halves.sin())],
          [turned(q, halves.cos(), halves.sin(), False)], q)

weight = torch.rand(8, dtype=torch.float64)
normed = [x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight for x in (q, k)]
table = {"cos": angles[0].cos(), "sin": angles[0].sin()}
found = cuda.apply_qk_norm_rope(q, k, weight, weight, **table, seq_format="bhsd")
agree(found, cuda.apply_rope(*normed, **table, seq_format="bhsd"), q, k)
compiled = torch.compile(cpu.apply_rotary_pos_emb, backend="aot_eager", fullgraph=True)
agree(compiled(q, k, halves.cos(), halves.sin()), cuda.apply_rotary_pos_emb(q, k, halves.cos(), halves.sin()), q, k)
prefixes = {sys.modules[f"_{backend}._ops"].add_op_namespace_prefix("") for backend in ("cpu", "cuda")}
assert len(prefixes) == 2 and all(hasattr(getattr(torch.ops, prefix[:-2]), "rotate") for prefix in prefixes)
""",
        folder,
    )


@pytest.mark.process
@pytest.mark.peers
@needs_kernels
def test_kernels_accepts_it(folder):
    """The package kernels parses, checks and loads it, and finds every file as the digest says."""
    run(
        """
from kernels import get_local_kernel
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
from kernels.validate import AllValidator, default_metadata_validators

Build.open(folder)
for variant in ("torch-cpu", "torch-cuda"):
    path = folder / "build" / variant
    metadata = Metadata.read_from_file(path / "metadata.json")
    AllValidator(default_metadata_validators()).validate_metadata(metadata=metadata, variant=variant)
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, path))
    assert metadata.id.isidentifier() and metadata.python_depends == []
module = get_local_kernel(folder)
assert module.__name__ == Metadata.read_from_file(Path(module.__file__).parent / "metadata.json").id
""",
        folder,
    )


@pytest.mark.process
@pytest.mark.peers
@needs_kernels
@needs_transformers
def test_a_model_takes_the_layer(folder):
    """Loss and gradients of a Llama in float64 agree with its own function, eager and compiled without a break."""
    run(
        TRAIN
        + """
model = llama(hidden_size=64).double()
tokens = torch.randint(64, (2, 9))

def step(model):
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach()] + [x.grad.clone() for x in model.parameters()]

expected = step(model)
model = with_layer(model, "cpu")
assert modeling_llama.apply_rotary_pos_emb.forward.__func__.__module__.startswith("_ropelab_cpu_")
for found in (step(model), step(torch.compile(model, backend="aot_eager", fullgraph=True))):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
""",
        folder,
    )


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.peers
@needs_kernels
@needs_transformers
def test_a_model_trains_in_bfloat16(folder):
    """100 compiled steps with the layer stay as close to the float32 losses as the eager model's own rounding does.

    The rounding of bfloat16 moves the losses of every way to compute. The distance of the eager model's losses in
    bfloat16 from its losses in float32 measures by how much. The layer rounds once where the eager model rounds three
    times, so twice that distance bounds the losses of the layer. A rotation whose backward is wrong breaks the bound.
    """
    print(run(TRAIN + TRAINING, folder, timeout=600))


TRAINING = """
def losses(dtype, prepare):
    model = prepare(llama(hidden_size=256).cuda().to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(1)
    found = []
    for _ in range(100):
        half = torch.randint(64, (8, 32), generator=generator, device="cuda")
        tokens = torch.cat((half, half), 1)  # the second half repeats the first: only positions tell where to look
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach().float())
    return torch.stack(found)

def own(model):
    modeling_llama.apply_rotary_pos_emb.forward = original
    return model

def hub(model):
    return torch.compile(with_layer(model, "cuda"), fullgraph=True)

def wrong_backward(model):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, cos, sin):
            ctx.save_for_backward(cos, sin)
            return tuple(original(q, k, cos, sin))
        @staticmethod
        def backward(ctx, q, k):
            return *original(q, k, *ctx.saved_tensors), None, None
    modeling_llama.apply_rotary_pos_emb.forward = Wrong.apply
    return model

exact, eager, layer, wrong = (losses(*case) for case in (
    (torch.float32, own), (torch.bfloat16, own), (torch.bfloat16, hub), (torch.bfloat16, wrong_backward)))
bound = 2 * (eager - exact).abs().max()
found = {name: (x - exact).abs().max().item() for name, x in (("eager", eager), ("layer", layer), ("wrong", wrong))}
print({name: f"{x:.4f}" for name, x in found.items()}, f"bound {bound:.4f}",
      f"last losses {exact[-1]:.4f} {eager[-1]:.4f} {layer[-1]:.4f} {wrong[-1]:.4f}")
assert found["layer"] <= bound < found["wrong"], found
assert layer[-1] < layer[0] - 0.1
"""
