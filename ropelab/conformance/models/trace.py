"""Find the functions of a model that rotate, by watching a call of the model.

A function rotates if it returns tensors of the shapes of its arguments, whose pairs of features have the lengths of the
arguments' pairs (times one factor for all), and whose values differ. Nothing but the values decides; names do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch

from ropelab.layout.pairing import LAYOUTS, pairs

TOLERANCE = 1e-5
"""The largest relative difference between the lengths of pairs. Models compute tables in float32, whose cosines and
sines have squares that add to 1 within 4 units of 2^-24; the rest is rounding of the model's own products."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A tensor that a call rotated.

    Attributes:
        call: the number of the call, counted over all functions that rotate.
        before, after: the argument and the result; of heads whose first features pass, only the features that turn.
        name: the name of the argument.
        layout, out_layout: the pairs of features in the argument and in the result.
        layer: the number of the layer that ran, if somebody says so.
        first: the number of the first feature of ``before`` in the argument.
    """

    call: int
    before: torch.Tensor
    after: torch.Tensor
    name: str = ""
    layout: str = "split_half"
    out_layout: str = "split_half"
    layer: int | None = None
    first: int = 0

    def parts(self) -> Iterator[Turn]:
        """Yield the tensor, or the parts along its first axis if it has more than four: q and k in one tensor."""
        if self.before.ndim < 5:
            yield self
        else:
            for i, (x, y) in enumerate(zip(self.before, self.after, strict=True)):
                yield replace(self, before=x, after=y, name=f"{self.name}[{i}]")


@dataclass(frozen=True)
class Traced:
    """A function that rotated while the model ran.

    Attributes:
        name: module and qualified name.
        function: the function, or None for a method or a function inside of a function.
        rotated: the names of the arguments that it rotates.
        layout, out_layout: the pairs of features in the arguments and in the results.
        rotary_dim, head_dim: the number of features that rotate, and of all features.
        factor: the factor of the lengths; 1 but for an attention factor in the tables.
        calls: how often it was called.
        turns: the tensors that it rotated, in the order of the calls.
        replayed: calls the function once more, given the values of its parameters; None if that is impossible.
        given: the values of its parameters in the first call.
        stated: the frequencies of the model's configuration, ``[R/2]`` for each type of layers.
    """

    name: str
    function: Callable[..., Any] | None
    rotated: tuple[str, ...]
    layout: str
    out_layout: str
    rotary_dim: int
    head_dim: int
    factor: float
    calls: int = 1
    turns: tuple[Turn, ...] = field(default=(), repr=False, compare=False)
    replayed: Callable[[dict[str, Any]], Any] | None = field(default=None, repr=False, compare=False)
    given: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    stated: tuple[torch.Tensor, ...] = field(default=(), repr=False, compare=False)


def rotations(call: Callable[[], Any], layer: Callable[[], int | None] = lambda: None) -> list[Traced]:
    """The functions that rotate during a call, in the order of their first calls; of nested functions the outermost.

    Args:
        call: runs the model without arguments, best in float64.
        layer: returns the number of the layer that runs.
    """
    found: dict[tuple, Traced] = {}
    entered: dict[int, tuple[dict[str, torch.Tensor], int, dict[str, Any]]] = {}
    outermost: list[tuple[tuple, Traced]] = []

    def watch(frame: FrameType, event: str, returned: Any) -> None:
        if event == "call":
            tensors = _arguments(frame)
            if len(tensors) > 1 or (tensors and "self" in frame.f_locals):
                entered[id(frame)] = tensors, len(outermost), dict(frame.f_locals)
        elif event == "return":
            if id(frame) not in entered:
                return
            tensors, before, given = entered.pop(id(frame))
            sys.setprofile(None)
            try:
                seen = _rotation(frame, tensors, returned)
                if seen is not None and (frame.f_code, seen.layout, seen.rotary_dim) not in found:
                    seen = replace(seen, replayed=_replayed(frame, given), given=given)
            finally:
                sys.setprofile(watch)
            if seen is not None:
                seen = replace(seen, turns=tuple(replace(turn, layer=layer()) for turn in seen.turns))
                del outermost[before:]  # the inner functions of this one
                outermost.append(((frame.f_code, seen.layout, seen.rotary_dim), seen))

    with torch.no_grad():
        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(None)
    for number, (key, seen) in enumerate(outermost):
        before = found.get(key)
        turns = tuple(replace(turn, call=number) for turn in seen.turns)
        if before is not None:
            seen, turns = replace(seen, calls=before.calls + 1), before.turns + turns
        found[key] = replace(seen, turns=turns)
    return list(found.values())


def _arguments(frame: FrameType) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a frame, those in tuples as well."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = {}
    for name in names:
        value = frame.f_locals.get(name)
        for i, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, torch.Tensor):
                found[f"{name}[{i}]" if isinstance(value, tuple) else name] = part
    return found


def _rotation(frame: FrameType, tensors: dict[str, torch.Tensor], returned: Any) -> Traced | None:
    """The rotation that a function made, if the first of its results is rotated."""
    results = [y for y in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(y, torch.Tensor)]
    results = [y for y in results if y.is_floating_point() and y.ndim > 1]
    if not 0 < len(results) <= 3:
        return None
    rotated: list[str] = []
    turns: list[Turn] = []
    measured = None
    for y in results:
        candidates = (
            n for n, x in tensors.items() if x.shape == y.shape and x.is_floating_point() and n not in rotated
        )
        for name in candidates:
            part = _features_that_change(tensors[name], y)
            x, after = (z[..., part].detach().clone() for z in (tensors[name], y))
            found = rotation_of(x, after)
            if found is not None:
                measured = measured or found
                rotated.append(name)
                turns.append(Turn(0, x, after, name, *found[:2], first=part.start))
                break
    others = [x for name, x in tensors.items() if name not in rotated]
    if measured is None or not (others or len(rotated) > 1 or _turns_tokens_apart(turns[0], measured[2])):
        return None
    layout, out_layout, rotary_dim, factor = measured
    name, function = _named(frame.f_code, frame)
    return Traced(name, function, tuple(rotated), layout, out_layout, rotary_dim, results[0].shape[-1], factor,
                  turns=tuple(turns))  # fmt: skip


def _features_that_change(x: torch.Tensor, y: torch.Tensor) -> slice:
    """The features from the first that changes on, up to the last if there are features before the first."""
    changed = (x != y).flatten(0, -2).any(0).nonzero().flatten().tolist()
    first, end = (changed[0], changed[-1] + 1) if changed else (0, 0)
    return slice(first, end) if first and (end - first) % 2 == 0 else slice(0, x.shape[-1])


def turned(turn: Turn, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of a rotation, float64 ``[..., rotary_dim / 2]``, with the factor; NaN for zeros."""
    x0, x1 = pairs(turn.before[..., :rotary_dim].double(), turn.layout)
    y0, y1 = pairs(turn.after[..., :rotary_dim].double(), turn.out_layout)
    size = x0 * x0 + x1 * x1
    return (x0 * y0 + x1 * y1) / size, (x0 * y1 - x1 * y0) / size


def _turns_tokens_apart(turn: Turn, rotary_dim: int) -> bool:
    """Whether angles differ: an exchange of halves turns everything by a right angle."""
    cosine = turned(turn, rotary_dim)[0].nan_to_num()
    return bool((cosine.flatten() - cosine.flatten()[0]).abs().max() > 1e-3)


def _replayed(frame: FrameType, given: dict[str, Any]) -> Callable[[dict[str, Any]], Any] | None:
    """A function that runs the code of a frame once more, with other values of the parameters.

    Methods and functions inside of functions are no names of a module, but their code, their globals and what they
    enclose are those of the frame.
    """
    code = frame.f_code
    if any(name not in given for name in code.co_freevars):
        return None
    closure = tuple(CellType(given[name]) for name in code.co_freevars)
    function = FunctionType(code, frame.f_globals, code.co_name, None, closure)
    names = code.co_varnames
    count, only = code.co_argcount, code.co_kwonlyargcount
    starred = count + only
    rest = names[starred] if code.co_flags & CO_VARARGS else ""
    options = names[starred + bool(rest)] if code.co_flags & CO_VARKEYWORDS else ""

    def again(values: dict[str, Any]) -> Any:
        named = {name: values[name] for name in names[count:starred]} | values.get(options, {})
        return function(*(values[name] for name in names[:count]), *values.get(rest, ()), **named)

    return again


def rotation_of(x: torch.Tensor, y: torch.Tensor) -> tuple[str, str, int, float] | None:
    """(layout, out_layout, rotary_dim, factor) if ``y`` is a rotation of ``x`` in pairs of features."""
    features = x.shape[-1]
    if x.numel() == 0 or features % 2 or x is y:
        return None
    x, y = x.detach().double().reshape(-1, features), y.detach().double().reshape(-1, features)
    changed = (x != y).any(0).nonzero()
    if len(changed) == 0:
        return None
    for rotary_dim in range(int(changed.max()) + 1, features + 1):
        if rotary_dim % 2:
            continue
        for layout, out_layout in _layouts():
            factor = _factor(pairs(x[:, :rotary_dim], layout), pairs(y[:, :rotary_dim], out_layout))
            if factor is not None:
                return layout, out_layout, rotary_dim, factor
    return None


def _layouts() -> Iterator[tuple[str, str]]:
    """The layouts before and after, most likely first."""
    yield from ((layout, layout) for layout in LAYOUTS)
    yield from ((one, other) for one in LAYOUTS for other in LAYOUTS if one != other)


def _factor(before: tuple[torch.Tensor, torch.Tensor], after: tuple[torch.Tensor, torch.Tensor]) -> float | None:
    """The factor between the lengths of all pairs, or None if there is none, or if all pairs only change their sign."""
    squares = [a.square() + b.square() for a, b in (before, after)]
    factor = float((squares[1].sum() / squares[0].sum().clamp_min(1e-30)).sqrt())
    if not 0.1 < factor < 10:
        return None
    if ((squares[1] - factor**2 * squares[0]).abs() > TOLERANCE * squares[0].mean()).any():
        return None
    (x0, x1), (y0, y1) = before, after
    turned = (x0 * y1 - x1 * y0).abs().max()
    return factor if turned > 1e-3 * float(squares[0].mean()) else None


def _named(code: CodeType, frame: FrameType) -> tuple[str, Callable[..., Any] | None]:
    """The full name of a function, and the function if its module has it under its name."""
    function = frame.f_globals.get(code.co_name)
    function = function if getattr(getattr(function, "__wrapped__", function), "__code__", None) is code else None
    return f"{frame.f_globals.get('__name__', '?')}.{code.co_qualname}", function
