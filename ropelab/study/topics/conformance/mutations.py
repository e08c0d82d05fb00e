"""Make functions with two known faults, drawn at random, for a measurement of the identification.

A mutation changes an intermediate of a right rotation, in code. Next to the code stands the same change of a plan, for
the proof that a recovered description is the injected function.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.faults import correct
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.measured import exact_array
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.vocabulary import set_row
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import join, pairs

CONVENTIONS = ("plain", "huggingface", "flash_attn")
MASKED = ("row", "frequency", "sine", "result")
"""The stages that a mutation can change in some heads only."""
ODD = "in odd heads"


@dataclass(frozen=True)
class Mutation:
    """A known fault.

    Attributes:
        stage: the intermediate that it changes.
        words: the fault with its parameters.
        code: changes the intermediate, a tensor.
        change: the same change of a plan.
    """

    stage: str
    words: str
    code: Callable[[Any], Any] = field(compare=False)
    change: Callable[[Plan], object] = field(compare=False)


@dataclass(frozen=True)
class Injected:
    """A mutation in some part of a function.

    Attributes:
        mutation: the fault.
        name: q or k; empty for all inputs.
        gradient: whether only the gradient has the fault.
        odd: whether only heads 1, 3, 5, ... have the fault.
    """

    mutation: Mutation
    name: str = ""
    gradient: bool = False
    odd: bool = False

    def deviation(self) -> Deviation:
        """Return the fault as a deviation."""
        mask = (lambda plan: plan.head % 2 == 1) if self.odd else None
        scope = Scope(self.name, self.gradient, ODD if self.odd else "", mask=mask)
        return Deviation(self.mutation.stage, self.mutation.words, "", self.mutation.change, scope=scope)


# ------------------------------------------------------------------------------------------------- single mutations


def _row(words: str, code: Callable, row: Callable[[Plan], np.ndarray]) -> Mutation:
    return Mutation("row", words, code, lambda plan: set_row(plan, row(plan)))


def _offset(n: int) -> Mutation:
    return _row(f"offset {n}", lambda p: p + n, lambda plan: plan.row + n)


def _stride(n: int) -> Mutation:
    return _row(f"stride {n}", lambda p: torch.div(p, n, rounding_mode="floor"), lambda plan: np.floor(plan.row / n))


def _wrap(n: int) -> Mutation:
    return _row(f"wrap {n}", lambda p: p % n, lambda plan: np.mod(plan.row, n))


def _last(n: int) -> Mutation:
    return _row(f"last {n}", lambda p: p.clamp(max=n), lambda plan: np.minimum(plan.row, n))


FIRST_ROWS = _row("positions of the first sequence", lambda p: p[:1].expand_as(p), lambda plan: plan.row[:1])
BACKWARDS = _row("positions from the end", lambda p: p.flip(1), lambda plan: plan.row[:, ::-1])
ABSOLUTE = _row("absolute positions", torch.abs, lambda plan: abs(plan.row))


def _sine_ahead(n: int) -> Mutation:
    def change(plan: Plan) -> None:
        plan.sine_row = plan.sine_row + n

    return Mutation("sine row", f"sines {n} ahead", lambda p: p + n, change)


def _base(base: float) -> Mutation:
    def change(plan: Plan) -> None:
        width = 2 * plan.frequency.shape[-1]
        plan.frequency = plan.sine_frequency = exact_array(base ** (-np.arange(0, width, 2) / width))

    return Mutation("frequency", f"base {base:g}", lambda f: inverse_frequencies(2 * len(f), base), change)


def _slower(factor: float) -> Mutation:
    return Mutation("frequency", f"divided by {factor:g}", lambda f: f / factor, _amplified(("multiple",), 1 / factor))


def _reversed(plan: Plan) -> None:
    plan.frequency = plan.sine_frequency = plan.frequency[..., ::-1]


REVERSED = Mutation("frequency", "frequencies in reverse order", lambda f: f.flip(-1), _reversed)


def _amplified(parts: Iterable[str], factor: float) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        for part in parts:
            setattr(plan, part, getattr(plan, part) * factor)
        plan.extra += abs(factor) not in (0.5, 1.0)  # the product with the factor is rounded

    return change


def _scale(factor: float) -> Mutation:
    return Mutation("result", f"times {factor:g}", lambda y: (y[0] * factor, y[1] * factor),
                    _amplified(("cos0", "cos1", "sin0", "sin1"), factor))  # fmt: skip


def _sines(factor: float) -> Mutation:
    return Mutation("sine", f"sines times {factor:g}", lambda s: s * factor, _amplified(("sin0", "sin1"), factor))


SIGN = Mutation("sine", "sines negated", torch.neg, _amplified(("sin0", "sin1"), -1.0))
MIRRORED = Mutation("result", "second members negated", lambda y: (y[0], -y[1]), _amplified(("cos1", "sin1"), -1.0))
HALVED = Mutation("result", "first members halved", lambda y: (0.5 * y[0], y[1]), _amplified(("cos0", "sin0"), 0.5))


def _rounded(stage: str, what: str, dtype: torch.dtype) -> Mutation:
    name = str(dtype).removeprefix("torch.")

    def change(plan: Plan) -> None:
        if what != "output" or not plan.is_gradient:
            plan.rounded[what] = name

    def code(values: torch.Tensor) -> torch.Tensor:
        return values + (values.to(dtype).to(values.dtype) - values).detach()  # the gradient ignores the rounding

    return Mutation(stage, f"{what} in {name}", code, change)


def _interleaved(plan: Plan) -> None:
    plan.layout = plan.out_layout = "interleaved"


def _swapped(plan: Plan) -> None:
    plan.swapped = True


def _ordered(order: Callable[[int], np.ndarray]) -> Callable[[Plan], None]:
    return lambda plan: plan.order.__setitem__(2, order(plan.shape[2]))


def _tailed(plan: Plan) -> None:
    plan.tail = 0.0


ADJACENT = Mutation("layout", "adjacent pairs", lambda layout: "interleaved", _interleaved)
SWAPPED = Mutation("tables", "cosines and sines swapped", lambda t: t[::-1], _swapped)
UPSIDE_DOWN = Mutation("heads", "heads in reverse order", lambda x: x.flip(2), _ordered(lambda n: np.arange(n)[::-1]))
MOVED = Mutation("heads", "heads moved by one", lambda x: x.roll(1, 2), _ordered(lambda n: np.roll(np.arange(n), 1)))
TAIL = Mutation("tail", "the rest is zero", torch.zeros_like, _tailed)


# -------------------------------------------------------------------------------------------------- random functions


def drawn(number: int) -> tuple[Callable, str, list[Deviation]]:
    """Return a function with two random faults, its convention, and the faults as deviations.

    The number decides the convention in turn, and seeds the choice of two faults that change different intermediates,
    or different inputs. A third of the faults are confined: to the gradient, or to odd heads.
    """
    random_ = random.Random(number)
    convention = CONVENTIONS[number % len(CONVENTIONS)]
    choices = _choices(convention, random_)
    while True:
        both = [_placed(random_, convention, random_.choice(choices)) for _ in range(2)]
        first, second = both
        apart = first.name and second.name and first.name != second.name
        if first.mutation is not second.mutation and (apart or first.mutation.stage != second.mutation.stage):
            both.sort(key=lambda injected: injected.mutation.stage == "sine row")  # a plan counts it from the other row
            return MAKERS[convention](both), convention, [injected.deviation() for injected in both]


def _placed(random_: random.Random, convention: str, mutation: Mutation) -> Injected:
    name = random_.choice(("", "q", "k")) if convention == "huggingface" else ""
    where = random_.choice(("", "", "", "", "gradient", "odd"))
    return Injected(mutation, name, where == "gradient" and mutation.stage != "output bits",
                    where == "odd" and mutation.stage in MASKED)  # fmt: skip


def _choices(convention: str, random_: random.Random) -> list[Mutation]:
    choose, short = random_.choice, random_.choice([torch.bfloat16, torch.float16])
    choices = [SIGN, REVERSED, MIRRORED, HALVED, ADJACENT, SWAPPED, UPSIDE_DOWN, MOVED,
               _scale(choose([0.125, 0.25, 0.5, 1.25])), _sines(choose([0.5, 0.75, 1.5])),
               _rounded("table bits", "table", short), _rounded("output bits", "output", short)]  # fmt: skip
    if convention == "flash_attn":
        choices += [TAIL, FIRST_ROWS, _offset(choose([1, 2])), _sine_ahead(1), _stride(choose([2, 3, 4]))]
    if convention == "plain":
        choices += [FIRST_ROWS, BACKWARDS, ABSOLUTE, _offset(choose([-2, 1, 2, 3, 5])), _stride(choose([2, 3, 4])),
                    _wrap(choose([64, 512, 4096])), _last(choose([63, 511, 4095])), _sine_ahead(choose([-1, 1, 2])),
                    _base(choose([1e3, 5e5, 1e6])), _slower(choose([2.0, 4.0, 8.0])),
                    _rounded("frequency bits", "frequency", short)]  # fmt: skip
    return choices


# ------------------------------------------------------------------------------------------------------------- code

Tables = Callable[[torch.Tensor, tuple[Mutation, ...]], torch.Tensor]


def _plain(both: list[Injected]) -> Callable:
    def mutant(x, positions):
        rows = positions.double().expand(x.shape[0], x.shape[1])

        def table(function):
            def values(rows, mutations):
                frequency = _apply(mutations, "frequency", inverse_frequencies(x.shape[-1]))
                angles = rows[..., None] * _apply(mutations, "frequency bits", frequency.float()).double()
                return function(angles)

            return values

        return _rotated(x, rows, table(torch.cos), table(torch.sin), both)

    return mutant


def _huggingface(both: list[Injected]) -> Callable:
    def mutant(q, k, cos, sin, unsqueeze_dim=1):
        results = []
        for name, given in (("q", q), ("k", k)):
            x = given.transpose(1, 2) if unsqueeze_dim == 1 else given
            own = [injected for injected in both if injected.name in ("", name)]
            c, s = (table[..., : table.shape[-1] // 2].expand(len(x), -1, -1) for table in (cos, sin))
            y = _rotated(x, None, lambda rows, m, c=c: _apply(m, "frequency", c),
                         lambda rows, m, s=s: _apply(m, "frequency", s), own)  # fmt: skip
            results.append(y.transpose(1, 2) if unsqueeze_dim == 1 else y)
        return tuple(results)

    return mutant


def _flash_attn(both: list[Injected]) -> Callable:
    def mutant(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
        positions = correct.flash_positions(x, seqlen_offsets, cu_seqlens)
        batched, positions = (x[None], positions[None]) if x.ndim == 3 else (x, positions)

        def of(table):
            return lambda rows, mutations: _apply(mutations, "frequency", table[rows.long().clamp(0, len(table) - 1)])

        y = _rotated(batched, positions.clamp(min=0), of(cos), of(sin), both)
        y = y.masked_fill((positions == NO_POSITION)[..., None, None], 0).reshape(x.shape)
        return x.copy_(y) if inplace else y

    return mutant


MAKERS = {"plain": _plain, "huggingface": _huggingface, "flash_attn": _flash_attn}


def _rotated(x: torch.Tensor, rows: torch.Tensor | None, cosine: Tables, sine: Tables, both: list[Injected]):
    """Return ``x [B, S, H, D]`` rotated, with the faults in the heads that have them, and its gradient likewise."""

    def rotate(x: torch.Tensor, gradient: bool) -> torch.Tensor:
        reach = [injected for injected in both if gradient or not injected.gradient]
        everywhere = tuple(injected.mutation for injected in reach if not injected.odd)
        y = _turned(x, rows, cosine, sine, everywhere)
        if len(everywhere) == len(reach):
            return y
        odd = (torch.arange(x.shape[2]) % 2 == 1)[:, None]
        return torch.where(odd, _turned(x, rows, cosine, sine, tuple(i.mutation for i in reach)), y)

    def back(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = torch.zeros_like(grad).requires_grad_()
            return torch.autograd.grad(rotate(x, True), x, grad)[0]

    return correct.with_backward(x, lambda x: rotate(x, False), back)


def _turned(x: torch.Tensor, rows: torch.Tensor | None, cosine: Tables, sine: Tables, mutations: tuple[Mutation, ...]):
    x = _apply(mutations, "heads", x)
    rows = rows if rows is None else _apply(mutations, "row", rows)
    tables = (cosine(rows, mutations), sine(_apply(mutations, "sine row", rows), mutations))
    tables = tuple(_apply(mutations, "table bits", table)[..., None, :] for table in tables)
    c, s = _apply(mutations, "tables", tables)
    s, layout = _apply(mutations, "sine", s), _apply(mutations, "layout", "split_half")
    width = 2 * c.shape[-1]
    x0, x1 = pairs(x[..., :width].to(torch.promote_types(x.dtype, c.dtype)), layout)
    y = join(*_apply(mutations, "result", (x0 * c - x1 * s, x1 * c + x0 * s)), layout)
    y = _apply(mutations, "output bits", y)
    return torch.cat((y.to(x.dtype), _apply(mutations, "tail", x[..., width:])), dim=-1)


def _apply(mutations: tuple[Mutation, ...], stage: str, value):
    for mutation in mutations:
        value = mutation.code(value) if mutation.stage == stage else value
    return value
