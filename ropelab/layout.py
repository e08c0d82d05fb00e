"""Which two features form a pair, and the permutation between the two answers.

RoPE rotates `rotary_dim / 2` planes. Two conventions name the axes of plane ``i``:

- ``split_half`` (GPT-NeoX, Llama in Hugging Face): features ``(i, i + rotary_dim/2)``
- ``interleaved`` (GPT-J, Llama as published by Meta): features ``(2i, 2i + 1)``

Both describe the same rotation after a fixed reordering of the features (``permutation``).
"""

import torch

LAYOUTS = ("split_half", "interleaved")


def check_layout(layout: str, name: str = "layout") -> None:
    """Raise ValueError unless ``layout`` is one of ``LAYOUTS``."""
    if layout not in LAYOUTS:
        raise ValueError(f"{name}: expected one of {LAYOUTS}, got {layout!r}")


def check_rotary_dim(rotary_dim: int) -> None:
    """Raise ValueError unless ``rotary_dim`` is a positive even integer: features rotate in pairs."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected a positive even number, got {rotary_dim}")


def pairs(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``(x0, x1)`` of the first and second member of every pair.

    Args:
        x: ``[..., rotary_dim]``, any dtype and strides, rotary_dim even.
        layout: ``"split_half"`` or ``"interleaved"``.

    Returns:
        Two views ``[..., rotary_dim/2]``; writing to them writes to ``x``.

    Raises:
        ValueError: unknown layout, or an odd last dimension.
    """
    check_layout(layout)
    check_rotary_dim(x.shape[-1])
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def join(x0: torch.Tensor, x1: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of ``pairs``: ``[..., rotary_dim/2]`` twice -> a new ``[..., rotary_dim]``."""
    check_layout(layout)
    if layout == "interleaved":
        return torch.stack((x0, x1), dim=-1).flatten(-2)
    return torch.cat((x0, x1), dim=-1)


def permutation(rotary_dim: int, source: str, target: str) -> torch.Tensor:
    """Index ``p`` (int64 ``[rotary_dim]``) with ``x_target = x_source[..., p]``.

    As a matrix ``P[i, p[i]] = 1`` it conjugates one rotation into the other:
    ``R_target = P R_source P^T``. Reordering q and k alike leaves every score ``q . k`` unchanged.

    Raises:
        ValueError: unknown layout, or ``rotary_dim`` not a positive even number.
    """
    check_rotary_dim(rotary_dim)
    x0, x1 = pairs(torch.arange(rotary_dim), source)
    return join(x0, x1, target)
