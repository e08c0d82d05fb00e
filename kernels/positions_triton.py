"""Compute the position of every token of packed sequences in one small Triton launch.

The host does not wait for the GPU. See `ropelab.positions`.
"""

import torch
import triton
import triton.language as tl

from ropelab.kernels import tile_of
from ropelab.kernels.positions_torch import Shard
from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION

_NO_POSITION = tl.constexpr(NO_POSITION)
_INVALID_POSITION = tl.constexpr(INVALID_POSITION)


@triton.jit(do_not_specialize=["sequences", "total_tokens", "offset", "cp_rank", "search_steps"])
def _packed_positions_kernel(
    positions_ptr, cu_seqlens_ptr, offsets_ptr, cu_seqlens_stride, offsets_stride,
    sequences, total_tokens, offset, cp_rank, search_steps,
    CP_SIZE: tl.constexpr, DUAL: tl.constexpr, OFFSETS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Write the positions of a block of tokens.

    ``cu_seqlens`` holds the lengths of whole sequences; a rank holds 1 / CP_SIZE of every sequence.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = token < total_tokens

    # Every program checks all of cu_seqlens: cu_seqlens is small, and the search then finds it in the L1 cache.
    CHUNKS: tl.constexpr = 2 * CP_SIZE if DUAL else CP_SIZE
    is_valid = tl.full([BLOCK_SEQUENCES], True, tl.int1)
    first = 0
    while first < sequences:  # not a range: Triton 3.6 cannot interpret a range whose end is an argument
        index = first + tl.arange(0, BLOCK_SEQUENCES)
        start = _load(cu_seqlens_ptr, cu_seqlens_stride, index, index < sequences)
        end = _load(cu_seqlens_ptr, cu_seqlens_stride, index + 1, index < sequences)
        is_valid &= (start <= end) & (end % CHUNKS == 0)
        first += BLOCK_SEQUENCES
    all_valid = tl.min(is_valid.to(tl.int32), axis=0) == 1
    all_valid &= tl.load(cu_seqlens_ptr) == 0
    all_valid &= _load(cu_seqlens_ptr, cu_seqlens_stride, sequences, True) <= total_tokens.to(tl.int64) * CP_SIZE

    # The last sequence that starts at the token or before it, so never an empty sequence; `sequences` past the end.
    # 0 <= sequence < after <= sequences + 1, so the search reads elements of cu_seqlens only, whatever they hold.
    sequence = tl.zeros([BLOCK_TOKENS], tl.int32)
    after = tl.zeros([BLOCK_TOKENS], tl.int32) + (sequences + 1)
    while search_steps > 0:
        middle = (sequence + after) // 2
        starts_before = _load(cu_seqlens_ptr, cu_seqlens_stride, middle, is_token) <= token * CP_SIZE
        sequence = tl.where(starts_before, middle, sequence)
        after = tl.where(starts_before, after, middle)
        search_steps -= 1
    has_position = is_token & (sequence < sequences)
    start = _load(cu_seqlens_ptr, cu_seqlens_stride, sequence, has_position)
    end = _load(cu_seqlens_ptr, cu_seqlens_stride, sequence + 1, has_position)

    local = token - start // CP_SIZE
    length = (end - start) // CP_SIZE
    if DUAL:
        half = length // 2
        # The number of chunks of other ranks that precede the token's chunk.
        skipped = tl.where(local < half, cp_rank, 2 * CP_SIZE - 2 - cp_rank)
        place = skipped * half + local
    else:
        place = cp_rank * length + local

    first_position = tl.zeros([BLOCK_TOKENS], tl.int64) + offset
    if OFFSETS:
        first_position = _load(offsets_ptr, offsets_stride, sequence, has_position)
    has_position &= first_position != _NO_POSITION
    position = first_position + place
    in_range = (position > _INVALID_POSITION) & (position < 2**31)
    position = tl.where(in_range, position, _INVALID_POSITION)
    position = tl.where(has_position, position, _NO_POSITION)
    position = tl.where(all_valid, position, _INVALID_POSITION)
    tl.store(positions_ptr + token, position.to(tl.int32), mask=is_token)


@triton.jit
def _load(ptr, stride, index, mask):
    return tl.load(ptr + index.to(tl.int64) * stride, mask=mask, other=0).to(tl.int64)


def packed_positions(
    cu_seqlens: torch.Tensor, total_tokens: int, offsets: int | torch.Tensor, shard: Shard
) -> torch.Tensor:
    """The position of every token of packed sequences that one rank holds.

    Args:
        cu_seqlens: ``[n + 1]``, int32 or int64, any stride: the places where the unsharded sequences begin and end.
        total_tokens: the number of rows to fill, at least the rank's share of ``cu_seqlens[n]``.
        offsets: the position of the first token of every sequence, an int or ``[n]``, int32 or int64, any stride. The
            tokens of a sequence at ``NO_POSITION`` have no position.
        shard: the part of every sequence that the rank holds.

    Returns:
        int32 ``[total_tokens]``: ``NO_POSITION`` past the last sequence, ``INVALID_POSITION`` where the position
        exceeds int32. All positions are ``INVALID_POSITION`` if ``cu_seqlens`` does not start at 0, decreases, ends
        beyond the tokens or has a length that cannot be sharded. The kernel reads no memory outside of the tensors.
    """
    positions = torch.empty(total_tokens, dtype=torch.int32, device=cu_seqlens.device)
    if total_tokens == 0:
        return positions
    sequences, (block_tokens, block_sequences) = len(cu_seqlens) - 1, tile_of.POSITIONS
    per_sequence = isinstance(offsets, torch.Tensor)
    with torch.cuda.device_of(cu_seqlens):  # Triton launches on the current device
        _packed_positions_kernel[(triton.cdiv(total_tokens, block_tokens),)](
            positions, cu_seqlens, offsets if per_sequence else cu_seqlens,
            cu_seqlens.stride(0), offsets.stride(0) if isinstance(offsets, torch.Tensor) else 0,
            sequences, total_tokens, 0 if per_sequence else offsets, shard.cp_rank,
            sequences.bit_length(),  # the number of halvings for sequences + 1 candidates
            CP_SIZE=shard.cp_size, DUAL=shard.dual, OFFSETS=per_sequence,
            BLOCK_TOKENS=block_tokens, BLOCK_SEQUENCES=block_sequences,
        )  # fmt: skip
    return positions
