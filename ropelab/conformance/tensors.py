"""Copy tensors into memory of a given arrangement."""

from __future__ import annotations

import torch

from ropelab.layout.seq_format import from_bshd

Tensors = tuple[torch.Tensor, ...]


def copied(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of ``x``, gaps included; an expanded axis stays expanded. Differentiable."""
    kept = unexpanded(x)
    memory = torch.empty_strided(kept.shape, kept.stride(), dtype=x.dtype, device=x.device)
    return memory.copy_(kept).expand(x.shape)


def unexpanded(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with length 1 along each expanded axis, so that no two elements share memory."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def contiguous_as(x: torch.Tensor, seq_format: str) -> torch.Tensor:
    """Return a copy of ``x [B, S, H, D]``, of the same shape, whose memory is contiguous in ``seq_format``.

    For the format ``"thd"`` of packed documents ``x`` is a single row ``[1, T, H, D]``.
    """
    if seq_format == "thd":
        return x.clone(memory_format=torch.contiguous_format)
    # ``contiguous`` would keep the old stride of an axis of size 1; ``clone`` does not. Each swap is its own inverse.
    return from_bshd(from_bshd(x, seq_format).clone(memory_format=torch.contiguous_format), seq_format)
