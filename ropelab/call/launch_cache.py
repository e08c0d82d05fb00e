"""This file remembers calls that the host has checked and prepared.

A call with few tokens lasts a few microseconds on a GPU, so the host must not spend a hundred on the call. Nearly all
of the host's work depends on properties of the arguments that repeat from layer to layer and from step to step. These
properties form a key. `apply_rope` and `apply_qk_norm_rope` each have a cache of the class `LaunchCache`.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import torch

from ropelab.call.angles import Angles
from ropelab.kernels.backends import forced_backend

Prepared = TypeVar("Prepared")


class LaunchCache(Generic[Prepared]):
    """A bounded mapping from the key of a call to the prepared launch.

    Args:
        most: the largest number of entries. A full cache starts anew, so that a program whose shapes never repeat
            does not fill the memory.
    """

    def __init__(self, most: int = 4096):
        self.most = most
        self._entries: dict[Hashable, Prepared] = {}

    def get(self, key: Hashable) -> Prepared | None:
        """The entry of ``key``, or None where there is no entry or where ``key`` has no hash."""
        try:
            return self._entries.get(key)
        except TypeError:
            return None

    def put(self, key: Hashable, entry: Prepared) -> None:
        """Keep ``entry`` for calls with ``key``; a key of None keeps nothing."""
        if key is None:
            return
        if len(self._entries) >= self.most:
            self._entries.clear()
        self._entries[key] = entry

    def __len__(self) -> int:
        return len(self._entries)


def call_key(tensors: Iterable[torch.Tensor | None], angles: Angles, *others: Hashable) -> Hashable | None:
    """The key of a call: all properties that its checks and the plan of its launch look at.

    The key leaves addresses out, because a launch looks at the addresses at every call.

    Args:
        tensors: inputs and the other tensors that a kernel gets, always in the same order.
        angles: tables or frequencies. The number of rows of tables is not part of the key, because every call checks
            the number.
        others: further values that the checks or the plan depend on.

    Returns:
        None where an argument is not a strided tensor, or where cosines and sines differ in shape. The checks then name
        the argument that is wrong.
    """
    try:
        turned_by = angles.key()
        if turned_by is None:
            return None
        return (
            *map(_properties, tensors),
            turned_by, forced_backend(), others,
        )  # fmt: skip
    except (AttributeError, IndexError, RuntimeError):  # torch raises RuntimeError for a tensor without strides
        return None


def _properties(x: torch.Tensor | None) -> tuple | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.layout)
