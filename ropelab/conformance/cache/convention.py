"""The conventions of operators that write a paged cache, in general."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ropelab.angles.table_free import rotary_frequencies
from ropelab.arguments import DTYPES
from ropelab.conformance.cache.case import CacheCase
from ropelab.conformance.case import NotApplicable, Sizes
from ropelab.conformance.convention import Arguments, accepts
from ropelab.conformance.implementation import Implementation
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import LAYOUTS

ROWS = 64
"""The rows of the tables; every position is below."""
LATENT_FEATURES = 8
"""The features of a latent vector, as a multiple of the features of the key that rotates (DeepSeek: 512 and 64)."""


@dataclass(frozen=True)
class Written:
    """The results of a call.

    Attributes:
        q: ``[T, Hq, D]``, or None if the operator has no queries.
        k: ``[T, Hk, D]`` if the operator returns or overwrites k, else None.
        v: ``[T, Hk, Dv]`` if the operator returns v, else None.
        memory: the memory of both caches.
        scales: the scales that the operator made: of q ``[T, Hq]``, and of the slots of both caches
            ``[blocks, block_size, Hk]``; None for scales that are given.
    """

    q: torch.Tensor | None
    k: torch.Tensor | None
    memory: torch.Tensor
    v: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class CacheConvention:
    """A way to call an operator that rotates and writes a paged cache.

    Attributes:
        name: the key of the convention in ``CACHE_CONVENTIONS``: the name of the operator.
        signature: the call, for messages.
        other_signatures: other forms of the call that an operator may have.
        latent: whether the operator is for multi-head latent attention: one key head beside a latent vector.
        norm: whether the operator normalizes q and k.
        optional_norm: whether the norm can be left out.
        offset: whether the weights can have an offset.
        own_angles: whether the operator computes frequencies and angles, in float32, from a base and YaRN's numbers.
        narrow: whether tables and arithmetic have the dtype of the inputs unless the author declares otherwise.
        partial: whether features beyond the width of the tables pass unchanged.
        variants: the claims that an author may make in this convention: ``"norm_last"``, ``"norm_across"`` and
            ``"table_free"`` of `CacheSubject`.
        float8_only: whether every cache has 8-bit floats, and q too.
        scales_differ: whether keys and values have a scale each.
        scales_multiply: whether a caller passes the number that a value is multiplied by, in place of the divisor.
        row_scales: whether the operator makes the scale of each head of a token, and writes it.
        turns_cached: whether the keys lie in the cache before the call.
        queries: whether the operator rotates queries, too.
        weighted: whether the norm has weights, and k is normalized; otherwise the norm is for q alone.
        inverse: whether the operator rotates by the inverse.
        signed: whether positions may be negative; those of tokens also `NO_POSITION`.
        rotates_last: whether the last features of a head rotate, in place of the first.
        unrounded: whether k stays as wide as the arithmetic until it becomes 8-bit floats.
        dtypes: those that q and k may have.
        addressed: whether slots say where a token belongs; otherwise token t has row t.
        widths_differ: whether heads of v may have another width than heads of k.
        whole_tokens: whether the operator may leave out a token without a slot altogether.
        fewer_slots: whether there may be fewer slots than tokens.
        orders: the arrangements of the caches that the convention allows.
        layouts: the layouts of the features, the default first.
        seq_formats: the orders of the axes.
    """

    name: str
    signature: str
    other_signatures = ()
    latent = False
    norm = False
    optional_norm = False
    offset = False
    variants: frozenset[str] = frozenset()
    own_angles = False
    narrow = False
    partial = True
    float8_only = False
    scales_differ = True
    scales_multiply = False
    row_scales = False
    turns_cached = False
    queries = True
    weighted = True
    inverse = False
    signed = False
    rotates_last = False
    unrounded = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    addressed = True
    widths_differ = False
    whole_tokens = False
    fewer_slots = True
    orders: tuple[str, ...] = ("NHD", "HND", "layers", "apart")
    layouts: tuple[str, ...] = LAYOUTS
    seq_formats: tuple[str, ...] = ("thd",)
    in_place = False

    def extents(self, sizes: Sizes) -> tuple[int, int]:
        """Return the heads of k and v, and the features of v."""
        return (1, LATENT_FEATURES * sizes.head_dim) if self.latent else (sizes.k_heads, sizes.head_dim)

    def cached(
        self, heads: int, dim: int, value_dim: int, rotary_dim: int, itemsize: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return heads and elements of a slot of the key cache, and of the value cache.

        Args:
            heads, dim, value_dim, rotary_dim: the extents of k and v.
            itemsize: the bytes of a number of k.
        """
        return (heads, dim), (heads, value_dim)

    def translate(self, implementation: Implementation, case: CacheCase, memory: torch.Tensor) -> Arguments:
        """Return the arguments of the call that the case describes, with the caches in ``memory``.

        Raises:
            NotApplicable: the convention, or the parameters of this function, cannot express the case.
        """
        arguments = self.arguments(implementation, case, *case.caches(memory))
        for name in arguments.keywords:
            if not accepts(implementation.function, name):
                raise NotApplicable(f"{self.name}: the function has no argument {name!r}")
        return arguments

    def arguments(
        self, implementation: Implementation, case: CacheCase, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> Arguments:
        """Return the arguments; ``inputs`` are the tensors that the operator may overwrite."""
        raise NotImplementedError

    def outputs(self, case: CacheCase, returned: Any, arguments: Arguments, memory: torch.Tensor) -> Written:
        """Return the results, which the function returned or left in its arguments.

        Raises:
            Broken: the function returned something else than the convention says.
        """
        raise NotImplementedError

    def tables(self, implementation: Implementation, case: CacheCase) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines that the caller passes: ``[4 ROWS, R/2]``.

        Slots and places in a request are rows as well, so that an operator that takes them for positions has results.
        """
        return implementation.tables(case, 4 * ROWS)

    def angles(self, implementation: Implementation, case: CacheCase) -> dict[str, torch.Tensor]:
        """Return the keyword arguments that determine the angles: ``cos`` and ``sin``, or ``frequencies``."""
        if case.table_free:
            device = implementation.device
            return {"frequencies": rotary_frequencies(case.rotary_dim, implementation.base, device=device)}
        return dict(zip(("cos", "sin"), self.tables(implementation, case), strict=True))

    def divisor(self, scale: float) -> float:
        """Return the number by which a value is divided before it becomes an 8-bit float, for a scale of a case."""
        return scale


def positions_of(implementation: Implementation, case: CacheCase) -> torch.Tensor:
    """Return the positions of the tokens, int64 ``[T]``."""
    return case.token_positions()[0].to(implementation.device)


def is_float8(memory: torch.Tensor) -> bool:
    """Return whether a cache has 8-bit floats."""
    return memory.dtype in FLOAT8_DTYPES
