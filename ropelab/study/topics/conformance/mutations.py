"""This file makes functions with two known faults, drawn at random, for a measurement of the identification."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.measured import exact_array
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.vocabulary import set_row
from ropelab.layout.pairing import join, pairs


@dataclass(frozen=True)
class Mutation:
    """A known fault.

    Attributes:
        stage: the intermediate that it changes; two mutations of a function have different stages.
        words: the fault with its parameters.
        code: changes the intermediate, a tensor.
        change: the same change of a plan.
    """

    stage: str
    words: str
    code: Callable[[Any], Any] = field(compare=False)
    change: Callable[[Plan], object] = field(compare=False)

    def deviation(self, name: str = "") -> Deviation:
        """Return the fault as a deviation of an input."""
        return Deviation(self.stage, self.words, "", self.change, scope=Scope(name))


def _offset(n: int) -> Mutation:
    return Mutation("row", f"offset {n}", lambda p: p + n, lambda plan: set_row(plan, plan.row + n))


def _stride(n: int) -> Mutation:
    return Mutation("row", f"stride {n}", lambda p: torch.div(p, n, rounding_mode="floor"),
                    lambda plan: set_row(plan, np.floor(plan.row / n)))  # fmt: skip


def _wrap(n: int) -> Mutation:
    return Mutation("row", f"wrap {n}", lambda p: p % n, lambda plan: set_row(plan, np.mod(plan.row, n)))


def _last(n: int) -> Mutation:
    return Mutation("row", f"last {n}", lambda p: p.clamp(max=n), lambda plan: set_row(plan, np.minimum(plan.row, n)))


def _base(base: float) -> Mutation:
    def change(plan: Plan) -> None:
        width = 2 * plan.frequency.shape[-1]
        plan.frequency = plan.sine_frequency = exact_array(base ** (-np.arange(0, width, 2) / width))

    return Mutation("frequency", f"base {base:g}", lambda f: inverse_frequencies(2 * len(f), base), change)


def _slower(factor: float) -> Mutation:
    def change(plan: Plan) -> None:
        plan.multiple = plan.multiple / factor

    return Mutation("frequency", f"divided by {factor:g}", lambda f: f / factor, change)


def _backwards(plan: Plan) -> None:
    plan.frequency = plan.sine_frequency = plan.frequency[..., ::-1]


def _negative(plan: Plan) -> None:
    plan.multiple = -plan.multiple


def _amplified(parts: tuple[str, ...], factor: float) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        for part in parts:
            setattr(plan, part, getattr(plan, part) * factor)

    return change


def _scale(factor: float) -> Mutation:
    return Mutation("result", f"times {factor:g}", lambda y: (y[0] * factor, y[1] * factor),
                    _amplified(("cos0", "cos1", "sin0", "sin1"), factor))  # fmt: skip


def _sines(factor: float) -> Mutation:
    return Mutation("sine", f"sines times {factor:g}", lambda s: s * factor, _amplified(("sin0", "sin1"), factor))


def _interleaved(plan: Plan) -> None:
    plan.layout = plan.out_layout = "interleaved"


SIGN = Mutation("sine", "sines negated", torch.neg, _negative)
REVERSED = Mutation("frequency", "frequencies in reverse order", lambda f: f.flip(0), _backwards)
MIRRORED = Mutation("result", "second members negated", lambda y: (y[0], -y[1]), _amplified(("cos1", "sin1"), -1.0))
ADJACENT = Mutation("layout", "adjacent pairs", lambda layout: "interleaved", _interleaved)


def drawn(number: int) -> tuple[Callable, str, list[Deviation]]:
    """Return a function with two faults, its convention, and the faults as deviations.

    Odd numbers have the convention ``plain`` and both faults in x; even numbers have the convention ``huggingface`` and
    a fault in q and another in k.
    """
    random_ = random.Random(number)
    if number % 2:
        first, second = _two(random_, [*_of_rows(random_), *_of_tables(random_)])
        return _plain(first, second), "plain", [first.deviation(), second.deviation()]
    first, second = random_.sample(_of_tables(random_, tables=True), 2)
    return _huggingface(first, second), "huggingface", [first.deviation("q"), second.deviation("k")]


def _two(random_: random.Random, choices: list[Mutation]) -> tuple[Mutation, Mutation]:
    while True:
        first, second = random_.sample(choices, 2)
        if first.stage != second.stage:
            return first, second


def _of_rows(random_: random.Random) -> list[Mutation]:
    return [_offset(random_.choice([-2, 1, 2, 3, 5])), _stride(random_.choice([2, 3, 4])),
            _wrap(random_.choice([64, 512, 4096])), _last(random_.choice([63, 511, 4095]))]  # fmt: skip


def _of_tables(random_: random.Random, tables: bool = False) -> list[Mutation]:
    """Return faults that a function can have; ``tables``: a function that gets tables in place of positions."""
    choices = [SIGN, REVERSED, MIRRORED, ADJACENT, _scale(random_.choice([0.125, 0.25, 0.5, 1.25])),
               _sines(random_.choice([0.5, 0.75, 1.5]))]  # fmt: skip
    if not tables:
        choices += [_base(random_.choice([1e3, 5e5, 1e6])), _slower(random_.choice([2.0, 4.0, 8.0]))]
    return choices


def _plain(*mutations: Mutation) -> Callable:
    def mutant(x, positions):
        frequency = _apply(mutations, "frequency", inverse_frequencies(x.shape[-1]))
        angles = _apply(mutations, "row", positions).double()[..., None] * frequency
        return _turned(mutations, x, angles.cos()[..., None, :], angles.sin()[..., None, :])

    return mutant


def _huggingface(of_q: Mutation, of_k: Mutation) -> Callable:
    def mutant(q, k, cos, sin, unsqueeze_dim=1):
        results = []
        for x, mutation in ((q, of_q), (k, of_k)):
            half = cos.shape[-1] // 2
            c, s = (table[..., :half].unsqueeze(unsqueeze_dim) for table in (cos, sin))
            if mutation is REVERSED:
                c, s = c.flip(-1), s.flip(-1)
            results.append(_turned((mutation,), x, c, s))
        return tuple(results)

    return mutant


def _turned(mutations: tuple[Mutation, ...], x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    layout = _apply(mutations, "layout", "split_half")
    s = _apply(mutations, "sine", s)
    x0, x1 = pairs(x.to(torch.promote_types(x.dtype, c.dtype)), layout)
    y = _apply(mutations, "result", (x0 * c - x1 * s, x1 * c + x0 * s))
    return join(*y, layout).to(x.dtype)


def _apply(mutations: tuple[Mutation, ...], stage: str, value):
    for mutation in mutations:
        value = mutation.code(value) if mutation.stage == stage else value
    return value
