"""A plan: the definition of the rotation for one tensor of one call, in parts that can deviate."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields

import numpy as np
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.bounds import EXACT, exact
from ropelab.conformance.identify.questions import GRADIENT, Question
from ropelab.conformance.law import names
from ropelab.conformance.subject import Subject
from ropelab.kernels import NO_POSITION


@dataclass(frozen=True)
class Wires:
    """A linear map of a token: element ``to`` is the sum of ``amplitude * table * element``.

    The attributes are arrays ``[N]`` with an entry for each product.

    Attributes:
        to: the numbers of the results, in the heads of one tensor.
        tensor: the numbers of the inputs that are read. element: the numbers of the features, as for ``to``.
        table: 0 for the number 1, 1 for a cosine, 2 for a sine. column: the pair whose cosine or sine it is.
        ahead: how many rows ahead of the position the table is read.
        amplitude: the factors.
    """

    to: np.ndarray
    tensor: np.ndarray
    element: np.ndarray
    table: np.ndarray
    column: np.ndarray
    ahead: np.ndarray
    amplitude: np.ndarray

    def where(self, kept: np.ndarray) -> Wires:
        """Return the products for which ``kept [N]`` is True."""
        return Wires(*(getattr(self, f.name)[kept] for f in fields(self)))


PARTS = ("row", "sine_row", "frequency", "sine_frequency", "multiple", "cos0", "cos1", "sin0", "sin1")


def _to_dtype(dtype: torch.dtype) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: exact(torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype))


def _to_tf32(values: np.ndarray) -> np.ndarray:
    """Return the values with 10 explicit bits of the significand, as tensor cores read operands."""
    significand, exponent = np.frexp(values)
    return np.ldexp(np.round(significand * 2**11) / 2**11, exponent)


def _reduced_in_float32(values: np.ndarray) -> np.ndarray:
    """Return angles reduced to one turn by float32 arithmetic, as fast maths does."""
    angles = torch.from_numpy(np.array(values, dtype=np.float64)).float()
    turns = (angles / (2 * math.pi)).round()
    return exact(angles - turns * torch.tensor(2 * math.pi, dtype=torch.float32))


INTEGER, TURNS = "an integer", "turns in float32"


def _to_turns(values: np.ndarray) -> np.ndarray:
    """Return angles or frequencies whose number of turns is rounded to float32."""
    return exact(torch.from_numpy((values / (2 * EXACT(np.pi))).astype(np.float64)).float()) * (2 * EXACT(np.pi))


FORMATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": _to_dtype(torch.bfloat16),
    "float16": _to_dtype(torch.float16),
    "TF32": _to_tf32,
    INTEGER: np.trunc,
    TURNS: _to_turns,
}
"""The name of a format -> a function that rounds to it."""
OF_INPUT = "the dtype of the input"
OF_AUTOGRAD = "of autograd"
REDUCED = "one turn, with a remainder computed in float32"


def rounded(plan: Plan, what: str, values: np.ndarray) -> np.ndarray:
    """Return the values of an intermediate, rounded if the plan rounds that intermediate."""
    if what not in plan.rounded:
        return values
    name = plan.rounded[what]
    if name == OF_INPUT:
        return _to_dtype(plan.question.case.inputs[plan.which].dtype)(values)
    return _reduced_in_float32(values) if name == REDUCED else FORMATS[name](values)


def last_row(plan: Plan) -> int:
    """Return the last row of the tables that the caller passes; see the conventions."""
    return (int(abs(plan.position).max()) if plan.position.size else 0) + plan.question.case.spare_rows


def columns(declared: int, rotary_dim: int, base: float) -> torch.Tensor:
    """Return the inverse frequencies of the first ``rotary_dim`` features of tables for ``declared`` features.

    A function that rotates more features than declared has frequencies for all of its features.
    """
    return inverse_frequencies(max(declared, rotary_dim), base)[: rotary_dim // 2]


def _equal(part: object, other: object) -> bool:
    if isinstance(part, dict) and isinstance(other, dict):
        return part.keys() == other.keys() and all(_equal(value, other[key]) for key, value in part.items())
    if isinstance(part, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(part, other)
    return not isinstance(part, np.ndarray) and not isinstance(other, np.ndarray) and part == other


class Plan:
    """The parts of the definition, as arrays that broadcast to ``[B, S, H, pairs]``; a deviation changes some of them.

    A pair becomes ``y0 = x0 cos0 C - x1 sin0 S`` and ``y1 = x1 cos1 C + x0 sin1 S`` with
    ``C = cos(multiple row frequency)`` and ``S = sin(multiple sine_row sine_frequency)``.

    Attributes:
        question, which: the call and the number of its input.
        name: the name of the input: x, q or k.
        rotary_dim, layout, out_layout: the features that rotate, how they are read, and how they are written.
        position, batch, token, head: coordinates, which broadcast to ``[B, S, H, 1]``; with positions along several
            axes, ``position`` is ``[B, S, 1, pairs]``.
        tokens: the number of tokens of the call, of which the question may have some only.
        row, sine_row: the number of the row from which cosines and sines come.
        frequency, sine_frequency: rad per row.
        multiple: the factor of the angle; -1 for the inverse.
        cos0, cos1, sin0, sin1: factors of the four products.
        factor: the factor of the tables.
        tail, tail_added: the factor of the features that do not rotate, and a number added to them.
        order: axis -> the indices in whose order the input is read.
        source: for each element the number of the element that is rotated in its place, in all inputs one after
            another; None if each element is itself rotated.
        moved: for each element the number of the rotated element that is stored in its place; None as for source.
        wires: the products that an element is a sum of, in place of the pairs of the definition; None for the pairs.
        own_gradient: whether the wires belong to the gradient; otherwise the gradient applies the transposed map.
        in_turn: whether second members of pairs are computed from first members that are already rotated, in gradients
            as well; ``OF_AUTOGRAD`` if the gradient is the transpose of that.
        blocks: the number of blocks of pairs, a power of two of pairs each, that are rotated one after another in
            memory; matters if pairs are read and written in different layouts.
        rounded: the intermediate -> the format to which it is rounded, a key of ``FORMATS``.
        side: the frequency or the angle that is rounded -> -1, 0 or 1. The function computes the number before the
            rounding with an error, and this plan moves the number by -1, 0 or 1 times the largest error. Where the
            rounded numbers differ, a boundary between two of them is so near that the function may be on either side.
            The error is far smaller than the distance of two boundaries, so there is no third number.
        padding: the result of tokens without a position.
        raises: the name of the exception that the function raises in place of an answer; empty if it answers.
        inexact: the error of the angles (rad) beyond the error of a right function.
        extra: the number of roundings of a result beyond the roundings of a right function.
        several: whether the function may turn every pair several times.
        swapped: whether cosines and sines change places.
        overwritten: whether a later call overwrites the results.
        changed_inputs: whether the call overwrites its inputs though it is not in place, or leaves them though it is.
        changed_arguments: whether the call changes its other arguments.
        flat: the kind of answers for which strided inputs or cotangents are read as if their memory were contiguous.
        changed_cotangents: whether the backward overwrites the cotangents that it gets.
    """

    def __init__(self, subject: Subject, question: Question, which: int, rotary_dim: int | None = None):
        case = question.case
        self.subject, self.question, self.which = subject, question, which
        self.name = names(case)[which]
        self.shape = tuple(case.inputs[which].shape)
        batch, tokens, heads, _ = self.shape
        self.rotary_dim = case.rotary_dim if rotary_dim is None else rotary_dim
        self.layout, self.out_layout = subject.layout, subject.out_layout
        positions = case.token_positions()
        self.nowhere = (positions == NO_POSITION).numpy()
        self.position = positions.masked_fill(positions == NO_POSITION, 0).numpy()[..., None, None].astype(EXACT)
        if case.axes is not None and self.rotary_dim == case.rotary_dim:  # a position for each pair
            self.position = case.pair_positions().numpy()[:, :, None].astype(EXACT)
        inverse = case.inverse
        if inverse and subject.convention.negates:
            self.position, inverse = -self.position, False
        self.batch = np.arange(batch)[:, None, None, None]
        self.token = np.array(question.numbers or range(tokens))[None, :, None, None]
        self.tokens = question.tokens or tokens
        self.head = np.arange(heads)[None, None, :, None]
        self.row = self.sine_row = self.position / case.interpolation
        self.frequency = self.sine_frequency = exact(columns(case.rotary_dim, self.rotary_dim, subject.base))
        self.multiple = np.array(-1.0 if inverse != subject.reversed else 1.0)
        self.factor = case.factor
        self.cos0 = self.cos1 = self.sin0 = self.sin1 = np.ones(())
        self.tail, self.tail_added, self.padding, self.raises = 1.0, 0.0, 0.0, ""
        self.order: dict[int, np.ndarray] = {}
        self.source: np.ndarray | None = None
        self.moved: np.ndarray | None = None
        self.wires: Wires | None = None
        self.in_turn: bool | str = False
        self.own_gradient = False
        self.blocks = 1
        self.rounded: dict[str, str] = {}
        self.side: dict[str, int] = {}
        self.inexact, self.extra = 0.0, 0
        self.several = self.swapped = self.overwritten = False
        self.flat = ""
        self.changed_inputs = self.changed_arguments = self.changed_cotangents = False

    @classmethod
    def of(cls, subject: Subject, question: Question, which: int, rotary_dim: int | None = None) -> Plan:
        """Return a new plan of the definition. A question keeps a copy, because a search makes thousands of plans."""
        key = which, rotary_dim
        if key not in question.plans:
            question.plans[key] = cls(subject, question, which, rotary_dim)
        plan = copy(question.plans[key])
        plan.order, plan.rounded = {}, {}
        return plan

    def state(self) -> dict[str, object]:
        """Return all attributes, which deviations replace or, if they are dicts, change."""
        return vars(self) | {"order": dict(self.order), "rounded": dict(self.rounded), "side": dict(self.side)}

    def differs(self, before: dict[str, object]) -> bool:
        """Return whether any attribute is not as it was."""
        replaced = [(part, before[name]) for name, part in vars(self).items() if part is not before[name]]
        return not all(_equal(*parts) for parts in replaced)

    @property
    def is_gradient(self) -> bool:
        """Whether the answer is a gradient."""
        return self.question.kind == GRADIENT
