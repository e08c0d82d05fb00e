"""How implementations are called: nine conventions, each translated from and to canonical cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT
from ropelab.conformance.case import CANNOT, Broken, Case, NotApplicable
from ropelab.conformance.subject import FLOAT32, Subject, Tensors
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import LAYOUTS, join
from ropelab.layout.seq_format import DENSE_FORMATS, from_bshd, to_bshd
from ropelab.positions.packed import PackedSequences, context_parallel_positions

ALL = frozenset(CANNOT)


@dataclass(frozen=True)
class Arguments:
    """Of one call. ``rotated`` are the tensors to rotate, among the others."""

    rotated: Tensors
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def others(self) -> dict[str, torch.Tensor]:
        """The tensors that are not rotated (tables, positions, offsets), by name or place."""
        named = {f"argument {i}": value for i, value in enumerate(self.positional)} | dict(self.keywords)
        rotated = {id(x) for x in self.rotated}
        return {n: v for n, v in named.items() if isinstance(v, torch.Tensor) and id(v) not in rotated}

    def with_others(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        """The same call with each of ``others`` changed."""
        others = {id(v) for v in self.others().values()}

        def changed(value):
            return change(value) if id(value) in others else value

        keywords = {name: changed(value) for name, value in self.keywords.items()}
        return replace(self, positional=tuple(map(changed, self.positional)), keywords=keywords)


class Convention:
    """A way to call a rotation.

    Attributes:
        name, signature: for the reader.
        expresses: what it can ask for, of the keys of ``CANNOT``.
        pair: q and k in one call.
        in_place: None if the author declares it, else what the convention prescribes.
        differentiable: autograd sees it.
        computes_cosines: from angles or positions; otherwise the caller hands in tables.
        looks_up: it finds the rows of tables, or makes the angles, itself; otherwise the caller does for each token.
        partial: by contract features beyond the tables' width pass unchanged.
        narrow: by default tables and maths are in the dtype of the inputs.
        layouts, seq_formats: that it has; the first is the default.
    """

    name: str
    signature: str
    expresses: frozenset[str] = frozenset()
    pair = False
    in_place: bool | None = False
    differentiable = True
    computes_cosines = False
    looks_up = True
    partial = True
    narrow = False
    layouts: tuple[str, ...] = LAYOUTS
    seq_formats: tuple[str, ...] = ("bshd",)

    def translate(self, subject: Subject, case: Case) -> Arguments:
        """The arguments for a case.

        Raises:
            NotApplicable: the convention, or this function's parameters, cannot express it.
        """
        for need in case.needs():
            if need not in self.expresses:
                raise NotApplicable(f"{self.name}: {CANNOT[need]}")
        arguments = self.arguments(subject, case)
        for name in arguments.keywords:
            if not accepts(subject.function, name):
                raise NotApplicable(f"{self.name}: the function has no argument {name!r}")
        return arguments

    def arguments(self, subject: Subject, case: Case) -> Arguments:
        """Translate a case that the convention can express."""
        raise NotImplementedError

    def callable(self, subject: Subject, case: Case) -> Callable[..., Any]:
        """What to call."""
        return subject.function

    def outputs(self, subject: Subject, case: Case, returned: Any, arguments: Arguments) -> Tensors:
        """Translate what the function returned, or left in its inputs."""
        returned = returned if isinstance(returned, (tuple, list)) else (returned,)
        if not all(isinstance(y, torch.Tensor) for y in returned) or len(returned) < len(case.inputs):
            got = ", ".join(type(y).__name__ for y in returned)
            raise Broken(f"expected {len(case.inputs)} tensors from a function called as {self.signature}, got {got}")
        fmt = subject.format(case)
        for y in returned:
            if y.ndim != len(fmt):
                raise Broken(f"expected a result of {len(fmt)} axes ({fmt}), got shape {tuple(y.shape)}")
        return tuple(to_bshd(y, fmt) for y in returned[: len(case.inputs)])

    def angle_error(self, angles: np.ndarray, frequencies: np.ndarray) -> np.ndarray | float:
        """Error (rad) of angles in the function, beyond those of float64 tables."""
        return 0.0

    def bad(self, subject: Subject, case: Case) -> Iterator[tuple[str, Arguments]]:
        """Calls that have to raise: what is wrong with them, and their arguments."""
        yield "tables for heads twice as wide", self.translate(subject, replace(case, rotary_dim=2 * _head_dim(case)))


class Ropelab(Convention):
    name = "ropelab"
    signature = (
        "fn(q, k=None, *, cos, sin, layout, seq_format, positions=None, offsets=0, inverse=False, inplace=False)"
    )
    expresses = ALL
    pair = True
    in_place = None
    seq_formats = DENSE_FORMATS

    def arguments(self, subject, case):
        tensors = _native(subject, case)
        cos, sin = subject.tables(case, _rows(case))
        options = {"cos": cos, "sin": sin, "layout": subject.layout, "seq_format": subject.format(case)}
        if subject.out_layout != subject.layout:
            options["out_layout"] = subject.out_layout
        if subject.in_place:
            options["inplace"] = True
        if case.inverse:
            options["inverse"] = True
        size, rank = case.shard or (1, 0)
        if case.positions is not None:
            options["positions"] = case.positions.to(subject.device)
        elif case.lengths is not None:
            cu_seqlens, offsets = _cu_seqlens(subject, case.lengths), _offsets(subject, case)
            packed = PackedSequences(cu_seqlens, case.shape[1], offsets=offsets, cp_size=size, cp_rank=rank)
            options["positions"] = packed.positions
        elif case.shard:
            options["positions"] = context_parallel_positions(case.shape[1] * size, size, rank, device=subject.device)
        elif case.offsets != 0:
            options["offsets"] = _offsets(subject, case)
        return Arguments(tensors, tensors, options)


class HuggingFace(Convention):
    name = "huggingface"
    signature = "fn(q, k, cos, sin, unsqueeze_dim=1) -> (q, k)"
    expresses = ALL - {"packed", "shards", "padding"}
    pair = True
    looks_up = False
    partial = False
    narrow = True
    seq_formats = ("bhsd", "bshd")

    def arguments(self, subject, case):
        q, k = tensors = _native(subject, case, pair=True)
        positions = case.token_positions()
        cos, sin = (join(t, t, subject.state.get("columns", subject.layout)) for t in _turned(subject, case, positions))
        options = {} if subject.seq_format == "bhsd" else {"unsqueeze_dim": 2}
        return Arguments(tensors, (q, k, cos, sin), options)


class FlashAttention(Convention):
    name = "flash_attn"
    signature = (
        "fn(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None) -> x"
    )
    expresses = frozenset({"inverse", "factor", "offset", "offsets per sequence", "packed", "padding"})
    in_place = None

    def arguments(self, subject, case):
        (x,) = tensors = _native(subject, case)
        options: dict[str, Any] = {}
        if subject.layout == "interleaved":
            options["interleaved"] = True
        if subject.in_place:
            options["inplace"] = True
        if case.offsets != 0:
            options["seqlen_offsets"] = _offsets(subject, case)
        if case.lengths is not None:
            options |= {"cu_seqlens": _cu_seqlens(subject, case.lengths), "max_seqlen": max(case.lengths, default=0)}
        return Arguments(tensors, (x, *_turned(subject, case, _rows(case))), options)


class TransformerEngine(Convention):
    name = "transformer_engine"
    signature = 'fn(t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0) -> t'
    expresses = frozenset({"inverse", "offset", "positions", "negative", "packed", "padding", "shards"})
    computes_cosines = True
    seq_formats = ("sbhd", "bshd")

    def arguments(self, subject, case):
        (t,) = tensors = _native(subject, case)
        options = {}
        if subject.format(case) != "sbhd":
            options["tensor_format"] = subject.format(case)
        if subject.layout == "interleaved":
            options["interleaved"] = True
        positions = case.shared_positions()
        if case.shard:
            options |= dict(zip(("cp_size", "cp_rank"), case.shard, strict=True))
            positions = torch.arange(case.shape[1] * case.shard[0])
        if case.lengths is not None:
            if case.offsets != 0:
                raise NotApplicable(f"{self.name}: {CANNOT['offset']}")
            options["cu_seqlens"] = _cu_seqlens(subject, case.lengths)
            positions = torch.arange(max(case.lengths, default=0) + 3)
        angles = subject.angles(positions, case.rotary_dim)
        freqs = join(angles, angles, subject.layout)[:, None, None].to(subject.device, torch.float32)
        return Arguments(tensors, (t, -freqs if case.inverse else freqs), options)

    def angle_error(self, angles, frequencies):
        return abs(angles.astype(np.float64).astype(np.float32).astype(EXACT) - angles)  # handed over in float32


class DeepSpeed(Convention):
    name = "deepspeed"
    signature = "fn(t, freqs_cos, freqs_sin) -> t"
    expresses = HuggingFace.expresses
    looks_up = False
    narrow = True
    seq_formats = ("sbhd", "bshd", "bhsd")

    def arguments(self, subject, case):
        (t,) = tensors = _native(subject, case)
        positions = case.token_positions() if _by_row(case) else case.shared_positions()[None]
        tables = (join(table, table, subject.layout) for table in _turned(subject, case, positions))
        tables = (from_bshd(table[:, :, None], subject.seq_format) for table in tables)
        return Arguments(tensors, (t, *tables))


class VLLM(Convention):
    name = "vllm"
    signature = "fn(positions, query, key, head_size, cos_sin_cache, is_neox), in place"
    expresses = frozenset({"inverse", "factor", "offset", "offsets per sequence", "positions", "positions per batch",
                           "packed"})  # fmt: skip
    pair = True
    in_place = True
    differentiable = False
    narrow = True

    def arguments(self, subject, case):
        try:
            query, key = tensors = tuple(x.view(-1, x.shape[2] * x.shape[3]) for x in _pair(case.inputs))
        except RuntimeError:
            raise NotApplicable(f"{self.name}: such memory is no [T, heads * head_size]") from None
        positions = case.token_positions().flatten().to(subject.device)
        cache = torch.cat(_turned(subject, case, _rows(case)), dim=-1)
        head_size, is_neox = _head_dim(case), subject.layout == "split_half"
        return Arguments(tensors, (positions, query, key, head_size, cache, is_neox))

    def outputs(self, subject, case, returned, arguments):
        return tuple(y.view(x.shape) for x, y in zip(case.inputs, arguments.rotated, strict=False))


class ComplexNumbers(Convention):
    name = "complex"
    signature = "fn(xq, xk, freqs_cis) -> (xq, xk)"
    expresses = frozenset({"inverse", "factor", "offset", "positions", "negative"})
    pair = True
    looks_up = False
    partial = False
    layouts = ("interleaved", "split_half")

    def arguments(self, subject, case):
        q, k = tensors = _native(subject, case, pair=True)
        cos, sin = _turned(subject, case, case.shared_positions())
        return Arguments(tensors, (q, k, torch.complex(cos, sin)))


class _OwnAngles(Convention):
    """It makes its own angles, in float32: ``base ** (-2i/R)`` times the position."""

    computes_cosines = True
    partial = False
    narrow = True

    def angle_error(self, angles, frequencies):
        """The angle ``p f`` of float32 arithmetic is off by ``(3 |ln f| + 4) u |p f|``.

        The exponent is rounded, and log(base) and their product if f is an exponential (each an error ``u |ln f|``);
        the power, a reciprocal and the product with p come on top (an ulp and two roundings). ``f = 1`` is exact.
        """
        return np.where(frequencies == 1, 0, FLOAT32 * abs(angles) * (3 * abs(np.log(frequencies)) + 4))

    def _options(self, subject: Subject, case: Case, function: Callable) -> dict[str, Any]:
        """What goes beyond the default, if the function can be told."""
        wanted = {} if subject.base == 10000.0 else {"base": subject.base}
        if case.rotary_dim != _head_dim(case):
            wanted["rotary_dim"] = case.rotary_dim
        return {name: value for name, value in wanted.items() if accepts(function, name)}


class Module(_OwnAngles):
    name = "module"
    signature = "fn(head_dim) -> module or a module; module(q, k) -> (q, k), tokens at 0, 1, 2, ..."
    pair = True
    seq_formats = ("bshd", "bhsd", "sbhd")

    def arguments(self, subject, case):
        tensors = _native(subject, case, pair=True)
        return Arguments(tensors, tensors)

    def callable(self, subject, case):
        if isinstance(subject.function, torch.nn.Module):
            return subject.function
        key = (_head_dim(case), case.rotary_dim)
        if key not in subject.state:
            options = self._options(subject, case, subject.function)
            subject.state[key] = subject.function(_head_dim(case), **options).to(subject.device)
        return subject.state[key]

    def bad(self, subject, case):
        good = self.translate(subject, case)
        with subject.surroundings.theirs():
            self.callable(subject, case)  # of the right head size
        yield "q and k of half the head size", replace(good, positional=tuple(x[..., ::2] for x in good.positional))


class Plain(_OwnAngles):
    name = "plain"
    signature = "fn(x, positions) -> x"
    expresses = frozenset({"inverse", "offset", "offsets per sequence", "positions", "positions per batch", "negative"})

    def arguments(self, subject, case):
        (x,) = tensors = _native(subject, case)
        positions = (case.token_positions() if _by_row(case) else case.shared_positions()).to(subject.device)
        positions = -positions if case.inverse else positions
        return Arguments(tensors, (x, positions), self._options(subject, case, subject.function))

    def bad(self, subject, case):
        good = self.translate(subject, case)
        x, positions = good.positional
        yield "positions for one token fewer", replace(good, positional=(x, positions[:-1]))


CONVENTIONS: dict[str, Convention] = {
    c.name: c
    for c in (Ropelab(), HuggingFace(), FlashAttention(), TransformerEngine(), DeepSpeed(), VLLM(), ComplexNumbers(),
              Module(), Plain())
}  # fmt: skip
"""By name."""


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` may be called with a keyword of this name, as far as can be known."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _pair(inputs: Tensors) -> Tensors:
    """q and k: a lone tensor is both, each with memory of its own."""
    return inputs if len(inputs) == 2 else (inputs[0], inputs[0].detach().clone())


def _native(subject: Subject, case: Case, *, pair: bool = False) -> Tensors:
    """The inputs as views in the function's format."""
    inputs = _pair(case.inputs) if pair else case.inputs
    return tuple(from_bshd(x, subject.format(case)) for x in inputs)


def _head_dim(case: Case) -> int:
    return case.inputs[0].shape[-1]


def _by_row(case: Case) -> bool:
    """Whether the sequences of the batch have positions of their own."""
    return isinstance(case.offsets, tuple) or (case.positions is not None and case.positions.ndim == 2)


def _rows(case: Case) -> int:
    """How many rows a table has: as many as the case needs, and three to spare, as models have."""
    positions = case.token_positions() if _by_row(case) else case.shared_positions()
    used = positions[positions != NO_POSITION].abs()
    return max(used.tolist(), default=0) + 4


def _turned(subject: Subject, case: Case, positions: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of ``positions``, or of all below a number; the inverse has the sine negated."""
    cos, sin = subject.tables(case, positions)
    return cos, -sin if case.inverse else sin


def _offsets(subject: Subject, case: Case) -> int | torch.Tensor:
    if isinstance(case.offsets, int):
        return case.offsets
    return torch.tensor(case.offsets, dtype=torch.int32, device=subject.device)


def _cu_seqlens(subject: Subject, lengths: tuple[int, ...]) -> torch.Tensor:
    ends = torch.tensor((0, *lengths)).cumsum(0)
    return ends.to(subject.device, torch.int32)
