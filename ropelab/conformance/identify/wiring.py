"""Measure the elements of a token that make each result, and their cosines and sines."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch

from ropelab.conformance.identify.angles import simple
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.plan import Plan, Wires, columns
from ropelab.conformance.identify.questions import GRADIENT, Question
from ropelab.conformance.subject import Subject
from ropelab.layout.pairing import pairs

OWN = "every element of the result depends on its own token and head only"
AHEAD = (0, 1, -1)
WIDTHS = ("heads that rotate as a whole", "a single head")
"""Questions with other numbers of features that rotate, or of heads, that are measured by themselves."""
MOST_ELEMENTS = 256
"""The largest number of elements of a token, in all heads of all inputs, that is measured."""


def wiring(subject: Subject, asked: dict[str, Question], base: str) -> Deviation | None:
    """Return the deviation that makes each element from the elements that a measurement found; None if there is none.

    Args:
        subject: the function.
        asked: the questions of one kind, by name.
        base: the name of the question whose answer is measured; its positions count from 0.
    """
    found: dict[tuple[int, ...], list[Wires]] = {}
    for name in (base, *WIDTHS):
        question = asked.get(name)
        if question is None or _extents(question) in found:
            continue
        measured = _wires(subject, question, found.get(_extents(asked[base]), []))
        if measured is None and name == base:
            return None
        if measured is not None:
            found[_extents(question)] = measured
    question = asked[base]
    rotary_dim = question.case.rotary_dim
    own = question.kind == GRADIENT
    right = definition(subject, question, rotary_dim)
    measured = found[_extents(question)]
    if all(_same(measured[n], right[n]) for n in range(len(right))):
        return None
    width = question.case.inputs[0].shape[-1]
    heads = [x.shape[2] for x in question.case.inputs]

    def change(plan: Plan) -> None:
        if own and not plan.is_gradient:
            return
        every = found.get(_extents(plan.question)) or found.get((plan.rotary_dim, *heads))
        if every is None or plan.shape[3] != width or len(plan.question.case.inputs) != len(heads):
            return
        wires = every[plan.which]
        limits = np.array([x.shape[2] * width for x in plan.question.case.inputs])
        if (limits > np.array(heads) * width).any():
            alike = of_each_head(wires, plan.which, width, plan.shape[2])
            if alike is not None:
                plan.wires, plan.own_gradient = alike, own
            return
        plan.wires = wires.where((wires.to < limits[plan.which]) & (wires.element < limits[wires.tensor]))
        plan.own_gradient = own

    names = ("x",) if len(heads) == 1 else ("q", "k")
    words, parameters = _words(measured, right, names, width)
    for name in WIDTHS:  # the words are about one number of features that rotate
        question = asked.get(name)
        if question is None or _extents(question)[0] == rotary_dim or _extents(question) not in found:
            continue
        others = found[_extents(question)], definition(subject, question, question.case.rotary_dim)
        same = all(map(_same, *others)) or _words(*others, names, width)[0] != words
        words += f", where {rotary_dim} features rotate" if same else ""
    if any(of_each_head(wires, which, width, 1) is None for which, wires in enumerate(measured)):
        counted = " and ".join(f"{n} has {count}" for n, count in zip(names, heads, strict=True))
        words += f", where {counted} heads"
        parameters["heads"] = heads
    return Deviation("wiring", words, OWN, change, parameters, Scope(gradient=own))


def of_each_head(wires: Wires, tensor: int, width: int, heads: int) -> Wires | None:
    """Return the products of a number of heads, if each measured head is made alike from itself; else None."""
    every = [wires.where(wires.to // width == head) for head in range(int(wires.to.max()) // width + 1)]
    own = [replace(one, to=one.to - head * width, element=one.element - head * width) for head, one in enumerate(every)]
    first = own[0]
    inside = (first.element >= 0) & (first.element < width) & (first.tensor == tensor)
    if not inside.all() or not all(_same(one, first) for one in own):
        return None
    begin = np.repeat(np.arange(heads) * width, len(first.to))
    tiled = {f.name: np.tile(getattr(first, f.name), heads) for f in fields(first)}
    return Wires(**(tiled | {"to": tiled["to"] + begin, "element": tiled["element"] + begin}))


def _extents(question: Question) -> tuple[int, ...]:
    """Return the number of features that rotate, and the numbers of heads of the inputs."""
    return question.case.rotary_dim, *(x.shape[2] for x in question.case.inputs)


def definition(subject: Subject, question: Question, rotary_dim: int) -> list[Wires]:
    """Return the products that the definition sums, for each input of a call."""
    every = []
    for tensor, x in enumerate(question.case.inputs):
        heads, width = x.shape[2:]
        source, target = (subject.layout, subject.out_layout)[:: -1 if question.kind == GRADIENT else 1]
        read, written = (pairs(np.arange(rotary_dim), layout) for layout in (source, target))
        column = np.arange(rotary_dim // 2)
        sense = -1.0 if question.kind == GRADIENT else 1.0
        tail = np.arange(rotary_dim, width)
        parts = [(written[i], read[i], 1, column, 1.0) for i in (0, 1)]
        parts += [(written[0], read[1], 2, column, -sense), (written[1], read[0], 2, column, sense)]
        parts += [(tail, tail, 0, np.zeros_like(tail), 1.0)]
        rows = [
            (head * width + to, tensor, head * width + element, table, at, 0, amplitude)
            for head in range(heads) for tos, elements, table, ats, amplitude in parts
            for to, element, at in zip(tos, elements, ats, strict=True)
        ]  # fmt: skip
        every.append(_from_rows(rows))
    return every


def _from_rows(rows: list[tuple]) -> Wires:
    rows = sorted(rows)
    kinds = (int, int, int, int, int, int, float)
    return Wires(*(np.array(column, dtype=kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)))


def _rows(wires: Wires) -> list[tuple]:
    return list(zip(wires.to, wires.tensor, wires.element, wires.table, wires.column, wires.ahead, wires.amplitude,
                    strict=True))  # fmt: skip


def _same(first: Wires, second: Wires) -> bool:
    return _rows(first) == _rows(second)


def _wires(subject: Subject, question: Question, like: list[Wires]) -> list[Wires] | None:
    """Return the measured products for each input; None if an element is no sum of cosines and sines of its token.

    Args:
        like: products that were measured in another call. They win a tie between cosines that are almost equal.
    """
    inputs = question.case.inputs
    width, count = inputs[0].shape[-1], sum(x.shape[2] * x.shape[3] for x in inputs)
    if count > MOST_ELEMENTS:
        return None
    right = {(n, *row[:3]): row[3:6] for known in (definition(subject, question, question.case.rotary_dim), like)
             for n, wires in enumerate(known) for row in _rows(wires)}  # fmt: skip
    library = _Library(subject, question)
    found: list[list[tuple]] = [[] for _ in inputs]
    for tensor, x in enumerate(inputs):
        for element in range(x.shape[2] * width):
            answer = _answer(subject, question, tensor, element)
            if answer is None:
                return None
            for which, y in enumerate(answer):
                flat = np.asarray(y, dtype=np.float64).reshape(*y.shape[:2], -1)
                if not np.isfinite(flat).all() or (flat != flat[:1]).any():
                    return None
                for to in np.flatnonzero(flat[0].any(axis=0)):
                    term = library.term(flat[0, :, to], right.get((which, to, tensor, element)))
                    if term is None:
                        return None
                    found[which].append((int(to), tensor, element, *term))
    return [_from_rows(rows) for rows in found] if all(found) else None


def _answer(subject: Subject, question: Question, tensor: int, element: int) -> tuple[np.ndarray, ...] | None:
    """Return the answer where one element of each token is 1 and all others are 0."""
    case = question.case
    one = [torch.zeros_like(x) for x in case.inputs]
    width = one[tensor].shape[-1]
    one[tensor][:, :, element // width, element % width] = 1
    return question.answer_to(subject, subject.with_inputs(case, one).inputs)


class _Library:
    """The cosines and sines of all pairs at the tokens of the first sequence of a question, and the number 1."""

    def __init__(self, subject: Subject, question: Question):
        positions = question.case.token_positions()[0].numpy().astype(np.float64)
        frequency = columns(question.case.rotary_dim, question.case.rotary_dim, subject.base).numpy()
        sense = -1.0 if subject.reversed else 1.0
        self.keys, series, near = [(0, 0, 0)], [np.ones_like(positions)], [np.zeros_like(positions)]
        for ahead in AHEAD:
            for column, rate in enumerate(frequency):
                angles = (positions + ahead) * rate
                self.keys += [(1, column, ahead), (2, column, ahead)]
                series += [np.cos(angles), sense * np.sin(angles)]
                near += 2 * [np.broadcast_to(subject.convention.angle_error(angles, np.array(rate)), angles.shape)]
        arithmetic = subject.arithmetic(question.case.inputs[0].dtype)
        unit = arithmetic.table.unit + 2 * arithmetic.compute.unit + arithmetic.store.unit
        self._series = np.stack(series)
        self._near = 2 * unit + np.stack(near).astype(np.float64)

    def term(self, values: np.ndarray, expected: tuple | None) -> tuple | None:
        """Return (table, column, ahead, amplitude) of the series that the values are a multiple of, or None.

        Args:
            values: an element of the answers, token by token.
            expected: (table, column, ahead) of the definition, which wins a tie.
        """
        amplitudes = [simple(float(a)) for a in self._series @ values / (self._series**2).sum(axis=1).clip(1e-30)]
        sized = np.array(amplitudes)[:, None]
        off = (abs(values - sized * self._series) / (abs(sized).clip(1) * self._near)).max(axis=1)
        if expected is not None and off[self.keys.index(expected)] <= 1:
            best = self.keys.index(expected)
        else:
            best = int(off.argmin())
        return (*self.keys[best], amplitudes[best]) if off[best] <= 1 else None


def _words(found: list[Wires], right: list[Wires], names: tuple[str, ...], width: int) -> tuple[str, dict]:
    """Return in words which elements are made of others than in the definition, and the first of them in numbers."""
    if columns := _columns_moved(found, right):
        return columns, {}
    said, listed = [], []
    for name, wires, ours in zip(names, found, right, strict=True):
        made, meant = _by_result(wires), _by_result(ours)
        changed = [to for to in sorted(made.keys() | meant.keys()) if made.get(to) != meant.get(to)]
        if not changed:
            continue
        alike: dict[str, list[int]] = {}  # what changed elements are made of, in words -> these elements
        for head in sorted({to // width for to in changed}):
            own = [to for to in changed if to // width == head]
            alike.setdefault(_made_of(own, made, name, names, width), []).extend(own)
        for reads, elements in alike.items():
            features = sorted({to % width for to in elements})
            hit = sorted({to // width for to in elements})
            every = len(hit) == max(ours.to) // width + 1
            where = "each head" if every else f"head{'s' * (len(hit) > 1)} {', '.join(map(str, hit))}"
            said.append(f"features {_ranges(features)} of {where} of {name} {reads}")
        listed += [f"{name}[{to // width}, {to % width}] = {_sum(made.get(to, ()), names, width)}" for to in changed]
    return f"makes other sums: {'; '.join(said)} (such as {listed[0]})", {"sums": listed}


def _made_of(elements: list[int], made: dict[int, list[tuple]], name: str, names: tuple[str, ...], width: int) -> str:
    """Return in words what elements of one head are made of, where that is not what the definition says."""
    if not any(made.get(to) for to in elements):
        return f"read neither {' nor '.join(names)}" if len(names) > 1 else f"do not read {name}"
    if foreign := sorted({names[t] for to in elements for t, *_ in made.get(to, ())} - {name}):
        return f"read {' and '.join(foreign)}"
    heads = any(e // width != to // width for to in elements for _, e, *_ in made.get(to, ()))
    return "read other heads" if heads else "are other sums of the head's features"


def _columns_moved(found: list[Wires], right: list[Wires]) -> str:
    """Return in words that all cosines, or all sines, are some columns from their own; empty if they are not."""
    count = 1 + max(int(wires.column.max()) for wires in right)
    for where, row, start in (("of the table", count, 0), ("of rows of cosines and then sines", 2 * count, count)):
        moved: dict[int, set[int]] = {}
        for wires, ours in zip(found, right, strict=True):
            if len(wires.to) != len(ours.to):
                return ""
            made, meant = ({row[:3] + row[6:]: row[3:6] for row in _rows(w)} for w in (wires, ours))
            if made.keys() != meant.keys():
                return ""
            for key, (table, column, _) in meant.items():
                if table:
                    at, further, ahead = made[key]
                    apart = ahead * row + (at - table) * start + further - column
                    possible = at == table or (at and start)
                    moved.setdefault(int(table), set()).update((int(apart),) if possible else (0, 1))
        by = {table: steps.pop() for table, steps in moved.items() if len(steps) == 1}
        if by.keys() == moved.keys():
            told = [
                f"takes {'cosines sines'.split()[table - 1]} {abs(step)} column{'s' * (abs(step) > 1)} "
                f"{'further' if step > 0 else 'before'}, in memory {where}" for table, step in by.items() if step
            ]  # fmt: skip
            return " and ".join(told)
    return ""


def _by_result(wires: Wires) -> dict[int, list[tuple]]:
    every: dict[int, list[tuple]] = {}
    for to, *row in _rows(wires):
        every.setdefault(int(to), []).append(tuple(row))
    return every


def _sum(products, names: tuple[str, ...], width: int) -> str:
    told = []
    for tensor, element, table, column, ahead, amplitude in products:
        row = f" of row p{ahead:+d}" if ahead else ""
        factor = "" if abs(amplitude) == 1 else f"{abs(amplitude):g} "
        turned = "" if table == 0 else f" {'cs'[table - 1]}{column}{row}"
        sign = "-" if amplitude < 0 else "+"
        told.append(f"{sign} {factor}{names[tensor]}[{element // width}, {element % width}]{turned}")
    return " ".join(told).removeprefix("+ ") or "0"


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers with runs as ``first-last``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
