"""Search for the shortest description that reproduces all answers of a function."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, combinations, product

import numpy as np

from ropelab.conformance.identify.deviation import Deviation, always, effective
from ropelab.conformance.identify.evidence import Answer, Evidence, OutOfTime
from ropelab.conformance.identify.measured import Measured, structure
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.questions import FORWARD, GRADIENT, Question
from ropelab.conformance.identify.read_off import orders
from ropelab.conformance.identify.row_rules import row_rules
from ropelab.conformance.identify.scopes import in_results, pairs_of, scopes
from ropelab.conformance.identify.stride_rules import stride_rules
from ropelab.conformance.identify.vocabulary import expressible, vocabulary
from ropelab.conformance.identify.wiring import wiring

MOST = 4
"""The largest number of deviations in a description."""
BEAM = 3
LEAST = 24
"""A deviation has to explain at least the 24th part of the wrong elements of the simplest wrong answer."""

LONGEST = ("the gradient for tokens from position 0 on", "tokens from position 0 on", "a longer sequence")
"""Questions whose tokens have the positions 0, 1, 2, ..., the longest last."""
TOGETHER = ("sign", "reflection", "lost term", "tables swapped", "order of frequencies", "order", "row",
            "rounding of frequency", "rounding of table", "rounding of product", "rounding of output")  # fmt: skip
"""Kinds of deviations without parameters that occur together with another deviation of the same elements."""
COARSE = ("sign", "reflection", "tables swapped", "order of frequencies", "order")
"""Kinds without parameters that occur together with other kinds without parameters."""
SLOW = 0.02
"""A call that takes more seconds is too slow to be asked for every element of a token."""

Description = tuple[Deviation, ...]


def search(evidence: Evidence, refuted: Description = ()) -> Iterator[Description]:
    """Yield better and better descriptions; a description that reproduces all answers comes last.

    The search begins with other restrictions of ``refuted``, the description that fresh answers refuted.

    A measured table of all products of a token is the longest description, so it is tried when all other descriptions
    failed. The search for other descriptions leaves a quarter of the time for the table.

    Raises:
        OutOfTime: the deadline of the evidence passed.
    """
    wrong = evidence.wrong(())
    if not wrong:
        yield ()
        return
    failing = {id(answer) for answer, _ in wrong}
    evidence.answers.sort(key=lambda answer: id(answer) not in failing)  # a useless candidate is left out early
    if len(refuted) == 1:
        for scope in scopes(wrong, evidence.answers):
            again = (replace(refuted[0], scope=scope),)
            if expressible(evidence.subject.convention, scope.words) and evidence.left(again, 0) == 0:
                yield again
                return
    deadline, started = evidence.deadline, time.thread_time()
    evidence.deadline = started + 3 / 4 * (deadline - started)
    best: Description = ()
    try:
        inputs = {answer.name for answer in evidence.answers}
        rules = [*row_rules(evidence.subject, wrong, evidence.answers), *stride_rules(evidence.subject, wrong, inputs)]
        measured = [*rules, *_measured(evidence, wrong), *orders(evidence.subject, wrong)]
        short = [d for d in measured if "frequencies" not in d.parameters]  # a list of frequencies is long
        for some in (short, measured)[: 1 + (len(short) < len(measured))]:
            for description in _search(evidence, wrong, some):
                best = description
                yield description
            if evidence.left(best, 0) == 0:
                return
    except OutOfTime:
        pass
    finally:
        evidence.deadline = deadline
    wired = list(_wired(evidence, wrong))
    if wired:
        yield from _search(evidence, wrong, wired)


def _search(
    evidence: Evidence, wrong: list[tuple[Answer, np.ndarray]], measured: list[Deviation]
) -> Iterator[Description]:
    beam: list[tuple[float, Description]] = [(evidence.left(()), ())]
    best = beam[0][0]
    yield ()
    for start in _starts(measured):
        left = evidence.left(start, best)
        if left == 0:
            yield _shortest(evidence, start)
            return
        if left < best or _structural(start):  # a structure may explain nothing alone
            beam.append((left, start))
    beam = _pruned(beam)
    tried = False  # two deviations together; numbers are left to explain after exceptions
    for depth in range(MOST):
        best_so_far = beam[0][1]
        only_exceptions = bool(best_so_far) and all(deviation.kind == "exception" for deviation in best_so_far)
        if depth and not only_exceptions and not tried:
            tried = True
            for start in chain(_apart(evidence, wrong, measured), _together(evidence, wrong, measured)):
                left = evidence.left(start, best)
                if left == 0:
                    yield _shortest(evidence, start)
                    return
                if left < best:
                    beam.append((left, start))
            beam = _pruned(beam)
        found: dict[tuple[str, ...], tuple[float, Description]] = {}
        for left, description in beam:
            for longer in _longer(evidence, description, measured):
                score = evidence.left(longer, left)
                if score < left:
                    found.setdefault(tuple(sorted(map(str, longer))), (score, longer))
                if score == 0:
                    yield _shortest(evidence, longer)
                    return
        if not found and depth:
            return
        beam = _pruned(found.values()) if found else beam
        if beam[0][0] < best:
            best = beam[0][0]
            yield beam[0][1]


def _apart(
    evidence: Evidence, wrong: list[tuple[Answer, np.ndarray]], measured: list[Deviation]
) -> Iterator[Description]:
    """Yield descriptions of single inputs that reproduce all answers for these, together.

    The answers for one input are fewer, and no deviation of the other input is tried on them.
    """
    found: Description = ()
    if len({answer.name for answer in evidence.answers}) == 1:
        return
    for name in dict.fromkeys(answer.name for answer, _ in wrong):
        own = evidence.of(name)
        ours = [d for d in measured if d.scope.name in ("", name)]
        *_, last = _search(own, [w for w in wrong if w[0].name == name], ours)
        if own.left(last, 0) == 0:
            found += tuple(replace(d, scope=replace(d.scope, name=name)) for d in last)
    if found:
        yield found


def _pruned(found: Iterable[tuple[float, Description]]) -> list[tuple[float, Description]]:
    return sorted(found, key=lambda scored: (round(scored[0], 6), len(scored[1])))[:BEAM]


def _shortest(evidence: Evidence, description: Description) -> Description:
    """Return the description without deviations that it does not need; equal deviations of q and k become one."""
    for deviation in description:
        shorter = tuple(d for d in description if d is not deviation)
        if len(description) > 1 and evidence.left(shorter, 0) == 0:
            return _shortest(evidence, shorter)
        if deviation.scope.name:
            wide = replace(deviation, scope=replace(deviation.scope, name=""))
            alike = [d for d in shorter if str(replace(d, scope=replace(d.scope, name=""))) == str(wide)]
            shorter = tuple(d for d in shorter if d not in alike)
            if alike and evidence.left((*shorter, wide), 0) == 0:
                return _shortest(evidence, (*shorter, wide))
    return description


def _structural(deviations: Iterable[Deviation]) -> Description:
    return tuple(d for d in deviations if d.kind in ("layout", "wiring"))


def _starts(measured: list[Deviation]) -> Iterator[Description]:
    """Yield descriptions of measured deviations: the structure of each input with and without its first parameters."""
    structural = _structural(measured)
    if structural:
        yield structural
        yield from ((deviation,) for deviation in structural if len(structural) > 1)
    kinds = [dict.fromkeys(d.kind for d in measured if d.kind not in ("layout", "wiring"))]
    for kind in kinds[0]:
        of_kind = [d for d in measured if d.kind == kind]
        if len(of_kind) > 1 and len({d.scope.name for d in of_kind}) == len(of_kind):
            yield (*structural, *of_kind)


def _together(
    evidence: Evidence, wrong: list[tuple[Answer, np.ndarray]], measured: list[Deviation]
) -> Iterator[Description]:
    """Yield descriptions of two deviations of all inputs that explain most of the simplest wrong answer.

    Where an element has two faults, neither alone explains the element, and no search step by step finds them. At least
    one of the two is measured, or exchanges heads, features or tables.
    """
    structural = _structural(measured)
    others = [
        d for d in measured if d.kind not in ("layout", "wiring") and not {"rows", "strides"} & d.parameters.keys()
    ]
    known = (d for d in vocabulary() if expressible(evidence.subject.convention, d.words))
    alone = [d for d in known if d.kind in TOGETHER]
    coarse = [d for d in alone if d.kind in COARSE]
    pairs_of_two = [*combinations(others, 2), *product(others, alone), *product(coarse, alone)]
    probe = min(wrong, key=lambda w: _ease(w[0].question))[0]
    before = probe.wrong(evidence.subject, ()).mean()
    several = len({answer.name for answer in evidence.answers}) > 1
    for first, second in pairs_of_two:
        if first.kind == second.kind or (several and (first.scope.name or second.scope.name)):
            continue
        scope = replace(first.scope, name="")
        description = (*structural, *(replace(d, scope=scope) for d in (first, second)))
        evidence.in_time()
        used = effective(evidence.subject, probe.question, probe.which, description)
        if description[-1] in used and probe.wrong(evidence.subject, description).mean() <= before / 2:
            yield description
            if second.kind.startswith("rounding"):  # a gradient need not round what the result rounds
                confined = replace(scope, words="in the forward pass", asked=in_results)
                yield *description[:-1], replace(second, scope=confined)
    if structural:
        yield from ((*structural, d) for d in (*others, *alone))


def _longer(evidence: Evidence, description: Description, measured: list[Deviation]) -> Iterator[Description]:
    """Yield the description with one deviation more, in each scope that contains its wrong answers.

    Exceptions and wrong numbers have different causes, so that each kind has scopes of its own.
    """
    wrong = evidence.wrong(description)
    exceptions = [w for w in wrong if isinstance(w[0].values, str)]
    numbers = [w for w in wrong if not isinstance(w[0].values, str)]
    for some in (exceptions, numbers) if exceptions and numbers else (wrong,):
        yield from _longer_for(evidence, some, description, measured)


def _longer_for(
    evidence: Evidence, wrong: list[tuple[Answer, np.ndarray]], description: Description, measured: list[Deviation]
) -> Iterator[Description]:
    convention = evidence.subject.convention
    possible = [scope for scope in scopes(wrong, evidence.answers) if expressible(convention, scope.words)]
    known = (d for d in vocabulary() if expressible(convention, d.words))
    candidates = [*measured, *raised(wrong), *known]
    first = min(wrong, key=lambda w: _ease(w[0].question))[0] if wrong else None
    helps: dict[tuple, bool] = {}
    for scope in possible:
        named = [w for w in wrong if scope.name in ("", w[0].name)]
        probe = min(named, key=lambda w: _ease(w[0].question), default=(first, None))[0]
        before = None if probe is None else float(probe.wrong(evidence.subject, description).mean())
        for candidate in candidates:
            evidence.in_time()
            if candidate in description and candidate.scope == scope:
                continue
            if candidate.scope.name and scope.name and candidate.scope.name != scope.name:
                continue
            own = replace(scope, name=scope.name or candidate.scope.name)
            longer = (*description, replace(candidate, scope=own))
            # A deviation that does not help with the simplest wrong answer is no candidate.
            if probe is not None and before is not None and own.name in ("", probe.name):
                wide = (id(candidate), own.name, own.gradient, probe)
                if wide not in helps:
                    everywhere = replace(own, words="", mask=None, asked=always)
                    helps[wide] = _mends(evidence, probe, description, replace(candidate, scope=everywhere))
                if not helps[wide]:
                    continue
                key = (*wide, None if own.mask is None else own.words)
                if key not in helps:
                    helps[key] = bool(probe.wrong(evidence.subject, longer).mean() < before)
                if not helps[key]:
                    continue
            yield longer


def _mends(evidence: Evidence, probe: Answer, description: Description, deviation: Deviation) -> bool:
    """Return whether a deviation without a restriction explains enough elements of an answer that are still wrong.

    A restriction to some elements cannot explain more of them.
    """
    before = probe.wrong(evidence.subject, description)
    after = probe.wrong(evidence.subject, (*description, deviation))
    return before.shape != after.shape or bool((before & ~after).sum() >= max(1, before.sum() / LEAST))


def _ease(question: Question) -> tuple[bool, int]:
    return question.kind != FORWARD, question.case.shape[1]


def raised(wrong: list[tuple[Answer, np.ndarray]]) -> Iterator[Deviation]:
    """Yield a deviation for each exception among wrong answers."""
    for name in dict.fromkeys(a.values for a, _ in wrong if isinstance(a.values, str)):

        def change(plan: Plan, name=name) -> None:
            plan.raises = name

        yield Deviation("exception", f"raises {name}", "every call that the convention expresses has a result", change,
                        {"exception": name})  # fmt: skip


def _measured(evidence: Evidence, wrong: list[tuple[Answer, np.ndarray]]) -> Iterator[Deviation]:
    """Yield the deviations that the matrices of each wrong input suggest, the same for all inputs without a name."""
    seen: set[str] = set()
    for kind in (FORWARD, GRADIENT):
        if any(a.question.kind == kind for a, _ in wrong):
            for deviation in _measured_in(evidence, [w for w in wrong if w[0].question.kind == kind], kind):
                if str(deviation) not in seen:
                    seen.add(str(deviation))
                    yield deviation


def _measured_in(evidence: Evidence, wrong: list[tuple[Answer, np.ndarray]], kind: str) -> Iterator[Deviation]:
    """Yield the deviations that the matrices of one kind of answers suggest."""
    subject = evidence.subject
    found: dict[str, list[Deviation]] = {}
    asked = _asked(evidence, kind)
    bases = [n for n in asked if n.endswith("tokens from position 7 on")] or list(asked)[:1]
    inputs = {a.name: a.which for a in evidence.answers if a.name in ("x", "q", "k") and a.question.kind == kind}
    for name in dict.fromkeys(a.name for a, _ in wrong):
        if name not in inputs or not bases:
            continue
        evidence.in_time()
        pairing, structural = structure(subject, asked[bases[0]], inputs[name])
        own = [structural] if structural is not None else []
        hit = sorted({int(i) for a, e in wrong if a.name == name and e.size > 1 for i in pairs_of(a, e)})
        about = Measured(subject, asked, inputs[name], pairing)
        for site in _sites([w for w in wrong if w[0].name == name and w[0].question.kind == kind]):
            evidence.in_time()
            own += about.deviations(site, {a.question.name for a, _ in wrong}, hit)
        by_words: dict[str, Deviation] = {}
        for deviation in own:
            by_words.setdefault(str(deviation), deviation)
        found[name] = list(by_words.values())
    everywhere = set.intersection(*({str(d) for d in own} for own in found.values())) if found else set()
    seen = set()
    for name, own in found.items():
        for deviation in own:
            said = str(deviation)
            common = said in everywhere and (len(found) > 1 or len({a.name for a in evidence.answers}) == 1)
            if common and said in seen:
                continue
            seen.add(said)
            yield deviation if common else replace(deviation, scope=replace(deviation.scope, name=name))


def _asked(evidence: Evidence, kind: str) -> dict[str, Question]:
    """Return the questions of a kind by name, in float32 if the function takes float32 in place of 16 bits.

    A measurement in 16 bits has three digits. It only suggests descriptions; each is proven in the declared dtype.
    """
    asked = {a.question.name: a.question for a in evidence.answers if a.question.kind == kind}
    if evidence.subject.dtype.itemsize > 2 or not asked:
        return asked
    wide = {name: _wide(question) for name, question in asked.items()}
    return asked if isinstance(next(iter(wide.values())).answer(evidence.subject), str) else wide


def _wide(question: Question) -> Question:
    case = question.case
    inputs, cotangents = (tuple(x.float() for x in tensors) for tensors in (case.inputs, case.cotangents))
    return replace(question, case=replace(case, inputs=inputs, cotangents=cotangents))


def _wired(evidence: Evidence, wrong: list[tuple[Answer, np.ndarray]]) -> Iterator[Deviation]:
    """Yield the measured table of all products of a token, for results and for gradients that are wrong."""
    for kind in (FORWARD, GRADIENT):
        asked = _asked(evidence, kind) if any(a.question.kind == kind for a, _ in wrong) else {}
        base = None
        for name in (n for n in LONGEST if n in asked):  # the longest that takes little time
            evidence.in_time()
            started = time.thread_time()
            asked[name].answer(evidence.subject)
            if base is None or time.thread_time() - started < SLOW:
                base = name
        found = None if base is None else wiring(evidence.subject, asked, base)
        if found is not None:
            yield found


def _sites(wrong: list[tuple[Answer, np.ndarray]]) -> list[tuple[int, int]]:
    """Return the sequences and heads at which to measure: the first and the last that are wrong."""
    sites = []
    for _, elements in wrong:
        if elements.ndim == 4 and elements.size > 1:
            hit = np.argwhere(elements.any(axis=(1, 3)))
            sites += [(int(hit[0][0]), int(hit[0][1])), (int(hit[-1][0]), int(hit[-1][1]))]
            break
    return list(dict.fromkeys(sites))
