"""Global state: that of the laws, and that in which the function under test was imported.

A function may change what the whole process shares: torch's default dtype and device, grad mode, deterministic mode,
NumPy's error handling, the filters of warnings, functions of torch and of ropelab itself. No such change may reach the
laws, which compute the truth in the same process. Default dtype, default device, ``sys.path`` and replaced functions
that its import left are the function's own, and each of its calls finds them. The changes that a call makes are undone
after it, so that no finding depends on the calls before.

This holds against accidents. Nothing in one process holds against somebody who means to deceive.
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
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch._dynamo  # replaces functions of torch, so it comes before they are recorded

_ABSENT = object()
_AS_IT_IS = object()
Namespace = ModuleType | type


@dataclass(frozen=True, eq=False)
class Setting:
    """Something global that has a value.

    Attributes:
        name: for the reader.
        get, set: read and write it.
        neutral: its value while laws are held; left as it is by default.
        own: a call of the function finds the value that its import left; otherwise that of the law.
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
    """Whether torch, in deterministic mode, fills new memory."""
    # An attribute of the class that torch gives to this module.
    return torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def set_filling(on: bool) -> None:
    """Let torch, in deterministic mode, fill new memory or not."""
    torch.utils.deterministic.fill_uninitialized_memory = on  # type: ignore[attr-defined]


NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""NumPy's own defaults."""

SETTINGS = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32, own=True),
    Setting("default device", _default_device, torch.set_default_device, None, own=True),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, True),
    # New memory is filled with NaN, so that what nobody wrote is seen.
    Setting("deterministic mode", _deterministic, _set_deterministic, (True, True)),
    Setting("filling of new memory", filling, set_filling, True),
    _autocast("cpu"),
    _autocast("cuda"),
    Setting("NumPy's error handling", np.geterr, lambda kinds: np.seterr(**kinds), NUMPY_ERRORS),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("sys.path", lambda: list(sys.path), _set_path, own=True),
)
"""What the laws depend on."""


class Surroundings:
    """The global state of the laws and that of one function, kept apart.

    Functions that the laws call are those that there are when this is made.

    Attributes:
        changed: names of the settings that laws have values for, and of functions, that calls changed or replaced.
    """

    def __init__(self):
        self.changed: set[str] = set()
        self._ours = {namespace: _callables(namespace) for namespace in _namespaces()}
        self._replaced: dict[tuple[Namespace, str], Any] = {}
        self._set: dict[Setting, Any] = {}

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Neutral settings for the laws. Those before are restored at the end; the function finds them till then."""
        before = [(setting, setting.get()) for setting in SETTINGS]
        self._set = {setting: value for setting, value in before if setting.own} | self._set
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*deterministic")
            stack.enter_context(torch.inference_mode(False))
            stack.callback(_apply, before)
            _apply((setting, setting.neutral) for setting in SETTINGS if setting.neutral is not _AS_IT_IS)
            if _default_device() is not None:  # a context of the caller's has it, which no setting reaches
                stack.enter_context(torch.device("cpu"))
            yield

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Around the import of the function: what it leaves is the function's own, and not ours."""
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
        """Around a call of the function: it finds what is its own, and all that it changes is undone."""
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
        """The value of a setting as a call begins."""
        return self._set.get(setting, before)

    def _put_back(self) -> dict[tuple[Namespace, str], Any]:
        """Undo replacements of functions; return them."""
        replaced = {}
        for namespace, ours in self._ours.items():
            now = vars(namespace)
            for name in [name for name, value in ours.items() if now.get(name, _ABSENT) is not value]:
                replaced[namespace, name] = now.get(name, _ABSENT)
                _put(namespace, name, ours[name])
            if namespace is torch.Tensor and len(now) > len(ours):  # a new method may hide an inherited one
                for name in [name for name in now if name not in ours and hasattr(torch._C.TensorBase, name)]:
                    replaced[namespace, name] = now[name]
                    _put(namespace, name, _ABSENT)
        return replaced


def _apply(settings: Iterable[tuple[Setting, Any]]) -> None:
    for setting, value in settings:
        if setting.get() != value:
            setting.set(value)


def _namespaces() -> list[Namespace]:
    """Where the functions are that the laws call."""
    modules = [m for m in sys.modules.values() if isinstance(m, ModuleType)]
    ours = [m for m in modules if m.__name__.split(".")[0] == "ropelab"]
    classes = {v for m in ours for v in vars(m).values() if isinstance(v, type) and v.__module__.startswith("ropelab.")}
    return [builtins, math, time, np, torch, torch.Tensor, torch.autograd, torch.nn.functional, *ours, *classes]


def _callables(namespace: Namespace) -> dict[str, Any]:
    """By name; of a class its properties and constants too. ``torch.Storage`` follows the default dtype.

    Functions that torch.compile puts into a module, and takes out again, are not the module's own.
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
