"""The faults of positions."""

import torch

from ropelab.study.faults import correct
from ropelab.study.faults.fault import fault


@fault(
    "The angle is taken from the row position + head.",
    symptom="all heads but the first are off by a constant number of positions",
    seen_in="emlx#121",
    convention="flash_attn",
    must_fail=("definition", "heads_independent"),
)
def head_added_to_position(x, cos, sin, interleaved=False, inplace=False, **where):
    heads = []
    for head in range(x.shape[-2]):
        # A kernel would read beyond the table; here the last row takes the place of what it reads.
        shifted = (table[min(head, len(table) - 1) :] for table in (cos, sin))
        cosines, sines = (torch.cat((table, table[-1:].expand(head, -1))) for table in shifted)
        heads.append(correct.flash_attn(x[..., head : head + 1, :], cosines, sines, interleaved, **where))
    y = torch.cat(heads, dim=-2)
    return x.copy_(y) if inplace else y


@fault(
    "Positions count from 1.",
    symptom="consistent in itself; caches and weights from other code are off by one",
    seen_in=None,
    convention="plain",
    must_fail=("definition", "identity", "composition"),
)
def positions_from_one(x, positions):
    return correct.plain(x, positions + 1)


@fault(
    "A single new token always gets position 0.",
    symptom="decoding differs from prefill",
    seen_in="mlx-vlm#1983",
    convention="flash_attn",
    must_fail=("decode",),
)
def decode_always_at_zero(x, cos, sin, interleaved=False, inplace=False, *, seqlen_offsets=0, cu_seqlens=None, **rest):
    if cu_seqlens is None and x.shape[1] == 1:
        seqlen_offsets = 0
    where = {"seqlen_offsets": seqlen_offsets, "cu_seqlens": cu_seqlens}
    return correct.flash_attn(x, cos, sin, interleaved, inplace, **where, **rest)


@fault(
    "The offsets of the cache are advanced after the first layer instead of the last.",
    symptom="all layers after the first have positions that are too large",
    seen_in="fla#766",
    convention="flash_attn",
    must_fail=("inputs_unchanged",),
)
def offset_advanced_too_early(x, cos, sin, interleaved=False, inplace=False, *, seqlen_offsets=0, **packed):
    y = correct.flash_attn(x, cos, sin, interleaved, inplace, seqlen_offsets=seqlen_offsets, **packed)
    if isinstance(seqlen_offsets, torch.Tensor):
        seqlen_offsets += x.shape[1]
    return y


@fault(
    "Positions are taken modulo the length of the sequence.",
    symptom="a jump back to 0 where an offset carries the sequence past its length",
    seen_in="torchtitan#2849",
    convention="flash_attn",
    must_fail=("offsets", "decode"),
)
def position_modulo_length(x, cos, sin, interleaved=False, inplace=False, *, seqlen_offsets=0, cu_seqlens=None, **rest):
    positions = correct.flash_positions(x, seqlen_offsets, cu_seqlens)
    if cu_seqlens is None:
        positions = positions % x.shape[1]
    return correct.flash_attn(x, cos, sin, interleaved, inplace, positions=positions)


@fault(
    "Only the upper end of the table is guarded: negative positions read before the table.",
    symptom="garbage, or an illegal access, for negative offsets",
    seen_in="flash-attn (Triton rotary; read in its source)",
    convention="plain",
    must_fail=("offsets", "inverse"),
)
def negative_position_reads_before_the_table(x, positions):
    # A kernel would read before the table; here such positions take rows from its end.
    rows = int(positions.abs().max()) + 1 if positions.numel() else 1
    return correct.plain(x, torch.where(positions < 0, positions % rows, positions))


@fault(
    "Each sequence has its own tables, but all sequences take the tables of the first.",
    symptom="wrong results for all sequences but the first, for example with left padding",
    seen_in="Liger-Kernel#477",
    convention="huggingface",
    must_fail=("positions_per_batch",),
)
def table_of_batch_zero(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k, cos[:1], sin[:1], unsqueeze_dim)


@fault(
    "Each sequence has its own frequencies, but all sequences take the frequencies of the first.",
    symptom="wrong results for all sequences but the first, if their positions differ",
    seen_in="Liger-Kernel (llama4; read in its source)",
    convention="deepspeed",
    must_fail=("positions_per_batch",),
)
def frequencies_of_batch_zero(t, freqs_cos, freqs_sin):
    return correct.deepspeed(t, freqs_cos[:, :1], freqs_sin[:, :1])


@fault(
    "The kernel reads one position for each token, the one along time, and drops height and width.",
    symptom="tokens of images turn as if they lay in a row; text is right, because its positions are equal",
    seen_in="SGLang#34446, SGLang#31806",
    convention="mrope",
    must_fail=("axes",),
)
def height_and_width_dropped(q, k, cos, sin, positions, mrope_section, mrope_interleaved):
    return correct.mrope(q, k, cos, sin, positions[:1].expand_as(positions), mrope_section, mrope_interleaved)


@fault(
    "The sections of M-RoPE are read as blocks where the axes take turns.",
    symptom="tokens of images are wrong, and text is right",
    seen_in=None,
    convention="mrope",
    must_fail=("axes",),
)
def sections_in_blocks(q, k, cos, sin, positions, mrope_section, mrope_interleaved):
    return correct.mrope(q, k, cos, sin, positions, mrope_section, False)
