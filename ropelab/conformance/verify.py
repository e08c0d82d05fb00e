"""Hold an implementation to the laws."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ropelab.conformance.case import Broken, NotApplicable, Sizes
from ropelab.conformance.declared import Declaration, check_device, declare
from ropelab.conformance.law import Comparison, Law
from ropelab.conformance.result import Counterexample, Report, Result
from ropelab.conformance.subject import Subject
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.where import pattern

SHRINK_SECONDS = 2.0
"""After so long the search for a smaller counterexample to a law is given up: of this thread's own time, as on a busy
machine the others' would end it early."""


def verify(
    function: Callable[..., Any], convention: str, *, shrink: bool = True, diagnose: bool = True, **declared
) -> Report:
    """Check that ``function`` is a rotary position embedding, law by law, in this process.

    The command ``ropelab verify`` does the same in a process of its own, which a function may end or keep busy.

    Args:
        function: under test; for ``"module"`` a class, a factory or an ``nn.Module``. What it does not offer it may
            say with NotImplementedError.
        convention: how it is called, a name of ``CONVENTIONS``.
        shrink: look for a smaller counterexample if a law fails.
        diagnose: look for the fault in the catalogue if a law fails.
        declared: what the function claims, and the laws hold it to: the other arguments of `declare`.

    Returns:
        A report; ``report.passed``, ``report.verdict``, ``report.failed``, ``report.raise_if_failed()``.

    Raises:
        TypeError, ValueError: as for `declare`; a device that does not work here; a function that is none.
    """
    declaration = declare(convention, **declared)
    check_device(declaration.about["device"])
    check_function(function)
    return judge(function, declaration, Surroundings(), shrink=shrink, diagnose=diagnose)


def check_function(function: Any) -> None:
    """Raise TypeError unless ``function`` can be called."""
    if not callable(function):
        raise TypeError(f"function: expected something that can be called, got {type(function).__name__}")


def judge(
    function: Callable[..., Any],
    declaration: Declaration,
    surroundings: Surroundings,
    *,
    shrink: bool = True,
    diagnose: bool = True,
    begun: Callable[[str], object] = lambda what: None,
    found: Callable[[Result], object] = lambda result: None,
) -> Report:
    """Hold a function to the laws of a declaration.

    Args:
        function, shrink, diagnose: as for `verify`.
        surroundings: made before the function was imported, or now.
        begun: called with the name of each law before it, then with ``"the diagnosis"``.
        found: called with each result; a second time if a smaller counterexample was found.
    """

    def fresh() -> Subject:
        """Laws share no state: what a module caches in one cannot fail in another."""
        return declaration.subject(function, surroundings)

    sizes = declaration.sizes
    with surroundings.ours():
        results = []
        for law in declaration.laws:
            begun(f"the law {law.name}")
            results.append(hold(law, fresh, sizes, shrink, found))
        diagnosis: tuple[Any, ...] = ()
        if diagnose and any(result.failed for result in results):
            begun("the diagnosis")
            diagnosis = _diagnose(fresh(), results, sizes)
    about = {"function": getattr(function, "__qualname__", function), **declaration.about}
    return Report(about, tuple(results), diagnosis)


def hold(
    law: Law,
    fresh: Callable[[], Subject],
    sizes: Sizes,
    shrink: bool = True,
    found: Callable[[Result], object] = lambda result: None,
) -> Result:
    """Check one law and, if it does not hold, look for the smallest sizes for which it does not.

    Args:
        found: called with the result, and with a smaller one: the function may end the process in the search.
    """
    started = time.monotonic()
    outcome = replace(_attempt(law, fresh(), sizes), seconds=time.monotonic() - started)
    found(outcome)
    if outcome.failed and shrink:
        outcome = _shrunk(law, fresh, sizes, outcome, deadline=time.thread_time() + SHRINK_SECONDS)
        outcome = replace(outcome, seconds=time.monotonic() - started)
        found(outcome)
    return outcome


def _attempt(law: Law, subject: Subject, sizes: Sizes) -> Result:
    def result(status: str, **about) -> Result:
        return Result(law.name, law.statement, status, **about)

    remarks: list[str] = []
    try:
        worst, compared = _worst(law.check(subject, sizes), remarks)
    except Broken as reason:
        return result("fail", violation=float("inf"), message=f"{reason} (at {sizes})")
    except Exception as error:  # whatever the function raises is a finding, not a failure of ours
        return result("error", violation=float("inf"), message=f"{_summary(error)} (at {sizes})")
    message = "; ".join(remarks)
    if worst is None:
        return result("not applicable", message=message or "nothing to compare")
    comparison, index = worst
    about = {"violation": float(comparison.error[index]), "bound": _at(comparison.bound, comparison.error, index)}
    if comparison.excess[index] <= 1:
        return result("pass", message=message, compared=compared, **about)
    example = Counterexample(
        sizes, comparison.what, dict(zip(comparison.axes, index, strict=True)),
        _at(comparison.expected, comparison.error, index), float(comparison.actual[index]), about["bound"],
        comparison.case, pattern(comparison, sizes.rotary_dim),
    )  # fmt: skip
    return result("fail", counterexample=example, **about)


def _worst(
    found: Iterable[Comparison | str], remarks: list[str]
) -> tuple[tuple[Comparison, tuple[int, ...]] | None, int]:
    """The element with the largest excess over its bound, and how many were compared with the definition.

    The first comparison that fails is enough. What a law cannot ask, after it has compared something or not, becomes a
    remark.
    """
    worst, largest, compared = None, -1.0, 0
    for comparison in _until_not_applicable(found, remarks):
        if isinstance(comparison, str):
            remarks.append(comparison)
            continue
        if comparison.actual.shape != comparison.expected.shape:
            raise Broken(f"{comparison.what}: shape {comparison.actual.shape}, expected {comparison.expected.shape}")
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
    """Greedily take whichever smaller sizes fail in the same way; the first failure's pattern is kept."""
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


def _diagnose(subject: Subject, results: Sequence[Result], sizes: Sizes) -> tuple[Any, ...]:
    """Faults of the catalogue that do what the subject does; there may be nothing to point at in any result."""
    from ropelab.conformance.diagnose import diagnose

    found = [result.counterexample for result in results if result.counterexample is not None]
    return tuple(diagnose(subject, found, sizes=sizes))


def _summary(error: Exception) -> str:
    """The error, and the line of the function that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
