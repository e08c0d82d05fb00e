"""Check the function of a model that rotates against the laws of `ropelab verify`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ropelab.conformance.report import Report
from ropelab.conformance.verify import verify
from ropelab.interop.calls import Complex, ForeignRotation, Understood
from ropelab.interop.huggingface.model import CALLS, GatheredRows


def understood(name: str, function: Callable[..., Any]) -> Understood:
    """How a function is called, and which features form pairs.

    Raises:
        ValueError: the function follows no known convention.
    """
    return ForeignRotation(name, function, CALLS).understood[0]


def convention(found: Understood) -> str:
    """The convention in words: the arguments that rotate, and the tables."""
    columns = {"feature": "a column per feature", "pair": "a column per pair", "twice": "columns per pair, twice"}
    return f"({', '.join((*found.call.rotated, *found.call.tables))}), {columns[found.kind.columns]}"


def hold_function(function: Callable[..., Any], found: Understood, **options: Any) -> Report:
    """The report of `ropelab.conformance.verify` on a function, called as the function expects.

    Args:
        function: the function.
        found: the result of `understood` for the function.
        options: for `verify`.
    """
    kind = found.kind
    columns = "split_half" if kind.columns != "feature" else kind.layout
    if kind.columns != "feature" or kind.repeated:  # it may read one of the two columns of a pair
        options["skip"] = (*options.get("skip", ()), "feature_columns")
    return verify(
        _in_one_convention(function, found), "huggingface", layout=kind.layout, out_layout=kind.out_layout,
        sign="reversed" if kind.inverse else "standard", columns=columns, **options,
    )  # fmt: skip


def _in_one_convention(function: Callable[..., Any], found: Understood) -> Callable[..., Any]:
    """A function ``(q, k, cos, sin) -> (q, k)`` with ``[B, H, S, D]`` and a row of the tables for each token."""
    call, kind = found.call, found.kind

    @functools.wraps(function)
    def rotate(q, k, cos, sin):
        if kind.columns == "pair":
            cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
        if len(cos) != len(q):
            cos, sin = (table.expand(len(q), -1, -1) for table in (cos, sin))
        if "b" in call.table:
            return _called(q, k, cos, sin)
        rows = [_called(q[i : i + 1], k[i : i + 1], cos[i : i + 1], sin[i : i + 1]) for i in range(len(q))]
        return tuple(torch.cat(ys) for ys in zip(*rows, strict=True))

    def _called(q, k, cos, sin):
        xs = [q, k, k][: max(len(call.rotated), 2)]
        if len(call.rotated) > 1:
            return tuple(_given(call.rotated, xs, cos, sin)[:2])
        return tuple(_given(call.rotated, [x], cos, sin)[0] for x in xs)

    def _given(names, xs, cos, sin):
        if "h" not in call.axes:  # heads rotate one by one
            parts = [_one(names, [x[:, h] for x in xs], cos, sin) for h in range(xs[0].shape[1])]
            return [torch.stack([part[0] for part in parts], dim=1)]
        order = [call.axes.find(axis) for axis in "bhsd"]
        there = [
            x.permute(*(("bhsd".index(a)) for a in call.axes)) if "b" in call.axes else _without_batch(x) for x in xs
        ]
        back = _one(names, there, cos, sin)
        return [y.permute(*order) if "b" in call.axes else y.transpose(0, 1)[None] for y in back]

    def _without_batch(x):
        return x[0].permute(*("hsd".index(axis) for axis in call.axes))

    def _one(names, xs, cos, sin):
        if "b" not in call.table:
            cos, sin = cos[0], sin[0]
        arguments: dict[str, Any] = dict(zip(names, xs, strict=True)) | dict(call.options)
        if isinstance(call, Complex):
            arguments[call.tables[0]] = (
                torch.complex(cos.float(), sin.float()) if cos.dtype in _NARROW else torch.complex(cos, sin)
            )
        elif isinstance(call, GatheredRows):
            rows = torch.arange(cos.shape[0] * cos.shape[1], device=cos.device).view(cos.shape[:2])
            arguments |= {"cos": cos.flatten(0, 1), "sin": sin.flatten(0, 1), "position_ids": rows}
        else:
            arguments |= dict(zip(call.tables, (cos, sin) * (len(call.tables) // 2), strict=True))
        returned = function(**arguments)
        return [returned] if isinstance(returned, torch.Tensor) else list(returned)

    del rotate.__wrapped__  # its signature is not that of the function
    return rotate


_NARROW = (torch.float16, torch.bfloat16)
