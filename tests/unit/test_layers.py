"""`rope_from_config` of one layer, beside the layers of transformers' models that rotate."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

from ropelab import rope_from_config
from ropelab.angles import model_types
from ropelab.conformance.models import factory
from ropelab.interop.huggingface.model import rotation_functions
from tests.models import rotary_classes
from tests.support import older

transformers = pytest.importorskip("transformers")
OLDER = older("transformers")
pytestmark = pytest.mark.skipif(bool(OLDER), reason=OLDER)
FIELDS = {
    # fields of a model of two layers, where its own would let both rotate
    "llama4": {"no_rope_layers": [1, 0]}, "smollm3": {"no_rope_layers": [0, 1]},
    "muse_spark": {"layer_rope_theta": [0, 500000.0]}, "mllama": {"cross_attention_layers": [1]},
}  # fmt: skip
MODELS = (
    "afmoe bailing_hybrid bamba beam cohere2 cohere2_moe exaone4 exaone_moe flint kolibri1 lfm3 llama4 minimax mllama "
    "muse_spark olmo_hybrid qwen3_next smollm3 llama gemma3 deepseek_v4".split()
)


def built(architecture, fields):
    """A tiny model and the configuration of its text."""
    for kind in factory._classes(architecture) if fields else ():
        if set(fields) <= set(inspect.signature(kind.config_class).parameters):
            model = factory.made_of(architecture, kind, **fields)
            return model, model.model.config
    model = factory.build(architecture)
    return model, model.model.config.get_text_config()


@pytest.mark.parametrize("architecture", MODELS)
def test_the_layers_that_rotate_are_those_of_the_model(monkeypatch, architecture):
    tiny, config = built(architecture, FIELDS.get(architecture, {}))
    inside, rotated, layers = [], set(), set()
    for module in tiny.model.modules():
        if isinstance(layer := getattr(module, "layer_idx", None), int):
            layers.add(layer)
            module.register_forward_pre_hook(lambda module, given: inside.append(module.layer_idx))
            module.register_forward_hook(lambda module, given, result: (inside.pop(), None)[1])
    for (module, name), function in rotation_functions(tiny.model):

        def rotates(*arguments, _function=function, **options):
            rotated.update(inside[-1:])
            return _function(*arguments, **options)

        monkeypatch.setattr(module, name, rotates)
    with torch.no_grad():
        tiny.output()
    assert layers == set(range(config.num_hidden_layers))
    assert {layer for layer in layers if rope_from_config(config, layer=layer) is not None} == rotated


def test_every_layer_of_every_model_is_none_or_the_rotation_of_its_type():
    """Each architecture that `rope_from_config` takes, with the fields that its class has by default."""
    looked_at = 0
    for architecture in factory.architectures():
        for config in rotary_classes.configurations(architecture):
            name = config.model_type.removesuffix("_text")
            types = getattr(config, "layer_types", None)
            if name not in model_types.KNOWN_MODELS or name in ("codegen", "gptj") or not types:
                continue
            for layer, layer_type in enumerate(types):
                found = rope_from_config(config, layer=layer)
                try:
                    of_type = rope_from_config(config, layer_type=layer_type)
                except ValueError as refusal:
                    assert found is None and "expected layers that rotate" in str(refusal), (name, layer)
                else:
                    same = found is None or torch.equal(found.inverse_frequencies, of_type.inverse_frequencies)
                    assert same, (name, layer)
                looked_at += 1
    assert looked_at > 1000


DECIDED_OTHERWISE = {
    # conditions on the call or on the whole model, and a later part of one that rotates in any case
    "clvp", "deepseek_v4", "efficientloftr", "esm", "evolla", "falcon", "gemma3n", "gemma4", "gemma4_unified",
    "idefics", "kyutai_speech_to_text", "lightglue", "moonshine", "moonshine_streaming", "moshi", "qwen4_exp",
    "roformer", "seamless_m4t", "wav2vec2_bert", "wav2vec2_conformer", "cohere_compass",
    "mistral_large4",  # refused
    "exaone4_5",  # its text is an exaone4
}  # fmt: skip
BY_LISTS = {"llama4", "smollm3", "granite_swa", "granitemoe_swa", "muse_glimmer", "muse_spark", "zamba2"}


def test_every_model_whose_layers_decide_whether_to_rotate_is_known():
    found = set()
    for architecture in factory.architectures():
        for name in factory.modeling_files(architecture):
            code = Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
            within_a_method = re.search(r"^ {12,}.*apply_\w*rotary|apply_\w*rotary.* if ", code, re.MULTILINE)
            tree = ast.walk(ast.parse(code)) if within_a_method else ()  # most files have no decision
            for decision in (node for node in tree if isinstance(node, (ast.If, ast.IfExp))):
                parts = [part if isinstance(part, list) else [part] for part in (decision.body, decision.orelse)]
                calls = [any(_rotates(node) for part in one for node in ast.walk(part)) for one in parts]
                if calls[0] != calls[1]:
                    found.add(architecture)
    assert found - DECIDED_OTHERWISE <= model_types.UNROTATED.keys() | BY_LISTS


def _rotates(node):
    function = getattr(node, "func", None)
    return bool(re.match(r"apply_\w*rotary", getattr(function, "attr", getattr(function, "id", ""))))


# ------------------------------------------------------------------------------------------------- as config.json

COHERE2 = {
    "model_type": "cohere2", "head_dim": 128, "rope_theta": 1e4, "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
}  # fmt: skip
GRANITE = {
    "model_type": "granite_swa", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4,
    "layer_rope_theta": [0, 1e4, 1e6],
}  # fmt: skip


def test_a_layer_of_config_json():
    assert rope_from_config(COHERE2, layer=1) is None
    assert rope_from_config(COHERE2, layer=0).rotary_dim == 128
    llama4 = {"model_type": "llama4_text", "head_dim": 128, "rope_theta": 5e5, "no_rope_layers": []}
    assert [rope_from_config(llama4, layer=i) is None for i in range(5)] == [False, False, False, True, False]
    every_other = llama4 | {"no_rope_layer_interval": 2}
    assert [rope_from_config(every_other, layer=i) is None for i in range(3)] == [False, True, False]
    beam = {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}
    types = {"layer_types": ["full_attention", "sliding_attention"], "model_type": "beam", "head_dim": 64}
    assert [rope_from_config(types | {"rope_parameters": beam}, layer=i) is None for i in (0, 1)] == [True, False]
    mixed = {"model_type": "zamba2", "attention_head_dim": 64, "rope_theta": 1e4, "layer_types": ["hybrid"]}
    uses = [rope_from_config(mixed | {"use_mem_rope": uses}, layer=0) for uses in (False, True)]
    assert uses[0] is None and uses[1] is not None
    exaone = COHERE2 | {"model_type": "exaone4"}
    windows = [rope_from_config(exaone | {"sliding_window": size}, layer=1) for size in (4096, None)]
    assert windows[0] is None and windows[1] is not None
    dense = COHERE2 | {"model_type": "cohere2_moe", "mlp_layer_types": ["dense", "dense"]}
    assert rope_from_config(dense | {"prefix_dense_sliding_window_pattern": 1}, layer=1) is not None


def test_layers_with_bases_of_their_own():
    found = [rope_from_config(GRANITE, layer=layer) for layer in range(3)]
    assert found[0] is None
    assert [float(rope.inverse_frequencies[4]) for rope in found[1:]] == pytest.approx([1e-2, 1e-3])
    with pytest.raises(ValueError, match="layer: expected a layer of 'granite_swa', whose layer_rope_theta differs"):
        rope_from_config(GRANITE)


def test_the_types_of_deepseek_v4():
    config = transformers.DeepseekV4Config()
    kinds = {"sliding_attention": "main", "compressed_sparse_attention": "compress",
             "heavily_compressed_attention": "compress"}  # fmt: skip
    for own, stated in kinds.items():
        found, expected = (rope_from_config(config, layer_type=kind) for kind in (own, stated))
        assert torch.equal(found.inverse_frequencies, expected.inverse_frequencies)
    assert {kinds[own] for own in config.layer_types} <= {"main", "compress"}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"layer_type": "full_attention"}, "layer_type: expected layers that rotate, got 'full_attention', which"),
        ({"model_type": ""}, {"layer_type": "linear_attention"}, "layer_type: expected layers that rotate, got"),
        ({}, {"layer": 2}, "layer: expected an integer >= 0 and < 2, got 2"),
        ({"num_hidden_layers": None}, {"layer": 2}, "layer: expected a layer below 2, as layer_types has, got int 2"),
        ({}, {"layer": 0, "layer_type": "full_attention"}, "layer: expected None beside layer_type, got int 0"),
        ({"layer_types": None}, {"layer": 0}, "config: expected a value for layer_types, .* layers of 'cohere2' diff"),
    ],
)
def test_refused(changes, options, message):
    with pytest.raises(ValueError, match=message):
        rope_from_config(COHERE2 | changes, **options)


@pytest.mark.parametrize("layer", [True, 1.0, "0", torch.tensor(0)])
def test_a_layer_is_an_integer(layer):
    with pytest.raises(TypeError, match="layer: expected an integer"):
        rope_from_config(COHERE2, layer=layer)
