"""Identify what an operator that writes a paged cache does wrong: read its call in other ways, and compare.

A mistake explains a part of the results if it reproduces every element, also for fresh numbers, positions and slots.
The words are in `mistakes` and `scale_mistakes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch

from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase, bits
from ropelab.conformance.cache.laws import of_every_size, with_yarn
from ropelab.conformance.cache.mistakes import SLOTS, STRIDES, measured, mistakes, own_slots, own_strides
from ropelab.conformance.cache.read_off import facts as facts_of
from ropelab.conformance.cache.read_off import hypotheses, places
from ropelab.conformance.cache.scale_mistakes import Hypothesis, other_format
from ropelab.conformance.cache.seen import PARTS, RETURNED, SCALES, K, Q, Seen, V, held, held_in_blocks, off
from ropelab.conformance.cache.subject import Bounded, CacheSubject
from ropelab.conformance.case import Sizes
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.extents import rules
from ropelab.conformance.identify.identification import Identification
from ropelab.kernels.float8 import FLOAT8_DTYPES

SEEDS = (0, 1, 2)
"""The last seed is for the proof, and so is a larger call."""
LARGER = 3
"""The first seed of calls with more tokens, heads or features, of which a description has to hold as well."""
BLOCKS = (32, 8)
"""Numbers of slots of a block beside the usual 16."""
DEFINITION = "q, and k and v in the slots of their tokens, are the definition"
LATER = "in a call after another with as many tokens"
UNSEEN = 41
"""A number of tokens that no law asks for, so that the operator has no memory of such a call."""

Draw = Callable[..., CacheCase]
Mask = Callable[[Seen, tuple[int, ...]], np.ndarray]


def identify_cache(subject: CacheSubject, sizes: Sizes) -> Identification:
    """Return the deviations of an operator, in the widest circumstances in which there are some.

    Args:
        subject: the operator, which broke a law.
        sizes: the extents of the calls.
    """
    partly: Identification | None = None
    for words, draw in _circumstances(subject).items():
        try:
            seen = [_seen(subject, draw, sizes, seed, words == LATER) for seed in SEEDS]
        except Exception:  # the convention has no such call, or the laws show the traceback
            continue
        wider: list[Seen | None] = []
        other = draw if "block_size" in getattr(draw, "keywords", {}) else partial(draw, block_size=BLOCKS[-1])
        for seed, (more, kept) in enumerate(zip(_more(sizes), (seen, wider), strict=True), LARGER):
            with suppress(Exception):  # an operator may refuse more heads or features, or blocks of another size
                kept.append(_seen(subject, other if kept is seen else draw, more, seed, words == LATER))
        calls = [one for one in seen if one is not None]
        if len(calls) < len(seen) or None in wider:
            continue
        found = _identified(subject, [*calls, *(one for one in wider if one is not None)], words)
        if wider and not (found.proven or found.silent):
            narrow = _identified(subject, calls, f"{words} for heads of {sizes.head_dim} features".lstrip())
            found = narrow if narrow.proven else found
        if found.proven:
            if partly is None:
                return found
            return replace(partly, facts=(*partly.facts, *(f"{d} (proven)" for d in found.deviations)))
        partly = partly or (None if found.silent else found)
    return partly or Identification()


def _circumstances(subject: CacheSubject) -> dict[str, Draw]:
    """Return circumstances in words -> a function that draws such a call. Later calls come first: all else follows."""
    kind, draw = subject.convention, subject.draw
    found: dict[str, Draw] = {LATER: draw, "": draw}
    found["where every token has a slot"] = partial(draw, skipped=False)
    if kind.own_angles:
        found["where the call asks for YaRN"] = lambda *of, **options: with_yarn(draw(*of, **options))
    if kind.optional_norm:
        found["without a norm"] = partial(draw, norm=False)
    if kind.norm:
        found["for heads of small numbers"] = partial(_small, draw)
    if kind.offset:
        found["where the weights have an offset"] = partial(draw, weight_offset=1.0)
    for size in BLOCKS if kind.addressed else ():
        found[f"in caches with blocks of {size} slots"] = partial(draw, block_size=size)
    for order in kind.orders[1:]:
        found[f"in caches in {order}"] = partial(draw, order=order)
    if kind.fewer_slots:
        found["in a call with fewer slots than tokens"] = partial(_fewer, draw)
    if isinstance(kind, BlockScales):
        found["for heads of every size, from zeros to large numbers"] = lambda *of, **options: of_every_size(
            draw(*of, **options)
        )
    dtypes = () if isinstance(kind, BlockScales) else FLOAT8_DTYPES
    for dtype in dtypes:
        name = f"in caches of {_name(dtype)}"
        found[name] = partial(draw, cache_dtype=dtype)
        if not kind.turns_cached:
            found[f"{name} beyond the largest number"] = partial(_large, partial(draw, cache_dtype=dtype))
    return found


def _more(sizes: Sizes) -> Iterator[Sizes]:
    """Yield larger sizes: one more head of k, or of q where heads are in no groups; and twice as many features."""
    groups = sizes.q_heads // sizes.k_heads if sizes.q_heads % sizes.k_heads == 0 else 0
    q_heads = groups * (sizes.k_heads + 1) if groups else sizes.q_heads + 1
    yield replace(sizes, tokens=2 * sizes.tokens + 1, q_heads=q_heads, k_heads=sizes.k_heads + bool(groups))
    yield replace(sizes, head_dim=2 * sizes.head_dim, rotary_dim=2 * sizes.rotary_dim)


def _small(draw: Draw, *of, **options) -> CacheCase:
    case = draw(*of, **options)
    return replace(case, inputs=tuple(x * 2.0**-10 for x in case.inputs))


def _large(draw: Draw, *of, **options) -> CacheCase:
    case = draw(*of, **options)
    q, k, v = (scale * 2.0**-15 for scale in case.scales)
    return replace(case, scales=(q, k, v))


def _fewer(draw: Draw, *of, **options) -> CacheCase:
    case = draw(*of, **options)
    return replace(case, slots=case.slots[: case.tokens // 2])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _seen(subject: CacheSubject, draw: Draw, sizes: Sizes, seed: int, later: bool) -> Seen | None:
    """Return a call, or a later call after an earlier one; None if the earlier one was wrong already."""
    if not later:
        case = draw(replace(sizes, tokens=sizes.tokens + seed), seed=seed)
        return Seen(case, subject(case))
    sizes = replace(sizes, batch=1, tokens=UNSEEN + seed)
    earlier, case = draw(sizes, seed=seed), draw(sizes, seed=seed + len(SEEDS))
    if case.scales != (1.0, 1.0, 1.0):
        case = replace(case, scales=(case.scales[0] * 1.5, case.scales[1] * 1.5, case.scales[2] * 1.5))
    first = Seen(earlier, subject(earlier))
    if _deviating(subject, first):
        return None
    return Seen(case, subject(case), earlier)


def _deviating(subject: CacheSubject, seen: Seen) -> bool:
    there = (which for which in range(len(PARTS)) if seen.actual(subject, which) is not None)
    return _outside(seen) or any(seen.wrong(subject, which).any() for which in there)


def _outside(seen: Seen) -> bool:
    """Return whether memory outside of the slots of the tokens changed."""
    outside = ~seen.case.named().to(seen.written.memory.device)
    return bool((bits(seen.written.memory) != bits(seen.case.memory))[outside].any())


def _identified(subject: CacheSubject, seen: list[Seen], circumstances: str) -> Identification:
    """Return the deviations in some calls; ``circumstances`` says what they have in common."""
    found: list[Deviation] = []
    right, deviating, unexplained, read, misplaced = [], set(), [], [], 0
    outside = any(map(_outside, seen))
    for which, part in enumerate(PARTS):
        if seen[0].actual(subject, which) is None:
            continue
        wrong = [one.wrong(subject, which) for one in seen]
        deviating |= {part} if _any(wrong) else set()
        astray = which in (K, V) and outside and not isinstance(subject.convention, BlockScales)
        placed = _placed(subject, seen, which) if astray or (which in (K, V) and _any(wrong)) else ""
        if which == K and (apart := _blocks_placed(subject, seen, wrong)):
            misplaced = 2
            found.append(_deviation(*apart, circumstances))
        elif placed:
            misplaced += 1
            found.append(_deviation(part, placed, circumstances))
        elif not _any(wrong):
            right += [] if which == V and subject.convention.turns_cached else [part]  # it does not get v
            misplaced += astray and all(held(subject, one, which, own_slots, own_strides) for one in seen)
        elif explanation := _explanation(subject, seen, which, wrong):
            words, where = explanation
            if not (part == "k" and f"the stored k {words}" in {f"{d.scope.name} {d.words}" for d in found}):
                found.append(_deviation(part, words, f"{where} {circumstances}"))
        else:
            share = np.mean([elements.mean() for elements in wrong])
            masks = [(words, mask) for words, mask in _masks(seen, which, wrong) if words]
            narrowest = min(masks, key=lambda named: _share(named[1], seen, wrong), default=("", None))[0]
            where = f", all of them {narrowest}" if narrowest else ""
            if but := re.fullmatch("for every (.+) but the (first|last)", narrowest):  # others may be right as well
                where = f", none of them for the {but[2]} {but[1]}"
            first = next(one for one, elements in zip(seen, wrong, strict=True) if elements.any())
            read += [f"{fact} {circumstances}".rstrip() for fact in _read(subject, first, which)]
            unexplained.append(f"{part} {circumstances}".rstrip() + f": {share:.0%} of the elements{where}")
    if outside and misplaced < 2:
        words = "is written outside of the slots of the tokens"
        found.append(_deviation("the memory of the caches", words, circumstances))
    right = [f"{name}, for its scale," if f"the scale of {name}" in deviating else name for name in right]
    if unexplained:
        facts = (*(f"{d} (proven)" for d in found), *read, *(f"{name} is right" for name in right))
        return Identification((), False, tuple(unexplained), facts=facts)
    return Identification(tuple(found), bool(found), right=tuple(right) if found else ())


def _read(subject: CacheSubject, seen: Seen, which: int) -> Iterator[str]:
    """Yield the simplest fact of a call: where rows are, or else what they are."""
    yield from islice(chain(places(subject, seen, which), facts_of(subject, seen, which)), 1)


def _any(wrong: list[np.ndarray]) -> bool:
    return any(elements.any() for elements in wrong)


def _deviation(part: str, words: str, where: str) -> Deviation:
    """Return a deviation; the mistake itself is its simulation."""
    return Deviation("call", words, DEFINITION, lambda plan: None, scope=Scope(part, words=where.strip()))


def _placed(subject: CacheSubject, seen: list[Seen], which: int) -> str:
    """Return where an operator writes k or v by mistake, if that explains the whole cache; else an empty string."""
    if isinstance(subject.convention, BlockScales) or not subject.convention.addressed:
        return ""
    for words, slots in SLOTS.items():
        moved = any(not torch.equal(slots(one), own_slots(one)) for one in seen)
        if moved and all(_held(subject, one, which, slots, own_strides) for one in seen):
            return words
    for words, strides in STRIDES.items():
        moved = any(strides(one, which) != own_strides(one, which) for one in seen)
        if moved and all(_held(subject, one, which, own_slots, strides) for one in seen):
            return words
    return ""


def _blocks_placed(subject: CacheSubject, seen: list[Seen], wrong: list[np.ndarray]) -> tuple[str, str] | None:
    """Return which of features and scales of blocks are in other slots, and in which, if that explains all bytes."""
    if not (isinstance(subject.convention, BlockScales) and subject.convention.addressed and _any(wrong)):
        return None
    for which, part in ((2, "the scales of the stored k"), (1, "the stored k without its scales")):
        for words, slots in SLOTS.items():
            if all(held_in_blocks(subject, one, which, slots) for one in seen):
                return part, words if which == 1 else words.replace("is in", "are in", 1)
    return None


def _held(subject: CacheSubject, seen: Seen, which: int, slots, strides) -> bool:
    try:
        return held(subject, seen, which, slots, strides)
    except IndexError:  # the mistaken address is beyond the memory
        return False


def _explanation(
    subject: CacheSubject, seen: list[Seen], which: int, wrong: list[np.ndarray]
) -> tuple[str, str] | None:
    """Return a mistake and the elements that have it, in words; mistakes that look alike are told together."""
    if words := other_format(subject, seen, which):
        return words, ""
    for known in (
        list(mistakes(subject, seen, which)),
        [*measured(subject, seen[0], which), *hypotheses(subject, seen[0], which)],
    ):
        told: dict[tuple[int, int], Bounded | None] = {}
        for where, mask in _masks(seen, which, wrong):
            same = [
                number for number, (_, mistake) in enumerate(known)
                if all(_reproduces(subject, s, which, mistake, mask, told, (number, i)) for i, s in enumerate(seen))
            ]  # fmt: skip
            others = [n for n in same if not all(_alike(told, same[0], n, i, s, mask) for i, s in enumerate(seen))]
            if same:
                return " or ".join(known[n][0] for n in (same[0], *others[:1])), where
    return None


def _alike(
    told: dict[tuple[int, int], Bounded | None], first: int, other: int, call: int, seen: Seen, mask: Mask
) -> bool:
    """Return whether two mistakes make the same numbers of a call, within a mask."""
    ones, others = told[first, call], told[other, call]
    assert ones is not None and others is not None, "both reproduce the call"
    hit = np.broadcast_to(mask(seen, ones[0].shape), ones[0].shape)
    return bool(np.array_equal(ones[0][hit], others[0][hit], equal_nan=True))


def _reproduces(
    subject: CacheSubject, seen: Seen, which: int, mistake: Hypothesis, mask: Mask,
    known: dict[tuple[int, int], Bounded | None], key: tuple[int, int],
) -> bool:  # fmt: skip
    if key not in known:
        try:
            with np.errstate(all="ignore"):
                known[key] = mistake(subject, seen, which)
        except (ValueError, IndexError, TypeError):
            known[key] = None
    right, error = seen.definition(subject, which)
    found = known[key]
    if found is None or found[0].shape != right.shape:
        return False
    hit = mask(seen, right.shape)
    return not off(seen.actual(subject, which), (np.where(hit, found[0], right), np.where(hit, found[1], error))).any()


def _masks(seen: list[Seen], which: int, wrong: list[np.ndarray]) -> Iterator[tuple[str, Mask]]:
    """Yield elements in words that contain all wrong ones, the widest first: tokens with a slot, heads, features."""
    yield "", lambda one, shape: np.ones(shape, bool)
    places: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
        "for the last {}": lambda i, n: i == n - 1,
        "for the first {}": lambda i, n: i == 0,
        "for every {} but the last": lambda i, n: i < n - 1,
        "for every {} but the first": lambda i, n: i > 0,
        "for every second {}": lambda i, n: i % 2 == 1,
        "for the first {} and every second after it": lambda i, n: i % 2 == 0,
    }
    skipped = any((one.case.slots < 0).any() or len(one.case.slots) < one.case.tokens for one in seen)
    for axis, noun in enumerate(("token with a slot" if skipped else "token", "head")):
        for words, place in places.items():

            def mask(one: Seen, shape: tuple[int, ...], axis=axis, place=place) -> np.ndarray:
                return place(np.indices(shape, sparse=True)[axis], shape[axis])

            hit = (np.broadcast_to(mask(s, e.shape), e.shape)[e].all() for s, e in zip(seen, wrong, strict=True))
            if all(e.shape[axis] > 1 for e in wrong) and all(hit):
                yield words.format(noun), mask
    yield from _attributes(seen, wrong)
    yield from _extents(seen, which, wrong)


def _attributes(seen: list[Seen], wrong: list[np.ndarray]) -> Iterator[tuple[str, Mask]]:
    """Yield tokens in words by the numbers that they have: block, place in a block, slot and position."""
    if any(
        e.ndim != 3 or len(e) not in (s.case.tokens, int(s.case.live.sum())) for s, e in zip(seen, wrong, strict=True)
    ):
        return
    if any(len(one.case.slots) < one.case.tokens for one in seen):
        yield (
            "for tokens behind the last slot",
            lambda one, shape: (
                np.arange(shape[0]) >= (len(one.case.slots) if shape[0] == one.case.tokens else shape[0])
            )[:, None, None],
        )
    for noun, number in NUMBERS.items():
        hits, rest = set[int](), set[int]()
        for one, elements in zip(seen, wrong, strict=True):
            of, bad = number(_of_tokens(one, len(elements))), elements.any(axis=(1, 2))
            hits |= set(of[bad].tolist())
            rest |= set(of[~bad].tolist())
        for words, holds in _predicates(noun, hits, rest):

            def mask(one: Seen, shape: tuple[int, ...], number=number, holds=holds) -> np.ndarray:
                return holds(number(_of_tokens(one, shape[0])))[:, None, None]

            if all(holds(np.array([n]))[0] for n in hits) and not all(holds(np.array([n]))[0] for n in rest):
                yield words, mask


def _is_by_token(one: Seen, elements: np.ndarray) -> bool:
    """Return whether elements ``[n, H, D]`` belong to all tokens of a call, or to those with a slot."""
    return elements.ndim == 3 and len(elements) in (one.case.tokens, int(one.case.live.sum()))


def _of_tokens(one: Seen, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return slots and positions of all tokens of a call, or of those with a slot, and the slots of a block."""
    kept = one.case.live.numpy() if count < one.case.tokens else np.ones(one.case.tokens, bool)
    return own_slots(one).numpy()[kept], one.case.token_positions()[0].numpy()[kept], one.case.places[0].shape[1]


NUMBERS: dict[str, Callable[[tuple[np.ndarray, np.ndarray, int]], np.ndarray]] = {
    "in blocks of the cache": lambda of: of[0] // of[2],
    "at places of their block": lambda of: of[0] % of[2],
    "in slots": lambda of: of[0],
    "at positions": lambda of: of[1],
}
"""Numbers of tokens in words."""


def _predicates(noun: str, hits: set[int], rest: set[int]) -> Iterator[tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """Yield predicates about numbers in words that hold for all ``hits``, and not for all of the ``rest``."""
    if not hits or not rest:
        return
    yield f"{noun} other than 0", lambda n: n != 0
    yield f"{noun} of odd numbers", lambda n: n % 2 == 1
    yield f"{noun} of even numbers", lambda n: n % 2 == 0
    yield f"{noun} below 0", lambda n: n < 0
    first, last = min(hits), max(hits)
    if below := [n for n in rest if n < first]:
        begin = _roundest(max(below) + 1, first)
        yield f"{noun} from {begin} on", lambda n: n >= begin
    if above := [n for n in rest if n > last]:
        end = _roundest(last + 1, min(above))
        yield f"{noun} below {end}", lambda n: n < end


def _roundest(low: int, high: int) -> int:
    """Return the number from low to high that the largest power of two divides."""
    multiples = (-(-low >> bits) << bits for bits in range(62, -1, -1))  # the first that is not below low
    return next(n for n in multiples if n <= high)


def _share(mask: Mask, seen: list[Seen], wrong: list[np.ndarray]) -> float:
    """Return which part of all elements a mask contains."""
    return sum(np.broadcast_to(mask(s, e.shape), e.shape).mean() for s, e in zip(seen, wrong, strict=True))


def _extents(seen: list[Seen], which: int, wrong: list[np.ndarray]) -> Iterator[tuple[str, Mask]]:
    """Yield the last heads or features of a call by a rule about its extents; see ``identify.extents``."""
    own = K if which == RETURNED else which
    if which >= SCALES or not all(map(_is_by_token, seen, wrong)):
        return

    def heads(one: Seen, shape: tuple[int, ...], inputs: tuple[int, ...]) -> tuple[np.ndarray, int]:
        token = np.flatnonzero(one.case.live.numpy()) if len(one.case.live) > shape[0] else np.arange(shape[0])
        sizes = [one.case.inputs[i].shape[2] for i in inputs]
        before = sum(sizes[: inputs.index(own)])
        head = token[:, None, None] * sum(sizes) + before + np.arange(shape[1])[:, None]
        return head, one.case.tokens * sum(sizes)

    counts: dict[str, tuple[str, Callable[[Seen, tuple[int, ...]], tuple[np.ndarray, int]]]] = {
        "features": ("", lambda one, shape: (np.arange(shape[2]), shape[2])),
        "heads": ("", lambda one, shape: (np.arange(shape[1])[:, None], shape[1])),
        "tokens": ("", lambda one, shape: (np.arange(shape[0])[:, None, None], shape[0])),
    }
    for inputs, names in (((own,), "its heads"), ((Q, K), "heads of q and k"), ((Q, K, V), "heads of q, k and v")):
        if own in inputs:
            counts[names] = ", counted from token to token", partial(heads, inputs=inputs)
    for noun, (counted, count) in counts.items():
        found = []
        for one, elements in zip(seen, wrong, strict=True):
            if elements.any():
                number, size = count(one, elements.shape)
                found.append((int(np.broadcast_to(number, elements.shape)[elements].min()), size))
        begins = {one.case.inputs[Q].shape[2] if own == K else 0 for one in seen}  # the first head of all, for k
        if all(first for first, _ in found) and {first for first, _ in found} != begins:
            for words, begin in rules(found, noun):

                def mask(one: Seen, shape: tuple[int, ...], count=count, begin=begin) -> np.ndarray:
                    number, size = count(one, shape)
                    return number >= begin(size)

                yield words + counted, mask
