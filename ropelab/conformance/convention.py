"""Calling conventions in general: they translate a case into arguments, and results into tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.case import CANNOT, Broken, Case, NotApplicable
from ropelab.conformance.implementation import Implementation
from ropelab.conformance.tensors import Tensors
from ropelab.layout.pairing import LAYOUTS, join
from ropelab.layout.seq_format import to_bshd


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        inputs: the tensors that the function rotates. They are among the arguments below, too.
        positional: the positional arguments.
        keywords: the keyword arguments, by name.
    """

    inputs: Tensors
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The arguments as a call has them, with the dtype and shape of tensors in place of numbers."""
        parts = [_said(value) for value in self.positional]
        return ", ".join((*parts, *(f"{name}={_said(value)}" for name, value in self.keywords.items())))

    def others(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the function does not rotate (tables, positions, offsets), by name or place."""
        named = {f"argument {i}": value for i, value in enumerate(self.positional)} | dict(self.keywords)
        inputs = {id(x) for x in self.inputs}
        return {n: v for n, v in named.items() if isinstance(v, torch.Tensor) and id(v) not in inputs}


class Convention:
    """A way to call a rotation.

    Attributes:
        name: the key of the convention in ``CONVENTIONS``.
        signature: the call, for messages.
        other_signatures: other forms of the call that a function may have.
        expresses: the keys of ``CANNOT`` that the convention can express.
        pair: whether a call rotates q and k together.
        in_place: whether the convention prescribes that the result overwrites the inputs; None if the author of a
            function declares it.
        differentiable: whether autograd records a call.
        computes_cosines: whether the function computes cosines from angles or positions; otherwise the caller passes
            tables.
        looks_up: whether the function itself finds the rows of the tables, or computes the angles; otherwise the
            caller does so for each token.
        negates: whether the caller asks for the inverse by negated positions.
        constant_tables: whether, by contract, tables get no gradient; None if the contract does not say.
        sees_documents: whether a function is told where packed documents begin; otherwise it sees positions at most.
        ends_with_documents: whether, by contract, a packed buffer ends with its last document.
        autocasts: whether, by contract, results under autocast have its dtype, as those of a linear layer.
        gradients_mean: what a deviation of the gradients of x, q or k says of the tensors that the function gets.
        passes: the name of a result that, by contract, is not rotated; the result for k is wrong where it is wrong.
        part: ``"k"``, or the name of that result, to have it by itself as the result for k; empty for both in one.
        shared: the name of an input that all heads share; with ``part``, a call has one head.
        partial: whether, by contract, features beyond the width of the tables pass unchanged.
        narrow: whether tables and maths have the dtype of the inputs unless the author declares otherwise.
        layouts: the layouts of the convention, its default first.
        out_layout: the layout of the result, where the convention prescribes another than that of the inputs.
        forms: other forms of the call that a function may take in place of the usual form, as parts of ``state``.
        own_tables: whether the function makes its angles or tables itself, so that its tables may end somewhere.
        columns: what the author of a function may declare of tables that have a column for each feature; empty if a
            column is for a pair.
        seq_formats: the orders of the axes of the convention, its default first.
    """

    name: str
    signature: str
    other_signatures: tuple[str, ...] = ()
    expresses: frozenset[str] = frozenset()
    pair = False
    in_place: bool | None = False
    differentiable = True
    computes_cosines = False
    own_tables = False
    forms: tuple[Mapping[str, Any], ...] = ()
    looks_up = True
    negates = False
    constant_tables: bool | None = None
    sees_documents = True
    ends_with_documents = False
    autocasts = False
    gradients_mean: Mapping[str, str] = {}
    passes = part = shared = ""
    partial = True
    narrow = False
    layouts: tuple[str, ...] = LAYOUTS
    out_layout: str | None = None
    columns: tuple[str, ...] = ()
    seq_formats: tuple[str, ...] = ("bshd",)

    def translate(self, implementation: Implementation, case: Case) -> Arguments:
        """Return the arguments of the call that the case describes.

        Raises:
            NotApplicable: the convention, or the parameters of this function, cannot express the case.
        """
        for need in case.needs():
            if need not in self.expresses:
                raise NotApplicable(f"{self.name}: {CANNOT[need]}")
        arguments = self.arguments(implementation, case)
        for name in arguments.keywords:
            if not accepts(implementation.function, name):
                raise NotApplicable(f"{self.name}: the function has no argument {name!r}")
        return arguments

    def arguments(self, implementation: Implementation, case: Case) -> Arguments:
        """Return the arguments for a case that needs nothing beyond ``expresses``."""
        raise NotImplementedError

    def column_layout(self, implementation: Implementation) -> str:
        """Return the layout of the columns of tables that have a column for each feature, or ``"pair"``."""
        declared = implementation.state.get("columns", "repeated")
        return implementation.layout if declared == "repeated" else declared

    def by_feature(self, implementation: Implementation, other: Implementation, case: Case) -> Arguments:
        """Return the call with tables that have a column for each feature, and two different columns for each pair.

        Args:
            implementation: the function; the columns of first members of pairs are those of its frequencies.
            other: the function with other frequencies, whose columns belong to second members.
            case: the call.

        Raises:
            NotApplicable: by contract, the two columns of a pair are equal, or there is one; or the result has another
                order than the features, where Transformers' own functions read one of the two columns.
        """
        declared, columns = implementation.state.get("columns"), self.column_layout(implementation)
        if not self.columns or columns == "pair":
            raise NotApplicable(f"{self.name}: the two features of a pair share a column of the tables")
        if declared == "repeated":
            raise NotApplicable("declared: the two columns of a pair are equal, and the function may read either")
        if columns != implementation.out_layout or columns not in (implementation.layout, self.out_layout):
            raise NotApplicable("the columns are in the order of the features, and the result has another order")
        first, second = (self.translate(one, case) for one in (implementation, other))
        tables = {id(t) for t in first.others().values() if t.is_floating_point()}
        own, others = torch.tensor([True, False]).expand(case.rotary_dim // 2, 2).unbind(-1)
        of_first = join(own, others, columns).to(implementation.device)
        both = zip(first.positional, second.positional, strict=True)
        return replace(first, positional=tuple(torch.where(of_first, a, b) if id(a) in tables else a for a, b in both))

    def callable(self, implementation: Implementation, case: Case) -> Callable[..., Any]:
        """Return the object that takes the arguments: the function itself, or a module that it made."""
        return implementation.function

    def making(self, implementation: Implementation, case: Case) -> Arguments | None:
        """Return the arguments of the call that makes that object; None where the function takes the arguments."""
        return None

    def outputs(self, implementation: Implementation, case: Case, returned: Any, arguments: Arguments) -> Tensors:
        """Return the results ``[B, S, H, D]``, which the function returned or left in its inputs.

        Raises:
            Broken: the function returned something else than the convention says.
        """
        returned = returned if isinstance(returned, (tuple, list)) else (returned,)
        if not all(isinstance(y, torch.Tensor) for y in returned) or len(returned) < len(case.inputs):
            got, count = ", ".join(type(y).__name__ for y in returned), len(case.inputs)
            raise Broken(f"the function, called as {self.signature}, returned {got}, expected {count} tensors")
        fmt = implementation.format(case)
        for y in returned:
            if y.ndim != len(fmt):
                raise Broken(f"a result has shape {tuple(y.shape)}, expected {len(fmt)} axes ({fmt})")
        return tuple(to_bshd(y, fmt) for y in returned[: len(case.inputs)])

    def pieces(
        self, implementation: Implementation, case: Case, returned: Any, arguments: Arguments
    ) -> dict[str, tuple[Tensors, torch.Tensor]]:
        """Return the parts of the results by name, for a convention whose heads share an input.

        A part is what each head says of x, in the function's format, and what x is there. The part that rotates comes
        first, beside the shared input; the others pass as they came.

        Raises:
            Broken: the function returned something else than the convention says.
        """
        raise NotImplementedError

    def angle_error(self, angles: np.ndarray, frequencies: np.ndarray) -> np.ndarray | float:
        """Return how far the function's angles may be from angles in float64 (rad).

        Args:
            angles: exact angles ``[..., R/2]`` in rad.
            frequencies: exact inverse frequencies ``[R/2]`` in rad per position.
        """
        return 0.0

    def bad(self, implementation: Implementation, case: Case) -> Iterator[tuple[str, Arguments]]:
        """Yield calls that have to raise: the mistake in words, and the arguments."""
        wide = replace(case, rotary_dim=2 * case.inputs[0].shape[-1])
        yield "tables for heads twice as wide", self.translate(implementation, wide)


def call(function: Callable[..., Any], arguments: Arguments, form: str) -> Any:
    """Return what a function under test returns.

    Args:
        function: the function.
        arguments: its arguments.
        form: the call in words, for the message.

    Raises:
        NotApplicable: the function does not take these arguments, or it raised NotImplementedError.
    """
    signature = _signature(function)
    try:
        if signature is not None:
            signature.bind(*arguments.positional, **arguments.keywords)
    except TypeError as reason:
        raise NotApplicable(f"the function takes {signature}, and cannot be called as {form}: {reason}") from None
    try:
        return function(*arguments.positional, **arguments.keywords)
    except NotImplementedError as reason:
        raise NotApplicable(f"the function says that it does not do this: {reason}") from reason
    except TypeError as reason:
        if signature is None and reason.__traceback__ is not None and reason.__traceback__.tb_next is None:
            raise NotApplicable(f"the function cannot be called as {form}: {reason}") from None  # a call in C
        reason.add_note(f"The call: {arguments}")
        raise
    except Exception as error:
        error.add_note(f"The call: {arguments}")
        raise


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_said, value))})"
    return repr(value)


def check_tensor(name: str, y: torch.Tensor, device: torch.device) -> None:
    """Raise Broken unless a result is a dense tensor with numbers, on the device of the inputs."""
    kind = f"quantized {y.dtype}" if y.is_quantized else str(y.layout)
    if y.device != device or kind != "torch.strided":
        raise Broken(f"{name} is a {kind} tensor on the device {y.device}, expected torch.strided on {device}")


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether ``function`` takes a keyword argument ``name``; True if its signature is unknown."""
    signature = _signature(function)
    if signature is None:
        return True
    return name in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def offers(function: Callable[..., Any], name: str) -> bool:
    """Return whether the signature of ``function`` names a parameter ``name``."""
    signature = _signature(function)
    return signature is not None and name in signature.parameters


def first_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the first parameter of ``function``: empty if there is none, None if it is unknown."""
    signature = _signature(function)
    return None if signature is None else next(iter(signature.parameters), "")


def required(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of ``function`` that have no default; none if its signature is unknown."""
    return tuple(name for name, parameter in parameters(function).items() if parameter.default is parameter.empty)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of ``function`` by name, without ``*args`` and ``**kwargs``; none if they are unknown."""
    signature = _signature(function)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in signature.parameters.items() if p.kind not in kinds} if signature else {}


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # a function in C
        return None
