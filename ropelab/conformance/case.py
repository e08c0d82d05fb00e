"""One question to an implementation, in terms that every calling convention can be translated from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from ropelab.kernels import NO_POSITION


class NotApplicable(Exception):
    """The convention, or what was declared of the function, has no way to ask this; the message says why."""


class Broken(Exception):
    """A law is broken in a way that no number measures; the message says how."""


@dataclass(frozen=True)
class Sizes:
    """Extents of the tensors of a case. All differ by default, so that no axis can pass for another."""

    batch: int = 3
    tokens: int = 5
    q_heads: int = 4
    k_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 12

    def smaller(self) -> Iterator[Sizes]:
        """Sizes with one extent reduced, the smallest first; features stay as partial or full as they are."""
        for name in ("batch", "tokens", "q_heads", "k_heads"):
            size = getattr(self, name)
            yield from (replace(self, **{name: n}) for n in sorted({1, size // 2, size - 1}) if 0 < n < size)
        full = self.rotary_dim == self.head_dim
        for rotary_dim in (2, 4, 8):
            head_dim = rotary_dim if full else 2 * rotary_dim
            if head_dim < self.head_dim:
                yield replace(self, head_dim=head_dim, rotary_dim=rotary_dim)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


@dataclass(frozen=True, eq=False)
class Case:
    """What is to be rotated, and where each token stands.

    Attributes:
        inputs: ``(x,)`` or ``(q, k)``, each ``[B, S, H, D]``, features in the declared layout. Packed documents are
            one row, ``[1, T, H, D]``.
        rotary_dim: the first R features rotate.
        offsets: position of the first token; one for each row or packed document if a tuple.
        positions: int64 ``[S]`` or ``[B, S]``, instead of consecutive ones.
        lengths: of packed documents (all ranks' tokens, if sharded). Tokens beyond their sum are padding.
        shard: ``(cp_size, cp_rank)``: the tokens are this rank's two chunks of every sequence.
        inverse: rotate by minus the angle.
        factor: what cosines and sines are multiplied by (YaRN's attention factor).
        cotangents: of the outputs, ``[B, S, H, D]`` each, for laws of gradients; none for the others.
    """

    inputs: tuple[torch.Tensor, ...]
    rotary_dim: int
    offsets: int | tuple[int, ...] = 0
    positions: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None
    shard: tuple[int, int] | None = None
    inverse: bool = False
    factor: float = 1.0
    cotangents: tuple[torch.Tensor, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """``(B, S)``."""
        batch, tokens = self.inputs[0].shape[:2]
        return batch, tokens

    def shared_positions(self) -> torch.Tensor:
        """int64 ``[S]``: of one row, where all have the same, and also where there is none."""
        return self.token_positions(batch=1)[0]

    def token_positions(self, batch: int | None = None) -> torch.Tensor:
        """int64 ``[B, S]`` on the CPU; padding has ``NO_POSITION``."""
        seq_len = self.shape[1]
        batch = self.shape[0] if batch is None else batch
        if self.positions is not None:
            return self.positions.cpu().long().expand(batch, seq_len)
        size, rank = self.shard or (1, 0)
        if self.lengths is None:
            starts = torch.tensor(self.offsets).expand(batch)
            return starts[:, None] + rank_positions(seq_len * size, size, rank)
        offsets = self.offsets if isinstance(self.offsets, tuple) else (self.offsets,) * len(self.lengths)
        documents = [rank_positions(n, size, rank) + start for n, start in zip(self.lengths, offsets, strict=True)]
        used = sum(map(len, documents))
        return torch.cat((*documents, torch.full((seq_len - used,), NO_POSITION)))[None]

    def needs(self) -> Iterator[str]:
        """What a convention must be able to express, as keys of ``CANNOT``."""
        if self.inverse:
            yield "inverse"
        if self.factor != 1:
            yield "factor"
        if self.positions is not None:
            yield "positions" if self.positions.ndim == 1 else "positions per batch"
        if self.lengths is not None:
            yield "packed"
        if isinstance(self.offsets, tuple):
            yield "offsets per sequence"
        elif self.offsets:
            yield "offset"
        if self.shard is not None:
            yield "shards"
        positions = self.token_positions()
        padding = positions == NO_POSITION
        if padding.any():
            yield "padding"
        if (positions[~padding] < 0).any():
            yield "negative"


CANNOT = {
    "inverse": "it cannot be asked for the inverse",
    "factor": "it takes no cosines and sines, which a factor could scale",
    "positions": "its tokens stand one after another",
    "positions per batch": "all rows of a batch share their positions",
    "packed": "it knows no packed documents",
    "offsets per sequence": "its sequences cannot start at positions of their own",
    "offset": "its tokens stand at 0, 1, 2, ...",
    "shards": "it knows no context parallelism",
    "padding": "it has no tokens without a position",
    "negative": "it has no negative positions",
}
"""Capability -> why a convention without it cannot express a case."""


def rank_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Positions of a rank's tokens: chunks ``rank`` and ``2 size - 1 - rank`` of ``2 size``."""
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * size) if length else [torch.arange(0)] * 2 * size
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))
