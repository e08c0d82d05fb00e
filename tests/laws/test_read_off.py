"""Facts that are read off wrong answers: random faults are named with their numbers, right functions have no facts."""

import re

import numpy as np
import pytest
import torch

from ropelab.conformance import verify
from ropelab.conformance.cache.correct import CORRECT
from ropelab.conformance.cache.identify import identify_cache
from ropelab.conformance.case import Sizes
from ropelab.conformance.declared import declare
from ropelab.conformance.faults import correct
from ropelab.conformance.identify import identify
from ropelab.conformance.identify.evidence import Answer
from ropelab.conformance.identify.plain import listed, plain
from ropelab.conformance.identify.questions import questions
from ropelab.conformance.identify.read_off import read
from ropelab.conformance.surroundings import Surroundings

SEEDS = range(4)
APART, FROM_7 = "positions for each sequence", "tokens from position 7 on"


def turned(x, rows, order=None, factors=(1, 1, 1, 1)):
    """Return x [B, S, H, D] rotated by rows [B, S] or [B, S, H], with pairs of halves."""
    count = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    frequency = frequency if order is None else frequency[list(order)]
    rows = rows if rows.ndim == 3 else rows[..., None]
    angle = rows[..., None].double() * frequency
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    c0, s0, c1, s1 = factors
    return torch.cat((c0 * a * c - s0 * b * s, c1 * b * c + s1 * a * s), -1)


def broadcast(x, positions):
    return positions.expand(x.shape[:2]) if positions.ndim == 2 else positions[None].expand(x.shape[:2])


def facts(function, name=APART):
    """Return what the answer to a question shows."""
    subject = declare("plain").subject(function, Surroundings())
    question = next(q for q in questions(subject, Sizes(rotary_dim=16)) if q.name == name)
    return list(read(subject, Answer(question, 0, question.answer(subject)[0])))


def positions_of(name):
    subject = declare("plain").subject(lambda x, positions: x, Surroundings())
    question = next(q for q in questions(subject, Sizes(rotary_dim=16)) if q.name == name)
    return question.case.token_positions()


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("seed", SEEDS)
def test_permuted_positions_are_named_for_the_tokens_that_have_them(seed):
    random = np.random.default_rng(seed)
    sequence, order = int(random.integers(3)), random.permutation(5)

    def function(x, positions):
        rows = broadcast(x, positions).clone()
        if rows.shape == (3, 5):
            rows[sequence] = rows[sequence, order]
        return turned(x, rows)

    (fact,) = facts(function)
    right = positions_of(APART)[sequence].numpy()
    hit = np.flatnonzero(right[order] != right)
    turned_by, meant = re.fullmatch(r".*by positions (.*) in place of (.*)", fact).groups()
    assert f"sequence {sequence}" in fact
    assert numbers(turned_by) == right[order][hit].tolist()
    assert numbers(meant) == right[hit].tolist()
    if len(hit) < 5:
        assert all(str(token) in fact.split(" of ")[0] for token in hit)


def test_the_sequence_whose_positions_another_takes_is_named():
    def function(x, positions):
        rows = broadcast(x, positions).clone()
        rows[-1] = rows[0]
        return turned(x, rows)

    (fact,) = facts(function)
    assert fact.startswith("sequence 2 turns by positions") and fact.endswith("which are those of sequence 0")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_head_with_other_positions_is_named(seed):
    random = np.random.default_rng(seed)
    head, step = int(random.integers(4)), int(random.integers(1, 40))

    def function(x, positions):
        rows = broadcast(x, positions)[..., None].expand(x.shape[:3]).clone()
        if x.shape[2] == 4:
            rows[..., head] += step
        return turned(x, rows)

    (fact,) = facts(function, FROM_7)
    assert f"head {head}" in fact and f"by positions {7 + step} to {11 + step} in place of 7 to 11" in fact


@pytest.mark.parametrize("seed", SEEDS)
def test_exchanged_frequencies_are_listed(seed):
    order = np.random.default_rng(seed).permutation(8).tolist()
    (found,) = facts(lambda x, positions: turned(x, broadcast(x, positions), order[: x.shape[-1] // 2]))
    moved = [pair for pair in range(8) if order[pair] != pair]
    at = "all pairs" if len(moved) == 8 else f"pairs {listed(np.array(moved))}"
    assert found == f"turns {at} by the angles of pairs {listed(np.array(order)[moved])}"


@pytest.mark.parametrize("seed", SEEDS)
def test_another_base_is_read_to_three_digits(seed):
    base = float(np.exp(np.random.default_rng(seed).uniform(np.log(1e3), np.log(1e6))))

    def function(x, positions):
        count = x.shape[-1] // 2
        angle = broadcast(x, positions)[..., None, None] * base ** (-torch.arange(count, dtype=torch.float64) / count)
        c, s = angle.cos().float(), angle.sin().float()
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    (fact,) = facts(function, "a longer sequence")
    read_base = float(re.fullmatch(r"has about the base (\S+) in place of 10000", fact).group(1))
    assert abs(read_base / base - 1) < 6e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_permuted_features_are_listed(seed):
    order = np.random.default_rng(seed).permutation(16)
    (fact,) = facts(lambda x, positions: turned(x, broadcast(x, positions))[..., torch.from_numpy(order)])
    assert fact.startswith("has the right numbers in other features: feature ")
    for feature, source in re.findall(r"(\d+) is (\d+)", fact):
        assert order[int(feature)] == int(source)


@pytest.mark.parametrize("shift", (3, 8, 15))
def test_a_shift_of_features_has_a_rule(shift):
    (fact, *_) = facts(lambda x, positions: turned(x, broadcast(x, positions)).roll(-shift, -1))
    assert fact == f"has the right numbers in other features: feature i is feature (i + {shift}) mod 16"


@pytest.mark.parametrize("factor", (0.75, -1.0, 2.0, 1.0625))
def test_a_factor_is_a_number(factor):
    assert f"is {factor:g} times the right result" in facts(
        lambda x, positions: factor * turned(x, broadcast(x, positions))
    )


def test_a_copied_head_is_named_with_its_source():
    def function(x, positions):
        y = turned(x, broadcast(x, positions)).clone()
        y[:, :, 2] = y[:, :, 1]
        return y

    assert facts(function) == ["has the result of head 1 in head 2"]


@pytest.mark.parametrize(
    ("value", "words"),
    ((0.0, "is zero in head 1 of sequence 2"), (float("nan"), "is NaN, or was not written, in head 1 of sequence 2")),
)
def test_numbers_that_are_no_result_are_named_with_their_place(value, words):
    def function(x, positions):
        y = turned(x, broadcast(x, positions)).clone()
        y[2:, :, 1:2] = value
        return y

    assert facts(function)[0] == words


def test_an_input_that_comes_back_is_named():
    found = facts(lambda x, positions: torch.cat((turned(x[:2], broadcast(x, positions)[:2]), x[2:])))
    assert found[0] == "is the input, unchanged, in sequence 2"


@pytest.mark.parametrize(
    ("factors", "words"),
    (
        ((1, 0, 1, 0), "has 0 in place of the sines of all pairs"),
        ((1, -1, 1, 1), "has minus sines in place of the sines of all pairs for first members"),
        ((2, 1, 1, 1), "has 2 times the cosines in place of the cosines of all pairs for first members"),
    ),
)
def test_terms_of_a_pair_are_named(factors, words):
    assert words in facts(lambda x, positions: turned(x, broadcast(x, positions), factors=factors))


@pytest.mark.parametrize("name", (APART, FROM_7, "large positions", "a single token"))
def test_a_right_answer_shows_nothing(name):
    assert facts(lambda x, positions: turned(x, broadcast(x, positions)), name) == []


def test_an_unexplained_report_begins_with_what_the_answers_show():
    """Calls with a position for each sequence permute the tokens by a rule that no vocabulary has."""

    def function(x, positions):
        rows = broadcast(x, positions).clone()
        if (rows != rows[:1]).any() and rows.shape[1] > 3:
            rows[:, 1:4] = rows[:, [3, 1, 2]]
        return turned(x, rows)

    found = identify(declare("plain").subject(function, Surroundings()), Sizes(rotary_dim=16), seconds=4)
    assert not found.proven
    assert "by positions" in found.facts[0] and "tokens 1, 2, 3" in found.facts[0]


def test_features_behind_those_that_pass_are_proven():
    def function(q, k, cos, sin, unsqueeze_dim=1):
        def turn(x, cos, sin):
            width = cos.shape[-1]
            a, b = x[..., :width].chunk(2, -1)
            y = x[..., :width] * cos + torch.cat((-b, a), -1) * sin
            return torch.cat((x[..., width:], y), -1)

        cos, sin = cos.unsqueeze(unsqueeze_dim).to(q.dtype), sin.unsqueeze(unsqueeze_dim).to(q.dtype)
        return turn(q, cos, sin), turn(k, cos, sin)

    declaration = declare("huggingface", rotary_dim=6)
    found = identify(declaration.subject(function, Surroundings()), declaration.sizes)
    expected = "has the right numbers in other features: the 6 features that rotate come behind the 10 that pass"
    assert found.proven and [str(d) for d in found.deviations] == [f"each input {expected}"]


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (lambda v, turn: turn(v), "v is rotated by the positions of its tokens"),
        (lambda v, turn: 0 * v, "v is zero"),
        (lambda v, turn: 2 * v, "v is 2 times the right result"),
        (lambda v, turn: v.flip(-1), "v has the right numbers in other features"),
    ),
)
def test_values_beside_right_queries_and_keys(change, words):
    right = correct.qkv_rope

    def function(x, weight, *, q_heads, k_heads, **options):
        def turn(v):
            columns = v.flatten(-2)
            eye = torch.eye(columns.shape[-1], dtype=x.dtype)
            hidden = torch.cat((columns, columns, columns), -1)
            pieces = torch.block_diag(eye, eye, eye)
            return right(hidden, pieces, q_heads=k_heads, k_heads=k_heads, **options)[0]

        q, k, v = right(x, weight, q_heads=q_heads, k_heads=k_heads, **options)
        return q, k, change(v, turn)

    declaration = declare("qkv_rope")
    found = identify(declaration.subject(function, Surroundings()), declaration.sizes)
    assert found.proven and found.right == ("q", "k")
    assert [str(d) for d in found.deviations][0].startswith(words) and found.example.startswith("v [")


# ---------------------------------------------------------------------------------------------------------- backward


class OverwritesItsCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions):
        ctx.save_for_backward(positions)
        return turned(x, positions)

    @staticmethod
    def backward(ctx, grad):
        return grad.copy_(turned(grad, -ctx.saved_tensors[0])), None


def test_a_backward_that_overwrites_its_cotangent_is_named_without_our_frames():
    def function(x, positions):
        return OverwritesItsCotangent.apply(x, broadcast(x, positions))

    report = verify(function, "plain", laws=["adjoint_expanded", "inputs_unchanged"], shrink=False)
    words = [str(deviation) for deviation in report.identification.deviations]
    assert "each input has a backward that overwrites the cotangent that it gets" in words
    traceback = report["adjoint_expanded"].traceback
    assert "ropelab/conformance" not in traceback and "torch/autograd" not in traceback.splitlines()[0]
    assert "in backward" in traceback


# --------------------------------------------------------------------------------------------------------- operators


def operator(change, convention="fused_qk_norm_rope", **declared):
    declaration = declare(convention, **declared)
    found = identify_cache(declaration.subject(change, Surroundings()), declaration.sizes)
    return [str(deviation) for deviation in found.deviations], found


def norm_rope(heads_of=None, divisor=None, layer=False):
    """Return vLLM's operator whose heads are normalized by other heads, or turn by other exponents."""

    def function(qkv, hq, hk, hv, width, eps, q_weight, k_weight, cos_sin_cache, is_neox, position_ids):
        heads = qkv.view(len(qkv), hq + hk + hv, width)
        turning = cos_sin_cache.shape[-1]
        cos, sin = cos_sin_cache[position_ids].float()[:, None].chunk(2, -1)
        for first, count, weight in ((0, hq, q_weight), (hq, hk, k_weight)):
            x = heads[:, first : first + count].float()
            x = x - x.mean(-1, keepdim=True) if layer else x
            mean = x.square().mean(-1, keepdim=True)
            if heads_of is not None and count == len(heads_of):
                mean = mean[:, list(heads_of)]
            x = x * torch.rsqrt(mean + eps) * weight.float()
            a, b = x[..., :turning].chunk(2, -1) if is_neox else (x[..., :turning:2], x[..., 1:turning:2])
            pair = a * cos - b * sin, b * cos + a * sin
            y = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
            heads[:, first : first + count] = torch.cat((y, x[..., turning:]), -1).to(qkv.dtype)

    return function


@pytest.mark.parametrize("seed", SEEDS)
def test_the_heads_that_normalize_are_named(seed):
    order = np.random.default_rng(seed).integers(0, 4, 4).tolist()
    words, found = operator(norm_rope(order))
    moved = [f"head {head} by that of head {of}" for head, of in enumerate(order) if head != of]
    expected = "the first head" if set(order) == {0} else f"other heads: {', '.join(moved)}"
    assert f"q is normalized by the mean square of {expected}" in words


def test_a_layer_norm_is_named():
    words, _ = operator(norm_rope(layer=True))
    assert "q is normalized with its mean subtracted, as by a layer norm" in words


def test_a_place_is_no_hull():
    """A statement about places holds for every number there: of head 1, features 2 and 3 only."""
    right, wrong = np.ones((1, 3, 4)), np.zeros((1, 3, 4), bool)
    wrong[0, 1, 2:] = wrong[0, 2] = True
    y, nouns = np.where(wrong, 0.0, right), ("token", "head", "feature")
    told = next(plain(y, wrong, [("x", right, 0 * right)], {}, nouns, 4))
    assert told == "is zero in features 2, 3 of head 1 and in head 2"
    scattered = np.indices(right.shape).sum(0) % 2 == 0
    told = next(plain(np.where(scattered, 0.0, right), scattered, [("x", right, 0 * right)], {}, nouns, 4))
    assert "features 0, 2 of heads 0, 2" in told and "features 1, 3 of head 1" in told


def test_a_right_operator_shows_nothing():
    words, found = operator(norm_rope())
    assert not words and found.silent


def test_rows_in_other_slots_are_named_with_both_slots():
    """Tokens 2 and 3 with a slot exchange their slots in calls of more than ten tokens."""
    right, moved = CORRECT["rope_and_cache"], []

    def function(q, k, v, key_cache, value_cache, slot_mapping, **options):
        slots = slot_mapping.clone()
        live = torch.nonzero(slots >= 0).flatten()
        if len(live) > 3:
            moved.append((live[2].item(), slots[live[3]].item(), slots[live[2]].item()))
            slots[live[[2, 3]]] = slots[live[[3, 2]]]
        return right(q, k, v, key_cache, value_cache, slots, **options)

    declaration = declare("rope_and_cache")
    subject = declaration.subject(function, Surroundings())
    said = " ".join(identify_cache(subject, declaration.sizes).words())
    assert any(
        f"the stored k is in other slots: token {token} in slot {slot} (block" in said
        and f"in place of slot {meant} (block" in said
        for token, slot, meant in moved
    )
