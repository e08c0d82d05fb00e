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
from ropelab.conformance.alone import wrong_alone
from ropelab.conformance.bounds import EXACT
from ropelab.conformance.case import Sizes
from ropelab.conformance.declared import Declaration
from ropelab.conformance.declared_otherwise import right_with
from ropelab.conformance.law import Comparison, Law
from ropelab.conformance.measure import Ask, Maps, Reader, Term, angle, elements, form, measure, rows
from ropelab.conformance.reading import readings
from ropelab.conformance.repro import literal, script
from ropelab.conformance.result import Result
from ropelab.conformance.shrink import Call, smallest
from ropelab.conformance.subject import Subject
from ropelab.conformance.watched import Seen, watch
from ropelab.conformance.where import pattern
from ropelab.conformance.words import called, unequal
from ropelab.layout.seq_format import from_bshd

SLOW = ("compile", "huge", "token_counts", "large_positions")
"""Laws that are watched only if all others hold."""
SECONDS = 4.0
"""The CPU time of this thread after which no other call is watched; those of a usual function take less than 1 s."""
MOST_TOKENS, MOST_ROWS, MOST_PAIRS, MOST_SEQUENCES, MOST_READ = 10, 4, 4, 2, 8
"""How much of a call is shown."""
EARLIER = "right: the result depends on earlier calls"
"""What is said of a wrong call that is right in a process without earlier calls."""


@dataclass(frozen=True)
class Screen:
    """What a wrong function does.

    Attributes:
        law: the first law that does not hold, in a sentence.
        smallest: the smallest wrong call.
        reading: the common mistakes that account for every wrong element of every call, if some do.
        calls: which calls are wrong.
        elements: which elements of the measured call are wrong.
        positions: the positions that its rotation belongs to, expected and measured, or the axes of its pairs; of
            an operator that writes a cache also the token that is found in each slot.
        matrices: its matrices, with angle and length where they are rotations; none if ``positions`` account for all.
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
    told = calls.lines(seen)
    said = told + remark * calls.equal_differ(seen)
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
        if target and (said[len(told) :] or any(line.endswith(" calls") and " all " not in line for line in told)):
            shown = replace(shown, calls=(*shown.calls, *_apart(fresh, call)))
        made = call.law()
        at = next(n for n, one in enumerate(watch(made, fresh(), call.sizes)) if one.what == least.what)
        ask_least = _asking(made, fresh, call.sizes, at)
    shrunk = broken.get(law.name, first_law) if found is None else None  # in its extents alone
    known = shrunk is not None and shrunk.law == law.name and shrunk.counterexample is not None
    shown = replace(shown, smallest=message(shrunk) if shrunk is not None and known else _smallest(least))
    if first.defined:
        after = f"# as the first call of a process it is {EARLIER}\n" if EARLIER in "".join(shown.calls) else ""
        repro = _repro(fresh(), least, declaration, target)
        shown = replace(shown, repro=repro and repro + after)
    maps = measure(first, ask)
    if first.defined:
        shown = replace(shown, reading=tuple(readings(seen, maps)))
    alone = False
    if maps is not None:
        here = ((n, one) for of, n, one in watched if of is law and one.case is first.case and one.wrong.any())
        like = (first.gradient, first.defined)
        same = {one.what: (n, one) for n, one in here if (one.gradient, one.defined) == like and one.what != first.what}
        others = [measure(one, _asking(law, fresh, declaration.sizes, n)) for n, one in same.values()]
        positions, matrices = _places([maps, *filter(None, others)])
        shown = replace(shown, positions=tuple(positions), matrices=tuple(matrices))
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


def _apart(fresh: Callable[[], Subject], call: Call) -> Iterator[str]:
    """Yield what becomes of the smallest call in a new process, where earlier calls left nothing."""
    if any(seen.wrong.any() for seen in watch(call.law(), fresh(), call.sizes)):
        wrong = wrong_alone(fresh(), call)
        if wrong is not None:
            yield f"as the first call of a process, the smallest call is {'wrong, too' if wrong else EARLIER}"


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
    call = f"{called(seen.case)}, layout {seen.subject.layout}"
    return f"below, a call of the law {seen.law}, {call}: {pattern(found, seen.case.rotary_dim)}"


def _smallest(seen: Seen) -> str:
    place = next(elements(seen))
    numbers = unequal(float(seen.actual[place]), float(seen.right[place]))
    where = "{}[{}]".format(seen.what, ", ".join(map(str, place)))
    return f"smallest call: {called(seen.case)}: {where} is {numbers[0]} in place of {numbers[1]}"


def _places(maps: list[Maps]) -> tuple[list[str], list[str]]:
    """Return the axes or the positions of the pairs that rotate, and matrices if these do not account for all."""
    if told := _pair_axes(maps):
        return told, []
    wrong = np.flatnonzero(np.logical_or.reduce([one.wrong.any((1, 2, 3, 4, 5)) for one in maps])).tolist()
    tables: dict[tuple[str, ...], list[int]] = {}
    explained, readers = 0 < len(wrong) <= MOST_READ, [Reader(one) for one in maps]
    for sequence in wrong[:MOST_READ]:
        table, known = _positions(readers, sequence)
        tables.setdefault(table, []).append(sequence)
        explained &= known
    found = []
    for (head, *below), sequences in islice(tables.items(), MOST_SEQUENCES):
        found += [f"{head}, sequence{'s' * (len(sequences) > 1)} {_listed(sequences)}:" if below else head, *below]
    shown = [sequence for sequences in islice(tables.values(), MOST_SEQUENCES) for sequence in sequences]
    return found, [] if explained else list(_matrices(maps[0], shown))


def _pair_axes(maps: list[Maps]) -> list[str]:
    """Return the axis of positions that each wrong pair reads; empty unless another axis accounts for all of them."""
    case = maps[0].seen.case
    found: dict[tuple[int, int], list[str]] = {}
    if case.axes is None or case.positions is None:
        return []
    along = case.positions.cpu().numpy().astype(EXACT)[..., maps[0].seen.tokens, None] / case.interpolation
    for one in maps:
        for pair in np.flatnonzero(one.wrong.any((0, 1, 2, 4, 5))).tolist():
            angles = one.seen.sign * along * one.seen.frequencies[pair]
            c, s = case.factor * np.cos(angles), case.factor * np.sin(angles)
            right = np.stack((c, -s, s, c), -1).reshape(*c.shape, 2, 2)
            near = abs(one.matrix[..., pair, :, :] - right) <= one.error[..., pair, :, :]
            axes = [axis for axis, fits in enumerate(near) if fits.all() and one.alone[..., pair].all()]
            if not axes:
                return []
            found.setdefault((pair, axes[0]), []).append(one.seen.what)
    return [
        f"pair {pair} of {', '.join(whats)}: expected axis {case.axes[pair]}, measured axis {axis}"
        for (pair, axis), whats in found.items()
    ]


def _positions(readers: list[Reader], sequence: int) -> tuple[tuple[str, ...], bool]:
    """Return a heading, a line for the expected positions of a sequence and one for each distinct row of measured ones.

    Also return whether these positions account for each wrong pair of the sequence.
    """
    seen = readers[0].maps.seen
    wrong = np.logical_or.reduce([reader.maps.wrong[sequence].any((1, 2, 3, 4)) for reader in readers])
    first, count = int(np.flatnonzero(wrong)[0]), seen.given.shape[1]
    start = max(0, min(first - 1, count - MOST_TOKENS))
    tokens = range(start, min(start + MOST_TOKENS, count))
    expected = tuple(readers[0].read((sequence, t, 0), right=True)["sin of y1"] for t in tokens)
    found: dict[tuple, list[str]] = {}
    known, whole = True, seen.case.axes is None
    for reader in readers:
        one, read = reader.maps, rows(reader, sequence, tokens)
        known &= _accounted(one, sequence, start, read, expected)
        for row, at in read.items():
            for entries, heads in _by_entries(at).items():
                of = one.matrix.shape[2]
                which = "" if len(heads) == of else f" of head{'s' * (len(heads) > 1)} {_listed(heads)} of {of}"
                what = one.seen.what if len(readers) > 1 else ""
                whole &= not entries
                found.setdefault(row, []).append(f"{what}{entries}{which}".strip() or "measured")
    other = {p for row in found for p, e in zip(row, expected, strict=True) if p != e}
    if whole and other == {(None,)}:
        return ("no position has the angles of a token that is wrong",), False
    cells = {"expected": [_cell(p) for p in expected]}
    for row, who in islice(found.items(), MOST_ROWS):
        cells["; ".join(who)] = [
            _cell(p) + "!" * (None not in p and p != e) for p, e in zip(row, expected, strict=True)
        ]
    width = max(len(cell) for row in cells.values() for cell in row) + 1
    table = [f"  {''.join(cell.rjust(width) for cell in row)}   {who}" for who, row in cells.items()]
    if len(found) > MOST_ROWS:
        table.append(f"  and {len(found) - MOST_ROWS} more rows")
    of_tokens = f" of tokens {start} to {tokens[-1]}" if len(tokens) < count else ""
    return (f"positions that the angles belong to{of_tokens}", *table), known


def _accounted(maps: Maps, sequence: int, start: int, read: dict, expected: tuple) -> bool:
    """Return whether each wrong head of a token has the angles of known positions, and no length of its own."""
    known: dict[tuple[int, int], list[tuple]] = {}
    for row, at in read.items():
        for head, _ in at:
            for number, position in enumerate(row):
                known.setdefault((start + number, head), []).append(position)
    off = abs(maps.length[sequence] - maps.seen.case.factor) > 4 * maps.error[sequence].max((-1, -2))
    for token, head in np.argwhere(maps.wrong[sequence].any((-1, -2, -3))).tolist():
        positions = known.get((token, head), [(None,)])
        if any(None in p for p in positions) or all(p == expected[token - start] for p in positions):
            return False
        if len({*positions}) == 1 and off[token, head].any():
            return False
    return True


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


def _matrices(maps: Maps, sequences: list[int]) -> Iterator[str]:
    """Yield the matrices of some pairs of a wrong head of a token in one of some sequences, with the right ones."""
    seen, wrong = maps.seen, np.asarray(maps.wrong.any((-1, -2)))
    places = np.argwhere(wrong.any(-1))
    places = places[np.isin(places[:, 0], sequences)]
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
    apart = abs(np.array([m[0, 0] - m[1, 1], m[0, 1] + m[1, 0]])).max()
    if not apart <= 4 * float(maps.error[place].max()):
        return f"  pair {place[-1]:<3}   {entries}   no rotation"
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
