"""Find wrong strides: the distances in memory at which a function looks for its sequences, tokens and heads.

Each head of a result shows which head of the input was rotated in its place. The strides are then known but for one
axis, whose stride is 1 head, or a number of sequences, tokens or heads, or a product of two of these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice

import numpy as np

from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.evidence import Answer
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.questions import FORWARD
from ropelab.conformance.identify.read_off import Wrong, read_heads
from ropelab.conformance.identify.vocabulary import OWN
from ropelab.conformance.subject import Subject

AXES = {"b": "sequences", "s": "tokens", "h": "heads"}
MOST_CALLS, MOST_HEADS, FEW = 8, 200, 2
STRIDES = {
    "": "1 head", "b": "as many heads as there are sequences", "s": "as many heads as there are tokens",
    "h": "the heads of a token", "bs": "as many heads as the batch has tokens", "bh": "the heads of all sequences",
    "hs": "the heads of a sequence",
}  # fmt: skip
"""The product of extents that a stride is, in heads -> the stride in words."""
Strides = tuple[str, ...]
"""The distances of neighbours along each axis of memory, in heads: a product of axes, such as ``"sh"``; empty for 1."""


def stride_rules(subject: Subject, wrong: Wrong, inputs: Collection[str]) -> Iterator[Deviation]:
    """Yield the strides, one of them wrong, that give every head of the wrong results of an input.

    Args:
        subject: the function.
        wrong: the answers with wrong elements.
        inputs: the names of all inputs.
    """
    found: dict[tuple[str, Strides], list[str]] = {}
    for name in dict.fromkeys(answer.name for answer, _ in wrong):
        ours = [a for a, _ in wrong if a.name == name and a.question.kind == FORWARD and not a.question.tokens]
        read = ((Plan.of(subject, a.question, a.which), read_heads(subject, a)) for a in ours if _small(a))
        seen = [(plan, heads) for plan, heads in islice(read, MOST_CALLS) if heads is not None]
        if not seen or not any((heads != _number(plan, _own(plan))).any() for plan, heads in seen):
            continue
        order, own = _order(seen[0][0]), _own(seen[0][0])
        one = ((place, stride) for place in range(3) for stride in STRIDES if stride != own[place])
        every = ((place, (*own[:place], stride, *own[place + 1 :])) for place, stride in one)
        fits = (s for s in every if all((_number(plan, s[1]) == heads).all() for plan, heads in seen))
        for place, strides in islice(fits, FEW):
            found.setdefault((f"{AXES[order[place]]} were {STRIDES[strides[place]]}", strides), []).append(name)
    for (words, strides), names in found.items():
        for name in [""] if len(names) == len(inputs) else names:
            yield Deviation("memory", f"is read from memory as if {words} apart", OWN,
                            partial(_read, strides=strides), {"strides": list(strides)}, Scope(name))  # fmt: skip


def _small(answer: Answer) -> bool:
    batch, tokens, heads, _ = answer.question.case.inputs[answer.which].shape
    return not isinstance(answer.values, str) and batch * tokens * heads <= MOST_HEADS


def _order(plan: Plan) -> str:
    return "bsh" if plan.question.case.lengths is not None else plan.subject.seq_format.replace("d", "")


def _own(plan: Plan) -> Strides:
    order = _order(plan)
    return tuple("".join(sorted(order[place + 1 :])) for place in range(3))


def _number(plan: Plan, strides: Strides) -> np.ndarray:
    """Return the number in memory of the head that each head reads, ``[B, S, H]``."""
    extents = dict(zip("bsh", plan.shape[:3], strict=True))
    at = dict(zip("bsh", np.indices(plan.shape[:3]), strict=True))
    sizes = (int(np.prod([extents[axis] for axis in stride])) for stride in strides)
    return sum(at[axis] * size for axis, size in zip(_order(plan), sizes, strict=True))


def _read(plan: Plan, strides: Strides) -> None:
    order, shape = _order(plan), plan.shape
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    memory = numbers.transpose(*map("bsh".index, order), 3).reshape(-1, shape[3])
    read = _number(plan, strides)
    first = sum(x.numel() for x in plan.question.case.inputs[: plan.which])
    plan.source = np.where((read < len(memory))[..., None], first + memory[np.minimum(read, len(memory) - 1)], -1)
