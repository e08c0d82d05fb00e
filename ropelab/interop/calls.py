"""What a call of another package's rotation means: found out by calling it, and then computed by the kernel.

A `Call` says which arguments rotate and how the tables broadcast against them, a `Kind` which features form pairs and
what the columns of the tables are. `ForeignRotation` tries the calls that have a function's parameters with all kinds,
for random arguments, and keeps those whose results are the kernel's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from ropelab.interop.broadcast import as_joined, norm_and_rotate_in_one_launch, promoted, rotate_in_one_launch
from ropelab.layout.pairing import Layout

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
        joined: whether a result of which a part rotates is contiguous, as that of the original.
    """

    joined: ClassVar[bool] = False

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


# ---------------------------------------------------------------------- the order of features and the columns of tables


@dataclass(frozen=True)
class Kind:
    """A convention for the order of features and for the columns of tables.

    Attributes:
        layout, out_layout, inverse: as for `ropelab.apply_rope`.
        columns: ``"feature"`` for tables with a column for each feature, ``"pair"`` for a column for each pair, and
            ``"twice"`` for a column for each pair and then all columns again, where the kernel reads the first half.
        repeated: the columns that a function may read as well, and that have to be equal: ``"halves"`` of the tables,
            ``"pairs"`` of adjacent columns, or None. A function is compared with the kind for such tables only.
        trailing: tables narrower than a head rotate the last features instead of the first.
    """

    layout: Layout
    columns: str
    out_layout: Layout | None = None
    inverse: bool = False
    repeated: str | None = None
    trailing: bool = False

    def rotary_dim(self, cos: torch.Tensor) -> int:
        """The number of features that tables of this kind rotate."""
        return cos.shape[-1] * (2 if self.columns == "pair" else 1)

    def rotate(self, xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor] | None:
        """`ropelab.interop.broadcast.rotate_in_one_launch` with the tables of this kind."""
        return rotate_in_one_launch(
            xs, *self._read(cos, sin), layout=self.layout, out_layout=self.out_layout, per_pair=self._per_pair,
            inverse=self.inverse, trailing=self.trailing,
        )  # fmt: skip

    def norm_and_rotate(
        self, xs: list[torch.Tensor], weights: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, eps: float
    ) -> list[torch.Tensor] | None:
        """`ropelab.interop.broadcast.norm_and_rotate_in_one_launch` with the tables of this kind."""
        cos, sin = self._read(cos, sin)
        return norm_and_rotate_in_one_launch(
            xs, weights, cos, sin, eps=eps, layout=self.layout, per_pair=self._per_pair
        )

    @property
    def norms(self) -> bool:
        """Whether one launch can normalize heads and then rotate them in this convention."""
        return self.out_layout is None and not self.inverse and not self.trailing

    @property
    def _per_pair(self) -> bool:
        return self.columns != "feature"

    def _read(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of the tables that the kernel reads."""
        if self.columns != "twice":
            return cos, sin
        return cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]


KINDS = (
    Kind("split_half", "feature"),  # Llama, GPT-NeoX
    Kind("interleaved", "feature"),  # Cohere
    Kind("interleaved", "twice"),  # GLM
    Kind("split_half", "pair"),  # gpt-oss
    Kind("interleaved", "pair"),  # GPT-J, Llama 4
    Kind("interleaved", "pair", trailing=True),  # DeepSeek-V4
    Kind("interleaved", "twice", out_layout="split_half", repeated="halves"),  # DeepSeek-V3
    Kind("split_half", "twice", inverse=True, repeated="halves"),  # nanochat
    Kind("interleaved", "feature", repeated="pairs"),  # Wan
)
"""The kinds, in the order in which a function is compared with them."""


# --------------------------------------------------------------------------------------------- what a function computes


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
            if self.call.joined:
                ys = as_joined(ys, turn.cos)
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
        kinds: the kinds with which the function is compared.

    Raises:
        ValueError: ``original`` has other parameters, or follows none of the known conventions.
    """

    def __init__(self, name: str, original: Rotating, calls: Mapping[tuple[str, ...], Sequence[Call]], kinds=KINDS):
        signature = inspect.signature(original.forward if isinstance(original, torch.nn.Module) else original)
        named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        self.original = original
        self.parameters = tuple(p.name for p in named)
        self._defaults = {p.name: p.default for p in named if p.default is not inspect.Parameter.empty}
        self._required = tuple(name for name in self.parameters if name not in self._defaults)
        if self.parameters not in calls:
            expected = ", ".join(next(iter(calls)))
            raise ValueError(f"{name}: expected parameters such as ({expected}), got {self.parameters}")
        self.understood = tuple(self._understood(calls[self.parameters], kinds))
        if not self.understood:
            words = {"split_half": "halves", "interleaved": "adjacent pairs"}
            expected = " or of ".join(dict.fromkeys(words[kind.layout] for kind in kinds))
            raise ValueError(f"{name}: expected a rotation of {expected}, got another function")

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

    def _understood(self, calls: Iterable[Call], kinds: Iterable[Kind]) -> Iterable[Understood]:
        """The calls that the original computes like the kernel, one for each value of the options."""
        served: list[Mapping[str, Any]] = []
        for call in calls:
            if call.options in served:
                continue
            found = next(filter(None, (self._compared(call, kind) for kind in kinds)), None)
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


_REFUSES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
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
