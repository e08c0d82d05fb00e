"""Calls with many tokens that are wrong where shorter calls are right: the limit, and some tokens of calls beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import torch

from ropelab.conformance.cache.seen import Seen, some_tokens
from ropelab.conformance.cache.subject import CacheSubject
from ropelab.conformance.case import Sizes
from ropelab.conformance.laws.numerics import require_quick
from ropelab.conformance.laws.robustness import long_call, sampled

COUNTED: dict[str, Callable[[int, int], int]] = {
    "tokens": lambda q, k: 1,
    "heads of q of all tokens": lambda q, k: q,
    "heads of k of all tokens": lambda q, k: k,
    "heads of q and k of all tokens": lambda q, k: q + k,
    "heads of q, k and v of all tokens": lambda q, k: q + 2 * k,
}
"""Things that a limit may count, in words -> their number for a token with some heads of q and of k."""


def calls_of_many(subject: CacheSubject, sizes: Sizes) -> Iterator[tuple[str, list[int], list[Seen]]]:
    """Yield circumstances in words, the parts that are wrong in them, and three such calls.

    Halving between the longest call that is right and the shortest that is not finds the limit of each part. Calls with
    more heads tell which things the limit counts.
    """
    asked, told = cache(partial(_wrong, subject)), set[int]()
    for low, high in pairwise((0, *(count + 1 for count in sizes.token_counts))):
        long = long_call(sizes, high)
        try:
            require_quick(subject, long, limit=1.0)
            wrong = asked(long, high) - told
        except Exception:  # the laws show the traceback
            return
        found: dict[str, tuple[int, list[int]]] = {}
        for which in sorted(wrong):
            limit = _limit(lambda n, which=which: which in asked(long, n), low, high)
            counted = _counted(subject, long, limit, lambda of, n, which=which: which in asked(of, n))
            found.setdefault(f"in calls of more than {counted}", (limit, []))[1].append(which)
        told |= wrong
        for words, (limit, parts) in found.items():
            beyond = enumerate((limit + 1, limit + 38, 2 * limit + 3))
            yield words, parts, [_some_seen(subject, replace(long, tokens=n), seed, limit) for seed, n in beyond]


def _wrong(subject: CacheSubject, sizes: Sizes, tokens: int) -> set[int]:
    """Return the parts that are wrong in a call with a number of tokens."""
    seen = _some_seen(subject, replace(sizes, tokens=tokens), 0, tokens)
    return {which for which in seen.parts() if seen.wrong(which).any()}


def _limit(wrong: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number of tokens of a right call, by halving; calls of ``high`` tokens are wrong."""
    if not wrong(high - 1):
        return high - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wrong(middle) else (middle, high)
    return low


def _counted(subject: CacheSubject, sizes: Sizes, limit: int, wrong: Callable[[Sizes, int], bool]) -> str:
    """Return a limit that calls with more heads have as well: of tokens, or of heads of tokens."""
    k_heads = 2 * sizes.k_heads
    wide = replace(sizes, q_heads=(sizes.q_heads // sizes.k_heads + 1) * k_heads, k_heads=k_heads)
    for noun, count in COUNTED.items():
        each, more = (count(of.q_heads, subject.convention.extents(of)[0]) for of in (sizes, wide))
        same = range(limit * each, (limit + 1) * each)  # the limits that the calls with these heads allow
        right, bad = same[0] // more, same[-1] // more + 1
        if right and not wrong(wide, right) and wrong(wide, bad):
            return f"{roundest(same[0], same[-1])} {noun}"
    return f"{limit} tokens of {sizes.q_heads} heads"


def roundest(low: int, high: int) -> int:
    """Return the number from low to high that the largest power of two divides."""
    multiples = (-(-low >> bits) << bits for bits in range(62, -1, -1))  # the first that is not below low
    return next(n for n in multiples if n <= high)


def _some_seen(subject: CacheSubject, sizes: Sizes, seed: int, limit: int) -> Seen:
    """Return some tokens of a long call: those near its ends, near powers of two and near a limit."""
    case = subject.draw(sizes, seed=seed)
    near = (n for n in (limit - 1, limit, limit + 1) if 0 <= n < sizes.tokens)
    at = torch.tensor(sorted({*sampled(sizes.tokens - 1).tolist(), *near}))
    return Seen(subject, *some_tokens(case, subject(case), at), whole=case, at=at.numpy())
