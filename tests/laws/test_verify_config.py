"""`verify_config`: reported misreadings of configurations are found with their key, and right code is silent."""

import json
import math

import pytest
import torch

from ropelab import rope_from_config
from ropelab.command.cli import app
from ropelab.conformance import child
from ropelab.conformance.configuration import verify_config
from ropelab.conformance.configuration.measured import NotMeasured

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 1024}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def configured(parameters, **settings):
    return {"head_dim": 64, "max_position_embeddings": 8192, "rope_parameters": parameters} | settings


def inverse(base=1e4, dim=64):
    return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)


def tables(theta, factor=1.0, rows=8192):
    angles = torch.arange(rows).float()[:, None] * theta
    return angles.cos() * factor, angles.sin() * factor


def ropes(parameters, factor=None, rows=8192, **settings):
    """The tables of a configuration, in float32."""
    rope = rope_from_config(configured(parameters, **settings))
    return tables(rope.inverse_frequencies.float(), rope.attention_factor if factor is None else factor, rows)


def without(parameters, *keys):
    return {key: value for key, value in parameters.items() if key not in keys}


class ServerRotary(torch.nn.Module):
    """A module with the interface of vLLM's and SGLang's rotary classes."""

    def __init__(self, theta, head_size, *, neox=True, factor=1.0, rows=8192):
        super().__init__()
        self.cos_sin_cache = torch.cat(tables(theta, factor, rows), -1)
        self.head_size, self.is_neox_style = head_size, neox

    def forward_native(self, positions, query, key=None):
        cos, sin = self.cos_sin_cache[positions.flatten()][:, None].chunk(2, -1)

        def rotated(x):
            heads = x.view(len(cos), -1, self.head_size)
            width = 2 * cos.shape[-1]
            part, rest = heads[..., :width], heads[..., width:]
            a, b = part.chunk(2, -1) if self.is_neox_style else (part[..., ::2], part[..., 1::2])
            both = (a * cos - b * sin, b * cos + a * sin)
            part = torch.cat(both, -1) if self.is_neox_style else torch.stack(both, -1).flatten(-2)
            return torch.cat((part, rest), -1).view(x.shape)

        return rotated(query), None if key is None else rotated(key)


MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
ONE = YARN | {"attention_factor": 1.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
PARTIAL = PLAIN | {"partial_rotary_factor": 0.5}
GEMMA4 = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
TWO_BASES = {
    "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    "compress": YARN | {"rope_theta": 1.6e5, "attention_factor": 1.0, "partial_rotary_factor": 1.0},
}
LOG = 0.1 * math.log(4.0) + 1

# report -> the configuration, the target and the key that is read wrongly
REPORTED = {
    "vLLM#48351": (configured(ONE), lambda: ropes(without(ONE, "attention_factor")), "attention_factor"),
    "mlx-lm#1507": (configured(YARN | {"attention_factor": 1.5}), lambda: ropes(YARN), "attention_factor"),
    "vLLM#48621": (configured(MSCALE), lambda: ropes(YARN), "mscale"),
    "exllamav3#259": (configured(MSCALE), lambda: ropes(MSCALE, LOG), "mscale"),
    "TensorRT-LLM#16379": (configured(YARN | {"attention_factor": 1.2}), lambda: ropes(YARN, 1.2 * (LOG - 1) + 1),
                           "attention_factor"),
    "onnxruntime-genai#2076, the scaling": (configured(YARN), lambda: ropes(PLAIN | {"rope_theta": 1e6}), "rope_type"),
    "onnxruntime-genai#2076, the base": (configured(YARN), lambda: ropes(YARN | {"rope_theta": 1e4}), "rope_theta"),
    "onnxruntime-genai#2076, the factor": (configured(MSCALE), lambda: ropes(MSCALE, LOG), "mscale"),
    "onnxruntime-genai#2076, inverted twice": (
        configured(YARN), lambda: ropes(YARN | {"factor": 0.25}, LOG), "factor"),
    "unsloth#6197": (configured(LLAMA3), lambda: ropes(PLAIN | {"rope_theta": 5e5}), "rope_type"),
    "SGLang#26187": (configured(YARN), lambda: tables(inverse(1e4)), "rope_parameters"),
    "vLLM#52675": (configured(DYNAMIC), lambda: tables(inverse(1000.0) * float("nan")), "factor"),
    "vLLM#55910": (configured(PLAIN), lambda: ropes(PLAIN, rows=2048), "max_position_embeddings"),
    "vLLM#43676": (configured(PARTIAL), lambda: tables(inverse()), "partial_rotary_factor"),
    "Megatron-Bridge#4195": (configured(GEMMA4), lambda: tables(inverse(1e6)[:8]), "partial_rotary_factor"),
    "pie#603": (configured(PARTIAL), lambda: tables(inverse()[:16]), "partial_rotary_factor"),
    "Megatron-Bridge#4271": (configured(PARTIAL), lambda: tables(inverse(dim=16)), "partial_rotary_factor"),
    "torchtitan#3787": (configured(YARN | {"truncate": False}),
                        lambda: tables(inverse(1e6) * 1.25 - ropes_theta(YARN | {"truncate": False}), LOG),
                        "beta_fast"),
    "atlas#276": (configured(TWO_BASES, rope_interleave=False),
                  lambda: dict.fromkeys(TWO_BASES, ropes(TWO_BASES["compress"])), "layer_types"),
    "1Cat-vLLM#251": (configured(TWO_BASES, rope_interleave=False),
                      lambda: dict.fromkeys(TWO_BASES, ropes(TWO_BASES["main"])), "layer_types"),
    "atlas#342": (configured(ONE), lambda: ropes(ONE, LOG), "attention_factor"),
    "TensorRT-LLM#16378": (configured(PLAIN, rope_interleave=False),
                           lambda: ServerRotary(inverse(), 64, neox=False), "layout"),
    "ollama, the frequencies in bfloat16": (configured(PLAIN), lambda: tables(inverse().bfloat16().float()), "dtype"),
}  # fmt: skip


def ropes_theta(parameters):
    return rope_from_config(configured(parameters)).inverse_frequencies.float()


@pytest.mark.parametrize("report", REPORTED)
def test_a_reported_misreading_is_found_with_its_key(report):
    config, target, key = REPORTED[report]
    found = verify_config(config, target())
    assert found.verdict == "wrong"
    assert found.findings[0].key == key, str(found)


def yarn_ramp(first, last, share=lambda place: place.clamp(0, 1)):
    """YaRN's frequencies with a ramp between two pairs."""
    place = (torch.arange(32).double() - first) / (last - first)
    theta = rope_from_config(configured(PLAIN | {"rope_theta": 1e6})).inverse_frequencies
    return (share(place) * theta / 4 + (1 - share(place)) * theta).float()


def plane(turns, width=64, turn=2 * math.pi):
    return width * math.log(2048 / (turns * turn)) / (2 * math.log(1e6))


def llama3_ramp(share):
    """Llama 3's frequencies with a share of the divided ones, from the turns of the pairs."""
    theta = rope_from_config(configured(PLAIN | {"rope_theta": 5e5})).inverse_frequencies
    part = share(1024 * theta / (2 * math.pi))
    return (part * theta / 8 + (1 - part) * theta).float()


# what happens -> the configuration, the frequencies, the key and the words
INSIDE = {
    "low and high exchanged in Meta's code": (
        LLAMA3, lambda: llama3_ramp(lambda r: (r < 4).double()), "low_freq_factor", "high_freq_factor are exchanged"),
    "low and high exchanged in the ramp": (
        LLAMA3, lambda: llama3_ramp(lambda r: ((r - 1) / 3).clamp(0, 1)), "low_freq_factor", "are exchanged"),
    "no ramp": (LLAMA3, lambda: llama3_ramp(lambda r: (r <= 1).double()), "high_freq_factor", "a step"),
    "no 2 pi": (LLAMA3, lambda: llama3_ramp(lambda r: ((4 - 2 * math.pi * r) / 3).clamp(0, 1)), "low_freq_factor",
                "2 pi is missing"),
    "betas exchanged": (YARN, lambda: yarn_ramp(math.floor(plane(1)), math.ceil(plane(32))), "beta_fast",
                        "beta_slow are exchanged before"),
    "bounds rounded inwards": (YARN, lambda: yarn_ramp(math.ceil(plane(32)), math.floor(plane(1))), "truncate",
                               "by ceil, the last by floor"),
    "bounds of half the width": (YARN, lambda: yarn_ramp(math.floor(plane(32, 32)), math.ceil(plane(1, 32))),
                                 "beta_fast", "number of pairs"),
    "bounds in radians": (YARN, lambda: yarn_ramp(math.floor(plane(32, turn=1)), math.ceil(plane(1, turn=1))),
                          "beta_fast", "2 pi is missing"),
    "a ramp without ends": (YARN, lambda: yarn_ramp(math.floor(plane(32)), math.ceil(plane(1)), lambda p: p),
                            "beta_fast", "not clamped"),
    "wavelengths": (YARN, lambda: yarn_ramp(math.floor(plane(32)), math.ceil(plane(1)), lambda p: (
        (1 - 1 / (4 * p.clamp(0, 1) + 1 - p.clamp(0, 1))) / (1 - 1 / 4))), "beta_fast", "wavelengths"),
}  # fmt: skip


@pytest.mark.parametrize("what", INSIDE)
def test_a_mistake_inside_of_a_ramp_is_named(what):
    parameters, theta, key, words = INSIDE[what]
    [found] = verify_config(configured(parameters), theta()).findings
    assert found.key == key and words in found.words, str(found)


@pytest.mark.parametrize("what, factor", [
    ("the 0.1 is missing", math.log(4) + 1), ("log10", 0.1 * math.log10(4) + 1), ("square root", LOG**0.5),
    ("the 1 is missing", LOG - 1),
])  # fmt: skip
def test_a_mistake_inside_of_the_attention_factor_is_named(what, factor):
    [found] = verify_config(configured(YARN), ropes(YARN, factor)).findings
    assert what in found.words


def test_bases_of_two_types_of_layers_that_are_exchanged():
    config = {
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": PLAIN, "full_attention": PLAIN | {"rope_theta": 1e6}},
    }
    found = verify_config(config, {"sliding_attention": inverse(1e6), "full_attention": inverse(1e4)})
    assert [one.key for one in found.findings] == ["layer_types", "layer_types"]
    assert all("exchanged" in one.words and "rope_theta" in one.also[0] for one in found.findings)


def test_equal_numbers_are_no_difference():
    cos, sin = ropes(YARN)
    cos[5], sin[5] = 1.001 * cos[5], 1.001 * sin[5]
    [found] = verify_config(configured(YARN), (cos, sin)).findings
    assert "is not one number" in found.words
    assert not [words for words in str(found).split(", ") if words.partition(" in place of ")[0] == words[-8:]]


@pytest.mark.parametrize("rows", [1, -1, 7])
def test_rows_that_begin_at_another_position_are_named(rows):
    angles = (torch.arange(4096)[:, None] + rows).double() * inverse().double()
    found = verify_config(configured(PLAIN | {"rope_theta": 1e4}), (angles.cos().float(), angles.sin().float()))
    assert f"position p has the angles of position p {'+-'[rows < 0]} {abs(rows)}" in str(found)


def test_heads_of_the_hidden_size_are_named():
    config = configured(PLAIN | {"rope_theta": 1e4}, hidden_size=480, num_attention_heads=6, head_dim=64)
    (finding,) = verify_config(config, inverse(dim=80)).findings
    assert finding.key == "head_dim" and "is hidden_size / num_attention_heads = 80, in place of 64" in finding.words


@pytest.mark.parametrize("report", REPORTED)
def test_the_right_reading_is_silent(report):
    config = REPORTED[report][0]
    kinds = TWO_BASES if config["rope_parameters"] is TWO_BASES else (None,)
    found = {}
    for kind in kinds:
        rope = rope_from_config(config, layer_type=kind)
        found[kind] = tables(rope.inverse_frequencies.float(), rope.attention_factor)
    against = found if None not in found else found[None]
    assert verify_config(config, against).verdict == "right"


@pytest.mark.parametrize("key, value", [
    ("factor", 32.0), ("factor", 16.0), ("rope_theta", 7e5), ("low_freq_factor", 2.0), ("high_freq_factor", 8.0),
    ("original_max_position_embeddings", 8192),
])  # fmt: skip
def test_a_number_that_is_read_as_another_is_named(key, value):
    found = verify_config(configured(LLAMA3), ropes(LLAMA3 | {key: value}))
    assert key in [finding.key for finding in found.findings] or key in str(found), str(found)


def forms(theta, factor):
    """The same rotation in each form that a target can have."""
    cos, sin = tables(theta, factor)

    def of_x(x, position_ids):
        angles = position_ids[..., None].float() * torch.cat((theta, theta))
        return angles.cos() * factor, angles.sin() * factor

    def rotating(x, positions):
        a, b = x.chunk(2, -1)
        c, s = (t[positions][:, :, None] if positions.ndim == 2 else t[positions][None, :, None] for t in (cos, sin))
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    return {
        "pair": (cos, sin),
        "a column per feature": (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)),
        "cache": torch.cat((cos, sin), -1),
        "bfloat16 cache": torch.cat((cos, sin), -1).bfloat16(),
        "complex": torch.complex(cos, sin),
        "dict": {"cos": cos, "sin": sin},
        "function of positions": lambda positions: (cos[positions], sin[positions]),
        "function of x and positions": of_x,
        "rotation": rotating,
        "server": ServerRotary(theta, 64, factor=factor),
    }


@pytest.mark.parametrize("form", forms(inverse(), 1.0))
def test_every_form_of_a_target(form):
    rope = rope_from_config(configured(ONE))
    config = configured(ONE)
    assert verify_config(config, forms(rope.inverse_frequencies.float(), 1.0)[form]).verdict == "right"
    wrong = verify_config(config, forms(inverse(1e6), 1.0)[form])
    assert [finding.key for finding in wrong.findings] == ["rope_type"], str(wrong)


DESCRIBED = {
    "vLLM": {"head_size": 64, "max_position": 8192, "is_neox_style": True, "rope_parameters": LLAMA3},
    "SGLang": {"head_size": 64, "rotary_dim": 64, "max_position": 8192, "base": 5e5,
               "rope_scaling": without(LLAMA3, "rope_theta")},
    "llama.cpp": {"--rope-freq-base": 5e5, "n_rot": 64, "n_ctx_train": 8192,
                  "rope_freqs": (inverse(5e5).double() / ropes_theta(LLAMA3).double()).tolist()},
    "GGUF": {"general.architecture": "llama", "llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 64,
             "llama.context_length": 8192,
             "rope_freqs.weight": (inverse(5e5).double() / ropes_theta(LLAMA3).double()).tolist()},
}  # fmt: skip


@pytest.mark.parametrize("server", DESCRIBED)
def test_a_description_is_a_configuration_and_a_target(server):
    description = DESCRIBED[server]
    assert verify_config(description, ropes(LLAMA3)).verdict == "right"
    assert verify_config(description, ropes(PLAIN | {"rope_theta": 5e5})).verdict == "wrong"
    assert verify_config(configured(LLAMA3), description).verdict == "right"
    wrong = verify_config(configured(LLAMA3 | {"factor": 32.0}), description)
    assert wrong.verdict == "wrong" and wrong.findings[0].key == "factor", str(wrong)


def test_factors_of_llama_cpp_need_no_length():
    description = {key: value for key, value in DESCRIBED["llama.cpp"].items() if key != "n_ctx_train"}
    assert verify_config(description, ropes(LLAMA3)).verdict == "right"
    assert verify_config(description, ropes(PLAIN | {"rope_theta": 5e5})).verdict == "wrong"


def test_yarn_of_llama_cpp():
    theirs = {"freq_base": 1e6, "freq_scale": 0.25, "n_rot": 64, "rope_scaling": "yarn", "yarn_orig_ctx": 2048,
              "n_ctx": 8192}  # fmt: skip
    assert verify_config(configured(YARN), theirs).verdict == "right"
    assert verify_config(configured(YARN), theirs | {"freq_scale": 0.5}).findings[0].key == "factor"


def test_keys_are_named_as_the_file_spells_them():
    theirs = {"--freq-base": 1e6, "--freq-scale": 0.25, "n_rot": 64}
    found = verify_config(theirs, tables(4 * inverse(1e6))).findings[0]
    assert str(found) == "1 / --freq-scale multiplies the frequencies, in place of dividing them"
    found = verify_config(theirs, tables(inverse(2e6) / 4)).findings[0]
    assert found.key == "--freq-base", found


def test_a_factor_is_told_only_if_all_numbers_have_it():
    some = torch.where(torch.arange(32) < 20, 0.9, 1.0)
    found = verify_config(configured(PLAIN), tables(inverse(), some)).findings
    assert "not one number: it goes from 0.9 to 1" in str(found[-1]), found


MROPE = PLAIN | {"mrope_section": [8, 12, 12]}


@pytest.mark.parametrize("change, key", [
    (None, None), (lambda a: a * 0, "mrope_section"), (lambda a: (3 - a) % 3, "mrope_section"),
])  # fmt: skip
def test_sections(change, key):
    axes = torch.repeat_interleave(torch.arange(3), torch.tensor([8, 12, 12]))
    read = axes if change is None else change(axes)

    def function(positions):
        angles = positions[read].T.float() * inverse()
        return angles.cos(), angles.sin()

    found = verify_config(configured(MROPE), function)
    assert [finding.key for finding in found.findings] == ([] if key is None else [key]), str(found)


def places_of_the_call(x, position_ids):
    return torch.arange(position_ids.shape[-1])[None].expand_as(position_ids)


@pytest.mark.parametrize("positions, said", [
    (places_of_the_call, "a position has the angles of its place in the call"),  # Automodel#3115
    (lambda x, p: p % 4096, "position p has the angles of position p modulo 4096"),
    (lambda x, p: p.clamp(max=31), "no position has angles beyond those of 31"),
    (lambda x, p: p + (p > 40), "position 63 is the first that is wrong, which has the angles of position 64"),
    (lambda x, p: p * p, "no frequencies give these numbers: position 2 is the first that is wrong"),
])  # fmt: skip
def test_a_cause_reproduces_all_numbers(positions, said):
    def rotary(x, position_ids):
        angles = positions(x, position_ids)[..., None].double() * inverse().double()
        return angles.cos(), angles.sin()

    [finding] = verify_config(configured(PLAIN), rotary).findings
    assert said in str(finding), str(finding)


def test_numbers_that_are_not_finite_accuse_no_key():
    cos, sin = ropes(DYNAMIC)
    cos[5, 3] = float("nan")
    [finding] = verify_config(configured(DYNAMIC), (cos, sin)).findings
    assert finding.key == "" and "1 of" in finding.words and "position 5, pair 3" in finding.example


def test_a_pair_that_reads_another_axis():
    axes = torch.repeat_interleave(torch.arange(3), torch.tensor([8, 12, 12]))
    axes[9] = 2

    def function(positions):
        angles = positions[axes].T.float() * inverse()
        return angles.cos(), angles.sin()

    [finding] = verify_config(configured(MROPE), function).findings
    assert finding.key == "mrope_section" and "pair 9 reads axis 2, in place of 1" in finding.words


def test_no_target():
    with pytest.raises(NotMeasured, match="against: expected"):
        verify_config(configured(PLAIN), object())
    with pytest.raises(ValueError, match="config: expected"):
        verify_config("no_such_architecture", inverse())


def test_the_models_of_transformers():
    """transformers' rotary classes are right, and a class with another configuration is not."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=8192, rope_parameters=dict(LLAMA3))
    assert verify_config(config, LlamaRotaryEmbedding(config)).verdict == "right"
    dynamic = transformers.LlamaConfig(head_dim=64, max_position_embeddings=2048, rope_parameters=dict(DYNAMIC))
    found = verify_config(dynamic, LlamaRotaryEmbedding(dynamic))
    assert found.verdict == "right" and len(found.compared) == 2
    layered = transformers.Gemma3TextConfig()
    rotary = Gemma3RotaryEmbedding(layered)
    assert verify_config(layered, rotary).verdict == "right"
    rotary.sliding_attention_inv_freq.copy_(rotary.full_attention_inv_freq)
    (finding,) = verify_config(layered, rotary).findings
    assert (finding.layer_type, finding.key) == ("sliding_attention", "layer_types")


@pytest.mark.process
def test_the_command(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    (tmp_path / "config.json").write_text(json.dumps(configured(ONE)))
    torch.save(dict(zip(("cos", "sin"), ropes(ONE), strict=True)), tmp_path / "right.pt")
    torch.save(dict(zip(("cos", "sin"), ropes(ONE, LOG), strict=True)), tmp_path / "wrong.pt")
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    assert run.invoke(app, ["verify-config", "config.json", "--against", "right.pt"]).exit_code == 0
    wrong = run.invoke(app, ["verify-config", ".", "--against", "wrong.pt", "--json", "report.json"])
    assert wrong.exit_code == 1 and "attention_factor is ignored" in wrong.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "wrong" and report["findings"][0]["key"] == "attention_factor"
    assert run.invoke(app, ["verify-config", "config.json", "--against", "nothing:here"]).exit_code == 2


BASES = """
import torch

def get_rope(config, length=None):
    return 10000.0 ** -(torch.arange(0, config["head_dim"], 2) / config["head_dim"])
"""


@pytest.mark.process
def test_the_command_with_several_configurations(tmp_path, monkeypatch):
    """The function ignores ``rope_theta``."""
    from typer.testing import CliRunner

    (tmp_path / "right.json").write_text(json.dumps(configured(PLAIN)))
    (tmp_path / "wrong.json").write_text(json.dumps(configured(PLAIN | {"rope_theta": 5e5})))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "servers_rope.py").write_text(BASES)
    monkeypatch.chdir(tmp_path)
    files = ["right.json", "wrong.json", "broken.json"]
    command = ["verify-config", *files, "--against", "servers_rope:get_rope", "--json", "report.json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    right, wrong, broken = done.output.splitlines()
    assert right == "right.json: right" and "rope_theta" in wrong and broken.startswith("broken.json: not judged: ")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [report[file]["verdict"] for file in files] == ["right", "wrong", "not judged"]


@pytest.mark.parametrize("first, said", [
    (4096, "at 4096 tokens and more, in place of 4097"), (100, "at 100 tokens and more, in place of 4097"),
    (0, "at every length"), (2**30, "never taken"),
])  # fmt: skip
def test_the_length_is_told_from_which_on_other_factors_are_taken(first, said):
    factors = {"short_factor": [1.0 + i / 100 for i in range(32)], "long_factor": [1.0 + i / 2 for i in range(32)]}
    longrope = PLAIN | {"rope_type": "longrope", "original_max_position_embeddings": 4096} | factors
    config = configured(longrope, max_position_embeddings=131072)
    scale = rope_from_config(config).attention_factor

    class Rotary(torch.nn.Module):
        def forward(self, x, position_ids):
            long = int(position_ids.max()) + 1 >= first
            theta = inverse() / torch.tensor(factors["long_factor" if long else "short_factor"])
            angles = (position_ids[..., None] * theta).tile(2)
            return angles.cos() * scale, angles.sin() * scale

    (finding,) = verify_config(config, Rotary()).findings
    assert finding.key == "long_factor" and said in finding.words


def test_a_module_is_a_target_and_no_function_that_returns_one():
    class Rotary(torch.nn.Module):
        def forward(self, x, position_ids):
            raise AssertionError

    class Made(torch.nn.Module):
        def forward(self):
            raise AssertionError

    assert child._takes_arguments(Rotary()) and not child._takes_arguments(Made())
    assert not child._takes_arguments(lambda: 1) and not child._takes_arguments(Rotary)


def test_a_function_that_rotates_x_of_any_rank_is_no_table():
    """A call with x ``[1, K, D]`` of zeros returns zeros of a shape that tables could have."""
    theta = rope_from_config(configured(YARN)).inverse_frequencies * (1 + 1e-3)

    def rope(x, positions):
        angles = positions.double()[..., None] * theta
        angles = angles.reshape(*[1] * (x.ndim == 4), x.shape[-3 if x.ndim == 4 else -2], *[1] * (x.ndim == 4), 32)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    report = verify_config(configured(YARN), rope)
    assert report.verdict == "wrong" and "32 pairs" in str(report), str(report)


@pytest.mark.parametrize("shape", ["[K, 1, D]", "[1, K, D]", "[K, D]"])
def test_a_function_of_positions_takes_x_of_one_rank(shape):
    theta = rope_from_config(configured(YARN)).inverse_frequencies
    axes = {"[K, 1, D]": (3, (slice(None), None)), "[1, K, D]": (3, (None,)), "[K, D]": (2, ())}[shape]

    def rotate(factor):
        def rope(x, positions):
            if x.ndim != axes[0] or positions.ndim != 1:
                raise ValueError("x has another rank")
            angles = (positions.double()[:, None] * theta * factor)[axes[1]]
            a, b = x.double().chunk(2, -1)
            y = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
            return y.to(x.dtype) * attention_factor

        return rope

    attention_factor = rope_from_config(configured(YARN)).attention_factor
    right, wrong = (verify_config(configured(YARN), rotate(factor)) for factor in (1, 1.001))
    assert right.verdict == "right" and f"x {shape}, positions" in str(right), str(right)
    assert wrong.verdict == "wrong", str(wrong)
