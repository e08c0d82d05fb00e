"""The results of a call of an operator that writes a cache, part by part, next to the definition of each part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase, numbers
from ropelab.conformance.cache.convention import Written
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
        case, written: the call and what the operator returned and wrote.
        earlier: the call before, of the same shapes; None if there was none.
        definitions: the definition of each part, as far as it was asked for.
    """

    case: CacheCase
    written: Written
    earlier: CacheCase | None = None
    definitions: dict[int, Bounded] = field(default_factory=dict, repr=False)

    def actual(self, subject: CacheSubject, which: int) -> np.ndarray | None:
        """Return the numbers of a part, ``[n, H, D]`` for n tokens (see `kept`), or None for a part that is missing.

        With block scales the numbers of k are the features, and behind them the exponents and what else is stored.
        """
        case, written, tokens = self.case, self.written, kept(subject, self.case, which)
        if which >= SCALES:
            return None if written.scales is None else made_scales(case, written.scales, which - SCALES)[..., None]
        if which in (Q, RETURNED):
            y = written.q if which == Q else written.k
            return None if y is None else numbers(y.reshape(case.inputs[which == RETURNED].shape)[0])[tokens]
        return rows(subject, case, written.memory)[which - 1]

    def definition(self, subject: CacheSubject, which: int) -> Bounded:
        """Return the definition of a part and its bound."""
        if which not in self.definitions:
            self.definitions[which] = told(subject, self.case, which)
        return self.definitions[which]

    def wrong(self, subject: CacheSubject, which: int) -> np.ndarray:
        """Return which numbers of a part differ from the numbers of the definition.

        A number that is right beside the scale that the operator made, right or wrong, is right.
        """
        found = off(self.actual(subject, which), self.definition(subject, which))
        if self.written.scales is not None and which < RETURNED and found.any():
            scales = made_scales(self.case, self.written.scales, which)
            found &= off(self.actual(subject, which), told(subject, self.case, which, scales))
        return found


def kept(subject: CacheSubject, case: CacheCase, which: int) -> np.ndarray:
    """Return the tokens that a part is made of, bool ``[T]``: those with a slot where the others may be left out."""
    everywhere = which in (Q, RETURNED, SCALES) and not subject.convention.whole_tokens
    return np.ones(case.tokens, bool) if everywhere else case.live.numpy()


def off(actual: np.ndarray | None, expected: Bounded) -> np.ndarray:
    """Return which numbers are farther from their expected values than twice the bound."""
    right, bound = expected
    if actual is None or actual.shape != right.shape:
        return np.ones((1, 1, 1), bool)
    with np.errstate(invalid="ignore"):
        near = abs(actual - right) <= 2 * bound
    return ~(near | (actual == right) | (np.isnan(actual) & np.isnan(right)))


def rows(subject: CacheSubject, case: CacheCase, memory: torch.Tensor) -> tuple[np.ndarray | None, ...]:
    """Return what a memory says of k and v of the tokens with a slot; with block scales v is not stored."""
    kind = subject.convention
    if isinstance(kind, BlockScales):
        return np.concatenate(kind.read(case, memory), axis=-1), None
    return tuple(map(numbers, case.rows(memory)))


def told(subject: CacheSubject, case: CacheCase, which: int, scales: np.ndarray | None = None) -> Bounded:
    """Return value and bound of a part by the definition of a subject, beside other scales if there are some."""
    value, bound = subject.expected(case)[K if which == RETURNED else which % SCALES]
    tokens = kept(subject, case, which)
    return stored(subject, case, which, value[tokens], bound[tokens], scales)


def stored(
    subject: CacheSubject, case: CacheCase, which: int, value: np.ndarray, bound: np.ndarray,
    scales: np.ndarray | None = None,
) -> Bounded:  # fmt: skip
    """Return value and bound of a part that is made of exact results ``[n, H, D]`` and their bound."""
    kind = subject.convention
    if which == RETURNED:
        return value, bound
    if which >= SCALES:
        scale, error = row_scale(value, bound, case.memory.dtype)
        return scale[..., None], error[..., None]
    if which and isinstance(kind, BlockScales):
        values, bounds = zip(*kind.truth(case, value, bound), strict=True)
        return np.concatenate(values, axis=-1), np.concatenate(bounds, axis=-1)
    dtype = case.memory.dtype if which else case.q_dtype or case.inputs[0].dtype
    return subject.stored(case, which, value, bound, dtype, scales)


def made_scales(case: CacheCase, scales: tuple[torch.Tensor, ...], which: int) -> np.ndarray:
    """Return the scales of q ``[T, H]``, or those in the slots of the tokens with a slot ``[n, H]``."""
    if which == 0:
        return numbers(scales[0])
    slots, size = case.slots[case.slots >= 0], scales[which].shape[1]
    return numbers(scales[which][slots // size, slots % size])


def held(
    subject: CacheSubject, seen: Seen, which: int, slots: Callable[[Seen], torch.Tensor],
    strides: Callable[[Seen, int], tuple[int, ...]],
) -> bool:  # fmt: skip
    """Return whether a whole cache is as after a write of the right rows to other slots or by other strides.

    Args:
        subject, seen, which: an operator, a call, and the number of the cache: 1 or 2.
        slots: the slots that all tokens ``[T]`` have in the mistaken write, negative for none.
        strides: the strides by which the mistaken write addresses the cache.
    """
    case, place = seen.case, seen.case.places[which - 1]
    value, bound = stored(subject, case, which, *subject.expected(case)[which])
    names, at = slots(seen).cpu().numpy(), strides(seen, which)
    size, total = place.shape[1], place.shape[0] * place.shape[1]
    before, now = numbers(case.memory), numbers(seen.written.memory)
    number = place.within(torch.arange(len(before))).numpy()
    if (names >= total).any() or (names < -total).any():
        return False
    for order in (1, -1):  # two tokens with one slot are written in any order
        told, near = before.copy(), np.zeros_like(before)
        for token in np.flatnonzero(names >= 0)[::order]:
            block, inside = divmod(int(names[token]), size)
            row = place.first + block * at[0] + inside * at[1]
            heads, features = np.indices(place.shape[2:])
            told[row + heads * at[2] + features * at[3]] = value[token]
            near[row + heads * at[2] + features * at[3]] = bound[token]
        own = number.reshape(-1)
        same = (abs(now[own] - told[own]) <= 2 * near[own]) | (np.isnan(now[own]) & np.isnan(told[own]))
        if same.all():
            return True
    return False


def held_in_blocks(subject: CacheSubject, seen: Seen, which: int, slots: Callable[[Seen], torch.Tensor]) -> bool:
    """Return whether the features (``which`` is 1) or the scales (2) of the tokens are right in other slots.

    All other bytes are as they were, or in the slots of the tokens. Of two tokens with one slot, the first or the last
    is written there.
    """
    case, kind, memory = seen.case, subject.convention, seen.written.memory
    assert isinstance(kind, BlockScales), "other operators have one row for each token"
    size, total = case.places[0].shape[1], case.places[0].shape[0] * case.places[0].shape[1]
    own = torch.full((case.tokens,), -1)
    own[: len(case.slots)] = case.slots.cpu()
    names = torch.where(own >= 0, slots(seen).cpu(), -1)
    if (names >= total).any() or not torch.equal(names >= 0, own >= 0):
        return False
    value, bound = subject.expected(case)[K]
    named = torch.zeros(len(memory), dtype=torch.bool)
    for number, at in ((which, names), (3 - which, own)):
        at = at[at >= 0]
        case.places[number - 1].within(named)[at // size, at % size] = True
    if not torch.equal(memory.cpu()[~named], case.memory.cpu()[~named]):
        return False
    for order in (1, -1):
        written = {int(names[t]): t for t in torch.arange(case.tokens)[own >= 0].tolist()[::order]}
        tokens = sorted(written.values())
        moved, place = memory.clone(), case.places[which - 1]
        ours, theirs = own[tokens], names[tokens]
        place.within(moved)[ours // size, ours % size] = place.within(memory)[theirs // size, theirs % size]
        kept = torch.full((case.tokens,), -1, device=case.slots.device)
        kept[tokens] = own[tokens].to(kept)
        read = kind.read(replace(case, slots=kept), moved)
        parts = zip(read, kind.truth(case, value[tokens], bound[tokens]), strict=True)
        if not any(off(y, told).any() for y, told in parts):
            return True
    return False
