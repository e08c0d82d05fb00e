"""Which two features form a pair, and the permutation between the two answers.

RoPE rotates `rotary_dim / 2` planes. Two conventions name the axes of plane ``i``:

- ``split_half`` (GPT-NeoX, Llama in Hugging Face): features ``(i, i + rotary_dim/2)``
- ``interleaved`` (GPT-J, Llama as published by Meta): features ``(2i, 2i + 1)``

Both describe the same rotation after a fixed reordering of the features (``permutation``).
"""

from typing import TypeVar

import numpy as np
import torch

from ropelab.arguments import choice, integer

LAYOUTS = ("split_half", "interleaved")
MOST_FEATURES = 2**31
"""More than any head has, and few enough to count in 32 bits."""

Array = TypeVar("Array", torch.Tensor, np.ndarray)


def check_layout(layout: str, name: str = "layout") -> None:
    """Raise TypeError or ValueError unless ``layout`` is one of ``LAYOUTS``."""
    choice(name, layout, LAYOUTS)


def check_rotary_dim(rotary_dim: int, name: str = "rotary_dim") -> int:
    """``rotary_dim`` as an int; TypeError or ValueError unless it is positive and even: features rotate in pairs."""
    found = integer(name, rotary_dim, below=MOST_FEATURES)
    if found < 2 or found % 2:
        raise ValueError(f"{name}: expected a positive even number, got {rotary_dim}")
    return found


def pairs(x: Array, layout: str) -> tuple[Array, Array]:
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
    """Index ``p`` (int64 ``[rotary_dim]``, always on the CPU) with ``x_target = x_source[..., p]``.

    As a matrix ``P[i, p[i]] = 1`` it conjugates one rotation into the other:
    ``R_target = P R_source P^T``. Reordering q and k alike leaves every score ``q . k`` unchanged.

    Raises:
        TypeError, ValueError: unknown layout, or ``rotary_dim`` not a positive even integer.
    """
    check_layout(source, "source")
    check_layout(target, "target")
    x0, x1 = pairs(torch.arange(check_rotary_dim(rotary_dim), device="cpu"), source)
    return join(x0, x1, target)
