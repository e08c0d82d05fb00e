"""Compute the position of every token of packed sequences in torch operations, on any device.

The results are the same as in `positions_triton`. See `ropelab.positions`.
"""

from typing import NamedTuple

import torch

from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION


class Shard(NamedTuple):
    """The part of every sequence that rank ``cp_rank`` of ``cp_size`` ranks holds: chunk ``cp_rank`` of ``cp_size``.

    With ``dual``, the rank holds the chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` of ``2 * cp_size``: an early
    chunk and a late chunk, so that all ranks have the same share of causal attention.
    """

    cp_size: int = 1
    cp_rank: int = 0
    dual: bool = False

    @property
    def num_chunks(self) -> int:
        """The number of chunks of a sequence. The length of the sequence must be a multiple of this number."""
        return self.cp_size * (2 if self.dual else 1)

    def in_sequence(self, local: torch.Tensor, length: torch.Tensor | int) -> torch.Tensor:
        """The number of a token in its whole sequence.

        Args:
            local: the number of the token among the tokens of the sequence that the rank holds.
            length: the number of tokens of the sequence that the rank holds.
        """
        if not self.dual:
            return self.cp_rank * length + local
        half = length // 2
        # The number of chunks of other ranks that precede the token's chunk.
        skipped = torch.where(local < half, self.cp_rank, 2 * self.cp_size - 2 - self.cp_rank)
        return skipped * half + local


def packed_positions(
    cu_seqlens: torch.Tensor, total_tokens: int, offsets: int | torch.Tensor, shard: Shard
) -> torch.Tensor:
    """The position of every token that one rank holds, int32 ``[total_tokens]``.

    The arguments and the results are as in `positions_triton.packed_positions`.
    """
    cu = cu_seqlens.long().contiguous()
    sequences = len(cu) - 1
    token = torch.arange(total_tokens, device=cu.device)
    # The last sequence that starts at the token or before it, so never an empty sequence; `sequences` past the end.
    sequence = torch.searchsorted(cu, token * shard.cp_size, right=True) - 1
    start, end = cu[sequence], cu[(sequence + 1).clamp(max=sequences)]
    in_sequence = shard.in_sequence(token - start // shard.cp_size, (end - start) // shard.cp_size)

    offset = torch.as_tensor(offsets, device=cu.device).long().expand(sequences)
    offset = torch.nn.functional.pad(offset, (0, 1), value=NO_POSITION)[sequence]
    position = offset + in_sequence
    in_range = (position > INVALID_POSITION) & (position < 2**31)
    position = position.where(in_range, INVALID_POSITION).where(offset != NO_POSITION, NO_POSITION)

    is_valid = (cu[0] == 0) & (cu[-1] <= total_tokens * shard.cp_size)
    is_valid = is_valid & ((cu[:-1] <= cu[1:]) & (cu[1:] % shard.num_chunks == 0)).all()
    return position.where(is_valid, INVALID_POSITION).int()
