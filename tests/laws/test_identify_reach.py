"""The identification names documents, shards, axes, dtypes, thresholds and later calls, and operators with a cache."""

import math
from functools import partial

import pytest
import torch

from ropelab import mrope_axes
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance import verify
from ropelab.conformance.cache.correct import FORMS, Operator
from ropelab.conformance.cache.faults import CACHE_FAULTS
from ropelab.conformance.declared import declare
from ropelab.conformance.diagnose import _suspect
from ropelab.conformance.faults import FAULTS, correct
from ropelab.conformance.identify.identification import _needed
from ropelab.conformance.surroundings import Surroundings
from tests.laws.test_identify import identified, one_thread  # noqa: F401

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


def sections(interleaved, axes):
    """vLLM's function with other axes of the pairs than those of mrope_section."""

    def triton_mrope(q, k, cos, sin, mrope_section, head_size, rotary_dim, mrope_interleaved):
        pair = torch.arange(rotary_dim // 2)
        chosen = axes(pair, mrope_section)
        if mrope_interleaved != interleaved:
            section = [*torch.tensor(mrope_axes(mrope_section, mrope_interleaved=mrope_interleaved))]
            chosen = torch.stack(section)
        cos, sin = (table[chosen, :, pair].T[:, None] for table in (cos, sin))
        return tuple(correct.turn(x.unflatten(-1, (-1, head_size)), cos, sin).flatten(1) for x in (q, k))

    return triton_mrope


def in_bands(pair, *ends):
    return torch.bucketize(pair, torch.tensor(ends), right=True)


SECTIONS = {
    "takes the numbers of mrope_section twice as large where axes have adjacent pairs": sections(
        False, lambda pair, n: in_bands(pair, 2 * n[0], 2 * n[0] + 2 * n[1])),
    "takes the third number of mrope_section for the second where axes take turns": sections(
        True, lambda pair, n: (pair % 3) * (pair < 3 * n[2])),
    "takes half the numbers of mrope_section where axes have adjacent pairs": sections(
        False, lambda pair, n: in_bands(pair, n[0] // 2, n[0] // 2 + n[1] // 2)),
    "exchanges the first and the second number of mrope_section where axes have adjacent pairs": sections(
        False, lambda pair, n: in_bands(pair, n[1], n[0] + n[1])),
    "begins the third section one pair late where axes have adjacent pairs": sections(
        False, lambda pair, n: in_bands(pair, n[0], n[0] + n[1] + 1)),
    "takes half the numbers of mrope_section where axes take turns": sections(
        True, lambda pair, n: (pair % 3) * (pair < 3 * torch.tensor(n)[pair % 3].div(2, rounding_mode="floor"))),
}  # fmt: skip


@pytest.mark.parametrize("words", SECTIONS)
def test_sections_of_axes(words):
    found = identified(SECTIONS[words], "triton_mrope")
    assert found.proven, found.words()
    assert [d.words for d in found.deviations] == [words.partition(" where ")[0]]


@pytest.mark.parametrize("convention", ["triton_mrope", "vllm", "mrope", "flashinfer"])
def test_a_description_is_about_what_a_function_sees(convention):
    from ropelab.conformance.conventions import CONVENTIONS
    from ropelab.conformance.identify.scopes import CIRCUMSTANCES
    from ropelab.conformance.identify.vocabulary import ROWS, expressible

    said = [words for words in (*ROWS, *CIRCUMSTANCES) if expressible(CONVENTIONS[convention], words)]
    assert not [words for words in said if "document" in words]
    restarts = "counts positions on from the first token and from every decrease"
    assert (restarts in said) == (convention != "triton_mrope")


@pytest.mark.parametrize("adjacent", ["q", "k"])
def test_q_and_k_that_pair_features_differently(adjacent):
    def rope(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = (table[..., : table.shape[-1] // 2].unsqueeze(unsqueeze_dim) for table in (cos, sin))
        layouts = {"q": "split_half", "k": "split_half", adjacent: "interleaved"}
        return correct.turn(q, cos, sin, layouts["q"]), correct.turn(k, cos, sin, layouts["k"])

    found = identified(rope, "huggingface")
    other = {"q": "k", "k": "q"}[adjacent]
    assert found.proven and found.repair is None and found.right == (other,)
    assert f"{adjacent} pairs features as interleaved, and {other} as split_half" in found.words()[0]


@reached("rope_posfreq_epi", "counts positions on from the first of each 8 tokens")
def one_position_for_eight_tokens(x, weight, pos, freq):
    token = torch.arange(len(x))
    return correct.rope_posfreq_epi(x, weight, pos[:, token // 8 * 8] + token % 8, freq)


@reached("fused_apply_mla_rope_for_q", "does not divide cu_seqlens by cp_size in packed documents")
def ends_of_all_ranks(t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q=None, cp_rank=0, cp_size=1):
    if cu_seqlens_q is None or cp_size == 1:
        return correct.fused_apply_mla_rope_for_q(t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q)
    found = []
    for half in (cu_seqlens_q.diff() // 2).tolist():
        i = torch.arange(2 * half)
        found.append(i + half * torch.where(i < half, cp_rank, 2 * cp_size - 2 - cp_rank))
    rows = torch.cat(found)[: len(t)]
    tokens = t[:, None, None], cos[rows], sin[rows]
    return torch.stack([
        correct.fused_apply_mla_rope_for_q(x, c[None], s[None], qk_head_dim, emb_dim)[0, 0]
        for x, c, s in zip(*tokens, strict=True)
    ])  # fmt: skip


@reached("flash_attn", "adds to its position the number of tokens before the first token of its sequence")
def rows_go_on_over_the_batch(x, cos, sin, seqlen_offsets=0):
    rows = torch.arange(x.shape[0] * x.shape[1]).unflatten(0, x.shape[:2])
    rows = (rows + torch.as_tensor(seqlen_offsets).reshape(-1, 1)).clamp(max=len(cos) - 1)
    return correct.turn(x, cos[rows][:, :, None], sin[rows][:, :, None])


@reached("flash_attn", "takes the position of the first of each 4 tokens")
def one_row_for_four_tokens(x, cos, sin, seqlen_offsets=0):
    token = torch.arange(x.shape[1])[None]
    rows = torch.as_tensor(seqlen_offsets).reshape(-1, 1) + token // 4 * 4
    return correct.turn(x, cos[rows][:, :, None], sin[rows][:, :, None])


@reached("huggingface", "is read from memory as if sequences were 1 head apart where the call has a single token")
def decoding_with_the_stride_of_a_head(q, k, cos, sin, unsqueeze_dim=1):
    def moved(x):
        heads = torch.arange(x.shape[0])[:, None] + torch.arange(x.shape[1])
        return x.flatten(0, 2)[heads][:, :, None] if x.shape[2] == 1 else x

    return correct.huggingface(moved(q), moved(k), cos, sin, unsqueeze_dim)


@reached("flash_attn", "computes second members of pairs from first members that are already rotated, and has the")
def stored_before_read(x, cos, sin, seqlen_offsets=0):
    rows = torch.arange(x.shape[1]) + torch.as_tensor(seqlen_offsets).reshape(-1, 1)
    (c, s), half = (table[rows][:, :, None] for table in (cos, sin)), cos.shape[-1]
    x0, x1, tail = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
    y0 = x0 * c - x1 * s
    return torch.cat((y0, x1 * c + y0 * s, tail), -1).to(x.dtype)


@reached("complex", "takes the number of the head for the position where the call has as many tokens as heads")
def broadcast_over_heads(xq, xk, freqs_cis):
    def one(x):
        rows = freqs_cis[None, None] if x.shape[1] == x.shape[2] else freqs_cis[None, :, None]
        return (
            torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rows).flatten(-2).to(x.dtype)
        )

    return one(xq), one(xk)


@reached("vllm", "rotates the last features of a head, and passes the first")
def the_last_features(positions, query, key, head_size, cos_sin_cache, is_neox):
    cos, sin = cos_sin_cache[positions.long()][:, None].chunk(2, -1)
    for x in (y.unflatten(-1, (-1, head_size))[..., -cos_sin_cache.shape[-1] :] for y in (query, key)):
        x.copy_(correct.turn(x.clone(), cos, sin, correct.interleaved_name(not is_neox)))


@reached("deepspeed", "reads strided cotangents as if their memory were contiguous for strided cotangents")
def cotangents_taken_for_contiguous(t, freqs_cos, freqs_sin):
    def back(g):
        if g.is_contiguous() or 0 in g.stride():
            return correct.deepspeed(g, freqs_cos, -freqs_sin)
        return correct.deepspeed(g.as_strided(g.shape, torch.empty(g.shape).stride()), freqs_cos, -freqs_sin)

    return correct.with_backward(t, lambda t: correct.deepspeed(t, freqs_cos, freqs_sin), back)


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


@reached("vllm", f"{HALF_A_HEAD} in calls of more than 10239 tokens of all sequences", rotary_dim=8)
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


@reached("flash_attn", "takes offset 0 for all packed documents")
def offsets_lost_in_packed_calls(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None,
                                 max_seqlen=None):  # fmt: skip
    if cu_seqlens is not None:
        return correct.flash_attn(x, cos, sin, interleaved, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    return correct.flash_attn(x, cos, sin, interleaved, seqlen_offsets=seqlen_offsets)


@reached("flash_attn", "stays as it was, and the result is in other memory", inplace=True)
def result_beside_the_input(x, *tables, inplace=False, **where):
    return correct.flash_attn(x.clone(), *tables, inplace=inplace, **where)


@reached("mrope", "lets the axes take turns up to the last pair")
def turns_to_the_end(q, k, cos, sin, positions, mrope_section, mrope_interleaved=False):
    if not mrope_interleaved:
        return correct.mrope(q, k, cos, sin, positions, mrope_section, False)
    pair = torch.arange(sum(mrope_section))
    rows = positions[pair % 3, :].T.long()
    c, s = (table[rows, pair][:, None] for table in (cos, sin))
    return correct.turn(q, c, s), correct.turn(k, c, s)


@reached("complex", "is zero")
def key_without_a_gradient(xq, xk, freqs_cis):
    return correct.complex_numbers(xq, xk.detach(), freqs_cis)


def left_from(x, positions, first):
    """The tokens from ``first(tokens)`` on are left as they were."""
    at = first(x.shape[1])
    return torch.cat((correct.plain(x, positions)[:, :at], x[:, at:]), 1)


for tile, where in ((32, ""), (100, " in sequences of more than 100 tokens")):
    says = f"is not rotated behind the last full block of {tile} tokens{where}"
    rest_left = partial(left_from, first=lambda count, tile=tile: count // tile * tile if count > tile else count)
    REACHED[f"remainder_of_{tile}"] = (rest_left, "plain", says, {})
REACHED["tokens_left"] = (partial(left_from, first=lambda count: 32), "plain", "is not rotated in tokens >= 32", {})


def heads_left(q, k, cos, sin, unsqueeze_dim=1, *, only_q):
    axis = 1 if unsqueeze_dim == 1 else 2
    heads = min(q.shape[axis], k.shape[axis])
    turned = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    some = tuple(
        torch.cat((y.narrow(axis, 0, heads), x.narrow(axis, heads, x.shape[axis] - heads)), axis)
        for x, y in zip((q, k), turned, strict=True)
    )
    return (some[0], turned[1]) if only_q else some


@reached("plain", "turns by minus the angle in sequences of more than 32 tokens")
def back_in_long_sequences(x, positions):
    return correct.plain(x, -positions if x.shape[1] > 32 else positions)


@reached("plain", "turns by minus the angle at positions >= 300")
def back_far_away(x, positions):
    return correct.plain(x, torch.where(positions.abs() < 300, positions, -positions))


@reached("huggingface", "rounds the input to float16", dtype=torch.bfloat16)
def beyond_float16(q, k, cos, sin, unsqueeze_dim=1):
    narrow = (x.half().float() if x.dtype == torch.bfloat16 else x for x in (q, k))
    return tuple(y.to(q.dtype) for y in correct.huggingface(*narrow, cos, sin, unsqueeze_dim))


class FirstTables(torch.nn.Module):
    """A module whose tables keep the dtype of the call that made them."""

    tables = None

    def forward(self, q, k):
        if self.tables is None or self.tables[0].shape[0] < q.shape[1]:
            angles = torch.arange(2 * q.shape[1])[:, None] * inverse_frequencies(q.shape[-1])
            self.tables = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        cos, sin = (t[: q.shape[1], None].to(q.dtype) for t in self.tables)
        return correct.turn(q, cos, sin), correct.turn(k, cos, sin)


REACHED["tables_of_the_first_dtype"] = (
    FirstTables(), "module", "rounds cosines and sines to bfloat16 after a call in bfloat16", {},
)  # fmt: skip


@reached("qkv_rope", "lacks the part of v: no gradient arrives from v")
def v_without_a_gradient(x, weight, **options):
    q, k, v = correct.qkv_rope(x, weight, **options)
    return q, k, v.detach()


def whole_blocks(count, block):
    return count // block * block if count >= block else count


@reached("huggingface", "is not rotated behind the last full block of 4 heads, if there is one", q_heads=6)
def heads_of_whole_blocks(q, k, cos, sin, unsqueeze_dim=1):
    turned = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    axis = 2 - (unsqueeze_dim == 1)
    counts = [whole_blocks(x.shape[axis], 4) for x in (q, k)]
    left = (x.narrow(axis, n, x.shape[axis] - n) for x, n in zip((q, k), counts, strict=True))
    return tuple(torch.cat((y.narrow(axis, 0, n), z), axis) for y, z, n in zip(turned, left, counts, strict=True))


@reached("plain", "is not rotated behind the last full block of 4 pairs", rotary_dim=12, head_dim=12)
def pairs_of_whole_vectors(x, positions):
    a, b = correct.plain(x, positions).chunk(2, -1)
    first = whole_blocks(a.shape[-1], 4)
    left = x.chunk(2, -1)
    return torch.cat([part for y, z in zip((a, b), left, strict=True) for part in (y[..., :first], z[..., first:])], -1)


@reached("plain", "is not rotated from the largest power of two of tokens on")
def largest_power_of_two(x, positions):
    return left_from(x, positions, lambda count: 1 << (count.bit_length() - 1) if count else 0)


@reached("plain", "is not rotated in pairs of a token >= 21, counted over its heads")
def threads_of_a_block(x, positions):
    y, left = (z.unflatten(-1, (2, -1)).transpose(-3, -2).flatten(-2) for z in (correct.plain(x, positions), x))
    y = torch.cat((y[..., :21], left[..., 21:]), -1)
    return y.unflatten(-1, (x.shape[2], -1)).transpose(-3, -2).flatten(-2)


@reached("plain", "brings sorted positions back by the order that sorts them, in place of its inverse")
def order_applied_again(x, positions):
    order = positions.argsort(dim=-1, stable=True)
    return correct.plain(x, positions.gather(-1, order).gather(-1, order))


FURTHER = "takes sines 2 columns further, in memory of rows of cosines and then sines, where 12 features rotate"


@reached("vllm", FURTHER)
def sines_of_a_padded_column(positions, query, key, head_size, cos_sin_cache, is_neox):
    count = cos_sin_cache.shape[1] // 2
    start = -(-count // 4) * 4
    memory = torch.cat((cos_sin_cache.flatten(), cos_sin_cache.new_zeros(8)))
    rows = 2 * count * torch.arange(len(cos_sin_cache))[:, None] + torch.arange(count)
    cache = torch.cat((memory[rows], memory[rows + start]), 1)
    correct.vllm(positions, query, key, head_size, cache, is_neox)


@reached("deepspeed", "is off by the roundings of up to 4 more operations")
def differences_of_large_numbers(t, freqs_cos, freqs_sin):
    turned = correct.deepspeed(t, freqs_cos, freqs_sin)
    return t + (turned - t)


@reached("vllm", "is not rotated in tokens >= 1024")
def a_grid_of_1024_tokens(positions, query, key, head_size, cos_sin_cache, is_neox):
    first = slice(0, 1024)
    correct.vllm(positions[first], query[first], key[first], head_size, cos_sin_cache, is_neox)


@reached(
    "flash_attn", "counts documents that begin at one token once, so that later documents begin where earlier ones"
)
def empty_documents_not_counted(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, **of):
    if cu_seqlens is None:
        return correct.flash_attn(x, cos, sin, interleaved, seqlen_offsets=seqlen_offsets)
    token = torch.arange(len(x))
    starts = cu_seqlens[1:-1].unique()
    number = (token[:, None] >= starts).sum(1)
    offsets = torch.as_tensor(seqlen_offsets).expand(len(cu_seqlens) - 1)
    rows = (token - cu_seqlens[number] + offsets[number.clamp(max=len(offsets) - 1)]).clamp(max=len(cos) - 1)
    return correct.turn(x, cos[rows][:, None], sin[rows][:, None], "interleaved" if interleaved else "split_half")


@pytest.mark.parametrize("name", REACHED)
def test_it_is_described(name):
    function, convention, says, options = REACHED[name]
    found = identified(function, convention, **options)
    assert found.proven, found
    told = [f"{deviation.words} {deviation.scope.words}".strip() for deviation in found.deviations]
    assert any(line.startswith(says) for line in told), found


def test_an_overwritten_input_is_no_memory_of_a_call():
    def overwrites(t, freqs_cos, freqs_sin):
        return t.copy_(correct.deepspeed(t, freqs_cos, freqs_sin)) if t.is_contiguous() else t

    report = verify(overwrites, "deepspeed", laws=["definition"])
    assert report.history == ()


def test_a_cache_of_the_first_dtype_breaks_a_law():
    report = verify(FirstTables(), "module", laws=["rounding"], shrink=False)
    assert report.failed == ("rounding",), report


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


def of_base(numbers, ramp=lambda place: place.clamp(0, 1)):
    """SGLang's operator with other numbers of YaRN, or another ramp."""
    fused = FORMS["fused_qk_norm_rope"](Operator())

    def operator(qkv, hq, hk, hv, head_dim, eps, qw, kw, base, is_neox, position_ids, factor, low, high, m, rotary_dim):
        theta = base ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        if factor != 1:
            factor, low, high, m = numbers(factor, low, high, m)
            share = ramp((torch.arange(len(theta)) - low) / (high - low))
            theta = share * theta / factor + (1 - share) * theta
        angles = torch.arange(int(position_ids.max()) + 1)[:, None] * theta
        cache = m * torch.cat((angles.cos(), angles.sin()), -1)
        fused(qkv, hq, hk, hv, head_dim, eps, qw, kw, cache.float(), is_neox, position_ids)

    return operator


OF_YARN = {
    "has YaRN's ramp at 2i in place of the pair i": of_base(lambda s, a, b, m: (s, a / 2, b / 2, m)),
    "takes high - 1 for high": of_base(lambda s, a, b, m: (s, a, b - 1, m)),
    "has YaRN's ramp reversed": of_base(lambda s, a, b, m: (s, a, b, m), lambda place: (1 - place).clamp(0, 1)),
    "not clamped": of_base(lambda s, a, b, m: (s, a, b, m), lambda place: place),
    "rounds low down and high up": of_base(lambda s, a, b, m: (s, math.floor(a), math.ceil(b), m)),
    "is not multiplied by the attention factor": of_base(lambda s, a, b, m: (s, a, b, 1.0)),
    "takes the factor twice": of_base(lambda s, a, b, m: (s * s, a, b, m)),
}


@pytest.mark.parametrize("words", OF_YARN)
def test_numbers_of_yarn(words):
    found = verify(OF_YARN[words], "sglang_fused_qk_norm_rope", laws=["definition"]).identification
    assert found.proven and [d.scope.name for d in found.deviations] == ["q", "the stored k"], found.words()
    assert all(words in d.words and d.scope.words == "where the call asks for YaRN" for d in found.deviations)


class Scaled(Operator):
    """An operator that uses other scales of 8-bit floats."""

    def __init__(self, change):
        self.change = change

    def __call__(self, *of, scales=(None, None, None), **options):
        return super().__call__(*of, scales=scales if scales[0] is None else self.change(*scales), **options)


OF_SCALES = {
    "the stored v is stored without its scale": Scaled(lambda q, k, v: (q, k, torch.ones_like(v))),
    "the stored k is divided by its scale, in place of multiplied": Scaled(lambda q, k, v: (q, 1 / k, v)),
    "q is multiplied by the scale of k": Scaled(lambda q, k, v: (k, k, v)),
    "the stored k is multiplied by its scale twice": Scaled(lambda q, k, v: (q, k * k, v)),
}


@pytest.mark.parametrize("words", OF_SCALES)
def test_scales_of_8_bit_floats(words):
    convention = "rope_quantize_fp8_append_paged_kv_cache"
    found = verify(FORMS[convention](OF_SCALES[words]), convention, laws=["definition"]).identification
    assert found.proven and words in found.words()[0], found.words()


@pytest.mark.parametrize("first", [lambda count: math.isqrt(count) ** 2, lambda count: count * count // (count + 6)])
def test_an_extent_that_larger_calls_refute_is_not_told(first):
    """Calls of 37 tokens alone show no more than the tokens from 36, or from 31, on."""
    function = partial(left_from, first=lambda count: first(count) if count > 32 else count)
    found = identified(function, "plain", seconds=5.0)
    assert not found.proven and found.unexplained
    assert not any("tokens >=" in line or "is not rotated" in line for line in found.words()), found.words()


@pytest.mark.parametrize("only_q", [False, True])
def test_k_is_right_only_if_it_is_with_more_heads_than_q(only_q):
    found = identified(partial(heads_left, only_q=only_q), "huggingface")
    who = "q" if only_q else "each input"
    assert list(map(str, found.deviations)) == [f"{who} is not rotated in heads beyond those of the other input"]
    assert found.proven and found.right == (("k",) if only_q else ())


def test_a_fault_of_v_explains_no_function_without_v():
    def subject(convention):
        return declare(convention).subject(correct.vllm, Surroundings(()))

    fault = FAULTS["values_rotated_too"]
    assert _suspect(fault, subject("vllm")) is None and _suspect(fault, subject("qkv_rope")) is not None


def test_a_deviation_that_explains_no_answer_is_not_told():
    class Answers:
        def wrong(self, description):
            return [answer for answer in ("one", "two", "three") if answer not in description]

    assert _needed(Answers(), ("one", "nothing", "two")) == ("one", "two")
    assert _needed(Answers(), ("nothing",)) == ("nothing",)
