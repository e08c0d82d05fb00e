"""The identification names scalings, mixed elements, earlier calls and faults in 16 bits."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance import Sizes, verify
from ropelab.conformance.declared import declare
from ropelab.conformance.faults import correct
from ropelab.conformance.identify.dependence import findings
from ropelab.conformance.identify.deviation import alternatives
from ropelab.conformance.identify.equivalence import equivalent
from ropelab.conformance.identify.questions import FORWARD, Question
from ropelab.conformance.identify.scalings import scalings
from ropelab.conformance.identify.vocabulary import in_reverse, rounding
from ropelab.conformance.surroundings import Surroundings
from ropelab.study.topics.conformance.mutations import REVERSED, SIGN, UPSIDE_DOWN, Injected
from tests.laws.test_identify import identified, one_thread  # noqa: F401

VARIANTS = {}


def variant(convention, says, **options):
    def keep(function):
        VARIANTS[function.__name__] = function, convention, says, options
        return function

    return keep


@variant("plain", r"has YaRN by 8, with a ramp from pair 2 to pair 6$")
def yarn(x, positions):
    """YaRN for a factor of 8 and a ramp from pair 2 to pair 6."""
    frequency, ramp = inverse_frequencies(x.shape[-1]), ((torch.arange(x.shape[-1] // 2) - 2) / 4.0).clamp(0, 1)
    return correct.turn_by(x, positions.double()[..., None] * frequency * (ramp / 8 + 1 - ramp))


@variant("module", r"has NTK-aware scaling by 8 \(the base 107672\)$")
class NTKAware(correct.Module):
    def __init__(self, head_dim, rotary_dim=None, base=10000.0):
        super().__init__(head_dim, rotary_dim, base * 8 ** (head_dim / (head_dim - 2)))


@variant("module", r"has Llama 3 scaling by 8, between 2048 and 8192 tokens per turn$")
class Llama3(correct.Module):
    def __init__(self, head_dim, rotary_dim=None, base=10000.0):
        super().__init__(head_dim, rotary_dim, base)
        blend = (8192 * self.inv_freq / (2 * math.pi) - 1) / 3
        self.inv_freq = self.inv_freq * (blend.clamp(0, 1) * (1 - 1 / 8) + 1 / 8)


@variant("module", r"has dynamic NTK scaling by 2 beyond 16 tokens$")
class DynamicNTK(correct.Module):
    def angles(self, seq_len, device):
        width = 2 * len(self.inv_freq)
        factor = max(1, 2 * seq_len / 16 - 1)
        frequency = inverse_frequencies(width, 10000.0 * factor ** (width / (width - 2)))
        return torch.arange(seq_len).double()[:, None] * frequency


@variant("huggingface", r"is computed from the heads of q with the same numbers")
def keys_from_queries(q, k, cos, sin, unsqueeze_dim=1):
    q, _ = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    return q, q.narrow(unsqueeze_dim, 0, k.shape[unsqueeze_dim]).clone()


@variant("huggingface", r"is stored in memory with the axes")
def view_in_place_of_transposition(q, k, cos, sin, unsqueeze_dim=1):
    q, k = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    return q.transpose(1, 2).reshape(q.shape), k.transpose(1, 2).reshape(k.shape)


@variant("huggingface", r"makes other sums: .* of q read k; .* of k read q", maths="wide")
def second_halves_exchanged(q, k, cos, sin, unsqueeze_dim=1):
    q, k = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    own, half, heads = q.clone(), q.shape[-1] // 2, k.shape[unsqueeze_dim]
    q.narrow(unsqueeze_dim, 0, heads)[..., half:] = k[..., half:]
    return q, torch.cat((k[..., :half], own.narrow(unsqueeze_dim, 0, heads)[..., half:]), dim=-1)


@variant("module", r"counts positions on from the tokens of earlier calls$")
class PositionsGoOn(correct.Module):
    seen = 0

    def forward(self, q, k):
        angles = (torch.arange(q.shape[1]).double() + self.seen)[:, None] * self.inv_freq
        self.seen += q.shape[1]
        return correct.turn_by(q, angles), correct.turn_by(k, angles)


@variant("module", r"turns by minus the angle in every second call$")
class SignAlternates(correct.Module):
    sign = 1

    def forward(self, q, k):
        angles = self.sign * self.angles(q.shape[1], q.device)
        self.sign = -self.sign
        return correct.turn_by(q, angles), correct.turn_by(k, angles)


@variant("plain", r"takes positions as integers of 8 bits$")
def positions_in_int8(x, positions):
    return correct.plain(x, positions.to(torch.int8).long())


@variant("plain", r"changes the row every 4 positions only in pairs \[2, 3\]$")
def rows_of_an_image_in_some_pairs(x, positions):
    rows = positions.double()[..., None].expand(*positions.shape, x.shape[-1] // 2).clone()
    rows[..., 2:4] = (rows[..., 2:4] / 4).floor()
    return correct.turn_by(x, rows * inverse_frequencies(x.shape[-1]))


@variant("flash_attn", r"takes offset 0 for all packed documents but the first$")
def offset_of_the_first_document_only(x, cos, sin, interleaved=False, inplace=False, *, seqlen_offsets=0, **packed):
    if packed.get("cu_seqlens") is not None and isinstance(seqlen_offsets, torch.Tensor):
        seqlen_offsets = torch.cat((seqlen_offsets[:1], torch.zeros_like(seqlen_offsets[1:])))
    return correct.flash_attn(x, cos, sin, interleaved, inplace, seqlen_offsets=seqlen_offsets, **packed)


@variant("huggingface", r"^each input turns by minus the angle$", dtype=torch.bfloat16)
def back_in_bfloat16(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k, cos, -sin, unsqueeze_dim)


@variant("module", r"has the base 500000$", dtype=torch.float16)
class BaseInFloat16(correct.Module):
    def __init__(self, head_dim, rotary_dim=None, base=10000.0):
        super().__init__(head_dim, rotary_dim, 500_000.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_named(name):
    function, convention, says, options = VARIANTS[name]
    found = identified(function, convention, **options)
    assert found.proven and len(found.deviations) == 1, found.words()
    assert re.search(says, str(found.deviations[0]))


def test_longrope_is_a_divisor_for_each_pair():
    frequency = inverse_frequencies(12).numpy()
    (found,) = scalings(frequency, frequency / [1, 1.05, 1.3, 2.5, 2.5, 7], 10000.0)
    assert found.parameters == {"scaling": "longrope", "factors": pytest.approx([1, 1.05, 1.3, 2.5, 2.5, 7])}
    np.testing.assert_allclose(found.apply(frequency), frequency / [1, 1.05, 1.3, 2.5, 2.5, 7])


def test_facts_about_a_function_that_is_not_linear_and_mixes():
    def normalised(q, k, cos, sin, unsqueeze_dim=1):
        return correct.huggingface(q * torch.rsqrt(q.pow(2).mean((1, 3), keepdim=True) + 1e-6), k, cos, sin)

    facts = identified(normalised, "huggingface", seconds=3.0).facts
    assert any(fact.startswith("q is not linear: twice the input") for fact in facts)
    assert any(fact.startswith("q mixes heads: head 0 changes heads 1, 2, 3") for fact in facts)
    assert not any(fact.startswith("k") for fact in facts)


def test_a_cut_out_input_that_changes_stays_cut_out():
    """A copy without gaps is no change of one sequence alone, for a function that reads gaps or not by the strides."""

    def by_strides(q, k, cos, sin, unsqueeze_dim=1):
        dense = q.stride(2) == q.shape[1] * q.shape[3]  # q is [B, H, S, D]
        return correct.huggingface(q if dense else 2 * q, k, cos, sin)

    subject = declare("huggingface").subject(by_strides, Surroundings())
    case = subject.draw(Sizes())
    q = torch.stack((case.inputs[0], case.inputs[0]), dim=2)[:, :, 0]
    question = Question("cut out", replace(case, inputs=(q, case.inputs[1])), FORWARD, lambda s, c: s(c))
    assert findings(subject, question) == []


def test_what_an_in_place_call_shows_is_said_of_it():
    def second_reads_the_rotated_first(x, cos, sin, interleaved=False, inplace=False, **options):
        y = correct.flash_attn(x, cos, sin, interleaved=interleaved, **options)
        return x.copy_(y.flip(2)) if inplace else y

    found = verify(second_reads_the_rotated_first, "flash_attn").identification
    assert found.words() and all("with inplace=True" in words for words in (*found.facts, *found.unexplained))


def test_heads_that_read_different_inputs_are_told_apart():
    def rope(q, k, cos, sin, unsqueeze_dim=1):
        heads = torch.cat(correct.huggingface(q, k, cos, sin), dim=1).roll(1, dims=1)
        return heads[:, : q.shape[1]], heads[:, q.shape[1] :]

    words = " ".join(identified(rope, "huggingface", maths="wide").words())
    assert "head 0 of q read k" in words and "heads 1, 2, 3 of q read other heads" in words, words
    assert "head 0 of k read q" in words and "head 1 of k read other heads" in words, words


def test_equivalence_is_proven_for_equal_matrices_only():
    declaration = declare("plain")
    subject, sizes = declaration.subject(correct.plain, Surroundings()), declaration.sizes
    sign, reverse, upside_down = (Injected(mutation).deviation() for mutation in (SIGN, REVERSED, UPSIDE_DOWN))

    def same(first, second) -> bool:
        return equivalent(subject, sizes, first, second, reach=32)

    assert same((in_reverse(),), (reverse,)) and same((sign, reverse), (in_reverse(), sign))
    assert not same((sign,), (reverse,)) and not same((upside_down,), ())
    for what in ("table", "output"):
        assert same((rounding(what, "bfloat16"), sign), (sign, rounding(what, "bfloat16")))
        assert not same((rounding(what, "bfloat16"),), (rounding(what, "float16"),))
        assert not same((rounding(what, "bfloat16"),), ())


def test_a_rounding_may_fall_on_either_side_of_a_boundary():
    """The angle 257 lies between two numbers of bfloat16; a function that computes 257 with an error takes either."""
    subject = declare("plain").subject(correct.plain, Surroundings())
    case = subject.draw(Sizes(1, 1, 1, 1, 4, 4), positions=torch.tensor([25_700]))  # times 0.01, in the second pair
    told = list(alternatives(subject, Question("", case, FORWARD, None), 0, (rounding("angle", "bfloat16"),)))
    _, x0, _, x1 = case.inputs[0].double().numpy().ravel()
    for angle, reached in ((256, True), (257, False), (258, True)):
        y = np.array([x0 * np.cos(angle) - x1 * np.sin(angle), x1 * np.cos(angle) + x0 * np.sin(angle)])
        near = [(abs(values.ravel()[1::2] - y) <= bound.ravel()[1::2]).all() for values, bound in told]
        assert any(near) == reached, angle


def test_a_function_that_fails_for_many_tokens_says_for_how_many():
    def short(x, positions):
        if x.shape[1] > 40_000:
            raise MemoryError
        return correct.plain(x, positions)

    found = identified(short, "plain", seconds=30.0)
    assert found.proven, found
    assert list(map(str, found.deviations)) == ["each input raises MemoryError in sequences of more than 40000 tokens"]


def test_an_unexplained_rest_is_confined_to_calls():
    def strided_gradients_lost(x, positions):
        def back(grad):
            y = torch.zeros_like(x).requires_grad_()
            with torch.enable_grad():
                (right,) = torch.autograd.grad(correct.plain(y, positions), y, grad)
            return right if grad.is_contiguous() else right + right**3

        return correct.with_backward(x, lambda x: correct.plain(x, positions), back)

    found = identified(strided_gradients_lost, "plain", seconds=4.0)
    said = "all that is unexplained: the gradient of each input for cotangents that are expanded or strided"
    assert not found.proven and said in found.unexplained


def test_a_report_of_verify_measures_a_wrong_function_when_asked():
    report = verify(correct.plain, "plain", laws=["definition"])
    assert report.passed and report.identification is None
    report = verify(lambda x, positions: correct.plain(x, positions + 1), "plain", laws=["definition"], shrink=False)
    assert "identification" not in vars(report)
    assert report.identification is not None and report.identification.deviations[0].parameters == {"offset": 1.0}
    repair = report.identification.repair
    assert repair is not None and repair.words == "pass positions - 1"
