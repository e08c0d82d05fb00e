"""Find the position of every token of packed sequences, of the shards of context parallelism, and of both.

Under context parallelism every rank ``r`` holds the same share of every sequence:

- ``dual``: rank ``r`` holds the chunks ``r`` and ``2 * cp_size - 1 - r`` of ``2 * cp_size`` chunks (TransformerEngine,
  Megatron). One chunk is early and the other chunk is late, so all ranks have the same share of causal attention.
- ``contiguous``: rank ``r`` holds the chunk ``r`` of ``cp_size`` chunks.

RoPE needs no communication between the ranks, because the rotation of a token depends on its position alone.
`ropelab.positions` describes the way from a token to its position, and to a row of the tables.
"""

import torch

from ropelab.arguments import POSITION_DTYPES, check_tensor, choice, integer, tensor
from ropelab.arguments import device as usable
from ropelab.foreign import hinted
from ropelab.kernels import NO_POSITION, backend
from ropelab.kernels.positions_torch import Shard
from ropelab.kernels.rotation import INVALID_POSITION

CHUNKS = ("dual", "contiguous")
_POSITIONS = 2**31  # the number of positions, from 0 on, that int32 can hold


class PackedSequences:
    """Sequences that lie one after another along one axis of tokens (``thd``), or one rank's shards of the sequences.

    One small launch finds the positions of all tokens. All layers and the backward share the positions::

        packed = PackedSequences(cu_seqlens, total_tokens=len(q))
        q, k = apply_rope(q, k, cos=cos, sin=sin, seq_format="thd", positions=packed.positions)

    Args:
        cu_seqlens: ``[n + 1]``, int32 or int64: where the sequences begin and end in the unsharded tokens. The first
            element is 0, and no element is below the element before. Sequences may be empty, and ``n`` may be 0.
        total_tokens: the number of rows of this rank's ``q``, at least ``cu_seqlens[n] / cp_size``. The rows after the
            last sequence are padding.
        offsets: the position of the first token of every sequence, as with a KV cache: an int, or a tensor ``[n]`` of
            int32 or int64 on the device of ``cu_seqlens``. An offset may be negative or ``NO_POSITION``.
        cp_size, cp_rank: the number of ranks that share every sequence, and the number of this rank. A sequence takes
            ``1 / cp_size`` of its rows on the rank, and the order of the sequences stays.
        chunks: ``"dual"`` or ``"contiguous"``: how the ranks share a sequence. The length of every sequence must be
            divisible by ``2 * cp_size`` for ``"dual"`` and by ``cp_size`` for ``"contiguous"``. A single rank takes
            any length.

    Attributes:
        positions: int32 ``[total_tokens]`` on the device of ``cu_seqlens``, found at construction. Padding has
            ``NO_POSITION``, for which ``apply_rope`` writes zeros. `ropelab.positions` states the whole rule.

    Raises:
        TypeError, ValueError: the message names the argument. The contents of ``cu_seqlens`` and ``offsets`` are
            checked on the CPU only. For tensors on a GPU, `check` waits and checks the contents; without `check` wrong
            contents give positions without a row, for which ``apply_rope`` writes NaN.

    On a GPU the construction does not synchronize, and a CUDA graph can capture it. Every replay reads the tensors
    again and renews ``positions``.
    """

    @hinted
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
        """Check the contents of ``cu_seqlens`` and ``offsets``. The host waits for a GPU that holds them.

        Raises:
            ValueError: ``cu_seqlens`` does not start at 0, decreases, ends beyond the tokens or has a length that the
                ranks cannot share; or ``offsets`` lead to positions beyond int32.
        """
        cu = self.cu_seqlens.cpu().long()
        before, after = cu[:-1], cu[1:]
        if cu[0] != 0:
            raise ValueError(f"cu_seqlens: expected 0 as the first element, got {cu[0]}")
        if (i := _first(after < before)) is not None:
            got = f"{after[i]} after {before[i]} (element {i + 1})"
            raise ValueError(f"cu_seqlens: expected non-decreasing elements, got {got}")
        lengths = after - before
        if (i := _first(lengths % self._shard.num_chunks != 0)) is not None:
            expected = f"lengths divisible by {_divisor(self._shard)}"
            raise ValueError(f"cu_seqlens: expected {expected}, got {lengths[i]} (sequence {i})")
        if cu[-1] > self.total_tokens * self._shard.cp_size:
            tokens = f"total_tokens = {self.total_tokens}"
            if self._shard.cp_size > 1:
                tokens = f"total_tokens * cp_size = {self.total_tokens} * {self._shard.cp_size}"
            raise ValueError(f"cu_seqlens: expected a last element <= {tokens}, got {cu[-1]}")
        first = torch.as_tensor(self.offsets, device="cpu").long().expand_as(lengths)
        last = first + lengths - 1
        has_position = (lengths > 0) & (first != NO_POSITION)
        outside = (first <= INVALID_POSITION) | (last >= 2**31) | (last < first)  # the sum may have wrapped
        if (i := _first(has_position & outside)) is not None:
            got = f"{first[i]} for a length of {lengths[i]} (sequence {i})"
            expected = f"positions from {INVALID_POSITION + 1} to {2**31 - 1}"
            raise ValueError(f"offsets: expected {expected}, got {got}")

    def token_indices(self) -> torch.Tensor:
        """The indices of this rank's tokens among the unsharded tokens.

        Returns:
            int32 ``[total_tokens]``: ``x.index_select(0, indices)`` is the rank's shard of ``x``. Padding has
            ``NO_POSITION``, which is no valid index.
        """
        return self._positions(self.cu_seqlens[:-1])

    def _positions(self, offsets: int | torch.Tensor) -> torch.Tensor:
        packed_positions = backend("positions", self.cu_seqlens).packed_positions
        return packed_positions(self.cu_seqlens, self.total_tokens, offsets, self._shard)


@hinted
def context_parallel_positions(
    seq_len: int,
    cp_size: int,
    cp_rank: int,
    chunks: str = "dual",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The positions of one rank's tokens of dense sequences, for ``apply_rope(..., positions=...)``.

    Example: ``positions = context_parallel_positions(4096, cp_size=4, cp_rank=1)``.

    The positions are also indices: ``x.index_select(seq_axis, positions)`` is the rank's shard of ``x``.

    Args:
        seq_len: the length of the unsharded sequences. It must be divisible by ``2 * cp_size`` for ``"dual"`` chunks
            and by ``cp_size`` for ``"contiguous"`` chunks. A single rank takes any length.
        cp_size, cp_rank: the number of ranks that share every sequence, and the number of this rank.
        chunks: ``"dual"`` or ``"contiguous"``: how the ranks share a sequence.
        device: the device of the result, by default torch's default device.

    Returns:
        int32 ``[seq_len / cp_size]``.

    Raises:
        TypeError, ValueError: an argument has another type, is out of range or does not fit the others. The message
            names the argument.
    """
    shard = _checked_shard(cp_size, cp_rank, chunks)
    seq_len = integer("seq_len", seq_len, at_least=0)
    if seq_len % shard.num_chunks or seq_len > 2**31:
        raise ValueError(f"seq_len: expected a multiple of {_divisor(shard)}, at most 2**31, got {seq_len}")
    length = seq_len // shard.cp_size
    return shard.in_sequence(torch.arange(length, device=usable("device", device)), length).int()


def _checked_shard(cp_size: int, cp_rank: int, chunks: str) -> Shard:
    cp_size = integer("cp_size", cp_size, at_least=1, below=_POSITIONS)
    cp_rank = integer("cp_rank", cp_rank, at_least=0)
    if cp_rank >= cp_size:
        raise ValueError(f"cp_rank: expected a rank below cp_size = {cp_size}, got {cp_rank}")
    choice("chunks", chunks, CHUNKS)
    return Shard(cp_size, cp_rank, dual=chunks == "dual" and cp_size > 1)  # a single rank has both halves


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
