"""The limit beyond which calls are wrong: what it counts, told from calls of other extents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ropelab.conformance.case import Sizes

Count = Callable[[Sizes], int]
"""How many of something a call of some sizes has."""


def counts(
    first: str, *, sequences: bool, pair: bool, values: bool = False, k_heads: Count = lambda s: s.k_heads
) -> dict[str, Count]:
    """Return what a limit may count, in words, the simplest first.

    Args:
        first: the name of the first input.
        sequences: whether a call may have several sequences.
        pair: whether the function takes k as well.
        values: whether the function takes v as well, with the heads of k.
        k_heads: the heads of k of a call.
    """

    def every(of: Count, features: bool = False) -> Count:
        return lambda s: s.batch * s.tokens * of(s) * (s.head_dim if features else 1)

    heads: dict[str, Count] = {first: lambda s: s.q_heads}
    if pair:
        heads |= {"k": k_heads, "q and k": lambda s: s.q_heads + k_heads(s)}
    if pair and values:
        heads["q, k and v"] = lambda s: s.q_heads + 2 * k_heads(s)
    tokens = every(lambda s: 1)
    return {
        **({"tokens": lambda s: s.tokens, "tokens of all sequences": tokens} if sequences else {"tokens": tokens}),
        **{f"heads of {name} of all tokens": every(of) for name, of in heads.items()},
        **{f"elements of {name}": every(of, features=True) for name, of in heads.items()},
    }


def limit_in_words(sizes: Sizes, known: dict[str, Count], wrong: Callable[[Sizes], bool | None]) -> str:
    """Return the limit that calls of other extents have as well, or the limit of these extents if there is none.

    Args:
        sizes: the extents of the longest right call: one token more is wrong.
        known: what the limit may count, see `counts`.
        wrong: whether a call is wrong; None for a call that cannot be made.
    """
    for words, count in known.items():
        low, high = count(sizes), count(replace(sizes, tokens=sizes.tokens + 1)) - 1
        if all(_holds(count, low, high, other, wrong) for other in _others(sizes)):
            return f"{roundest(low, high)} {words}"
    return f"{sizes.tokens} tokens of {sizes.q_heads} heads of {sizes.head_dim} features"


def _holds(count: Count, low: int, high: int, other: Sizes, wrong: Callable[[Sizes], bool | None]) -> bool:
    """Return whether a limit between ``low`` and ``high`` is possible in calls of other extents."""
    each = count(replace(other, tokens=1))
    right, beyond = (replace(other, tokens=n) for n in (low // each, high // each + 1))
    return bool(right.tokens) and not wrong(right) and wrong(beyond) is not False


def _others(sizes: Sizes) -> Iterator[Sizes]:
    k_heads = 2 * sizes.k_heads
    yield replace(sizes, batch=2 * sizes.batch)
    yield replace(sizes, q_heads=(sizes.q_heads // sizes.k_heads + 1) * k_heads, k_heads=k_heads)
    yield replace(sizes, head_dim=2 * sizes.head_dim, rotary_dim=2 * sizes.rotary_dim)


def longest_right(wrong: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number of tokens of a right call, by halving.

    Args:
        wrong: whether a call with a number of tokens is wrong.
        low: a number of tokens of a right call, or 0.
        high: a number of tokens of a wrong call. It is often the first.
    """
    middle = high - 1
    while high - low > 1:
        low, high = (low, middle) if wrong(middle) else (middle, high)
        middle = (low + high) // 2
    return low


def roundest(low: int, high: int) -> int:
    """Return the number from low to high that the largest power of two divides."""
    multiples = (-(-low >> bits) << bits for bits in range(62, -1, -1))  # the first that is not below low
    return next(n for n in multiples if n <= high)
