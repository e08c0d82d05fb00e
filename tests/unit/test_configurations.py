"""`rope_from_config` beside transformers' own rotary classes, and the configurations that it refuses."""

import copy

import pytest
import torch

from ropelab import RotaryEmbedding, apply_rope, grid_positions, reference, rope_from_config
from ropelab.angles import model_types
from ropelab.conformance.models import factory
from tests.models import rotary_classes, tables

transformers = pytest.importorskip("transformers")
TABLE = tables.read("configurations.csv")
FAMILIES = (
    "blt cohere_compass dbrx deepseek_v3 deepseek_v4 dinov3_vit dots3_note efficientloftr eomt_dinov3 ernie4_5_vl_moe "
    "esmfold2 gemma4 glm4v gpt_oss gptj hunyuan_vl inkling2 jetmoe kimi_k25 lfm3 llama llama4 minimax_m3_vl mistral4 "
    "mistral_large4 moonshine musicflamingo nanochat neomme pe_audio phi pixtral qwen2_vl qwen3_omni_moe qwen3_vl "
    "sam2_video sapiens2 step3p7 zamba2".split()
)
"""One of each kind. ``python -m tests.models.tables configurations --again`` compares all."""


@pytest.mark.parametrize("architecture", FAMILIES)
def test_is_the_rotary_class_or_refused(architecture):
    rows = tables.configuration_rows(architecture)
    assert rows and {row["outcome"] for row in rows} <= {"equal", "refused"}, rows
    committed = [row for row in TABLE if row["architecture"] == architecture]
    assert [{key: str("" if value is None else value) for key, value in row.items()} for row in rows] == [
        {key: value for key, value in row.items() if key in new} for row, new in zip(committed, rows, strict=True)
    ]


def test_the_table_has_every_architecture():
    assert {row["architecture"] for row in TABLE} == set(factory.architectures())
    assert {row["outcome"] for row in TABLE} == {"equal", "refused"}
    assert all(row["reason"] for row in TABLE if row["outcome"] == "refused")
    equal = {row["model_type"].removesuffix("_text") for row in TABLE if row["outcome"] == "equal"} - {""}
    elsewhere = {"codegen", "gptj", "internlm3", "iquestcoder"}  # without a rotary class of their own
    assert model_types.KNOWN_MODELS == equal | elsewhere


WITHOUT = {
    "glm4_moe": ("LAST_FEATURES_MODELS", frozenset({"glm4_moe"})),
    "nanochat": ("REVERSED_MODELS", frozenset()),
    "glm4": ("INTERLEAVED_MODELS", frozenset()),
    "longcat_flash": ("DEINTERLEAVING_MODELS", frozenset()),
    "qwen3_vl": ("SECTIONS", {}),
    "step3p7": ("AXIAL_MODELS", model_types.AXIAL_MODELS | {"step3p5_vision": ((0, 1), "bands")}),
    "pixtral": ("AXIAL_MODELS", {"pixtral": ((0, 1), "bands")}),
    "kimi_k25": ("AXIAL_MODELS", {"kimi_k25_vision": ((1, 0), "bands")}),
}


@pytest.mark.parametrize(("architecture", "change"), WITHOUT.items(), ids=WITHOUT)
def test_the_comparison_sees_a_wrong_table(architecture, change, monkeypatch):
    monkeypatch.setattr(model_types, *change)
    assert "differs" in {row.outcome for row in rotary_classes.compared(architecture)}


FLAT = {"rope_parameters": None, "rope_theta": 1e4}
CHANGES = {"head_dim": {}, "partial_rotary_factor": {}, "mrope_section": {}, "layers": FLAT}


@pytest.mark.parametrize("left_out", CHANGES)
def test_a_key_that_is_left_out_is_not_guessed(left_out):
    """config.json without a key means what transformers takes it for, or is refused."""
    judged = 0
    for architecture in factory.architectures():
        for config in rotary_classes.configurations(architecture):
            stated = config.to_dict()
            if config.model_type.removesuffix("_text") not in model_types.KNOWN_MODELS:
                continue
            published = without(stated, left_out) | CHANGES[left_out]
            try:
                rebuilt = type(config)(**copy.deepcopy(published))
            except Exception:  # noqa: S112  # transformers itself needs the key
                continue
            for layer_type in layer_types(rebuilt):
                try:
                    found = rope_from_config(published, layer_type=layer_type)
                    expected = rope_from_config(rebuilt, layer_type=layer_type)
                except ValueError:
                    continue
                judged += 1
                assert torch.equal(found.inverse_frequencies, expected.inverse_frequencies), (config, layer_type)
                assert found.axes == expected.axes and found.attention_factor == expected.attention_factor
    assert judged > 50


def without(settings: dict, key: str) -> dict:
    """The settings without a key, those of each type of layers as well."""
    return {
        name: without(value, key) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in (key, "transformers_version")
    }


def layer_types(config) -> list:
    parameters = getattr(config, "rope_parameters", None) or {}
    return [name for name, value in parameters.items() if isinstance(value, dict)] or [None]


SIZES = {"hidden_size": 256, "num_attention_heads": 4, "rope_theta": 1e4}
REFUSED = {
    "unknown": ({"model_type": "kimi_k2"}, "layout: expected 'split_half' or 'interleaved'.*model_type 'kimi_k2'"),
    "latent without a model type": ({"qk_rope_head_dim": 64}, "layout: expected .* with latent attention"),
    "another layout": ({"model_type": "llama", "layout": "interleaved"}, "layout: expected None or 'split_half'"),
    "no heads of its own": ({"model_type": "qwen3"}, "a value for head_dim, whose default is its own in 'qwen3'"),
    "no part of its own": ({"model_type": "phi"}, "partial_rotary_factor, whose default is its own in 'phi'"),
    "two parts": ({"rotary_dim": 32, "partial_rotary_factor": 1.0}, "rotary_dim: expected None or 64"),
    "flat layers": ({"model_type": "olmo3"}, "rope_parameters: expected parameters for each type of layers of 'olmo3'"),
    "axial text": ({"rope_parameters": {"rope_type": "axial"}}, "expected 'axial' for cohere_compass_vision"),
    "turns in bands": (
        {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_interleaved": True}},
        "mrope_interleaved: expected None or False",
    ),
    "no scaling of its own": ({"model_type": "gpt_oss"}, "rope_parameters, whose default is its own in 'gpt_oss'"),
    "alibi": ({"model_type": "falcon", "alibi": True}, r"alibi: expected one of \(False, None\)"),
    "absolute positions": ({"position_embedding_type": "absolute"}, "position_embedding_type: expected one of"),
    "halves of halves": ({"model_type": "gemma4_vision"}, "model_type: .*call apply_rope twice"),
    "odd planes": ({"model_type": "qwen3_vl_vision", "hidden_size": 264}, "head_dim: expected a multiple of 4"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(changes, message):
    layout = changes.get("layout")
    with pytest.raises(ValueError, match=message):
        rope_from_config(SIZES | {key: value for key, value in changes.items() if key != "layout"}, layout=layout)


def test_the_layout_of_an_unknown_model_is_what_is_passed():
    for layout in ("split_half", "interleaved"):
        rope = rope_from_config(SIZES | {"model_type": "kimi_k2", "qk_rope_head_dim": 64}, layout=layout)
        assert (rope.layout, rope.rotary_slice) == (layout, (0, 64))
        rotary = RotaryEmbedding.from_config(SIZES | {"model_type": "unheard_of"}, layout=layout)
        assert rotary.rope.layout == layout
    scaled = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32, "model_type": "new"}
    assert rope_from_config(SIZES | scaled, layout="interleaved").at_length(64).layout == "interleaved"


@pytest.mark.parametrize("layer_type", ["main", "compress"])
def test_the_module_rotates_the_last_features(layer_type):
    rotary = RotaryEmbedding.from_config(transformers.DeepseekV4Config(), layer_type=layer_type)
    q = torch.randn(1, 6, 2, 512)
    cos, sin = rotary.rope.tables(6)
    expected = reference.rotate(q, cos, sin, layout="interleaved", rotary_slice=(448, 512))
    torch.testing.assert_close(rotary(q).double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(rotary(q)[..., :448], q[..., :448])


def test_the_module_rotates_images():
    config = transformers.models.qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig()
    rotary = RotaryEmbedding.from_config(config)
    positions = grid_positions(3, 4)
    q = torch.randn(1, 12, 2, rotary.rope.head_dim)
    cos, sin = rotary.rope.tables(4, positions)
    assert torch.equal(rotary(q, positions=positions[:, None], seq_len=4), apply_rope(q, cos=cos, sin=sin))
