"""Call a function in another way, where one part of the call repairs a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ropelab.conformance.case import Case
from ropelab.conformance.circumstances import matmul_precision
from ropelab.conformance.subject import Subject
from ropelab.conformance.tensors import Tensors, copied

Way = Callable[[Subject, Case], Tensors]


@dataclass(frozen=True)
class Mended(Subject):
    """A subject that is called in another way.

    Attributes:
        inner: the subject itself.
        way: ``(subject, case) -> results``.
    """

    inner: Subject = field(kw_only=True)
    way: Way = field(kw_only=True)

    def __call__(self, case: Case) -> Tensors:
        """Return the results of the other way to call the function, ``[B, S, H, D]`` each."""
        return self.way(self.inner, case)


@dataclass(frozen=True)
class Tabled(Subject):
    """A subject whose caller changes the tables.

    Attributes:
        change: ``(cos, sin) -> (cos, sin)``, tensors ``[..., R/2]``.
    """

    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = field(kw_only=True)

    def tables(self, case: Case, positions: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the changed tables; see `Implementation.tables`."""
        return self.change(*super().tables(case, positions))


def mended(subject: Subject, way: Way) -> Subject:
    """Return the subject, called in another way."""
    return Mended(**_claims(subject), inner=subject, way=way)


def tabled(subject: Subject, change) -> Subject:
    """Return the subject with changed tables; see `Tabled`."""
    return Tabled(**_claims(subject), change=change)


def _claims(subject: Subject) -> dict[str, Any]:
    return {claim.name: getattr(subject, claim.name) for claim in fields(Subject)}


def copies(subject: Subject, case: Case) -> Tensors:
    """Return the results for copies of the inputs."""
    return subject(replace(case, inputs=tuple(map(copied, case.inputs))))


def outside_autocast(subject: Subject, case: Case) -> Tensors:
    """Return the results with autocast switched off."""
    with torch.autocast(torch.device(subject.device).type, enabled=False):
        return subject(case)


def without_tf32(subject: Subject, case: Case) -> Tensors:
    """Return the results where no matrix product takes TF32."""
    with matmul_precision("highest"):
        return subject(case)


def apart(number: int, other: Subject) -> Way:
    """Return the way that takes the result of one input from another subject.

    Args:
        number: the number of the input.
        other: the subject for that input.
    """

    def way(subject: Subject, case: Case) -> Tensors:
        results = list(subject(case))
        if number < len(results):
            results[number] = other(case)[number]
        return tuple(results)

    return way


class _Back(torch.autograd.Function):
    """A call whose gradient is a call with minus the angle."""

    @staticmethod
    def forward(ctx, subject, case, *inputs):
        ctx.subject, ctx.case = subject, case
        return tuple(y.detach() for y in subject(replace(case, inputs=tuple(map(copied, inputs)))))

    @staticmethod
    def backward(ctx, *grads):
        case = replace(ctx.case, inputs=tuple(g.contiguous() for g in grads), inverse=not ctx.case.inverse)
        return None, None, *(g.detach() for g in ctx.subject(case))


def gradient_by_inverse(subject: Subject, case: Case) -> Tensors:
    """Return the results with a gradient that the function itself computes, called with minus the angle."""
    return _Back.apply(subject, case, *case.inputs)
