"""The results of a call of an operator that writes a cache, part by part, next to the definition of each part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase, bits, numbers
from ropelab.conformance.cache.convention import Written
from ropelab.conformance.cache.definition import Definition
from ropelab.conformance.cache.subject import Bounded, CacheSubject
from ropelab.conformance.cache_bounds import row_scale

PARTS = (
    "q", "the stored k", "the stored v", "k",
    "the scale of q", "the scale of the stored k", "the scale of the stored v",
)  # fmt: skip
Q, K, V, RETURNED, SCALES = range(5)
"""The numbers of the parts; scales that the operator made begin at the last."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A call and its results.

    Attributes:
        subject: the operator.
        case, written: the call and what the operator returned and wrote.
        earlier: the call before, of the same shapes; None if there was none.
        whole, at: the call of which the tokens are a part, and their numbers in it; None for a whole call.
        definitions: the definition of each part, as far as it was asked for.
    """

    subject: CacheSubject
    case: CacheCase
    written: Written
    earlier: CacheCase | None = None
    whole: CacheCase | None = None
    at: np.ndarray | None = None
    definitions: dict[int, Bounded] = field(default_factory=dict, repr=False)

    @property
    def blocks(self) -> bool:
        """Whether the operator stores a scale for each block of features."""
        return isinstance(self.subject.convention, BlockScales)

    @property
    def number(self) -> np.ndarray:
        """The numbers of the tokens in the call, int64 ``[T]``."""
        return np.arange(self.case.tokens) if self.at is None else self.at

    def kept(self, which: int) -> np.ndarray:
        """Return the tokens that a part is made of, bool ``[T]``: without those that the operator may leave out."""
        everywhere = which in (Q, RETURNED, SCALES) and not self.subject.convention.whole_tokens
        return np.ones(self.case.tokens, bool) if everywhere else self.case.live.numpy()

    def given(self, which: int) -> np.ndarray:
        """Return the input of a part for the tokens that the part is made of, ``[n, H, D]``."""
        return numbers(self.case.inputs[source(which)][0])[self.kept(which)]

    def actual(self, which: int) -> np.ndarray | None:
        """Return the numbers of a part, ``[n, H, D]`` for n tokens (see `kept`), or None for a part that is missing.

        With block scales the numbers of k are the features, and behind them the exponents and what else is stored. v
        is not stored.
        """
        written = self.written
        if which >= SCALES:
            return None if written.scales is None else made_scales(self.case, written.scales, which - SCALES)[..., None]
        if which in (Q, RETURNED):
            y = written.q if which == Q else written.k
            return None if y is None else numbers(y.reshape(self.case.inputs[source(which)].shape)[0])[self.kept(which)]
        return self.stored(which, written.memory)

    def stored(self, which: int, memory: torch.Tensor) -> np.ndarray | None:
        """Return what a memory says of k or v of the tokens with a slot."""
        if isinstance(kind := self.subject.convention, BlockScales):
            return np.concatenate(kind.read(self.case, memory), axis=-1) if which == K else None
        return numbers(self.case.rows(memory)[which - 1])

    def definition(self, which: int) -> Bounded:
        """Return the definition of a part and its bound."""
        if which not in self.definitions:
            self.definitions[which] = self.told(which)
        return self.definitions[which]

    def told(
        self, which: int, case: CacheCase | None = None, scales: np.ndarray | None = None, **parts: Any
    ) -> Bounded:
        """Return value and bound of a part by a definition.

        Args:
            which: the number of the part.
            case: a changed call; by default the call.
            scales: those of 8-bit floats that the operator made; by default the right ones.
            parts: changed parts of the definition, or changed claims about the operator.
        """
        case, known = case or self.case, Definition.__dataclass_fields__
        other = {name: part for name, part in parts.items() if name in known}
        claims = {name: part for name, part in parts.items() if name not in known}
        definition = replace(self.subject.definition, **other)
        value, bound = replace(self.subject, definition=definition, **claims).part(case, source(which))
        tokens = self.kept(which) if case.slots is self.case.slots else replace(self, case=case).kept(which)
        return self.made_of(which, value[tokens], bound[tokens], case, scales)

    def made_of(
        self, which: int, value: np.ndarray, bound: np.ndarray, case: CacheCase | None = None,
        scales: np.ndarray | None = None,
    ) -> Bounded:  # fmt: skip
        """Return value and bound of a part that is made of exact results ``[n, H, D]`` and their bound."""
        kind, case = self.subject.convention, case or self.case
        if which == RETURNED:
            return value, bound
        if which >= SCALES:
            scale, error = row_scale(value, bound, case.memory.dtype)
            return scale[..., None], error[..., None]
        if which and isinstance(kind, BlockScales):
            values, bounds = zip(*kind.truth(case, value, bound), strict=True)
            return np.concatenate(values, axis=-1), np.concatenate(bounds, axis=-1)
        dtype = case.memory.dtype if which else case.q_dtype or case.inputs[0].dtype
        return self.subject.stored(case, which, value, bound, dtype, scales)

    def wrong(self, which: int) -> np.ndarray:
        """Return which numbers of a part differ from the numbers of the definition.

        A number that is right beside the scale that the operator made, right or wrong, is right.
        """
        found = off(self.actual(which), self.definition(which))
        if self.written.scales is not None and which < RETURNED and found.any():
            scales = made_scales(self.case, self.written.scales, which)
            found &= off(self.actual(which), self.told(which, scales=scales))
        return found

    def outside(self) -> bool:
        """Return whether memory outside of the slots of the tokens changed."""
        outside = ~(self.whole or self.case).named().to(self.written.memory.device)
        return bool((bits(self.written.memory) != bits(self.case.memory))[outside].any())

    def deviates(self) -> bool:
        """Return whether anything is not as the definition says."""
        return self.outside() or any(self.wrong(part).any() for part in self.parts())

    def parts(self) -> list[int]:
        """Return the numbers of the parts that the operator has."""
        return [which for which in range(len(PARTS)) if self.actual(which) is not None]


def some_tokens(case: CacheCase, written: Written, at: torch.Tensor) -> tuple[CacheCase, Written]:
    """Return a call and its results as if it had the tokens with the numbers ``at`` only."""
    few = replace(case, inputs=tuple(x[:, at] for x in case.inputs), positions=case.token_positions()[0][at],
                  slots=case.slots[at])  # fmt: skip
    q, k, v = (None if y is None else y[at] for y in (written.q, written.k, written.v))
    scales = None if written.scales is None else (written.scales[0][at], *written.scales[1:])
    return few, Written(q, k, written.memory, v, scales)


Hypothesis = Callable[[Seen, int], Bounded]
"""What an operator with a mistake makes of a part: value and bound."""


def source(which: int) -> int:
    """Return the number of the input that a part is made of."""
    return K if which == RETURNED else which % SCALES


def off(actual: np.ndarray | None, expected: Bounded) -> np.ndarray:
    """Return which numbers are farther from their expected values than twice the bound."""
    right, bound = expected
    if actual is None or actual.shape != right.shape:
        return np.ones((1, 1, 1), bool)
    with np.errstate(invalid="ignore"):
        near = abs(actual - right) <= 2 * bound
    return ~(near | (actual == right) | (np.isnan(actual) & np.isnan(right)))


def made_scales(case: CacheCase, scales: tuple[torch.Tensor, ...], which: int) -> np.ndarray:
    """Return the scales of q ``[T, H]``, or those in the slots of the tokens with a slot ``[n, H]``."""
    return numbers(scales[which].flatten(0, 1)[case.slots[case.slots >= 0]] if which else scales[0])
