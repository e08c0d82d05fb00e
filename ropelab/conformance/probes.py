"""The probes of the diagnosis: questions to any implementation whose answers tell faults apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.circumstances import after_longer, autocast, tf32
from ropelab.conformance.convention import accepts
from ropelab.conformance.identify.questions import arguments_changed, forward, gradient, inputs_after, second_gradient
from ropelab.conformance.laws.algebra import by_feature, told_by_feature
from ropelab.conformance.laws.gradients import along_tables, products
from ropelab.conformance.laws.numerics import require_few
from ropelab.conformance.laws.robustness import far_apart, odd_pairs
from ropelab.conformance.subject import Subject
from ropelab.conformance.tensors import Tensors, copied, unexpanded
from ropelab.layout.pairing import permutation

Seen = tuple[np.ndarray, ...] | str
"""The answer to a probe: an array for each input, or the name of the exception."""


@dataclass(frozen=True)
class Probe:
    """A question to an implementation, and the right answer.

    Attributes:
        name: the question in words.
        case: the call that the question is about.
        look: ``(subject, case) -> tensors``: the answer, a tensor for each input of the case.
        truth: ``(subject, case) -> [(right, bound)]``: the right answer and its bound, for each input.
        order: the attribute of `Subject` that says how the features of the answer are ordered: ``"layout"`` or
            ``"out_layout"``; None if the answer has no features.
    """

    name: str
    case: Case
    look: Callable[[Subject, Case], Iterable[torch.Tensor]]
    truth: Callable[[Subject, Case], list[tuple[np.ndarray, np.ndarray]]]
    order: str | None = "out_layout"

    def put_to(self, subject: Subject, case: Case | None = None) -> Tensors | str:
        """Return the answer of a subject, or the name of the exception that it raised.

        Args:
            subject: the implementation to ask. Its state is left as it is.
            case: the case to ask about, by default the probe's own.

        Raises:
            NotApplicable: the convention of the subject cannot express the question.
        """
        case = self.case if case is None else case
        kept = replace(case, inputs=_copies(case.inputs), cotangents=_copies(case.cotangents))
        try:
            return tuple(y.detach() for y in self.look(replace(subject, state=dict(subject.state)), kept))
        except NotApplicable:
            raise
        except Exception as error:  # an exception is an answer, too
            return type(error).__name__

    def seen(self, subject: Subject) -> Seen:
        """Return the answer of a subject as arrays, or the name of the exception that it raised."""
        answer = self.put_to(subject)
        return answer if isinstance(answer, str) else tuple(map(exact, answer))

    def seen_as(self, suspect: Subject, subject: Subject) -> Seen:
        """Return the answer of ``suspect`` to a question made for ``subject``, in the layout of ``subject``.

        Their conventions may differ. A suspect that takes one tensor is asked about q and k in turn. A suspect that
        rotates heads only as a whole gets the features that rotate. The features are reordered for the suspect, and
        its answer is reordered back.
        """
        pair = suspect.convention.pair
        partial = suspect.convention.partial or accepts(suspect.function, "rotary_dim")
        answers = []
        for case in [self.case] if pair else list(_one_by_one(self.case)):
            width = case.inputs[0].shape[-1] if partial else case.rotary_dim
            answer = self.put_to(suspect, _translated(case, subject, suspect, width))
            if isinstance(answer, str):
                return answer
            tails = case.cotangents if self.truth is _adjoint else case.inputs
            for y, tail in zip(answer, tails, strict=True):
                if self.order is not None:
                    y = _in_order(y, case.rotary_dim, getattr(suspect, self.order), getattr(subject, self.order))
                    y = torch.cat((y, tail[..., width:]), dim=-1)
                answers.append(exact(y))
        return tuple(answers)


def probes(subject: Subject, sizes: Sizes, failed: Iterable[Case] = ()) -> Iterator[Probe]:
    """Yield the probes that distinguish the faults of the catalogue from each other.

    Args:
        subject: the implementation that the probes are made for.
        sizes: the extents of most probes.
        failed: cases that the subject is known to get wrong; they come first.
    """

    def case(**about) -> Case:
        extents = {name: about.pop(name) for name in ("batch", "tokens", "q_heads", "k_heads") if name in about}
        return subject.cotangents(subject.draw(replace(sizes, **extents), **about))

    plain, moved = case(), case(offsets=7)
    for failing in failed:
        yield Probe("its smallest counterexample", failing, forward, definition)
    batches = torch.tensor([[4, 0, 2, 9, 9], [1, 1, 7, 3, 0], [0, 5, 6, 2, 8]])
    forwards = {
        "tokens from 0 on": plain,
        "tokens from 7 on": moved,
        "a single token": case(tokens=1, offsets=7),
        "a single head": case(q_heads=1, k_heads=1),
        "an offset for each sequence": case(offsets=(3, 0, 9)),
        "a negative offset": case(offsets=-3),
        "positions for each batch": case(positions=batches),
        "large positions": case(positions=torch.tensor([509, 2047, 5001, 65_537, 100_003])),
        "packed documents": case(batch=1, tokens=9, lengths=(2, 1, 1, 3)),
        "packed documents, some empty": case(batch=1, tokens=7, lengths=(0, 2, 0, 1, 0, 3)),
        "packed documents with offsets": case(batch=1, tokens=7, lengths=(2, 4), offsets=(5, 1)),
        "a context-parallel shard": case(tokens=8, shard=(2, 1)),
        "scaled tables": case(factor=1.25),
        "as many sequences as tokens": case(batch=sizes.tokens),
        "three heads of k": case(q_heads=6, k_heads=3),
        "an odd number of pairs": subject.cotangents(subject.draw(odd_pairs(subject, sizes))),
        "whole heads": subject.cotangents(subject.draw(replace(sizes, rotary_dim=sizes.head_dim))),
    }
    for name, at in forwards.items():
        yield Probe(name, at, forward, definition)
    if subject.convention.columns:
        yield Probe("a column for each feature", plain, by_feature, told_by_feature)
    yield Probe("autocast", plain, autocast, definition)
    yield Probe("TF32 allowed", case(offsets=4099), tf32, definition)
    yield Probe("after a longer sequence", plain, after_longer, definition)
    yield Probe("the inputs after the call", plain, inputs_after, _unchanged, order="layout")
    yield Probe("the other arguments after the call", case(offsets=(3, 0, 9)), arguments_changed, _nothing, order=None)
    yield Probe("the gradient", plain, gradient, _adjoint, order="layout")
    yield Probe("the gradient of a single head", forwards["a single head"], gradient, _adjoint, order="layout")
    yield Probe("the gradient of tokens from 7 on", moved, gradient, _adjoint, order="layout")
    ones = tuple(torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape) for x in plain.inputs)
    yield Probe("the gradient of scaled tables", forwards["scaled tables"], gradient, _adjoint, order="layout")
    yield Probe("the gradient of the tables", plain, _along_tables, _products, order=None)
    shared = replace(plain, inputs=tuple(x[:, :, :1].expand_as(x) for x in plain.inputs))
    yield Probe("one head, expanded", shared, _shared, definition)
    yield Probe("the gradient of a sum", replace(plain, cotangents=ones), gradient, _adjoint, order="layout")
    strided = replace(plain, cotangents=tuple(g.mT.contiguous().mT for g in plain.cotangents))
    yield Probe("the gradient of a strided cotangent", strided, gradient, _adjoint, order="layout")
    yield Probe("the gradient of a second step", plain, second_gradient, _adjoint, order="layout")


def rare_probes(subject: Subject, sizes: Sizes) -> Iterator[Probe]:
    """Yield the slow probes of extreme sizes, for subjects that answer all ``probes`` right."""
    many = replace(sizes, batch=1, tokens=65_537, q_heads=1, k_heads=1)
    if not isinstance(subject.function, torch.nn.Module):  # a module is made for heads of one size
        many = replace(many, rotary_dim=4, head_dim=4 if sizes.rotary_dim == sizes.head_dim else 8)

    def look(subject, case):
        require_few(subject, replace(many, head_dim=case.inputs[0].shape[-1], rotary_dim=case.rotary_dim))
        return subject(case)

    yield Probe("65,537 tokens", subject.draw(many), look, definition)
    yield Probe("128 tokens", subject.draw(replace(many, tokens=128)), forward, definition)
    apart = subject.draw(replace(sizes, batch=3), dtype=torch.bfloat16)
    yield Probe("sequences 2**30 elements apart", apart, _far_apart, definition)


# ------------------------------------------------------------------------------------------ answers and right answers


def _along_tables(subject, case):
    return along_tables(subject, case, subject)


def _products(subject, case):
    return products(case, subject.expected(case))


def _shared(subject, case):
    if subject.in_place:
        raise NotApplicable("in place")
    return subject(replace(case, inputs=tuple(map(_between_zeros, case.inputs))))


def _between_zeros(x: torch.Tensor) -> torch.Tensor:
    """Return the first head of ``x``, expanded; a fault that reads beyond it reads zeros, and no chance decides."""
    head = x[:, :, :1]
    memory = x.new_zeros(2 * x.numel() + head.numel())
    inside = memory[x.numel() : x.numel() + head.numel()].view(head.shape)
    return inside.copy_(head).expand(x.shape)


def _far_apart(subject, case):
    far = replace(case, inputs=tuple(map(far_apart, case.inputs)))
    return subject.call(far, subject.arguments(far))  # without the copies that ``subject(far)`` makes


def definition(subject, case):
    return subject.expected(case)


def _adjoint(subject, case):
    return subject.expected(case, case.cotangents, transposed=True)


def _unchanged(subject, case):
    return [(exact(x), np.zeros(x.shape)) for x in case.inputs]


def _nothing(subject, case):
    return [(np.zeros(()), np.zeros(()))] * len(case.inputs)


# --------------------------------------------------------------------------------------------- translation


def _one_by_one(case: Case) -> Iterator[Case]:
    for i, x in enumerate(case.inputs):
        yield replace(case, inputs=(x,), cotangents=case.cotangents[i : i + 1])


def _translated(case: Case, subject: Subject, suspect: Subject, width: int) -> Case:
    def brought(tensors: Tensors, order: str) -> Tensors:
        source, target = getattr(subject, order), getattr(suspect, order)
        return tuple(_in_order(x, case.rotary_dim, source, target)[..., :width] for x in tensors)

    return replace(case, inputs=brought(case.inputs, "layout"), cotangents=brought(case.cotangents, "out_layout"))


def _in_order(x: torch.Tensor, rotary_dim: int, source: str, target: str) -> torch.Tensor:
    """Return ``x`` with its features reordered from one layout to another, in memory with the strides of ``x``."""
    if source == target or x.stride(-1) == 0:  # one number for all features
        return x
    order = permutation(rotary_dim, source, target).to(x.device)
    y = copied(unexpanded(x))
    y[..., :rotary_dim] = y[..., :rotary_dim][..., order]
    return y.expand(x.shape)


def _copies(tensors: Tensors) -> Tensors:
    """Return copies, because a subject may overwrite inputs and cotangents."""
    return tuple(map(copied, tensors))
