"""Find the known faults that explain a wrong implementation: the faults with the same wrong results."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropelab.conformance.case import Broken, Case, NotApplicable, Sizes
from ropelab.conformance.convention import accepts
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.faults import FAULTS, Fault, runs_on
from ropelab.conformance.identify.questions import FORWARD, questions
from ropelab.conformance.probes import Probe, Seen, definition, probes, rare_probes
from ropelab.conformance.subject import Subject
from ropelab.conformance.surroundings import Surroundings
from ropelab.kernels import INTERPRETED

LEFT_OVER = 0.01
"""A fault reproduces a deviation if their difference is at most this share of the deviation, the room for rounding."""
MANY_TOKENS, LONG_TABLE = 64, 4096
"""A counterexample becomes a probe if it has at most that many tokens, at positions up to this row of a table. Other
probes look at longer sequences and larger positions."""
SECONDS = 3.0
"""The limit of CPU time of a search. The faults that come last are kernels, which an interpreter runs slowly."""
FLAGGED = ("ropelab", "flash_attn", "transformer_engine", "vllm")
"""The conventions that tell the function its layout."""


@dataclass(frozen=True)
class Diagnosis:
    """A fault that explains an implementation.

    Attributes:
        fault: the fault of the catalogue.
        reproduced: the names of the probes for which both are wrong, with the same result.
    """

    fault: Fault
    reproduced: tuple[str, ...]

    def __str__(self) -> str:
        seen_in = f", as in {self.fault.seen_in}" if self.fault.seen_in else ""
        return f"{self.fault.sentence.rstrip('.')}{seen_in} [{self.fault.name}]"


def diagnose(
    subject: Subject, failed: Iterable = (), *, sizes: Sizes | None = None, seconds: float = SECONDS
) -> list[Diagnosis]:
    """Return the faults of the catalogue that have the wrong results of ``subject``, the best explanation first.

    The subject and every fault answer the same probes. Each probe is translated into the convention and layout of the
    fault, so that a fault is recognised in conventions that it was not written for.

    Args:
        subject: the implementation that failed a law.
        failed: the counterexamples of the laws that it failed.
        sizes: the extents of the probes; by default `Sizes`, with heads that rotate as a whole unless the convention
            is partial.
        seconds: the CPU time after which no further fault is asked.

    Returns:
        The faults with the same answers as ``subject`` to all probes that their conventions can express. A fault that
        shares only some of the answers would contradict the others.
    """
    if sizes is None:
        sizes = Sizes() if subject.convention.partial else Sizes(rotary_dim=Sizes.head_dim)
    cases = [replace(c.case, cotangents=()) for c in failed if _is_small(c.case)]
    wrong, right = answers(subject, probes(subject, sizes, cases))
    if not any(_is_evidence(probe, seen) for probe, seen, _ in wrong):
        wrong, right = answers(subject, rare_probes(subject, sizes))

    found: list[Diagnosis] = []
    deadline = time.thread_time() + seconds
    for fault in sorted(FAULTS.values(), key=lambda f: (f.triton, f.convention != subject.convention.name)):
        if time.thread_time() > deadline:
            break
        if fault.triton and INTERPRETED and found:
            break  # an explanation is found, and interpreted kernels are slow
        suspect = _suspect(fault, subject)
        if suspect is not None and (diagnosis := compared(fault, suspect, subject, wrong, right, deadline)) is not None:
            # In another order of the axes a fault may do something else than its sentence says.
            own = replace(suspect, seq_format=suspect.convention.seq_formats[0])
            if (
                own.seq_format == suspect.seq_format
                or compared(fault, own, subject, wrong, right, deadline) is not None
            ):
                found.append(diagnosis)
    if found:  # the questions of the identification, which no fault of the catalogue was made for
        asked = (
            Probe(question.name, question.case, question.ask, definition)
            for question in questions(subject, sizes, 1)
            if question.kind == FORWARD
        )
        fresh = answers(subject, (probe for probe in asked if _is_small(probe.case)))
        found = [d for d in found if _reproduced(_suspect(d.fault, subject), subject, *fresh) is not None]
    return sorted(found, key=lambda d: d.fault.convention != subject.convention.name)


def _is_small(case: Case) -> bool:
    """Return whether the whole catalogue can answer the case quickly."""
    batch, seq_len = case.shape
    return batch * seq_len <= MANY_TOKENS and bool((case.token_positions().clamp(min=0) <= LONG_TABLE).all())


def answers(subject: Any, questions: Iterable[Any]) -> tuple[list, list]:
    """Return ``(probe, answer, truth)`` of the probes that the subject gets wrong, and of those that it gets right.

    Probes that it gets wrong in another way at every call are left out.

    Args:
        subject: `Subject`, or `CacheSubject` of ``cache.subject``.
        questions: a `Probe` each, or an object with its methods.
    """
    wrong: list[tuple] = []
    right: list[tuple] = []
    for probe in questions:
        try:
            seen = probe.seen(subject)
        except NotApplicable:
            continue
        truth = probe.truth(subject, probe.case)
        if not _deviates(seen, truth):
            right.append((probe, seen, truth))
        elif _same(seen, probe.seen(subject), truth):  # otherwise the answer depends on chance, such as other memory
            wrong.append((probe, seen, truth))
    return wrong, right


def compared(fault: Fault, suspect: Any, subject: Any, wrong, right, deadline: float = math.inf) -> Diagnosis | None:
    """Return the fault as the explanation of a subject; None if any answer of the two differs.

    Args:
        fault: the fault.
        suspect, subject: the fault and the implementation: `Subject`, or `CacheSubject` of ``cache.subject``.
        wrong, right: the results of `answers`.
        deadline: the CPU time of the thread after which the fault counts as no explanation.
    """
    reproduced = _reproduced(suspect, subject, wrong, right, deadline)
    return Diagnosis(fault, tuple(reproduced)) if reproduced else None


def _reproduced(suspect: Any, subject: Any, wrong, right, deadline: float = math.inf) -> list[str] | None:
    """Return the names of the wrong probes that a suspect answers alike; None if any answer of the two differs.

    A suspect has to share a deviation that is evidence.
    """
    names: list[str] = []
    for probe, seen, truth in wrong:
        if time.thread_time() > deadline:
            return None
        found = _seen_as(probe, suspect, subject)
        if found is None:
            continue
        if not _same(seen, found, truth):
            return None
        if _is_evidence(probe, seen):
            names.append(probe.name)
    for probe, _, truth in right if names or not wrong else ():
        if time.thread_time() > deadline:
            return None
        found = _seen_as(probe, suspect, subject)
        if found is not None and _deviates(found, truth):
            return None
    return names


def _is_evidence(probe: Any, seen: Seen) -> bool:
    """Return whether an answer tells faults apart: numbers, or the lack of a gradient.

    Two other exceptions of one name may have different reasons.
    """
    return not isinstance(seen, str) or seen == Broken.__name__ or probe.name.startswith("the gradient")


def _suspect(fault: Fault, subject: Subject) -> Subject | None:
    """Return the fault as a subject with the claims of ``subject``; None if it cannot run or lacks an argument."""
    convention, options = CONVENTIONS[fault.convention], fault.options
    if not runs_on(fault, subject.device) or convention.passes not in ("", subject.convention.passes):
        return None  # a sentence about v says nothing of a function without v
    if subject.base != 10000.0 and convention.name in ("module", "plain") and not accepts(fault.function, "base"):
        return None
    told = fault.convention in FLAGGED and not fault.triton
    layout = options.get("layout", subject.layout if told else convention.layouts[0])
    return replace(
        subject,
        function=fault.function,
        convention=convention,
        layout=layout,
        out_layout=options.get("out_layout", layout),
        seq_format=subject.seq_format if subject.seq_format in convention.seq_formats else convention.seq_formats[0],
        in_place=subject.in_place if convention.in_place is None else convention.in_place,
        state={},
        surroundings=Surroundings(()),  # no fault of the catalogue replaces a function
    )


def _seen_as(probe: Any, suspect: Any, subject: Any) -> Seen | None:
    try:
        return probe.seen_as(suspect, subject)
    except NotApplicable:
        return None


def _same(seen: Seen, found: Seen, truth) -> bool:
    """Return whether the answer ``found`` of a fault reproduces the deviating answer ``seen``."""
    if isinstance(seen, str) or isinstance(found, str):
        return seen == found
    left = _distance(found, seen)
    return math.isfinite(left) and left <= LEFT_OVER * _distance(seen, [right for right, _ in truth])


def _deviates(seen: Seen, truth) -> bool:
    """Return whether an answer is off by more than twice the bound.

    The factor 2 is for a suspect: it may round where the subject, for which the bound was derived, does not.
    """
    if isinstance(seen, str):
        return True
    return any(not (abs(y - right) <= 2 * bound).all() for y, (right, bound) in zip(seen, truth, strict=True))


def _distance(a: Iterable[np.ndarray], b: Iterable[np.ndarray]) -> float:
    """Return the Euclidean distance of two sets of arrays.

    Two NaN, or two equal infinities, have distance 0. NaN or infinity and any other number have infinite distance.
    """
    total = 0.0
    for x, y in zip(a, b, strict=True):
        alike = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            total += float(np.square(np.where(alike, 0, np.nan_to_num(x - y, nan=np.inf))).sum())
    return total**0.5
