"""Keep two global states apart: the state of the laws, and the state that the function's import left.

A function may change state of the whole process: torch's default dtype and device, grad mode, deterministic mode,
NumPy's error handling, the filters of warnings, even functions of torch and of ropelab itself. The laws compute the
expected results in the same process, and no change may reach them. The import of a function may leave a default dtype,
a default device, entries of ``sys.path`` and replaced functions; each call of the function finds them again. The
changes that a call makes are undone after the call, so that no finding depends on earlier calls.

The separation guards against accidents. Within one process nothing guards against code that means to deceive.
"""

from __future__ import annotations

import builtins
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import repeat
from operator import is_
from types import ModuleType
from typing import Any

import numpy as np
import torch

_ABSENT = object()
_AS_IT_IS = object()
Namespace = ModuleType | type


@dataclass(frozen=True, eq=False)
class Setting:
    """A global setting.

    Attributes:
        name: the name in messages.
        get, set: functions that read and write the value.
        neutral: the value for the laws; by default the laws take the value that they find.
        own: whether a call of the function finds the value that its import left; otherwise it finds the value of the
            law.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    neutral: Any = _AS_IT_IS
    own: bool = False


def _autocast(device: str) -> Setting:
    name = f"autocast on {device}"
    return Setting(
        name, lambda: torch.is_autocast_enabled(device), lambda on: torch.set_autocast_enabled(device, on), False
    )


def _default_device() -> torch.device | None:
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(on: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(on[0], warn_only=on[1])


def _set_path(folders: list[str]) -> None:
    sys.path[:] = folders


def filling() -> bool:
    """Return whether torch fills new memory in deterministic mode."""
    # The attribute belongs to the class of this module, so that type checkers do not find it.
    return torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def set_filling(on: bool) -> None:
    """Set whether torch fills new memory in deterministic mode."""
    torch.utils.deterministic.fill_uninitialized_memory = on  # type: ignore[attr-defined]


NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""The defaults of NumPy."""

SETTINGS = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32, own=True),
    Setting("default device", _default_device, torch.set_default_device, None, own=True),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, True),
    # Deterministic mode fills new memory with NaN, which shows every element that the function did not write.
    Setting("deterministic mode", _deterministic, _set_deterministic, (True, True)),
    Setting("filling of new memory", filling, set_filling, True),
    _autocast("cpu"),
    _autocast("cuda"),
    Setting("NumPy's error handling", np.geterr, lambda kinds: np.seterr(**kinds), NUMPY_ERRORS),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("sys.path", lambda: list(sys.path), _set_path, own=True),
)
"""The settings that the laws depend on."""


class Surroundings:
    """The global state of the laws, and the global state of one function.

    The constructor records the functions that the laws call; replacements of them are found by comparison.

    Args:
        namespaces: the modules and classes whose functions are recorded; by default all that the laws use.

    Attributes:
        changed: the names of all that calls of the function changed: settings with a neutral value, and functions.
        returned: whether a call of the function has returned.
    """

    def __init__(self, namespaces: Iterable[Namespace] | None = None):
        import_module("torch._dynamo")  # replaces functions of torch, so it comes before they are recorded
        self.changed: set[str] = set()
        self.returned = False
        recorded = _namespaces() if namespaces is None else namespaces
        self._ours = {namespace: _callables(namespace) for namespace in recorded}
        self._replaced: dict[tuple[Namespace, str], Any] = {}
        self._set: dict[Setting, Any] = {}

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Set the neutral values for the laws, and restore the earlier values at the end.

        Until then, calls of the function find the earlier values of the settings that are their own.
        """
        before = [(setting, setting.get()) for setting in SETTINGS]
        self._set = {setting: value for setting, value in before if setting.own} | self._set
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # a report has no warnings of libraries
            stack.enter_context(torch.inference_mode(False))
            stack.callback(_apply, before)
            _apply((setting, setting.neutral) for setting in SETTINGS if setting.neutral is not _AS_IT_IS)
            if _default_device() is not None:  # a ``with torch.device(...)`` of the caller, which no setting reaches
                stack.enter_context(torch.device("cpu"))
            yield

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Keep the changes that the import of the function makes for its calls, and undo them for the laws."""
        before = [(setting, setting.get()) for setting in SETTINGS]
        try:
            with warnings.catch_warnings():
                yield
        finally:
            self._replaced = self._put_back()
            self._set = {setting: setting.get() for setting, _ in before if setting.own}
            _apply(before)

    @contextmanager
    def theirs(self) -> Iterator[None]:
        """Give a call of the function the state that its import left, and undo all changes that the call makes."""
        before = [(setting, setting.get()) for setting in SETTINGS]
        _apply(self._set.items())
        for (namespace, name), value in self._replaced.items():
            _put(namespace, name, value)
        try:
            with warnings.catch_warnings():
                yield
        finally:
            replaced = self._put_back()
            self.changed |= {f"{n.__name__}.{name}" for n, name in replaced.keys() - self._replaced.keys()}
            self.changed |= {
                setting.name
                for setting, value in before
                if setting.neutral is not _AS_IT_IS and setting.get() != self._found(setting, value)
            }
            _apply(before)

    def _found(self, setting: Setting, before: Any) -> Any:
        """Return the value of a setting at the start of a call; ``before`` is the value of the law."""
        return self._set.get(setting, before)

    def _put_back(self) -> dict[tuple[Namespace, str], Any]:
        """Undo all replacements of functions, and return them: (namespace, name) -> replacement."""
        replaced = {}
        for namespace, ours in self._ours.items():
            now = vars(namespace)
            if not all(map(is_, map(now.get, ours, repeat(_ABSENT)), ours.values())):  # each call compares thousands
                for name in [name for name, value in ours.items() if now.get(name, _ABSENT) is not value]:
                    replaced[namespace, name] = now.get(name, _ABSENT)
                    _put(namespace, name, ours[name])
            if namespace is torch.Tensor and len(now) > len(ours):  # a new method may hide an inherited method
                for name in [name for name in now if name not in ours and hasattr(torch._C.TensorBase, name)]:
                    replaced[namespace, name] = now[name]
                    _put(namespace, name, _ABSENT)
        return replaced


def _apply(settings: Iterable[tuple[Setting, Any]]) -> None:
    for setting, value in settings:
        if setting.get() != value:
            setting.set(value)


def _namespaces() -> list[Namespace]:
    """Return the modules and classes that contain the functions of the laws."""
    modules = [m for m in sys.modules.values() if isinstance(m, ModuleType)]
    ours = [m for m in modules if m.__name__.split(".")[0] == "ropelab"]
    classes = {v for m in ours for v in vars(m).values() if isinstance(v, type) and v.__module__.startswith("ropelab.")}
    return [builtins, math, time, np, torch, torch.Tensor, torch.autograd, torch.nn.functional, *ours, *classes]


def _callables(namespace: Namespace) -> dict[str, Any]:
    """Return the functions in a module by name, or all attributes of a class.

    Two kinds are left out: functions that torch.compile adds to a module for a while, and ``torch.Storage``, which
    changes with the default dtype.
    """
    found = {
        name: v
        for name, v in vars(namespace).items()
        if (callable(v) or isinstance(namespace, type)) and not name.startswith(("__compiled_fn_", "__resume_at_"))
    }
    if namespace is torch:
        del found["Storage"]
    return found


def _put(namespace: Namespace, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(namespace, name)
    else:
        setattr(namespace, name, value)
