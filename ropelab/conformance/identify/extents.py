"""Find the places from which calls deviate as rules about extents: numbers of tokens, heads and pairs, and products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ropelab.conformance.identify.evidence import Answer
from ropelab.conformance.identify.plan import Plan

Count = Callable[[Plan], tuple[np.ndarray, int]]
"""Returns the numbers of all places of a call, which broadcast to ``[B, S, H, pairs]``, and how many there are."""

Begin = Callable[[int], int]
"""Returns the first place that deviates, from the number of places."""

FEW = 2
"""The number of rules of one kind that are tried, the smallest blocks first."""


def _pairs(plan: Plan) -> tuple[np.ndarray, int]:
    count = plan.rotary_dim // 2
    return np.arange(count), count


def _over_heads(plan: Plan) -> tuple[np.ndarray, int]:
    pair, count = _pairs(plan)
    return plan.head * count + pair, plan.shape[2] * count


def _over_tokens(plan: Plan) -> tuple[np.ndarray, int]:
    heads = plan.shape[2]
    number = (plan.batch * plan.tokens + plan.token) * heads + plan.head
    return number, plan.shape[0] * plan.tokens * heads


def _over_sequences(plan: Plan) -> tuple[np.ndarray, int]:
    return plan.batch * plan.tokens + plan.token, plan.shape[0] * plan.tokens


def _over_inputs(plan: Plan) -> tuple[np.ndarray, int]:
    heads = [x.shape[2] for x in plan.question.case.inputs]
    return plan.head + sum(heads[: plan.which]), sum(heads)


COUNTS: dict[str, tuple[str, Count]] = {
    "heads": ("", lambda plan: (plan.head, plan.shape[2])),
    "pairs": ("", _pairs),
    "tokens": ("", lambda plan: (plan.token, plan.tokens)),
    "pairs of a token": (", counted over its heads", _over_heads),
    "heads of q and k": (", counted from the first of q", _over_inputs),
    "tokens of the batch": (", counted over the sequences", _over_sequences),
    "heads of all tokens": (", counted from token to token", _over_tokens),
}
"""Places in words -> how they are counted."""


def extents(wrong: list[tuple[Answer, np.ndarray]]) -> Iterator[tuple[str, Callable[[Plan], np.ndarray]]]:
    """Yield masks in words of the last places of a call, each of which contains all wrong elements.

    Args:
        wrong: answers with their wrong elements ``[B, S, H, D]``.
    """
    hits = [(answer, _paired(answer, elements)) for answer, elements in wrong]
    if not hits or not all(pairs.any() for _, pairs in hits):
        return
    for noun, (counted, count) in COUNTS.items():
        found = []
        for answer, pairs in hits:
            plan = _plan(answer)
            number, size = count(plan)
            numbers = np.broadcast_to(number, pairs.shape)
            found.append((int(numbers[pairs].min()), size))
        if any(first == 0 for first, _ in found):
            continue
        if count is _over_inputs and _only_k(hits, found):
            continue  # all heads of k
        for words, begin in rules(found, noun):
            yield words + counted, _from(count, begin)


def _only_k(hits: list, found: list[tuple[int, int]]) -> bool:
    firsts = (answer.question.case.inputs[0].shape[2] for answer, _ in hits)
    return all(first == begin for first, (begin, _) in zip(firsts, found, strict=True))


def _plan(answer: Answer) -> Plan:
    """Return a plan of the answer's call; a question that was simulated has one."""
    plan = answer.question.plans.get((answer.which, None))
    assert isinstance(plan, Plan), "wrong elements follow from a simulation"
    return plan


def _paired(answer: Answer, elements: np.ndarray) -> np.ndarray:
    """Return which pairs have wrong elements, ``[B, S, H, pairs]``."""
    plan = _plan(answer)
    turned = elements[..., : plan.rotary_dim]
    count = plan.rotary_dim // 2
    layout = plan.layout if plan.is_gradient else plan.out_layout
    axis = -2 if layout == "split_half" else -1
    shape = (2, count) if layout == "split_half" else (count, 2)
    return np.asarray(turned.reshape(*turned.shape[:-1], *shape).any(axis=axis))


def _from(count: Count, begin: Begin) -> Callable[[Plan], np.ndarray]:
    def mask(plan: Plan) -> np.ndarray:
        number, size = count(plan)
        return np.asarray(number >= begin(size))

    return mask


def rules(found: list[tuple[int, int]], noun: str) -> Iterator[tuple[str, Begin]]:
    """Yield the rules that have every first deviating place, and most of them exactly.

    Args:
        found: for each call the first place that is seen to deviate, and the number of places.
    """

    def holds(begin: Begin) -> bool:
        off = [first - begin(size) for first, size in found]
        return min(off) >= 0 and 2 * off.count(0) >= len(off)

    power: Begin = lambda size: 1 << (size.bit_length() - 1)  # noqa: E731
    if holds(power):
        yield f"from the largest power of two of {noun} on", power
    most = max(size for _, size in found)
    blocks = (
        (words, begin)
        for block in sorted({*range(2, 65), *(1 << n for n in range(7, 18))}) if block <= most
        for words, begin in (
            (f"behind the last full block of {block} {noun}", _behind(block, alone=True)),
            (f"behind the last full block of {block} {noun}, if there is one", _behind(block, alone=False)),
        )
    )  # fmt: skip
    yield from _few((words, begin) for words, begin in blocks if holds(begin))
    least = min(first for first, _ in found)
    for words, begin in (
        (f"in the second half of the {noun}", lambda size: size // 2),
        (f"in {noun} >= {least}", lambda size: least),
    ):
        if holds(begin):
            yield words, begin


def _few(rules: Iterator[tuple[str, Begin]]) -> Iterator[tuple[str, Begin]]:
    for _, rule in zip(range(FEW), rules, strict=False):
        yield rule


def _behind(block: int, *, alone: bool) -> Begin:
    """Return the rule of places behind the last full block; ``alone`` says whether they deviate if no block is full."""
    return lambda size: size // block * block if alone or size >= block else size
