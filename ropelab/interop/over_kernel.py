"""Find out what a rotation of another package computes, and compute the same with the kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ropelab.interop.broadcast import promoted
from ropelab.interop.calls import SIZES, Arguments, Call, Turn
from ropelab.interop.kinds import KINDS, Kind

Rotating = Callable[..., Any]
"""A rotation: it returns one tensor, or a tuple of tensors."""


class Understood(NamedTuple):
    """A call that one launch can serve.

    Attributes:
        call: which arguments rotate, by which tables.
        kind: the order of features and the columns of the tables.
        promotes: whether float16 with float32 tables becomes float32, as in Llama, or stays float16, as in Cohere.
        single: whether the function returns one tensor instead of a tuple.
        narrow: whether the function takes tables narrower than a head, which rotate a part of the head.
    """

    call: Call
    kind: Kind
    promotes: bool
    single: bool
    narrow: bool

    def matches(self, arguments: Arguments) -> bool:
        """Whether the call is of this form: the options are equal, and the arguments that rotate are tensors."""
        equal = all(_equal(arguments.get(name), value) for name, value in self.call.options.items())
        return equal and all(isinstance(arguments.get(name), torch.Tensor) for name in self.call.rotated)

    def turns(self, arguments: Arguments) -> list[Turn] | None:
        """The rotations of a call, or None if the original has to serve or to refuse the call."""
        turns = self.call.turns(arguments)
        if turns is None or self.narrow:
            return turns
        widths = ((self.kind.rotary_dim(turn.cos), arguments[name].shape[-1]) for turn in turns for name in turn.names)
        return turns if all(rotary_dim == features for rotary_dim, features in widths) else None

    def rotated(self, arguments: Arguments) -> Any:
        """The results of the original, computed by the kernel; None where the kernel cannot serve the call."""
        turns = self.turns(arguments)
        if turns is None:
            return None
        found: dict[str, torch.Tensor] = {}
        for turn in turns:
            xs = [arguments[name] for name in turn.names]
            if self.promotes and any(x.dtype != turn.cos.dtype for x in xs):
                if any(x.dtype == torch.bool for x in xs):  # no original turns it
                    return None
                xs = [promoted(x, turn.cos) for x in xs]
            ys = self.kind.rotate(xs, turn.cos, turn.sin)
            if ys is None:
                return None
            found |= zip(turn.names, ys, strict=True)
        results = tuple(found[name] for name in self.call.rotated)
        return results[0] if self.single else results


class ForeignRotation:
    """A rotation of another package, and what the kernel can compute of it.

    Args:
        name: the name of the function, for messages.
        original: the function.
        calls: maps the names of the parameters to the calls to try. The first call that the original computes like the
            kernel counts, for each value of the options.

    Raises:
        ValueError: ``original`` has other parameters, or follows none of the known conventions.
    """

    def __init__(self, name: str, original: Rotating, calls: Mapping[tuple[str, ...], Sequence[Call]]):
        signature = inspect.signature(original.forward if isinstance(original, torch.nn.Module) else original)
        named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        self.original = original
        self.parameters = tuple(p.name for p in named)
        self._defaults = {p.name: p.default for p in named if p.default is not inspect.Parameter.empty}
        self._required = tuple(name for name in self.parameters if name not in self._defaults)
        if self.parameters not in calls:
            raise ValueError(
                f"{name}: expected parameters such as (q, k, cos, sin, unsqueeze_dim), got {self.parameters}"
            )
        self.understood = tuple(self._understood(calls[self.parameters]))
        if not self.understood:
            raise ValueError(f"{name}: expected a rotation of halves or of adjacent pairs, got another function")

    def bound(self, args: tuple, kwargs: dict) -> dict[str, Any] | None:
        """The value of each parameter, or None for a call that the original refuses or that has surplus arguments."""
        rest = self.parameters[len(args) :]
        if len(args) > len(self.parameters) or not all(name in rest for name in kwargs):
            return None
        arguments = {**self._defaults, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        return arguments if all(name in arguments for name in self._required) else None

    def matching(self, args: tuple, kwargs: dict) -> tuple[Understood, dict[str, Any]] | None:
        """The `Understood` that matches a call, and its arguments; None if the original has to serve the call."""
        arguments = self.bound(args, kwargs)
        if arguments is None:
            return None
        for understood in self.understood:
            if understood.matches(arguments):
                return understood, arguments
        return None

    def over_kernel(self) -> Rotating:
        """The function that replaces the original: the kernel where it can, else the original."""
        original = self.original

        def over_kernel(*args, **kwargs):
            matching = self.matching(args, kwargs)
            found = None if matching is None else matching[0].rotated(matching[1])
            return original(*args, **kwargs) if found is None else found  # the original also raises its own errors

        over_kernel.__dict__["_rotation_over_ropelab"] = self
        return functools.update_wrapper(over_kernel, original) if inspect.isfunction(original) else over_kernel

    def _understood(self, calls: Iterable[Call]) -> Iterable[Understood]:
        """The calls that the original computes like the kernel, one for each value of the options."""
        served: list[Mapping[str, Any]] = []
        for call in calls:
            if call.options in served:
                continue
            found = next(filter(None, (self._compared(call, kind) for kind in KINDS)), None)
            if found is not None:
                served.append(call.options)
                yield found

    def _compared(self, call: Call, kind: Kind) -> Understood | None:
        """The call and the kind, if the original computes the rotation of this kind for random arguments.

        The tables are first as wide as a head, and then narrower, if the original takes narrower tables.
        """
        whole = self._defaults | _probe(call, kind, SIZES["d"]) | dict(call.options)
        try:
            returned = self.original(**whole)
            half = self.original(**{x: y.half() if x in call.rotated else y for x, y in whole.items()})
        except _REFUSES:  # for example for tables of another width
            return None
        single = isinstance(returned, torch.Tensor)
        understood = Understood(call, kind, (half if single else half[0]).dtype == torch.float32, single, True)
        if not _agree(returned, understood.rotated(whole)):
            return None
        part = self._defaults | _probe(call, kind, SIZES["d"] // 2) | dict(call.options)
        try:
            returned = self.original(**part)
        except _REFUSES:
            return understood._replace(narrow=False)
        return understood if _agree(returned, understood.rotated(part)) else None


_REFUSES = (RuntimeError, TypeError, ValueError, IndexError)
"""The errors that a function may raise for a probe that it is not made for."""


def rotation_of(function: Rotating) -> ForeignRotation | None:
    """The rotation that a function over the kernel replaces, or None for another function."""
    return getattr(function, "_rotation_over_ropelab", None)


def _probe(call: Call, kind: Kind, rotary_dim: int) -> dict[str, Any]:
    """Random arguments for a function. All sizes differ, and columns differ as far as the kind allows."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    def columns(table: torch.Tensor) -> torch.Tensor:
        if kind.repeated == "pairs":
            return table.repeat_interleave(2, dim=-1)
        return torch.cat((table, table), dim=-1) if kind.repeated == "halves" else table

    width = rotary_dim // 2 if kind.columns == "pair" or kind.repeated else rotary_dim
    return call.probe(draw, columns, width)


def _agree(found: object, expected: object) -> bool:
    """Whether results are equal up to the rounding of float32. Another convention is off by far more."""
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(_agree, found, expected))
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found.float(), expected.float(), atol=1e-5)


def _equal(value: object, wanted: object) -> bool:
    return value is wanted or (isinstance(value, (bool, int, str)) and value == wanted)
