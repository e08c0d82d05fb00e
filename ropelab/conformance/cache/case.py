"""A call of an operator that writes a paged cache, in terms that do not depend on its convention."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, exact
from ropelab.conformance.case import Case
from ropelab.kernels.float8 import FLOAT8_DTYPES

ORDERS = ("NHD", "HND", "layers", "apart")
"""The arrangements of both caches in one memory. ``NHD`` is ``[blocks, block_size, heads, features]`` and ``HND`` is
``[blocks, heads, block_size, features]``, one cache after the other. ``layers`` has the blocks of both caches and of
another layer in turn. ``apart`` is ``NHD`` for keys, and ``HND`` with a gap behind every block for values."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Place:
    """A cache ``[blocks, block_size, heads, features]`` within a memory: its shape, strides and first element."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    first: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the cache as a view of a memory of one axis."""
        return memory.as_strided(self.shape, self.strides, self.first)

    def at(self, slots: np.ndarray, strides: tuple[int, ...] = ()) -> np.ndarray:
        """Return the numbers in the memory of the elements of slots ``[n]``: ``[n, heads, features]``.

        Args:
            slots: numbers of slots.
            strides: those by which the cache is addressed; by default its own.
        """
        block, token, head, feature = strides or self.strides
        row = self.first + slots // self.shape[1] * block + slots % self.shape[1] * token
        heads, features = np.indices(self.shape[2:])
        return row[:, None, None] + heads * head + features * feature


@dataclass(frozen=True, eq=False)
class CacheCase(Case):
    """A call: the tensors of `Case`, a slot of the cache for each token, and the caches.

    ``inputs`` are q, k and v: ``[1, T, Hq, D]``, ``[1, T, Hk, D]`` and ``[1, T, Hk, Dv]``. In multi-head latent
    attention k has one head with the features that rotate, and v is the latent vector.

    Attributes:
        slots: int64 ``[N]`` with ``N <= T``: the slots of the first N tokens; negative for no slot.
        memory: ``[elements]``, the memory of both caches with random contents, also between the caches.
        places: where the key cache and the value cache lie in ``memory``.
        weights: ``[D]`` for q and for k, or ``[Hq D]`` and ``[Hk D]`` for a norm across heads; or none for an operator
            without a norm.
        norm_last: whether the norm comes after the rotation.
        eps: the number that is added to the mean of the squares.
        weight_offset: the number that is added to the weights.
        scales: the scales of 8-bit floats in q, in the key cache and in the value cache.
        q_dtype: the dtype of the result for q; None for the dtype of q.
        table_free: whether the operator gets frequencies in place of tables.
        yarn: factor, low, high and attention factor of YaRN, for an operator that computes its frequencies.
    """

    _: KW_ONLY
    slots: torch.Tensor
    memory: torch.Tensor
    places: tuple[Place, Place]
    weights: tuple[torch.Tensor, ...] = ()
    norm_last: bool = False
    eps: float = 1e-6
    weight_offset: float = 0.0
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    q_dtype: torch.dtype | None = None
    table_free: bool = False
    yarn: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 1.0)

    @property
    def tokens(self) -> int:
        """T."""
        return self.inputs[0].shape[1]

    @property
    def live(self) -> torch.Tensor:
        """Whether a token has a slot: bool ``[T]``."""
        return torch.from_numpy(self.every_slot >= 0)

    @property
    def every_slot(self) -> np.ndarray:
        """The slots of all tokens ``[T]``, negative for none."""
        slots = self.slots.cpu().numpy()
        return np.concatenate((slots, np.full(self.tokens - len(slots), -1)))

    def caches(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key cache and the value cache within a memory like the memory of the case."""
        key, value = (place.within(memory) for place in self.places)
        return key, value

    def elements(self) -> tuple[np.ndarray, ...]:
        """Return the elements of the memory in the slots of the tokens: ``[n, heads, features]`` of k and of v."""
        slots = self.every_slot[self.every_slot >= 0]
        return tuple(place.at(slots) for place in self.places)

    def rows(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the slots of the tokens with a slot hold: ``[n, heads, features]`` of k and of v."""
        # The view as integers is for versions of torch that cannot index 8-bit floats.
        key, value = (bits(memory)[torch.from_numpy(at)].view(memory.dtype) for at in self.elements())
        return key, value

    def named(self) -> torch.Tensor:
        """Return whether an element of the memory belongs to a slot of a token: bool ``[elements]``."""
        found = torch.zeros(len(self.memory), dtype=torch.bool)
        for at in self.elements():
            found[torch.from_numpy(at)] = True
        return found

    def extra(self) -> dict[str, Any]:
        """Return the slots and the caches for messages and for JSON."""
        blocks, block_size = self.places[0].shape[:2]
        found: dict[str, Any] = {"slots": self.slots.tolist(), "blocks": blocks, "block_size": block_size}
        found["cache"] = str(self.memory.dtype).removeprefix("torch.")
        if self.memory.dtype in FLOAT8_DTYPES:
            found["scales"] = list(self.scales)
        if self.weights:
            found |= {"eps": self.eps, "weight_offset": self.weight_offset, "norm_last": self.norm_last}
            found["weights"] = [list(weight.shape) for weight in self.weights]
        return found


def in_request(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the places of tokens in two requests, where token i is in request i % 2, and each token begins a page."""
    return torch.arange(len(slots)) // 2 * page_size + slots.cpu().clamp(min=0) % page_size


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements of ``x`` as integers: a view of any strides."""
    return x.view(_BITS[x.itemsize])


def numbers(x: torch.Tensor) -> np.ndarray:
    """Return the values of ``x`` as ``EXACT``, of 8-bit floats too."""
    return exact(x.float() if x.dtype in FLOAT8_DTYPES else x)


def bit_numbers(x: torch.Tensor) -> np.ndarray:
    """Return the bits of ``x`` as ``EXACT`` numbers; two zeros of different signs differ, and NaN has one code."""
    found = bits(x).cpu().numpy().astype(EXACT)
    if x.dtype in FLOAT8_DTYPES:
        nan = x.float().isnan()
    else:
        nan = x.isnan()
    found[nan.cpu().numpy()] = np.finfo(EXACT).max / 4
    return found


def arranged(
    order: str, blocks: int, block_size: int, shapes: tuple[tuple[int, int], tuple[int, int]], latent: bool
) -> tuple[int, tuple[Place, Place]]:
    """Return the number of elements of a memory, and the places of both caches in it.

    Args:
        order: one of `ORDERS`; a latent cache has every entry whole, and only blocks move.
        blocks, block_size: the extents of both caches.
        shapes: heads and features of the key cache and of the value cache.
        latent: whether an entry is the latent vector followed by the key.
    """
    guard = 32
    if latent:
        entry = shapes[0][1] + shapes[1][1]
        block = block_size * entry * (3 if order != "NHD" else 1)
        strides = (block, entry, entry, 1)
        value, key = (guard, shapes[1][1]), (guard + shapes[1][1], shapes[0][1])
        places = tuple(Place((blocks, block_size, 1, n), strides, first) for first, n in (key, value))
        return blocks * block + 2 * guard, (places[0], places[1])
    sizes = [block_size * heads * features for heads, features in shapes]
    found, first = [], guard
    for which, (heads, features) in enumerate(shapes):
        inner = (heads * features, features, 1)
        if order == "HND" or (order == "apart" and which):
            inner = (features, block_size * features, 1)
        block = sizes[which]
        if order == "layers":
            block, first = sum(sizes) + sizes[0], guard + which * sizes[0]
        elif order == "apart" and which:
            block += guard
        found.append(Place((blocks, block_size, heads, features), (block, *inner), first))
        first += blocks * block + guard
    end = max(p.first + sum((n - 1) * s for n, s in zip(p.shape, p.strides, strict=True)) + 1 for p in found)
    return end + guard, (found[0], found[1])
