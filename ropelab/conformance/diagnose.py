"""Which known fault an implementation has: the one of the catalogue that does the same where it is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ropelab.conformance.case import Case, NotApplicable, Sizes
from ropelab.conformance.conventions import CONVENTIONS, accepts
from ropelab.conformance.faults import FAULTS, Fault, runs_on
from ropelab.conformance.probes import Probe, Seen, probes, rare_probes
from ropelab.conformance.subject import Subject
from ropelab.conformance.surroundings import Surroundings
from ropelab.kernels import INTERPRETED

LEFT_OVER = 0.01
"""A fault accounts for a deviation if it leaves over less than this share of it, which is rounding."""
PATIENCE = 3
"""Deviations that a fault may fail to account for before it accounts for one."""
MANY_TOKENS, LONG_TABLE = 64, 4096
"""Counterexamples with more tokens, or at larger positions, are left to the probes that look for such things."""
FLAGGED = ("ropelab", "flash_attn", "transformer_engine", "vllm")
"""Conventions whose functions are told the layout."""


@dataclass(frozen=True)
class Diagnosis:
    """A fault that does what an implementation does.

    Attributes:
        fault: of the catalogue.
        reproduced: what the implementation gets wrong, and the fault in the same way.
        missed: what the implementation gets wrong, and the fault right or wrong in another way.
        unshared: what only the fault gets wrong.
    """

    fault: Fault
    reproduced: tuple[str, ...]
    missed: tuple[str, ...]
    unshared: tuple[str, ...]

    @property
    def unexplained(self) -> float:
        """Share of all deviations that one has and the other not."""
        apart = len(self.missed) + len(self.unshared)
        return apart / (apart + len(self.reproduced))

    @property
    def evidence(self) -> str:
        """What the two have in common, and what not."""
        parts = {
            "the same wrong result for": self.reproduced,
            "another result for": self.missed,
            "only the fault is wrong for": self.unshared,
        }
        return "; ".join(f"{said} {', '.join(names)}" for said, names in parts.items() if names)

    def __str__(self) -> str:
        seen_in = f", as in {self.fault.seen_in}" if self.fault.seen_in else ""
        return f"{self.fault.sentence.rstrip('.')}{seen_in} [{self.fault.name}]"


def diagnose(subject: Subject, failed: Iterable = (), *, sizes: Sizes | None = None) -> list[Diagnosis]:
    """The faults of the catalogue that do what ``subject`` does where it is wrong, the likeliest first.

    Every fault is called on the same canonical inputs, translated into its own convention and layout: a fault that
    was written for one convention is recognised in another.

    Args:
        subject: that failed a law.
        failed: counterexamples of the laws that it failed.
        sizes: of the tensors that both are tried on.

    Returns:
        Faults that reproduce something that ``subject`` gets wrong and explain at least half of what either does.
    """
    if sizes is None:
        sizes = Sizes() if subject.convention.partial else Sizes(rotary_dim=Sizes.head_dim)
    cases = [replace(c.case, cotangents=()) for c in failed if _is_small(c.case)]
    wrong, right = _asked(subject, probes(subject, sizes, cases))
    if not wrong:
        wrong, right = _asked(subject, rare_probes(subject, sizes))

    found: list[Diagnosis] = []
    for fault in sorted(FAULTS.values(), key=lambda f: f.triton):
        if fault.triton and INTERPRETED and any(not d.unexplained for d in found):
            break  # interpreted kernels are slow, and the fault has a name already
        suspect = _suspect(fault, subject)
        if suspect is not None and (diagnosis := _compared(fault, suspect, subject, wrong, right)) is not None:
            found.append(diagnosis)
    return sorted(found, key=lambda d: (d.unexplained, d.fault.convention != subject.convention.name))


def _is_small(case: Case) -> bool:
    """Whether the whole catalogue can be tried on it in a moment."""
    batch, seq_len = case.shape
    return batch * seq_len <= MANY_TOKENS and bool((case.token_positions().clamp(min=0) <= LONG_TABLE).all())


def _asked(subject: Subject, questions: Iterable[Probe]) -> tuple[list, list]:
    """(probe, what came of it, the truth) where the subject is wrong, and where it is right."""
    wrong: list[tuple] = []
    right: list[tuple] = []
    for probe in questions:
        try:
            seen = probe.seen(subject)
        except NotApplicable:
            continue
        truth = probe.truth(subject, probe.case)
        (wrong if _deviates(seen, truth) else right).append((probe, seen, truth))
    return wrong, right


def _compared(fault: Fault, suspect: Subject, subject: Subject, wrong, right) -> Diagnosis | None:
    reproduced: list[str] = []
    missed: list[str] = []
    for probe, seen, truth in wrong:
        found = _seen_as(probe, suspect, subject)
        if found is None:
            continue
        (reproduced if _same(seen, found, truth) else missed).append(probe.name)
        if not reproduced and len(missed) >= PATIENCE:
            return None
    if not reproduced or len(missed) > len(reproduced):
        return None
    unshared = []
    for probe, _, truth in right:
        found = _seen_as(probe, suspect, subject)
        if found is not None and _deviates(found, truth):
            unshared.append(probe.name)
    diagnosis = Diagnosis(fault, tuple(reproduced), tuple(missed), tuple(unshared))
    return diagnosis if diagnosis.unexplained <= 0.5 else None


def _suspect(fault: Fault, subject: Subject) -> Subject | None:
    """The fault, declared as its author would; None if it cannot be asked what the subject is."""
    convention, options = CONVENTIONS[fault.convention], fault.options
    if not runs_on(fault, subject.device):
        return None
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
        surroundings=Surroundings(),
    )


def _seen_as(probe: Probe, suspect: Subject, subject: Subject) -> Seen | None:
    try:
        return probe.seen_as(suspect, subject)
    except NotApplicable:
        return None


def _same(seen: Seen, found: Seen, truth) -> bool:
    """Whether what was found leaves nothing of the deviation that was seen."""
    if isinstance(seen, str) or isinstance(found, str):
        return seen == found
    left = _distance(found, seen)
    return math.isfinite(left) and left <= LEFT_OVER * _distance(seen, [right for right, _ in truth])


def _deviates(seen: Seen, truth) -> bool:
    """Beyond twice the bound: a suspect may round where the subject, for which the bound was made, does not."""
    if isinstance(seen, str):
        return True
    return any(not (abs(y - right) <= 2 * bound).all() for y, (right, bound) in zip(seen, truth, strict=True))


def _distance(a: Iterable[np.ndarray], b: Iterable[np.ndarray]) -> float:
    """Euclidean. What is not finite is equal to its like, and infinitely far from all else."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        alike = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            total += float(np.square(np.where(alike, 0, np.nan_to_num(x - y, nan=np.inf))).sum())
    return total**0.5
