"""Which position each token has: packed sequences, context parallelism, and both.

Under context parallelism every rank holds the same share of every sequence:

- ``dual``: chunks ``r`` and ``2 * cp_size - 1 - r`` of ``2 * cp_size`` (TransformerEngine, Megatron), an early and a
  late one, so that all ranks have the same share of causal attention
- ``contiguous``: chunk ``r`` of ``cp_size``

RoPE needs no communication for that: a token's rotation depends on its position alone.
"""

import torch

from ropelab.arguments import POSITION_DTYPES, check_tensor, choice, integer, tensor
from ropelab.arguments import device as usable
from ropelab.kernels import NO_POSITION, backend
from ropelab.kernels.positions_torch import Shard
from ropelab.kernels.rotation import INVALID_POSITION

CHUNKS = ("dual", "contiguous")
_POSITIONS = 2**31  # of int32, from 0 on


class PackedSequences:
    """Sequences one after another along one axis of tokens (``thd``), or one rank's shards of them.

    One small launch finds the position of every token; all layers and the backward share it::

        packed = PackedSequences(cu_seqlens, total_tokens=len(q))
        q, k = apply_rope(q, k, cos=cos, sin=sin, seq_format="thd", positions=packed.positions)

    Args:
        cu_seqlens: ``[n + 1]``, int32 or int64: where the sequences begin and end in the unsharded tokens; 0 first,
            never decreasing. Sequences may be empty, and ``n`` may be 0.
        total_tokens: rows of this rank's ``q``, at least ``cu_seqlens[n] / cp_size``; the rest is padding.
        offsets: position of the first token of the sequences, as with a KV cache: an int, or ``[n]`` int32 or int64
            on the device of ``cu_seqlens``. Also negative; at ``NO_POSITION`` no token of the sequence has one.
        cp_size, cp_rank: ranks that share every sequence, and which one this is. On the rank a sequence takes
            ``1 / cp_size`` of its rows, in the same order of sequences.
        chunks: ``"dual"`` or ``"contiguous"``: how they share it. The length of every sequence must be divisible by
            ``2 * cp_size`` or ``cp_size`` (with one rank by 1).

    Attributes:
        positions: int32 ``[total_tokens]`` on the device of ``cu_seqlens``, as it was at construction. Padding has
            ``NO_POSITION``, for which ``apply_rope`` writes zeros.

    Raises:
        TypeError, ValueError: as the message says. What needs the contents of CPU tensors is checked as well; on a
            GPU that would have to wait for it, so only ``check`` does. Without it contents that ``check`` refuses
            give positions that no table has, for which ``apply_rope`` writes NaN: all of them for a wrong
            ``cu_seqlens``, those beyond int32 for wrong ``offsets``. Nothing out of bounds is read.

    On a GPU the construction does not synchronize and can be captured in a CUDA graph: replays read the tensors
    again and renew ``positions``.
    """

    def __init__(
        self,
        cu_seqlens: torch.Tensor,
        total_tokens: int,
        *,
        offsets: int | torch.Tensor = 0,
        cp_size: int = 1,
        cp_rank: int = 0,
        chunks: str = "dual",
    ):
        self._shard = _checked_shard(cp_size, cp_rank, chunks)
        check_tensor("cu_seqlens", tensor("cu_seqlens", cu_seqlens), (1,), "[sequences + 1]", POSITION_DTYPES)
        if not len(cu_seqlens):
            raise ValueError("cu_seqlens: expected shape [sequences + 1], at least one element, got (0,)")
        total_tokens = integer("total_tokens", total_tokens, at_least=0, below=_POSITIONS)
        offsets = _checked_offsets(offsets, cu_seqlens)
        self.cu_seqlens, self.total_tokens, self.offsets = cu_seqlens, total_tokens, offsets
        if cu_seqlens.device.type == "cpu":
            self.check()
        self.positions = self._positions(offsets)

    def check(self) -> None:
        """Check the contents of ``cu_seqlens`` and ``offsets``, which waits for the GPU that they are on.

        Raises:
            ValueError: ``cu_seqlens`` does not start at 0, decreases, ends beyond the tokens or has a length that
                cannot be sharded; or ``offsets`` lead to positions beyond int32.
        """
        cu = self.cu_seqlens.cpu().long()
        before, after = cu[:-1], cu[1:]
        if cu[0] != 0:
            raise ValueError(f"cu_seqlens: expected 0 first, got {cu[0]}")
        if (i := _first(after < before)) is not None:
            raise ValueError(f"cu_seqlens: expected no decrease, got {after[i]} after {before[i]} (element {i + 1})")
        lengths = after - before
        if (i := _first(lengths % self._shard.num_chunks != 0)) is not None:
            expected = f"lengths divisible by {_divisor(self._shard)}"
            raise ValueError(f"cu_seqlens: expected {expected}, got {lengths[i]} (sequence {i})")
        if cu[-1] > self.total_tokens * self._shard.cp_size:
            tokens = f"total_tokens = {self.total_tokens}"
            if self._shard.cp_size > 1:
                tokens = f"total_tokens * cp_size = {self.total_tokens} * {self._shard.cp_size}"
            raise ValueError(f"cu_seqlens: expected at most {tokens} last, got {cu[-1]}")
        first = torch.as_tensor(self.offsets, device="cpu").long().expand_as(lengths)
        last = first + lengths - 1
        has_position = (lengths > 0) & (first != NO_POSITION)
        outside = (first <= INVALID_POSITION) | (last >= 2**31) | (last < first)  # the sum may have wrapped
        if (i := _first(has_position & outside)) is not None:
            got = f"{first[i]} for a length of {lengths[i]} (sequence {i})"
            raise ValueError(f"offsets: expected positions within int32, got {got}")

    def token_indices(self) -> torch.Tensor:
        """Where this rank's tokens are in the unsharded ones: ``x.index_select(0, indices)`` is the shard of ``x``.

        Returns:
            int32 ``[total_tokens]``; padding has ``NO_POSITION``, which no tensor can be indexed with.
        """
        return self._positions(self.cu_seqlens[:-1])

    def _positions(self, offsets: int | torch.Tensor) -> torch.Tensor:
        packed_positions = backend("positions", self.cu_seqlens).packed_positions
        return packed_positions(self.cu_seqlens, self.total_tokens, offsets, self._shard)


def context_parallel_positions(
    seq_len: int,
    cp_size: int,
    cp_rank: int,
    chunks: str = "dual",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The positions of one rank's tokens of dense sequences, for ``apply_rope(..., positions=...)``.

    They also index the tokens: ``x.index_select(seq_axis, positions)`` is the rank's shard of ``x``.

    Args:
        seq_len: of the unsharded sequences, divisible by ``2 * cp_size`` for ``"dual"`` chunks and by ``cp_size`` for
            ``"contiguous"`` ones (with one rank by 1).
        cp_size, cp_rank: ranks that share every sequence, and which one this is.
        chunks: ``"dual"`` or ``"contiguous"``: how they share it.
        device: of the result, by default torch's default device.

    Returns:
        int32 ``[seq_len / cp_size]``.

    Raises:
        TypeError, ValueError: as the message says.
    """
    shard = _checked_shard(cp_size, cp_rank, chunks)
    seq_len = integer("seq_len", seq_len, at_least=0)
    if seq_len % shard.num_chunks or seq_len > 2**31:
        raise ValueError(f"seq_len: expected a multiple of {_divisor(shard)}, at most 2**31, got {seq_len}")
    length = seq_len // shard.cp_size
    return shard.place(torch.arange(length, device=usable("device", device)), length).int()


def _checked_shard(cp_size: int, cp_rank: int, chunks: str) -> Shard:
    cp_size = integer("cp_size", cp_size, at_least=1, below=_POSITIONS)
    cp_rank = integer("cp_rank", cp_rank, at_least=0)
    if cp_rank >= cp_size:
        raise ValueError(f"cp_rank: expected a rank below cp_size = {cp_size}, got {cp_rank}")
    choice("chunks", chunks, CHUNKS)
    return Shard(cp_size, cp_rank, dual=chunks == "dual" and cp_size > 1)  # one rank has both halves


def _divisor(shard: Shard) -> str:
    return f"{'2 * ' if shard.dual else ''}cp_size = {shard.num_chunks}"


def _checked_offsets(offsets: int | torch.Tensor, cu_seqlens: torch.Tensor) -> int | torch.Tensor:
    if not isinstance(offsets, torch.Tensor):
        return integer("offsets", offsets, at_least=-_POSITIONS, below=_POSITIONS)
    sequences = len(cu_seqlens) - 1
    check_tensor("offsets", tensor("offsets", offsets), (1,), f"({sequences},), one for each sequence", POSITION_DTYPES)
    if len(offsets) != sequences:
        raise ValueError(f"offsets: expected shape ({sequences},), one for each sequence, got {tuple(offsets.shape)}")
    if offsets.device != cu_seqlens.device:
        raise ValueError(f"offsets: expected cu_seqlens' device {cu_seqlens.device}, got {offsets.device}")
    return offsets


def _first(found: torch.Tensor) -> int | None:
    """The index of the first true element."""
    return int(found.int().argmax()) if found.any() else None
