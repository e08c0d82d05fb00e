"""Calls: which arguments of a function rotate, and how its tables broadcast against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

SIZES = {"b": 2, "s": 5, "d": 8, "1": 1}
"""The sizes of the axes of a probe: batch, sequence and features, and an axis of size 1."""
HEADS = (3, 1, 4)
"""The numbers of heads of the tensors of a probe."""

Arguments = Mapping[str, Any]
Draw = Callable[..., torch.Tensor]
"""Returns a random tensor of the sizes in the arguments."""


class Turn(NamedTuple):
    """One rotation: the names of one or two arguments, and tables that broadcast against these arguments."""

    names: tuple[str, ...]
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Call:
    """A way to call a rotation, here with tables that broadcast as they are. Subclasses read the tables differently.

    Attributes:
        rotated: the names of the arguments that rotate, in the order of the results.
        axes: the axes of these arguments: batch, heads, sequence, features as letters of ``"bhsd"``.
        table: the axes of the tables, but for the columns: letters of ``"bs1"``.
        tables: the names of the arguments with cosines and sines, or of the one argument with both.
        options: values of the other arguments that change what the function does.
    """

    rotated: tuple[str, ...] = ("q", "k")
    axes: str = "bhsd"
    table: str = "bs"
    tables: tuple[str, ...] = ("cos", "sin")
    options: Mapping[str, Any] = field(default_factory=dict)

    def turns(self, arguments: Arguments) -> list[Turn] | None:
        """The rotations of a call, or None if the original has to serve the call.

        Args:
            arguments: the value of each parameter that has a value, defaults included.
        """
        cos, sin = (arguments[name] for name in self.tables)
        broadcast = self.broadcast(cos, sin, arguments)
        return None if broadcast is None else [Turn(self.rotated, *broadcast)]

    def broadcast(
        self, cos: torch.Tensor, sin: torch.Tensor, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tables, in shapes that broadcast against the arguments that rotate; None as for `turns`."""
        fits = cos.ndim == len(self.table) + 1 and all(arguments[name].ndim == len(self.axes) for name in self.rotated)
        return (cos, sin) if fits else None

    def probe(self, draw: Draw, columns: Callable[[torch.Tensor], torch.Tensor], width: int) -> dict[str, Any]:
        """Random arguments, all sizes different.

        Args:
            draw: makes the tensors.
            columns: makes the columns of a table from ``width`` random columns.
            width: the number of random columns.
        """
        return {name: self._heads(draw, n) for name, n in zip(self.rotated, HEADS, strict=False)} | self._probe_tables(
            draw, columns, width
        )

    def _heads(self, draw: Draw, heads: int) -> torch.Tensor:
        return draw(*(heads if axis == "h" else SIZES[axis] for axis in self.axes))

    def _probe_tables(self, draw: Draw, columns: Callable[[torch.Tensor], torch.Tensor], width: int) -> dict[str, Any]:
        rows = [SIZES[axis] for axis in self.table]
        return {name: columns(draw(*rows, width)) for name in self.tables}


@dataclass(frozen=True)
class Unsqueezed(Call):
    """Tables that get the axis of the heads at a place: ``unsqueeze_dim``, or ``place`` if there is no such argument.

    Tables of any number of axes are served, as by the originals.
    """

    place: int = -2

    def broadcast(self, cos, sin, arguments):
        place = arguments.get("unsqueeze_dim", self.place)
        return cos.unsqueeze(place), sin.unsqueeze(place)


@dataclass(frozen=True)
class Complex(Call):
    """One complex table ``cos + i sin`` with a column for each pair, which gets axes of size 1 by an index."""

    index: tuple = ()

    def turns(self, arguments):
        table = arguments[self.tables[0]]
        if not isinstance(table, torch.Tensor) or not table.is_complex() or table.ndim != len(self.table) + 1:
            return None
        table = table[self.index].resolve_conj().resolve_neg()  # a kernel reads memory, and sees neither bit
        return [Turn(self.rotated, table.real, table.imag)]

    def _probe_tables(self, draw, columns, width):
        cos, sin = (super(Complex, self)._probe_tables(draw, columns, width)[self.tables[0]] for _ in range(2))
        return {self.tables[0]: torch.complex(cos, sin)}
