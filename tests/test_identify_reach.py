"""The identification names documents, shards, axes, dtypes, thresholds and later calls, and operators with a cache."""

import pytest
import torch

from ropelab.conformance import verify
from ropelab.conformance.cache.correct import FORMS, Operator
from ropelab.conformance.cache.faults import CACHE_FAULTS
from ropelab.conformance.faults import correct
from tests.test_identify import identified, one_thread  # noqa: F401

REACHED = {}


def reached(convention, says, **options):
    def keep(function):
        REACHED[function.__name__] = function, convention, says, options
        return function

    return keep


@reached("flash_attn", "begins every document but the first one token late")
def late_documents(x, cos, sin, interleaved=False, inplace=False, cu_seqlens=None, **where):
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.clone()
        cu_seqlens[1:-1] = torch.minimum(cu_seqlens[1:-1] + 1, cu_seqlens[-1])
    return correct.flash_attn(x, cos, sin, interleaved, cu_seqlens=cu_seqlens, **where)


@reached("huggingface", "is not rotated in the last token where the call has several tokens")
def last_token_left(q, k, cos, sin, unsqueeze_dim=1):
    turned = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    for x, y in zip((q, k), turned, strict=True):
        if x.shape[3 - unsqueeze_dim] > 1:
            y.select(3 - unsqueeze_dim, -1).copy_(x.select(3 - unsqueeze_dim, -1))
    return turned


@reached("huggingface", "takes the positions of the sequences in reverse order")
def tables_of_other_sequences(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k, cos.flip(0), sin.flip(0), unsqueeze_dim)


@reached("plain", "has dynamic NTK scaling by 1 beyond 32 positions")
def dynamic_ntk(x, positions):
    width, count = x.shape[-1], int(positions.max()) + 1 if positions.numel() else 1
    base = 10000.0 * max(1.0, count / 32) ** (width / (width - 2))
    return correct.plain(x, positions, base)


@reached("vllm", "is not rotated where inputs are cut out of a larger tensor")
def k_not_written_back(positions, query, key, head_size, cos_sin_cache, is_neox):
    correct.vllm(positions, query, key if key.is_contiguous() else key.clone(), head_size, cos_sin_cache, is_neox)


@reached("deepspeed", "rounds the features that do not rotate to float16", rotary_dim=8)
def tail_in_float16(t, freqs_cos, freqs_sin):
    turned = correct.deepspeed(t, freqs_cos, freqs_sin)
    tail = turned[..., freqs_cos.shape[-1] :]
    return torch.cat((turned[..., : freqs_cos.shape[-1]], tail.half().to(t.dtype)), dim=-1)


@reached("plain", "rounds positions to the dtype of the input")
def positions_in_the_dtype_of_x(x, positions):
    return correct.plain(x, positions.to(x.dtype))


@reached("mrope", "reads the second axis of the positions for the pairs of the third")
def width_reads_height(q, k, cos, sin, positions, mrope_section, mrope_interleaved):
    positions = torch.stack((positions[0], positions[1], positions[1]))
    return correct.mrope(q, k, cos, sin, positions, mrope_section, mrope_interleaved)


@reached("flashinfer", "multiplies positions by the scale that should divide them")
def scale_multiplies(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    return correct.flashinfer(q, k, pos_ids, rotary_dim, interleave, 1 / rope_scale, rope_theta)


HALF_A_HEAD = "pairs feature i with the feature half a head further, and not half of the features that rotate"


@reached("vllm", f"{HALF_A_HEAD} in sequences of more than 10239 tokens", rotary_dim=8)
def many_tokens_pair_the_whole_head(positions, query, key, head_size, cos_sin_cache, is_neox):
    if len(positions) < 10_240:
        return correct.vllm(positions, query, key, head_size, cos_sin_cache, is_neox)
    cos, sin = (table[positions][:, None] for table in cos_sin_cache.chunk(2, dim=-1))
    for x in (query, key):
        heads, count = x.unflatten(-1, (-1, head_size)), cos.shape[-1]
        near, far = heads[..., :count], heads[..., head_size // 2 : head_size // 2 + count]
        turned = near * cos - far * sin, far * cos + near * sin
        near.copy_(turned[0])
        far.copy_(turned[1])


def adjacent(q, k, cos, sin, unsqueeze_dim):
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s for x in (q, k))


@reached("huggingface", "pairs adjacent features, and reads tables whose columns are for halves")
def crossed(q, k, cos, sin, unsqueeze_dim=1):
    return adjacent(q, k, cos, sin, unsqueeze_dim)


@reached("huggingface", "pairs adjacent features, and reads tables whose columns are for halves in 16 bits")
def crossed_in_16_bits(q, k, cos, sin, unsqueeze_dim=1):
    turn = adjacent if q.dtype.itemsize == 2 else correct.huggingface
    return turn(q, k, cos, sin, unsqueeze_dim)


@reached("plain", "is not rotated in sequences of more than 300 tokens")
def beyond_300(x, positions):
    return x.clone() if x.shape[1] > 300 else correct.plain(x, positions)


BUFFERS = {}


@reached("plain", "is in memory that the next call overwrites")
def one_buffer(x, positions):
    y = correct.plain(x, positions)
    if y.requires_grad:
        return y
    return BUFFERS.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


@reached("mrope", "exchanges the second and the third axis of the positions")
def height_for_width(q, k, cos, sin, positions, mrope_section, mrope_interleaved=False):
    return correct.mrope(q, k, cos, sin, positions[[0, 2, 1]], mrope_section, mrope_interleaved)


@pytest.mark.parametrize("name", REACHED)
def test_it_is_described(name):
    function, convention, says, options = REACHED[name]
    found = identified(function, convention, **options)
    assert found.proven, found
    assert says in [f"{deviation.words} {deviation.scope.words}".strip() for deviation in found.deviations], found


def test_what_earlier_calls_leave_is_said():
    longest = [0]

    def grows(x, positions):
        longest[0] = max(longest[0], int(positions.abs().max()))
        return correct.plain(x, positions * (2 if longest[0] > 1000 else 1))

    (fact,) = verify(grows, "plain", laws=["definition", "extents"]).identification.facts[:1]
    assert "a call at larger positions changes the results of every later call" in fact


def test_a_right_function_recalls_nothing():
    assert verify(correct.plain, "plain", laws=["definition"]).history == ()


class Unweighted(Operator):
    def weights(self, q, k):
        return q, torch.ones_like(k)


class LastValueLost(Operator):
    def write(self, cache, slots, rows, scale, other):
        if cache.data_ptr() > other.data_ptr():
            slots, rows = slots[:-1], rows[:-1]
        super().write(cache, slots, rows, scale, other)


class KeysBefore(Operator):
    def stored(self, turned, k):
        return k


@pytest.mark.parametrize(
    "operator, part, says",
    [
        (Unweighted, "the stored k", "is normalized with weights of one"),
        (LastValueLost, "the stored v", "is not written: the slots keep their contents"),
        (KeysBefore, "the stored k", "is not normalized, and is not rotated"),
    ],
)
def test_an_operator_with_a_cache_is_described(operator, part, says):
    report = verify(FORMS["rope_and_cache"](operator()), "rope_and_cache", laws=["definition"], shrink=False)
    (deviation,) = report.identification.deviations
    assert (deviation.scope.name, deviation.words) == (part, says)
    assert report.identification.proven


BLOCKS = {
    "rotation_not_inverted": "turns by minus the angle",
    "scale_rounded_down": "has scales half as large as the numbers need, and clips",
    "scale_of_the_neighbouring_group": "has the scales of the other half of the heads",
    "first_exponent_in_the_highest_byte": "has the scales of its blocks in reverse order",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_an_operator_with_block_scales_is_described(name):
    fault = CACHE_FAULTS[name]
    found = verify(fault.function, fault.convention, laws=["definition"], shrink=False).identification
    assert found.proven and [(d.scope.name, d.words) for d in found.deviations] == [("the stored k", BLOCKS[name])]


def test_eight_bit_floats_with_a_given_scale_are_described():
    convention = "rope_quantize_fp8_append_paged_kv_cache"
    found = verify(FORMS[convention](KeysBefore()), convention, laws=["definition"], shrink=False).identification
    assert [(d.scope.name, d.words) for d in found.deviations] == [("the stored k", "is not rotated")]


def test_the_norm_of_a_packed_qkv():
    report = verify(FORMS["fused_qk_norm_rope"](Unweighted()), "fused_qk_norm_rope", laws=["definition"])
    assert "the stored k is normalized with weights of one" in map(str, report.identification.deviations)
