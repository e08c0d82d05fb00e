"""Invalid calls of public functions and adapters, generated: each argument becomes a value that cannot be meant."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ropelab.arguments import POSITION_DTYPES


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "device meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
}
"""Defaults of torch that change nothing."""


class Adapter(NamedTuple):
    """A function with a valid call: one of `tests.ops.public_calls` or of `tests.ops.adapter_calls`.

    Attributes:
        arguments: makes the arguments of a valid call.
        free: names of arguments that the call does not read, and values that its contract takes, for all arguments or
            for one, as in ``"q_out of 8 bits"``.
    """

    function: Callable
    arguments: Callable[[], dict[str, Any]]
    free: tuple[str, ...] = ()


def copied(value: Any) -> Any:
    """The value with tensors of its own."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: copied(x) for name, x in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, (tuple, list)) else value


SOME_FIT = (
    "of no axis", "of one more axis", "shorter", "empty", "longer", "narrower", "without features", "negative", "large",
    "of another float", "tiny", "True for a number", "without memory",
)  # fmt: skip
"""Shapes and values that some arguments may have. The other hostile values must be refused."""
OF_ANOTHER_TYPE = ("None", "a list", "a number", "a string", "a tensor", "a bool", "a dict")
"""Values that must be refused by the name of their own argument. For others two arguments may contradict each other."""


class WithoutMemory(torch.Tensor):
    """A tensor that takes PyTorch's operations over, as a DTensor does: it has no storage."""

    @staticmethod
    def __new__(cls, x: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def __init__(self, x: torch.Tensor):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(x):
            return x.x if isinstance(x, cls) else x

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def of_tensor(x: torch.Tensor) -> dict[str, Any]:
    is_floating = x.is_floating_point()
    wrong = {
        "None": None, "a list": [1.0, 2.0], "a number": 2.5, "a string": "tensor", "on meta": x.to("meta"),
        "bool": x.bool(), "of another dtype": x.long() if is_floating else x.float(), "of no axis": x.new_zeros(()),
        "an array": np.ones((2, 2)),
        "of one more axis": x[None], "shorter": x[:-1], "empty": x[:0], "longer": torch.cat((x, x[-1:])),
    }  # fmt: skip
    if x.ndim > 1:
        wrong |= {"narrower": x[..., :-1], "without features": x[..., :0]}
    if is_floating and x.itemsize > 1:
        others = {"of another float": x.double(), "of 8 bits": x.to(torch.float8_e4m3fn)}
        wrong |= {"sparse": x.to_sparse(), "complex": x.cfloat()} | others
    if x.dtype == torch.int64:
        wrong["beyond"] = torch.full_like(x, 2**62)
    wrong["without memory"] = WithoutMemory(x)
    if x.dtype in POSITION_DTYPES:
        wrong |= {"negative": torch.full_like(x, -5), "large": torch.full_like(x, 2**31 - 1), "short": x.short()}
    return wrong


def hostile(value: Any) -> dict[str, Any]:
    """The name of a hostile value -> the value, of a wrong type, shape, dtype, device or range."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    wrong = {"None": None, "a list": [value], "a string": "nonsense", "a tensor": torch.tensor(2), "a number": 2.5}
    if isinstance(value, float):
        far = {"huge": 1e60, "minus huge": -1e60, "tiny": 1e-60}
        no_number = {"a number": math.nan, "a bool": True, "infinite": math.inf, "imaginary": 1j, "a digit": "2.0"}
        return wrong | no_number | far | {"beyond floats": 10**400}
    if isinstance(value, bool):
        return wrong | {"0": 0, "1": 1, "the word False": "False"}
    if isinstance(value, int):
        whole = {"a whole float": 2.0, "a float of NumPy": np.float64(2.0), "infinite": math.inf, "imaginary": 1j}
        return wrong | whole | {"a bool": True, "below 0": -5, "a digit": "3", "beyond integers": 10**30}
    if isinstance(value, str):
        return wrong | {"no word": "", "bytes": value.encode(), "a bool": True, "an array": np.array([value])}
    if isinstance(value, torch.dtype):
        dtypes = torch.bool, torch.complex64, torch.float8_e4m3fn
        return wrong | {f"{x}": x for x in (*dtypes, float, np.float32)} | {"a word": "float32"}
    if isinstance(value, (tuple, list)):
        wrong |= {"empty": (), "shorter": value[:-1], "a dict": {}}
        for i, part in enumerate(value):
            parts = {"True for a number" if x is True else name: x for name, x in hostile(part).items()}
            wrong |= {f"{name} in place {i}": (*value[:i], x, *value[i + 1 :]) for name, x in parts.items()}
    return wrong


def equivalents(value: Any) -> list:
    """The value written in other ways that mean the same."""
    if isinstance(value, bool):
        return [np.bool_(value)]
    if isinstance(value, (int, float)):
        return [np.int64(value), np.int32(value)] if isinstance(value, int) else [np.float64(value)]
    if isinstance(value, tuple) and value and all(type(x) is int for x in value):
        return [list(value), np.array(value), [np.int64(x) for x in value]]
    return [value.int()] if isinstance(value, torch.Tensor) and value.dtype == torch.int64 else []


def calls(adapter: Adapter) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(argument, name of the hostile value, arguments) of the hostile calls of an adapter."""
    function, arguments, free = adapter
    parameters = signature(function).parameters
    for argument, value in arguments().items():
        for what in hostile(value):
            parameter = parameters.get(argument)  # None for a key of a configuration
            optional = parameter and (parameter.default is None or "None" in str(parameter.annotation))
            may_be_none = what == "None" and optional
            kind = what.partition(" in place")[0]
            takes = may_be_none or bool({argument, kind, f"{argument} {kind}"} & set(free))
            if value is not None and not takes:
                call = arguments()
                yield argument, what, call | {argument: hostile(call[argument])[what]}


def tensors(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call with memory, by argument."""
    parts = {
        f"{name}[{i}]" if isinstance(value, (tuple, list)) else name: x
        for name, value in call.items()
        for i, x in enumerate(value if isinstance(value, (tuple, list)) else (value,))
    }
    found = ((name, x) for name, x in parts.items() if isinstance(x, torch.Tensor) and not x.is_nested)
    return {name: x for name, x in found if x.layout is torch.strided and not x.is_meta}


def contents(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The bytes of the tensors of a call."""
    flat = {name: x.detach().flatten() for name, x in tensors(call).items()}
    return {name: x.new_empty(x.shape).copy_(x).view(torch.uint8) for name, x in flat.items()}


def changed(before: dict[str, torch.Tensor], call: dict[str, Any]) -> set[str]:
    """The tensors whose bytes differ from ``before``."""
    return {name for name, x in contents(call).items() if not torch.equal(x, before[name])}


def outcome(function, call, *, argument=None, finite=False):
    """ "right" for a call that returns; "refused" for one that an argument's name refuses; else what is wrong.

    Args:
        argument: the argument that the refusal must name; by default any parameter of the function.
        finite: whether all results must be finite.
    """
    before = contents(call)
    try:
        found = function(**call)
    except (TypeError, ValueError) as error:
        begins = re.match(r"(\w+)\S*: expected .*\bgot\b", str(error), re.DOTALL)
        named = {argument} if argument else {*signature(function).parameters, *call}
        if not begins or begins[1] not in named:
            return f"{type(error).__name__}: {error}"
        wrote = changed(before, call)
        return f"wrote {wrote}, then {error}" if wrote else "refused"
    except (RuntimeError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    results = tensors({"results": found if isinstance(found, (tuple, list)) else (found,)} | call)
    infinite = [name for name, x in results.items() if x.is_floating_point() and not x.float().isfinite().all()]
    return f"{infinite} not finite" if infinite and finite else "right"


def aliased(adapter: Adapter) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(output, other, arguments) of the calls whose tensor ``other`` lies in the memory of an output."""
    function, arguments, _ = adapter
    call = arguments()
    before = contents(call)
    function(**call)
    for output in sorted(changed(before, call)):
        for other in tensors(call):
            given = arguments()
            parts = tensors(given)
            memory, x = parts[output].untyped_storage(), parts[other]
            if other == output or memory.nbytes() < x.numel() * x.itemsize:
                continue
            inside = x.new_empty(0).set_(memory, 0, x.shape).copy_(x.clone())
            yield output, other, {
                key: tuple(inside if part is x else part for part in value) if isinstance(value, tuple)
                else inside if value is x else value
                for key, value in given.items()
            }  # fmt: skip
