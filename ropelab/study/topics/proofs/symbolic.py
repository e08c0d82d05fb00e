"""Run functions of kernels with symbolic integers, and prove statements about what they return.

`Machine.call` runs the body of a Triton function, unchanged, in a module whose ``tl`` computes with expressions of the
solver Z3. A lane of ``tl.arange`` is a variable, so a result speaks of every lane. A branch on a symbolic condition is
followed both ways (`theorem`). Integers have the widths of Triton: a `Number` knows whether any of its operations left
the range of its width.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import triton.language as tl
import z3

_UNLIMITED = 0
"""The width of a Python integer, which takes the width of the other operand."""
SECONDS, SEEDS = 60, 3
"""The seconds that Z3 has for one path of a statement, and how often it tries, each time with another random seed."""


class Shape:
    """The shape of a symbolic block: a variable stands for every element, so an axis has no length of its own."""

    def __getitem__(self, axis: int) -> int:
        return 1


class _Element:
    """One element of a block. Views and broadcasts of the block are the same element."""

    shape = Shape()

    def __getitem__(self, index: Any) -> Any:
        return self


@dataclass(frozen=True, eq=False)
class Bool(_Element):
    """A condition. ``safe`` says that no integer in it left its range."""

    machine: Machine
    holds: z3.BoolRef
    safe: z3.BoolRef = field(default_factory=lambda: z3.BoolVal(True))

    def _with(self, other: Any, join: Callable) -> Bool:
        other = self.machine.condition(other)
        return Bool(self.machine, join(self.holds, other.holds), z3.And(self.safe, other.safe))

    def __and__(self, other: Any) -> Bool:
        return self._with(other, z3.And)

    def __or__(self, other: Any) -> Bool:
        return self._with(other, z3.Or)

    __rand__, __ror__ = __and__, __or__

    def __eq__(self, other: Any) -> Bool:  # type: ignore[override]
        return self._with(other, lambda a, b: a == b)

    def __bool__(self) -> bool:
        return self.machine.decide(self.holds)

    def to(self, dtype: Any) -> Number:
        return Number(self.machine, z3.If(self.holds, 1, 0), _width(dtype), self.safe)


@dataclass(frozen=True, eq=False)
class Number(_Element):
    """An integer of ``width`` bits with a sign. ``safe`` says that no operation before left its range."""

    machine: Machine
    value: z3.ArithRef
    width: int = _UNLIMITED
    safe: z3.BoolRef = field(default_factory=lambda: z3.BoolVal(True))

    @property
    def dtype(self) -> Any:
        return {64: tl.int64, -32: tl.uint32}.get(self.width, tl.int32)

    def _with(self, other: Any, operation: Callable, *, swap: bool = False) -> Number:
        other = self.machine.number(other)
        a, b = (other, self) if swap else (self, other)
        return self.machine.ranged(operation(a.value, b.value), max(a.width, b.width), a.safe, b.safe)

    def __add__(self, other: Any) -> Number:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Number:
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> Number:
        return self._with(other, lambda a, b: a - b, swap=True)

    def __mul__(self, other: Any) -> Number:
        return self._with(other, lambda a, b: a * b)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Number:
        return 0 - self

    def _divided(self, other: Any, operation: Callable) -> Number:
        """A quotient or remainder. C and Z3 differ for negative numbers, so these count as out of range."""
        other = self.machine.number(other)
        found = self._with(other, operation)
        return Number(self.machine, found.value, found.width, z3.And(found.safe, self.value >= 0, other.value > 0))

    def __floordiv__(self, other: Any) -> Number:
        return self._divided(other, lambda a, b: a / b)

    def __mod__(self, other: Any) -> Number:
        return self._divided(other, lambda a, b: a % b)

    def _compared(self, other: Any, operation: Callable) -> Bool:
        other = self.machine.number(other)
        return Bool(self.machine, operation(self.value, other.value), z3.And(self.safe, other.safe))

    def __lt__(self, other: Any) -> Bool:
        return self._compared(other, lambda a, b: a < b)

    def __le__(self, other: Any) -> Bool:
        return self._compared(other, lambda a, b: a <= b)

    def __gt__(self, other: Any) -> Bool:
        return self._compared(other, lambda a, b: a > b)

    def __ge__(self, other: Any) -> Bool:
        return self._compared(other, lambda a, b: a >= b)

    def __eq__(self, other: Any) -> Bool:  # type: ignore[override]
        return self._compared(other, lambda a, b: a == b)

    def __ne__(self, other: Any) -> Bool:  # type: ignore[override]
        return self._compared(other, lambda a, b: a != b)

    def __bool__(self) -> bool:
        return self.machine.decide(self.value != 0)

    def to(self, dtype: Any) -> Number:
        if dtype == tl.uint32:  # a conversion that wraps on purpose
            return Number(self.machine, self.value % 2**32, -32, self.safe)
        return self.machine.ranged(self.value, _width(dtype), self.safe)


def _width(dtype: Any) -> int:
    """The width of a dtype; -32 stands for 32 bits without a sign."""
    return {tl.int32: 32, tl.int64: 64, tl.uint32: -32}[dtype]


@dataclass
class Machine:
    """Symbolic values, what is assumed of them, and the branches of the path that runs."""

    replaced: dict[str, Any] = field(default_factory=dict)
    branches: list[bool] = field(default_factory=list)
    assumptions: list[z3.BoolRef] = field(default_factory=list)
    path: list[z3.BoolRef] = field(default_factory=list)
    memory: Callable[[Number], z3.ArithRef] | None = None
    stored: list[tuple[Number, Any, Bool]] = field(default_factory=list)
    hints: list[tuple[Number, int]] = field(default_factory=list)
    multiples: list[tuple[Number, int]] = field(default_factory=list)
    lanes: list[tuple[Number, int]] = field(default_factory=list)
    grid: tuple[Number, ...] = ()
    taken: int = 0
    names: int = 0

    # ------------------------------------------------------------------------------------------------------- values

    def number(self, x: Any) -> Number:
        if isinstance(x, Number):
            return x
        if isinstance(x, Bool):
            return x.to(tl.int32)
        x = getattr(x, "value", x)  # a constexpr
        width = 64 if isinstance(x, int) and not -(2**31) <= x < 2**31 else _UNLIMITED
        return Number(self, z3.IntVal(x) if isinstance(x, int) else x, width)

    def condition(self, x: Any) -> Bool:
        if isinstance(x, Bool):
            return x
        return Bool(self, x if isinstance(x, z3.BoolRef) else z3.BoolVal(bool(getattr(x, "value", x))))

    def ranged(self, value: z3.ArithRef, width: int, *safe: z3.BoolRef) -> Number:
        first, end = (-(2 ** (width - 1)), 2 ** (width - 1)) if width > 0 else (0, 2**-width)
        inside = () if width == _UNLIMITED else (value >= first, value < end)
        return Number(self, value, width, z3.And(*safe, *inside))

    def integer(self, name: str, first: Any = None, end: Any = None, width: int = 32) -> Number:
        """A variable, from ``first`` up to but not including ``end``."""
        self.names += 1
        found = Number(self, z3.Int(f"{name}_{self.names}"), width)
        if first is not None:
            self.assume(found >= first)
        if end is not None:
            self.assume(found < end)
        return found

    def assume(self, condition: Bool | bool) -> None:
        self.assumptions.append(self.condition(condition).holds)

    def decide(self, condition: z3.BoolRef) -> bool:
        """The branch that this path takes at a condition: the next of ``branches``, else the first that is possible."""
        known = z3.simplify(condition)
        if z3.is_true(known) or z3.is_false(known):
            return z3.is_true(known)
        if self.taken == len(self.branches):
            self.branches.append(self._possible(condition))
        taken = self.branches[self.taken]
        self.taken += 1
        self.path.append(condition if taken else z3.Not(condition))
        return taken

    def _possible(self, condition: z3.BoolRef) -> bool:
        solver = z3.Solver()
        solver.set("timeout", 1000 * SECONDS)
        solver.add(*self.assumptions, *self.path, condition)
        return solver.check() != z3.unsat

    # -------------------------------------------------------------------------------------------------------- Triton

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Run a Triton function, or a function of Python, with symbolic arguments."""
        return self._bound(function)(*arguments, **options)

    def _bound(self, function: Any) -> Callable:
        function = self.replaced.get(getattr(function, "__name__", ""), function)
        body = getattr(function, "fn", function)
        known = {name: self._known(name, value) for name, value in body.__globals__.items()}
        return types.FunctionType(body.__code__, known, body.__name__, body.__defaults__, body.__closure__)

    def _known(self, name: str, value: Any) -> Any:
        if value is tl:
            return Language(self)
        if isinstance(value, tl.constexpr):
            return value.value
        if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
            return lambda *arguments, **options: self.call(value, *arguments, **options)
        return self.replaced.get(name, value)


class Language:
    """The part of ``triton.language`` that addresses use, for the values of a `Machine`."""

    constexpr, int1, int32, int64, uint32 = tl.constexpr, tl.int1, tl.int32, tl.int64, tl.uint32

    def __init__(self, machine: Machine):
        self.machine = machine

    def program_id(self, axis: int) -> Number:
        return self.machine.grid[axis]

    def arange(self, first: int, end: Any) -> Number:
        lane = self.machine.integer("lane", first, end)
        self.machine.lanes.append((lane, end))
        return lane

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        condition = self.machine.condition(condition)
        a, b = self.machine.number(a), self.machine.number(b)
        safe = z3.And(condition.safe, z3.If(condition.holds, a.safe, b.safe))
        return Number(self.machine, z3.If(condition.holds, a.value, b.value), max(a.width, b.width), safe)

    def zeros(self, shape: Any, dtype: Any) -> Number:
        return Number(self.machine, z3.IntVal(0), _width(dtype))

    def full(self, shape: Any, value: Any, dtype: Any) -> Any:
        return self.machine.condition(value) if dtype == tl.int1 else self.machine.number(value).to(dtype)

    def broadcast_to(self, x: Any, shape: Any) -> Any:
        return x

    def multiple_of(self, x: Number, factors: Any) -> Number:
        if isinstance(factors, int):
            self.machine.multiples.append((x, factors))
        return x

    def max_contiguous(self, x: Number, factors: Any) -> Number:
        if isinstance(factors, int):
            self.machine.hints.append((x, factors))
        return x

    def abs(self, x: Number) -> Number:
        """The magnitude; the least integer of its width keeps its bits."""
        least = x.value == -(2 ** (x.width - 1))
        return Number(self.machine, z3.If(least, x.value, z3.Abs(x.value)), x.width, x.safe)

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    static_range = staticmethod(range)

    def load(self, at: Number, mask: Any = True, other: int = 0, **hints: Any) -> Number:
        mask = self.machine.condition(mask)
        found = z3.If(mask.holds, self.machine.memory(at), self.machine.number(other).value)
        return Number(self.machine, found, 64, z3.And(mask.safe, z3.Implies(mask.holds, at.safe)))

    def store(self, at: Number, value: Any, mask: Any = True) -> None:
        self.machine.stored.append((at, value, self.machine.condition(mask)))

    def min(self, x: Number, axis: int) -> Number:
        """The least over the lanes of the last ``tl.arange``, whose number is known."""
        lane, count = self.machine.lanes[-1]
        values = [z3.substitute(x.value, (lane.value, z3.IntVal(i))) for i in range(count)]
        least = values[0]
        for value in values[1:]:
            least = z3.If(value < least, value, least)
        return Number(self.machine, least, x.width, x.safe)


def every(conditions: Iterable[Bool | z3.BoolRef | bool]) -> z3.BoolRef:
    """All conditions hold."""
    return z3.And(*(c.holds if isinstance(c, Bool) else c for c in conditions))


def both(*conditions: Bool | z3.BoolRef | bool) -> z3.BoolRef:
    """As `every`."""
    return every(conditions)


def implies(given: Any, then: Any) -> z3.BoolRef:
    """The second condition holds where the first does."""
    return z3.Implies(*(c.holds if isinstance(c, Bool) else c for c in (given, then)))


# ------------------------------------------------------------------------------------------------------------- proofs


@dataclass(frozen=True)
class Proof:
    """The outcome of a statement: "proved", "refuted" or "undecided", and the numbers that refute it."""

    statement: str
    outcome: str
    cases: int
    paths: int
    refutation: str = ""


Claim = Callable[[Machine], Any]
"""Makes symbolic values and assumptions on a machine, runs functions of the library, and returns the claim."""


def prove(
    statement: str, claims: Callable[[], list[Claim]] | list[Claim], replaced: dict[str, Any] | None = None
) -> Proof:
    """Prove claims that together are a statement, on every path; the first that fails ends the proof.

    A claim whose assumptions no numbers satisfy counts as undecided, since it would prove nothing.

    Args:
        replaced: functions to run in place of those of the same name.
    """
    paths = 0
    claims = list(claims() if callable(claims) else claims)
    for claim in claims:
        pending: list[list[bool]] = [[]]
        satisfied = False
        while pending:
            machine = Machine(dict(replaced or {}), list(pending.pop()))
            given = len(machine.branches)
            conclusion = machine.condition(claim(machine)).holds
            paths += 1
            for i in range(given, len(machine.branches)):  # the other side of every new branch
                if machine.branches[i]:
                    pending.append(machine.branches[:i] + [False])
            for seed in range(SEEDS):
                solver = z3.Solver()
                solver.set("timeout", 1000 * SECONDS, "random_seed", seed)
                solver.add(*machine.assumptions, *machine.path)
                satisfied = satisfied or solver.check() == z3.sat
                solver.add(z3.Not(conclusion))
                found = solver.check()
                if found != z3.unknown:
                    break
            if found != z3.unsat:
                outcome = "refuted" if found == z3.sat else "undecided"
                return Proof(statement, outcome, len(claims), paths, str(solver.model()) if found == z3.sat else "")
        if not satisfied:
            return Proof(statement, "undecided", len(claims), paths, "no numbers satisfy the assumptions")
    return Proof(statement, "proved", len(claims), paths)
