"""Hold a description against calls that are larger than all calls from which it was derived.

The extents of those calls can be fitted: in 37 tokens the tokens from 32 on are also those after the last block of 32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from ropelab.conformance.case import Sizes
from ropelab.conformance.identify.deviation import Deviation, planned
from ropelab.conformance.identify.evidence import Answer, Evidence
from ropelab.conformance.identify.questions import FORWARD, Question, forward
from ropelab.conformance.identify.rare import SAME
from ropelab.conformance.laws.addressing import axes_positions
from ropelab.conformance.subject import Subject

AT = 11
"""The position of the first token, so that numbers of tokens are no positions."""


def most_tokens(variant: int) -> int:
    """Return the number of tokens of the longest call."""
    return 37 + 44 * variant * (variant + 1)


def larger(
    subject: Subject, sizes: Sizes, deadline: float, variant: int, description: tuple[Deviation, ...]
) -> list[Answer]:
    """Return the answers to larger calls of which a description says something.

    An exception refutes no description of results. A table of products that mix heads says nothing of other heads.

    Raises:
        OutOfTime: the deadline passed.
    """
    evidence = Evidence(subject, sizes, deadline, variant, partial(_questions, description=description))
    return [a for a in evidence.answers if not isinstance(a.values, str) and _fits(subject, a, description)]


def thresholds(
    subject: Subject, sizes: Sizes, deadline: float, variant: int, description: tuple[Deviation, ...]
) -> list[Answer]:
    """Return the answers to calls on both sides of a number of tokens, or position, from which a function deviates.

    The number in a description follows from few calls. Where calls refute it, halving finds the right one.

    Raises:
        OutOfTime: the deadline passed.
    """
    found: dict[str, Evidence] = {}
    one = replace(sizes, batch=1)

    def of_tokens(tokens: int) -> Question:
        case = subject.draw(replace(one, tokens=tokens))
        return Question(f"a sequence of {tokens} tokens", case, FORWARD, forward)

    def of_positions(second: int) -> Question:
        case = subject.draw(replace(one, tokens=2), offsets=second - 1)
        return Question(f"the positions {second - 1} and {second}", case, FORWARD, forward)

    def halve(first: int, beyond: int, question: Callable[[int], Question]) -> None:
        def holds(number: int) -> bool:
            asked = question(number)
            evidence = found[asked.name] = Evidence(subject, sizes, deadline, ask=lambda *of: iter((asked,)))
            return not evidence.wrong(description)

        right_before = holds(first - 1)
        if holds(first) and right_before:
            return
        low, high = (first, beyond) if right_before else (1, first - 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) == right_before else (middle, high)
        holds(low), holds(high)

    for deviation in description:
        for number in re.findall(r"sequences of more than (\d+)", deviation.scope.words):
            halve(int(number) + 1, most_tokens(variant), of_tokens)
        for than, number in re.findall(r"positions (>=?) (\d+)", deviation.scope.words):
            first = int(number) + (than == ">")
            halve(first, 2 * first, of_positions)
    return [answer for evidence in found.values() for answer in evidence.answers]


def _questions(subject: Subject, sizes: Sizes, variant: int, description: tuple[Deviation, ...]) -> Iterator[Question]:
    """Yield calls with more tokens, sequences and heads; for a description of heads also more heads of k than of q."""
    extents = {"a much longer sequence": replace(sizes, batch=1, tokens=most_tokens(variant))}
    k_heads = sizes.k_heads + variant
    measured = any("heads" in deviation.parameters for deviation in description)
    if sizes.q_heads % sizes.k_heads == 0 and not measured:
        q_heads = sizes.q_heads // sizes.k_heads * k_heads
        more = replace(sizes, batch=sizes.batch + variant, q_heads=q_heads, k_heads=k_heads)
        extents["more sequences and heads"] = more
    said = " ".join(deviation.scope.words for deviation in description)
    if subject.convention.pair and not measured and "head" in said:
        extents["more heads of k than of q"] = replace(sizes, q_heads=sizes.k_heads, k_heads=k_heads)
    if "head" in said or "pair" in said or "rotate" in said:  # the width decides which pairs there are
        for rotary_dim in (sizes.rotary_dim, sizes.rotary_dim + 8 * variant, sizes.rotary_dim + 8 * variant + 6):
            wide = replace(sizes, head_dim=rotary_dim, rotary_dim=rotary_dim)
            extents[f"heads of {rotary_dim} features, all of which rotate"] = wide
        if subject.convention.partial:
            for further in (6, 0):
                wide = replace(sizes, head_dim=sizes.head_dim + 10, rotary_dim=sizes.rotary_dim + further)
                extents[f"wider heads, {wide.rotary_dim} features of which rotate"] = wide
    words = " ".join(deviation.words for deviation in description)
    if "document" in f"{said} {words}":
        n = variant
        for lengths in ((3, 0, 0, 4 + n, 2), (0, 0, 5, 0, n, 3), (n, 4, 2, 0, 0, 6, 0), (2, 1 + n, 3, 1, 4)):
            case = subject.draw(replace(sizes, batch=1, tokens=sum(lengths)), lengths=lengths, seed=77 + variant)
            yield Question(f"packed documents of {', '.join(map(str, lengths))} tokens", case, FORWARD, forward)
    if "axes" in subject.convention.expresses and re.search("section|ax[ei]s", f"{said} {words}"):
        for section in ((5 + variant, 4, 3), (4, 4, 3 + variant), (6, 2, 4 + variant)):
            width = 2 * sum(section)
            wide = replace(sizes, head_dim=width, rotary_dim=width)
            along = axes_positions(wide)[1]
            for turns in (False, True) if section[0] >= max(section) else (False,):
                case = subject.draw(wide, positions=along, mrope_section=section, mrope_interleaved=turns)
                yield Question(f"sections {section}{' in turns' * turns}", case, FORWARD, forward)
    if any("rows" in deviation.parameters for deviation in description):
        n, generator = variant, torch.Generator().manual_seed(variant)
        scattered = torch.randint(0, 40, (2, 131 + 6 * n), generator=generator)
        case = subject.draw(replace(sizes, batch=2, tokens=131 + 6 * n), positions=scattered, seed=77 + n)
        yield Question("many tokens at scattered positions", case, FORWARD, forward)
        for size, documents in ((1, (41 + n, 3, 90)), (3, (36, 12, 24 * n))):
            some, shard = replace(sizes, batch=1, tokens=sum(documents) // size), (size, n % size) if size > 1 else None
            case = subject.draw(some, lengths=documents, shard=shard, seed=77 + n)
            name = f"documents of {', '.join(map(str, documents))} tokens on {size} rank{'s' * (size > 1)}"
            yield Question(name, case, FORWARD, forward)
    for name, larger in extents.items():
        yield Question(name, subject.draw(larger, offsets=AT, seed=77 + variant), FORWARD, forward)
    if re.search("token|position|sequences", said):  # tokens without positions of their own
        for tokens in (sizes.tokens + 4 * variant, 5 * sizes.tokens + 17 * variant):
            same = torch.full((tokens,), SAME)
            case = subject.draw(replace(sizes, batch=2, tokens=tokens), positions=same, seed=77 + variant)
            yield Question(f"{tokens} tokens, all at position {SAME}", case, FORWARD, forward)


def _fits(subject: Subject, answer: Answer, description: tuple[Deviation, ...]) -> bool:
    try:
        planned(subject, answer.question, answer.which, description)
    except ValueError:
        return False
    return True
