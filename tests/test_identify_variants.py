"""The identification names scalings, mixed elements, earlier calls and faults in 16 bits."""

import math
import re

import numpy as np
import pytest
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance import verify
from ropelab.conformance.declared import declare
from ropelab.conformance.faults import correct
from ropelab.conformance.identify.equivalence import equivalent
from ropelab.conformance.identify.scalings import scalings
from ropelab.conformance.identify.vocabulary import in_reverse, rounding
from ropelab.conformance.surroundings import Surroundings
from ropelab.study.topics.conformance.mutations import REVERSED, SIGN
from tests.test_identify import identified, one_thread  # noqa: F401

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


def test_equivalence_is_proven_for_equal_matrices_only():
    declaration = declare("plain")
    subject, sizes = declaration.subject(correct.plain, Surroundings()), declaration.sizes
    assert equivalent(subject, sizes, (in_reverse(),), (REVERSED.deviation(),), reach=32)
    assert equivalent(subject, sizes, (SIGN.deviation(), REVERSED.deviation()), (in_reverse(), SIGN.deviation()), 32)
    assert not equivalent(subject, sizes, (SIGN.deviation(),), (REVERSED.deviation(),), reach=32)
    assert not equivalent(subject, sizes, (rounding("table", "bfloat16"),), (rounding("table", "bfloat16"),), 32)


def test_a_report_of_verify_measures_a_wrong_function_when_asked():
    report = verify(correct.plain, "plain", laws=["definition"])
    assert report.passed and report.identification is None
    report = verify(lambda x, positions: correct.plain(x, positions + 1), "plain", laws=["definition"], shrink=False)
    assert "identification" not in vars(report)
    assert report.identification is not None and report.identification.deviations[0].parameters == {"offset": 1.0}
    repair = report.identification.repair
    assert repair is not None and repair.words == "pass positions - 1"
