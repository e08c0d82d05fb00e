"""Show what a wrong function does: which calls are wrong, and what is measured in one of them, beside what is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ropelab.command.summary import in_words
from ropelab.conformance import calls
from ropelab.conformance.case import Sizes
from ropelab.conformance.declared import Declaration
from ropelab.conformance.declared_otherwise import right_with
from ropelab.conformance.law import Comparison, Law
from ropelab.conformance.measure import Ask, Maps, Reader, Term, angle, elements, form, measure, rows
from ropelab.conformance.reading import readings
from ropelab.conformance.repro import literal, script
from ropelab.conformance.result import Result
from ropelab.conformance.shrink import smallest
from ropelab.conformance.subject import Subject
from ropelab.conformance.watched import Seen, watch
from ropelab.conformance.where import pattern
from ropelab.conformance.words import called, unequal
from ropelab.layout.seq_format import from_bshd

SLOW = ("compile", "huge", "token_counts", "large_positions")
"""Laws that are watched only if all others hold."""
SECONDS = 4.0
"""The CPU time of this thread after which no other call is watched; those of a usual function take less than 1 s."""
MOST_TOKENS, MOST_ROWS, MOST_PAIRS = 10, 6, 4
"""How much of a call is shown."""


@dataclass(frozen=True)
class Screen:
    """What a wrong function does.

    Attributes:
        law: the first law that does not hold, in a sentence.
        smallest: the smallest wrong call.
        reading: the common mistakes that account for every wrong element of every call, if some do.
        calls: which calls are wrong.
        elements: which elements of the measured call are wrong.
        positions: the positions that its rotation belongs to, expected and measured; of an operator that writes a cache
            also the token that is found in each slot.
        matrices: its matrices, with angle and length.
        form: the linear form of a wrong element that depends on others than its pair.
        declared: the options with which the function is right.
        repro: a script that makes the smallest call.
    """

    law: str
    smallest: str = ""
    reading: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    elements: str = ""
    positions: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    form: str = ""
    declared: str = ""
    repro: str = ""

    def __str__(self) -> str:
        return in_words(vars(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the screen for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def screen(
    declaration: Declaration,
    subject: Callable[[Declaration], Subject],
    results: Sequence[Result],
    target: str = "",
) -> Screen | None:
    """Return what a wrong function does; None for a function that broke no law.

    Args:
        declaration: the claims about the function.
        subject: returns the function as the subject of a declaration, without state of earlier calls.
        results: the result of each law.
        target: ``"package.module:function"``, for the script.
    """
    broken = {result.law: result for result in results if result.failed}
    if not broken:
        return None
    first_law = min(broken.values(), key=lambda result: result.law == "feature_columns")

    def fresh() -> Subject:
        return subject(declaration)

    noted = {result.law for result in results if result.status == "note"}
    watched = list(_watched(declaration, fresh, broken.keys(), noted))
    seen = [one for _, _, one in watched if one.defined]
    remark = ["an equal call is right elsewhere: the result depends on earlier calls or on a setting of torch"]
    said = calls.lines(seen) + remark * calls.equal_differ(seen)
    shown = Screen(law_in_words(first_law), calls=tuple(said))
    wrong = [one for one in watched if one[2].defined and one[2].wrong.any()]
    wrong = wrong or [one for one in watched if one[0].name in broken and one[2].wrong.any()]
    if not wrong:
        return shown if first_law.status == "error" else replace(shown, smallest=message(first_law))
    law, number, first = min(wrong, key=lambda one: (one[2].gradient, one[2].case.inputs[0].dtype.itemsize == 2))
    least, ask_least = first, ask = first, _asking(law, fresh, declaration.sizes, number)
    shown = replace(shown, elements=_elements(first), law=law_in_words(broken.get(law.name, first_law)))
    found = smallest(fresh, declaration.sizes, first) if first.defined else None
    if found is not None:
        call, least = found
        made = call.law()
        at = next(n for n, one in enumerate(watch(made, fresh(), call.sizes)) if one.what == least.what)
        ask_least = _asking(made, fresh, call.sizes, at)
    shrunk = broken.get(law.name, first_law) if found is None else None  # in its extents alone
    known = shrunk is not None and shrunk.law == law.name and shrunk.counterexample is not None
    shown = replace(shown, smallest=message(shrunk) if shrunk is not None and known else _smallest(least))
    if first.defined:
        shown = replace(shown, repro=_repro(fresh(), least, declaration, target))
    maps = measure(first, ask)
    if first.defined:
        shown = replace(shown, reading=tuple(readings(seen, maps)))
    alone = False
    if maps is not None:
        here = ((n, one) for of, n, one in watched if of is law and one.case is first.case and one.wrong.any())
        like = (first.gradient, first.defined)
        same = {one.what: (n, one) for n, one in here if (one.gradient, one.defined) == like and one.what != first.what}
        others = [measure(one, _asking(law, fresh, declaration.sizes, n)) for n, one in same.values()]
        shown = replace(
            shown, positions=tuple(_positions([maps, *filter(None, others)])), matrices=tuple(_matrices(maps))
        )
        alone = bool(maps.wrong.any() and maps.alone[maps.wrong.any((-1, -2))].all())
    if not alone:
        shown = replace(shown, form=_form(least, ask_least))
    if set(broken) <= set(SLOW):
        return shown
    laws = [law for law in declaration.laws if law.name == "definition" or law.name in broken]
    return replace(shown, declared=right_with(declaration, sorted(laws, key=lambda law: law.name in SLOW), subject))


def _watched(declaration: Declaration, fresh: Callable[[], Subject], broken, noted) -> Iterator[tuple[Law, int, Seen]]:
    """Yield the law, the number within the law and what was seen, of the broken laws first."""
    end = time.thread_time() + SECONDS
    skipped = noted if set(broken) <= set(SLOW) else noted | set(SLOW)
    for law in sorted(declaration.laws, key=lambda law: law.name not in broken):
        if law.name not in skipped and (law.name in broken or law.name not in SLOW):
            for number, seen in enumerate(watch(law, fresh(), declaration.sizes)):
                yield law, number, seen
                if time.thread_time() > end:
                    return


def _asking(law: Law, fresh: Callable[[], Subject], sizes: Sizes, number: int) -> Ask:
    return lambda draw: next(islice(watch(law, fresh(), sizes, draw), number, None), None)


# --------------------------------------------------------------------------------------------------------------- words


def law_in_words(result: Result) -> str:
    return f"{result.law}: {result.statement}"


def message(result: Result) -> str:
    """Return what a law says of a function of which no element is seen to be wrong."""
    if result.counterexample is None:
        return result.message
    found = result.counterexample
    numbers = unequal(found.actual, found.expected)
    where = ", ".join(f"{axis} {index}" for axis, index in found.where.items())
    return f"smallest call: {called(found.case)}: {found.what} at {where} is {numbers[0]} in place of {numbers[1]}"


def _elements(seen: Seen) -> str:
    actual = np.where(seen.wrong, seen.actual, seen.right)  # an element within its bound counts as right
    found = Comparison(seen.what, actual, seen.right, np.zeros(1), seen.case, tokens=seen.tokens.tolist())
    return f"below, a call of the law {seen.law}, {list(seen.given.shape)}: {pattern(found, seen.case.rotary_dim)}"


def _smallest(seen: Seen) -> str:
    place = next(elements(seen))
    numbers = unequal(float(seen.actual[place]), float(seen.right[place]))
    where = "{}[{}]".format(seen.what, ", ".join(map(str, place)))
    return f"smallest call: {called(seen.case)}: {where} is {numbers[0]} in place of {numbers[1]}"


def _positions(maps: list[Maps]) -> Iterator[str]:
    """Yield a line for the expected positions of a sequence, and one for each distinct row of measured ones."""
    if not any(one.wrong.any() for one in maps):  # no wrong element belongs to a pair that rotates
        return
    seen = maps[0].seen
    sequence = int(np.flatnonzero(seen.wrong.any((1, 2, 3)))[0])
    first = int(np.flatnonzero(seen.wrong[sequence].any((1, 2)))[0])
    start = max(0, min(first - 1, seen.given.shape[1] - MOST_TOKENS))
    tokens = range(start, min(start + MOST_TOKENS, seen.given.shape[1]))
    expected = [Reader(maps[0]).read((sequence, t, 0), right=True)["sin of y1"] for t in tokens]
    found: dict[tuple, list[str]] = {}
    for one in maps:
        for row, at in rows(Reader(one), sequence, tokens).items():
            for entries, heads in _by_entries(at).items():
                count = one.matrix.shape[2]
                which = "" if len(heads) == count else f" of head{'s' * (len(heads) > 1)} {_listed(heads)} of {count}"
                what = one.seen.what if len(maps) > 1 else ""
                found.setdefault(row, []).append(f"{what}{entries}{which}".strip() or "measured")
    if all(p == (None,) * len(p) for row in found for p in row):
        yield "no position has the angles of any token that is wrong"
        return
    cells = {"expected": [_cell(p) for p in expected]}
    for row, who in islice(found.items(), MOST_ROWS):
        cells["; ".join(who)] = [
            _cell(p) + "!" * (None not in p and p != e) for p, e in zip(row, expected, strict=True)
        ]
    of = f"sequence {sequence}" + (f", tokens {start} to {tokens[-1]}" if len(tokens) < seen.given.shape[1] else "")
    yield f"positions that the angles belong to, {of}:"
    width = max(len(cell) for row in cells.values() for cell in row) + 1
    yield from (f"  {''.join(cell.rjust(width) for cell in row)}   {who}" for who, row in cells.items())
    if len(found) > MOST_ROWS:
        yield f"  and {len(found) - MOST_ROWS} more rows"


def _by_entries(at: list[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the heads for the entries that they have in a row, in words."""
    by_head: dict[int, list[str]] = {}
    for head, entry in at:
        by_head.setdefault(head, []).append(entry)
    found: dict[str, list[int]] = {}
    for head, entries in by_head.items():
        kinds = {kind: [e for e in entries if e.startswith(kind)] for kind in ("cos", "sin")}
        told = [kind if len(some) == 2 else some[0] for kind, some in kinds.items() if some]
        found.setdefault("" if len(entries) == 4 else f" ({', '.join(told)})", []).append(head)
    return found


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + ", ..." * (len(numbers) > 6)


def _cell(position: tuple) -> str:
    return "/".join("?" if p is None else f"{p:.6g}" for p in position)


def _matrices(maps: Maps) -> Iterator[str]:
    """Yield the matrices of some pairs of a wrong head of a token, the wrong pairs first, with the right ones."""
    seen, wrong = maps.seen, np.asarray(maps.wrong.any((-1, -2)))
    places = np.argwhere(wrong.any(-1))
    if not len(places):
        return
    positions = np.abs(seen.positions[..., 0])[places[:, 0], places[:, 1]]
    b, s, h = places[int(np.argmin(np.where(positions == 0, np.inf, positions)))].tolist()
    bad = np.flatnonzero(wrong[b, s, h] & maps.alone[b, s, h]).tolist()
    if not bad:
        return
    told = [_matrix(maps, (b, s, h, pair)) for pair in dict.fromkeys([*bad[: MOST_PAIRS - 1], bad[-1]])]
    head = f"matrices of {seen.what}, sequence {b}, token {seen.tokens[s]}, head {h}"
    yield f"{head}: measured, right, angle (right), length (right):"
    yield from told


def _matrix(maps: Maps, place: tuple[int, int, int, int]) -> str:
    m, r = (x[place].astype(float) for x in (maps.matrix, maps.right))
    entries = "   ".join(" ".join(f"{value:+.4f}" for value in x.flatten()) for x in (m, r))
    lengths = [float(np.sqrt(abs(np.linalg.det(x)))) for x in (m, r)]
    turn = f"{angle(m):+.4f} ({angle(r):+.4f})   {lengths[0]:.4f} ({lengths[1]:.4f})"
    return f"  pair {place[-1]:<3}   {entries}   {turn}"


def _form(seen: Seen, ask: Ask) -> str:
    """Return the linear form of a wrong element, measured and right; empty if it has none."""
    place = next(elements(seen))
    found, right = form(seen, ask, place), form(seen, ask, place, "right")
    if found is None or right is None:
        return ""
    measured, expected = _sum(found), _sum(right)
    name = f"{seen.what}[{', '.join(map(str, place))}]"
    return f"{name} = {measured}; right: {expected}" if measured != expected else ""


def _sum(terms: list[Term]) -> str:
    said = " ".join(f"{factor:+.4f} {name}{list(place) if place else ''}".strip() for factor, name, place in terms[:4])
    return (said or "0") + (f" and {len(terms) - 4} more" if len(terms) > 4 else "")


def _repro(subject: Subject, seen: Seen, declaration: Declaration, target: str) -> str:
    """Return the script of a call."""
    if not target:
        return ""
    case = seen.case
    if seen.gradient:
        case = replace(case, inputs=tuple(x.detach().requires_grad_() for x in case.inputs))
    place = next(elements(seen))
    numbers = unequal(float(seen.actual[place]), float(seen.right[place]))
    said = (
        f"# {seen.what}{list(place)} of [sequence, token, head, feature] is {numbers[0]}, and should be {numbers[1]}."
    )

    def after(inputs: list[str]) -> list[str]:
        if not seen.gradient:
            return [f"print({', '.join(inputs) if subject.in_place else 'y'})", said]
        native = (literal(from_bshd(g, subject.format(case)).contiguous()) for g in case.cotangents)
        return [
            "ys = y if isinstance(y, (tuple, list)) else (y,)", f"gs = [{', '.join(native)}]",
            "torch.autograd.backward(ys[: len(gs)], [g.reshape(y.shape) for y, g in zip(ys, gs)])",
            f"print({', '.join(f'{name}.grad' for name in inputs)})", said,
        ]  # fmt: skip

    return script(target, declaration.arrays, subject.convention.making(subject, case), subject.arguments(case), after)
