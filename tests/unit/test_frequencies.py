"""Frequencies and rotations against transformers' own functions and models, and configurations that cannot be read."""

import copy
import importlib
import math
from types import SimpleNamespace

import pytest
import torch

import ropelab
from ropelab import rope_from_config
from ropelab.angles import frequencies
from tests.models.rotary_classes import in_float64
from tests.support import assert_rotated_like, draw

U = torch.finfo(torch.float32).eps / 2

HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
PHI3 = {"short_factor": [1 + i / 64 for i in range(32)], "long_factor": [1 + i for i in range(32)]}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LENGTHS = {"max_position_embeddings": 8192, "rope_theta": 10000.0}

# name -> (model of transformers, config.json as published before version 5 or since, layer type, lengths)
MODELS = {
    "default": ("llama", LENGTHS, None, [40]),
    "default, another base": ("qwen3", LENGTHS | {"rope_theta": 1e6, "head_dim": 128}, None, [40]),
    "version 5": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, None, [40]),
    "linear": ("llama", LENGTHS | {"rope_scaling": {"type": "linear", "factor": 3.0}}, None, [40]),
    "dynamic NTK": (
        "llama", {"max_position_embeddings": 32, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        None, [20, 32, 33, 300],
    ),
    "YaRN": ("qwen3", LENGTHS | {"head_dim": 128, "rope_theta": 1e6, "rope_scaling": YARN}, None, [40]),
    "YaRN, attention_factor": ("qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": YARN | {"attention_factor": 1.25}}, None, [40]),
    "YaRN, ramp": ("qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": YARN | {"beta_fast": 16.5, "beta_slow": 2}}, None, [40]),
    "YaRN, mscale of both kinds": (
        "qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}, None, [40],
    ),
    "YaRN, mscale alone": ("qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": YARN | {"mscale": 0.7}}, None, [40]),
    "YaRN, factor left open": ("qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": YARN | {"factor": None}}, None, [40]),
    "YaRN, ramp before the planes": ("qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": YARN | {"original_max_position_embeddings": 4}}, None, [40]),
    "YaRN, ramp of no width": ("qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": YARN | {"original_max_position_embeddings": 6}}, None, [40]),
    "YaRN, ramp beyond the planes": ("qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": YARN, "rope_theta": 50.0}, None, [40]),
    "YaRN, trained length left open": ("qwen3", LENGTHS | {"head_dim": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None, [40]),
    "Llama 3.1, trained length left open": (
        "llama", {"rope_theta": 5e5, "max_position_embeddings": 131072,
                  "rope_scaling": {key: value for key, value in LLAMA31.items() if key != "original_max_position_embeddings"}},
        None, [40],
    ),
    "LongRoPE, trained length left open": (
        "llama", {"rope_theta": 1e4, "max_position_embeddings": 64, "rope_scaling": PHI3 | {"type": "longrope", "factor": 4.0}},
        None, [20, 64, 65],
    ),
    "GPT-OSS": ("gpt_oss", {"head_dim": 64, "rope_scaling": YARN | {"truncate": False, "factor": 32.0}, "rope_theta": 150000, "max_position_embeddings": 131072}, None, [40]),
    "DeepSeek-V3": (
        "deepseek_v3", {"qk_rope_head_dim": 64, "rope_theta": 10000, "max_position_embeddings": 163840,
                        "rope_scaling": YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}},
        None, [40],
    ),
    "Ministral 3": (
        "ministral3", {"head_dim": 128, "max_position_embeddings": 262144, "rope_parameters": {
            "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "max_position_embeddings": 262144, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0.1}},
        None, [40],
    ),
    "LongRoPE": (
        "phi3", {"rope_theta": 1e4, "max_position_embeddings": 4096, "original_max_position_embeddings": 64,
                 "rope_scaling": PHI3 | {"type": "longrope"}},
        None, [20, 64, 65, 300],
    ),
    "Llama 3.1": ("llama", {"rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": LLAMA31}, None, [40]),
    "partial, adjacent pairs": ("glm4", LENGTHS | {"head_dim": 64, "partial_rotary_factor": 0.5}, None, [40]),
    "partial, halves": ("glm4_moe", LENGTHS | {"head_dim": 64, "partial_rotary_factor": 0.5}, None, [40]),
    "partial, a quarter": ("qwen3_next", LENGTHS | {"head_dim": 64, "partial_rotary_factor": 0.25}, None, [40]),
    "GPT-NeoX": ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 1e4, "max_position_embeddings": 2048}, None, [40]),
    "Gemma 4, full": (
        "gemma4", {"num_hidden_layers": 6, "head_dim": 64, "global_head_dim": 128, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}},
        "full_attention", [40],
    ),
    "Gemma 3, full": (
        "gemma3", {"num_hidden_layers": 6, "head_dim": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                   "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "full_attention", [40],
    ),
    "ModernBERT, full": ("modernbert", {"global_rope_theta": 160000.0, "local_rope_theta": 1e4}, "full_attention", [40]),
    "Cohere 2": ("cohere2", LENGTHS | {"head_dim": 64}, None, [40]),
    "Llama 4": ("llama4", LENGTHS | {"head_dim": 64, "rope_scaling": LLAMA31}, None, [40]),
    "Llama 4 Scout": ("llama4", {"head_dim": 128, "rope_theta": 5e5, "max_position_embeddings": 10485760, "rope_scaling": LLAMA31 | {"factor": 16.0, "high_freq_factor": 1.0}}, None, [40]),
}  # fmt: skip
for name in ("Gemma 4", "Gemma 3", "ModernBERT"):
    model, published, _, lengths = MODELS[f"{name}, full"]
    MODELS[f"{name}, sliding"] = model, published, "sliding_attention", lengths

CLASSES = {"gemma4": "Gemma4Text", "gemma3": "Gemma3Text", "llama4": "Llama4Text"}


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def case(request, transformers):
    """config.json, transformers' own configuration made of it, its model's code, and what to ask."""
    model, published, layer_type, lengths = request.param
    published = HEADS | published
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    name = CLASSES.get(model, model.replace("_", "")) + "Config"
    found = next(value for key, value in vars(configuration).items() if key.lower() == name.lower())
    config, prefix = found(**copy.deepcopy(published)), found.__name__.removesuffix("Config")
    code = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    published = published | {"model_type": config.model_type}
    if "global_head_dim" in published:
        published["layer_types"] = config.layer_types
    return SimpleNamespace(
        published=published, config=config, code=code, prefix=prefix, layer_type=layer_type, lengths=lengths
    )


def rotary_of(case, seq_len):
    """The model's own module after one call for that length: inverse frequencies, attention factor and cos, sin."""
    rotary = getattr(case.code, f"{case.prefix.replace('Gemma3Text', 'Gemma3')}RotaryEmbedding")(case.config)
    positions = torch.arange(seq_len)[None]
    x = torch.zeros(1, 1, dtype=torch.float32)
    waves = rotary(x, positions) if case.layer_type is None else rotary(x, positions, case.layer_type)
    prefix = "" if case.layer_type is None else f"{case.layer_type}_"
    return getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling"), waves


def test_frequencies_are_those_of_the_model(case):
    """The model's formula in float64 has our bits, when both are rounded to float32; in float32 it adds roundings."""
    for seq_len in case.lengths:
        rope = rope_from_config(case.config, layer_type=case.layer_type, seq_len=seq_len)
        exact, attention_factor, _ = in_float64(lambda seq_len=seq_len: rotary_of(case, seq_len))
        assert exact.dtype == rope.inverse_frequencies.dtype == torch.float64
        torch.testing.assert_close(rope.inverse_frequencies, exact, rtol=1e-12, atol=0)
        assert torch.equal(rope.inverse_frequencies.float(), exact.float())
        assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-15)

        rounded, _, _ = rotary_of(case, seq_len)
        assert rounded.dtype == torch.float32
        error = (rounded.double() - rope.inverse_frequencies).abs()
        bound = roundings(case, rope, seq_len) * U * rope.inverse_frequencies
        assert (error <= bound).all(), (error / bound).max()


def roundings(case, rope, seq_len) -> torch.Tensor:
    """The largest relative error of each frequency in float32, in units of roundoff, to first order.

    ``1 / base ** e``: e = 2i/R is off by 1, which the power makes ``e ln(base)``; base is off by 1, which it makes e;
    the power itself is right to 1 ulp, 2 units; the reciprocal makes 1. A factor makes up to 2, its own rounding and
    the product's or quotient's. A ramp g between theta and theta / s is off by some dg, absolute, and the frequency
    ``theta (g/s + 1 - g)`` by ``(1 - 1/s) dg / (g/s + 1 - g)``; its products and sum make 4 more.
    """
    parameters = rope_parameters(case)
    kind, base = parameters.get("rope_type", "default"), parameters["rope_theta"]
    count, dim = len(rope.inverse_frequencies), rope.rotary_dim
    i = torch.arange(count, dtype=torch.float64)
    e = 2 * i / dim
    units = e * math.log(base) + e + 3
    if kind == "dynamic":
        # The base is itself float32 work, of the length as a tensor: a = s L / Lmax (2 units), a - (s - 1) (1 and
        # what cancels), a power with exponent R/(R-2) <= 2 (2 units), a product.
        s, longest = parameters["factor"], case.config.max_position_embeddings
        a = s * max(seq_len, longest) / longest
        ratio = a - (s - 1)
        units = units + e * (2 * (2 * a / ratio + 1) + math.log(ratio) + 3) + e * math.log(max(ratio, 1)) * 2
    if kind in ("yarn", "llama3"):
        theta = frequencies.inverse_frequencies(dim, base)
        s = (
            parameters.get("factor")
            or case.config.max_position_embeddings / parameters["original_max_position_embeddings"]
        )
        g = (1 - rope.inverse_frequencies / theta) / (1 - 1 / s)
        if kind == "yarn":
            # (i - lo) / (hi - lo): lo rounds, the difference rounds, so does hi - lo, the quotient; 1 - (1 - g) twice.
            dims = [
                dim * math.log(parameters["original_max_position_embeddings"] / (r * 2 * math.pi)) / 2 / math.log(base)
                for r in (parameters.get("beta_fast", 32), parameters.get("beta_slow", 1))
            ]
            if parameters.get("truncate", True):
                dims = math.floor(dims[0]), math.ceil(dims[1])
            lo, hi = max(dims[0], 0), min(dims[1], dim - 1)
            width = hi - lo or 0.001
            dg = torch.where((g > 0) & (g < 1), (abs(lo) + (i - lo).abs()) / width + 2 * g + 2, 0)
        else:
            # turns = L / (2 pi / theta): off by theta's own units and 3; minus low, over high - low; 1 - g.
            low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
            turns = parameters["original_max_position_embeddings"] * theta / (2 * math.pi)
            dg = torch.where((g > 0) & (g < 1), (turns * (units + 3) + (turns - low).abs()) / (high - low) + g + 2, 0)
        units = units + 4 + 2 + (1 - 1 / s) * dg / (g / s + 1 - g)
    return units + 2


def rope_parameters(case) -> dict:
    return case.config.rope_parameters if case.layer_type is None else case.config.rope_parameters[case.layer_type]


def test_what_is_published_is_read_as_transformers_reads_it(case):
    """config.json as it is, the dict of transformers' object, and an object without to_dict."""
    rope = rope_from_config(case.config, layer_type=case.layer_type)
    others = [case.published, case.config.to_dict(), SimpleNamespace(**case.published)]
    for other in others:
        again = rope_from_config(other, layer_type=case.layer_type)
        assert torch.equal(again.inverse_frequencies, rope.inverse_frequencies)
        for name in ("attention_factor", "head_dim", "layout", "out_layout", "axes", "lengths"):
            assert getattr(again, name) == getattr(rope, name), name


def test_rotates_as_the_model(case):
    """q and k through the model's own code and through ours, as far as float32 angles allow."""
    for seq_len in case.lengths:
        rope = rope_from_config(case.config, layer_type=case.layer_type).at_length(seq_len)
        q = draw(1, seq_len, 2, rope.head_dim, seq_format="bhsd")
        k = draw(1, seq_len, 1, rope.head_dim, seq_format="bhsd")
        inv_freq, attention_factor, waves = rotary_of(case, seq_len)
        expected = rotate_as_the_model(case, q, k, waves)
        cos, sin = rope.tables(seq_len)
        assert rope.rotary_slice == (0, 2 * cos.shape[-1])
        layouts = {"layout": rope.layout, "out_layout": rope.out_layout}
        actual = ropelab.apply_rope(q, k, cos=cos, sin=sin, seq_format="bhsd", **layouts)

        angles = torch.arange(seq_len)[:, None] * rope.inverse_frequencies
        for x, y, y_model in zip((q, k), actual, expected, strict=True):
            assert_rotated_like(y, y_model, x, rope, angles, inv_freq)


def rotate_as_the_model(case, q, k, waves):
    if case.prefix == "Llama4Text":  # complex numbers, bshd
        turned = case.code.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), waves)
        return [x.transpose(1, 2) for x in turned]
    if case.prefix == "Gemma4Text":
        return [case.code.apply_rotary_pos_emb(x, *waves) for x in (q, k)]
    if case.prefix == "DeepseekV3":
        return case.code.apply_rotary_pos_emb_interleave(q, k, *waves)
    return case.code.apply_rotary_pos_emb(q, k, *waves)


def test_ntk_aware_slows_the_slowest_plane_by_the_factor():
    theta = frequencies.inverse_frequencies(64, 1e4)
    for factor in (1.0, 2.5, 40.0):
        slowed = frequencies.ntk_aware(64, 1e4, factor)
        assert slowed[0] == theta[0] and slowed[-1] == pytest.approx(theta[-1].item() / factor, rel=1e-13)
    config = HEADS | LENGTHS | {"rope_scaling": {"type": "ntk", "factor": 2.5}}
    assert torch.equal(rope_from_config(config).inverse_frequencies, frequencies.ntk_aware(64, 1e4, 2.5))


def test_switches_scale_of_phi_3_5_moe():
    scaling = PHI3 | {
        "type": "longrope",
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 64,
    }
    rope = rope_from_config(HEADS | LENGTHS | {"rope_scaling": scaling})
    assert rope.attention_factor == 1.1 and rope.at_length(65).attention_factor == 1.3
    assert rope.at_length(65).at_length(64).attention_factor == 1.1


def test_tables_have_the_attention_factor_and_one_rounding():
    rope = rope_from_config(HEADS | LENGTHS | {"rope_scaling": YARN})
    angles = torch.arange(700).double()[:, None] * rope.inverse_frequencies
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        cos, sin = rope.tables(700, dtype=dtype)
        assert torch.equal(cos, (rope.attention_factor * angles.cos()).to(dtype))
        assert torch.equal(sin, (rope.attention_factor * angles.sin()).to(dtype))


def test_frequencies_stay_on_the_cpu_in_float64():
    with torch.device("meta"):
        found = [
            frequencies.inverse_frequencies(8), frequencies.yarn(8, 1e4, 4.0, 128), frequencies.axial((4, 4)),
            frequencies.longrope(8, 1e4, [1.0] * 4), frequencies.proportional(8, 1e4, 0.5),
            *ropelab.rotary_table(5, 8, dtype=torch.float64, device="cpu"),
        ]  # fmt: skip
    assert all(x.device.type == "cpu" and x.dtype == torch.float64 for x in found)


CONFIG = HEADS | LENGTHS
_TRAINED = "original_max_position_embeddings"


def test_what_is_inferred_is_said():
    """As in transformers, an open trained length is the model's length, and an open factor is the quotient of both."""
    length, quotient = {_TRAINED: "max_position_embeddings"}, {"factor": f"max_position_embeddings / {_TRAINED}"}
    for scaling, inferred in (
        ({"type": "yarn", "factor": 4.0}, length),
        ({"type": "yarn", "factor": None}, length | quotient),
        ({"type": "yarn", "factor": None, _TRAINED: 4096}, quotient),
        (PHI3 | {"type": "longrope", "factor": 2.0}, length),
        ({key: value for key, value in LLAMA31.items() if key != _TRAINED}, length),
        (YARN, {}),
        (None, {}),
    ):
        rope = rope_from_config(CONFIG | {"rope_scaling": scaling})
        assert rope.inferred == inferred
        stated = {} if scaling is None else {"rope_scaling": scaling | {_TRAINED: 8192}}
        if _TRAINED in inferred:
            again = rope_from_config(CONFIG | stated)
            assert torch.equal(again.inverse_frequencies, rope.inverse_frequencies)
            assert again.attention_factor == rope.attention_factor and again.lengths == rope.lengths
    rope = rope_from_config(CONFIG | {"rope_scaling": PHI3 | {"type": "longrope", "factor": 2.0}})
    assert rope.at_length(8193).inferred == rope.inferred == length


def test_a_configuration_that_changes_later_changes_nothing():
    config = CONFIG | {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    rope = rope_from_config(config)
    before = rope.at_length(100).inverse_frequencies
    config["rope_scaling"]["factor"], config["rope_theta"] = 8.0, 3.0
    assert torch.equal(rope.at_length(100).inverse_frequencies, before)
    theta = frequencies.inverse_frequencies(8)
    rope = ropelab.Rope(theta)
    theta.fill_(7.0)
    assert rope.inverse_frequencies[0] == 1.0


def test_other_attributes_of_a_configuration_are_not_looked_at():
    class Config(SimpleNamespace):
        @property
        def quantization(self):
            raise RuntimeError("not now")

    rope = rope_from_config(Config(**CONFIG))
    assert torch.equal(rope.inverse_frequencies, rope_from_config(CONFIG).inverse_frequencies)


def test_old_and_new_keys_may_agree():
    new, old = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, {"type": "linear", "factor": 2.0}
    expected = rope_from_config(CONFIG | {"rope_scaling": old}).inverse_frequencies
    for change in ({"rope_parameters": new}, {"rope_parameters": new, "rope_scaling": old},
                   {"rope_parameters": new, "rope_scaling": new}, {"rope_scaling": old | {"rope_type": "linear"}}):  # fmt: skip
        assert torch.equal(rope_from_config(CONFIG | change).inverse_frequencies, expected)
    layers = CONFIG | {"layer_types": ["full_attention", "sliding_attention"]}
    for config in (CONFIG, layers):
        for layer_type in ("full_attention", "sliding_attention"):
            assert rope_from_config(config, layer_type=layer_type).rotary_dim == 64


BAD = {
    "two bases": ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta: expected None or 1000000.0, which another key states for rope_theta, got 10000.0"),
    "two bases beside": ({"rotary_emb_base": 1e6}, "rotary_emb_base: expected None or 10000.0, which another key states for rope_theta, got 1000000.0"),
    "two scalings": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling: expected None or the values of rope_parameters, got {'type': 'linear', 'factor': 2.0}",
    ),
    "two factors": (
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling: expected None or the values of rope_parameters",
    ),
    "two types": ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_type: expected 'linear', the value of the key 'type', got 'yarn'"),
    "swapped betas": ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 32}}, "beta_fast: expected at least beta_slow = 32.0, got 1.0"),
    "more than the head": ({"rotary_dim": 66}, "rotary_dim: expected at most the 64 features of a head, got 66"),
    "half a feature": ({"head_dim": 64.5}, "head_dim: expected an integer, got float 64.5"),
    "heads that do not fit": ({"hidden_size": 258}, "hidden_size: expected a multiple of num_attention_heads = 4 where head_dim is missing, got 258"),
    "a base that is true": ({"rope_theta": True}, "rope_theta: expected a number, got bool True"),
    "an infinite base": ({"rope_theta": math.inf}, "rope_theta: expected a finite number"),
    "a negative length": ({"max_position_embeddings": -1}, "max_position_embeddings: expected an integer >= 1"),
    "a factor in words": ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, "factor: expected a number, got str '2'"),
    "an attention factor of 0": ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor: expected a finite number > 0, got 0"),
    "no number among the factors": (
        {"rope_scaling": PHI3 | {"type": "longrope", "long_factor": [1.0] * 31 + [math.nan]}}, r"long_factor\[31\]: expected a finite number > 0, got nan",
    ),
    "no base": ({"rope_theta": None}, "config: expected a value for rope_theta, the base of the frequencies"),
    "no heads": ({"num_attention_heads": None}, "config: expected a value for num_attention_heads or for head_dim, got none"),
    "unknown type": ({"rope_scaling": {"type": "xpos"}}, "rope_type: expected one of .*'yarn'.*got 'xpos'"),
    "unknown key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "rope_parameters: expected keys among .* for rope_type 'linear', got beta"),
    "key of another type": ({"rope_scaling": LLAMA31 | {"truncate": True}}, "keys among .* for rope_type 'llama3', got truncate"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, r"rope_parameters: expected the key factor for rope_type 'linear', got the keys"),
    "factor without a value": ({"rope_scaling": {"type": "linear", "factor": None}}, "config: expected a value for factor, got none"),
    "no length": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": None},
        "config: expected original_max_position_embeddings or max_position_embeddings, got neither",
    ),
    "no long factors": ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32}}, "expected the key long_factor for rope_type 'longrope'"),
    "factors too few": ({"rope_scaling": PHI3 | {"type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 64}}, "short_factor: expected a factor for each of 32 planes, got 1"),
    "no low frequency": ({"rope_scaling": {k: v for k, v in LLAMA31.items() if k != "low_freq_factor"}}, "expected the key low_freq_factor for rope_type 'llama3'"),
    "ramp upside down": ({"rope_scaling": LLAMA31 | {"high_freq_factor": 0.5}}, "high_freq_factor: expected at least low_freq_factor = 1.0, got 0.5"),
    "length unknown": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": None}, "config: expected a value for max_position_embeddings"),
    "no dict": ({"rope_scaling": [1]}, "rope_scaling: expected a dict, got list"),
    "negative base": ({"rope_theta": -1.0}, "rope_theta: expected a finite number >= .*, got -1.0"),
    "negative factor": ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor: expected a positive number, got -2.0"),
    "odd part": ({"partial_rotary_factor": 0.02}, "partial_rotary_factor: expected a value by which a positive even number of the 64 features of a head rotate, got 0.02, by which 1 rotate"),
    "fraction too large": ({"rope_scaling": {"rope_type": "proportional"}, "partial_rotary_factor": 1.5}, "partial_rotary_factor: expected a finite number > 0 and <= 1, got 1.5"),
    "sections too short": ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 8]}}, r"mrope_section: expected widths whose sum is the number of planes, 32, got \[8, 8\]"),
    "sections that have no turn": (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 28, 2], "mrope_interleaved": True}}, "mrope_section: expected turns that give 2 planes to axis 0",
    ),
    "layers differ": ({"rope_local_base_freq": 1e4}, r"layer_type: expected one of \('full_attention', 'sliding_attention'\), because layers differ, got None"),
    "layers differ, nested": ({"rope_parameters": {"a": {}, "b": {}}}, r"layer_type: expected one of \('a', 'b'\)"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_key_that_is_wrong_is_named(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        rope_from_config(CONFIG | change)


@pytest.mark.parametrize("layer_types", [None, ["full_attention", "sliding_attention"]])
def test_a_misspelt_layer_type_is_refused(layer_types):
    with pytest.raises(ValueError, match="layer_type: expected one of .*'sliding_attention'.*, got 'sliding_atention'"):
        rope_from_config(CONFIG | {"layer_types": layer_types}, layer_type="sliding_atention")


def test_lengths_are_numbers_of_tokens():
    """A float made ``in range`` walk through all of the range."""
    rope = rope_from_config(CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    for length in (math.nan, 1.5, 4096 * 4 / 3, True, "8"):
        with pytest.raises(TypeError, match="seq_len: expected an integer, got"):
            rope.at_length(length)
        with pytest.raises(TypeError, match="seq_len: expected an integer, got"):
            ropelab.RotaryEmbedding(rope).prepare(length)
    with pytest.raises(ValueError, match=r"seq_len: expected a length of this rotation, in range\(0, 8\), got 9"):
        ropelab.Rope(frequencies.inverse_frequencies(8), lengths=range(8)).at_length(9)


def test_the_whole_of_a_model_with_parts_is_refused():
    with pytest.raises(ValueError, match="config: expected the configuration of one part of the model, such as config"):
        rope_from_config({"text_config": CONFIG, "vision_config": {}})


def test_a_layer_that_does_not_rotate_is_refused():
    config = CONFIG | {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}}
    assert rope_from_config(config, layer_type="sliding_attention").rotary_dim == 64
    with pytest.raises(ValueError, match="layer_type: expected layers that rotate, got 'full_attention'"):
        rope_from_config(config, layer_type="full_attention")


def test_tables_of_a_length_that_has_other_frequencies_are_refused():
    config = CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}
    rope = rope_from_config(config)
    assert len(rope.tables(32)[0]) == 32
    with pytest.raises(ValueError, match=r"seq_len: expected at most 32 \(see at_length\), got 33"):
        rope.tables(33)
    with pytest.raises(ValueError, match="positions: expected None for a rotation with one axis"):
        rope.tables(32, torch.zeros(3, 5).long())


def test_scaled_bases_need_two_planes():
    with pytest.raises(ValueError, match="rotary_dim: expected at least 4"):
        frequencies.ntk_aware(2, 1e4, 2.0)
