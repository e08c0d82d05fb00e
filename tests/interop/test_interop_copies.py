"""Copies of patched models of Transformers compute with their own weights, and a patch is undone for one model."""

import contextlib
import copy
import functools
import gc
import io
import sys
import weakref

import pytest
import torch

from ropelab import qkv_rope, rope_and_cache
from ropelab.call import projection as paths_of
from ropelab.interop.huggingface import caches, is_patched, patch, projections, unpatch
from tests.interop import tiny
from tests.interop.tiny import transformers

OPTIONS = {
    "default": ("Llama", {}), "default_normed": ("Qwen3", {}), "qk_norm": ("Qwen3", {"qk_norm": True}),
    "projection": ("Llama", {"projection": True}),
}  # fmt: skip
CACHES = ("none", "dynamic", "static")
TOKENS = torch.randint(1, 40, (2, 6), generator=torch.Generator().manual_seed(0))
pytestmark = [
    pytest.mark.usefixtures("torch_backend"),
    pytest.mark.filterwarnings("ignore:.*keeps its own projections, because its weights were moved apart"),
]


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    """How often layers called each of ropelab's functions. Every product takes the path of one kernel."""
    made = {"rope_and_cache": 0, "qkv_rope": 0}

    def counted(function):
        def call(*arguments, **options):
            made[function.__name__] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(caches, "rope_and_cache", counted(rope_and_cache))
    monkeypatch.setattr(projections, "qkv_rope", counted(qkv_rope))
    for module in paths_of, projections:
        monkeypatch.setattr(module, "fastest", lambda work, device: "product")
    monkeypatch.setattr(projections, "uses_triton", lambda x: True)
    return made


def build(name, dtype, seed=0):
    """A model with random weights, also of its norms."""
    model = tiny.build(name, seed=seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return model.to(dtype)


def dtype_of(options):
    return torch.bfloat16 if "projection" in options else torch.float64  # the kernel of the projection has 16 bits


def run(model, cache):
    """Logits, and the gradients where there is no cache."""
    if cache == "none":
        model.zero_grad()
        logits = model(TOKENS, use_cache=False).logits
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad for p in model.parameters())]
    filled = {"past_key_values": transformers.StaticCache(config=model.config, max_cache_len=8)}
    if cache == "dynamic":
        filled = {"past_key_values": transformers.DynamicCache(config=model.config)}
    with torch.no_grad():
        return [model(x, use_cache=True, **filled).logits for x in (TOKENS[:, :4], TOKENS[:, 4:5], TOKENS[:, 5:])]


def assert_computes_with_its_weights(model, name, cache):
    """The model is about as near to float64 as a model of its weights that was never patched.

    Norms of Transformers round float64 to float32, so the other model has float32 then.
    """
    rounded = torch.float32 if next(model.parameters()).dtype == torch.float64 else torch.bfloat16
    plain, exact = (build(name, dtype, seed=9) for dtype in (rounded, torch.float64))
    found = run(model, cache)
    for never_patched in plain, exact:
        never_patched.load_state_dict(model.state_dict())
    with unpatched(plain):
        own, right = run(plain, cache), run(exact, cache)

    def error(results):
        return sum(((x.double() - y).norm() / y.norm()).square() for x, y in zip(results, right, strict=True)).sqrt()

    assert error(found) <= 2 * error(own)


@contextlib.contextmanager
def unpatched(model):
    """Nothing of the model's architecture is patched inside of the block."""
    module = sys.modules[type(model).__module__]
    ours = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = getattr(ours, "__wrapped__", ours)
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = ours


def with_other_weights(model, name):
    model.load_state_dict(build(name, next(model.parameters()).dtype, seed=1).state_dict())
    return model


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    """PyTorch's running average of a model that was trained a step."""
    average = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1)
    average.update_parameters(model)
    average.update_parameters(model)
    return average.module


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, averaged])
@pytest.mark.parametrize("undo", ["never", "before copying", "after copying"])
@pytest.mark.parametrize("case", OPTIONS)
def test_a_copy_computes_with_its_own_weights(case, undo, copied, cache):
    name, options = OPTIONS[case]
    model = build(name, dtype_of(options))
    with patch(model, **options) as patched:
        if undo == "before copying":
            patched.undo()
        twin = copied(model)
        if undo == "after copying":
            patched.undo()
        if copied is not averaged:
            with_other_weights(twin, name)
        model.zero_grad()
        assert_computes_with_its_weights(twin, name, cache)
        assert all(p.grad is None for p in model.parameters())
        assert_computes_with_its_weights(model, name, cache)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("case", OPTIONS)
def test_a_copy_can_be_patched_and_unpatched(counts, case, copied, cache):
    name, options = OPTIONS[case]
    model = build(name, dtype_of(options))
    with patch(model, **options):
        twin = with_other_weights(copied(model), name)
    assert is_patched(twin) == (copied is copy.deepcopy)
    unpatch(twin)
    assert not is_patched(twin) and not any("forward" in vars(layer) for layer in twin.modules())
    twin = with_other_weights(copied(model), name)
    with patch(twin, **options):
        run(twin, cache)
        expected = {"rope_and_cache": 6 if cache == "static" else 0, "qkv_rope": 0}
        if "projection" in options and cache != "static":
            expected["qkv_rope"] = 2 if cache == "none" else 6
        assert counts == expected
        assert_computes_with_its_weights(twin, name, cache)
    assert not is_patched(twin)


def test_a_loaded_model_needs_nothing_of_ropelab():
    model = build("Qwen3", torch.float64)
    with patch(model, qk_norm=True):
        file = io.BytesIO()
        torch.save(model, file)
    assert b"ropelab" not in file.getvalue()


# ------------------------------------------------------------------------------------------- several patched models


@pytest.mark.parametrize("ways", [("undo", "undo"), ("unpatch", "undo"), ("undo", "unpatch"), ("unpatch", "unpatch")])
def test_a_model_stays_patched_until_its_own_patch_is_undone(ways):
    models = [build("Llama", torch.float64, seed) for seed in (0, 1)]
    module = sys.modules[type(models[0]).__module__]
    original = module.apply_rotary_pos_emb
    patches = [patch(model) for model in models]
    functions = patches[0].functions
    assert "already patched" not in repr(patches[0]) and f"already patched: {functions[1]}" in repr(patches[1])
    for i, way in enumerate(ways):
        assert module.apply_rotary_pos_emb is not original
        assert is_patched(models[1])
        patches[i].undo() if way == "undo" else unpatch(models[i])
        patches[i].undo()
        unpatch(models[i])
        assert not any("forward" in vars(layer) for layer in models[i].modules())
    assert module.apply_rotary_pos_emb is original and not any(map(is_patched, models))


def test_two_patches_of_a_model():
    model = build("Llama", torch.float64)
    first, second = patch(model), patch(model)
    assert repr(second).startswith("<already patched: ") and second.functions == []
    layers = [layer for layer in model.modules() if "forward" in vars(layer)]
    first.undo()
    assert is_patched(model) and all("forward" in vars(layer) for layer in layers)
    second.undo()
    assert not is_patched(model)
    with patch(model, qk_norm=False), pytest.raises(ValueError, match="patched already; unpatch the model first"):
        patch(model, projection=True)
    patch(model)
    patch(model)
    unpatch(model)
    assert not is_patched(model)


def test_a_wrapper_around_a_patched_forward_stays(counts):
    """As hooks of Accelerate wrap a forward, with the attributes of what they wrap."""
    model = build("Llama", torch.float64)
    patch(model)
    attention = model.model.layers[0].self_attn
    wrapper = functools.wraps(attention.forward)(lambda *args, **kwargs: None)
    attention.forward = wrapper
    unpatch(model)
    assert attention.forward is wrapper


def test_a_patch_keeps_no_model_alive():
    model = build("Qwen3", torch.float64)
    patched, gone = patch(model, qk_norm=True), weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    assert gone() is None
    patched.undo()


@pytest.mark.parametrize("function", [patch, unpatch, is_patched])
def test_what_is_no_model_is_refused(function):
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str 'Llama'"):
        function("Llama")
