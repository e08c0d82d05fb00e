"""The axes of an attention tensor: their order and their names.

The letters of a format name the axes: b = batch, s = sequence, h = heads, d = features of a head, t = tokens.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch

from ropelab.arguments import check_tensor, choice

# The axes that a swap exchanges for bshd, counted from the last axis. Every swap is its own inverse.
_SWAP_TO_BSHD = {"bshd": (-4, -4), "sbhd": (-4, -3), "bhsd": (-3, -2)}

DENSE_FORMATS = tuple(_SWAP_TO_BSHD)
SeqFormat: TypeAlias = Literal["bshd", "sbhd", "bhsd", "thd"]
SEQ_FORMATS = get_args(SeqFormat)
"""The dense formats, and ``thd``, whose sequences lie one after another along one axis of tokens."""


SEQ_AXIS = {name: name.find("s") if "s" in name else name.find("t") for name in SEQ_FORMATS}
"""The axis along which positions count, for each format."""


def check_seq_format(seq_format: str) -> None:
    """Raise TypeError or ValueError unless ``seq_format`` is one of ``SEQ_FORMATS``."""
    choice("seq_format", seq_format, SEQ_FORMATS)


def rank(seq_format: str) -> int:
    """The number of axes of a tensor of ``seq_format``."""
    return len(seq_format)


def check_heads(name: str, x: torch.Tensor, seq_format: str) -> None:
    """Check that ``x`` is a floating tensor with the axes of ``seq_format``.

    Raises:
        TypeError, ValueError: as `ropelab.arguments.check_tensor`.
    """
    expected, hint = rank(seq_format), ""
    if isinstance(x, torch.Tensor) and x.ndim != expected:
        hint = likely_format(name, seq_format, lambda other: rank(other) == x.ndim)
        if not x.is_floating_point():
            hint = " (position ids: pass them as positions)"
        elif x.ndim == expected - 1:
            hint += f" (if the last axis has all heads: pass {name}.unflatten(-1, (heads, head_dim)))"
    check_tensor(name, x, (expected,), f"{seq_format} of rank {expected}", hint=hint)


def likely_format(name: str, seq_format: str, fits: Callable[[str], bool]) -> str:
    """The end of a message about tensors that do not fit ``seq_format``: the other formats that they fit, or ``""``.

    Args:
        name: the argument, for the message.
        fits: whether a call with this format would have been right in the point that the message is about.
    """
    others = [other for other in SEQ_FORMATS if other != seq_format and fits(other)]
    if not others:
        return ""
    return f" ({name} looks like {' or '.join(others)}: pass seq_format={' or '.join(map(repr, others))})"


def likely_swapped(q: torch.Tensor, k: torch.Tensor, seq_format: str) -> str:
    """The same for q and k that differ in an axis where ``seq_format`` allows no difference.

    Of another format, q and k differ in the number of heads alone, and each head of k serves as many heads of q.
    """

    def grouped(other: str) -> bool:
        heads = other.index("h")
        alike = all(q.shape[i] == k.shape[i] for i in range(len(other)) if i != heads)
        return alike and 0 < k.shape[heads] < q.shape[heads] and q.shape[heads] % k.shape[heads] == 0

    return likely_format("q", seq_format, lambda other: rank(other) == q.ndim == k.ndim and grouped(other))


def to_bshd(x: torch.Tensor, seq_format: str) -> torch.Tensor:
    """View ``x`` of ``seq_format`` as ``[B, S, H, D]``. Tokens of ``thd`` become a single sequence, ``[1, T, H, D]``.

    Axes in front of the axes of the format stay in front.
    """
    check_seq_format(seq_format)
    return x.unsqueeze(-4) if seq_format == "thd" else x.transpose(*_SWAP_TO_BSHD[seq_format])


def from_bshd(x: torch.Tensor, seq_format: str) -> torch.Tensor:
    """View ``[B, S, H, D]`` as ``seq_format``: the inverse of `to_bshd`."""
    check_seq_format(seq_format)
    return x.squeeze(-4) if seq_format == "thd" else x.transpose(*_SWAP_TO_BSHD[seq_format])
