"""Find the rule by which tokens read the rows of other positions, from the rows that were measured in all wrong calls.

A rule is a sentence of a small grammar. A token counts from an anchor, takes the position of an anchor, or counts on
from it. A rank of context parallelism takes its tokens in another order, or from other ends of the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from ropelab.conformance.bounds import EXACT
from ropelab.conformance.identify.deviation import Deviation, Scope
from ropelab.conformance.identify.evidence import Answer
from ropelab.conformance.identify.plan import Plan, last_row
from ropelab.conformance.identify.questions import FORWARD
from ropelab.conformance.identify.read_off import Wrong, read_rows
from ropelab.conformance.identify.vocabulary import ROW, ROWS, expressible, set_row
from ropelab.conformance.subject import Subject

MOST_CALLS, FEW = 16, 3
"""The number of calls whose rows are measured, and of rules that are tried."""
FARTHEST = 1000
"""Rows of larger positions are not measured: to find one among them takes long."""
TILES = (2, 4, 8, 16, 32, 64, 128)

PER_TOKEN = [row for words, row in ROWS.items() if "head" not in words]
Rows = Callable[[Plan], np.ndarray]
"""Returns the positions ``[B, S]`` whose rows the tokens of a call read."""


def row_rules(subject: Subject, wrong: Wrong, answers: list[Answer]) -> Iterator[Deviation]:
    """Yield the rules that give every measured row of an input; first those that also leave right calls right.

    Args:
        subject: the function.
        wrong: the answers with wrong elements.
        answers: all answers.
    """
    failing = {id(answer) for answer, _ in wrong}
    found: dict[str, list[str]] = {}
    every = dict(_rules(flat=not subject.convention.sees_documents))
    for name in dict.fromkeys(answer.name for answer, _ in wrong):
        ours = [a for a in answers if a.name == name and a.question.kind == FORWARD and not a.question.tokens]
        ours = [a for a in ours if a.question.case.axes is None and not isinstance(a.values, str)]
        measured = []
        for answer in sorted((a for a in ours if id(a) in failing), key=lambda a: a.size)[:MOST_CALLS]:
            if abs(answer.question.case.token_positions()).max() < FARTHEST:
                measured += [(plan, rows) for plan, rows in (read_rows(subject, answer),) if rows is not None]
        right = [Plan.of(subject, a.question, a.which) for a in ours if id(a) not in failing]
        if not any(rows.any() for _, rows in measured) or _usual(measured):  # row 0 is no rotation
            continue
        fits = [words for words, rule in every.items() if expressible(subject.convention, words)
                and all((rule(plan) == rows).all() for plan, rows in measured)]  # fmt: skip
        calm = {w for w in fits if all((every[w](plan) == _positions(plan)).all() for plan in right)}
        found[name] = sorted(fits, key=lambda words: words not in calm)[:FEW]
    inputs = {answer.name for answer in answers}
    told: dict[tuple[str, str], None] = {}
    for name, words in ((name, words) for name, fits in found.items() for words in fits):
        common = all(words in found.get(other, ()) for other in inputs)
        told[words, "" if common else name] = None
    for words, name in told:
        yield Deviation("row", words, ROW, partial(_read, rule=every[words]), {"rows": words}, Scope(name))


def _usual(measured: list[tuple[Plan, np.ndarray]]) -> bool:
    """Return whether a predicate of the vocabulary gives all measured rows."""
    return any(
        all((np.broadcast_to(row(plan), (*plan.shape[:2], 1, 1))[..., 0, 0] == rows).all() for plan, rows in measured)
        for row in PER_TOKEN
    )


def _read(plan: Plan, rule: Rows) -> None:
    if plan.question.case.axes is None:
        set_row(plan, rule(plan)[..., None, None])


def _positions(plan: Plan) -> np.ndarray:
    return plan.position[..., 0, 0]


def _rules(*, flat: bool) -> Iterator[tuple[str, Rows]]:
    """Yield the sentences of the grammar; ``flat`` says that the function sees the tokens of all sequences in a row."""
    over = "" if flat else ", counted over all sequences,"
    anchors: dict[str, Callable[[Plan], np.ndarray]] = {
        "the first token of the call": lambda plan: np.zeros_like(_number(plan)),
    }
    if not flat:
        anchors["the first token of its sequence"] = lambda plan: _number(plan) - _place(plan)
        anchors["the first token of its document"] = lambda plan: _number(plan) - _in_document(plan)
    for tile in TILES:
        tiles: dict[str, Callable[[Plan], np.ndarray]] = {over: _number}
        if not flat:
            tiles |= {"": _place, " within its document": _in_document}
        for where, count in tiles.items():
            said = f"each {tile} tokens{where}"
            anchors[f"the first of {said}"] = partial(_first_of, count=count, tile=tile)
            anchors[f"the last of {said}"] = partial(_last_of, count=count, tile=tile)
    for (words, anchor), (said, numbers) in product(anchors.items(), FORMS.items()):
        yield said.format(words).replace(",,", ",").rstrip(","), partial(_of_anchor, anchor=anchor, numbers=numbers)
    for tile in TILES:
        yield f"rounds positions down to multiples of {tile}", partial(_rounded_down, tile=tile)
    for (begin, begins), (length, lengths), (rank, ranks), (order, orders) in product(
        BEGINS.items(), LENGTHS.items(), RANKS.items(), ORDERS.items()
    ):
        words = " and ".join(filter(None, (*((begin, length) if begin != length else (begin,)), rank, order)))
        if words:
            yield words, partial(_of_rank, begins=begins, lengths=lengths, ranks=ranks, orders=orders)


def _rounded_down(plan: Plan, tile: int) -> np.ndarray:
    return np.asarray(_positions(plan) // tile * tile)


def _place(plan: Plan) -> np.ndarray:
    return np.broadcast_to(plan.token[..., 0, 0], plan.shape[:2])


def _number(plan: Plan) -> np.ndarray:
    """Return the number of each token, counted over the sequences, ``[B, S]``."""
    return plan.batch[..., 0, 0] * plan.shape[1] + _place(plan)


def _in_document(plan: Plan) -> np.ndarray:
    """Return the number of each token in its packed document, or in its sequence."""
    case, place = plan.question.case, _place(plan)
    if case.lengths is None:
        return place
    begins = np.cumsum((0, *(length // (case.shard or (1,))[0] for length in case.lengths)))
    return place - begins[np.searchsorted(begins, place, side="right") - 1]


def _first_of(plan: Plan, count: Callable[[Plan], np.ndarray], tile: int) -> np.ndarray:
    return _number(plan) - count(plan) % tile


def _last_of(plan: Plan, count: Callable[[Plan], np.ndarray], tile: int) -> np.ndarray:
    return np.minimum(_first_of(plan, count, tile) + tile - 1, _number(plan)[:, -1:])


FORMS: dict[str, Callable[..., np.ndarray]] = {
    "takes the position of {}": lambda own, of_anchor, number, at: of_anchor,
    "counts positions on from {}": lambda own, of_anchor, number, at: of_anchor + number - at,
    "adds to its position the number of tokens since {}": lambda own, of_anchor, number, at: own + number - at,
    "adds to its position the number of tokens before {}": lambda own, of_anchor, number, at: own + at,
    "counts tokens from {}, in place of positions": lambda own, of_anchor, number, at: number - at,
}
"""Sentences about an anchor -> the position, from the own one, the anchor's, and the numbers of both tokens."""


def _of_anchor(plan: Plan, anchor: Callable[[Plan], np.ndarray], numbers: Callable[..., np.ndarray]) -> np.ndarray:
    at, own = anchor(plan), np.broadcast_to(_positions(plan), plan.shape[:2])
    return np.where(plan.nowhere, own, _in_tables(plan, numbers(own, own.reshape(-1)[at], _number(plan), at)))


def _in_tables(plan: Plan, rows: np.ndarray) -> np.ndarray:
    return rows if plan.subject.convention.computes_cosines else np.minimum(rows, EXACT(last_row(plan)))


# --------------------------------------------------------------------------------------------- context parallelism

WHOLE = "does not divide cu_seqlens by cp_size"
BEGINS: dict[str, Callable[[int, int], int]] = {
    "": lambda end, size: end // size,
    WHOLE: lambda end, size: end,
}
"""In words where documents end in the buffer of a rank, from the end in all buffers and the number of ranks."""
LENGTHS: dict[str, Callable[[int, int], int]] = {
    "": lambda length, size: length // size,
    WHOLE: lambda length, size: length,
    "divides the lengths twice by cp_size": lambda length, size: length // size // size,
}
RANKS: dict[str, Callable[[int, int], int]] = {
    "": lambda rank, size: rank,
    "takes the positions of rank 0 on all ranks": lambda rank, size: 0,
    "counts the ranks from the last": lambda rank, size: size - 1 - rank,
    "takes the tokens of the next rank": lambda rank, size: (rank + 1) % size,
}
ORDERS: dict[str, Callable[[np.ndarray, int, int, int], np.ndarray]] = {
    "": lambda place, length, rank, size: np.where(
        place < length // 2, place + rank * (length // 2), place + (2 * size - 2 - rank) * (length // 2)
    ),
    "takes the tokens of a rank for contiguous tokens of the sequence": lambda place, length, rank, size: (
        place + rank * length
    ),
    "takes for a rank every token whose number is the rank modulo cp_size": lambda place, length, rank, size: (
        place * size + rank
    ),
    "counts the tokens of a rank from 0": lambda place, length, rank, size: place,
}
"""In words which tokens of a document a rank has, from their numbers there, their number, the rank and the ranks."""


def _of_rank(plan: Plan, begins, lengths, ranks, orders) -> np.ndarray:
    case, found = plan.question.case, _positions(plan).copy()
    if case.shard is None:
        return found
    size, rank = case.shard
    documents = case.lengths or (size * plan.shape[1],)
    offsets = case.offsets if isinstance(case.offsets, tuple) else (case.offsets,) * len(documents)
    end = 0
    for length, offset in zip(documents, offsets, strict=False):
        begin, end = begins(end, size), end + length
        place = np.arange(max(min(begins(end, size), plan.shape[1]) - begin, 0))
        read = orders(place, max(lengths(length, size), 1), ranks(rank, size), size) + offset
        found[:, begin : begin + len(place)] = _in_tables(plan, read)
    return found
