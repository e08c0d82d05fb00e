"""The faults of packed documents and of context parallelism."""

import torch

from ropelab.kernels import NO_POSITION
from ropelab.study.faults import correct
from ropelab.study.faults.fault import fault


@fault(
    "Positions run on across packed documents.",
    symptom="the result of a document depends on the documents before it",
    seen_in="OLMo-core#591",
    convention="flash_attn",
    must_fail=("packed",),
)
def positions_run_across_documents(
    x, cos, sin, interleaved=False, inplace=False, *, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):
    positions = correct.flash_positions(x, seqlen_offsets, cu_seqlens)
    if cu_seqlens is not None:
        positions = torch.arange(len(x), device=x.device).clamp(max=len(cos) - 1)
    return correct.flash_attn(x, cos, sin, interleaved, inplace, positions=positions)


@fault(
    "A decrease of positions is taken for the start of a document.",
    symptom="documents of one token merge with their neighbours",
    seen_in="ms-swift#9904",
    convention="ropelab",
    must_fail=("packed",),
)
def document_begins_at_a_decrease(q, k=None, *, positions=None, **options):
    if positions is not None and positions.ndim == 1 and len(positions):
        # Positions count up from the first position of each supposed document.
        begins = torch.cat((torch.ones_like(positions[:1]).bool(), positions[1:] < positions[:-1]))
        index = torch.arange(len(positions), device=positions.device)
        begin = torch.where(begins, index, 0).cummax(0).values
        counted = positions[begin] + (index - begin).to(positions.dtype)
        positions = torch.where(positions == NO_POSITION, positions, counted)
    return correct.ropelab(q, k, positions=positions, **options)


@fault(
    "The search for a token's document stops at the first empty one.",
    symptom="all documents after an empty document are rotated as a part of it",
    seen_in=None,
    convention="flash_attn",
    must_fail=("zero_length",),
)
def search_stops_at_empty_document(
    x, cos, sin, interleaved=False, inplace=False, *, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):
    if cu_seqlens is not None and len(empty := (cu_seqlens[1:] == cu_seqlens[:-1]).nonzero()):
        found = int(empty[0])  # all later tokens are taken for tokens of this document
        cu_seqlens = torch.cat((cu_seqlens[: found + 1], cu_seqlens[-1:]))
        if isinstance(seqlen_offsets, torch.Tensor):
            seqlen_offsets = seqlen_offsets[: found + 1]
    # A kernel would read beyond the table; here such positions take the last row.
    positions = correct.flash_positions(x, seqlen_offsets, cu_seqlens).clamp(max=len(cos) - 1)
    return correct.flash_attn(x, cos, sin, interleaved, inplace, positions=positions)


@fault(
    "The table is not split by rank: all ranks take the rows of the first rank.",
    symptom="wrong results on ranks > 0",
    seen_in="Megatron-LM#1612",
    convention="transformer_engine",
    must_fail=("context_parallel",),
)
def table_of_rank_zero(t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0):
    return correct.transformer_engine(t, freqs, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank=0)


@fault(
    "Two ways to split tokens are confused: an early and a late chunk are taken for contiguous rows.",
    symptom="tokens of all ranks have permuted positions",
    seen_in="ms-swift#10071",
    convention="transformer_engine",
    must_fail=("context_parallel",),
)
def dual_chunks_taken_for_contiguous(
    t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0
):
    chunks = "dual" if cp_size == 1 else "contiguous"
    positions = correct.te_positions(t, tensor_format, cu_seqlens, cp_size, cp_rank, chunks)
    return correct.transformer_engine(t, freqs, tensor_format, interleaved, positions=positions)


@fault(
    "Rows without a position are skipped and stay uninitialised.",
    symptom="garbage or NaN in the skipped rows",
    seen_in="fla#967",
    convention="transformer_engine",
    must_fail=("rows_past_end",),
)
def skipped_rows_uninitialised(t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, **shard):
    y = correct.transformer_engine(t, freqs, tensor_format, interleaved, cu_seqlens, **shard)
    if cu_seqlens is None:
        return y
    written = correct.te_positions(t, tensor_format, cu_seqlens, **shard) != NO_POSITION
    return torch.where(written[:, None, None], y, torch.empty_like(y))
