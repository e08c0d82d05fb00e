"""The ways to cut tokens into sequences: the document's two ways, skewed lengths, and empty sequences."""

from dataclasses import dataclass

import torch

TOKENS = 65536
"""The tokens of all ranks together, as in the document."""
N_SEQS = (1, 8, 32, 128, 512, 1024, 2401)
"""The numbers of sequences in table B. Table A has the numbers from 128 on."""


@dataclass(frozen=True)
class Packing:
    """Sequences of these lengths, not sharded; ``kind`` says how they were made."""

    kind: str
    lengths: tuple[int, ...]

    @property
    def n_seqs(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def positions(self, cp_size: int = 1, cp_rank: int = 0) -> torch.Tensor:
        """The positions of a rank's tokens, int64 ``[T / cp_size]``.

        Rank ``r`` has the chunks ``r`` and ``2 cp_size - 1 - r`` of every sequence.
        """
        pieces = []
        for length in self.lengths:
            chunks = torch.arange(length).reshape(2 * cp_size, -1) if cp_size > 1 else torch.arange(length)[None]
            pieces += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]] if cp_size > 1 else [chunks[0]]
        return torch.cat(pieces)

    def cu_seqlens(self, device: torch.device | str) -> torch.Tensor:
        """The offsets of the sequences, int32 ``[n + 1]``."""
        return torch.tensor((0, *self.lengths), device=device).cumsum(0, dtype=torch.int32)


def remainder_last(n: int, tokens: int = TOKENS, multiple: int = 2) -> Packing:
    """Sequences of one even length; the last also takes the remainder, as in table B (2400 x 26 + 3136)."""
    each = tokens // n // multiple * multiple
    return Packing("remainder last", (*[each] * (n - 1), tokens - each * (n - 1)))


def balanced(n: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """Sequences whose lengths differ by at most ``multiple``, as in table A."""
    each, longer = divmod(tokens // multiple, n)
    return Packing("balanced", (*[(each + 1) * multiple] * longer, *[each * multiple] * (n - longer)))


def skewed(n: int, longest: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """One long sequence, then ``n - 1`` balanced sequences."""
    return Packing("skewed", (longest, *balanced(n - 1, tokens - longest, multiple).lengths))


def with_empty(n: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """Sequences of which every other is empty, beginning with the first; the others are balanced."""
    full = iter(balanced(n // 2, tokens, multiple).lengths)
    return Packing("every other empty", tuple(next(full) if i % 2 and i < 2 * (n // 2) else 0 for i in range(n)))
