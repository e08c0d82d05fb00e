"""Check a function against laws, and look for the smallest input that breaks a law."""

from __future__ import annotations

import inspect
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropelab.conformance.cache.found import cache_screen
from ropelab.conformance.case import Broken, NotApplicable, Noted, Sizes
from ropelab.conformance.convention import first_parameter, parameters
from ropelab.conformance.declared import Declaration, check_device, declare
from ropelab.conformance.law import Comparison, Law
from ropelab.conformance.report import Report
from ropelab.conformance.result import Counterexample, Result
from ropelab.conformance.screen import Screen, screen
from ropelab.conformance.subject import Subject
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.where import pattern
from ropelab.conformance.words import said

TORCH = Path(torch.__file__).parent
"""The files of torch, whose frames lie between a law and a backward under test."""
SHRINK_SECONDS = 1.0
"""The time after which the search for a smaller counterexample to a law ends. It is CPU time of this thread, so that
other work on the machine cannot end the search early."""
ROUNDS_OPERATIONS = "in 16 bits it rounds after every operation, not once at the end; --maths narrow declares that"
"""What to note of a function that has more roundings in 16 bits than its convention, and no other deviation."""
OTHER_TABLES = "it refuses the usual tables in 16 bits, and takes the other: --maths declares 16-bit or float32 tables"
"""What to note of a function that is right with tables of another dtype than usual in its convention."""
TAKES_SIZES = "if it takes certain sizes only, --head-dim, --rotary-dim, --q-heads and --k-heads declare them"
"""What to try with a function that raised in every call."""


def verify(function: Callable[..., Any], convention: str, *, shrink: bool = True, **declared) -> Report:
    """Check ``function`` against the laws of rotary position embedding, in this process.

    The command ``ropelab verify`` does the same in a new process, so that a function may crash it or keep it busy.

    Args:
        function: the function under test; for the convention ``"module"`` a class, a factory or an ``nn.Module``. It
            may raise NotImplementedError for a call that it does not offer.
        convention: how the function is called, a name of ``CONVENTIONS`` or ``CACHE_CONVENTIONS``.
        shrink: look for a smaller counterexample if a law does not hold.
        declared: the claims that the laws check: the other arguments of `declare`.

    Returns:
        A report with ``verdict``, ``passed``, ``failed`` and ``raise_if_failed()``.

    Raises:
        TypeError: as for `declare`; or ``function`` cannot be called.
        ValueError: as for `declare`; or the device does not work on this machine.
    """
    declaration = declare(convention, **declared)
    check_device(declaration.about["device"])
    check_function(function, convention)
    return judge(function, declaration, Surroundings(), shrink=shrink)


def check_function(function: Any, convention: str) -> None:
    """Raise TypeError unless ``function`` can be called, and without an object that it is a method of."""
    if not callable(function):
        raise TypeError(f"function: expected something that can be called, got {type(function).__name__}")
    instead = "pass a function that makes an object and calls it"
    if inspect.isclass(function) and convention != "module":
        name = function.__name__
        raise TypeError(
            f"function: expected a function, got {name}, a class: {instead}, or declare the convention module"
        )
    if inspect.isfunction(function) and first_parameter(function) == "self":
        name, given = function.__qualname__, ", ".join(list(parameters(function))[1:])
        made = f"def {function.__name__}({given}): return {name.rpartition('.')[0]}(...).{function.__name__}({given})"
        raise TypeError(f"function: expected a function, got {name}, a method without an object: {instead}, {made}")


def judge(
    function: Callable[..., Any],
    declaration: Declaration,
    surroundings: Surroundings,
    *,
    shrink: bool = True,
    begun: Callable[[str], object] = lambda what: None,
    found: Callable[[Result], object] = lambda result: None,
    target: str = "",
) -> Report:
    """Check a function against the laws of a declaration.

    Args:
        function, shrink: as for `verify`.
        declaration: the claims about the function.
        surroundings: the global state, recorded before the import of the function if possible.
        begun: called with ``"the law <name>"`` before each law.
        found: called with each result, and again if the search finds a smaller counterexample.
        target: ``"package.module:function"``, for the script of a wrong call.
    """

    lenient, narrow = False, declaration.claims["narrow"]
    form: dict[str, Any] = {}

    def under(other: Declaration) -> Any:
        """Return the subject of a declaration, without state, so that what one law caches cannot reach another law."""
        turned = other.claims["narrow"] != declaration.claims["narrow"]
        subject = other.subject(function, surroundings)
        return replace(subject, lenient=lenient, narrow=narrow != turned, state=subject.state | form)

    def fresh() -> Any:
        return under(declaration)

    sizes = declaration.sizes
    with surroundings.ours():
        results: list[Result] = []
        for law in declaration.laws:
            begun(f"the law {law.name}")
            results.append(hold(law, fresh, sizes, shrink, found, strict=declaration.strict))
            if not results[1:] and not surroundings.returned and (form := _other_form(fresh(), sizes)):
                results = [hold(law, fresh, sizes, shrink, found, strict=declaration.strict)]
            lenient = lenient or results[-1].message == ROUNDS_OPERATIONS
            narrow = narrow != (results[-1].message == OTHER_TABLES)
        if not surroundings.returned:  # so nothing is known of its rotation
            results = [_unjudged(result) for result in results]
            for result in results:
                found(result)

    def measuring() -> Screen | None:
        with surroundings.ours():
            return (cache_screen if declaration.writes_cache else screen)(declaration, under, results, target)

    about = {"function": getattr(function, "__qualname__", function), **declaration.about, **form}
    return Report(about, tuple(results), measuring)


def _other_form(subject: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the form of the convention in which a call returns, where none did in the usual form; empty if none does.

    The form is a part of the subject's ``state``.
    """
    for form in getattr(subject.convention, "forms", ()):
        with suppress(Exception):
            replace(subject, state=subject.state | form)(subject.draw(sizes))
            return form
    return {}


def _unjudged(result: Result) -> Result:
    """Return the result of a law for a function of which no call ever returned."""
    if not result.failed:
        return result if result.status == "pass" else replace(result, status="not applicable")
    calls = [line for line in result.traceback.splitlines() if line.startswith("The call: ")]
    message = "; ".join(("no call of the function returned", f"it raised {result.message}", *calls[-1:], TAKES_SIZES))
    return replace(result, status="not applicable", violation=0.0, message=message)


def hold(
    law: Law,
    fresh: Callable[[], Any],
    sizes: Sizes,
    shrink: bool = True,
    found: Callable[[Result], object] = lambda result: None,
    *,
    strict: bool = True,
) -> Result:
    """Check a function against one law and, if the law does not hold, look for the smallest sizes that break it.

    Args:
        law: the law.
        fresh: returns the subject, without state of earlier calls.
        sizes: the sizes to begin with.
        shrink: look for smaller sizes.
        found: called with the result before the search, during which the function may end the process, and again after
            the search.
        strict: whether more roundings in 16 bits than the subject declares, and tables of another dtype, break the law.
            They are noted otherwise.
    """
    started = time.monotonic()
    outcome = _attempt(law, fresh(), sizes)
    example = outcome.counterexample
    if not strict and example is not None and example.case.inputs[0].dtype in (torch.bfloat16, torch.float16):
        again = _attempt(law, replace(fresh(), lenient=True), sizes)
        outcome = replace(again, status="note", message=ROUNDS_OPERATIONS) if again.status == "pass" else outcome
    if not strict and outcome.status == "error":
        again = _attempt(law, replace(subject := fresh(), narrow=not subject.narrow), sizes)
        outcome = replace(again, status="note", message=OTHER_TABLES) if again.status == "pass" else outcome
    outcome = replace(outcome, seconds=time.monotonic() - started)
    found(outcome)
    if outcome.failed and shrink:
        smallest = _shrunk(law, fresh, sizes, outcome, deadline=time.thread_time() + SHRINK_SECONDS)
        outcome = smallest if fresh().surroundings.returned else outcome  # else no call is better than the first
        if _is_of_torch(outcome.traceback):
            outcome = replace(outcome, traceback=_forward(law, fresh(), sizes) + outcome.traceback)
        outcome = replace(outcome, seconds=time.monotonic() - started)
        found(outcome)
    return outcome


def _attempt(law: Law, subject: Subject, sizes: Sizes) -> Result:
    def result(status: str, **about) -> Result:
        return Result(law.name, law.statement, status, **about)

    remarks: list[str] = []
    try:
        worst, compared = _worst(law.compare(subject, sizes), remarks)
    except Noted as reason:
        return result("note", message=str(reason))
    except Broken as reason:
        return result("fail", violation=float("inf"), message=f"{reason} (at {sizes})")
    except Exception as error:  # an exception of the function is a finding, not an error of this library
        return result("error", violation=float("inf"), message=f"{_summary(error)} (at {sizes})",
                      traceback=_traceback(error))  # fmt: skip
    message = "; ".join(remarks)
    if worst is None:
        return result("not applicable", message=message or "the law had nothing to compare")
    comparison, index = worst
    about = {"violation": float(comparison.error[index]), "bound": _at(comparison.bound, comparison.error, index)}
    if comparison.excess[index] <= 1:
        return result("pass", message=message, compared=compared, **about)
    example = Counterexample(
        sizes, comparison.what,
        {name: int(comparison.numbers(axis)[index[axis]]) for axis, name in enumerate(comparison.axes)},
        _at(comparison.expected, comparison.error, index), float(comparison.actual[index]), about["bound"],
        comparison.case, pattern(comparison, sizes.rotary_dim),
    )  # fmt: skip
    return result("fail", counterexample=example, **about)


def _worst(
    found: Iterable[Comparison | str], remarks: list[str]
) -> tuple[tuple[Comparison, tuple[int, ...]] | None, int]:
    """Return the element with the largest excess, and the number of elements compared with the definition.

    The search ends with the first comparison that fails. `NotApplicable` ends it as well, even after comparisons, and
    adds a remark.

    Returns:
        ``(comparison, index)`` of that element, or None if no element was compared; and the number.
    """
    worst, largest, compared = None, -1.0, 0
    for comparison in _until_not_applicable(found, remarks):
        if isinstance(comparison, str):
            remarks.append(comparison)
            continue
        if comparison.actual.shape != comparison.expected.shape:
            expected, got = comparison.expected.shape, comparison.actual.shape
            raise Broken(f"{comparison.what}: expected shape {expected}, got {got}")
        if comparison.actual.size == 0:
            continue
        if comparison.truth:
            compared += comparison.actual.size
        excess = comparison.excess
        if excess.max() > largest:
            largest = excess.max()
            worst = comparison, tuple(map(int, np.unravel_index(int(excess.argmax()), excess.shape)))
        if largest > 1:
            break
    return worst, compared


def _until_not_applicable(found: Iterable[Comparison | str], remarks: list[str]) -> Iterator[Comparison | str]:
    try:
        yield from found
    except NotApplicable as reason:
        remarks.append(str(reason))


def _at(values: np.ndarray, like: np.ndarray, index: tuple[int, ...]) -> float:
    return float(np.broadcast_to(values, like.shape)[index])


def _shrunk(law: Law, fresh: Callable[[], Subject], sizes: Sizes, failing: Result, deadline: float) -> Result:
    """Return the result for the smallest failing sizes that a greedy search finds, with the pattern of ``failing``."""
    first = failing.counterexample
    while smaller := next(_smaller_failures(law, fresh, sizes, failing.status, deadline), None):
        sizes, failing = smaller
    if first is not None and failing.counterexample is not None:
        failing = replace(failing, counterexample=replace(failing.counterexample, pattern=first.pattern))
    return failing


def _smaller_failures(law, fresh, sizes, status, deadline) -> Iterator[tuple[Sizes, Result]]:
    for candidate in sizes.smaller():
        if time.thread_time() > deadline:
            return
        outcome = _attempt(law, fresh(), candidate)
        if outcome.status == status:
            yield candidate, outcome


def _traceback(error: Exception) -> str:
    """Return the traceback from the function's own first frame on, with the notes: the call."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [n for n, frame in enumerate(frames) if Path(frame.filename).is_relative_to(Path(__file__).parent)]
    theirs = frames[ours[-1] + 1 :] if ours else frames
    inner = [n for n, frame in enumerate(theirs) if not Path(frame.filename).is_relative_to(TORCH)]
    told = [*traceback.format_list(theirs[inner[0] :] if inner else theirs), said(error)]
    return "\n".join(line.rstrip() for line in (*told, *getattr(error, "__notes__", ())))


def _is_of_torch(told: str) -> bool:
    """Return whether a traceback has frames of torch alone, as that of a backward without code of the function's."""
    files = re.findall(r'^ *File "(.+)", line \d+', told, re.MULTILINE)
    return bool(files) and all(Path(file).is_relative_to(TORCH) for file in files)


def _forward(law: Law, subject: Subject, sizes: Sizes) -> str:
    """Return the frames of the operation whose backward raises, from the function's own on; empty if none is known."""
    with warnings.catch_warnings(record=True) as heard, suppress(Exception):
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=False):
            for _ in law.compare(subject, sizes):
                pass
    said = next((str(one.message) for one in heard if "Traceback of forward call" in str(one.message)), "")
    frames = list(re.finditer(r'^ *File "(.+)", line \d+, in .*(\n    .*)?', said, re.MULTILINE))
    ours = [n for n, frame in enumerate(frames) if Path(frame[1]).is_relative_to(Path(__file__).parent)]
    told = [frame[0] for frame in frames[ours[-1] + 1 if ours else 0 :]]
    told[-1:] = [frame.replace("\n", ", whose backward raises\n", 1) for frame in told[-1:]]
    return "".join(f"{frame}\n" for frame in told)


def _summary(error: Exception) -> str:
    """Return the exception, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{said(error)}{where}"
