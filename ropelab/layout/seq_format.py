"""The axes of an attention tensor: their order and their names.

The letters of a format name the axes: b = batch, s = sequence, h = heads, d = features of a head, t = tokens.
"""

import torch

from ropelab.arguments import choice

# The axes that a swap exchanges for bshd, counted from the last axis. Every swap is its own inverse.
_SWAP_TO_BSHD = {"bshd": (-4, -4), "sbhd": (-4, -3), "bhsd": (-3, -2)}

DENSE_FORMATS = tuple(_SWAP_TO_BSHD)
SEQ_FORMATS = (*DENSE_FORMATS, "thd")
"""The dense formats, and ``thd``, whose sequences lie one after another along one axis of tokens."""


SEQ_AXIS = {name: name.find("s") if "s" in name else name.find("t") for name in SEQ_FORMATS}
"""The axis along which positions count, for each format."""


def check_seq_format(seq_format: str) -> None:
    """Raise TypeError or ValueError unless ``seq_format`` is one of ``SEQ_FORMATS``."""
    choice("seq_format", seq_format, SEQ_FORMATS)


def rank(seq_format: str) -> int:
    """The number of axes of a tensor of ``seq_format``."""
    return len(seq_format)


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
