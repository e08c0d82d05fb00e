"""How many tokens are cut into sequences: the document's two ways, skewed ones, ones with empty sequences."""

from dataclasses import dataclass

import torch

TOKENS = 65536
"""Of all ranks together, as in the document."""
N_SEQS = (1, 8, 32, 128, 512, 1024, 2401)
"""Of table B; table A has 128 of them and more."""


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
        """int64 ``[T / cp_size]``, of a rank's tokens: chunks ``r`` and ``2 cp_size - 1 - r`` of every sequence."""
        pieces = []
        for length in self.lengths:
            chunks = torch.arange(length).reshape(2 * cp_size, -1) if cp_size > 1 else torch.arange(length)[None]
            pieces += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]] if cp_size > 1 else [chunks[0]]
        return torch.cat(pieces)

    def cu_seqlens(self, device: torch.device | str) -> torch.Tensor:
        """int32 ``[n + 1]``."""
        return torch.tensor((0, *self.lengths), device=device).cumsum(0, dtype=torch.int32)


def remainder_last(n: int, tokens: int = TOKENS, multiple: int = 2) -> Packing:
    """Sequences of one even length, and what is left over added to the last, as in table B (2400 x 26 + 3136)."""
    each = tokens // n // multiple * multiple
    return Packing("remainder last", (*[each] * (n - 1), tokens - each * (n - 1)))


def balanced(n: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """Lengths that differ by at most ``multiple``, as in table A."""
    each, longer = divmod(tokens // multiple, n)
    return Packing("balanced", (*[(each + 1) * multiple] * longer, *[each * multiple] * (n - longer)))


def skewed(n: int, longest: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """One long sequence, then ``n - 1`` balanced ones."""
    return Packing("skewed", (longest, *balanced(n - 1, tokens - longest, multiple).lengths))


def with_empty(n: int, tokens: int = TOKENS, multiple: int = 1) -> Packing:
    """Every other sequence is empty, the first one too; the others are balanced."""
    full = iter(balanced(n // 2, tokens, multiple).lengths)
    return Packing("every other empty", tuple(next(full) if i % 2 and i < 2 * (n // 2) else 0 for i in range(n)))
