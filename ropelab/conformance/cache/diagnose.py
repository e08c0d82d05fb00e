"""Find the known faults that explain a wrong operator: the faults with the same wrong results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.calls import circumstances
from ropelab.conformance.cache.case import CacheCase, numbers
from ropelab.conformance.cache.convention import Written
from ropelab.conformance.cache.conventions import CACHE_CONVENTIONS
from ropelab.conformance.cache.faults import CACHE_FAULTS
from ropelab.conformance.cache.seen import SCALES, K, Q, Seen, V
from ropelab.conformance.cache.subject import Bounded, CacheSubject
from ropelab.conformance.case import NotApplicable, Sizes
from ropelab.conformance.diagnose import Diagnosis, answers, compared
from ropelab.conformance.surroundings import Surroundings


@dataclass(frozen=True)
class CacheProbe:
    """A question to an operator: a case, and the caches and q that it leaves.

    Attributes:
        name: the question in words.
        case: the call.
    """

    name: str
    case: CacheCase

    def seen(self, subject: CacheSubject) -> str | list[np.ndarray]:
        """Return the parts of the result and all other memory of the caches; or the name of the exception.

        Raises:
            NotApplicable: the operator cannot be asked.
        """
        try:
            found = Seen(subject, self.case, subject(self.case))
        except NotApplicable:
            raise
        except Exception as error:  # an exception is an answer, too
            return type(error).__name__
        parts = [_slotted(found, found.actual(which)) for which in _parts(subject)]
        return [*parts, numbers(found.written.memory)[~self.case.named().numpy()]]

    def seen_as(self, suspect: CacheSubject, subject: CacheSubject) -> str | list[np.ndarray]:
        """Return the answer of a fault that has the claims of ``subject``."""
        return self.seen(suspect)

    def truth(self, subject: CacheSubject, case: CacheCase) -> list[Bounded]:
        """Return the right answer and its bound."""
        right, outside = (
            Seen(subject, case, Written(None, None, case.memory)),
            numbers(case.memory)[~case.named().numpy()],
        )
        told = (right.definition(which) for which in _parts(subject))
        return [*((_slotted(right, y), _slotted(right, near)) for y, near in told), (outside, np.zeros_like(outside))]


def _parts(subject: CacheSubject) -> list[int]:
    """Return the parts of the result that operators of every convention of one kind have."""
    kind = subject.convention
    return [Q] * kind.queries + [K] + [V] * (not isinstance(kind, BlockScales)) + _SCALES * kind.row_scales


def _slotted(seen: Seen, y: np.ndarray | None) -> np.ndarray:
    """Return a part for the tokens with a slot; only some conventions have the others."""
    assert y is not None, "every operator of the kind has the part"
    return y[seen.case.live.numpy()] if len(y) == seen.case.tokens and not seen.blocks else y


_SCALES = [SCALES + K, SCALES + V]
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
    """Yield the questions that tell the faults apart; not all conventions have YaRN, or other widths."""
    for words, draw in circumstances(subject).items():
        case = draw(sizes)
        if case.yarn[0] == 1:
            yield CacheProbe(words, case)
    case = subject.draw(sizes, block_size=1)
    yield CacheProbe("in blocks of one slot", case)
    yield CacheProbe("without any slot", replace(case, slots=torch.full_like(case.slots, -1)))
