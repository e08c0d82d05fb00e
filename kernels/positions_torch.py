"""The position of every token of packed sequences in torch operations: any device, same results as the kernel."""

from typing import NamedTuple

import torch

from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION


class Shard(NamedTuple):
    """What one rank of ``cp_size`` holds of every sequence: chunk ``cp_rank`` of ``cp_size``.

    With ``dual``, chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` of ``2 * cp_size``: an early and a late one,
    so that all ranks have the same share of causal attention.
    """

    cp_size: int = 1
    cp_rank: int = 0
    dual: bool = False

    @property
    def num_chunks(self) -> int:
        """The number of chunks that a sequence is cut into, which must divide its length."""
        return self.cp_size * (2 if self.dual else 1)

    def place(self, local: torch.Tensor, length: torch.Tensor | int) -> torch.Tensor:
        """The place in its sequence of a token at place ``local`` of the ``length`` tokens that the rank has of it."""
        if not self.dual:
            return self.cp_rank * length + local
        half = length // 2
        # The chunks of other ranks that come before the token's.
        skipped = torch.where(local < half, self.cp_rank, 2 * self.cp_size - 2 - self.cp_rank)
        return skipped * half + local


def packed_positions(
    cu_seqlens: torch.Tensor, total_tokens: int, offsets: int | torch.Tensor, shard: Shard
) -> torch.Tensor:
    """int32 ``[total_tokens]``; arguments and results as for ``positions_triton.packed_positions``."""
    cu = cu_seqlens.long().contiguous()
    sequences = len(cu) - 1
    token = torch.arange(total_tokens, device=cu.device)
    # The last sequence that starts at the token or before, so never an empty one; `sequences` past the end.
    sequence = torch.searchsorted(cu, token * shard.cp_size, right=True) - 1
    start, end = cu[sequence], cu[(sequence + 1).clamp(max=sequences)]
    place = shard.place(token - start // shard.cp_size, (end - start) // shard.cp_size)

    offset = torch.as_tensor(offsets, device=cu.device).long().expand(sequences)
    offset = torch.nn.functional.pad(offset, (0, 1), value=NO_POSITION)[sequence]
    position = offset + place
    in_range = (position > INVALID_POSITION) & (position < 2**31)
    position = position.where(in_range, INVALID_POSITION).where(offset != NO_POSITION, NO_POSITION)

    is_valid = (cu[0] == 0) & (cu[-1] <= total_tokens * shard.cp_size)
    is_valid = is_valid & ((cu[:-1] <= cu[1:]) & (cu[1:] % shard.num_chunks == 0)).all()
    return position.where(is_valid, INVALID_POSITION).int()
