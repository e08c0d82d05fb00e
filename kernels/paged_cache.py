"""This file describes a rotation that also writes into a paged cache, for both backends.

Slot ``s`` of a cache of blocks is the place ``s % block_size`` of block ``s // block_size``.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ropelab.kernels import qk_norm_torch, rotate_torch


class Tensors(NamedTuple):
    """The tensors that a call reads and writes.

    Attributes:
        q, k, v: ``[B, S, Hq, D]``, ``[B, S, Hk, D]`` and ``[B, S, Hk, Dv]``, of one dtype.
        q_out: as ``q``, or of an 8-bit float; may be ``q``.
        k_out, v_out: as ``k`` and ``v``, or None; they may be ``k`` and ``v``.
        q_nope, q_nope_out: ``[B, S, Hq, N]`` in the dtypes of ``q`` and ``q_out``, features of q that do not rotate; or
            both None.
        k_cache, v_cache: ``[blocks, block_size, Hk, D]`` and ``[blocks, block_size, Hk, Dv]``.
        slots: ``[N]`` of int32 or int64 with ``N <= B S``: the slots of the first N tokens, sequence after sequence.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_out: torch.Tensor
    k_out: torch.Tensor | None
    v_out: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    q_nope: torch.Tensor | None = None
    q_nope_out: torch.Tensor | None = None

    @property
    def destinations(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors that may hold 8-bit floats."""
        return self.q_out, self.k_cache, self.v_cache

    @property
    def nope(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``q_nope`` and ``q_nope_out``, or None."""
        return None if self.q_nope is None or self.q_nope_out is None else (self.q_nope, self.q_nope_out)

    def with_readable_inputs(self, readable: Callable[[torch.Tensor], torch.Tensor]) -> "Tensors":
        """These tensors with the inputs that ``readable`` returns."""
        q_nope = None if self.q_nope is None else readable(self.q_nope)
        return self._replace(q=readable(self.q), k=readable(self.k), v=readable(self.v), q_nope=q_nope)

    def batches(self, part: slice, seq_len: int) -> "Tensors":
        """The tensors of some of the batches."""
        found = {name: x[part] for name in _PER_TOKEN if (x := getattr(self, name)) is not None}
        return self._replace(**found, slots=self.slots[part.start * seq_len : part.stop * seq_len])


_PER_TOKEN = ("q", "k", "v", "q_out", "k_out", "v_out", "q_nope", "q_nope_out")


class Norm(NamedTuple):
    """The RMS norm of q and k.

    Attributes:
        q_weight, k_weight: ``[D]`` for a norm of every head, or ``[Hq D]`` and ``[Hk D]`` for a norm of every token.
        eps: the number that is added to the mean of the squares.
        weight_offset: the number that is added to the weights.
        first: normalize before the rotation, otherwise after it.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    weight_offset: float
    first: bool = True

    def across_heads(self, head_dim: int) -> bool:
        """Whether all heads of a token share a mean of the squares."""
        return {len(self.q_weight), len(self.k_weight)} != {head_dim}


class Scales(NamedTuple):
    """The scales of 8-bit floats in q, the key cache and the value cache: float32 ``[1]`` or ``[heads]``, or None."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None


def compute_dtype(q: torch.Tensor, cos: torch.Tensor, norm: Norm | None) -> torch.dtype:
    """The dtype of the arithmetic: at least float32, and no narrower than the input, the tables or the weights."""
    if norm is None:
        return rotate_torch.compute_dtype(q, cos)
    return qk_norm_torch.compute_dtype(q, cos, (norm.q_weight, norm.k_weight))
