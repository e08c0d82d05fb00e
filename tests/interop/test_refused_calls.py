"""Calls that the original refuses: an adapter or a patched layer refuses them, too, and returns nothing."""

import pytest
import torch

from ropelab.bench.packages import NotInstalled
from ropelab.interop import deepspeed, diffusers, huggingface
from tests.interop.deepspeed_package import deepspeed_sequence
from tests.interop.test_interop_copies import OPTIONS, build, counts, dtype_of, transformers  # noqa: F401  a fixture
from tests.ops.hostile_adapters import hostile

pytestmark = pytest.mark.usefixtures("torch_backend")
ERRORS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError)


def assert_refused_alike(original, adapter, call):
    """Each argument in turn becomes a value of another type, shape, dtype or device."""
    original(**call), adapter(**call)
    refused, taken = 0, []
    for argument, value in call.items():
        for what, wrong in hostile(value).items():
            if what.startswith(("empty", "without features")):  # no token or feature to lose
                continue
            try:
                original(**call | {argument: wrong})
            except ERRORS:
                refused += 1
                try:
                    adapter(**call | {argument: wrong})
                except ERRORS:
                    continue
                taken.append(f"{argument} = {what}")
    assert refused > 10 and not taken


@pytest.mark.parametrize("name", ["llama", "cohere", "glm", "gpt_oss", "deepseek_v3", "gemma3n", "qwen2_vl"])
def test_a_patched_function_of_transformers(name):
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    attribute = "apply_rotary_pos_emb_vision" if name == "qwen2_vl" else "apply_rotary_pos_emb"
    original = getattr(module, attribute)
    q, k, tables = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 4).repeat(1, 1, 1, 2)
    call = {"q": q, "k": k, "cos": tables[0], "sin": tables[1], "unsqueeze_dim": 1}
    if name == "gpt_oss":
        call |= {"cos": tables[0, ..., :4], "sin": tables[1, ..., :4]}
    if name == "gemma3n":
        call = {"x": q, "cos": tables[0], "sin": tables[1], "unsqueeze_dim": 1}
    if name == "qwen2_vl":
        call = {"q": q[0].transpose(0, 1), "k": k[0].transpose(0, 1), "cos": tables[0, 0], "sin": tables[1, 0]}
    with huggingface.patch(type("Layer", (torch.nn.Module,), {"__module__": module.__name__})()):
        assert_refused_alike(original, getattr(module, attribute), call)
    if name == "llama":
        assert_refused_alike(original, huggingface.apply_rotary_pos_emb, call)


def test_a_patched_function_of_diffusers():
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    original = embeddings.apply_rotary_emb
    call = {"x": torch.randn(2, 3, 5, 8), "freqs_cis": tuple(torch.randn(2, 5, 8)), "sequence_dim": 2}
    layer = type("Layer", (torch.nn.Module,), {"__module__": "diffusers.models.transformers.transformer_flux"})
    pytest.importorskip("diffusers.models.transformers.transformer_flux")
    with diffusers.patch(layer()):
        assert_refused_alike(original, embeddings.apply_rotary_emb, call)


def test_the_functions_of_deepspeed():
    cos, sin = torch.randn(2, 5, 1, 1, 8)
    call = {"t": torch.randn(5, 2, 3, 8), "freqs_cos": cos, "freqs_sin": sin}
    try:
        with deepspeed_sequence() as modules:
            original = modules[0].apply_rotary_pos_emb
            assert_refused_alike(original, deepspeed.apply_rotary_pos_emb, call)
            with deepspeed.patch():
                assert_refused_alike(original, modules[0].apply_rotary_pos_emb, call)
    except NotInstalled as missing:
        pytest.skip(f"{missing}: run make peers")


@pytest.mark.parametrize("cache", ["none", "static"])
@pytest.mark.parametrize("case", OPTIONS)
def test_a_patched_layer_of_transformers(case, cache):
    name, options = OPTIONS[case]
    model = build(name, dtype_of(options))
    layer, hidden = model.model.layers[0].self_attn, torch.randn(2, 5, 32, dtype=dtype_of(options))
    cos, sin = model.model.rotary_emb(hidden, torch.arange(5).expand(2, -1))
    wrong = {
        "tables of fewer tokens": {"position_embeddings": (cos[:, :4], sin[:, :4])},
        "tables of more tokens": {"position_embeddings": (cos.repeat(1, 2, 1), sin.repeat(1, 2, 1))},
        "tables of other sequences": {"position_embeddings": (cos.repeat(2, 1, 1)[:3], sin.repeat(2, 1, 1)[:3])},
        "tables of wider heads": {"position_embeddings": (cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))},
        "tables of an odd head": {"position_embeddings": (cos[..., :7], sin[..., :7])},
        "no tables": {"position_embeddings": None},
        "one table": {"position_embeddings": (cos,)},
        "narrow tokens": {"hidden_states": hidden[..., :30]},
        "tokens of another dtype": {"hidden_states": hidden.to(torch.float32)},
        "no tokens": {"hidden_states": None},
        "a mask of other tokens": {"attention_mask": torch.zeros(2, 1, 5, 4, dtype=hidden.dtype)},
    }

    def call(**changed):
        given = {"hidden_states": hidden, "position_embeddings": (cos, sin), "attention_mask": None}
        if cache == "static":
            given["past_key_values"] = transformers.StaticCache(config=model.config, max_cache_len=8)
        with torch.no_grad():
            return layer(**given | changed)[0]

    def refused(changed):
        try:
            call(**changed)
        except ERRORS:
            return True
        return False

    expected = call(), {what for what, changed in wrong.items() if refused(changed)}
    assert len(expected[1]) > 6
    with huggingface.patch(model, **options):
        call()
        found = {what for what, changed in wrong.items() if refused(changed)}
    assert expected[1] <= found, expected[1] - found
