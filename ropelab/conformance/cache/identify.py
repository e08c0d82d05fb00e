"""Identify what an operator that writes a paged cache does wrong: read its call in other ways, and compare.

A mistake explains a part of the results if it reproduces every element, also for fresh numbers, positions and slots.
The words are in `addresses`, `mistakes` and `scale_mistakes`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np

from ropelab.conformance.cache.addresses import PLACES, Tokens, blocks_placed, held, misplaced, placed, slots_in_words
from ropelab.conformance.cache.calls import BLOCKS, Draw, circumstances
from ropelab.conformance.cache.many import calls_of_many
from ropelab.conformance.cache.mistakes import mistakes
from ropelab.conformance.cache.read_off import facts as facts_of
from ropelab.conformance.cache.read_off import hypotheses
from ropelab.conformance.cache.scale_mistakes import other_format
from ropelab.conformance.cache.seen import PARTS, RETURNED, SCALES, Hypothesis, K, Q, Seen, V, off
from ropelab.conformance.cache.subject import Bounded, CacheSubject
from ropelab.conformance.case import Sizes
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.extents import rules
from ropelab.conformance.identify.identification import Identification
from ropelab.conformance.limits import roundest

SEEDS = (0, 1, 2)
"""The last seed is for the proof, and so is a larger call."""
LARGER = 3
"""The first seed of calls with more tokens, heads or features, of which a description has to hold as well."""
DEFINITION = "q, and k and v in the slots of their tokens, are the definition"
LATER = "in a call after another with as many tokens"
UNSEEN = 41
"""A number of tokens that no law asks for, so that the operator has no memory of such a call."""
SECONDS = 10.0
"""The limit of CPU time."""

Mask = Callable[[Seen, tuple[int, ...]], np.ndarray]


def identify_cache(subject: CacheSubject, sizes: Sizes, seconds: float = SECONDS) -> Identification:
    """Return the deviations of an operator, in the widest circumstances in which there are some.

    Args:
        subject: the operator, which broke a law.
        sizes: the extents of the calls.
        seconds: the CPU time after which no further mistake is tried.
    """
    partly: Identification | None = None
    deadline = time.thread_time() + seconds
    # Later calls come first: all else follows.
    for words, draw in {LATER: subject.draw, **circumstances(subject)}.items():
        if time.thread_time() > deadline:
            break
        try:
            seen = [_seen(subject, draw, sizes, seed, words == LATER) for seed in SEEDS]
        except Exception:  # the convention has no such call, or the laws show the traceback
            continue
        wider: list[Seen | None] = []
        other = draw if "with blocks of" in words else partial(draw, block_size=BLOCKS[-1])
        for seed, (more, kept) in enumerate(zip(_more(sizes), (seen, wider), strict=True), LARGER):
            with suppress(Exception):  # an operator may refuse more heads or features, or blocks of another size
                kept.append(_seen(subject, other if kept is seen else draw, more, seed, words == LATER))
        calls = [one for one in seen if one is not None]
        if len(calls) < len(seen) or None in wider:
            continue
        found = _identified([*calls, *(one for one in wider if one is not None)], words, deadline)
        if wider and not (found.proven or found.silent):
            narrow = _identified(calls, f"{words} for heads of {sizes.head_dim} features".lstrip(), deadline)
            found = narrow if narrow.proven else found
        if found.proven:
            if partly is None:
                return found
            return replace(partly, facts=(*partly.facts, *(f"{d} (proven)" for d in found.deviations)))
        partly = partly or (None if found.silent else found)
    if partly is None and time.thread_time() < deadline:
        for words, which, calls in calls_of_many(subject, sizes):
            found = _identified(calls, words, time.thread_time() + seconds / 2, which)
            partly = found if partly is None else _together(partly, found)
    return partly or Identification()


def _together(first: Identification, second: Identification) -> Identification:
    """Return the identification of parts that deviate in other calls each."""
    right = tuple(name for name in first.right if name in second.right)
    if first.proven and second.proven:
        return Identification((*first.deviations, *second.deviations), True, right=right)
    facts = [(*(f"{d} (proven)" for d in one.deviations), *one.facts) for one in (first, second)]
    return Identification((), False, (*first.unexplained, *second.unexplained), facts=(*facts[0], *facts[1]))


def _more(sizes: Sizes) -> Iterator[Sizes]:
    """Yield larger sizes: one more head of k, or of q where heads are in no groups; and twice as many features."""
    groups = sizes.q_heads // sizes.k_heads if sizes.q_heads % sizes.k_heads == 0 else 0
    q_heads = groups * (sizes.k_heads + 1) if groups else sizes.q_heads + 1
    yield replace(sizes, tokens=2 * sizes.tokens + 1, q_heads=q_heads, k_heads=sizes.k_heads + bool(groups))
    yield replace(sizes, head_dim=2 * sizes.head_dim, rotary_dim=2 * sizes.rotary_dim)


def _seen(subject: CacheSubject, draw: Draw, sizes: Sizes, seed: int, later: bool) -> Seen | None:
    """Return a call, or a later call after an earlier one; None if the earlier one was wrong already."""
    if not later:
        case = draw(replace(sizes, tokens=sizes.tokens + seed), seed=seed)
        return Seen(subject, case, subject(case))
    sizes = replace(sizes, batch=1, tokens=UNSEEN + seed)
    earlier, case = draw(sizes, seed=seed), draw(sizes, seed=seed + len(SEEDS))
    if case.scales != (1.0, 1.0, 1.0):
        case = replace(case, scales=(case.scales[0] * 1.5, case.scales[1] * 1.5, case.scales[2] * 1.5))
    if Seen(subject, earlier, subject(earlier)).deviates():
        return None
    return Seen(subject, case, subject(case), earlier)


def _identified(
    seen: list[Seen], circumstances: str, deadline: float, only: Collection[int] = range(len(PARTS))
) -> Identification:
    """Return the deviations of parts in some calls; ``circumstances`` says what the calls have in common."""
    found: list[Deviation] = []
    right, deviating, unexplained, read, places = [], set(), [], [], 0
    outside, kind = any(one.outside() for one in seen), seen[0].subject.convention
    for which in (part for part in seen[0].parts() if part in only):
        part, wrong = PARTS[which], [one.wrong(which) for one in seen]
        bad = _any(wrong)
        deviating |= {part} if bad else set()
        astray = which in (K, V) and outside and not seen[0].blocks
        where = placed(seen, which) if astray or (which in (K, V) and bad) else ""
        if which == K and bad and (apart := blocks_placed(seen)):
            places = 2
            found.append(_deviation(*apart, circumstances))
        elif where:
            places += 1
            found.append(_deviation(part, where, circumstances))
        elif not bad:
            right += [] if which == V and kind.turns_cached else [part]  # it does not get v
            places += astray and all(held(one, which, Tokens.of(one).slot) for one in seen)
        elif explanation := None if _unnamed(seen, which) else _explanation(seen, which, wrong, deadline):
            words, masked = explanation
            if not (part == "k" and f"the stored k {words}" in {f"{d.scope.name} {d.words}" for d in found}):
                found.append(_deviation(part, words, f"{masked} {circumstances}"))
        else:
            share = np.mean([elements.mean() for elements in wrong])
            masks = [(words, mask) for words, mask in _masks(seen, which, wrong) if words]
            narrowest = min(masks, key=lambda named: _share(named[1], seen, wrong), default=("", None))[0]
            reach = f", all of them {narrowest}" if narrowest else ""
            if but := re.fullmatch("for every (.+) but the (first|last)", narrowest):  # others may be right as well
                reach = f", none of them for the {but[2]} {but[1]}"
            first = next(one for one, elements in zip(seen, wrong, strict=True) if elements.any())
            simplest = islice(chain(slots_in_words(first, which), facts_of(first, which)), 1)
            read += [f"{fact} {circumstances}".rstrip() for fact in simplest]
            unexplained.append(f"{part} {circumstances}".rstrip() + f": {share:.0%} of the elements{reach}")
    if outside and places < 2:
        words = "is written outside of the slots of the tokens"
        found.append(_deviation("the memory of the caches", words, circumstances))
    right = [f"{name}, for its scale," if f"the scale of {name}" in deviating else name for name in right]
    if unexplained:
        facts = (*(f"{d} (proven)" for d in found), *read, *(f"{name} is right" for name in right))
        return Identification((), False, tuple(unexplained), facts=facts)
    return Identification(tuple(found), bool(found), right=tuple(right) if found else ())


def _unnamed(seen: list[Seen], which: int) -> bool:
    """Return whether a call has right rows in slots that no token has: addresses, not numbers, are wrong."""
    return any(slot not in (one.whole or one.case).every_slot for one in seen for _, slot, _ in misplaced(one, which))


def _any(wrong: list[np.ndarray]) -> bool:
    return any(elements.any() for elements in wrong)


def _deviation(part: str, words: str, where: str) -> Deviation:
    """Return a deviation; the mistake itself is its simulation."""
    return Deviation("call", words, DEFINITION, lambda plan: None, scope=Scope(part, words=where.strip()))


def _explanation(seen: list[Seen], which: int, wrong: list[np.ndarray], deadline: float) -> tuple[str, str] | None:
    """Return a mistake and the elements that have it, in words; mistakes that look alike are told together."""
    if words := other_format(seen, which):
        return words, ""
    for known in (mistakes(seen, which), hypotheses(seen[0], which)):
        with np.errstate(all="ignore"):
            named = list(known)
        told: dict[tuple[int, int], Bounded | None] = {}
        for where, mask in _masks(seen, which, wrong):
            same = []
            for number, (_, mistake) in enumerate(named):
                if time.thread_time() > deadline:
                    return None
                if all(_reproduces(s, which, mistake, mask, told, (number, i)) for i, s in enumerate(seen)):
                    same.append(number)
            others = [n for n in same if not all(_alike(told, same[0], n, i, s, mask) for i, s in enumerate(seen))]
            if same:
                return " or ".join(named[n][0] for n in (same[0], *others[:1])), where
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
    seen: Seen, which: int, mistake: Hypothesis, mask: Mask,
    known: dict[tuple[int, int], Bounded | None], key: tuple[int, int],
) -> bool:  # fmt: skip
    if key not in known:
        try:
            with np.errstate(all="ignore"):
                known[key] = mistake(seen, which)
        except (ValueError, IndexError, TypeError):
            known[key] = None
    right, error = seen.definition(which)
    found = known[key]
    if found is None or found[0].shape != right.shape:
        return False
    hit = mask(seen, right.shape)
    return not off(seen.actual(which), (np.where(hit, found[0], right), np.where(hit, found[1], error))).any()


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
    axes = {0: "token with a slot" if skipped else "token", 1: "head"}
    if any(one.whole for one in seen):  # the first and the last token of a part are any tokens
        del axes[0]
    for axis, noun in axes.items():
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
    if not all(map(_is_by_token, seen, wrong)):
        return
    if any(len(one.case.slots) < one.case.tokens for one in seen):
        yield (
            "for tokens behind the last slot",
            lambda one, shape: (
                np.arange(shape[0]) >= (len(one.case.slots) if shape[0] == one.case.tokens else shape[0])
            )[:, None, None],
        )
    addressed = seen[0].subject.convention.addressed
    for noun, number in PLACES.items() if addressed else (("at positions", PLACES["at positions"]),):
        hits, rest = set[int](), set[int]()
        for one, elements in zip(seen, wrong, strict=True):
            of, bad = _of_tokens(one, number, len(elements)), elements.any(axis=(1, 2))
            hits |= set(of[bad].tolist())
            rest |= set(of[~bad].tolist())
        for words, holds in _predicates(noun, hits, rest):

            def mask(one: Seen, shape: tuple[int, ...], number=number, holds=holds) -> np.ndarray:
                return holds(_of_tokens(one, number, shape[0]))[:, None, None]

            if all(holds(np.array([n]))[0] for n in hits) and not all(holds(np.array([n]))[0] for n in rest):
                yield words, mask


def _is_by_token(one: Seen, elements: np.ndarray) -> bool:
    """Return whether elements ``[n, H, D]`` belong to all tokens of a call, or to those with a slot."""
    return elements.ndim == 3 and len(elements) in (one.case.tokens, int(one.case.live.sum()))


def _of_tokens(one: Seen, number: Callable[[Tokens], np.ndarray], count: int) -> np.ndarray:
    """Return numbers of all tokens of a call, or of those with a slot."""
    numbers = number(Tokens.of(one))[one.number]
    return numbers if count == one.case.tokens else numbers[one.case.live.numpy()]


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
        begin = roundest(max(below) + 1, first)
        yield f"{noun} from {begin} on", lambda n: n >= begin
    if above := [n for n in rest if n > last]:
        end = roundest(last + 1, min(above))
        yield f"{noun} below {end}", lambda n: n < end


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

    def tokens(one: Seen, shape: tuple[int, ...]) -> tuple[np.ndarray, int]:
        if one.whole is None:
            return np.arange(shape[0])[:, None, None], shape[0]
        number = one.number if shape[0] == one.case.tokens else one.number[one.case.live.numpy()]
        return number[:, None, None], one.whole.tokens

    counts: dict[str, tuple[str, Callable[[Seen, tuple[int, ...]], tuple[np.ndarray, int]]]] = {
        "features": ("", lambda one, shape: (np.arange(shape[2]), shape[2])),
        "heads": ("", lambda one, shape: (np.arange(shape[1])[:, None], shape[1])),
        "tokens": ("", tokens),
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
