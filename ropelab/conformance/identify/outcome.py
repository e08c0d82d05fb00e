"""Compute the answer that a plan gives to a question, and how far rounding may take a function from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch

from ropelab.conformance.bounds import (
    EXACT,
    FLOAT32_UNIT,
    REFERENCE,
    Rounding,
    exact,
    table_angle_error,
)
from ropelab.conformance.identify.plan import OF_AUTOGRAD, REDUCED, TURNS, Plan, Wires, rounded
from ropelab.conformance.identify.questions import ARGUMENTS, COTANGENTS, FORWARD, INPUTS
from ropelab.layout.pairing import pairs
from ropelab.layout.seq_format import from_bshd, to_bshd

OF_TABLES = ("row", "sine_row", "frequency", "sine_frequency", "multiple", "factor", "inexact")
"""The parts of a plan from which tables follow, if nothing is rounded to fewer bits."""

Told = tuple[np.ndarray, np.ndarray]
"""An answer and its bound, ``[B, S, H, D]``."""


def outcome(made: Callable[[int], Plan], which: int) -> Told | str:
    """Return the answer for an input and its bound, or the name of the exception that the function raises.

    Args:
        made: returns the plan of an input of the call, by its number.
        which: the number of the input.
    """
    with np.errstate(all="ignore"):  # a description may overflow a format of 16 bits
        return _answer(made, which)


def _answer(made: Callable[[int], Plan], which: int) -> Told | str:
    plan = made(which)
    case = plan.question.case
    if plan.raises:
        return plan.raises
    if plan.question.kind in (ARGUMENTS, COTANGENTS):
        changed = plan.changed_arguments if plan.question.kind == ARGUMENTS else plan.changed_cotangents
        return np.full((1, 1, 1, 1), float(changed)), np.zeros(1)
    if plan.overwritten and plan.question.after is not None:
        return plan.subject.expected(plan.question.after)[which]
    if plan.question.kind == INPUTS and plan.changed_inputs == plan.subject.in_place:
        return exact(case.inputs[which]), np.zeros(1)
    given = [exact(x) for x in (case.cotangents if plan.is_gradient else case.inputs)]
    if plan.flat == plan.question.kind:
        given = [
            _in_memory(x, plan.subject.format(case)) for x in (case.cotangents if plan.is_gradient else case.inputs)
        ]
    y, bound = _from(made, plan, given)
    if plan.flat == plan.question.kind == FORWARD:  # nothing determines the numbers in the gaps of memory
        return np.nan_to_num(y), np.where(np.isnan(y), np.inf, bound)
    return y, bound


def _from(made: Callable[[int], Plan], plan: Plan, given: list[np.ndarray]) -> Told:
    which = plan.which
    if not plan.is_gradient:
        return _forward(plan, given)
    if plan.wires is not None and plan.own_gradient:
        return _wired(plan, plan.wires, given, plan.shape)
    plans = [plan if other == which else made(other) for other in range(len(given))]
    if all((p.wires is None or p.own_gradient) and p.source is None for p in plans):
        return _turned(plan, _brought_back(plan, given[which]))
    return _gathered(plans, given, which)


def _in_memory(x: torch.Tensor, seq_format: str) -> np.ndarray:
    """Return the numbers that memory has one after another from the first of ``x [B, S, H, D]`` on, in its shape."""
    seen = from_bshd(x, seq_format)
    if 0 in seen.stride():
        return np.full(x.shape, np.nan, dtype=EXACT)  # less memory than numbers
    flat = seen.as_strided(seen.shape, torch.empty(seen.shape, device="meta").stride())
    return exact(to_bshd(flat, seq_format))


def _forward(plan: Plan, given: list[np.ndarray]) -> Told:
    if plan.wires is not None:
        return _wired(plan, plan.wires, given, plan.shape)
    x = given[plan.which]
    if plan.source is not None:
        elements = np.concatenate([x.reshape(-1) for x in given])
        x = np.where(plan.source < 0, 0, elements[plan.source])
    y, bound = _turned(plan, x)
    return (y, bound) if plan.moved is None else (y.reshape(-1)[plan.moved], bound.reshape(-1)[plan.moved])


def _brought_back(plan: Plan, grad: np.ndarray) -> np.ndarray:
    """Return a cotangent before the results moved."""
    if plan.moved is None:
        return grad
    before = np.zeros(grad.size, dtype=EXACT)
    np.add.at(before, plan.moved.reshape(-1), grad.reshape(-1))
    return before.reshape(grad.shape)


def _gathered(plans: list[Plan], given: list[np.ndarray], which: int) -> Told:
    """Return the gradient of an input as the sum over all results that read the input."""
    sizes = [grad.size for grad in given]
    total, bound = (np.zeros(sum(sizes), dtype=EXACT) for _ in range(2))
    ends = np.cumsum(sizes)
    for plan, grad, end in zip(plans, given, ends, strict=True):
        if plan.own_gradient:  # it makes the gradient of its own input only
            continue
        if plan.wires is not None:
            y, near, source = _wired_back(plan, plan.wires, grad, plans)
        else:
            y, near = _turned(plan, _brought_back(plan, grad))
            source = np.arange(end - grad.size, end).reshape(grad.shape) if plan.source is None else plan.source
        reads = (source >= 0) & (source < total.size)
        np.add.at(total, source[reads], y[reads])
        np.add.at(bound, source[reads], near[reads])
    own = slice(ends[which] - sizes[which], ends[which])
    return total[own].reshape(given[which].shape), bound[own].reshape(given[which].shape)


def _products(plan: Plan, wires: Wires) -> tuple[np.ndarray, np.ndarray]:
    """Return the factor of each product of the wires and the error of its table, ``[B, S, N]``."""
    batch, tokens, heads, width = plan.shape
    factors = np.ones((batch, tokens, len(wires.to)), dtype=EXACT)
    errors = np.zeros_like(factors)
    head = wires.to // width
    for ahead in np.unique(wires.ahead):
        c, s, error = (np.broadcast_to(t, (batch, tokens, heads, t.shape[-1])) for t in tables(plan, int(ahead)))
        for kind, table in ((1, c), (2, s)):
            hit = (wires.table == kind) & (wires.ahead == ahead)
            factors[..., hit] = table[:, :, head[hit], wires.column[hit]]
            errors[..., hit] = error[:, :, head[hit], wires.column[hit]]
    return wires.amplitude * factors, abs(wires.amplitude) * errors


def _wired(plan: Plan, wires: Wires, given: list[np.ndarray], shape: tuple[int, ...]) -> Told:
    factors, errors = _products(plan, wires)
    read = np.empty_like(factors)
    for tensor, x in enumerate(given):
        hit = wires.tensor == tensor
        batch, tokens, heads, features = x.shape
        number = np.arange(batch * tokens).reshape(batch, tokens, 1) * heads * features + wires.element[hit]
        inside = (number >= 0) & (number < x.size)  # an element beyond its token is in memory before or after it
        read[..., hit] = np.where(inside, x.reshape(-1)[np.where(inside, number, 0)], 0)
    y, bound = _summed(plan, wires.to, factors * read, errors * abs(read), shape)
    y[plan.nowhere], bound[plan.nowhere] = plan.padding, 0
    return y, bound


def _wired_back(plan: Plan, wires: Wires, grad: np.ndarray, plans: list[Plan]) -> tuple[np.ndarray, ...]:
    """Return the gradient's products, their bounds, and the number of the element to which each belongs."""
    factors, errors = _products(plan, wires)
    factors[plan.nowhere] = errors[plan.nowhere] = 0
    flow = grad.reshape(*grad.shape[:2], -1)[..., wires.to]
    y = factors * flow
    arithmetic = plan.subject.arithmetic(plan.question.case.inputs[0].dtype)
    terms = 1 + np.bincount(wires.to, minlength=wires.to.max(initial=0) + 1)[wires.to]
    near = _rounding(arithmetic, terms, abs(y), errors * abs(flow), abs(flow), abs(y))
    first = np.cumsum([0, *(int(np.prod(p.shape)) for p in plans)])
    widths = np.array([p.shape[2] * p.shape[3] for p in plans])
    batch, tokens = plan.shape[:2]
    token = np.arange(batch * tokens).reshape(batch, tokens, 1)
    return y, near, first[wires.tensor] + token * widths[wires.tensor] + wires.element


def _summed(plan: Plan, to: np.ndarray, products: np.ndarray, errors: np.ndarray, shape: tuple[int, ...]) -> Told:
    batch, tokens, heads, width = shape
    sums = []
    for values in (products, abs(products), errors, np.ones_like(products)):
        total = np.zeros((batch, tokens, heads * width), dtype=EXACT)
        np.add.at(total.T, to, values.T)
        sums.append(total.reshape(shape))
    y, size, error, terms = sums
    arithmetic = plan.subject.arithmetic(plan.question.case.inputs[0].dtype)
    return y, _rounding(arithmetic, terms, size, error, terms, abs(y))


def _rounding(arithmetic, terms, size, error, weight, y) -> np.ndarray:
    """Return the bound of a sum of products; see `rotation_bound`, in which ``terms`` is 2.

    Args:
        terms: the number of products.
        size: the sum of their absolute values.
        error: the sum of the errors of their tables, times the elements.
        weight: the sum of the absolute elements, or more.
        y: the absolute value of the sum.
    """
    u, e = arithmetic.compute.unit, arithmetic.compute.underflow
    relative = (1 + EXACT(arithmetic.table.unit)) * (1 + EXACT(u)) ** terms - 1 + terms * REFERENCE.unit
    bound = relative * size + (1 + u) ** terms * (error + arithmetic.table.underflow * weight) + terms * (1 + u) * e
    return bound + arithmetic.store.of(y + bound)


def _turned(plan: Plan, x: np.ndarray) -> Told:
    if not plan.is_gradient:
        for axis, order in plan.order.items():
            x = np.take(x, order, axis=axis)
    x = rounded(plan, "input", x)
    c, s, error = tables(plan)
    c0, c1, s0, s1 = c * plan.cos0, c * plan.cos1, s * plan.sin0, s * plan.sin1
    source, target = plan.layout, plan.out_layout
    if plan.is_gradient:  # the transposed matrix
        s0, s1, source, target = -s1, -s0, target, source
    y, bound = rounded(plan, "tail", x) * plan.tail + plan.tail_added, np.zeros_like(x)
    rotates = slice(0, plan.rotary_dim)
    turn = _in_blocks if plan.blocks > 1 and source != target else _at_once
    y[..., rotates], bound[..., rotates] = turn(plan, x[..., rotates], (c0, c1, s0, s1), error, source, target)
    y[plan.nowhere], bound[plan.nowhere] = plan.padding, 0
    if np.isnan(plan.tail):  # nothing writes there
        y[..., plan.rotary_dim :] = np.nan
    if plan.is_gradient:  # the transposed map permutes last
        for axis, order in plan.order.items():
            y, bound = (np.take(values, np.argsort(order), axis=axis) for values in (y, bound))
    return y, bound


def _at_once(plan: Plan, x: np.ndarray, factors, error, source: str, target: str) -> Told:
    """Rotate all pairs of ``x [B, S, H, R]``."""
    c0, c1, s0, s1 = factors
    x0, x1 = pairs(x, source)
    bounds = _bounds(plan, x0, x1, factors, error)
    if plan.in_turn == OF_AUTOGRAD and plan.is_gradient:  # the result y0 also reaches y1
        first, (near, _) = x0 - x1 * s0, _bounds(plan, x0, x1, (np.ones_like(c0), c1, s0, s1), error)
        (x0, s0), bounds = (first, 0 * s0), _bounds(plan, first, x1, factors, error)
        bounds = abs(c0) * near + bounds[0], abs(s1) * near + bounds[1]
    members: list[Told] = []
    for (own, c_own), (other, s_own), near in zip(((x0, c0), (x1, c1)), ((x1, -s0), (x0, s1)), bounds, strict=True):
        if plan.in_turn and members and not (plan.in_turn == OF_AUTOGRAD and plan.is_gradient):
            other, before = members[0]
            near = near + abs(s_own) * before
        first, second = own * c_own, other * s_own
        if "product" in plan.rounded:
            near = near + _spread(plan, "product", first, near) + _spread(plan, "product", second, near)
        turned = rounded(plan, "product", first) + rounded(plan, "product", second)
        near = _spread(plan, "output", turned, near) if "output" in plan.rounded else near
        members.append((rounded(plan, "output", turned), near))
    y, bound = np.empty_like(x), np.empty_like(x)
    for features, room, member in zip(pairs(y, target), pairs(bound, target), members, strict=True):
        features[...], room[...] = member
    return y, bound


def _in_blocks(plan: Plan, x: np.ndarray, factors, error, source: str, target: str) -> Told:
    """Rotate blocks of pairs of ``x [B, S, H, R]`` in memory; later blocks read what earlier blocks have written."""
    y, bound = x.copy(), np.zeros_like(x)
    count = plan.rotary_dim // 2
    size = 1 << (-(-count // plan.blocks) - 1).bit_length()
    wide = [np.broadcast_to(f, (*x.shape[:3], count)) for f in (*factors, error)]
    for begin in range(0, count, size):
        block = slice(begin, min(begin + size, count))
        c0, c1, s0, s1, off = (f[..., block] for f in wide)
        (x0, x1), (b0, b1) = (
            tuple(member[..., block].copy() for member in pairs(values, source)) for values in (y, bound)
        )
        near = _bounds(plan, x0, x1, (c0, c1, s0, s1), off)
        near = near[0] + abs(c0) * b0 + abs(s0) * b1, near[1] + abs(c1) * b1 + abs(s1) * b0
        for values, members in ((y, (x0 * c0 - x1 * s0, x1 * c1 + x0 * s1)), (bound, near)):
            for features, new in zip(pairs(values, target), members, strict=True):
                features[..., block] = new
    return y, bound


def tables(plan: Plan, ahead: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return cosines and sines, and the error of each before a table of the function's own dtype rounds it.

    Args:
        ahead: how many rows ahead of the plan's rows to read.

    The question keeps the tables of the definition, because most deviations do not change them.
    """
    base = plan.question.plans.get((plan.which, None))
    known = base is not None and not plan.rounded and all(getattr(plan, p) is getattr(base, p) for p in OF_TABLES)
    if known and (plan.which, ahead) in plan.question.tables:
        found, error = plan.question.tables[plan.which, ahead]
    else:
        found, error = _computed_tables(plan, ahead)
        if known:
            plan.question.tables[plan.which, ahead] = found, error
    return *(found[::-1] if plan.swapped else found), error


def _computed_tables(plan: Plan, ahead: int) -> tuple[list[np.ndarray], np.ndarray]:
    found, errors = [], []
    for function, row, frequency in (
        (np.cos, plan.row, plan.frequency), (np.sin, plan.sine_row, plan.sine_frequency)
    ):  # fmt: skip
        rows = rounded(plan, "position", row + ahead)
        with np.errstate(all="ignore"):
            inexact = np.nan_to_num(plan.subject.convention.angle_error(abs(frequency), abs(frequency)))
            rates = rounded(plan, "frequency", frequency + plan.side.get("frequency", 0) * inexact)
            angles = plan.multiple * (rows * rates)
            error = plan.inexact + table_angle_error(angles)
            error = error + np.nan_to_num(plan.subject.convention.angle_error(angles, abs(rates)))
            if "angle" in plan.rounded:
                angles, error = _rounded_angles(plan, angles, error)
            values = plan.factor * function(angles)
            error = abs(plan.factor) * error
            if "table" in plan.rounded:
                error = _spread(plan, "table", values, error)
        found.append(rounded(plan, "table", values))
        errors.append(error)
    return found, np.maximum(*errors)


def _rounded_angles(plan: Plan, angles: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return angles in fewer bits, and how far the function's rounded angles may be from these.

    A rounding to fewer bits gives the same number for almost all angles within the error; see ``Plan.side`` for the
    others. A remainder keeps the error of its angle. In float32 it adds the rounding of the angle, of the multiple of a
    turn and of the difference, in the function and in the plan.
    """
    found = rounded(plan, "angle", angles + plan.side.get("angle", 0) * error)
    if plan.rounded["angle"] == TURNS:
        return found, error + 2 * np.pi * FLOAT32_UNIT  # the fraction of a turn becomes an angle in float32
    if plan.rounded["angle"] != REDUCED:
        return found, np.zeros_like(error)
    return found, error + 2 * FLOAT32_UNIT * (2 * abs(angles) + np.pi)


def sides(plan: Plan) -> Iterator[dict[str, int]]:
    """Yield the sides of the boundaries of roundings that a function may be on; see ``Plan.side``."""
    what = [part for part in ("frequency", "angle") if part in plan.rounded]
    for signs in product((0, -1, 1), repeat=len(what)):
        yield dict(zip(what, signs, strict=True))


def _bounds(plan: Plan, x0, x1, factors, error) -> tuple[np.ndarray, np.ndarray]:
    c0, c1, s0, s1 = map(abs, factors)
    if plan.several:  # a rounding of either member reaches both, whatever the last angle is
        c0 = c1 = s0 = s1 = np.maximum(np.maximum(c0, s0), np.hypot(c1, s1))
    size = np.maximum(np.maximum(abs(plan.cos0), abs(plan.sin0)), np.maximum(abs(plan.cos1), abs(plan.sin1)))
    dtype = plan.question.case.inputs[0].dtype
    arithmetic = plan.subject.arithmetic(dtype)
    weight = abs(x0) + abs(x1)
    off = size * error * weight
    most0, most1 = abs(x0) * c0 + abs(x1) * s0, abs(x1) * c1 + abs(x0) * s1
    first, second = (_rounding(arithmetic, 2, most, off, weight, most) for most in (most0, most1))
    if not plan.extra:
        return first, second
    # An additional operation rounds a number of at most the size of the two products to the dtype of the inputs.
    wide = dtype in (torch.float32, torch.float64)
    again = Rounding.nearest(dtype) if wide else Rounding.truncating(dtype)
    for _ in range(plan.extra):
        first = first + again.of(most0 + first)
        second = second + again.of(most1 + second)
    return first, second


def _spread(plan: Plan, what: str, values: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Return how far apart the roundings of two numbers can be, if one number is off by at most ``error``.

    A rounding is monotone, so the roundings of ``values - error`` and of ``values + error`` enclose all others.
    """
    middle = rounded(plan, what, values)
    low, high = rounded(plan, what, values - error), rounded(plan, what, values + error)
    return np.maximum(abs(high - middle), abs(middle - low))
