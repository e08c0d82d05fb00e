"""Find the parts of a function's behaviour to which wrong answers are confined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from ropelab.conformance.identify.deviation import Scope
from ropelab.conformance.identify.evidence import Answer
from ropelab.conformance.identify.extents import extents
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.questions import AFTER_BFLOAT16, BEYOND_FLOAT16, GRADIENT, Question
from ropelab.kernels import NO_POSITION

CIRCUMSTANCES: dict[str, Callable[[Question, int], bool]] = {
    "where the call has a single token": lambda q, i: q.case.shape[1] == 1,
    "where the input has a single head": lambda q, i: q.case.inputs[i].shape[2] == 1,
    "in packed documents": lambda q, i: q.case.lengths is not None,
    "in packed documents of which some are empty": lambda q, i: 0 in (q.case.lengths or ()),
    "on ranks beyond the first": lambda q, i: q.case.shard is not None and q.case.shard[1] > 0,
    "in context-parallel shards": lambda q, i: q.case.shard is not None,
    "where each sequence has its own offset": lambda q, i: isinstance(q.case.offsets, tuple) and not q.case.lengths,
    "where each sequence has its own positions": lambda q, i: len(q.case.token_positions().unique(dim=0)) > 1,
    "where positions do not begin at 0": lambda q, i: bool((q.case.token_positions()[:, :1] != 0).any()),
    "at negative positions": lambda q, i: bool(
        ((at := q.case.token_positions()) < 0).logical_and(at != NO_POSITION).any()
    ),
    "where positions, or rows of the tables, are passed once for all sequences": lambda q, i: (
        q.case.positions is not None and q.case.positions.ndim == 1
    ),
    "where inputs are cut out of a larger tensor": lambda q, i: q.name.startswith("inputs cut out"),
    "under autocast": lambda q, i: "autocast" in q.name,
    "where TF32 is allowed": lambda q, i: "TF32" in q.name,
    "after a call with a longer sequence": lambda q, i: "after a longer" in q.name,
    "in the second step of a training": lambda q, i: "second step" in q.name,
    "after an earlier call": lambda q, i: bool(q.before),
    "in every second call": lambda q, i: len(q.before) % 2 == 1,
    "in the second of two calls": lambda q, i: len(q.before) == 1,
    "after more than one call": lambda q, i: len(q.before) > 1,
    "for the inverse rotation": lambda q, i: q.case.inverse,
    "after a call in bfloat16": lambda q, i: q.name == AFTER_BFLOAT16,
    "where numbers are beyond those of float16": lambda q, i: q.name == BEYOND_FLOAT16,
    "in context-parallel shards of packed documents": lambda q, i: (
        q.case.shard is not None and q.case.lengths is not None
    ),
    "where all features rotate": lambda q, i: q.case.rotary_dim == q.case.inputs[i].shape[-1],
    "where some features do not rotate": lambda q, i: q.case.rotary_dim < q.case.inputs[i].shape[-1],
    "for the cotangent of a sum": lambda q, i: q.name == "the gradient of a sum",
    "for strided cotangents": lambda q, i: q.name == "the gradient of a strided cotangent",
    "for cotangents that are expanded or strided": lambda q, i: (
        q.name.startswith("the gradient of a s") and "step" not in q.name
    ),
    "outside packed documents": lambda q, i: q.case.lengths is None,
    "in packed documents with offsets": lambda q, i: q.case.lengths is not None and isinstance(q.case.offsets, tuple),
    "where all sequences share their positions": lambda q, i: len(q.case.token_positions().unique(dim=0)) == 1,
    "in calls with tokens without a position": lambda q, i: bool((q.case.token_positions() == NO_POSITION).any()),
    "where the call has several tokens": lambda q, i: q.case.shape[1] > 1,
    "where positions have several axes": lambda q, i: q.case.axes is not None,
    "where axes take turns": lambda q, i: q.case.mrope_interleaved,
    "where axes have adjacent pairs": lambda q, i: q.case.axes is not None and not q.case.mrope_interleaved,
    "after the next call": lambda q, i: q.after is not None,
    "in bfloat16": lambda q, i: q.case.inputs[i].dtype == torch.bfloat16,
    "in float16": lambda q, i: q.case.inputs[i].dtype == torch.float16,
    "in 16 bits": lambda q, i: q.case.inputs[i].dtype.itemsize == 2,
    "in float32": lambda q, i: q.case.inputs[i].dtype == torch.float32,
    "where the call has as many tokens as heads": lambda q, i: q.case.shape[1] == q.case.inputs[i].shape[2],
    "where the call has as many tokens as sequences": lambda q, i: q.case.shape[0] == q.case.shape[1],
}
"""Circumstances in words -> whether an input of a question has them."""


def scopes(wrong: list[tuple[Answer, np.ndarray]], answers: list[Answer]) -> Iterator[Scope]:
    """Yield scopes that contain all wrong answers of some inputs, the widest first."""
    every = dict.fromkeys(a.name for a in answers)
    hit = dict.fromkeys(a.name for a, _ in wrong)
    failing = {id(a) for a, _ in wrong}
    for name in ("", *(n for n in hit if len(every) > 1)):
        ours = [(a, elements) for a, elements in wrong if name in ("", a.name)]
        only_gradients = all(a.question.kind == GRADIENT for a, _ in ours)
        for gradient in (True, False) if only_gradients else (False,):
            wide = Scope(name, gradient)
            yield wide
            both = not only_gradients and any(a.question.kind == GRADIENT for a, _ in ours)
            if not only_gradients:
                yield replace(wide, words="in the forward pass", asked=in_results)
            # A gradient may deviate further. So the scope of what both have in common follows from the results alone.
            for some in (ours, [w for w in ours if w[0].question.kind != GRADIENT])[: 1 + both]:
                yield from _within(wide, some, name, gradient, answers, failing)


def _within(wide: Scope, ours, name: str, gradient: bool, answers: list[Answer], failing: set[int]) -> Iterator[Scope]:
    """Yield the scopes within a scope that contain all the given wrong answers."""
    right = [
        a for a in answers
        if id(a) not in failing and name in ("", a.name) and (a.question.kind == GRADIENT or not gradient)
    ]  # fmt: skip
    longest = max((_tokens(a) for a in right), default=0)
    shortest = min((_tokens(a) for a, _ in ours), default=0)
    lengths: dict[str, Callable[[Question, int], bool]] = {}
    if 4 < longest < shortest:
        lengths[f"in sequences of more than {longest} tokens"] = (
            lambda q, i: max(q.tokens, q.case.shape[1]) > longest
        )  # fmt: skip
    narrower = [
        replace(wide, words=words, asked=holds)
        for words, holds in (lengths | CIRCUMSTANCES).items()
        if all(holds(a.question, a.which) for a, _ in ours) and any(not holds(a.question, a.which) for a in right)
    ]
    yield from narrower
    masks = _masks(ours)
    if lengths:
        words = f"behind the last full block of {longest} tokens"
        masks = chain(((words, _behind(longest)),), masks)
    for words, mask in masks:
        yield replace(wide, words=words, mask=mask)
        for scope in narrower:
            yield replace(scope, words=f"{words} {scope.words}", mask=mask)


def _behind(size: int) -> Callable[[Plan], np.ndarray]:
    """Return the mask of the tokens behind the last full block of ``size`` tokens."""

    def mask(plan: Plan) -> np.ndarray:
        return np.asarray(plan.token >= plan.tokens // size * size)

    return mask


def _tokens(answer: Answer) -> int:
    return max(answer.question.tokens, answer.question.case.shape[1])


def in_results(question: Question, which: int) -> bool:
    """Return whether the answer is a result: the circumstances of a deviation that gradients do not share."""
    return question.kind != GRADIENT


def _masks(wrong: list[tuple[Answer, np.ndarray]]) -> Iterator[tuple[str, Callable[[Plan], np.ndarray]]]:
    """Yield masks in words that contain all wrong elements."""
    full = [(a, e) for a, e in wrong if e.ndim == 4 and e.size > 1]
    yield from _modular(full)
    yield from _remainders(full)
    for axis, noun, coordinate in _axes(full):
        sizes = {e.shape[axis] for _, e in full}
        if not full or sizes == {1}:
            continue
        most = max(sizes)
        hits = {int(i) for _, e in full for i in np.flatnonzero(e.any(axis=tuple(k for k in range(4) if k != axis)))}
        if hits and len(hits) < most:
            yield from _indices(sorted(hits), most, noun, coordinate)
    yield from _relative(full)
    yield from extents(full)
    beyond = _threshold(full)
    if beyond is not None:
        yield f"at positions >= {beyond}", lambda p: np.asarray(abs(p.position) >= beyond)
        yield f"at positions > {beyond}", lambda p: abs(p.position) > beyond
    pairs_hit = {int(i) for a, e in full for i in pairs_of(a, e)}
    count = max((a.question.case.rotary_dim // 2 for a, _ in full), default=0)
    if full and all(set(pairs_of(a, e).tolist()) == {a.question.case.rotary_dim // 2 - 1} for a, e in full):
        yield "in the last pair", lambda p: np.arange(p.frequency.shape[-1]) == p.frequency.shape[-1] - 1
    if pairs_hit and len(pairs_hit) < count:
        listed = sorted(pairs_hit)
        yield f"in pairs {listed}", lambda p: np.isin(np.arange(p.frequency.shape[-1]), listed)
        if listed[-1] == count - 1 and listed == list(range(listed[0], count)):
            yield f"in pairs >= {listed[0]}", lambda p: np.arange(p.frequency.shape[-1]) >= listed[0]
        if listed[0] == 1 and count > 2:
            yield "in odd pairs", lambda p: np.arange(p.frequency.shape[-1]) % 2 == 1


def _axes(full: list[tuple[Answer, np.ndarray]]) -> list[tuple[int, str, str]]:
    """Return the axes whose indices are numbers of heads, sequences or tokens; a sample has no numbers of tokens."""
    axes = [(2, "head", "head"), (0, "sequence", "batch"), (1, "token", "token")]
    return axes[:2] if any(a.question.tokens for a, _ in full) else axes


def _modular(full: list[tuple[Answer, np.ndarray]]) -> Iterator[tuple[str, Callable[[Plan], np.ndarray]]]:
    """Yield masks of places whose number has a rest modulo a small number."""
    for axis, noun, coordinate in _axes(full):
        hits = [(np.flatnonzero(e.any(axis=tuple(k for k in range(4) if k != axis))), e.shape[axis]) for _, e in full]
        if not hits:
            continue
        every = np.concatenate([hit for hit, _ in hits])
        for modulus in (2, 3, 4, 8):
            rest = set((every % modulus).tolist())
            if len(rest) == 1 and max(size for _, size in hits) > modulus and len(set(every.tolist())) > 1:
                at = rest.pop()
                words = {(2, 0): f"in even {noun}s", (2, 1): f"in odd {noun}s"}.get((modulus, at))
                words = words or f"in {noun}s whose number is {at} modulo {modulus}"
                yield words, _numbered(coordinate, modulus, at)


def _relative(full: list[tuple[Answer, np.ndarray]]) -> Iterator[tuple[str, Callable[[Plan], np.ndarray]]]:
    """Yield masks of places that are relative to the extent of an axis or to packed documents."""
    for axis, noun, coordinate in _axes(full):
        hits = [(np.flatnonzero(e.any(axis=tuple(k for k in range(4) if k != axis))), e.shape[axis]) for _, e in full]
        hits = [(hit, size) for hit, size in hits if size > 1]
        if not hits:
            continue

        def place(chosen: Callable[[np.ndarray, int], np.ndarray], axis=axis, coordinate=coordinate):
            return lambda plan: chosen(getattr(plan, coordinate), plan.shape[axis])

        if all((hit == size - 1).all() for hit, size in hits):
            yield f"in the last {noun}", place(lambda number, size: number == size - 1)
        elif all((hit < size - 1).all() for hit, size in hits):
            yield f"in every {noun} but the last", place(lambda number, size: number < size - 1)
        if all((hit == 0).all() for hit, size in hits):
            yield f"in the first {noun}", place(lambda number, size: number == 0)
        elif all((hit > 0).all() for hit, size in hits):
            yield f"in every {noun} but the first", place(lambda number, size: number > 0)
    if full and all(a.question.case.lengths is not None for a, _ in full):
        hits = [(np.flatnonzero(e.any(axis=(0, 2, 3))), a.question) for a, e in full]
        for words, of_question in DOCUMENTS.items():
            if all(of_question(question)[hit].all() for hit, question in hits):
                yield words, _of_documents(of_question)


def _remainders(full: list[tuple[Answer, np.ndarray]]) -> Iterator[tuple[str, Callable[[Plan], np.ndarray]]]:
    """Yield masks of heads and tokens that a call leaves over; they depend on its extents, and precede constants."""
    several = [(a, e) for a, e in full if len(a.question.case.inputs) == 2]
    others = {_beside(a.question, a.which) for a, _ in several}
    if several == full and others and all(_hit(e, 2, range(_beside(a.question, a.which), e.shape[2])) for a, e in full):
        yield "in heads beyond those of the other input", lambda p: p.head >= _beside(p.question, p.which)
    if not full or any(a.question.tokens for a, _ in full):
        return
    begins = [int(np.flatnonzero(e.any(axis=(0, 2, 3)))[0]) for _, e in full]
    if 0 in begins or not all(_hit(e, 1, range(at, e.shape[1])) for at, (_, e) in zip(begins, full, strict=True)):
        return
    common, most = math.gcd(*begins), max(e.shape[1] - at for at, (_, e) in zip(begins, full, strict=True))
    for tile in (common // part for part in range(1, common // most + 1) if common % part == 0):
        if tile > max(most, 4):
            yield f"behind the last full block of {tile} tokens", _left_over(tile)


def _beside(question: Question, which: int) -> int:
    """Return the number of heads of the other input."""
    return question.case.inputs[1 - which].shape[2]


def _hit(elements: np.ndarray, axis: int, expected: range) -> bool:
    """Return whether the wrong elements have these numbers along an axis, and no others."""
    hit = np.flatnonzero(elements.any(axis=tuple(i for i in range(elements.ndim) if i != axis)))
    return hit.tolist() == list(expected)


def _left_over(tile: int) -> Callable[[Plan], np.ndarray]:
    """Return the mask of the tokens behind the last full block of a sequence; none in a sequence without one."""

    def mask(plan: Plan) -> np.ndarray:
        tokens = plan.shape[1]
        return plan.token >= (tokens // tile * tile if tokens >= tile else tokens)

    return mask


def _numbered(coordinate: str, modulus: int, rest: int) -> Callable[[Plan], np.ndarray]:
    return lambda plan: getattr(plan, coordinate) % modulus == rest


def _of_documents(chosen: Callable[[Question], np.ndarray]) -> Callable[[Plan], np.ndarray]:
    return lambda plan: chosen(plan.question)[None, :, None, None]


def _place_in_document(question: Question) -> tuple[np.ndarray, ...]:
    """For each token, the number of its document, its number in the document, and the document's length; else -1."""
    tokens = question.case.shape[1]
    found = np.full((3, tokens), -1)
    lengths = [length // (question.case.shard or (1,))[0] for length in question.case.lengths or ()]
    begin = 0
    for number, length in enumerate(lengths):
        found[:, begin : begin + length] = np.full(length, number), np.arange(length), np.full(length, length)
        begin += length
    return tuple(found)


def _documents(chosen: Callable[..., np.ndarray]) -> Callable[[Question], np.ndarray]:
    def mask(question: Question) -> np.ndarray:
        number, place, length = _place_in_document(question)
        count = len(question.case.lengths or ())
        return np.asarray(chosen(number, place, length, count)) & (number >= 0)

    return mask


DOCUMENTS: dict[str, Callable[[Question], np.ndarray]] = {
    "in the last packed document": _documents(lambda number, place, length, count: number == count - 1),
    "in the first packed document": _documents(lambda number, place, length, count: number == 0),
    "in every packed document but the first": _documents(lambda number, place, length, count: number > 0),
    "in every packed document but the last": _documents(lambda number, place, length, count: number < count - 1),
    "in the last token of each packed document": _documents(lambda number, place, length, count: place == length - 1),
    "in the first token of each packed document": _documents(lambda number, place, length, count: place == 0),
}
"""Tokens of packed documents in words -> which tokens of a question they are, bool ``[S]``."""


def pairs_of(answer: Answer, elements: np.ndarray) -> np.ndarray:
    """Return the numbers of the pairs that have wrong elements, if the pairs are halves."""
    case = answer.question.case
    turned = np.flatnonzero(np.asarray(elements.any(axis=(0, 1, 2)))[: case.rotary_dim])
    return turned % (case.rotary_dim // 2)


def _indices(hits: list[int], size: int, noun: str, coordinate: str):
    def value(plan: Plan) -> np.ndarray:
        return getattr(plan, coordinate)

    if len(hits) > 1 and hits == list(range(0, size, 2)):
        yield f"in even {noun}s", lambda p: value(p) % 2 == 0
    if len(hits) > 1 and hits == list(range(1, size, 2)):
        yield f"in odd {noun}s", lambda p: value(p) % 2 == 1
    if hits == list(range(hits[0], size)) and hits[0] > 0:
        yield f"in {noun}s >= {hits[0]}", lambda p: value(p) >= hits[0]
    if hits == list(range(hits[-1] + 1)):
        yield f"in {noun}s <= {hits[-1]}", lambda p: value(p) <= hits[-1]
    listed = f"{noun} {hits[0]}" if len(hits) == 1 else f"{noun}s {', '.join(map(str, hits))}"
    yield f"in {listed}", lambda p: np.isin(value(p), hits)
    if hits == [size - 1]:
        axis = {"batch": 0, "token": 1, "head": 2}[coordinate]
        yield f"in the last {noun}", lambda p: value(p) == p.shape[axis] - 1


def _threshold(wrong: list[tuple[Answer, np.ndarray]]) -> int | None:
    """Return the smallest wrong position if a call has the position below it right, or else a power of two below it."""
    smallest, right = [], set()
    for answer, elements in wrong:
        positions = answer.question.case.token_positions().abs().numpy()
        hit = elements.any(axis=(2, 3))
        if hit.shape != positions.shape or not hit.any():
            return None
        smallest.append(int(positions[hit].min()))
        right |= set(positions[~hit].tolist())
    least = min(smallest, default=0)
    if least <= 64:
        return None
    return least if least - 1 in right else 1 << (least.bit_length() - 1)
