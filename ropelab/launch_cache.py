"""This file remembers calls that were checked and prepared, by everything that both depend on.

A call with few tokens lasts a few microseconds on a GPU, so the host must not spend a hundred on it. Nearly all that
the host does depends on properties of the arguments that repeat from layer to layer and from step to step. These
properties form a key. `apply_rope` and `apply_qk_norm_rope` have a cache each and share this file.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import torch

from ropelab.kernels.backends import forced_backend

Prepared = TypeVar("Prepared")


class LaunchCache(Generic[Prepared]):
    """Key -> what was prepared for calls with that key.

    Args:
        most: entries; then the cache starts anew, as a bound for programs whose shapes never repeat.
    """

    def __init__(self, most: int = 4096):
        self.most = most
        self._entries: dict[Hashable, Prepared] = {}

    def get(self, key: Hashable) -> Prepared | None:
        """The entry of ``key``, or None, as for a key that cannot be hashed."""
        try:
            return self._entries.get(key)
        except TypeError:
            return None

    def put(self, key: Hashable, entry: Prepared) -> None:
        """Keep ``entry`` for calls with ``key``; nothing is kept for None."""
        if key is None:
            return
        if len(self._entries) >= self.most:
            self._entries.clear()
        self._entries[key] = entry

    def __len__(self) -> int:
        return len(self._entries)


def call_key(
    tensors: Iterable[torch.Tensor | None], tables: tuple[torch.Tensor, torch.Tensor], *others: Hashable
) -> Hashable | None:
    """The key of a call: all that its checks and the plan of its launch look at.

    Addresses are left out: a launch looks at them itself, at every call.

    Args:
        tensors: inputs and whatever else a kernel gets, always in the same order.
        tables: cosines and sines. The number of their rows is no part of the key: it is checked at every call.
        others: whatever else decides.

    Returns:
        None where something is no strided tensor, and where cosines and sines differ in shape. The checks then name
        what is wrong.
    """
    cos, sin = tables
    try:
        shape = cos.shape
        if shape != sin.shape:
            return None
        return (
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.layout) for x in tensors],
            shape[-1], None if len(shape) == 2 else shape[:-2], cos.stride(), cos.dtype, cos.device,
            sin.stride(), sin.dtype, sin.device, forced_backend(), others,
        )  # fmt: skip
    except (AttributeError, IndexError, RuntimeError):  # the last is torch's word for a tensor without strides
        return None
