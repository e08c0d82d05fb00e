"""The identification measures a wrong function, names the injected parameters, and is silent on a right function.

The faults of this file are not in the catalogue.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import ropelab
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance import verify
from ropelab.conformance.declared import declare
from ropelab.conformance.faults import CONTROLS, FAULTS, correct
from ropelab.conformance.identify import Identification, deviation, identify
from ropelab.conformance.identify.angles import refined, rows, slopes
from ropelab.conformance.report import identification, text
from ropelab.conformance.surroundings import Surroundings
from tests.repo.test_arrows import import_graph, needed

FRESH = {}


@dataclass(frozen=True)
class Fresh:
    """A fault of this file, and the words or parameters that an identification must have."""

    function: object
    convention: str
    kind: str
    parameters: dict = field(default_factory=dict)
    says: str = ""
    options: dict = field(default_factory=dict)


def fresh(convention, kind, says="", options=None, **parameters):
    def keep(function):
        FRESH[function.__name__] = Fresh(function, convention, kind, parameters, says, options or {})
        return function

    return keep


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small, and several threads of torch only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def identified(function, convention, seconds=120.0, **options) -> Identification:
    """The finding of the search, which ends with the first finding, long before the limit, even on a busy machine."""
    declaration, surroundings = declare(convention, **options), Surroundings()
    with surroundings.ours():
        return identify(declaration.subject(function, surroundings), declaration.sizes, seconds)


# ------------------------------------------------------------------------------------------------- twenty faults


@fresh("module", "frequencies", base=500_000.0)
class OtherBase(correct.Module):
    def __init__(self, head_dim, rotary_dim=None, base=10000.0):
        super().__init__(head_dim, rotary_dim, 500_000.0)


@fresh("huggingface", "sign", r"^k turns by minus the angle$")
def k_turns_back(q, k, cos, sin, unsqueeze_dim=1):
    q, _ = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    return q, correct.huggingface(k, k, cos, -sin, unsqueeze_dim)[0]


@fresh("vllm", "offset", r"^k takes position \+ 3", offset=3)
def k_is_three_ahead(positions, query, key, head_size, cos_sin_cache, is_neox):
    kept = key.clone()
    correct.vllm(positions, query, kept, head_size, cos_sin_cache, is_neox)
    correct.vllm(
        (positions + 3).clamp(max=len(cos_sin_cache) - 1), query.clone(), key, head_size, cos_sin_cache, is_neox
    )
    return query, key


@fresh("flash_attn", "identity", r"is not rotated in odd heads")
def every_second_head_left(x, cos, sin, interleaved=False, inplace=False, **where):
    y = correct.flash_attn(x, cos, sin, interleaved, **where)
    odd = (torch.arange(x.shape[-2]) % 2 == 1)[:, None]
    return torch.where(odd, x, y)


@fresh("plain", "multiple", multiple=2.0)
def twice_the_angle(x, positions):
    return correct.plain(x, 2 * positions)


@fresh("plain", "wrap", modulus=4096)
def wrapped_at_4096(x, positions):
    return correct.plain(x, torch.where(positions < 0, positions, positions % 4096))


@fresh("huggingface", "reflection", r"is reflected: second members")
def reflected(q, k, cos, sin, unsqueeze_dim=1):
    def one(x):
        return _general(x, cos, sin, unsqueeze_dim, lambda x0, x1, c, s: (x0 * c - x1 * s, -(x1 * c) - x0 * s))

    return one(q), one(k)


def _general(x, cos, sin, unsqueeze_dim, turn):
    half = cos.shape[-1] // 2
    c, s = (table[..., :half].unsqueeze(unsqueeze_dim) for table in (cos, sin))
    return torch.cat(turn(*x.chunk(2, dim=-1), c, s), dim=-1).to(x.dtype)


@fresh("flash_attn", "sine row", r"rows of sin that are one position behind those of cos", shift=-1)
def sine_one_row_behind(x, cos, sin, interleaved=False, inplace=False, **where):
    sin = torch.cat((-sin[1:2], sin[:-1]))
    return correct.flash_attn(x, cos, sin, interleaved, **where)


@fresh("huggingface", "factor", r"^q is multiplied by 0.125$", factor=0.125)
def q_scaled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    return q * 0.125, k


@fresh("deepspeed", "rounding of table", format="bfloat16", options={"maths": "wide"})
def tables_in_bfloat16(t, freqs_cos, freqs_sin):
    return correct.deepspeed(t, freqs_cos.bfloat16(), freqs_sin.bfloat16())


@fresh("complex", "sign", r"^the gradient of each input turns by minus the angle$", options={"layout": "interleaved"})
def gradient_not_conjugated(xq, xk, freqs_cis):
    def one(x):
        def rotate(x):
            return correct.complex_numbers(x, x, freqs_cis)[0]

        return correct.with_backward(x, rotate, rotate)

    return one(xq), one(xk)


@fresh("plain", "frequencies", divisor=32)
def exponent_by_twice_the_width(x, positions):
    width = x.shape[-1]
    frequencies = inverse_frequencies(width, 100.0).to(torch.float64)
    return correct.turn_by(x, positions.double()[..., None] * frequencies)


@fresh("flash_attn", "layout", r"rotates 8 features", rotary_dim=8)
def eight_features_only(x, cos, sin, interleaved=False, inplace=False, **where):
    return correct.flash_attn(x, cos[:, :4], sin[:, :4], interleaved, **where)


@fresh("plain", "stride", stride=2)
def row_every_two_positions(x, positions):
    return correct.plain(x, torch.where(positions < 0, -(-positions // 2), positions // 2))


@fresh("plain", "offset", offset=0.5)
def half_a_position_ahead(x, positions):
    return correct.plain(x, positions + 0.5)


@fresh("huggingface", "row", r"^k takes the positions of the first sequence for all sequences")
def k_of_the_first_sequence(q, k, cos, sin, unsqueeze_dim=1):
    q = correct.huggingface(q, k, cos, sin, unsqueeze_dim)[0]
    return q, correct.huggingface(k, k, cos[:1], sin[:1], unsqueeze_dim)[0]


@fresh("flash_attn", "order of frequencies", r"in reverse order")
def frequencies_reversed(x, cos, sin, interleaved=False, inplace=False, **where):
    return correct.flash_attn(x, cos.flip(-1), sin.flip(-1), interleaved, **where)


@fresh("plain", "clamp", last=1024)
def clamped_at_1024(x, positions):
    return correct.plain(x, positions.clamp(max=1024))


@fresh("transformer_engine", "factor", factor=0.5)
def half_the_sines(t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0):
    def rotate(f):
        return correct.transformer_engine(t, f, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank)

    there, back = rotate(freqs), rotate(-freqs)
    return (0.75 * there + 0.25 * back).to(t.dtype)  # cos + i sin / 2


@fresh("vllm", "offset", r"^k takes position \+ 1", offset=1)
def q_turns_back_and_k_is_ahead(positions, query, key, head_size, cos_sin_cache, is_neox):
    """There are two faults: q turns the other way, and k is one position ahead."""
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    correct.vllm(positions, query, key.clone(), head_size, torch.cat((cos, -sin), dim=-1), is_neox)
    correct.vllm(positions + 1, query.clone(), key, head_size, cos_sin_cache, is_neox)
    return query, key


@fresh("vllm", "row", r"reads the row before the last row of the tables in place of the last$")
def the_last_row_is_never_read(positions, query, key, head_size, cos_sin_cache, is_neox):
    rows = positions.clamp(max=len(cos_sin_cache) - 2)
    return correct.vllm(rows, query, key, head_size, cos_sin_cache, is_neox)


@fresh("mrope", "row", r"reads the first axis of the positions for every pair$")
def one_position_for_all_axes(q, k, cos, sin, positions, section, interleaved=False):
    return correct.mrope(q, k, cos, sin, positions[:1].expand_as(positions), section, interleaved)


@fresh("plain", "wrap", r"takes positions as integers of 16 bits$")
def wrapped_at_int16(x, positions):
    return correct.plain(x, (positions + 2**15) % 2**16 - 2**15)


@fresh("huggingface", "identity", r"^k is not rotated in heads >= 1$")
def first_key_head_only(q, k, cos, sin, unsqueeze_dim=1):
    heads = 1 if unsqueeze_dim == 1 else 2
    of_q, of_k = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    first, others = of_k.narrow(heads, 0, 1), k.narrow(heads, 1, k.shape[heads] - 1)
    return of_q, torch.cat((first, others), heads)


@pytest.mark.parametrize("name", FRESH)
def test_a_fault_that_nobody_published_is_named(name):
    fault = FRESH[name]
    found = identified(fault.function, fault.convention, **fault.options)
    assert found.proven, found
    named = [d for d in found.deviations if d.kind == fault.kind]
    assert len(named) == 1 and len(found.deviations) == (2 if name == "q_turns_back_and_k_is_ahead" else 1), found
    assert re.search(fault.says, str(named[0]))
    for parameter, value in fault.parameters.items():
        got = named[0].parameters[parameter]
        assert got == (value if isinstance(value, str) else pytest.approx(value, rel=1e-4)), found


# --------------------------------------------------------------------------------------------- right functions


@pytest.mark.parametrize("control", [pytest.param(c, id=c.name) for c in CONTROLS])
def test_nothing_deviates_in_a_right_function(control):
    found = identified(control.function, control.convention, **control.options)
    assert found.silent and not found.proven, found


def test_a_right_function_is_not_measured():
    report = verify(correct.flash_attn, "flash_attn", laws=["definition"])
    assert report.passed and report.identification is None


# ------------------------------------------------------------------------------------------------- the catalogue

NAMED = {
    "tail_gradient_is_one": ("tail", {}),
    "backward_permutes_heads": ("order", {}),
    "backward_forgets_offsets": ("row", {}),
    "attention_factor_ignored": ("factor", {"power": 0.0}),
    "angles_into_tf32": ("rounding of operands", {"format": "TF32"}),
    "height_and_width_swapped": ("order of frequencies", {"shift": 3}),
    "applied_twice": ("multiple", {"multiple": 2.0}),
    "table_of_rank_zero": ("row", {}),
    "undeclared_in_place": ("inputs", {}),
    "frequencies_in_bfloat16": ("rounding of frequency", {"format": "bfloat16"}),
    "positions_in_bfloat16": ("rounding of position", {"format": "bfloat16"}),
    "attention_factor_twice": ("factor", {"factor": 1.138629}),
    "scaled_frequencies_dropped": ("frequencies", {"base": 10000.0}),
    "table_not_sized_for_scaling": ("clamp", {"last": 4095}),
    "exponent_by_head_dim": ("frequencies", {"divisor": 16}),
}
"""Fault of the catalogue -> the kind of deviation that it is, and its parameters. Other faults take longer."""


@pytest.mark.parametrize("name", NAMED)
def test_a_known_fault_is_named_without_the_catalogue(name):
    fault, (kind, parameters) = FAULTS[name], NAMED[name]
    found = identified(fault.function, fault.convention, **fault.options)
    assert found.proven and [d.kind for d in found.deviations] == [kind], found
    for parameter, value in parameters.items():
        got = found.deviations[0].parameters[parameter]
        assert got == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5))


def test_the_identification_knows_no_fault():
    graph = import_graph(Path(ropelab.__file__).parent, "ropelab")
    assert not {m for m in needed(graph, "ropelab.conformance.identify") if ".faults" in m or m.endswith("diagnose")}


# ------------------------------------------------------------------------------------- proof, repair and report


def nonlinear(x, positions):
    return correct.plain(x, positions) + 0.01 * x**2


def test_a_function_that_no_description_reproduces_says_what_is_left():
    found = identified(nonlinear, "plain", seconds=5.0)
    assert not found.proven and found.unexplained and found.repair is None
    assert any(re.match("x is not linear: twice the input does not give twice the result", f) for f in found.facts)
    assert all("unexplained" in line for line in found.words() if line not in found.facts)


class Remembering:
    """A right function that takes the tables of its first call with tables of a shape."""

    def __init__(self):
        self.tables = {}

    def __call__(self, x, cos, sin, interleaved=False, inplace=False, **where):
        return correct.flash_attn(x, *self.tables.setdefault(cos.shape, (cos, sin)), interleaved, inplace, **where)


def test_a_function_that_remembers_tables_is_said_to_remember():
    found = identified(Remembering(), "flash_attn")
    assert not found.proven and not found.deviations and found.unexplained
    assert found.facts == ("results follow the tables of an earlier call with the same shapes",)


def test_no_answer_that_shows_a_failure_proves_nothing():
    said = identification(Identification())
    assert "the measured answers do not show the failure" in said and not Identification().proven


def test_a_search_without_time_claims_nothing():
    found = identified(nonlinear, "plain", seconds=0.0)
    assert not found.proven and found.unexplained == ("the search did not end within 0 s of CPU time",)


def test_nothing_is_proven_without_deviations():
    found = Identification(proven=True).as_dict()
    assert not found["proven"] and found["facts"] == ["nothing deviates from the definition in any answer"]


def test_the_report_has_the_identification_in_words_and_as_json():
    function = FAULTS["sign_reversed_undeclared"].function
    report = verify(function, "huggingface", laws=["definition"], shrink=False)
    assert "each input turns by minus the angle" in text(report)
    assert "repair: negate the sines, or declare sign='reversed'" in text(report)
    assert '"kind": "sign"' in report.to_json()


def test_an_input_that_is_right_is_named():
    def k_turns_back(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        half = lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)  # noqa: E731
        return q * cos + half(q) * sin, k * cos - half(k) * sin

    found = identified(k_turns_back, "huggingface")
    assert found.right == ("q",) and {"k turns by minus the angle", "q is right"} <= {
        line.split(" (breaks")[0] for line in found.words()
    }


def test_a_repair_keeps_the_laws():
    found = identified(FAULTS["positions_from_one"].function, "plain")
    assert found.repair is not None and found.repair.words == "pass positions - 1"
    assert {"definition", "adjoint"} <= set(found.repair.laws)


# ------------------------------------------------------------------------------------------------- measurements


def test_slopes_and_rows_are_recovered_modulo_a_turn():
    frequency = inverse_frequencies(12).numpy()
    angles = (np.arange(37)[:, None] + 3) * 1.5 * frequency
    slope, intercept = slopes(np.angle(np.exp(1j * angles)))
    np.testing.assert_allclose(slope, 1.5 * frequency, atol=1e-12)
    far = np.array([509, 5001, 32_767])
    better = refined(slope, intercept, np.angle(np.exp(1j * (far[:, None] + 3) * 1.5 * frequency)), far)
    np.testing.assert_allclose(better, 1.5 * frequency, rtol=1e-9)
    table = np.cos(np.arange(-50, 50)[:, None] * frequency)
    assert rows(table[[53, 62]], table, -50, np.array([3, 12])).tolist() == [3, 12]
    assert rows(table[[53]] + 0.1, table, -50, np.array([3])) is None


def test_deviations_that_do_not_fit_a_call_explain_nothing(monkeypatch):
    """Their answer is no exception of a function, and no error of ours."""

    def unfit(*arguments):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(deviation, "planned", unfit)
    assert list(deviation.alternatives(None, None, 0, ())) == ["ValueError of the description"]
