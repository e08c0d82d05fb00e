"""The deviations without a parameter to measure: wrong rows, orders, signs, roundings, lost parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT
from ropelab.conformance.convention import Convention
from ropelab.conformance.identify.deviation import Deviation
from ropelab.conformance.identify.plan import (
    FORMATS,
    INTEGER,
    OF_AUTOGRAD,
    OF_INPUT,
    REDUCED,
    TURNS,
    Plan,
    Wires,
    last_row,
)
from ropelab.conformance.identify.questions import FORWARD, GRADIENT
from ropelab.layout.pairing import LAYOUTS, pairs
from ropelab.positions.axes import mrope_axes

ROW = "token t of sequence b reads the row of its own position p"
ANGLE = "the angle is the position times the inverse frequency"
FREQUENCY = "the inverse frequency of pair i is base ** (-2 i / rotary_dim)"
PAIR = "y0 = x0 c0 - x1 s0, y1 = x1 c1 + x0 s1"
TAIL = "features beyond rotary_dim pass unchanged"
OWN = "every element of the result depends on its own token and head only"
SELF = "q is made from q, and k from k"
PURE = "a call changes nothing but its result"
NOWHERE = "a token without a position is zero"
BITS = "no intermediate has fewer bits than declared"
MORE = 4
"""The number of additional roundings of a function whose results are called inexact, and no more."""

Change = Callable[[Plan], object]


def set_row(plan: Plan, row: np.ndarray) -> None:
    """Let cosines and sines come from other rows, or from the angles of other positions."""
    plan.row = plan.sine_row = np.asarray(row).astype(EXACT) / plan.question.case.interpolation


def _last(plan: Plan) -> int:
    """Return the largest position of the call."""
    return int(abs(plan.position).max()) if plan.position.size else 0


def _row_of_head(plan: Plan) -> np.ndarray:
    """Return the position of the token whose number in the call is the number of the head."""
    positions = plan.position[..., 0, 0]
    rows = positions.flatten() if (positions != positions[0]).any() else positions[0]
    return rows[np.minimum(plan.head, len(rows) - 1)]


def _row_of_head_in_memory(plan: Plan) -> np.ndarray:
    """Return the position in the row of flat tables, as memory orders them, whose number is the number of the head."""
    positions = plan.position[..., 0, 0]
    if not (positions != positions[0]).any():
        positions = positions[:1]
    order = plan.subject.seq_format
    flat = (positions.T if order.find("s") < order.find("b") else positions).flatten()
    return flat[np.minimum(plan.head, len(flat) - 1)]


def _on_from_a_sequence_before(plan: Plan, block: int) -> np.ndarray:
    """Return positions that go on from the first sequence whose last block of tokens reaches the token.

    A block ends where the tables end.
    """
    batch, tokens = plan.shape[:2]
    found = np.broadcast_to(plan.position, (batch, tokens, 1, plan.position.shape[-1])).copy()
    for before in range(batch - 1, -1, -1):
        number = (plan.batch - before) * tokens + plan.token
        counted = plan.position[before, 0] + number
        reached = (plan.batch >= before) & (counted <= last_row(plan)) & (number < -(-tokens // block) * block)
        found = np.where(reached, counted, found)
    return found


def _with_offsets(plan: Plan, offsets: Callable[[tuple[int, ...]], tuple[int, ...]]) -> np.ndarray:
    """Return the positions of packed documents with other offsets."""
    case = plan.question.case
    if case.lengths is None or case.shard is not None:
        return plan.position
    given = case.offsets if isinstance(case.offsets, tuple) else (case.offsets,) * len(case.lengths)
    apart = np.repeat(np.array(offsets(given)) - np.array(given), case.lengths)
    apart = np.concatenate((apart, np.zeros(plan.shape[1] - len(apart), dtype=int)))
    return plan.position + apart[None, :, None, None]


def _offset_from(plan: Plan, order: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the positions with the offsets of sequences, or of packed documents, in another order."""
    case = plan.question.case
    if case.lengths is not None:
        return _with_offsets(plan, lambda given: tuple(order(np.array(given)).tolist()))
    return order(plan.position) if isinstance(case.offsets, tuple) else plan.position


def _documents_at(plan: Plan, moved: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the positions of packed documents whose ends are moved; the tokens beyond the last are left as they are.

    Args:
        moved: maps the numbers of the first tokens and of the end ``[documents + 1]`` to those that the function takes.
    """
    case = plan.question.case
    if case.lengths is None or case.shard is not None:
        return plan.position
    ends = np.concatenate(([0], np.cumsum(case.lengths)))
    given = case.offsets if isinstance(case.offsets, tuple) else (case.offsets,) * len(case.lengths)
    taken = np.clip(moved(ends.copy()), 0, ends[-1])
    found = plan.position.copy()
    for first, end, offset in zip(taken[:-1], taken[1:], given, strict=True):
        found[0, first:end, 0, 0] = np.arange(end - first) + offset
    return found


def _inner(step: int, from_end: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that moves the first tokens of all documents but the first by a number of tokens."""

    def moved(ends: np.ndarray) -> np.ndarray:
        ends[1 : len(ends) - from_end] += step
        return np.maximum.accumulate(np.minimum(ends, ends[-1]))

    return moved


def _second_chunk(plan: Plan, step: int) -> np.ndarray:
    """Return the positions of a rank whose second chunk, in each sequence or document, belongs to another rank."""
    case = plan.question.case
    size, rank = case.shard or (1, 0)
    if size == 1:
        return plan.position
    found, begin = plan.position.copy(), 0
    # The last row of the tables; a rank without a neighbour stays in them.
    last = size * case.shape[1] - 1 if case.lengths is None else max(case.lengths) + 2
    for length in case.lengths or (size * case.shape[1],):
        half = length // size // 2
        second = (2 * size - 1 - rank + step) * half + np.arange(half)
        found[:, begin + half : begin + 2 * half, 0, 0] = np.minimum(second, last)
        begin += 2 * half
    return found


def _end_of_document_before(plan: Plan) -> np.ndarray:
    """Return positions of packed documents that count one token too far, up to the first token of the next one."""
    case = plan.question.case
    if case.lengths is None:
        return plan.position
    size, _ = case.shard or (1, 0)
    found, begins = plan.position.copy(), np.cumsum([0, *filter(None, case.lengths)])[1:-1] // size
    found[0, begins] = plan.position[0, begins - 1] + 1
    return found


def _along(plan: Plan, order: Callable[[tuple[int, ...], Plan], tuple[int, ...]]) -> np.ndarray:
    """Return the positions that pairs read along other axes."""
    case = plan.question.case
    if case.axes is None or case.positions is None:
        return plan.position
    return case.positions.cpu().long()[list(order(case.axes, plan))].movedim(0, -1).numpy()[:, :, None]


def _exchanged(one: int, other: int) -> Callable[[tuple[int, ...], Plan], tuple[int, ...]]:
    order = {one: other, other: one}
    return lambda axes, plan: tuple(order.get(axis, axis) for axis in axes)


def _replaced(one: int, other: int) -> Callable[[tuple[int, ...], Plan], tuple[int, ...]]:
    return lambda axes, plan: tuple(other if axis == one else axis for axis in axes)


def _sections(
    changed: Callable[[int, int, int], tuple[int, int, int]],
) -> Callable[[tuple[int, ...], Plan], tuple[int, ...]]:
    """Return the axes of other sections; the last of three adjacent sections reaches to the last pair."""

    def axes_of(axes: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
        case = plan.question.case
        assert case.mrope_section is not None
        if len(case.mrope_section) != 3:
            return axes
        section, pair = changed(*case.mrope_section), np.arange(len(axes))
        if case.mrope_interleaved:
            return tuple(int(i % 3) if i % 3 and i < 3 * section[i % 3] else 0 for i in pair)
        return tuple(np.searchsorted(np.cumsum(section[:2]), pair, side="right").tolist())

    return axes_of


def _turns_to_the_end(axes: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    count = len(plan.question.case.mrope_section or ())
    return tuple(i % count for i in range(len(axes))) if plan.question.case.mrope_interleaved else axes


def _other_arrangement(axes: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Return the axes with adjacent pairs of an axis in place of axes that take turns, or the other way round."""
    case = plan.question.case
    assert case.mrope_section is not None
    return mrope_axes(case.mrope_section, mrope_interleaved=not case.mrope_interleaved)


def _crossed(adjacent: bool) -> Change:
    """Return the change for pairs of one layout with tables that have a column for each feature in the other layout."""

    def change(plan: Plan) -> None:
        half = plan.rotary_dim // 2
        feature, tail = np.arange(2 * half), np.arange(2 * half, plan.shape[3])
        partner = feature ^ 1 if adjacent else (feature + half) % (2 * half)
        column = feature % half if adjacent else feature // 2
        sign = np.where(feature < partner, -1.0, 1.0)
        parts = (
            (feature, feature, np.ones_like(feature), column, np.ones(2 * half)),
            (feature, partner, np.full_like(feature, 2), column, sign),
            (tail, tail, np.zeros_like(tail), np.zeros_like(tail), np.ones(len(tail))),
        )
        plan.wires = _of_every_head(plan, parts)

    return change


def _half_a_head_apart(plan: Plan) -> None:
    """Pair feature i of the first half of the head with feature ``i + D/2`` for the i that have a frequency."""
    heads, width = plan.shape[2:]
    count = plan.rotary_dim // 2
    first = np.arange(count)
    second, others = first + width // 2, np.setdiff1d(np.arange(width), np.r_[first, first + width // 2])
    ones, none = np.ones(count), np.zeros(len(others), dtype=int)
    parts = (
        (first, first, np.full(count, 1), first, ones),
        (first, second, np.full(count, 2), first, -ones),
        (second, second, np.full(count, 1), first, ones),
        (second, first, np.full(count, 2), first, ones),
        (others, others, none, none, np.ones(len(others))),
    )
    plan.wires = _of_every_head(plan, parts)


def _last_features(plan: Plan) -> None:
    """Rotate the last features of a head, and pass the first."""
    count, width = plan.rotary_dim // 2, plan.shape[3]
    turned = torch.arange(width - 2 * count, width)
    first, second = (member.numpy() for member in pairs(turned, plan.layout))
    column, ones = np.arange(count), np.ones(count)
    sense = -ones if plan.is_gradient else ones
    head, none = np.arange(width - 2 * count), np.zeros(width - 2 * count, dtype=int)
    parts = (
        (first, first, np.full(count, 1), column, ones),
        (first, second, np.full(count, 2), column, -sense),
        (second, second, np.full(count, 1), column, ones),
        (second, first, np.full(count, 2), column, sense),
        (head, head, none, none, np.ones(len(head))),
    )
    plan.wires, plan.own_gradient = _of_every_head(plan, parts), True


def _of_every_head(plan: Plan, parts) -> Wires:
    """Return the wires of all heads from ``(to, element, table, column, amplitude)`` of the features of one."""
    heads, width = plan.shape[2:]
    to, element, table, columns, amplitude = (np.concatenate(values) for values in zip(*parts, strict=True))
    begin = np.repeat(np.arange(heads) * width, len(to))
    return Wires(begin + np.tile(to, heads), np.full(len(begin), plan.which), begin + np.tile(element, heads),
                 np.tile(table, heads), np.tile(columns, heads), np.zeros_like(begin),
                 np.tile(amplitude, heads))  # fmt: skip


def _laid_out(layout: str) -> Change:
    def change(plan: Plan) -> None:
        plan.layout = plan.out_layout = layout

    return change


def _of_head_strides(plan: Plan) -> np.ndarray:
    """Return the positions of tokens that are as far apart as the tokens of the first input."""
    if plan.question.case.axes is not None:
        return plan.position
    return plan.position.reshape(-1)[_in_first(plan) // _heads_of_first(plan)][..., None]


def _heads_of_first(plan: Plan) -> int:
    return plan.question.case.inputs[0].shape[2]


def _overlapping(plan: Plan) -> None:
    """Let the token with number n begin at head n of the memory, and turn all of its heads after the tokens before it.

    Heads turn by the sum of the positions of the tokens that reach them. Each turn rounds the table, two products and
    their sum.
    """
    if plan.question.case.axes is not None:
        return
    heads, first = plan.shape[2], _in_first(plan)
    positions = np.broadcast_to(plan.position, (*plan.shape[:2], 1, 1)).reshape(-1)
    before = np.concatenate((np.zeros(1, dtype=EXACT), np.cumsum(positions)))
    low, high = np.maximum(first - heads + 1, 0), np.minimum(first + 1, len(positions))
    set_row(plan, (before[high] - before[np.minimum(low, high)])[..., None])
    plan.several, plan.extra = True, plan.extra + 4 * (heads - 1)


def _by_vectors(size: int) -> Change:
    """Return the change for vectors of features that lie in the first half if their first feature does.

    A feature of the first half has its partner ``rotary_dim / 2`` features further in memory, even in the next head or
    token, and its cosine that many columns from the beginning of the row, even in the next row. The gradient does the
    same by minus the angle.
    """

    def change(plan: Plan) -> None:
        heads, width = plan.shape[2:]
        half = plan.rotary_dim // 2
        feature = np.arange(2 * half)
        first = feature // size * size < half
        if plan.layout != "split_half" or plan.out_layout != "split_half" or (first == (feature < half)).all():
            return
        partner = np.where(first, feature + half, feature - half)
        column = np.where(first, feature, partner)
        sign = np.where(first, -1.0, 1.0) * (-1.0 if plan.is_gradient else 1.0)
        tail = np.arange(2 * half, width)
        parts = (
            (feature, feature, np.ones_like(feature), column, np.ones(2 * half)),
            (feature, partner, np.full_like(feature, 2), column, sign),
            (tail, tail, np.zeros_like(tail), np.zeros_like(tail), np.ones(len(tail))),
        )
        to, element, table, column, amplitude = (np.concatenate(values) for values in zip(*parts, strict=True))
        begin = np.repeat(np.arange(heads) * width, len(to))
        plan.wires = Wires(begin + np.tile(to, heads), np.full(len(begin), plan.which), begin + np.tile(element, heads),
                           np.tile(table, heads), np.tile(column % half, heads), np.tile(column // half, heads),
                           np.tile(amplitude, heads))  # fmt: skip
        plan.own_gradient = True

    return change


def _in_two_blocks(plan: Plan) -> None:
    plan.blocks = 2


def _in_first(plan: Plan) -> np.ndarray:
    """Return the number of each head in memory, counted over all tokens, ``[B, S, H]``."""
    return np.arange(int(np.prod(plan.shape[:3]))).reshape(plan.shape[:3])


def _one_document(plan: Plan) -> np.ndarray:
    """Return positions that count on from the first empty packed document as if no other document began."""
    begin = 0
    for length in plan.question.case.lengths or ():
        if not length:
            return np.where(plan.token >= begin, np.minimum(plan.token - begin, last_row(plan)), plan.position)
        begin += length
    return plan.position


def _fewer_documents(plan: Plan, before: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return positions in packed documents, of which a function counts too few.

    Args:
        before: maps the first tokens of the documents, and the end, to the numbers that the function gives them.
    """
    case = plan.question.case
    if case.lengths is None or case.shard is not None:
        return plan.position
    given = case.offsets if isinstance(case.offsets, tuple) else (case.offsets,) * len(case.lengths)
    begins = np.cumsum([0, *case.lengths])
    found = plan.position.copy()
    for number, (length, taken) in enumerate(zip(case.lengths, before(begins), strict=False)):
        tokens = np.arange(begins[number], begins[number] + length)
        found[0, tokens, 0, 0] = tokens - begins[taken] + given[taken]
    return np.minimum(found, last_row(plan))


def _sorted_twice(plan: Plan) -> np.ndarray:
    """Return positions in an order that is its own inverse for two tokens, but not for three that change places."""
    if plan.question.case.axes is not None:
        return plan.position
    order = np.argsort(plan.position, axis=1, kind="stable")
    return np.take_along_axis(np.take_along_axis(plan.position, order, axis=1), order, axis=1)


def _from_decreases(plan: Plan) -> np.ndarray:
    """Return positions that count on from the first token and from each token whose position is smaller than before."""
    if plan.question.case.axes is not None:
        return plan.position
    positions = plan.position[..., 0, 0]
    begins = np.concatenate((np.ones_like(positions[:, :1], dtype=bool), np.diff(positions) < 0), axis=1)
    begin = np.maximum.accumulate(np.where(begins, np.arange(positions.shape[1]), 0), axis=1)
    counted = np.take_along_axis(positions, begin, axis=1) + np.arange(positions.shape[1]) - begin
    return counted[..., None, None]


SEEING_POSITIONS = frozenset((
    "counts positions on from the first token and from every decrease",
    "takes the absolute value of the position",
    "takes positions modulo the number of tokens",
    "takes positions modulo the largest position plus 1",
    "takes positions below 0 for position 0",
))  # fmt: skip
"""Predicates of functions that see positions, or the tables of all positions."""
MADE_OF_POSITIONS = ("angles", "inverse frequencies")
"""The numbers in predicates about functions that compute cosines; no other function rounds them."""


def expressible(convention: Convention, words: str) -> bool:
    """Return whether a function that is called by a convention can know what a predicate or a circumstance is about."""
    if "document" in words and not convention.sees_documents:
        return False
    if not convention.computes_cosines and any(noun in words for noun in MADE_OF_POSITIONS):
        return False
    return convention.looks_up or not (words in SEEING_POSITIONS or words.startswith("rounds positions"))


ORDINALS = ("first", "second", "third")
ROWS: dict[str, Callable[[Plan], np.ndarray]] = {
    "takes the number of the token within the call for the position": lambda p: p.token,
    "takes the positions of the first sequence for all sequences": lambda p: p.position[:1],
    "takes the position of the first token for all tokens": lambda p: p.position[:, :1],
    "takes the position of the last token for all tokens": lambda p: p.position[:, -1:],
    "takes the number of the head for the position": lambda p: p.head,
    "adds the number of the head to the position": lambda p: p.position + p.head,
    "adds the number of the sequence to the position": lambda p: p.position + p.batch,
    "counts tokens on across sequences": lambda p: p.batch * p.shape[1] + p.token,
    "takes the number of the sequence for the position": lambda p: p.batch,
    "takes the absolute value of the position": lambda p: abs(p.position),
    "takes positions modulo the number of tokens": lambda p: np.mod(p.position, p.tokens),
    "takes positions modulo the largest position plus 1": lambda p: np.mod(p.position, _last(p) + 1),
    "counts positions from the end of the sequence": lambda p: p.position[:, ::-1],
    "takes the number of the token within the call for the position, up to the last row of the tables": lambda p: (
        np.minimum(p.token, last_row(p))
    ),
    "takes the position of the token whose number is the number of the head": _row_of_head,
    "continues the first empty document to the end": _one_document,
    "counts positions on from the first token and from every decrease": _from_decreases,
    "counts no empty document, so that later documents begin where earlier ones do": partial(
        _fewer_documents, before=lambda begins: np.concatenate(([0], np.cumsum(np.diff(begins) > 0)))
    ),
    "counts documents that begin at one token once, so that later documents begin where earlier ones do": partial(
        _fewer_documents, before=lambda begins: np.array([len(set(begins[1 : n + 1])) for n in range(len(begins))])
    ),
    "takes the positions of a sequence in rising order": lambda p: np.sort(p.position, axis=1),
    "brings sorted positions back by the order that sorts them, in place of its inverse": _sorted_twice,
    "adds 1 to the position after the first token": lambda p: p.position + (p.token > 0),
    "takes the row of flat tables in memory whose number is the number of the head": _row_of_head_in_memory,
    "counts positions on from the tokens of earlier calls": lambda p: p.position + sum(p.question.before),
    "adds the number of earlier calls to the position": lambda p: p.position + len(p.question.before),
    "reads no row beyond the tokens of the first call": lambda p: (
        np.minimum(p.position, p.question.before[0] - 1) if p.question.before else p.position
    ),
    "takes offset 0 for all packed documents but the first": lambda p: _with_offsets(
        p, lambda given: (*given[:1], *(0 for _ in given[1:]))
    ),
    "takes offset 0 for all packed documents": lambda p: _with_offsets(p, lambda given: (0,) * len(given)),
    "takes the first offset for all packed documents": lambda p: _with_offsets(p, lambda given: given[:1] * len(given)),
    "does not divide positions by the scale": lambda p: p.position * p.question.case.interpolation,
    "multiplies positions by the scale that should divide them": lambda p: (
        p.position * p.question.case.interpolation**2
    ),
    "takes positions below 0 for position 0": lambda p: np.maximum(p.position, 0),
    "reads the row before the last row of the tables in place of the last": lambda p: np.minimum(
        p.position, max(last_row(p) - 1, 0)
    ),
    "takes the positions of the sequences in reverse order": lambda p: p.position[::-1],
    "takes the positions of the next sequence": lambda p: np.roll(p.position, -1, axis=0),
    "takes the positions of the sequence before": lambda p: np.roll(p.position, 1, axis=0),
    "takes the position of the next token, and the last token that of the first": lambda p: np.roll(
        p.position, -1, axis=1
    ),
    "takes the position of the token before, and the first token that of the last": lambda p: np.roll(
        p.position, 1, axis=1
    ),
    "takes the first offset for all sequences and documents": lambda p: _offset_from(
        p, lambda given: np.repeat(given[:1], len(given), axis=0)
    ),
    "takes the offset of the next sequence or document": lambda p: _offset_from(
        p, lambda given: np.roll(given, -1, axis=0)
    ),
    "takes the offset of the sequence or document before": lambda p: _offset_from(
        p, lambda given: np.roll(given, 1, axis=0)
    ),
    "begins every document but the first one token late": lambda p: _documents_at(p, _inner(1)),
    "begins every document but the first one token early": lambda p: _documents_at(p, _inner(-1)),
    "ends every document one token late": lambda p: _documents_at(p, _inner(1, 0)),
    "ends every document one token early": lambda p: _documents_at(p, _inner(-1, 0)),
    "takes for the first token of a document the position after the last token of the document before": (
        _end_of_document_before
    ),
    "takes the second chunk of the rank after": lambda p: _second_chunk(p, -1),
    "takes the second chunk of the rank before": lambda p: _second_chunk(p, 1),
    "reads the second axis of the positions for the pairs of the third": lambda p: _along(p, _replaced(2, 1)),
    "reads the third axis of the positions for the pairs of the second": lambda p: _along(p, _replaced(1, 2)),
    "reads the first axis of the positions for the pairs of the third": lambda p: _along(p, _replaced(2, 0)),
    "reads the first axis of the positions for the pairs of the second": lambda p: _along(p, _replaced(1, 0)),
    "reads the first axis of the positions for every pair": lambda p: _along(p, lambda axes, _: (0,) * len(axes)),
    "exchanges the second and the third axis of the positions": lambda p: _along(p, _exchanged(1, 2)),
    "exchanges the first and the second axis of the positions": lambda p: _along(p, _exchanged(0, 1)),
    "exchanges the first and the third axis of the positions": lambda p: _along(p, _exchanged(0, 2)),
    "lets the axes take turns up to the last pair": lambda p: _along(p, _turns_to_the_end),
    "takes the numbers of mrope_section twice as large": lambda p: _along(
        p, _sections(lambda a, b, c: (2 * a, 2 * b, 2 * c))
    ),
    "takes half the numbers of mrope_section": lambda p: _along(p, _sections(lambda a, b, c: (a // 2, b // 2, c // 2))),
    "takes the numbers of mrope_section for the ends of the sections": lambda p: _along(
        p, _sections(lambda a, b, c: (a, max(b - a, 0), c))
    ),
    "reads mrope_section in reverse order": lambda p: _along(p, _sections(lambda a, b, c: (c, b, a))),
    "exchanges the second and the third number of mrope_section": lambda p: _along(
        p, _sections(lambda a, b, c: (a, c, b))
    ),
    "exchanges the first and the second number of mrope_section": lambda p: _along(
        p, _sections(lambda a, b, c: (b, a, c))
    ),
    **{
        f"takes the {ORDINALS[i]} number of mrope_section for the {ORDINALS[j]}": partial(
            _along, order=_sections(lambda *n, i=i, j=j: (*n[:j], n[i], *n[j + 1 :]))
        )
        for i in range(3)
        for j in range(3)
        if i != j
    },  # fmt: skip
    "begins the second section one pair late": lambda p: _along(p, _sections(lambda a, b, c: (a + 1, b - 1, c))),
    "begins the second section one pair early": lambda p: _along(p, _sections(lambda a, b, c: (a - 1, b + 1, c))),
    "begins the third section one pair late": lambda p: _along(p, _sections(lambda a, b, c: (a, b + 1, c - 1))),
    "begins the third section one pair early": lambda p: _along(p, _sections(lambda a, b, c: (a, b - 1, c + 1))),
    "takes the other arrangement of the axes, adjacent pairs for turns or turns for adjacent pairs": lambda p: _along(
        p, _other_arrangement
    ),
}
"""A predicate -> the rows that the definition would read with this mistake."""

SIGNS = {
    "sin0": "y0 has + x1 s0 in place of - x1 s0",
    "sin1": "y1 has - x0 s1 in place of + x0 s1",
    "cos0": "y0 has - x0 c0 in place of + x0 c0",
    "cos1": "y1 has - x1 c1 in place of + x1 c1",
}
TERMS = {"sin0": "x1 s0", "sin1": "x0 s1", "cos0": "x0 c0", "cos1": "x1 c1"}
AXES = {0: "sequences", 1: "tokens", 2: "heads", 3: "features"}
ROUNDED = {
    "position": "positions", "frequency": "inverse frequencies", "angle": "angles", "table": "cosines and sines",
    "tail": "the features that do not rotate", "input": "the input", "product": "the products", "output": "the result",
}  # fmt: skip


def vocabulary() -> Iterator[Deviation]:
    """Yield the deviations without parameters, the most common first."""

    def make(kind: str, words: str, breaks: str, change: Change) -> Deviation:
        return Deviation(kind, words, breaks, change)

    yield make("sign", "turns by minus the angle", ANGLE, _times("multiple", -1))
    yield make("identity", "is not rotated", PAIR, _identity)
    for words, row in ROWS.items():
        yield make("row", words, ROW, _reads(row))
    for block in (8, 16, 32, 64):
        words = f"lets sequences overwrite the next sequences to the end of a block of {block} tokens or of the tables"
        yield Deviation("overwritten", words, OWN, _reads(partial(_on_from_a_sequence_before, block=block)),
                        {"block": block})  # fmt: skip
    for part, line in SIGNS.items():
        yield make("reflection", f"is reflected: {line}", PAIR, _times(part, -1))
        yield make("lost term", f"lacks the term with {TERMS[part]}", PAIR, _times(part, 0))
    yield make(
        "reflection", "turns and mirrors every pair: the cosines have the wrong sign", PAIR, _negative("cos0", "cos1")
    )
    yield make(
        "reflection", "is reflected: first members of pairs have the wrong sign", PAIR, _negative("cos0", "sin0")
    )
    yield make(
        "reflection", "is reflected: second members of pairs have the wrong sign", PAIR, _negative("cos1", "sin1")
    )
    yield make("reflection", f"is reflected: {SIGNS['sin0']}, {SIGNS['cos1']}", PAIR, _negative("sin0", "cos1"))
    yield make("reflection", f"is reflected: {SIGNS['sin1']}, {SIGNS['cos0']}", PAIR, _negative("sin1", "cos0"))
    yield make("tables swapped", "takes cosines for sines and sines for cosines", PAIR, _with("swapped", True))
    words = "computes second members of pairs from first members that are already rotated"
    yield make("in turn", words, PAIR, _with("in_turn", True))
    yield make("in turn", f"{words}, and has the gradient of that", PAIR, _with("in_turn", OF_AUTOGRAD))
    yield make(
        "in turn",
        "reorders pairs in place in two blocks, and the second reads what the first has overwritten",
        PAIR,
        _in_two_blocks,
    )
    yield in_reverse()
    yield make("zero", "is zero", PAIR, _zero)
    yield make("source", "is computed from the heads of q with the same numbers", SELF, _from_q(lambda k, q: k))
    yield make(
        "source",
        "is computed from the first heads of q of its groups",
        SELF,
        _from_q(lambda k, q: k * max(1, q // (int(k.max()) + 1))),
    )
    yield make("strides", "is addressed with the strides of q", OWN, _with_strides_of_q)
    words = "rotates the token with number n from head n of the memory on, so that heads turn several times"
    yield make("memory", words, OWN, _overlapping)
    words = "pairs adjacent features, and reads tables whose columns are for halves"
    yield make("wiring", words, PAIR, _crossed(adjacent=True))
    words = "pairs the halves of a head, and reads tables whose columns are for adjacent features"
    yield make("wiring", words, PAIR, _crossed(adjacent=False))
    words = "pairs feature i with the feature half a head further, and not half of the features that rotate"
    yield make("wiring", words, PAIR, _half_a_head_apart)
    words = "rotates the last features of a head, and passes the first"
    yield make("wiring", words, TAIL, _last_features)
    for layout in LAYOUTS:
        yield make("layout", f"pairs features as {layout}", PAIR, _laid_out(layout))
    yield make("overwritten", "is in memory that the next call overwrites", PURE, _with("overwritten", True))
    for size in (4, 8, 16, 32):
        words = f"takes {size} features at a time for one half, and reads partners and cosines of the next head and row"
        yield Deviation("wiring", words, OWN, _by_vectors(size), {"vector": size})
    yield make("padding", "rotates tokens without a position at their number in the call", NOWHERE, _everywhere)
    for words, order in MEMORY.items():
        yield make("memory", f"is read from memory {words}", OWN, _read_as(order))
        yield make("memory", f"is stored in memory {words}", OWN, _stored_as(order))
    yield make("tail", "has twice the gradient in the features that do not rotate", TAIL, _twice_the_tail_gradient)
    for number in (0.0, 1.0):
        yield make("tail", f"has {number:g} in the features that do not rotate", TAIL, _tail(number))
    yield make("tail", "does not write the features that do not rotate", TAIL, _unwritten_tail)
    yield make("tail", "has NaN or unwritten memory in the features that do not rotate", TAIL, _with("tail", np.nan))
    yield make("padding", "leaves the rows of tokens without a position unwritten", NOWHERE, _with("padding", np.nan))
    yield make("NaN", "has NaN in the features that rotate", PAIR, _times("multiple", np.nan))
    yield make("NaN", "is NaN or unwritten memory", PAIR, _not_a_number)
    for axis, what in AXES.items():
        yield make("order", f"has its {what} in reverse order", OWN, _ordered(axis, lambda n: np.arange(n)[::-1]))
    for axis, what in AXES.items():
        if axis < 3:
            yield make("order", f"has its {what} moved by one", OWN, _ordered(axis, lambda n: np.roll(np.arange(n), 1)))
    yield make("inputs", "overwrites its input", PURE, _with("changed_inputs", True))
    words = f"is off by the roundings of up to {MORE} more operations"
    yield make("roundings", words, BITS, _rounded_more)
    words = "has a backward that overwrites the cotangent that it gets"
    yield make("cotangents", words, PURE, _with("changed_cotangents", True))
    words = "reads strided cotangents as if their memory were contiguous"
    yield make("memory", words, OWN, _with("flat", GRADIENT))
    yield make("memory", "is read as if its memory were contiguous", OWN, _with("flat", FORWARD))
    yield make("arguments", "changes another argument", PURE, _with("changed_arguments", True))
    yield make("rounding of position", "rounds positions to the dtype of the input", BITS,
               _rounding(("position",), OF_INPUT))  # fmt: skip
    yield make("rounding of table", "rounds cosines and sines to the dtype of the input", BITS,
               _rounding(("table",), OF_INPUT))  # fmt: skip
    words = "computes angles as turns in float32, from frequencies that are rounded to float32"
    yield make("rounding of operands", words, BITS, _rounding(("frequency", "angle"), TURNS))
    yield make("rounding of angle", f"reduces angles to {REDUCED}", BITS, _rounding(("angle",), REDUCED))
    for name in [name for name in FORMATS if name != TURNS]:
        for together in (("position", "frequency"), ("position", "frequency", "angle")):
            words = f"computes the angles from {ROUNDED['position']} and {ROUNDED['frequency']} in {name}"
            words += f" and rounds them to {name}" if "angle" in together else ""
            yield Deviation("rounding of operands", words, BITS, _rounding(together, name), {"format": name})
    for where in ROUNDED:
        for name in FORMATS:
            if name not in (INTEGER, TURNS) or where in ("position", "frequency", "angle")[name == TURNS :]:
                yield rounding(where, name)


def in_reverse() -> Deviation:
    """Return the deviation that gives the frequencies to the pairs in reverse order."""

    def change(plan: Plan) -> None:
        plan.frequency = plan.sine_frequency = plan.frequency[..., ::-1]

    return Deviation("order of frequencies", "takes the frequencies in reverse order", FREQUENCY, change,
                     {"order": "reverse"})  # fmt: skip


def rounding(where: str, name: str) -> Deviation:
    """Return the deviation that rounds one intermediate, a key of ``ROUNDED``, to a format of ``FORMATS``."""
    words = f"rounds {ROUNDED[where]} to {name}"
    return Deviation(f"rounding of {where}", words, BITS, _rounding((where,), name), {"format": name})


def _shapes(plan: Plan) -> dict[str, int]:
    return dict(zip("bsh", plan.shape[:3], strict=True))


def _orders() -> Iterator[tuple[str, Callable[[Plan], np.ndarray]]]:
    """Yield in words how memory is mistaken, and the number of the element that each element becomes."""
    axes = {"b": "sequences", "s": "tokens", "h": "heads"}
    for order in ("bhs", "sbh", "shb", "hbs", "hsb"):

        def taken(plan: Plan, order=order) -> np.ndarray:
            """Permute the axes to ``order``, and keep the shape: a view in place of a transposition."""
            numbers = np.arange(int(np.prod(plan.shape))).reshape(plan.shape)
            return numbers.transpose(*map("bsh".index, order), 3).reshape(plan.shape)

        def given(plan: Plan, order=order) -> np.ndarray:
            """Take the memory for memory with the axes in ``order``, and permute the axes back."""
            shape = [_shapes(plan)[axis] for axis in order]
            numbers = np.arange(int(np.prod(plan.shape))).reshape(*shape, plan.shape[3])
            return numbers.transpose(*map(order.index, "bsh"), 3)

        said = ", ".join(axes[axis] for axis in order)
        yield f"with the axes {said} as if they were sequences, tokens, heads", taken
        yield f"with the axes sequences, tokens, heads as if they were {said}", given


MEMORY = dict(_orders())
"""A mistake about memory, in words -> a function that returns the number of the element that each element becomes."""


def _read_as(order: Callable[[Plan], np.ndarray]) -> Change:
    def change(plan: Plan) -> None:
        case = plan.question.case
        plan.source = order(plan) + sum(x.numel() for x in case.inputs[: plan.which])

    return change


def _stored_as(order: Callable[[Plan], np.ndarray]) -> Change:
    return lambda plan: setattr(plan, "moved", order(plan))


def _from_q(head: Callable[[np.ndarray, int], np.ndarray]) -> Change:
    def change(plan: Plan) -> None:
        heads = plan.question.case.inputs[0].shape[2]
        if plan.which and heads >= plan.shape[2]:
            numbers = np.arange(int(np.prod(plan.shape[:2])) * heads * plan.shape[3])
            numbers = numbers.reshape(*plan.shape[:2], heads, plan.shape[3])
            plan.source = numbers[:, :, head(plan.head[0, 0, :, 0], heads)]

    return change


def _with_strides_of_q(plan: Plan) -> None:
    """Rotate the heads that are addressed, counted in memory from token to token; leave the others."""
    head, heads = _in_first(plan), _heads_of_first(plan)
    addressed = (head % heads < plan.shape[2])[..., None]
    set_row(plan, _of_head_strides(plan))
    plan.multiple = np.where(addressed, plan.multiple, 0 * plan.multiple)
    plan.cos0 = plan.cos1 = np.where(addressed, 1, 1 / plan.factor)


def _everywhere(plan: Plan) -> None:
    hit = plan.nowhere[..., None, None]
    set_row(plan, np.where(hit, np.minimum(plan.token, last_row(plan)), plan.row))
    plan.nowhere = np.zeros_like(plan.nowhere)


def _twice_the_tail_gradient(plan: Plan) -> None:
    plan.tail = 2.0 * plan.tail if plan.is_gradient else plan.tail


def _unwritten_tail(plan: Plan) -> None:
    plan.tail = 0.0 if plan.is_gradient else np.nan


def _with(part: str, value: object) -> Change:
    return lambda plan: setattr(plan, part, value)


def _times(part: str, factor: float) -> Change:
    return lambda plan: setattr(plan, part, factor * getattr(plan, part))


def _negative(*parts: str) -> Change:
    def change(plan: Plan) -> None:
        for part in parts:
            setattr(plan, part, -getattr(plan, part))

    return change


def _reads(row: Callable[[Plan], np.ndarray]) -> Change:
    return lambda plan: set_row(plan, row(plan))


def _rounding(where: tuple[str, ...], name: str) -> Change:
    return lambda plan: plan.rounded.update(dict.fromkeys(where, name))


def _ordered(axis: int, order: Callable[[int], np.ndarray]) -> Change:
    return lambda plan: plan.order.__setitem__(axis, order(plan.shape[axis]))


def _tail(number: float) -> Change:
    def change(plan: Plan) -> None:
        plan.tail, plan.tail_added = 0.0, number

    return change


def _not_a_number(plan: Plan) -> None:
    plan.multiple, plan.tail = plan.multiple * np.nan, np.nan


def _rounded_more(plan: Plan) -> None:
    """Allow roundings of intermediate sums, each of which may be as large as both members of a pair together."""
    unit = plan.subject.arithmetic(plan.question.case.inputs[plan.which].dtype).compute.unit
    plan.inexact, plan.extra = plan.inexact + MORE * unit, plan.extra + MORE


def _identity(plan: Plan) -> None:
    plan.multiple = 0 * plan.multiple
    plan.cos0 = plan.cos1 = np.array(1 / plan.factor)


def _zero(plan: Plan) -> None:
    plan.cos0 = plan.cos1 = plan.sin0 = plan.sin1 = np.zeros(())
    plan.tail = 0.0
