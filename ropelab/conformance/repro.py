"""Write the smallest call as a script that needs torch and the function alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ropelab.conformance.convention import Arguments

MOST_NUMBERS = 4096
"""The numbers of all tensors of a call that is written."""


def script(
    target: str, arrays: str, made: Arguments | None, arguments: Arguments, after: Callable[[list[str]], list[str]]
) -> str:
    """Return the script; empty for a call with more numbers than a script should hold.

    Args:
        target: ``"package.module:function"``.
        arrays: whose arrays the function takes: ``"torch"``, ``"jax"`` or ``"numpy"``.
        made: the arguments of the call that makes the module; None if the target itself takes ``arguments``.
        arguments: the arguments of the call.
        after: returns the lines after the call, which has the value ``y``, from the names of its inputs.
    """
    values = [*arguments.positional, *arguments.keywords.values()]
    tensors = [x for value in values for x in _tensors(value)]
    if sum(x.numel() for x in tensors) > MOST_NUMBERS:
        return ""
    module, _, path = target.partition(":")
    names = {id(x): f"t{number}" for number, x in enumerate({id(x): x for x in tensors}.values())}
    given = {names[id(x)]: x for x in tensors}
    lines = ["import torch", "", f"import {module}", "", f"function = {module}.{path}"]
    if arrays != "torch":
        lines[1:1] = ["", f"from ropelab.conformance.{arrays}_arrays import of_{arrays}"]
        lines.append(f"function = of_{arrays}(function)  # for tensors of torch")
    if made is not None:
        lines.append(f"function = function({_called(made, names)})")
    lines += ["", *(f"{name} = {literal(x)}" for name, x in given.items())]
    lines += ["", f"y = function({_called(arguments, names)})", ""]
    lines += after([names[id(x)] for x in arguments.inputs if id(x) in names])
    return "\n".join(lines) + "\n"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in value for x in _tensors(part)] if isinstance(value, (tuple, list)) else []


def _called(arguments: Arguments, names: dict[int, str]) -> str:
    parts = [_said(value, names) for value in arguments.positional]
    return ", ".join((*parts, *(f"{name}={_said(value, names)}" for name, value in arguments.keywords.items())))


def _said(value: Any, names: dict[int, str]) -> str:
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_said(part, names) for part in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    return names[id(value)] if isinstance(value, torch.Tensor) else repr(value)


def literal(x: torch.Tensor) -> str:
    """Return an expression whose value is the tensor, strides included."""
    flat = x.detach().cpu()
    numbers = torch.view_as_real(flat) if flat.is_complex() else flat
    made = f"torch.tensor({numbers.double().tolist() if numbers.is_floating_point() else numbers.tolist()}"
    kind = str(numbers.dtype)
    text = f"{made}, dtype={kind})"
    if flat.is_complex():
        text = f"torch.view_as_complex({text})"
    if x.device.type != "cpu":
        text += f".to({str(x.device)!r})"
    if not x.is_contiguous():
        text = f"torch.empty_strided({tuple(x.shape)}, {x.stride()}, dtype={x.dtype}).copy_({text})"
    return text + ".requires_grad_()" * x.requires_grad
