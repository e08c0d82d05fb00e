"""A case: one call of a function, in terms that do not depend on its calling convention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ropelab.kernels import NO_POSITION
from ropelab.positions.axes import mrope_axes


class NotApplicable(Exception):
    """A law or a case does not apply to a function; the message says why."""


class Broken(Exception):
    """A function breaks a law, and no comparison of numbers can show it; the message says how."""


class Noted(Exception):
    """A law does not hold, and yet no documented call has a wrong result; the message says what the function does."""


@dataclass(frozen=True)
class Sizes:
    """The extents of the tensors of a case. All defaults differ, so that no axis can pass for another."""

    batch: int = 3
    tokens: int = 5
    q_heads: int = 4
    k_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 12
    token_counts: tuple[int, ...] = (64, 1024, 10_240, 65_536)
    """Numbers of tokens beyond which a function may take another path; of no tensor of a case."""

    def smaller(self) -> Iterator[Sizes]:
        """Yield smaller sizes: each extent reduced, the smallest value first.

        The features of a head shrink together: heads that rotate as a whole still do, all others rotate by half.
        """
        for name in ("batch", "tokens", "q_heads", "k_heads"):
            size = getattr(self, name)
            yield from (replace(self, **{name: n}) for n in sorted({1, size // 2, size - 1}) if 0 < n < size)
        full = self.rotary_dim == self.head_dim
        for rotary_dim in (2, 4, 8):
            head_dim = rotary_dim if full else 2 * rotary_dim
            if head_dim < self.head_dim:
                yield replace(self, head_dim=head_dim, rotary_dim=rotary_dim)

    def __str__(self) -> str:
        extents = (field.name for field in fields(self) if field.name != "token_counts")
        return ", ".join(f"{name} {getattr(self, name)}" for name in extents)


@dataclass(frozen=True, eq=False)
class Case:
    """A call: the tensors to rotate, and the position of each token.

    Attributes:
        inputs: ``(x,)`` or ``(q, k)``, each ``[B, S, H, D]``, with the features in the declared layout. Packed
            documents form a single row, ``[1, T, H, D]``.
        rotary_dim: R; the first R features rotate.
        offsets: the position of the first token of all sequences, or a tuple with the position of the first token of
            each row or packed document.
        positions: int64 ``[S]`` or ``[B, S]``, in place of consecutive positions from ``offsets`` on; ``[axes, B, S]``
            with ``mrope_section``.
        mrope_section, mrope_interleaved: the pairs of each axis of M-RoPE, as for `ropelab.mrope_axes`.
        lengths: the number of tokens of each packed document, on all ranks together if the tokens are sharded. Tokens
            beyond their sum are padding.
        shard: ``(cp_size, cp_rank)`` of context parallelism: the tokens are the two chunks of every sequence that
            belong to the rank (see ``rank_positions``).
        inverse: whether to rotate by minus the angle.
        factor: the factor of cosines and sines, such as YaRN's attention factor.
        interpolation: the number that positions are divided by, such as FlashInfer's ``rope_scale``.
        spare_rows: the rows of the tables after the row of the last position.
        cotangents: a cotangent ``[B, S, H, D]`` for each output; empty unless a law asks for gradients.
    """

    inputs: tuple[torch.Tensor, ...]
    rotary_dim: int
    offsets: int | tuple[int, ...] = 0
    positions: torch.Tensor | None = None
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False
    lengths: tuple[int, ...] | None = None
    shard: tuple[int, int] | None = None
    inverse: bool = False
    factor: float = 1.0
    interpolation: float = 1.0
    spare_rows: int = 3
    cotangents: tuple[torch.Tensor, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The extents ``(B, S)`` of the inputs."""
        batch, tokens = self.inputs[0].shape[:2]
        return batch, tokens

    @property
    def axes(self) -> tuple[int, ...] | None:
        """The axis of positions that each pair reads, or None where a token has one position."""
        if self.mrope_section is None:
            return None
        return mrope_axes(self.mrope_section, mrope_interleaved=self.mrope_interleaved)

    def extra(self) -> dict[str, Any]:
        """Return what a message tells of the case besides the attributes above: name -> value."""
        return {}

    def shared_positions(self) -> torch.Tensor:
        """Return the positions that all rows share, int64 ``[S]`` on the CPU, even for a batch without rows."""
        return self.token_positions(batch=1)[0]

    def token_positions(self, batch: int | None = None) -> torch.Tensor:
        """Return the position of each token, int64 ``[B, S]`` on the CPU; ``NO_POSITION`` for padding.

        With several axes, this is the position along the first.
        """
        seq_len = self.shape[1]
        batch = self.shape[0] if batch is None else batch
        if self.positions is not None:
            positions = self.positions if self.axes is None else self.positions[0]
            return positions.cpu().long().expand(batch, seq_len)
        size, rank = self.shard or (1, 0)
        if self.lengths is None:
            starts = torch.tensor(self.offsets).expand(batch)
            return starts[:, None] + rank_positions(seq_len * size, size, rank)
        offsets = self.offsets if isinstance(self.offsets, tuple) else (self.offsets,) * len(self.lengths)
        documents = [rank_positions(n, size, rank) + start for n, start in zip(self.lengths, offsets, strict=True)]
        used = sum(map(len, documents))
        return torch.cat((*documents, torch.full((seq_len - used,), NO_POSITION)))[None]

    def pair_positions(self) -> torch.Tensor:
        """Return the position that each pair reads, int64 ``[B, S, 1]``, or ``[B, S, R/2]`` with several axes."""
        if self.axes is None or self.positions is None:
            return self.token_positions()[..., None]
        return self.positions.cpu().long()[list(self.axes)].movedim(0, -1)

    def needs(self) -> Iterator[str]:
        """Yield the capabilities that a convention needs to express the case, as keys of ``CANNOT``."""
        if self.inverse:
            yield "inverse"
        if self.factor != 1:
            yield "factor"
        if self.interpolation != 1:
            yield "interpolation"
        if self.positions is not None:
            single = "positions" if self.positions.ndim == 1 else "positions per batch"
            yield single if self.axes is None else "axes"
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
    "inverse": "it has no inverse rotation",
    "factor": "it takes no cosines and sines that a factor could scale",
    "interpolation": "it takes no number that positions are divided by",
    "positions": "its tokens have consecutive positions",
    "positions per batch": "all rows of a batch share their positions",
    "axes": "its tokens have one position each",
    "packed": "it knows no packed documents",
    "offsets per sequence": "all its sequences start at the same position",
    "offset": "its tokens have the positions 0, 1, 2, ...",
    "shards": "it knows no context parallelism",
    "padding": "it has no tokens without a position",
    "negative": "it has no negative positions",
}
"""Capability -> why a convention without it cannot express a case."""


def rank_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Return the positions of a rank's tokens: chunks ``rank`` and ``2 size - 1 - rank`` of ``2 size`` chunks.

    Args:
        length: the number of tokens of the sequence on all ranks.
        size: the number of ranks; 1 gives all positions.
        rank: from 0 to ``size - 1``.

    Returns:
        int64 ``[length / size]`` on the CPU.
    """
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * size) if length else [torch.arange(0)] * 2 * size
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))
