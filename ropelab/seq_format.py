"""How attention tensors order their axes: b = batch, s = sequence, h = heads, d = features of a head."""

import torch

# Each format's axes as seen from bshd. Every one is its own inverse, so the same swap leads back.
_SWAP_TO_BSHD = {"bshd": (0, 0), "sbhd": (0, 1), "bhsd": (1, 2)}

SEQ_FORMATS = tuple(_SWAP_TO_BSHD)


def check_seq_format(seq_format: str) -> None:
    """Raise ValueError unless ``seq_format`` is one of ``SEQ_FORMATS``."""
    if seq_format not in _SWAP_TO_BSHD:
        raise ValueError(f"seq_format: expected one of {SEQ_FORMATS}, got {seq_format!r}")


def to_bshd(x: torch.Tensor, seq_format: str) -> torch.Tensor:
    """View 4-D ``x`` of ``seq_format`` as ``[B, S, H, D]``; applied to a bshd tensor, it leads back."""
    check_seq_format(seq_format)
    return x.transpose(*_SWAP_TO_BSHD[seq_format])
