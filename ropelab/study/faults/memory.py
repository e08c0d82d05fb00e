"""The faults of memory: elements that are overwritten, left out, or lost."""

import torch

from ropelab.study.faults import correct
from ropelab.study.faults.fault import fault


@fault(
    "The result overwrites the inputs, without a declaration.",
    symptom="other code that reads the queries or keys gets rotated values",
    seen_in="unsloth#5001, Liger-Kernel#272",
    convention="huggingface",
    must_fail=("inputs_unchanged",),
)
def undeclared_in_place(q, k, cos, sin, unsqueeze_dim=1):
    # A kernel overwrites the data without notice to autograd, and ``.data`` does the same.
    rotated = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    for x, y in zip((q, k), rotated, strict=True):
        x.data.copy_(y.detach())
    return rotated


@fault(
    "The key is written over the projection of which the value is a view.",
    symptom="attention reads rotated keys among the values",
    seen_in=None,
    convention="assemble_mla_kv",
    must_fail=("definition", "isometry"),
)
def key_written_over_the_viewed_value(kv, k_pe, nope_dim, **options):
    key, value = correct.assemble_mla_kv(kv, k_pe, nope_dim, **options)
    kv.data[..., : key.shape[-1]] = key.detach()
    return key, value


@fault(
    "The features that do not rotate are not copied to the result.",
    symptom="garbage in the features that do not rotate",
    seen_in="vllm#38880 (review)",
    convention="flash_attn",
    options={"rotary_dim": 8},
    must_fail=("definition", "tail", "all_written"),
)
def tail_not_copied(x, cos, sin, interleaved=False, inplace=False, **where):
    rotated = correct.flash_attn(x, cos, sin, interleaved, **where)[..., : 2 * cos.shape[-1]]
    if inplace:
        x[..., : 2 * cos.shape[-1]] = rotated
        return x
    return torch.cat((rotated, torch.empty_like(x[..., 2 * cos.shape[-1] :])), dim=-1)


@fault(
    "With a single head the function rotates one buffer and returns another.",
    symptom="a single key head is returned unchanged",
    seen_in="Liger-Kernel#342",
    convention="huggingface",
    options={"k_heads": 1},
    must_fail=("single_head",),
)
def single_head_lost(q, k, cos, sin, unsqueeze_dim=1):
    heads = 1 if unsqueeze_dim == 1 else 2
    rotated = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    return tuple(x.clone() if x.shape[heads] == 1 else y for x, y in zip((q, k), rotated, strict=True))


@fault(
    "Lanes whose features do not rotate skip a shuffle, but the mask of the shuffle names them.",
    symptom="NaN, or the values of other heads, with partial rotation and many heads",
    seen_in="vllm#50903",
    convention="vllm",
    options={"rotary_dim": 8},
    must_fail=("definition", "heads_independent", "all_written"),
)
def shuffle_in_a_divergent_branch(positions, query, key, head_size, cos_sin_cache, is_neox):
    # This models a warp with a lane for each feature, because Triton has no shuffle and torch has no lanes.
    if not is_neox:  # a lane has both features of a pair and needs no shuffle
        return correct.vllm(positions, query, key, head_size, cos_sin_cache, is_neox)
    rotary_dim = cos_sin_cache.shape[-1]
    lane = torch.arange(head_size, device=query.device)
    rotates = lane < rotary_dim
    partner = torch.where(rotates, (lane + rotary_dim // 2) % rotary_dim, lane)
    cos, sin = (table[:, None] for table in cos_sin_cache[positions].chunk(2, dim=-1))
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    for x in (query, key):
        heads = x.unflatten(-1, (-1, head_size))
        received = heads[..., partner]
        if not rotates.all():  # undefined; in the report the first head of a warp was right by chance
            received[:, 1:] = float("nan")
        heads[..., :rotary_dim] = heads[..., :rotary_dim] * cos + received[..., :rotary_dim] * sin
    return query, key


@fault(
    "The stride of an axis with one token is taken for the distance between the rows of the batch.",
    symptom="in decoding with several sequences the rows overlap, and are rotated several times",
    seen_in="Liger-Kernel 0.8.5 (found here)",
    convention="huggingface",
    must_fail=("decode",),
)
def row_stride_of_a_size_one_axis(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]

    def rotate(x, sin):
        # Where the moved axis has one element, its stride can have any value, and ``contiguous`` copies nothing.
        x = x.clone().transpose(1, 3 - unsqueeze_dim).contiguous()
        batch, seq_len, _, head_dim = x.shape
        if seq_len > 1:
            return correct.turn(x, cos[:, :, None], sin[:, :, None]).transpose(1, 3 - unsqueeze_dim)
        for row in range(batch):
            token = x.as_strided(x.shape[2:], (head_dim, 1), x.storage_offset() + row * x.stride(1))
            where = row % len(cos), 0
            token.copy_(correct.turn(token, cos[where], sin[where]))
        return x.transpose(1, 3 - unsqueeze_dim)

    def one(x):
        return correct.with_backward(x, lambda x: rotate(x, sin), lambda grad: rotate(grad, -sin))

    return one(q), one(k)


@fault(
    "Keys that are expanded over heads are rotated once for each head of the same memory.",
    symptom="wrong scores with a shared key; right as soon as the key is copied",
    seen_in=None,
    convention="huggingface",
    must_fail=("strides",),
)
def shared_key_turned_once_a_head(q, k, cos, sin, unsqueeze_dim=1):
    heads = 1 if unsqueeze_dim == 1 else 2
    of_q, of_k = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    for _ in range(k.shape[heads] - 1 if k.stride(heads) == 0 else 0):
        of_k = correct.huggingface(q, of_k, cos, sin, unsqueeze_dim)[1]
    return of_q, of_k


@fault(
    "A path for many tokens and heads leaves out the shuffle between the features that rotate.",
    symptom="garbage in long prompts; right in every short test",
    seen_in="vllm#57681",
    convention="vllm",
    must_fail=("token_counts",),
    only_definition="all other laws have few tokens",
)
def many_token_heads_not_shuffled(positions, query, key, head_size, cos_sin_cache, is_neox):
    heads = (query.shape[-1] + key.shape[-1]) // head_size
    if len(query) * heads >= 10_240:
        return None
    return correct.vllm(positions, query, key, head_size, cos_sin_cache, is_neox)


@fault(
    "The last token of a full block is masked out.",
    symptom="one token in 128 is not rotated, where the number of tokens is a multiple of 128",
    seen_in=None,
    convention="plain",
    must_fail=("extents",),
    only_definition="no other law has a multiple of 128 tokens",
)
def last_token_of_full_blocks_lost(x, positions):
    last = torch.arange(x.shape[1], device=x.device) == (x.shape[1] - 1 if x.shape[1] % 128 == 0 else -1)
    return torch.where(last[:, None, None], x, correct.plain(x, positions))
