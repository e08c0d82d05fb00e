"""Where an operator writes by mistake, and which positions it takes, told by the numbers that its tokens have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ropelab.conformance.cache.case import in_request, numbers
from ropelab.conformance.cache.seen import PARTS, K, Seen, V

FEW = 4
"""The number of tokens that are told."""
MOST_SEARCHED = 2**20
"""The elements of the largest memory that is searched for rows."""


@dataclass(frozen=True)
class Tokens:
    """The numbers that the tokens of a call have, int64 ``[T]`` each.

    Attributes:
        slot: the slot; negative for none.
        position: the position.
        number: the number of the token in the call.
        earlier: the slot that the token with the same number had in the call before, if there was one.
        asked: whether the call has an entry for the slot of the token.
        request: the place of the token in its request.
        size, total, stride: the slots of a block, the slots of a cache and the elements from slot to slot.
    """

    slot: np.ndarray
    position: np.ndarray
    number: np.ndarray
    earlier: np.ndarray
    asked: np.ndarray
    request: np.ndarray
    size: int
    total: int
    stride: int

    @classmethod
    def of(cls, seen: Seen, which: int = K) -> Tokens:
        """Return the numbers of a whole call; ``which`` is the number of the cache: 1 or 2."""
        case, place = seen.whole or seen.case, seen.case.places[which - 1]
        position, asked = case.token_positions()[0].numpy(), np.arange(case.tokens) < len(case.slots)
        request = in_request(case.slots, place.shape[1]).numpy() if asked.all() else position
        return cls(
            case.every_slot, position, np.arange(case.tokens), (seen.earlier or case).every_slot, asked, request,
            place.shape[1], place.shape[0] * place.shape[1], place.strides[1],
        )  # fmt: skip

    @property
    def rank(self) -> np.ndarray:
        """The number of the token among those with a slot."""
        return np.cumsum(self.slot >= 0) - 1

    def in_blocks_of(self, size: int) -> np.ndarray:
        """Return the slots that tokens have if an operator takes another size for the size of a block."""
        return self.slot // size * self.size % self.total + self.slot % size


Numbers = Callable[[Tokens], np.ndarray]


def _overflowing(bits: int) -> Numbers:
    """Return the slots of offsets in integers of too few bits."""
    return lambda t: t.slot * t.stride % 2**bits // t.stride


SLOTS: dict[str, Numbers] = {
    "in the slots of the earlier call": lambda t: t.earlier,
    "in the slot after the right one": lambda t: (t.slot + 1) % t.total,
    "in the slot before the right one": lambda t: t.slot - 1,
    "in the block after the right one": lambda t: (t.slot + t.size) % t.total,
    "in the block before the right one": lambda t: t.slot - t.size,
    "in the slot with the number of the token": lambda t: t.number,
    "in the slot with the number of the token among those with a slot": lambda t: t.rank,
    "in the slot with the number of the position": lambda t: t.position,
    "in the first block, at the place of its slot in a block": lambda t: t.slot % t.size,
    "in the block and at the place of blocks of 16 slots, if the cache has it": lambda t: np.where(
        t.slot // 16 * t.size + t.slot % 16 < t.total, t.slot // 16 * t.size + t.slot % 16, -1
    ),
    "in blocks of half the size": lambda t: t.in_blocks_of(max(t.size // 2, 1)),
    "in blocks of a quarter of the size": lambda t: t.in_blocks_of(max(t.size // 4, 1)),
    "in the block of its place, at the place of its block": lambda t: (
        t.slot % (t.total // t.size) * t.size + t.slot // (t.total // t.size)
    ),
    **{f"at the offset of its slot modulo 2^{bits} elements": _overflowing(bits) for bits in range(6, 33)},
}  # fmt: skip
"""Where k or v of a token with a slot is by mistake, in words -> the slots of all tokens."""

SKIPPED: dict[str, Numbers] = {
    "in a slot counted from the end of the cache": lambda t: t.slot + t.total,
    "in slot 0": lambda t: 0 * t.slot,
    "in the slot of its magnitude": lambda t: -t.slot,
}
"""Where k or v of a token with a negative slot is by mistake."""

POSITIONS: dict[str, Numbers] = {
    "is not rotated": lambda t: 0 * t.position,
    "takes position +1 for the position": lambda t: t.position + 1,
    "takes position -1 for the position": lambda t: t.position - 1,
    "turns by the magnitude of a negative position": lambda t: abs(t.position),
    "takes 0 for a negative position": lambda t: t.position.clip(0),
    "takes the number of the token for the position": lambda t: t.number,
    "takes the position of the first token": lambda t: t.position[0 * t.number],
    "takes the position of the next token": lambda t: np.roll(t.position, -1),
    "takes the position of the token before": lambda t: np.roll(t.position, 1),
    "takes the slot for the position": lambda t: _if_live(t, t.slot),
    "takes the place of the slot in its block for the position": lambda t: _if_live(t, t.slot % t.size),
    "takes the place of the token in its request for the position": lambda t: _if_live(t, t.request),
    "takes the position of another token: tokens with a slot read the first positions": lambda t: t.position[
        t.rank.clip(0)
    ],
    "takes half the position": lambda t: t.position // 2,
}
"""A mistake about positions in words -> the positions with it."""

PLACES: dict[str, Numbers] = {
    "in blocks of the cache": lambda t: t.slot // t.size,
    "at places of their block": lambda t: t.slot % t.size,
    "in slots": lambda t: t.slot,
    "at positions": lambda t: t.position,
}
"""Numbers of tokens in words, by which some of the tokens are told."""


def _if_live(tokens: Tokens, numbers: np.ndarray) -> np.ndarray:
    return np.where(tokens.slot >= 0, numbers, tokens.position)


def slot_rules() -> Iterator[tuple[str, Numbers]]:
    """Yield where k or v of some tokens is by mistake, in words that begin with a verb, and the slots of all tokens."""
    earlier, *others = SLOTS.items()
    skipped = [(f"of a token with a negative slot is {words}", rule, False) for words, rule in SKIPPED.items()]
    live = [(f"is {words}", rule, True) for words, rule in (earlier, *others)]
    for words, rule, of_live in (*live[:5], *skipped, *live[5:]):

        def slots(t: Tokens, rule=rule, of_live=of_live) -> np.ndarray:
            return np.where(t.asked & ((t.slot >= 0) == of_live), rule(t), t.slot)

        yield words, slots


STRIDES: dict[str, Callable[[Seen, int], tuple[int, ...]]] = {
    "is addressed by the strides of the other cache": lambda seen, which: seen.case.places[2 - which].strides,
    "is addressed as if the heads of a token were adjacent (NHD)": lambda seen, which: _dense(seen, which, False),
    "is addressed as if the tokens of a head were adjacent (HND)": lambda seen, which: _dense(seen, which, True),
    "is addressed as if blocks followed each other without a gap": lambda seen, which: (
        math.prod(seen.case.places[which - 1].shape[1:]), *seen.case.places[which - 1].strides[1:],
    ),
}  # fmt: skip
"""How a cache is addressed by mistake, in words -> the strides of ``[blocks, block_size, heads, features]``."""


def _dense(seen: Seen, which: int, hnd: bool) -> tuple[int, ...]:
    _, size, heads, features = seen.case.places[which - 1].shape
    block = seen.case.places[which - 1].strides[0]
    return (block, features, size * features, 1) if hnd else (block, heads * features, features, 1)


def placed(seen: list[Seen], which: int) -> str:
    """Return where an operator writes k or v by mistake, if that explains the whole cache; else an empty string."""
    if seen[0].blocks or not seen[0].subject.convention.addressed:
        return ""
    calls = [(one, Tokens.of(one, which)) for one in seen]
    for words, rule in slot_rules():
        moved = any((rule(t) != t.slot).any() for _, t in calls)
        if moved and all(held(one, which, rule(t)) for one, t in calls):
            return words
    for words, strides in STRIDES.items():
        moved = any(strides(one, which) != one.case.places[which - 1].strides for one in seen)
        if moved and all(held(one, which, t.slot, strides(one, which)) for one, t in calls):
            return words
    return ""


def held(seen: Seen, which: int, slots: np.ndarray, strides: tuple[int, ...] = ()) -> bool:
    """Return whether a cache is as after a write of the right rows to other slots or by other strides.

    That is the whole cache for a whole call, and the rows of the tokens for a part of a call.

    Any of several tokens with one slot may be the last that is written there.

    Args:
        seen, which: a call, and the number of the cache: 1 or 2.
        slots: the slots that all tokens of the whole call have in the mistaken write, negative for none.
        strides: the strides by which the mistaken write addresses the cache; by default the right ones.
    """
    place, memory, slots = seen.case.places[which - 1], seen.written.memory, slots[seen.number]
    at = place.at(slots[slots >= 0], strides)
    if (slots >= place.shape[0] * place.shape[1]).any() or at.max(initial=0) >= len(memory):
        return False
    value, bound = (x[slots >= 0] for x in seen.made_of(which, *seen.subject.part(seen.case, which)))
    now = numbers(memory[torch.from_numpy(at)])
    near = (abs(now - value) <= 2 * bound) | (np.isnan(now) & np.isnan(value))
    if seen.whole:
        return bool(near.all())
    now, before = numbers(memory), numbers(seen.case.memory)
    right = (now == before) | (np.isnan(now) & np.isnan(before))
    right[at] = False
    np.logical_or.at(right, at, near)
    return bool(right[place.within(torch.arange(len(now))).numpy()].all())


def blocks_placed(seen: list[Seen]) -> tuple[str, str] | None:
    """Return which of features and scales of blocks are in other slots, and in which, if that explains all bytes."""
    if not (seen[0].blocks and seen[0].subject.convention.addressed):
        return None
    for which, part, are in ((2, "the scales of the stored k", "are"), (1, "the stored k without its scales", "is")):
        for words, rule in SLOTS.items():
            if all(not one.whole and held_in_blocks(one, which, rule(Tokens.of(one))) for one in seen):
                return part, f"{are} {words}"
    return None


def held_in_blocks(seen: Seen, which: int, slots: np.ndarray) -> bool:
    """Return whether the features (``which`` is 1) or the scales (2) of the tokens are right in other slots.

    All other bytes are as they were, or in the slots of the tokens. Of two tokens with one slot, the first or the last
    is written there.
    """
    case, memory, own = seen.case, seen.written.memory, seen.case.every_slot
    place, total = case.places[which - 1], case.places[0].shape[0] * case.places[0].shape[1]
    tokens = np.flatnonzero(own >= 0)
    if not ((slots[tokens] >= 0) & (slots[tokens] < total)).all():
        return False
    same = memory == case.memory
    for at in (place.at(slots[tokens]), case.places[2 - which].at(own[tokens])):
        same[torch.from_numpy(at)] = True
    for order in (1, -1) if same.all() else ():
        last = np.array(sorted({slots[token]: token for token in tokens[::order]}.values()))
        moved, few = memory.clone(), np.full_like(own, -1)
        moved[torch.from_numpy(place.at(own[last]))] = memory[torch.from_numpy(place.at(slots[last]))]
        few[last] = own[last]
        one = replace(case, slots=torch.from_numpy(few).to(case.slots))
        if not Seen(seen.subject, one, replace(seen.written, memory=moved)).wrong(K).any():
            return True
    return False


def misplaced(seen: Seen, which: int) -> Iterator[tuple[int, int, int]]:
    """Yield token, slot and right slot of the right rows of k or v that are not in the slots of their tokens."""
    if which not in (K, V) or seen.blocks or not seen.subject.convention.addressed:
        return
    case, place = seen.case, seen.case.places[which - 1]
    if len(seen.written.memory) > MOST_SEARCHED:
        return
    rows = numbers(seen.written.memory)[place.at(np.arange(place.shape[0] * place.shape[1]))]
    for token, right, bound in zip(np.flatnonzero(case.live.numpy()), *seen.definition(which), strict=True):
        hits = np.flatnonzero((abs(rows - right) <= 2 * bound).all(axis=(1, 2)))
        if len(hits) and case.every_slot[token] not in hits:
            yield int(token), int(hits[0]), int(case.every_slot[token])


def slots_in_words(seen: Seen, which: int) -> Iterator[str]:
    """Yield in which slots the right rows of tokens are, if these are not the slots of the tokens."""
    if found := list(misplaced(seen, which)):
        size = seen.case.places[which - 1].shape[1]
        said = [f"token {t} in slot {i} (block {i // size}) in place of slot {slot} (block {slot // size})"
                for t, i, slot in found[:FEW]]  # fmt: skip
        more = f" and {len(found) - FEW} more tokens" if len(found) > FEW else ""
        yield f"{PARTS[which]} is in other slots: {'; '.join(said)}{more}; blocks have {size} slots"
