"""The two features that form a pair, and the permutation between the two layouts.

RoPE rotates ``rotary_dim / 2`` planes, each spanned by a pair of features. A layout names the two features of plane
``i``:

- ``split_half`` (GPT-NeoX, Llama in Hugging Face): features ``(i, i + rotary_dim/2)``
- ``interleaved`` (GPT-J, Llama as published by Meta): features ``(2i, 2i + 1)``

Both layouts describe the same rotation after a fixed reordering of the features (`permutation`).
"""

from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, get_args

import torch

from ropelab.arguments import choice, integer

if TYPE_CHECKING:
    import numpy

Layout: TypeAlias = Literal["split_half", "interleaved"]
LAYOUTS = get_args(Layout)
MOST_FEATURES = 2**31
"""The bound of the number of features: no head has as many, and 32 bits can count them."""

Array = TypeVar("Array", torch.Tensor, "numpy.ndarray")


def check_layout(layout: str, name: str = "layout") -> None:
    """Raise TypeError or ValueError unless ``layout`` is one of ``LAYOUTS``."""
    choice(name, layout, LAYOUTS)


def check_rotary_dim(rotary_dim: int, name: str = "rotary_dim") -> int:
    """``rotary_dim`` as an int. Features rotate in pairs, so it must be positive and even.

    Raises:
        TypeError: ``rotary_dim`` is not an integer.
        ValueError: ``rotary_dim`` is not a positive even number, or is 2**31 or more.
    """
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
        ValueError: the layout is unknown, or the last dimension is odd.
    """
    check_layout(layout)
    check_rotary_dim(x.shape[-1])
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def join(x0: torch.Tensor, x1: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of `pairs`: a new tensor ``[..., rotary_dim]`` from two tensors ``[..., rotary_dim/2]``."""
    check_layout(layout)
    if layout == "interleaved":
        both = torch.stack((x0, x1), dim=-1)
        return both.reshape(*x0.shape[:-1], 2 * x0.shape[-1])  # batches that autograd hides have no flatten
    return torch.cat((x0, x1), dim=-1)


def permutation(rotary_dim: int, source: str, target: str) -> torch.Tensor:
    """The index ``p`` with ``x_target = x_source[..., p]``, int64 ``[rotary_dim]``, always on the CPU.

    The matrix ``P`` with ``P[i, p[i]] = 1`` conjugates one rotation into the other: ``R_target = P R_source P^T``. The
    same reordering of q and k leaves every score ``q . k`` unchanged.

    Raises:
        TypeError, ValueError: a layout is unknown, or ``rotary_dim`` is not a positive even integer.
    """
    check_layout(source, "source")
    check_layout(target, "target")
    x0, x1 = pairs(torch.arange(check_rotary_dim(rotary_dim), device="cpu"), source)
    return join(x0, x1, target)
