"""Calls with many tokens that are wrong where shorter calls are right: the limit, and some tokens beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import torch

from ropelab.conformance.cache.seen import Seen, some_tokens
from ropelab.conformance.cache.subject import CacheSubject
from ropelab.conformance.case import Sizes
from ropelab.conformance.laws.robustness import long_call, sampled
from ropelab.conformance.limits import counts, limit_in_words, longest_right


def calls_of_many(subject: CacheSubject, sizes: Sizes) -> Iterator[tuple[str, list[int], list[Seen]]]:
    """Yield circumstances in words, the parts that are wrong in them, and three such calls.

    Each part has a limit of its own: see `ropelab.conformance.limits`.
    """
    asked, told = cache(partial(_wrong, subject)), set[int]()
    for low, high in pairwise((0, *(count + 1 for count in sizes.token_counts))):
        try:
            long = long_call(subject, sizes, high)
            wrong = asked(long) - told
        except Exception:  # the laws show the traceback
            return
        found: dict[str, tuple[int, list[int]]] = {}
        for which in sorted(wrong):
            limit, words = _limit(subject, long, low, partial(_among, which, asked))
            found.setdefault(f"in calls of more than {words}", (limit, []))[1].append(which)
        told |= wrong
        for words, (limit, parts) in found.items():
            beyond = enumerate((limit + 1, limit + 38, 2 * limit + 3))
            yield words, parts, [_some_seen(subject, replace(long, tokens=n), seed, limit) for seed, n in beyond]


def _among(which: int, asked: Callable[[Sizes], set[int]], sizes: Sizes) -> bool:
    return which in asked(sizes)


def _limit(subject: CacheSubject, sizes: Sizes, low: int, wrong: Callable[[Sizes], bool]) -> tuple[int, str]:
    """Return the tokens of the longest right call, and the limit in words; ``sizes`` are those of a wrong call."""

    def k_heads(of: Sizes) -> int:
        return subject.convention.extents(of)[0]

    known = counts("q", sequences=False, pair=True, values=True, k_heads=k_heads)
    limit = longest_right(lambda n: wrong(replace(sizes, tokens=n)), low, sizes.tokens)
    return limit, limit_in_words(replace(sizes, tokens=limit), known, wrong)


def _wrong(subject: CacheSubject, sizes: Sizes) -> set[int]:
    """Return the parts that are wrong in a call; a call of several sequences is one of their tokens."""
    sizes = replace(sizes, batch=1, tokens=sizes.batch * sizes.tokens)
    seen = _some_seen(subject, sizes, 0, sizes.tokens)
    return {which for which in seen.parts() if seen.wrong(which).any()}


def _some_seen(subject: CacheSubject, sizes: Sizes, seed: int, limit: int) -> Seen:
    """Return some tokens of a long call: those near its ends, near powers of two and near a limit."""
    case = subject.draw(sizes, seed=seed)
    near = (n for n in (limit - 1, limit, limit + 1) if 0 <= n < sizes.tokens)
    at = torch.tensor(sorted({*sampled(sizes.tokens - 1).tolist(), *near}))
    return Seen(subject, *some_tokens(case, subject(case), at), whole=case, at=at.numpy())
