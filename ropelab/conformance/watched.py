"""Ask a function again what a law asked it: the very calls of the law, with other numbers.

A law draws the numbers of its calls from its subject. A subject that draws others, and is checked against the same law,
makes the same calls in the same order, strides, state and settings of torch included. So the linear map that a call
applies can be measured, whatever the law had to arrange for the call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.bounds import exact
from ropelab.conformance.case import Case, Sizes
from ropelab.conformance.law import Comparison, Law, names
from ropelab.conformance.subject import Subject
from ropelab.conformance.tensors import Tensors
from ropelab.kernels import NO_POSITION

MOST_ELEMENTS = 2**17
"""The elements of the largest input of a call that is watched: the exact result of a larger one takes long."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What became of one input in a call, or of its cotangent, beside what is right.

    Attributes:
        subject: the subject that was called.
        law: the name of the law that made the call.
        what: ``"q"``, ``"gradient of k"``, ...; of a comparison, its own words.
        case: the call.
        which: the number of the input; None where the numbers are not made of one input.
        gradient: whether a cotangent went in.
        given, actual, right, bound: what went in, what came out and what should have, within the bound: arrays
            ``[B, S, H, D]``.
        tokens: the numbers in the call of the tokens of these arrays.
        defined: whether ``right`` is the definition; otherwise it is what the law expected.
    """

    subject: Subject
    law: str
    what: str
    case: Case
    which: int | None
    gradient: bool
    given: np.ndarray
    actual: np.ndarray
    right: np.ndarray
    bound: np.ndarray
    tokens: np.ndarray
    defined: bool = True

    @cached_property
    def wrong(self) -> np.ndarray:
        """Whether an element is wrong; a token without a position has no wrong element."""
        with np.errstate(invalid="ignore"):
            right = (self.actual == self.right) | (abs(self.actual - self.right) <= self.bound)
        if self.defined:
            right |= (self.case.token_positions()[:, self.tokens] == NO_POSITION).numpy()[:, :, None, None]
        return ~right

    @cached_property
    def frequencies(self) -> np.ndarray:
        """The exact inverse frequency of each pair in rad per position: ``[R/2]``."""
        given = self.subject.frequencies
        return exact(inverse_frequencies(self.case.rotary_dim, self.subject.base) if given is None else given)

    @property
    def sign(self) -> int:
        """The sense in which the call turns: -1 for a gradient, an inverse or a function declared reversed."""
        return -1 if self.gradient ^ self.case.inverse ^ self.subject.reversed else 1

    @property
    def positions(self) -> np.ndarray:
        """The position that each pair reads: ``[B, S, 1]``, or ``[B, S, R/2]`` with several axes."""
        return self.case.pair_positions().numpy()[:, self.tokens]


@dataclass(frozen=True)
class Watched(Subject):
    """A subject that draws other numbers than usual, and keeps what it answered.

    Attributes:
        law: the name of the law that asks.
        number: each gives other numbers; 0 gives the usual.
        seen: the answers that nobody has taken yet.
    """

    law: str = ""
    number: int = 0
    seen: list[Seen] = field(default_factory=list, compare=False, repr=False)

    def normal(self, shapes: Sequence, seq_format: str, dtype: torch.dtype, seed: int) -> Tensors:
        return super().normal(shapes, seq_format, dtype, seed + 1009 * self.number)

    def __call__(self, case: Case) -> Tensors:
        if (len(case.inputs) == 2 and not self.convention.pair) or not _small(case):
            return super().__call__(case)
        given, right = [exact(x) for x in case.inputs], self.expected(case)  # a faulty call may overwrite the inputs
        outputs = super().__call__(case)
        self._keep("{}", case, given, outputs, right)
        return outputs

    def gradients(self, case: Case, **options) -> tuple[Tensors, Tensors]:
        if not _small(case):
            return super().gradients(case, **options)
        given = [exact(g) for g in case.cotangents]
        right = [(d, 2 * bound) for d, bound in self.expected(case, given, transposed=True)]
        outputs, gradients = super().gradients(case, **options)
        self._keep("gradient of {}", case, given, gradients, right)
        return outputs, gradients

    def _keep(self, what: str, case: Case, given, actual, right) -> None:
        for which, name in enumerate(names(case)):
            (value, bound), gradient, tokens = right[which], what != "{}", np.arange(case.shape[1])
            numbers = given[which], exact(actual[which]), value, bound
            self.seen.append(Seen(self, self.law, what.format(name), case, which, gradient, *numbers, tokens))


def _small(case: Case) -> bool:
    return 0 < case.inputs[0].numel() <= MOST_ELEMENTS


def watch(law: Law, subject: Subject, sizes: Sizes, number: int = 0) -> Iterator[Seen]:
    """Yield what a law asks of a subject and what it compares, in order, up to an exception.

    Args:
        law: a law of rotations.
        subject: the subject, without state of earlier calls.
        sizes: as for the law.
        number: as for `Watched`.
    """
    known: dict[str, Any] = {f.name: getattr(subject, f.name) for f in fields(subject)}
    watched = Watched(**known, law=law.name, number=number)
    found = iter(law.compare(watched, sizes))
    while True:
        try:
            compared = next(found, None)
        except Exception:  # the law's result says what was raised
            compared = None
        yield from watched.seen
        watched.seen.clear()
        if compared is None:
            return
        if isinstance(compared, Comparison) and (seen := _of_comparison(watched, law.name, compared)):
            yield seen


def _of_comparison(subject: Subject, law: str, found: Comparison) -> Seen | None:
    """Return a comparison of results with what a law expects of them; None for other numbers."""
    case, named = found.case, re.match(r"(gradient of |cotangent of )?(?:the input )?([qkx])\b", found.what)
    if named is None or named[2] not in names(case) or found.actual.ndim != 4:
        return None
    which = names(case).index(named[2])
    gradient = named[1] is not None
    tokens = np.arange(case.shape[1]) if found.tokens is None else np.asarray(found.tokens)
    given = (case.cotangents if gradient else case.inputs)[which][:, torch.from_numpy(tokens)]
    if given.shape != found.actual.shape or given.numel() > MOST_ELEMENTS:
        return None
    right, bound = np.broadcast_arrays(found.expected, found.bound)
    return Seen(
        subject, law, found.what, case, which, gradient, exact(given), found.actual, right, bound, tokens, False
    )
