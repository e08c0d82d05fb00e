"""Whole models: the factory, the functions that a call shows to rotate, the laws of attention, and the tables."""

import inspect
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from ropelab.angles.model_config import rope_from_config  # noqa: E402
from ropelab.command import apart  # noqa: E402
from ropelab.command.apart import report_apart  # noqa: E402
from ropelab.command.cli import app  # noqa: E402
from ropelab.command.process import UNFINISHED, Limits, Run  # noqa: E402
from ropelab.conformance.child import Notes  # noqa: E402
from ropelab.conformance.models import attention_laws, function_laws, verify_model  # noqa: E402
from ropelab.conformance.models.deliberate import DELIBERATE  # noqa: E402
from ropelab.conformance.models.factory import NotBuilt, build, made_of  # noqa: E402
from ropelab.conformance.models.trace import Traced, Turn, rotations  # noqa: E402
from ropelab.conformance.models.verify_model import (  # noqa: E402
    FunctionReport,
    ModelReport,
    disagreement,
    function_report,
    tiny_of,
)
from ropelab.interop.broadcast import formula  # noqa: E402
from tests.models import tables  # noqa: E402
from tests.support import older  # noqa: E402

OLDER = older("transformers")
of_the_tables = pytest.mark.skipif(bool(OLDER), reason=OLDER)


def unjudged(traced):
    """A report without the laws of the function, which other tests hold."""
    return FunctionReport(traced.name, "", traced.layout, traced.out_layout, "", traced.rotary_dim, traced.head_dim,
                          traced.factor, "right")  # fmt: skip


def outcomes(report):
    return {law.law: law.status for law in report.laws}


@pytest.fixture
def llama():
    return build("llama").double()


# ------------------------------------------------------------------------------------------------- a right model


def test_a_right_model(torch_backend):
    report = verify_model("llama")
    assert report.verdict == "right", str(report)
    assert set(outcomes(report).values()) == {"pass"}
    [function] = report.functions
    assert (function.layout, function.sign, function.rotary_dim, function.head_dim) == (
        "split_half",
        "standard",
        16,
        16,
    )
    assert json.loads(report.to_json())["verdict"] == "right"


def test_a_function_of_one_tensor_is_held_to_the_laws(torch_backend):
    def rotate(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    report = function_laws.hold_function(rotate, function_laws.understood("rotate", rotate), laws=["definition"])
    assert [(r.law, r.status) for r in report.results] == [("definition", "pass")]


@pytest.mark.process
@pytest.mark.parametrize("target, code, said", [("gpt_oss", 1, "packed_is_separate: fail"), ("bert", 2, "not judged")])
def test_exit_codes(torch_backend, tmp_path, target, code, said):
    file = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["verify-model", target, "--json", str(file)])
    assert result.exit_code == code, result.output
    assert said in result.output
    assert json.loads(file.read_text())["verdict"] == {1: "wrong", 2: "not judged"}[code]


MODELS = """
import ctypes, os, signal, sys
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from ropelab.conformance.models.factory import build

def llama(end=lambda *a: None):
    model = build("llama").model
    model.register_forward_hook(end)
    return model

def exits():
    return llama(lambda *a: sys.exit(0))

def ends():
    return llama(lambda *a: os._exit(1))

def crashes():
    return llama(lambda *a: ctypes.string_at(0))

def is_interrupted():
    return llama(lambda *a: os.kill(os.getpid(), signal.SIGINT))

def is_killed():
    return llama(lambda *a: os.kill(os.getpid(), signal.SIGKILL))

def hangs():
    return llama(lambda *a: signal.pause())

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError

def raises():
    raise Unspeakable

def no_model():
    return "llama"

def experts():
    sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
                 qk_nope_head_dim=8, v_head_dim=8)
    routes = dict(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1)
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=64, **sizes, **heads, **routes))
"""
ENDS = {
    "models:exits": "SystemExit: 0 was raised during a call of the model",
    "models:ends": "the process ended with exit code 1 during a call of the model",
    "models:crashes": "the process was ended by SIGSEGV during a call of the model",
    "models:is_interrupted": "KeyboardInterrupt was raised during a call of the model",
    "models:is_killed": "the process was ended by SIGKILL during a call of the model",
    "models:hangs": "the time limit of 15 s was reached during",
    "models:raises": "returns one, got models:raises (Unspeakable: (its message cannot be read))",
    "models:no_model": "returns one, got models:no_model (str 'llama')",
    "models:nothing": "has no attribute 'nothing'",
    "leaves:model": "the process ended with exit code 0 during the import of leaves:model",
    "no_such_architecture": "No module named",
}


@pytest.mark.process
def test_no_way_to_end_a_model_is_a_verdict(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "leaves.py").write_text("import os; os._exit(0)")
    monkeypatch.chdir(tmp_path)
    limits = {target: Limits(15 if target == "models:hangs" else 300) for target in ENDS}
    with ThreadPoolExecutor(2) as pool:
        run = lambda target: report_apart("verify-model", {"target": target}, limits[target])[target]  # noqa: E731
        reports = dict(zip(ENDS, pool.map(run, ENDS), strict=True))
    for target, report in reports.items():
        assert report["verdict"] == "not judged" and ENDS[target] in report["words"], (target, report)
        found = report["report"]
        assert not found["functions"] and ENDS[target] in found["stopped"] + found["message"]


@pytest.mark.process
def test_experts_in_float64(tmp_path, monkeypatch):
    """The grouped product of experts, the default of Transformers, takes no float64."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["verify-model", "models:experts"])
    assert result.exit_code == 0, result.output
    assert "DeepseekV3ForCausalLM): right" in result.output


def broken(verdict):
    return FunctionReport("rope", "", "", "", "", 2, 2, 1.0, verdict)


@pytest.mark.parametrize("function, verdict", [(broken("wrong"), "wrong"), (broken("right"), "not judged")])
def test_what_a_model_broke_before_its_process_ended_stays_broken(monkeypatch, function, verdict):
    kept: list = []
    notes = Notes(Path(os.devnull), "")
    monkeypatch.setattr(notes, "write", lambda kind, value: kept.append((kind, value)))
    notes.report("llama", ModelReport("llama", "", (function,), stopped=UNFINISHED))
    monkeypatch.setattr(apart, "run", lambda *a: Run(kept, 'it ended during "laws"'))
    report = report_apart("verify-model", {}, Limits())["llama"]
    assert report["verdict"] == verdict and report["report"]["stopped"] == 'it ended during "laws"'
    assert 'it ended during "laws"' in report["words"]


def test_a_model_of_ones_own(llama):
    before = next(llama.model.parameters()).clone()
    report = verify_model(llama.model.float(), laws_of=unjudged)
    assert report.verdict == "right" and next(llama.model.parameters()).dtype == torch.float32
    assert torch.equal(before.float(), next(llama.model.parameters()))


def test_what_is_no_model():
    with pytest.raises(TypeError, match="model: expected the name of an architecture or a torch.nn.Module, got"):
        verify_model(3)
    with pytest.raises(TypeError, match="inputs: expected the arguments of a call"):
        verify_model(torch.nn.Linear(2, 2))
    assert "expected" in verify_model("no_such_architecture").message or verify_model("no_such_architecture").message


# ------------------------------------------------------------------------------------- every law finds its fault


@pytest.mark.parametrize(
    "wrong, broken, said",
    [
        (lambda positions: torch.arange(positions.shape[-1])[None].expand_as(positions), "positions_are_used", ""),
        (lambda positions: positions**2, "distances_only", ""),
        (lambda positions: positions - positions.amax(-1, keepdim=True), "cached_is_prefill", ""),
        (lambda positions: positions + positions.shape[-1] * (positions[:, :1] != 0), "cached_is_prefill",
         "the new token turns by position 7 in place of 6"),
    ],
)  # fmt: skip
def test_wrong_positions(monkeypatch, llama, wrong, broken, said):
    rotary = llama.model.model.rotary_emb
    forward = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: forward(x, wrong(position_ids)))
    report = verify_model(llama, laws_of=unjudged)
    assert outcomes(report)[broken] == "fail" and said in str(report), str(report)


def first_positions_again(x, positions):
    return positions - positions[..., :1] if positions.shape[-1] > 1 else positions


def offset_twice(x, positions):
    return positions + positions[..., :1] if positions.shape[-1] > 1 else positions


def first_of_all(x, positions):
    return positions[..., : x.shape[1]]


class CountsItself:
    """Positions from a count of the tokens that came, which begins again with a prompt."""

    def __call__(self, x, positions):
        self.first = self.first + self.count if positions.min() > 0 else 0
        self.count = x.shape[1]
        return positions - positions[..., :1] + self.first


@pytest.mark.parametrize("architecture", ["llama", "qwen2_vl"])
@pytest.mark.parametrize("wrong, said", [
    (first_positions_again, "in parts of 1, 2, 6 tokens"),  # mlx-vlm#1741
    (offset_twice, "in parts of 1, 2, 6 tokens"),  # mlx-node#33, mistral.rs#2083
    (first_of_all, "with position_ids of all tokens"),
    (CountsItself(), "after a step that was taken back"),
])  # fmt: skip
def test_wrong_positions_of_parts(monkeypatch, architecture, wrong, said):
    """Faults that one prefill and its decoding steps do not show."""
    tiny = build(architecture).double()
    text = tiny.model.model if hasattr(tiny.model, "model") else tiny.model
    rotary = getattr(text, "language_model", text).rotary_emb
    forward = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: forward(x, wrong(x, position_ids)))
    with torch.no_grad():
        [found] = [law for law in attention_laws.hold_attention(tiny) if law.law == "cached_is_prefill"]
    assert found.status == "fail" and said in found.message, found


class Changed(torch.nn.Module):
    """A rotary module whose positions or tables are changed."""

    def __init__(self, inner, positions=lambda p: p, tables=lambda t: t):
        super().__init__()
        self.inner, self.positions, self.tables = inner, positions, tables

    def forward(self, x, position_ids, *layer_type, **options):
        tables = self.inner(x, self.positions(position_ids), *layer_type, **options)
        return tuple(map(self.tables, tables))


def with_rotary(tiny, **changes):
    text = tiny.model.model if hasattr(tiny.model, "model") else tiny.model
    text.rotary_emb = Changed(text.rotary_emb, **changes)
    return tiny


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}


def tiny_model(architecture, **chosen):
    return made_of(architecture, type(build(architecture).model), **chosen).double()


def wrong_theta_in_one_type():
    """Gemma 3 with the frequencies of full attention in sliding layers."""
    tiny = tiny_model("gemma3")
    rotary = tiny.model.model.rotary_emb
    rotary.sliding_attention_inv_freq = rotary.full_attention_inv_freq.clone()
    return tiny


def frequencies_in_bfloat16():
    tiny = tiny_model("llama")
    rotary = tiny.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().double()
    return tiny


def squared_factor():
    """The attention factor twice: its square stands in the tables."""
    factor = rope_from_config(tiny_model("llama", rope_parameters=YARN).model.config).attention_factor
    return with_rotary(tiny_model("llama", rope_parameters=YARN), tables=lambda table: factor * table)


def rotary_with_axes(*order):
    """Qwen2-VL whose sections read other axes than their own."""
    return with_rotary(tiny_model("qwen2_vl", rope_parameters=SECTIONS), positions=lambda p: p[list(order)])


def rotary_of_the_first_row():
    return with_rotary(tiny_model("llama"), positions=lambda p: p[:1].expand_as(p))


@pytest.mark.parametrize(
    "made, broken, said",
    [
        (wrong_theta_in_one_type, {"angles_of_the_configuration", "turns_as_its_class"}, "layer_types are exchanged"),
        (frequencies_in_bfloat16, {"angles_of_the_configuration", "turns_as_its_class"},
         "layer 0, q, tokens 0 to 8: frequencies are rounded to bfloat16"),
        (squared_factor, {"angles_of_the_configuration"}, "have the factor 1.29648 in place of 1.13863"),
        (partial(rotary_with_axes, 0, 1, 1), {"angles_of_the_configuration"},
         "pairs 6, 7 turn by the positions of axes 1, 1 in place of 2, 2"),
        (partial(rotary_with_axes, 0, 2, 1), {"angles_of_the_configuration"},
         "by the positions of axes 2, 2, 2, 1, 1 in place of 1, 1, 1, 2, 2"),
        (rotary_of_the_first_row, {"angles_of_the_configuration", "rows_have_positions", "left_padding"},
         "which are those of sequence 0"),
    ],
)  # fmt: skip
def test_angles_that_the_configuration_does_not_state(made, broken, said):
    report = verify_model(made(), laws_of=unjudged)
    assert {law for law, status in outcomes(report).items() if status == "fail"} == broken, str(report)
    assert said in str(report)
    assert report.verdict == "wrong"


def a_table_of(rows):
    """Llama whose positions beyond the last row of a table read the last row."""
    return with_rotary(tiny_model("llama"), positions=lambda p: p.clamp(max=rows - 1))


class Exchanged(torch.nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, *given, **options):
        return self.rotary(*given, **options)[::-1]


def sines_for_cosines():
    tiny = tiny_model("mistral")
    tiny.model.model.rotary_emb = Exchanged(tiny.model.model.rotary_emb)
    return tiny


@pytest.mark.parametrize("made, said", [
    (partial(a_table_of, 24), "positions beyond 23 turn by position 23"),
    (sines_for_cosines, "cosines and sines are exchanged"),
    (lambda: with_rotation("llama", by_heads), "head h turns by the position plus h"),
])  # fmt: skip
def test_angles_that_follow_a_rule(made, said):
    report = verify_model(made(), laws_of=unjudged)
    assert report.verdict == "wrong" and said in str(report), str(report)


@pytest.mark.parametrize("rope", [YARN, YARN | {"attention_factor": 1.5}, {"rope_type": "linear", "factor": 3.0,
                                                                          "rope_theta": 500.0}])  # fmt: skip
def test_scaled_angles_of_a_right_model(rope):
    report = verify_model(tiny_model("llama", rope_parameters=rope), laws_of=unjudged)
    assert set(outcomes(report).values()) == {"pass"}, str(report)


# ------------------------------------------------------------------- what the model's class in Transformers turns


def with_rotation(architecture, changed):
    """A model whose attention calls ``changed(rotate, layer, q, k, cos, sin)``; the class keeps its own ``rotate``."""
    tiny = tiny_model(architecture)
    for number, layer in enumerate(tiny.model.model.layers):
        forward = inspect.unwrap(type(layer.self_attn).forward)
        names = forward.__globals__ | {
            name: partial(changed, rotate, number)
            for name, rotate in forward.__globals__.items()
            if name.startswith("apply_rotary_pos_emb")
        }
        own = FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
        layer.self_attn.forward = MethodType(own, layer.self_attn)
    return tiny


def as_halves(x, cos, sin):
    cos, sin = (table[:, None, :, : x.shape[-1] // 2].to(x.dtype) for table in (cos, sin))
    return halves(x, cos, sin)


def every_layer_turns():
    """Cohere 2 turns in layers of sliding attention only."""
    tiny = tiny_model("cohere2", layer_types=["full_attention", "sliding_attention"])
    tiny.model.model.layers[0].self_attn.sliding_window = 64
    return tiny


def one_layer_stays(rotate, layer, q, k, cos, sin, **options):
    return (q, k) if layer == 1 else rotate(q, k, cos, sin, **options)


def one_layer_turns_back(rotate, layer, q, k, cos, sin, **options):
    return rotate(q, k, cos, -sin if layer == 1 else sin, **options)


def other_pairs(rotate, layer, q, k, cos, sin, **options):
    cos, sin = (table[..., ::2].repeat(1, 1, 2) for table in (cos, sin))
    return as_halves(q, cos, sin), as_halves(k, cos, sin)


def other_pairs_of_k(rotate, layer, q, k, cos, sin, **options):
    return rotate(q, k, cos, sin, **options)[0], as_halves(k, cos, sin)


def last_features(rotate, layer, q, k, cos, sin, **options):
    rest = q.shape[-1] - cos.shape[-1]
    turned = rotate(q[..., rest:], k[..., rest:], cos, sin, **options)
    return tuple(torch.cat((x[..., :rest], y), -1) for x, y in zip((q, k), turned, strict=True))


def by_heads(rotate, layer, q, k, cos, sin, **options):
    """Turn head h by the position plus h."""
    theta = 10000.0 ** -(torch.arange(0, cos.shape[-1], 2).double() / cos.shape[-1]).repeat(2)
    return tuple(by_head(x, cos, sin, (torch.arange(x.shape[1])[:, None, None] * theta).to(x.dtype)) for x in (q, k))


def by_head(x, cos, sin, more):
    cos, sin = cos[:, None], sin[:, None]
    c, s = cos * more.cos() - sin * more.sin(), sin * more.cos() + cos * more.sin()
    half = x.shape[-1] // 2
    return x * c + torch.cat((-x[..., half:], x[..., :half]), -1) * s


def without_a_function(*given, sense=1):
    """A rotation whose arguments nobody sees."""
    q, k, cos, sin = given[2:]
    half, cos, sin = q.shape[-1] // 2, cos[:, None], sense * sin[:, None]
    return tuple(x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k))


@pytest.mark.parametrize(
    "made, said",
    [
        (every_layer_turns, ", q and k: features 0 to 15 turn, in place of none"),
        (partial(with_rotation, "qwen2", one_layer_stays), "layer 1, q and k: no features turn, in place of 0 to 15"),
        (partial(with_rotation, "cohere", other_pairs), ", q and k: features are paired as split_half in place of"),
        (partial(with_rotation, "nemotron", last_features), ", q and k: features 8 to 15 turn, in place of 0 to 7"),
        (partial(with_rotation, "mistral", partial(without_a_function, sense=0.5)),
         "scores are those of the class where all positions are 0, and others"),
        (partial(with_rotation, "mistral", one_layer_turns_back), ": layer 1 is the first that differs, in q and k"),
        (partial(with_rotation, "youtu", other_pairs_of_k), "layer 0, k: features are paired as split_half in place"),
    ],
)  # fmt: skip
def test_features_that_the_class_does_not_turn(made, said):
    report = verify_model(made(), laws_of=unjudged)
    assert {law for law, status in outcomes(report).items() if status == "fail"} >= {"turns_as_its_class"}, str(report)
    assert said in str(report), str(report)


def test_a_rotation_in_no_function_is_right_by_its_scores():
    report = verify_model(with_rotation("mistral", without_a_function))
    assert report.verdict == "right" and not report.functions, str(report)
    assert outcomes(report)["distances_only"] == outcomes(report)["turns_as_its_class"] == "pass"


def test_a_model_that_only_uses_the_weights_of_its_class_is_not_compared():
    tiny = tiny_model("qwen2")
    tiny.model.model.layers[0].self_attn.extra = torch.nn.Linear(2, 2)
    [law] = [law for law in verify_model(tiny, laws_of=unjudged).laws if law.law == "turns_as_its_class"]
    assert law.status == "not applicable" and "its weights are not those of its class" in law.message


def test_a_mask_that_left_padding_does_not_reach(monkeypatch, llama):
    import transformers.models.llama.modeling_llama as module

    mask = module.create_causal_mask
    monkeypatch.setattr(module, "create_causal_mask", lambda **options: mask(**options | {"attention_mask": None}))
    assert outcomes(verify_model(llama, laws_of=unjudged))["left_padding"] == "fail"


def test_packed_sequences_that_see_each_other(monkeypatch, llama):
    import transformers.models.llama.modeling_llama as module

    mask = module.create_causal_mask
    monkeypatch.setattr(module, "create_causal_mask", lambda **options: mask(**options | {"position_ids": None}))
    assert outcomes(verify_model(llama, laws_of=unjudged))["packed_is_separate"] == "fail"


def test_a_function_that_is_wrong(monkeypatch, llama, torch_backend):
    import transformers.models.llama.modeling_llama as module

    class Backward(torch.autograd.Function):
        """A function that turns q forward, and its gradient forward as well."""

        @staticmethod
        def forward(ctx, x, cos, sin):
            ctx.save_for_backward(cos, sin)
            return formula(x, cos, sin)

        @staticmethod
        def backward(ctx, grad):
            return formula(grad, *ctx.saved_tensors), None, None

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return Backward.apply(q, cos, sin), formula(k, cos, sin)

    apply_rotary_pos_emb.__globals__["apply_rotary_pos_emb"] = apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    try:
        [traced] = rotations(llama.output)
        report = function_report(traced)
    finally:
        del apply_rotary_pos_emb.__globals__["apply_rotary_pos_emb"]
    assert report.verdict == "wrong" and "adjoint" in report.failed


# ------------------------------------------------------------------------- rotations that follow no known convention


def halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def neighbours(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


class OwnRope(torch.nn.Module):
    """A rotation whose angles are its own; the functions rotate by cosines and sines ``[B, S, 1, D/2]``."""

    def __init__(self, turn_q=halves, turn_k=halves):
        super().__init__()
        self.turn_q, self.turn_k = turn_q, turn_k
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(0, 16, 2).float() / 16), persistent=False)

    def tables(self, positions, dtype):
        angles = (positions[..., None] * self.frequencies)[:, :, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, q, k, positions):
        cos, sin = self.tables(positions, q.dtype)
        return self.turn_q(q, cos, sin), self.turn_k(k, cos, sin)


class OneAtATime(OwnRope):
    def forward(self, x, positions):
        return self.turn_q(x, *self.tables(positions, x.dtype))


class Counting(OwnRope):
    """A rotation that counts the tokens itself."""

    def forward(self, q, k, seq_len):
        cos, sin = self.tables(torch.arange(seq_len)[None], q.dtype)
        return self.turn_q(q, cos, sin), self.turn_k(k, cos, sin)


class WithTables(OwnRope):
    """Tables ``[B, 1, S, D/2]`` for tensors ``[B, H, S, D]``, and a method that rotates by them."""

    def forward(self, q, k, positions):
        cos, sin = (table.transpose(1, 2) for table in self.tables(positions, q.dtype))
        q, k = self.rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    def rotate(self, q, k, cos, sin):
        return self.turn_q(q, cos, sin), self.turn_k(k, cos, sin)


class Cached(OwnRope):
    """Cosines and sines of 64 positions."""

    def __init__(self, turn_q=halves, turn_k=halves):
        super().__init__(turn_q, turn_k)
        for name, table in zip(("cos", "sin"), self.tables(torch.arange(64)[None], torch.float32), strict=True):
            self.register_buffer(name, table[0, :, 0], persistent=False)

    def forward(self, q, k, positions):
        cos, sin = (table[positions][:, :, None].to(q.dtype) for table in (self.cos, self.sin))
        return self.turn_q(q, cos, sin), self.turn_k(k, cos, sin)


class Roformer(OwnRope):
    """Sines, then cosines, in one table that all sequences share."""

    def rotate(self, x, sinusoidal_pos):
        sin, cos = sinusoidal_pos.chunk(2, -1)
        return self.turn_q(x, cos, sin)


class OfAngles(OwnRope):
    """Complex numbers in a function inside of a function."""

    def forward(self, q, k, positions):
        def rotated(pair, table):
            return tuple(
                torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table).flatten(-2) for x in pair
            )

        cos, sin = self.tables(positions, q.dtype)
        return rotated((q, k), torch.complex(cos, sin))


class Tail(OwnRope):
    """The last features turn, in pairs of halves, and values pass."""

    def forward(self, q, k, positions):
        cos, sin = (table[..., ::2] for table in self.tables(positions, q.dtype))
        return self.rotate(q, k, k, cos, sin)[:2]

    def rotate(self, q, k, v, cos, sin):
        q, k = (torch.cat((x[..., :8], self.turn_q(x[..., 8:], cos, sin)), -1) for x in (q, k))
        return q, k, v


def k_alone(x, cos, sin):
    """Leave a single token as it is."""
    return halves(x, cos, sin) if x.shape[1] > 1 else x


class BackwardOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return halves(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return halves(grad, *ctx.saved_tensors), None, None


class TinyLM(torch.nn.Module):
    """Two layers of attention around a rotation, and a configuration."""

    def __init__(self, rope):
        super().__init__()
        from transformers import LlamaConfig

        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        self.config = LlamaConfig(vocab_size=64, num_hidden_layers=2, intermediate_size=64, **sizes)
        self.embed, self.rope = torch.nn.Embedding(64, 64), rope
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 128) for _ in range(2))

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        at = torch.arange(x.shape[1]).expand(x.shape[:2]) if position_ids is None else position_ids
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (8, 16)).split((4, 2, 2), 2)
            if isinstance(self.rope, OneAtATime):
                q, k = self.rope(q, at), self.rope(k, at)
            else:
                q, k = self.rope(q, k, x.shape[1] if isinstance(self.rope, Counting) else at)
            q, k, v = (y.transpose(1, 2).repeat_interleave(4 // y.shape[2], 1) for y in (q, k, v))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2)
        return (x,)


def tiny_lm(rope):
    torch.manual_seed(0)
    return TinyLM(rope).eval()


def test_the_vocabulary_of_a_model_with_parts_is_that_of_its_text():
    from transformers import Qwen2VLConfig

    model = tiny_lm(OwnRope(halves, halves))
    model.config = Qwen2VLConfig(text_config={"vocab_size": 3})
    assert tiny_of(model).inputs["input_ids"].max() < 3


@pytest.mark.parametrize("kind", [OwnRope, OneAtATime, WithTables, OfAngles, Cached])
@pytest.mark.parametrize("turn", [halves, neighbours])
def test_a_rotation_without_a_known_convention_is_right(kind, turn):
    report = verify_model(tiny_lm(kind(turn, turn)))
    assert report.verdict == "right", str(report)
    assert all(f.convention.startswith("called as in the model, with") for f in report.functions)


@pytest.mark.parametrize("turn", [halves, neighbours])
def test_the_last_features_may_turn_and_values_pass(turn):
    model = tiny_lm(Tail(turn, turn))
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    report = verify_model(model)
    assert report.verdict == "right" and outcomes(report)["angles_of_the_configuration"] == "pass", str(report)
    assert report.functions[0].rotary_dim == 8 and report.functions[0].head_dim == 16


def test_an_architecture_whose_tables_are_joined(torch_backend):
    from ropelab.conformance.models.replay import understood

    rope = Roformer()
    q = torch.randn(2, 9, 4, 16, dtype=torch.float64)
    [traced] = rotations(lambda: rope.rotate(q, torch.cat(rope.tables(torch.arange(9)[None], q.dtype)[::-1], -1)))
    assert understood(traced).words == "sines and cosines [1, 9, 1, 16]"


def test_an_argument_that_is_not_understood_is_no_evidence():
    class Weighted(OwnRope):
        def forward(self, q, k, positions):
            return self.rotate(q, positions, q.norm(dim=-1)), self.rotate(k, positions, k.norm(dim=-1))

        def rotate(self, x, positions, norms):
            y = self.turn_q(x, *self.tables(positions, x.dtype))
            return y * (norms / y.norm(dim=-1))[..., None]

    rope = Weighted()
    q = torch.randn(2, 9, 4, 16, dtype=torch.float64)
    [traced] = rotations(lambda: rope.rotate(q, torch.arange(9)[None], q.norm(dim=-1)))
    report = function_report(traced)
    assert report.verdict == "not judged" and "norms [2, 9, 4] belongs to the tokens" in report.message


def test_a_rotation_that_counts_tokens_is_right_and_the_model_is_not():
    report = verify_model(tiny_lm(Counting()))
    assert [f.verdict for f in report.functions] == ["right"] and "no positions" in report.functions[0].convention
    assert "positions_are_used" in {law.law for law in report.laws if law.status == "fail"}


@pytest.mark.parametrize("rope, law", [
    (lambda: OwnRope(turn_k=k_alone), "decode (k)"),
    (lambda: OwnRope(turn_q=BackwardOf.apply), "adjoint (q)"),
    (lambda: WithTables(turn_k=lambda x, c, s: halves(x, c.flip(-1), s.flip(-1))), "definition (k)"),
    (lambda: OneAtATime(turn_q=lambda x, c, s: halves(x, c, s) if x.shape[2] > 1 else x), "single_head (x)"),
])  # fmt: skip
def test_a_rotation_without_a_known_convention_is_wrong(rope, law):
    report = verify_model(tiny_lm(rope()))
    assert report.verdict == "wrong" and any(law in f.failed for f in report.functions), str(report)


@pytest.mark.parametrize("kind", [OwnRope, WithTables])
def test_q_and_k_with_other_pairs_in_a_model(kind):
    report = verify_model(tiny_lm(kind(neighbours, halves)))
    [function] = report.functions
    assert report.verdict == "wrong" and function.failed == ("layout",)
    assert function.message.startswith("q is paired as interleaved and k is paired as split_half")
    assert " in place of 1" not in str(report)


@pytest.mark.parametrize("layer, said", [(0, "scores between them mix"), (1, "in different layers")])
def test_scores_mix_features_within_a_layer_alone(layer, said):
    x = torch.zeros(1)
    turns = (Turn(0, x, x, "q", "interleaved", layer=0), Turn(1, x, x, "k", "split_half", layer=layer))
    found = [Traced("turn", None, ("q", "k"), "interleaved", "interleaved", 8, 8, 1.0, 2, turns)]
    assert said in disagreement(found)


# ------------------------------------------------------------------------------------------ what rotates in a call


def rotary_tables(rows, columns, layout="split_half"):
    angles = (torch.arange(1.0, rows + 1)[:, None] * 0.7 ** torch.arange(columns // 2)).double()
    full = torch.cat((angles, angles), -1) if layout == "split_half" else angles.repeat_interleave(2, -1)
    return full.cos(), full.sin()


def turned(x, cos, sin, layout):
    return formula(x, cos, sin, layout)


@pytest.mark.parametrize("layout", ["split_half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [4, 8])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_a_rotation_is_found_by_its_values(layout, rotary_dim, factor):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    cos, sin = (factor * table for table in rotary_tables(5, rotary_dim, layout))
    if rotary_dim < 8 and factor != 1:
        return  # features that do not rotate keep their lengths, and those that do change theirs
    [found] = [one for one in rotations(lambda: turned(x, cos, sin, layout)) if one.name.endswith("turned")]
    assert (found.layout, found.out_layout, found.rotary_dim) == (layout, layout, rotary_dim)
    assert found.rotated == ("x",) and found.head_dim == 8 and abs(found.factor - factor) < 1e-9


def test_other_functions_are_not_found():
    x, weight = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * weight

    def flip(x, weight):
        return x.flip(-1)

    def sign(x, weight):
        return -x

    def shift(x, weight):
        return x + weight

    assert rotations(lambda: [f(x, weight) for f in (norm, flip, sign, shift)]) == []


@of_the_tables
def test_the_factory_says_why_it_has_no_model():
    with pytest.raises(NotBuilt, match="timm|Timm|pip install"):
        build("pe_video")


# ------------------------------------------------------------------------------------------------------ the tables

VERIFIED, PATCHED, DIFFUSERS = (tables.read(f"{name}.csv") for name in ("transformers", "patched", "diffusers"))


@of_the_tables
def test_the_tables_cover_at_least_a_hundred_architectures():
    assert len({row["architecture"] for row in VERIFIED if row["function"]}) >= 100
    assert len({row["architecture"] for row in PATCHED if row["outcome"] == "equal"}) >= 100
    assert len(DIFFUSERS) >= 7
    every = set(tables.architectures())
    assert every == {row["architecture"] for row in VERIFIED} == {row["architecture"] for row in PATCHED}
    assert all(
        row["reason"] for row in (*VERIFIED, *PATCHED) if row["outcome"] in ("not judged", "no model", "refused")
    )
    assert not [row for row in PATCHED if row["outcome"] == "differs"]


def test_every_wrong_model_is_a_finding_and_every_design_is_needed():
    told = (tables.FOLDER / "findings.md").read_text()
    wrong = {row["architecture"] for row in VERIFIED if row["outcome"] == "wrong"}
    assert wrong and all(f"`{name}`" in told for name in wrong)
    assert {name for name, _ in DELIBERATE} <= {row["architecture"] for row in VERIFIED}


SAMPLE = random.Random(21).sample(sorted({row["architecture"] for row in VERIFIED if row["function"]}), 4)


@pytest.mark.parametrize("architecture", SAMPLE)
def test_a_sample_of_the_laws(torch_backend, architecture):
    report = verify_model(architecture, laws_of=unjudged)
    rows = [row for row in VERIFIED if row["architecture"] == architecture]
    assert {law: status for law, status in outcomes(report).items()} == {law: rows[0][law] for law in tables.LAWS}
    assert [f.name.split(".")[-1] for f in report.functions] == [row["function"] for row in rows]


@pytest.mark.parametrize("architecture", SAMPLE[:3])
def test_a_sample_of_the_patched_models(torch_backend, architecture):
    [row] = tables.patched_rows(architecture, compiled=architecture == SAMPLE[0])
    [known] = [row for row in PATCHED if row["architecture"] == architecture]
    assert row["outcome"] == known["outcome"] == "equal"
    assert ("equal" in row["qk_norm"]) == ("equal" in known["qk_norm"])
    assert "compiled" not in row or ("equal" in row["compiled"]) == ("equal" in known["compiled"])
