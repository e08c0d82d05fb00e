"""Hold an implementation to the laws."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.case import Broken, NotApplicable, Sizes
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.law import Comparison, Law
from ropelab.conformance.laws import LAWS
from ropelab.conformance.result import Counterexample, Report, Result
from ropelab.conformance.subject import Subject
from ropelab.conformance.where import pattern
from ropelab.layout import LAYOUTS, check_layout

SIGNS = ("standard", "reversed")
SHRINK_SECONDS = 2.0
"""After so long the search for a smaller counterexample to a law is given up: of this thread's own time, as on a busy
machine the others' would end it early."""


def verify(
    function: Callable[..., Any],
    convention: str,
    *,
    layout: str | None = None,
    laws: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    out_layout: str | None = None,
    seq_format: str | None = None,
    sign: str = "standard",
    maths: str | None = None,
    columns: str | None = None,
    inplace: bool = False,
    once_differentiable: bool = False,
    rotary_dim: int | None = None,
    head_dim: int = 16,
    q_heads: int = 4,
    k_heads: int = 2,
    base: float = 10000.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shrink: bool = True,
    diagnose: bool = True,
) -> Report:
    """Check that ``function`` is a rotary position embedding, law by law.

    Everything after ``convention`` declares what the function claims; the laws hold it to that.

    Args:
        function: under test; for ``"module"`` a class, a factory or an ``nn.Module``. What it does not offer it may
            say with NotImplementedError.
        convention: how it is called, a name of ``CONVENTIONS``.
        layout: ``"split_half"`` or ``"interleaved"``; by default the convention's own.
        laws: names of the laws to check; by default all that are not opt-in.
        skip: names of laws to leave out.
        out_layout: of the result, if declared to be another one.
        seq_format: order of the axes, where the convention leaves a choice.
        sign: ``"reversed"`` for a function that is declared to rotate by minus the angle.
        maths: ``"narrow"``: tables and all operations are rounded to the dtype of the inputs; ``"wide"``: they are
            in float32 or wider. By default what is usual in the convention.
        columns: the layout of full-width tables, if it is not ``layout`` (GLM: ``"split_half"`` tables, adjacent
            pairs).
        inplace: the result overwrites the inputs (where the convention does not prescribe it).
        once_differentiable: the function does not claim second derivatives.
        rotary_dim: features that rotate. By default ``head_dim``, or 3/4 of it where the convention says that the
            tables' width decides.
        head_dim, q_heads, k_heads: sizes of the largest cases, for functions that do not take all.
        base: of the frequencies; handed to modules and plain functions as ``base=`` unless it is 10000.
        device, dtype: of the tensors; laws about dtypes use others as well.
        shrink: look for a smaller counterexample if a law fails.
        diagnose: look for the fault in the catalogue if a law fails.

    Returns:
        A report; ``report.passed``, ``report.failed``, ``report.raise_if_failed()``.

    Raises:
        ValueError: an argument that is not one of its choices.
    """
    chosen = select(laws, skip)
    kind = _one_of("convention", convention, CONVENTIONS) and CONVENTIONS[convention]
    layout = kind.layouts[0] if layout is None else layout
    check_layout(layout)
    out_layout = layout if out_layout is None else out_layout
    check_layout(out_layout, "out_layout")
    seq_format = _one_of("seq_format", seq_format or kind.seq_formats[0], kind.seq_formats)
    narrow = kind.narrow if maths is None else _one_of("maths", maths, ("narrow", "wide")) == "narrow"
    if inplace and kind.in_place is False:
        raise ValueError(f"inplace: expected False for {convention}, which has no way to ask for it")
    if rotary_dim is None:
        rotary_dim = head_dim // 8 * 6 if kind.partial and head_dim >= 8 else head_dim
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim: expected an even number from 2 to head_dim = {head_dim}, got {rotary_dim}")
    declared = Subject(
        function, kind, layout, out_layout, seq_format,
        reversed=_one_of("sign", sign, SIGNS) == "reversed", in_place=kind.in_place or inplace, narrow=narrow,
        once=once_differentiable, base=base, device=device, dtype=dtype,
    )  # fmt: skip
    kept = {} if columns is None else {"columns": _one_of("columns", columns, LAYOUTS)}
    sizes = Sizes(q_heads=q_heads, k_heads=k_heads, head_dim=head_dim, rotary_dim=rotary_dim)

    def fresh() -> Subject:
        """Laws share no state: what a module caches in one cannot fail in another."""
        return replace(declared, state=dict(kept))

    with poisoned_memory():
        results = tuple(hold(law, fresh, sizes, shrink) for law in chosen)
        failed = any(result.failed for result in results)
        diagnosis = _diagnose(fresh(), results, sizes) if diagnose and failed else ()
    about = {"function": getattr(function, "__qualname__", function), "convention": convention, "layout": layout,
             "out_layout": out_layout, "seq_format": seq_format, "sign": sign, "maths": "narrow" if narrow else "wide",
             "inplace": declared.in_place, "rotary_dim": rotary_dim, "head_dim": head_dim, "device": device,
             "dtype": dtype}  # fmt: skip
    return Report(about, results, diagnosis)


def select(laws: Iterable[str] | None = None, skip: Iterable[str] = ()) -> tuple[Law, ...]:
    """The named laws, or all that are not opt-in, in the order of ``LAWS``.

    Raises:
        ValueError: an unknown name.
    """
    named = None if laws is None else set(laws)
    for name in (*(named or ()), *skip):
        _one_of("law", name, LAWS)
    kept = (law for law in LAWS.values() if law.name not in set(skip))
    return tuple(law for law in kept if (law.by_default if named is None else law.name in named))


def hold(law: Law, fresh: Callable[[], Subject], sizes: Sizes, shrink: bool = True) -> Result:
    """Check one law and, if it does not hold, look for the smallest sizes for which it does not."""
    started = time.monotonic()
    outcome = _attempt(law, fresh(), sizes)
    if outcome.failed and shrink:
        outcome = _shrunk(law, fresh, sizes, outcome, deadline=time.thread_time() + SHRINK_SECONDS)
    return replace(outcome, seconds=time.monotonic() - started)


def _attempt(law: Law, subject: Subject, sizes: Sizes) -> Result:
    def result(status: str, **about) -> Result:
        return Result(law.name, law.statement, status, **about)

    remarks: list[str] = []
    try:
        worst = _worst(law.check(subject, sizes), remarks)
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
        return result("pass", message=message, **about)
    example = Counterexample(
        sizes, comparison.what, dict(zip(comparison.axes, map(int, index), strict=True)),
        _at(comparison.expected, comparison.error, index), float(comparison.actual[index]), about["bound"],
        comparison.case, pattern(comparison, sizes.rotary_dim),
    )  # fmt: skip
    return result("fail", counterexample=example, **about)


def _worst(found: Iterable[Comparison | str], remarks: list[str]) -> tuple[Comparison, tuple[int, ...]] | None:
    """The element with the largest excess over its bound; the first comparison that fails is enough.

    What a law cannot ask, after it has compared something or not, becomes a remark.
    """
    worst, largest = None, -1.0
    for comparison in _until_not_applicable(found, remarks):
        if isinstance(comparison, str):
            remarks.append(comparison)
            continue
        if comparison.actual.shape != comparison.expected.shape:
            raise Broken(f"{comparison.what}: shape {comparison.actual.shape}, expected {comparison.expected.shape}")
        if comparison.actual.size == 0:
            continue
        excess = comparison.excess
        if excess.max() > largest:
            largest = excess.max()
            worst = comparison, np.unravel_index(int(excess.argmax()), excess.shape)
        if largest > 1:
            break
    return worst


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


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` returns with NaN, so that what nobody wrote is seen. Restores the settings."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = fill
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _one_of(name: str, value: str, choices: Iterable[str]) -> str:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {tuple(choices)}, got {value!r}")
    return value


def _summary(error: Exception) -> str:
    """The error, and the line of the function that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
