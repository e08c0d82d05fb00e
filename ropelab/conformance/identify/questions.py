"""Ask a subject the questions of the identification: calls on random inputs, under many circumstances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.circumstances import after_longer, autocast, tf32
from ropelab.conformance.laws.addressing import axes_positions
from ropelab.conformance.laws.memory import cut
from ropelab.conformance.subject import Subject
from ropelab.conformance.tensors import Tensors, copied

FORWARD, GRADIENT, INPUTS, ARGUMENTS, COTANGENTS = "forward", "gradient", "inputs", "arguments", "cotangents"
AFTER_BFLOAT16, BEYOND_FLOAT16 = "a call after a call in bfloat16", "numbers beyond those of float16"
"""The kinds of answers: results, gradients, inputs after the call, whether other arguments or cotangents changed."""


@dataclass(frozen=True, eq=False)
class Question:
    """A call and the circumstances in which it happens.

    Attributes:
        name: the circumstances in words that complete "for ...".
        case: the call.
        kind: ``"forward"``, ``"gradient"``, ``"inputs"``, ``"arguments"`` or ``"cotangents"``.
        ask: ``(subject, case) -> tensors``: the answer, a tensor for each input of the case.
        before: the numbers of tokens of the calls that come before the call.
        after: a call between the call and the reading of its results; None for no call.
        tokens: the number of tokens of the call, if the case has only some of them; else 0.
        numbers: the numbers of these tokens within the call.
        plans: the plans of the definition for this call; see `ropelab.conformance.identify.plan`.
        tables: the tables of these plans; see `ropelab.conformance.identify.outcome`.
    """

    name: str
    case: Case
    kind: str
    ask: Callable[[Subject, Case], Tensors]
    before: tuple[int, ...] = ()
    after: Case | None = None
    tokens: int = 0
    numbers: tuple[int, ...] = ()
    plans: dict[tuple[int, int | None], Any] = field(default_factory=dict, init=False, repr=False)
    tables: dict[tuple[int, int], Any] = field(default_factory=dict, init=False, repr=False)

    def answer(self, subject: Subject) -> tuple[np.ndarray, ...] | str:
        """Return the answer as arrays ``[B, S, H, D]``, or the name of the exception that the function raised.

        The state of the subject stays as it is.

        Raises:
            NotApplicable: the convention of the subject cannot express the question.
        """
        case = self.case
        kept = replace(case, inputs=tuple(map(copied, case.inputs)), cotangents=tuple(map(copied, case.cotangents)))
        try:
            return tuple(exact(y) for y in self.ask(replace(subject, state=dict(subject.state)), kept))
        except NotApplicable:
            raise
        except Exception as error:  # an exception is an answer, too
            return type(error).__name__

    def answer_to(self, subject: Subject, tensors: Tensors) -> tuple[np.ndarray, ...] | None:
        """Return the answer to other inputs, or to other cotangents of a gradient; None if there is none."""
        case = self.case
        case = replace(case, cotangents=tensors) if self.kind == GRADIENT else replace(case, inputs=tensors)
        try:
            answer = replace(self, case=case).answer(subject)
        except NotApplicable:
            return None
        return None if isinstance(answer, str) else answer


def questions(subject: Subject, sizes: Sizes, variant: int = 0) -> Iterator[Question]:
    """Yield all questions, the simplest first.

    Args:
        subject: the subject that will be asked; its claims decide the dtype and the order of the axes.
        sizes: the extents of most cases.
        variant: each number above 0 gives other random numbers, positions, offsets, lengths and numbers of tokens
            than the questions from which a description is derived.
    """
    seed, more = 5 + 972 * variant, 3 * variant + (variant > 0)
    if variant:
        sizes = replace(sizes, batch=sizes.batch - 1, tokens=sizes.tokens + 2)
    drawn = iter(range(seed, seed + 1000))

    def case(extents: Sizes = sizes, **where) -> Case:
        return subject.cotangents(subject.draw(extents, seed=next(drawn), **where), seed=next(drawn))

    batch, tokens = sizes.batch, sizes.tokens
    far = torch.tensor([523, 1777, 4093 + variant, 9001, 30_011] if variant else [509, 4095, 5001, 20_003, 32_767])
    apart = torch.randint(0, 60, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    moved, offsets = 7 + more, tuple((3 + more, 0, 9)[:batch])
    one_row = replace(sizes, batch=1)
    cases = {
        "tokens from position 0 on": case(),
        f"tokens from position {moved} on": case(offsets=moved),
        "a longer sequence": case(replace(sizes, tokens=37 + more)),
        "a single token": case(replace(sizes, tokens=1), offsets=moved),
        "a single head": case(replace(sizes, q_heads=1, k_heads=1)),
        "an offset for each sequence": case(offsets=offsets),
        "negative positions": case(offsets=-3 - more),
        "positions for each sequence": case(positions=apart),
        "positions that all sequences share": case(positions=torch.arange(tokens) + moved),
        "large positions": case(replace(sizes, tokens=5), positions=far),
        "large negative positions": case(replace(sizes, tokens=5), positions=-far),
        "packed documents": case(replace(one_row, tokens=9 + more), lengths=(2, 1, 1, 5 + more)),
        "packed documents, some of them empty": case(
            replace(one_row, tokens=6 + more), lengths=(0, 2, 0, 1, 0, 3 + more)
        ),
        "packed documents with offsets": case(replace(one_row, tokens=6 + more), lengths=(2, 4 + more), offsets=(5, 1)),
        "packed documents, one of them empty": case(replace(one_row, tokens=8 + more), lengths=(2, 0, 3, 3 + more)),
        "packed documents and tokens after them": case(replace(one_row, tokens=9 + more), lengths=(2, 4 + more)),
        "the second rank of context parallelism": case(replace(sizes, tokens=8 + 2 * more), shard=(2, 1)),
        "the first rank of context parallelism": case(replace(sizes, tokens=8 + 2 * more), shard=(2, 0)),
        "packed documents on the second rank": case(
            replace(one_row, tokens=8 + 2 * variant), lengths=(4, 8 + 4 * variant, 4), shard=(2, 1)
        ),
        "packed documents on the first rank": case(replace(one_row, tokens=8), lengths=(4, 8, 4), shard=(2, 0)),
        "the second of three ranks": case(replace(sizes, tokens=8 + 2 * more), shard=(3, 1)),
        # A number of tokens of their own: a function that remembers tables by their shape has none of this shape.
        "tables with a factor": case(replace(sizes, tokens=tokens + 1), factor=1.5 if variant else 1.25),
        "positions divided by a scale": case(offsets=moved, interpolation=8.0 if variant else 4.0),
        "heads that rotate as a whole": case(replace(sizes, rotary_dim=sizes.head_dim)),
        "the inverse rotation": case(inverse=True),
    }
    section, along = axes_positions(sizes)
    # Axes that take turns need a first section of at least the size of the others.
    sections = {"with adjacent pairs": (section[::-1] if variant else section, False), "in turns": (section, True)}
    for words, (some, turns) in sections.items():
        if variant and turns:  # the numbers twice as large, and turns up to the last pair, then differ
            some = (some[0] + some[1] - 1 + some[2] - 1, 1, 1)
        cases[f"positions along three axes {words}"] = case(
            positions=along + more, mrope_section=some, mrope_interleaved=turns
        )
    # Beyond 65504 float16 overflows and TF32 does not; 100001 wraps to different rows in 15, 16 and signed 16 bits. A
    # function that gets tables makes no angles.
    beyond = (100_001 if subject.convention.computes_cosines else 4099) + more
    cases[f"tokens from position {beyond} on"] = case(offsets=beyond)
    for name, at in cases.items():
        yield Question(name, at, FORWARD, forward)
    whole = case()
    yield Question(
        "inputs cut out of q, k and v", replace(whole, inputs=tuple(map(cut, whole.inputs))), FORWARD, forward
    )
    plain, later = cases["tokens from position 0 on"], cases[f"tokens from position {moved} on"]
    if not subject.convention.autocasts:
        yield Question("a call under autocast", plain, FORWARD, autocast)
    yield Question("a call with TF32 allowed", cases[f"tokens from position {beyond} on"], FORWARD, tf32)
    yield Question("a call after a longer sequence", plain, FORWARD, after_longer, (4 * tokens,))
    for times in (1, 2, 3 + variant):
        name = f"a call after {times} equal call{'s' * (times > 1)}"
        yield Question(name, plain, FORWARD, _again(times), times * (tokens,))
    if subject.dtype != torch.bfloat16:
        yield Question(AFTER_BFLOAT16, plain, FORWARD, _after_bfloat16, (tokens,))
    else:
        far_apart = subject.with_inputs(plain, [x * 2.0**18 for x in plain.inputs])
        yield Question(BEYOND_FLOAT16, far_apart, FORWARD, forward)
    yield Question("a call after a shorter sequence", plain, FORWARD, _after_shorter, (1,))
    with_gradient = ("an offset for each sequence", "large positions", "tables with a factor", "packed documents",
                     "the second rank of context parallelism")  # fmt: skip
    for name, at in cases.items():
        if at in (plain, later) or name in with_gradient:
            yield Question(f"the gradient for {name}", at, GRADIENT, gradient)
    ones = tuple(torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape) for x in plain.inputs)
    yield Question("the gradient of a sum", replace(plain, cotangents=ones), GRADIENT, gradient)
    strided = replace(plain, cotangents=tuple(g.mT.contiguous().mT for g in plain.cotangents))
    yield Question("the gradient of a strided cotangent", strided, GRADIENT, gradient)
    yield Question("the gradient of a second step", plain, GRADIENT, second_gradient, (tokens,))
    yield Question("the inputs after the call", plain, INPUTS, inputs_after)
    yield Question("the cotangents after the backward", plain, COTANGENTS, cotangents_changed)
    yield Question(
        "the other arguments after the call", cases["an offset for each sequence"], ARGUMENTS, arguments_changed
    )


def forward(subject: Subject, case: Case) -> Tensors:
    return subject(case)


def gradient(subject: Subject, case: Case) -> Tensors:
    return subject.gradients(case)[1]


def second_gradient(subject: Subject, case: Case) -> Tensors:
    """Return the gradients of the second of two training steps that also differentiate the parameters of a module."""
    subject.require_gradients()
    for _ in range(2):
        inputs = tuple(x.detach().requires_grad_() for x in case.inputs)
        outputs = subject(replace(case, inputs=inputs))
        given = map(copied, case.cotangents)
        made = [(y, g) for y, g in zip(outputs, given, strict=True) if y.requires_grad] or [(outputs[0],) * 2]
        ys, cotangents = zip(*made, strict=True)
        with subject.surroundings.theirs():
            torch.autograd.backward(ys, cotangents)
    return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)


def _again(times: int) -> Callable[[Subject, Case], Tensors]:
    """Return a function that asks for the results of a case after some equal calls."""

    def ask(subject: Subject, case: Case) -> Tensors:
        for _ in range(times):
            subject(replace(case, inputs=tuple(map(copied, case.inputs))))
        return subject(case)

    return ask


def _after_bfloat16(subject: Subject, case: Case) -> Tensors:
    """Return the results of the case after a call in bfloat16."""
    subject(replace(case, inputs=tuple(x.bfloat16() for x in case.inputs)))
    return subject(case)


def _after_shorter(subject: Subject, case: Case) -> Tensors:
    """Return the results of the case after a call with the first token of each sequence."""
    subject(replace(case, inputs=tuple(x[:, :1].clone() for x in case.inputs)))
    return subject(case)


def inputs_after(subject: Subject, case: Case) -> Tensors:
    if subject.in_place and subject.convention.in_place:
        raise NotApplicable("the results are read from the inputs")
    subject.call(case, subject.arguments(case))
    return case.inputs


def arguments_changed(subject: Subject, case: Case) -> Tensors:
    arguments = subject.arguments(case)
    before = {name: value.clone() for name, value in arguments.others().items()}
    subject.call(case, arguments)
    changed = any(not torch.equal(before[name], value) for name, value in arguments.others().items())
    return tuple(torch.full((1, 1, 1, 1), float(changed)) for _ in case.inputs)


def cotangents_changed(subject: Subject, case: Case) -> Tensors:
    after = subject.cotangents_after(case)
    changed = (not torch.equal(g, now) for g, now in zip(case.cotangents, after, strict=True))
    return tuple(torch.full((1, 1, 1, 1), float(one)) for one in changed)
