"""The faults that rotate the wrong things together: pairs, halves, heads, queries and keys."""

import torch

from ropelab import reference
from ropelab.layout.pairing import permutation
from ropelab.layout.seq_format import from_bshd, to_bshd
from ropelab.study.faults import correct
from ropelab.study.faults.fault import fault


@fault(
    "Half of each query is made from the key and half of each key from the query.",
    symptom="wrong scores; right where queries equal keys",
    seen_in="ColossalAI#6428",
    convention="huggingface",
    must_fail=("definition", "keys_independent"),
)
def query_and_key_mixed(q, k, cos, sin, unsqueeze_dim=1):
    heads = 1 if unsqueeze_dim == 1 else 2
    of_q, of_k = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    (q0, q1), (_, k1) = of_q.chunk(2, dim=-1), of_k.chunk(2, dim=-1)
    own = q1.narrow(heads, k.shape[heads], q.shape[heads] - k.shape[heads])  # the heads of q beyond the heads of k
    return torch.cat((q0, torch.cat((k1, own), heads)), -1), torch.cat((q0.narrow(heads, 0, k.shape[heads]), k1), -1)


@fault(
    "All heads of the projection rotate, those of v too.",
    symptom="outputs mix features of the values; right at position 0",
    seen_in=None,
    convention="qkv_rope",
    must_fail=("definition", "relative_position"),
)
def values_rotated_too(x, weight, *, q_heads, k_heads, **options):
    q, k, v = correct.qkv_rope(x, weight, q_heads=q_heads, k_heads=k_heads, **options)
    return q, k, reference.rotate(v, **options).to(v.dtype)


@fault(
    "The rows of the weight are read group by group: some heads of q, one of k, one of v.",
    symptom="garbage, although every shape fits; right with one head of k",
    seen_in=None,
    convention="qkv_rope",
    must_fail=("definition", "keys_independent"),
)
def weight_read_by_groups(x, weight, *, q_heads, k_heads, **options):
    heads = weight.unflatten(0, (k_heads, q_heads // k_heads + 2, -1))
    parts = heads[:, :-2].flatten(0, 1), heads[:, -2], heads[:, -1]
    grouped = torch.cat([part.flatten(0, 1) for part in parts])
    return correct.qkv_rope(x, grouped, q_heads=q_heads, k_heads=k_heads, **options)


@fault(
    "The projection of latent attention is read as value and key, in place of key and value.",
    symptom="garbage, although every shape fits where key and value are equally wide",
    seen_in="tt-mlir#8958",
    convention="assemble_mla_kv",
    must_fail=("definition", "tail"),
)
def value_read_before_key(kv, k_pe, nope_dim, **options):
    return correct.assemble_mla_kv(kv.roll(nope_dim, dims=-1), k_pe, nope_dim, **options)


def _shared(table: torch.Tensor, half: int) -> torch.Tensor:
    """Return a table ``[..., R]`` whose halves are half 0 or 1 of ``table``."""
    return table.chunk(2, dim=-1)[half].tile(2)


@fault(
    "Both features of a pair take the columns of the first: the second half of the tables is never read.",
    symptom="wrong where the halves of the tables differ; right with the tables of most models",
    seen_in="ncnn#6833",
    convention="huggingface",
    must_fail=("feature_columns",),
    only_definition="in all other laws both columns of a pair hold one angle",
)
def second_half_of_tables_ignored(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k, _shared(cos, 0), _shared(sin, 0), unsqueeze_dim)


@fault(
    "Both features of a pair take the columns of the second: the first half of the tables is never read.",
    symptom="wrong where the halves of the tables differ; right with the tables of most models",
    seen_in=None,
    convention="deepspeed",
    must_fail=("feature_columns",),
    only_definition="in all other laws both columns of a pair hold one angle",
)
def first_half_of_tables_ignored(t, freqs_cos, freqs_sin):
    return correct.deepspeed(t, _shared(freqs_cos, 1), _shared(freqs_sin, 1))


@fault(
    "The cosines are read from the first half of the angles, and the sines from the second.",
    symptom="wrong where the halves of the angles differ; right with the angles of most models",
    seen_in=None,
    convention="transformer_engine",
    must_fail=("feature_columns",),
    only_definition="in all other laws both columns of a pair hold one angle",
)
def cosines_and_sines_of_other_halves(t, freqs, tensor_format="sbhd", interleaved=False, **where):
    cos, sin = correct.te_tables(freqs, interleaved)
    tables = (cos[0], cos[0]), (sin[1], sin[1])
    return correct.transformer_engine(t, freqs, tensor_format, interleaved, tables=tables, **where)


@fault(
    "The layout flag is ignored: halves are paired in every model.",
    symptom="garbage from models with adjacent pairs; right at position 0",
    seen_in="vllm#49290",
    convention="vllm",
    options={"layout": "interleaved"},
    must_fail=("definition", "layout"),
)
def layout_flag_ignored(positions, query, key, head_size, cos_sin_cache, is_neox):
    return correct.vllm(positions, query, key, head_size, cos_sin_cache, is_neox=True)


@fault(
    "The layout flag means the opposite.",
    symptom="garbage from every model; right at position 0",
    seen_in="sglang#14302",
    convention="vllm",
    must_fail=("definition", "layout"),
)
def layout_flag_inverted(positions, query, key, head_size, cos_sin_cache, is_neox):
    return correct.vllm(positions, query, key, head_size, cos_sin_cache, not is_neox)


@fault(
    "The rotation has the opposite sign, without a declaration.",
    symptom="scores are consistent in themselves; weights from other code do not work",
    seen_in="nanochat#489",
    convention="huggingface",
    must_fail=("definition",),
    only_definition="both signs obey every law of consistency; only a reference tells the right sign",
)
def sign_reversed_undeclared(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k, cos, -sin, unsqueeze_dim)


@fault(
    "The last axis but one has the heads, and is taken for the sequence.",
    symptom="all tokens of a head rotate by the same angle",
    seen_in="DeepSpeed#8052 (as first proposed)",
    convention="deepspeed",
    must_fail=("definition", "heads_independent"),
)
def heads_taken_for_the_sequence(t, freqs_cos, freqs_sin):
    rotary_dim = freqs_cos.shape[-1]
    # With more heads than rows a kernel would read beyond the table; here such heads take the last row.
    row = torch.arange(t.shape[-2], device=t.device).clamp(max=freqs_cos.numel() // rotary_dim - 1)
    return correct.deepspeed(t, *(table.reshape(-1, rotary_dim)[row] for table in (freqs_cos, freqs_sin)))


@fault(
    "rotary_dim is ignored: all features of a head rotate.",
    symptom="garbage from models with partial rotation, as columns of the next row are read",
    seen_in="vllm#43676",
    convention="vllm",
    options={"rotary_dim": 8},
    must_fail=("definition", "tail"),
)
def rotary_dim_ignored(positions, query, key, head_size, cos_sin_cache, is_neox):
    # A row as wide as the head runs into the next row. The last row would run out of the table; here it stays in it.
    rows, rotary_dim = cos_sin_cache.shape
    index = rotary_dim * torch.arange(rows)[:, None] + torch.arange(head_size)
    wide = cos_sin_cache.flatten()[index.clamp(max=rows * rotary_dim - 1).to(query.device)]
    return correct.vllm(positions, query, key, head_size, wide, is_neox)


@fault(
    "The sines are read at the offset rotary_dim / 2, rounded up to a power of two.",
    symptom="amplitudes shrink if rotary_dim is not a power of two, such as 96",
    seen_in="vllm-ascend#12963",
    convention="vllm",
    options={"rotary_dim": 12},
    must_fail=("definition", "isometry"),
)
def sine_read_behind_the_padding(positions, query, key, head_size, cos_sin_cache, is_neox):
    half = cos_sin_cache.shape[-1] // 2
    padded_half = 1 << (half - 1).bit_length()
    cos, beyond = cos_sin_cache[:, :half], cos_sin_cache[:, padded_half:]
    sin = torch.zeros_like(cos)  # a masked load yields zeros
    sin[:, : beyond.shape[-1]] = beyond
    return correct.vllm(positions, query, key, head_size, torch.cat((cos, sin), dim=-1), is_neox)


@fault(
    "Keys are converted from adjacent pairs to halves with the number of query heads.",
    symptom="wrong scores from converted checkpoints with fewer key heads",
    seen_in="transformers#31788",
    convention="ropelab",
    options={"layout": "interleaved"},
    must_fail=("definition", "isometry", "layout"),
)
def key_permuted_with_query_heads(q, k=None, *, layout, seq_format, **options):
    if layout == "split_half" or k is None:  # there is nothing to convert, or only one number of heads
        return correct.ropelab(q, k, layout=layout, seq_format=seq_format, **options)
    query_heads = to_bshd(q, seq_format).shape[2]

    def permuted(x, heads, source, target):
        flat = to_bshd(x, seq_format).flatten(2)
        by_head = flat.unflatten(2, (heads, -1))
        order = permutation(by_head.shape[-1], source, target).to(x.device)
        return from_bshd(by_head[..., order].reshape(*flat.shape[:2], -1, x.shape[-1]), seq_format)

    k_heads = to_bshd(k, seq_format).shape[2]
    q_halves = permuted(q, query_heads, "interleaved", "split_half")
    k_halves = permuted(k, query_heads, "interleaved", "split_half")  # k_heads would be right
    q, k = correct.ropelab(q_halves, k_halves, layout="split_half", seq_format=seq_format, **options)
    return permuted(q, query_heads, "split_half", "interleaved"), permuted(k, k_heads, "split_half", "interleaved")


@fault(
    "Height and width are swapped: each rotates the features of the other.",
    symptom="the model sees transposed images; right on the diagonal",
    seen_in=None,
    convention="flash_attn",
    must_fail=("definition",),
    only_definition="it is a consistent rotation, with its frequencies in another order",
)
def height_and_width_swapped(x, cos, sin, *arguments, **options):
    # The first half of the planes belongs to the height, the second half to the width.
    planes = cos.shape[-1]
    swapped = torch.arange(planes, device=x.device).roll(planes // 2)
    return correct.flash_attn(x, cos[:, swapped], sin[:, swapped], *arguments, **options)


@fault(
    "The rotation is applied twice.",
    symptom="relative positions count double",
    seen_in=None,
    convention="huggingface",
    must_fail=("definition", "isometry"),
)
def applied_twice(q, k, cos, sin, unsqueeze_dim=1):
    q, k = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    return correct.huggingface(q, k, cos, sin, unsqueeze_dim)


@fault(
    "The order of the axes is guessed: the first axis as long as the positions holds the tokens.",
    symptom="the sequences of a batch turn like tokens, where a batch has as many sequences as tokens",
    seen_in=None,
    convention="plain",
    must_fail=("extents",),
    only_definition="in all other laws the number of tokens differs from all other extents",
)
def axes_guessed_from_extents(x, positions):
    if positions.ndim == 1 and x.shape[0] == len(positions) > 1:
        return correct.plain(x.transpose(0, 1), positions).transpose(0, 1)
    return correct.plain(x, positions)


@fault(
    "Pairs are processed two at a time, and an odd last pair is left out.",
    symptom="the slowest pair is not rotated in heads with an odd number of pairs",
    seen_in=None,
    convention="flash_attn",
    must_fail=("extents",),
    only_definition="in all other laws the number of pairs is even",
)
def odd_pair_left_out(x, cos, sin, interleaved=False, inplace=False, **where):
    last = torch.arange(cos.shape[-1], device=cos.device) >= cos.shape[-1] // 2 * 2
    cos, sin = cos.masked_fill(last, 1), sin.masked_fill(last, 0)
    return correct.flash_attn(x, cos, sin, interleaved, inplace, **where)


@fault(
    "Two heads of the keys are rotated, and further heads are left out.",
    symptom="wrong scores in models with three or more heads of keys",
    seen_in=None,
    convention="huggingface",
    must_fail=("extents",),
    only_definition="in all other laws keys have one or two heads",
)
def third_head_of_keys_left_out(q, k, cos, sin, unsqueeze_dim=1):
    heads = 1 if unsqueeze_dim == 1 else 2
    of_q, of_k = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    rest = k.narrow(heads, 2, max(k.shape[heads] - 2, 0)) if k.shape[heads] > 2 else k[:0]
    return of_q, torch.cat((of_k.narrow(heads, 0, 2), rest), heads) if len(rest) else of_k
