"""Measure the matrices that a function multiplies heads by, with basis vectors as inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ropelab.conformance.identify.questions import GRADIENT, Question
from ropelab.conformance.subject import Subject
from ropelab.layout.pairing import LAYOUTS, pairs

TINY = 1e-5
"""An entry of a matrix below this size counts as rounding of a zero."""


@dataclass(frozen=True)
class Blocks:
    """The 2 x 2 matrices ``((cos0, -sin0), (sin1, cos1))`` of all pairs, as arrays ``[B, S, H, pairs]``."""

    cos0: np.ndarray
    cos1: np.ndarray
    sin0: np.ndarray
    sin1: np.ndarray


def answered(subject: Subject, question: Question, vectors: list[torch.Tensor]) -> tuple[np.ndarray, ...] | None:
    """Return the answer for one vector ``[D]`` in every head of an input; None if there is no answer.

    A gradient gets the vectors as cotangents.
    """
    case = question.case
    filled = tuple(torch.empty_like(x).copy_(v) for x, v in zip(case.inputs, vectors, strict=True))
    return question.answer_to(subject, filled)


def matrices(subject: Subject, question: Question) -> list[np.ndarray] | None:
    """Return the forward matrix of each input, ``[B, S, H, D, D]`` (row: output); None if there is no answer."""
    widths = [x.shape[-1] for x in question.case.inputs]
    columns = []
    for feature in range(widths[0]):
        found = answered(subject, question, [torch.eye(width, device=subject.device)[feature] for width in widths])
        if found is None:
            return None
        columns.append(found)
    measured = [np.stack(each, axis=-1) for each in zip(*columns, strict=True)]
    return [m.swapaxes(-1, -2) for m in measured] if question.kind == GRADIENT else measured


def layouts(matrix: np.ndarray) -> Iterator[tuple[str, str, int]]:
    """Yield each ``(layout, out_layout, rotary_dim)`` whose pairs contain all entries of the matrices beyond rounding.

    Args:
        matrix: ``[B, S, H, D, D]``.
    """
    linked = (~(abs(matrix) <= TINY)).any(axis=(0, 1, 2))
    width = linked.shape[0]
    for rotary_dim in range(2, width + 1, 2):
        for source in LAYOUTS:
            for target in LAYOUTS:
                allowed = _allowed(width, rotary_dim, source, target)
                if not (linked & ~allowed).any():
                    yield source, target, rotary_dim


def _allowed(width: int, rotary_dim: int, source: str, target: str) -> np.ndarray:
    allowed = np.eye(width, dtype=bool)
    read, written = (np.array(pairs(np.arange(rotary_dim), name)) for name in (source, target))
    allowed[:rotary_dim, :rotary_dim] = False
    for features, others in zip(written.T, read.T, strict=True):
        allowed[np.ix_(features, others)] = True
    return allowed


def blocks(subject: Subject, question: Question, layout: str, out_layout: str, rotary_dim: int) -> list[Blocks] | None:
    """Return the blocks of each input, from two calls: only first members are 1, then only second members are 1."""
    source, target = (layout, out_layout)[:: -1 if question.kind == GRADIENT else 1]
    columns = []
    for member in (0, 1):
        vectors = [torch.zeros(x.shape[-1], device=subject.device) for x in question.case.inputs]
        for vector in vectors:
            pairs(vector[:rotary_dim], source)[member].fill_(1)
        found = answered(subject, question, vectors)
        if found is None:
            return None
        columns.append([pairs(y[..., :rotary_dim], target) for y in found])
    return [_blocks(first, second, question.kind == GRADIENT) for first, second in zip(*columns, strict=True)]


def _blocks(first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...], transposed: bool) -> Blocks:
    (m00, m10), (m01, m11) = first, second
    if transposed:
        m01, m10 = m10, m01
    return Blocks(*(np.asarray(m, dtype=np.float64) for m in (m00, m11, -m01, m10)))
