"""Models of Transformers whose projections and rotation become one call, on the path of one kernel."""

import warnings

import pytest
import torch

from ropelab import qkv_rope
from ropelab.call import projection
from ropelab.interop.huggingface import patch, projections
from tests.interop import tiny

MODELS = {
    "Llama": {"attention_bias": True}, "Qwen2": {}, "Cohere": {}, "Mistral": {"head_dim": 16}, "Glm": {"head_dim": 8},
}  # fmt: skip
TOKENS = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(0))


def build(name="Llama", dtype=torch.bfloat16, **options):
    return tiny.build(name, dtype, **options or MODELS.get(name, {}))


@pytest.fixture
def calls(monkeypatch):
    """The hidden states of each call of `qkv_rope` by a layer. Every size takes the path of one kernel."""
    made = []

    def counted(x, *arguments, **options):
        made.append(x)
        return qkv_rope(x, *arguments, **options)

    monkeypatch.setattr(projections, "qkv_rope", counted)
    for module in projection, projections:
        monkeypatch.setattr(module, "fastest", lambda work, device: "product")
    monkeypatch.setattr(projections, "uses_triton", lambda x: True)
    return made


def step(model, **options):
    """The logits in float32, and the gradients by name."""
    model.zero_grad()
    logits = model(TOKENS, use_cache=False, **options).logits.float()
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same(calls, torch_backend, name):
    """Results and gradients are no farther from float64 than those of the model itself, and the state_dict stays."""
    model = build(name)
    exact, state = build(name, torch.float64), {key: x.clone() for key, x in model.state_dict().items()}
    exact.load_state_dict(state)
    right, own = step(exact), step(model)
    with patch(model, projection=True):
        found = step(model)
        assert len(calls) == 2
        assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert not any("forward" in vars(layer) for layer in model.modules())
    assert_as_near(found, own, right)


def assert_as_near(found, own, right):
    """``found`` is about as near to float64 as the model's own results: it has as many roundings, which fall otherwise.

    The relative errors of all gradients count together, because a sum of few roundings varies. The bias of k has no
    gradient but roundings.
    """
    assert (found[0] - right[0]).norm() <= 1.5 * (own[0] - right[0]).norm()
    errors = [
        torch.stack([(made[key] - g).norm() / g.norm() for key, g in right[1].items() if "k_proj.bias" not in key])
        for made in (found[1], own[1])
    ]
    assert errors[0].norm() <= 1.5 * errors[1].norm()


def test_a_small_product_keeps_the_layers_own_projections(torch_backend):
    model = build()
    expected, _ = step(model)
    with patch(model):
        rotated, _ = step(model)
    with patch(model, projection=True):
        assert torch.equal(step(model)[0], rotated)
    assert torch.equal(step(model)[0], expected)


def test_a_cache_holds_what_the_layers_own_projections_would_write(calls, torch_backend):
    model, exact = build(), build(dtype=torch.float64)
    exact.load_state_dict(model.state_dict())

    def continued(model):
        with torch.no_grad():
            first = model(TOKENS[:, :4], use_cache=True)
            return model(TOKENS[:, 4:], past_key_values=first.past_key_values).logits

    own, right = continued(model), continued(exact)
    with patch(model, projection=True):
        found = continued(model)
    assert len(calls) == 4 and (found - right).norm() <= 1.5 * (own - right).norm()


def test_weights_that_were_moved_apart_are_not_joined(calls, torch_backend):
    model = build()
    with patch(model, projection=True):
        model.to(torch.float64).to(torch.bfloat16)
        with pytest.warns(UserWarning, match="keeps its own projections, because its weights were moved apart"):
            model(TOKENS)
    assert not calls


class LoRA(torch.nn.Module):
    """A linear layer with an update of rank 2, as adapters wrap it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.down = torch.nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = torch.nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Quantized(torch.nn.Linear):
    """Stands for the linear layers of packages that quantize."""


def wrapped(layer):
    layer.k_proj = LoRA(layer.k_proj)


def quantized(layer):
    layer.v_proj.__class__ = Quantized


def hooked(layer):
    layer.q_proj.register_forward_hook(lambda module, x, y: y * 2)


def own_forward(layer):
    layer.q_proj.forward = lambda x: torch.nn.functional.linear(x, 2 * layer.q_proj.weight, layer.q_proj.bias)


def parametrized(layer):
    torch.nn.utils.parametrizations.weight_norm(layer.k_proj)


REFUSED = {
    wrapped: "its k_proj is a LoRA, no plain linear layer", quantized: "its v_proj is a Quantized, no plain linear",
    hooked: "its q_proj has hooks", own_forward: "its q_proj has a sharded or a wrapped weight, or a forward of its",
    parametrized: "its k_proj is a ParametrizedLinear, no plain linear layer",
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_layer_that_cannot_keeps_its_own_projections_and_says_why_once(calls, torch_backend, change):
    models = build(), build(dtype=torch.float64)
    for model in models:
        torch.manual_seed(1)
        change(model.model.layers[1].self_attn)
    model, exact = models
    exact.load_state_dict(model.state_dict())
    own, right = step(model), step(exact)
    with patch(model, projection=True):  # the layer was changed before
        assert_as_near(step(model), own, right)
        assert len(calls) == 1
    model = build()
    with patch(model, projection=True):
        torch.manual_seed(1)
        change(model.model.layers[1].self_attn)  # and after
        with pytest.warns(UserWarning, match=f"a layer keeps its own projections, because {REFUSED[change]}"):
            assert_as_near(step(model), own, right)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model)


@pytest.mark.parametrize(
    "register",
    [torch.nn.modules.module.register_module_forward_hook, torch.nn.modules.module.register_module_forward_pre_hook],
)
def test_global_hooks_see_the_layers_own_projections(calls, torch_backend, register):
    """As profilers register them."""
    model, seen = build(), []
    with patch(model, projection=True):
        handle = register(lambda module, *_: seen.append(module))
        try:
            with pytest.warns(UserWarning, match="keeps its own projections, because PyTorch has global module hooks"):
                model(TOKENS)
        finally:
            handle.remove()
        assert not calls and sum(module is model.model.layers[0].self_attn.q_proj for module in seen) == 1
        model(TOKENS)
        assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Qwen3", "it does something between q_proj and the rotation"), ("GPTNeoX", "its q_proj is a NoneType")],
)
def test_models_that_are_refused(name, reason):
    model = build(name)
    with pytest.raises(ValueError, match=f"model: expected a layer that projects to q, k and v.*{reason}"):
        patch(model, projection=True)
    with pytest.raises(ValueError, match="projection: expected False beside qk_norm=True"):
        patch(model, projection=True, qk_norm=True)


def test_under_torch_compile_the_layers_keep_their_projections(calls, torch_backend):
    model = build()
    found = []
    for options in ({}, {"projection": True}):
        torch._dynamo.reset()
        with torch.no_grad(), patch(model, **options):
            found.append(torch.compile(model, backend="aot_eager")(TOKENS, use_cache=False).logits)
    assert not calls and torch.equal(*found)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed: a torch built with it")
def test_fully_sharded_layers(calls, torch_backend, tmp_path):
    """FSDP gathers each weight into a tensor of its own, so a layer keeps its projections."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model, exact = build(), build(dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        own, right = step(model), step(exact)
        with patch(model, projection=True):
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            with pytest.warns(UserWarning, match="because its weights were moved apart"):
                logits, grads = step(model)
            assert not calls
        whole = {key: g.full_tensor() if hasattr(g, "full_tensor") else g for key, g in grads.items()}
        assert_as_near((logits, whole), own, right)
        with pytest.raises(ValueError, match="has a sharded or a wrapped weight"):
            patch(model, projection=True)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_on_a_gpu():
    """With the path of the library, whichever it is."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model, exact = (build("Llama", dtype, **sizes).cuda() for dtype in (torch.bfloat16, torch.float64))
    exact.load_state_dict(model.state_dict())
    tokens = TOKENS.cuda().repeat(1, 300)
    with torch.no_grad():
        right, own = (m(tokens, use_cache=False).logits for m in (exact, model))
        with patch(model, projection=True):
            found = model(tokens, use_cache=False).logits
    assert (found - right).norm() <= 1.5 * (own - right).norm()
