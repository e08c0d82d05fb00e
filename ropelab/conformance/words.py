"""Say in words how a law is broken: by what input, at what element, by how much."""

from __future__ import annotations

import numpy as np
import torch

from ropelab.conformance.case import Case
from ropelab.conformance.result import Counterexample, Result

FEW = 16
"""The words include the numbers of the inputs if the inputs have at most this many elements."""


LONGEST = 1000
"""The number of characters of an exception's message that are told."""


def said(error: BaseException) -> str:
    """Return the type and the message of an exception of foreign code, whose ``__str__`` may raise."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    return f"{type(error).__name__}: {message[:LONGEST]}".removesuffix(": ")


def listed(numbers: np.ndarray) -> str:
    """Return numbers one after another; a run of more than three as its first and its last."""
    numbers = numbers.reshape(-1)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    told = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run.tolist()))]
    return ", ".join(told[:9]) + (", ..." if len(told) > 9 else "")


def unequal(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with six digits, or with as many more as tell them apart."""
    told = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in (6, 9, 12, 17))
    return next((both for both in told if both[0] != both[1]), (f"{one:.17g}", f"{other:.17g}"))


def failure(result: Result) -> str:
    """Return the law, its statement and the counterexample of a result that failed, in several lines."""
    lines = [f"{result.law}: {result.statement}"]
    if result.message:
        lines.append(f"  {'raised' if result.status == 'error' else 'but'} {result.message}")
    if result.counterexample is not None:
        lines += [f"  {name:<9} {value}" for name, value in _facts(result.counterexample)]
    return "\n".join(lines)


def _facts(found: Counterexample) -> list[tuple[str, str]]:
    case = found.case
    where = ", ".join(f"{axis} {index}" for axis, index in found.where.items())
    apart = f"{abs(found.actual - found.expected):.3g} apart, at most {found.bound:.3g} allowed"
    facts = [
        ("smallest", f"{found.sizes}: {called(case)}"),
        ("where", f"{found.what} at {where}"),
        ("expected", f"{found.expected:.9g}"),
        ("actual", f"{found.actual:.9g} ({apart})"),
    ]
    if found.pattern:
        facts.append(("pattern", f"{found.pattern} (in the first failing input)"))
    if sum(x.numel() for x in case.inputs) <= FEW:
        facts += [("input", _numbers(x)) for x in case.inputs]
        facts += [("cotangent", _numbers(g)) for g in case.cotangents]
    return facts


def called(case: Case) -> str:
    """Return shapes, dtype, positions and all else that distinguishes the call."""
    parts = ["shapes " + " and ".join(str(list(x.shape)) for x in case.inputs)]
    parts.append(str(case.inputs[0].dtype).removeprefix("torch."))
    parts += [f"rotary_dim {case.rotary_dim}"] if case.rotary_dim != case.inputs[0].shape[-1] else []
    along = case.token_positions()[None] if case.axes is None or case.positions is None else case.positions.cpu()
    alike = bool(along.shape[1]) and bool((along == along[:, :1]).all())
    told = along[:, 0] if alike or along.numel() > FEW else along
    if told.numel() <= FEW * len(along):
        which = "" if alike or told is along else " of sequence 0"
        parts.append(f"positions{which} {(told if len(along) > 1 else told[0]).tolist()}")
    if case.mrope_section is not None:
        parts.append(f"sections {list(case.mrope_section)}{' in turns' * case.mrope_interleaved}")
    parts += [f"documents {case.lengths}"] if case.lengths is not None else []
    parts += [f"rank {case.shard[1]} of {case.shard[0]}"] if case.shard else []
    parts += ["inverse"] if case.inverse else []
    parts += [f"tables times {case.factor}"] if case.factor != 1 else []
    parts += [f"{name} {value}" for name, value in case.extra().items() if len(str(value)) <= 6 * FEW]
    parts += [f"strides {x.stride()}" for x in case.inputs if not x.is_contiguous()]
    return ", ".join(parts)


def _numbers(x: torch.Tensor) -> str:
    return str([round(value, 4) for value in x.detach().double().flatten().tolist()])
