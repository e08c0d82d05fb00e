"""Find the known faults that explain a wrong operator: the faults with the same wrong results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT
from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase, numbers
from ropelab.conformance.cache.conventions import CACHE_CONVENTIONS, UNWRITTEN
from ropelab.conformance.cache.faults import CACHE_FAULTS
from ropelab.conformance.cache.laws import of_every_size
from ropelab.conformance.cache.subject import CacheSubject
from ropelab.conformance.cache_bounds import row_scale
from ropelab.conformance.case import NotApplicable, Sizes
from ropelab.conformance.diagnose import Diagnosis, answers, compared
from ropelab.conformance.surroundings import Surroundings
from ropelab.kernels.float8 import FLOAT8_DTYPES

Seen = str | list[np.ndarray]


@dataclass(frozen=True)
class CacheProbe:
    """A question to an operator: a case, and the caches and q that it leaves.

    Attributes:
        name: the question in words.
        case: the call.
    """

    name: str
    case: CacheCase

    def seen(self, subject: CacheSubject) -> Seen:
        """Return q of the tokens with a slot, the memory of the caches and made scales; or the name of the exception.

        Raises:
            NotApplicable: the operator cannot be asked.
        """
        try:
            written = subject(self.case)
        except NotApplicable:
            raise
        except Exception as error:  # an exception is an answer, too
            return type(error).__name__
        if isinstance(subject.convention, BlockScales):
            stored = subject.convention.read(self.case, written.memory)
            q = [] if written.q is None else [numbers(written.q)]
            return [*q, *stored, numbers(written.memory)[~self.case.named().numpy()]]
        scales = [] if written.scales is None else [numbers(x) for x in written.scales[1:]]
        q = [] if written.q is None else [numbers(written.q)[self.case.live.numpy()]]
        return [*q, numbers(written.memory), *scales]

    def seen_as(self, suspect: CacheSubject, subject: CacheSubject) -> Seen:
        """Return the answer of a fault that has the claims of ``subject``."""
        return self.seen(suspect)

    def truth(self, subject: CacheSubject, case: CacheCase) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the right answer and its bound."""
        live = case.live.numpy()
        q, k, v = subject.expected(case)
        if isinstance(subject.convention, BlockScales):
            stored = subject.convention.truth(case, k[0][live], k[1][live])
            outside = numbers(case.memory)[~case.named().numpy()]
            return [*([q] if subject.convention.queries else []), *stored, (outside, np.zeros_like(outside))]
        q_dtype = case.q_dtype or case.inputs[0].dtype
        memory, bounds = (x.clone().fill_(0) for x in 2 * (case.memory.double().cpu(),))
        memory.copy_(case.memory.double().cpu())
        scales = []
        for which, (value, bound) in ((1, k), (2, v)):
            right, error = subject.stored(case, which, value[live], bound[live], case.memory.dtype)
            place = case.places[which - 1]
            slots = case.slots[case.slots >= 0].cpu()
            if subject.convention.row_scales:
                made = np.full(place.shape[:3], UNWRITTEN, EXACT), np.zeros(place.shape[:3], EXACT)
                for filled, rows in zip(made, row_scale(value[live], bound[live], case.memory.dtype), strict=True):
                    filled[slots // place.shape[1], slots % place.shape[1]] = rows
                scales.append(made)
            for whole, rows in ((memory, right), (bounds, error)):
                cache = place.within(whole)
                cache[slots // place.shape[1], slots % place.shape[1]] = torch.from_numpy(rows.astype(np.float64))
        answer = subject.stored(case, 0, q[0][live], q[1][live], q_dtype)
        return [*([answer] if subject.convention.queries else []), (numbers(memory), numbers(bounds)), *scales]


_KINDS = "latent", "row_scales", "turns_cached"
"""The attributes that a fault's convention must share, so that the fault gets the same cases."""


def diagnose(subject: CacheSubject, sizes: Sizes) -> list[Diagnosis]:
    """Return the faults of the catalogue that have the wrong results of ``subject``, the best explanation first.

    Args:
        subject: the operator that failed a law.
        sizes: the extents of the probes.
    """
    wrong, right = answers(subject, probes(subject, sizes))
    found = []
    for fault in CACHE_FAULTS.values():
        convention = CACHE_CONVENTIONS[fault.convention]
        kinds = convention, subject.convention
        if kinds[0] is not kinds[1] and any(isinstance(kind, BlockScales) for kind in kinds):
            continue
        if any(getattr(convention, kind) != getattr(subject.convention, kind) for kind in _KINDS):
            continue
        suspect = replace(
            subject, function=fault.function, convention=convention, state={}, surroundings=Surroundings(())
        )  # no fault of the catalogue replaces a function
        if (diagnosis := compared(fault, suspect, subject, wrong, right)) is not None:
            found.append(diagnosis)
    return sorted(found, key=lambda d: d.fault.convention != subject.convention.name)


def probes(subject: CacheSubject, sizes: Sizes) -> Iterator[CacheProbe]:
    """Yield the questions that tell the faults apart."""
    for order in subject.convention.orders:
        yield CacheProbe(f"caches in {order}", subject.draw(sizes, order=order))
    yield CacheProbe("blocks of one slot", subject.draw(sizes, block_size=1))
    if subject.convention.optional_norm:
        yield CacheProbe("no norm", subject.draw(sizes, norm=False))
    if subject.convention.offset:
        yield CacheProbe("an offset of the weights", subject.draw(sizes, weight_offset=1.0))
    if subject.convention.norm:
        case = subject.draw(sizes)
        small = tuple(x / 1024 for x in case.inputs)
        yield CacheProbe("small heads", replace(case, inputs=small))
    case = subject.draw(sizes)
    yield CacheProbe("no slot at all", replace(case, slots=torch.full_like(case.slots, -1)))
    if subject.convention.fewer_slots:
        yield CacheProbe("fewer slots than tokens", replace(case, slots=case.slots[: case.tokens // 2]))
    if isinstance(subject.convention, BlockScales):
        yield CacheProbe("heads of every size", of_every_size(subject.draw(sizes)))
        return
    for dtype in FLOAT8_DTYPES:
        case = subject.draw(sizes, cache_dtype=dtype)
        yield CacheProbe(f"caches in {dtype}", case)
        scales = (case.scales[0] * 2.0**-15, case.scales[1] * 2.0**-15, case.scales[2] * 2.0**-15)
        yield CacheProbe(f"large values in {dtype}", replace(case, scales=scales))
