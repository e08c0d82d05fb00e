"""Arguments of the simple kinds: what counts as an integer, a number, a flag, and how each is refused.

Python takes a bool for an int, any string for true and NaN for a number. Arguments that pass through these functions
are what they seem. NumPy's scalars count as Python's. Tensors never count as scalars: to read one may mean to wait for
a GPU. Every message reads ``name: expected ..., got ...``.
"""

import math
import operator
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
POSITION_DTYPES = (torch.int32, torch.int64)


def integer(name: str, value: Any, at_least: int | None = None, below: int | None = None) -> int:
    """``value`` as an int; a `torch.SymInt` passes as it is.

    Args:
        name: of the argument, for the message.
        value: an int, or what Python takes as an index (``operator.index``); no bool, no float, no tensor.
        at_least, below: the range, ``at_least <= value < below``; None for no bound.

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
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
        name: of the argument, for the message.
        value: a real number of Python or NumPy; no bool, no string, no tensor.
        at_least, above, at_most: the range, ``above < value`` and ``at_least <= value <= at_most``; None for no bound.

    Raises:
        TypeError: not a real number.
        ValueError: not finite, or out of range.
    """
    found = value if type(value) is float else _real(name, value)
    if (
        not -math.inf < found < math.inf  # which compilers can follow, unlike isfinite
        or (at_least is not None and found < at_least)
        or (above is not None and found <= above)
        or (at_most is not None and found > at_most)
    ):
        limits = ((">=", at_least), (">", above), ("<=", at_most))
        bounds = " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)
        raise ValueError(f"{name}: expected a finite number{' ' if bounds else ''}{bounds}, got {value}")
    return found


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool: Python's or NumPy's, nothing that is only true or false when asked (``"no"``, 0, None).

    Raises:
        TypeError: not a bool.
    """
    if type(value) is bool:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name}: expected a bool, got {shown(value)}")


def choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """``value``, one of the strings ``allowed``.

    Raises:
        TypeError: not a string.
        ValueError: another string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {tuple(allowed)}, got {shown(value)}")
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {tuple(allowed)}, got {value!r}")
    return value


def sequence(name: str, values: Any) -> tuple:
    """``values`` as a tuple: of a list, a tuple, a range or a NumPy array; no string, set, mapping or tensor.

    Raises:
        TypeError: something else.
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return tuple(values.tolist())
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: expected a sequence, got {shown(values)}")
    return tuple(values)


def integers(name: str, values: Any, at_least: int | None = None, below: int | None = None) -> tuple[int, ...]:
    """``values`` as a tuple of ints, each as `integer` takes it; the message names the element, ``name[2]``.

    Raises:
        TypeError: no sequence, or an element that is no integer.
        ValueError: an element out of range.
    """
    values = sequence(name, values)
    return tuple(integer(f"{name}[{i}]", value, at_least, below) for i, value in enumerate(values))


def numbers(name: str, values: Any, above: float | None = None) -> tuple[float, ...]:
    """``values`` as a tuple of floats, each as `number` takes it; the message names the element, ``name[2]``.

    Raises:
        TypeError: no sequence, or an element that is no number.
        ValueError: an element that is not finite or out of range.
    """
    values = sequence(name, values)
    return tuple(number(f"{name}[{i}]", value, above=above) for i, value in enumerate(values))


def tensor(name: str, value: Any) -> torch.Tensor:
    """``value``, a tensor with strides.

    Raises:
        TypeError: not a tensor.
        ValueError: a tensor of another kind: sparse, nested, of MKL-DNN.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {shown(value)}")
    if value.layout is not torch.strided or value.is_nested:
        raise ValueError(f"{name}: expected a dense tensor, got {'nested' if value.is_nested else value.layout}")
    return value


def check_tensor(name: str, x: torch.Tensor, ranks: tuple[int, ...], shape: str, dtypes=DTYPES) -> None:
    """Raise unless ``x`` is a tensor of one of these ranks (``shape`` in words) and dtypes."""
    if not torch.compiler.is_compiling():  # compilers, which cannot follow this, trace strided tensors
        tensor(name, x)
    if x.ndim not in ranks:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected one of {', '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}")


def check_device(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    """Raise unless ``x`` is where ``q`` is."""
    if x.device != q.device:
        raise ValueError(f"{name}: expected q's device {q.device}, got {x.device}")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def device(name: str, value: Any) -> torch.device:
    """``value`` as a device with its index; the default device of torch for None.

    Raises:
        TypeError: not a device, its name, or None.
        ValueError: no such device, or one that cannot be used here.
    """
    if value is not None and not isinstance(value, (str, torch.device)):
        raise TypeError(f"{name}: expected a torch.device or its name, got {shown(value)}")
    try:
        return torch.empty(0, device=value).device
    except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
        raise ValueError(f"{name}: expected a device that can be used, got {str(value)!r}") from error


def shown(value: Any) -> str:
    """What a message says of a value of a wrong type: the type, and the value where it is short."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{kind} {value!r:.60}" if isinstance(value, (bool, int, float, complex, str)) else kind


def _index(name: str, value: Any) -> int:
    if not isinstance(value, (bool, np.bool_, torch.Tensor)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: expected an integer, got {shown(value)}")


def _real(name: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        got = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a large {shown(value)}"
        raise ValueError(f"{name}: expected a finite number, got {got}") from None
