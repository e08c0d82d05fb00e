"""Show what a wrong operator wrote: which calls are wrong, the token found in a slot, and the position of its row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from ropelab.conformance import calls
from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase, numbers
from ropelab.conformance.cache.convention import ROWS, Written
from ropelab.conformance.cache.laws import _against_truth as against_truth
from ropelab.conformance.cache.subject import BLOCK_SIZE, CacheSubject
from ropelab.conformance.declared import Declaration
from ropelab.conformance.law import Comparison
from ropelab.conformance.repro import script
from ropelab.conformance.result import Result
from ropelab.conformance.screen import Screen, law_in_words, message
from ropelab.conformance.where import pattern
from ropelab.conformance.words import called
from ropelab.kernels import NO_POSITION
from ropelab.kernels.float8 import FLOAT8_DTYPES

MOST_ELEMENTS = 2**17
"""The elements of the largest memory that is compared."""
SECONDS = 3.0
"""The CPU time of this thread after which no other law is watched."""
MOST_SLOTS, MOST_TOKENS = 8, 12
"""How much of a call is shown."""

CIRCUMSTANCES: calls.Circumstances = {
    "negative slots": lambda s: bool((s.case.slots < 0).any()),
    "fewer slots than tokens": lambda s: len(s.case.slots) < s.case.tokens,
    "several tokens": lambda s: s.case.tokens > 1,
    "a position other than 0": lambda s: bool(s.case.token_positions().any()),
    "negative positions": lambda s: bool((s.case.token_positions() < 0).any()),
    "a norm": lambda s: bool(s.case.weights),
    "weights with an offset": lambda s: s.case.weight_offset != 0,
    "YaRN": lambda s: s.case.yarn[0] != 1,
    "8-bit floats": lambda s: s.case.memory.dtype in FLOAT8_DTYPES,
    "e4m3": lambda s: s.case.memory.dtype == FLOAT8_DTYPES[0],
    "16 bits": lambda s: s.case.inputs[0].dtype.itemsize == 2,
    "blocks of other sizes than usual": lambda s: s.case.places[0].shape[1] != BLOCK_SIZE,
    "blocks of one slot": lambda s: s.case.places[0].shape[1] == 1,
    "caches of two arrangements": lambda s: s.case.places[0].strides != s.case.places[1].strides,
    "heads of a block apart (HND)": lambda s: s.case.places[0].strides[2] > s.case.places[0].strides[1],
    "gaps between blocks": lambda s: s.case.places[0].strides[0] != math.prod(s.case.places[0].shape[1:]),
    "wider heads of v": lambda s: s.case.places[0].shape[3] != s.case.places[1].shape[3],
    "scales beyond the largest number": lambda s: max(s.case.scales) < 2**-10,
}  # fmt: skip
"""What a call can have, in words."""
EXTENTS: calls.Extents = {"tokens": lambda s: s.case.tokens}


@dataclass(frozen=True, eq=False)
class Stored:
    """A part of the results of a call, beside the definition: ``what`` is ``"q"``, ``"stored k"`` or ``"stored v"``."""

    law: str
    what: str
    found: Comparison
    written: Written

    @property
    def case(self) -> CacheCase:
        return self.found.case  # type: ignore[return-value]

    @property
    def wrong(self) -> np.ndarray:
        return self.found.excess > 1


@dataclass(frozen=True)
class Watched(CacheSubject):
    """A subject that keeps what it wrote."""

    kept: list[tuple[CacheCase, Written]] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, case: CacheCase, memory: torch.Tensor | None = None) -> Written:
        written = super().__call__(case, memory)
        kept = written if memory is None else replace(written, memory=written.memory.clone())  # others write it again
        self.kept.append((case, kept))
        return written


def watch(law, subject: CacheSubject, sizes) -> Iterator[Stored]:
    """Yield the parts of the results of the calls that a law makes, up to an exception."""
    watched = Watched(**{f.name: getattr(subject, f.name) for f in fields(subject)})
    try:
        for _ in law.compare(watched, sizes):
            pass
    except Exception:  # the law's result says what was raised
        pass
    if subject.convention.turns_cached and law.name == "scales_apart":
        return  # keys that lie in a cache are no values of the scales that this law exchanges
    for case, written in watched.kept:
        usual = all(bool(torch.isfinite(x).all()) for x in case.inputs)
        if usual and len(case.memory) <= MOST_ELEMENTS:
            for found in against_truth(subject, case, written):
                yield Stored(law.name, found.what, found, written)


def cache_screen(
    declaration: Declaration,
    subject: Callable[[Declaration], CacheSubject],
    results: Sequence[Result],
    target: str = "",
) -> Screen | None:
    """Return what a wrong operator does; the arguments are those of `ropelab.conformance.screen.screen`."""
    broken = {result.law: result for result in results if result.failed}
    if not broken:
        return None
    first = next(iter(broken.values()))
    end = time.thread_time() + SECONDS
    seen: list[Stored] = []
    noted = {result.law for result in results if result.status == "note"}
    for law in sorted(declaration.laws, key=lambda law: law.name not in broken):
        if law.name not in noted | {"token_counts"} and (law.name in broken or time.thread_time() < end):
            seen += watch(law, subject(declaration), declaration.sizes)
    shown = Screen(
        law_in_words(first), smallest=message(first), calls=tuple(calls.lines(seen, CIRCUMSTANCES, EXTENTS)),
        repro=_repro(subject(declaration), first, declaration, target),
    )  # fmt: skip
    wrong = [one for one in seen if one.wrong.any()]
    beside = (one for one in seen if one.law in broken and any(_slots(subject(declaration), one)))
    one = wrong[0] if wrong else next(beside, None)
    if one is None:
        return shown
    table = [*_slots(subject(declaration), one), *_positions(subject(declaration), one)]
    said = f"below, a call of the law {one.law}, {called(one.case)}, layout {subject(declaration).layout}"
    said += f": {pattern(one.found, one.case.rotary_dim)}" if wrong else ""
    return replace(shown, elements=said, positions=tuple(table))


def _rows(subject: CacheSubject, case: CacheCase, which: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return what the row of each token should be in a result of a dtype, and its bound: ``[T, H, D]``."""
    return subject.stored(case, which, *subject.part(case, which), dtype)


def _slots(subject: CacheSubject, one: Stored) -> Iterator[str]:
    """Yield the slots that hold another row than they should: the token that belongs there, and the one found."""
    case, kind = one.case, subject.convention
    which = {"k": 1, "v": 2}.get(one.what.split(" ")[1] if one.what.startswith("stored") else "", 0)
    if not which or isinstance(kind, BlockScales) or not kind.addressed:
        return
    place = case.places[which - 1]
    at = place.at(np.arange(place.shape[0] * place.shape[1]))
    now, before = numbers(one.written.memory)[at], numbers(case.memory)[at]
    value, bound = _rows(subject, case, which, case.memory.dtype)
    with np.errstate(invalid="ignore"):
        fits = (abs(now[:, None] - value) <= 2 * bound).all((2, 3))
    unchanged = ((now == before) | (np.isnan(now) & np.isnan(before))).all((1, 2))
    tokens = {int(slot): token for token, slot in enumerate(case.every_slot) if slot >= 0}
    told = []
    for slot, row in enumerate(now):
        token = tokens.get(slot)
        if unchanged[slot] if token is None else fits[slot, token]:
            continue
        hits = np.flatnonzero(fits[slot])
        found = f"token {hits[0]}" if len(hits) else _nearly(row, value, numbers(case.inputs[which][0]))
        found = found or ("what was there before" if unchanged[slot] else "")
        if found or token is None:
            right = "what was there before" if token is None else f"token {token}"
            told.append(f"  slot {slot} (block {slot // place.shape[1]}): {found or 'another row'}; right: {right}")
    if told:
        yield f"the token found in the slots of {one.what[7:]}, {place.shape[1]} slots in a block:"
        yield from islice(told, MOST_SLOTS)
        if len(told) > MOST_SLOTS:
            yield f"  and {len(told) - MOST_SLOTS} more slots"


def _nearly(row: np.ndarray, rows: np.ndarray, given: np.ndarray) -> str:
    """Return the token whose row a row is a multiple of, or is as the token came in; empty if there is none."""
    for words, some in (("", rows), (", as it came in", given)):
        if some.shape[1:] != row.shape or not np.isfinite(row).all() or not row.any():
            continue
        times = (some * row).sum((1, 2)) / (some * some).sum((1, 2))
        off = np.abs(row - times[:, None, None] * some).max((1, 2)) / np.abs(row).max()
        token = int(np.nanargmin(off))
        if off[token] < 2**-4:  # an 8-bit float has an error of at most 2^-4 of its value
            return f"token {token}{words}" + (f" times {times[token]:.3g}" if abs(times[token] - 1) > 2**-5 else "")
    return ""


def _positions(subject: CacheSubject, one: Stored) -> Iterator[str]:
    """Yield the position that the row of each token belongs to, for q and for the stored k."""
    case, kind = one.case, subject.convention
    if isinstance(kind, BlockScales) or not ("q" in one.what.split() or "k" in one.what.split()):
        return
    right = case.token_positions()[0].numpy()
    which = int("k" in one.what.split())
    rows, at = (
        one.found.actual,
        np.flatnonzero(case.live.numpy()) if len(one.found.actual) < case.tokens else slice(None),
    )
    dtype = case.memory.dtype if which else one.written.q.dtype  # type: ignore[union-attr]
    read: list[int | None] = [None] * len(rows)
    for p in sorted(range(-ROWS + 1 if kind.signed else 0, ROWS), key=abs, reverse=True):
        value, bound = _rows(subject, replace(case, positions=torch.full((case.tokens,), p)), which, dtype)
        with np.errstate(invalid="ignore"):
            fits = (abs(rows - value[at]) <= 2 * bound[at]).all((1, 2))
        read = [p if fit and now != e else now for now, fit, e in zip(read, fits, right[at], strict=True)]
    if any(p is not None and p != e for p, e in zip(read, right[at], strict=True)):
        cells = [
            ["?" if p is None else str(p) for p in read],
            ["none" if p == NO_POSITION else str(p) for p in right[at]],
        ]
        cells[0] = [cell + "!" * (cell != e) for cell, e in zip(*cells, strict=True)]
        width = max(map(len, (*cells[0], *cells[1]))) + 1
        yield f"positions that the rows of {one.what} belong to:"
        for cell, who in zip(cells[::-1], ("expected", "measured"), strict=True):
            yield f"  {''.join(one.rjust(width) for one in cell[:MOST_TOKENS])}   {who}"


def _repro(subject: CacheSubject, result: Result, declaration: Declaration, target: str) -> str:
    """Return the script of the smallest call that breaks a law."""
    if result.counterexample is None or not target:
        return ""
    case: Any = result.counterexample.case
    arguments = subject.convention.translate(subject, case, case.memory.clone())
    said = f"# {message(result)}"
    return script(target, declaration.arrays, None, arguments, lambda inputs: ["print(y)", said])
