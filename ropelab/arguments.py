"""Check single arguments: integers, numbers, flags, strings, sequences, tensors and devices.

Python takes a bool for an int, any string for true and NaN for a number. These functions refuse all three. NumPy's
scalars count as Python's. Tensors never count as scalars, because the host may have to wait for a GPU to read a tensor.
Every message reads ``name: expected ..., got ...``.
"""

import math
import operator
import sys
import warnings
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch

from ropelab.foreign import did_you_mean

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
POSITION_DTYPES = (torch.int32, torch.int64)
FLOAT32 = torch.finfo(torch.float32)
Word = TypeVar("Word", bound=str)


def integer(name: str, value: Any, at_least: int | None = None, below: int | None = None) -> int:
    """``value`` as an int; a `torch.SymInt` passes as it is.

    Args:
        name: the name of the argument, for the message.
        value: an int, or an object with ``__index__``; no bool, no float, no tensor.
        at_least, below: the range, ``at_least <= value < below``; None for no bound.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is out of range.
    """
    if type(value) is not int and type(value) is not torch.SymInt:
        value = _index(name, value)
    if (at_least is not None and value < at_least) or (below is not None and value >= below):
        bounds = "" if at_least is None else f" >= {at_least}"
        bounds += "" if below is None else f"{' and' if bounds else ''} < {below}"
        raise ValueError(f"{name}: expected an integer{bounds}, got {value}")
    return value


def number(
    name: str, value: Any, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> float:
    """``value`` as a float, never NaN or infinite.

    Args:
        name: the name of the argument, for the message.
        value: a real number of Python or NumPy; no bool, no string, no tensor.
        at_least, above, at_most: the range, ``above < value`` and ``at_least <= value <= at_most``; None for no bound.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is not finite, or is out of range.
    """
    found = value if type(value) is float else _real(name, value)
    if (
        not -math.inf < found < math.inf  # compilers can follow this, but not isfinite
        or (at_least is not None and found < at_least)
        or (above is not None and found <= above)
        or (at_most is not None and found > at_most)
    ):
        limits = ((">=", at_least), (">", above), ("<=", at_most))
        bounds = " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)
        raise ValueError(f"{name}: expected a finite number{' ' if bounds else ''}{bounds}, got {value}")
    return found


def single(name: str, value: Any, at_least: float = -FLOAT32.max) -> float:
    """`number` for a function that takes float32: a larger one would become infinite there."""
    return number(name, value, at_least=at_least, at_most=FLOAT32.max)


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool. It must be a bool of Python or NumPy: ``"no"``, 0 and None are refused.

    Raises:
        TypeError: ``value`` is not a bool.
    """
    if type(value) is bool:
        return value
    if _of_numpy(value, "bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name}: expected a bool, got {shown(value)}")


def choice(name: str, value: Word, allowed: Collection[str]) -> Word:
    """Return ``value``, which must be one of the strings ``allowed``.

    Raises:
        TypeError: ``value`` is not a string.
        ValueError: ``value`` is another string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {tuple(allowed)}, got {shown(value)}")
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {tuple(allowed)}, got {value!r}{did_you_mean(value, allowed)}")
    return value


def sequence(name: str, values: Any) -> tuple:
    """``values`` as a tuple, from a list, a tuple, a range or a one-dimensional NumPy array.

    Raises:
        TypeError: ``values`` is a string, set, mapping, tensor or another object that is not a sequence.
    """
    if _of_numpy(values, "ndarray") and values.ndim == 1:
        return tuple(values.tolist())
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: expected a sequence, got {shown(values)}")
    return tuple(values)


def integers(name: str, values: Any, at_least: int | None = None, below: int | None = None) -> tuple[int, ...]:
    """``values`` as a tuple of ints. `integer` takes each element, and a message names the element, as ``name[2]``.

    Raises:
        TypeError: ``values`` is not a sequence, or an element is not an integer.
        ValueError: an element is out of range.
    """
    values = sequence(name, values)
    return tuple(integer(f"{name}[{i}]", value, at_least, below) for i, value in enumerate(values))


def numbers(name: str, values: Any, above: float | None = None) -> tuple[float, ...]:
    """``values`` as a tuple of floats. `number` takes each element, and a message names the element, as ``name[2]``.

    Raises:
        TypeError: ``values`` is not a sequence, or an element is not a number.
        ValueError: an element is not finite or is out of range.
    """
    values = sequence(name, values)
    return tuple(number(f"{name}[{i}]", value, above=above) for i, value in enumerate(values))


def tensor(name: str, value: Any) -> torch.Tensor:
    """Return ``value``, which must be a tensor with strides.

    Raises:
        TypeError: ``value`` is not a tensor.
        ValueError: ``value`` is a sparse tensor, a nested tensor or a tensor of MKL-DNN.
    """
    if not isinstance(value, torch.Tensor):
        held = [one for one in (name, "weight") if isinstance(getattr(value, one, None), torch.Tensor)]
        hint = f" (pass its attribute {held[0]})" if held else ""
        raise TypeError(f"{name}: expected a torch.Tensor, got {shown(value)}{hint}")
    if value.layout is not torch.strided or value.is_nested:
        raise ValueError(f"{name}: expected a dense tensor, got {'nested' if value.is_nested else value.layout}")
    return value


def check_tensor(name: str, x: torch.Tensor, ranks: tuple[int, ...], shape: str, dtypes=DTYPES, hint: str = "") -> None:
    """Check the rank and the dtype of ``x``.

    Args:
        name: the name of the argument, for the message.
        ranks: the ranks that ``x`` may have.
        shape: the shapes of these ranks, in words, for the message.
        dtypes: the dtypes that ``x`` may have.
        hint: the end of the message: its likely meaning.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.
        ValueError: ``x`` has another rank, or no strides.
    """
    if not torch.compiler.is_compiling():  # compilers cannot follow this check, and trace only tensors with strides
        tensor(name, x)
    if x.ndim not in ranks:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}{hint}")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name}: expected one of {', '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}{hint}"
        )


def check_device(name: str, x: torch.Tensor, q: torch.Tensor, of: str = "q") -> None:
    """Raise ValueError unless ``x`` is on the device of ``q``, the argument ``of``."""
    if x.device != q.device:
        raise ValueError(f"{name}: expected {of}'s device {q.device}, got {x.device}")


def check_shape(
    name: str, x: torch.Tensor, shape: Sequence[int | str], q: torch.Tensor, of: str = "q", dtypes=DTYPES, hint=""
) -> None:
    """Check dtype, shape and device of ``x``.

    Args:
        name: the name of the argument, for the message.
        shape: the size of each axis, or the name of a size that is free.
        q: the argument ``of``, whose device ``x`` must have.
        dtypes: the dtypes that ``x`` may have.
        hint: the end of the message about another shape: its likely meaning.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.
        ValueError: ``x`` has another shape or device.
    """
    fits = isinstance(x, torch.Tensor) and x.ndim == len(shape)
    if not fits or any(not isinstance(size, str) and size != x.shape[i] for i, size in enumerate(shape)):
        # compilers cannot follow the construction of the message
        check_tensor(name, x, (), f"[{', '.join(map(str, shape))}]", dtypes, hint)
    check_tensor(name, x, (len(shape),), "", dtypes)
    check_device(name, x, q, of)


def check_dtype(name: str, x: torch.Tensor, q: torch.Tensor, of: str = "q") -> None:
    """Raise TypeError unless ``x`` has the dtype of ``q``, the argument ``of``."""
    if x.dtype != q.dtype:
        raise TypeError(f"{name}: expected {of}'s dtype {dtype_name(q.dtype)}, got {dtype_name(x.dtype)}")


def check_like(name: str, x: torch.Tensor, q: torch.Tensor, of: str = "q") -> None:
    """`check_dtype` and `check_device`."""
    check_dtype(name, x, q, of)
    check_device(name, x, q, of)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def device(name: str, value: Any) -> torch.device:
    """``value`` as a device with its index. None stands for torch's default device.

    Raises:
        TypeError: ``value`` is not a device, the name of a device, or None.
        ValueError: the device does not exist, or this process cannot use it.
    """
    if value is not None and not isinstance(value, (str, torch.device)):
        raise TypeError(f"{name}: expected a torch.device or its name, got {shown(value)}")
    try:
        return torch.empty(0, device=value).device
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA raises the second
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"{name}: expected a device that is available, got {str(value)!r} ({why})") from error


def warn(text: str) -> None:
    """Warn at the line outside of ropelab, where Python shows a text once.

    Adapters take what their packages take, and the study means what it calls: neither warns.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None:
        package, *inner = frame.f_globals.get("__name__", "").split(".")
        if package not in ("ropelab", "torch"):
            break
        if package == "ropelab" and inner[:1] in (["interop"], ["bench"], ["study"]):
            return
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def shown(value: Any) -> str:
    """The words of a message for a value of a wrong type: the type and, for simple types, the value."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{kind} {value!r:.60}" if isinstance(value, (bool, int, float, complex, str)) else kind


def _of_numpy(value: Any, *names: str) -> bool:
    """Whether ``value`` is of a class of NumPy with one of the names; this module does not need NumPy."""
    return type(value).__module__ == "numpy" and type(value).__name__ in names


def _index(name: str, value: Any) -> int:
    if not isinstance(value, (bool, torch.Tensor)):  # a bool of NumPy has no index
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: expected an integer, got {shown(value)}")


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):  # a bool of NumPy is no Real
        raise TypeError(f"{name}: expected a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        got = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a large {shown(value)}"
        raise ValueError(f"{name}: expected a finite number, got {got}") from None
