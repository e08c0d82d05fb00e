"""Replace functions in the modules and objects of other packages, and put the originals back."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ropelab.arguments import shown

Place = tuple[Any, str]
"""A module or another object, and the name of an attribute of its own."""

_ABSENT = object()
"""Stands for the original of an attribute that the owner did not have."""


class Patch:
    """The functions that a patch replaced. ``undo()`` puts the originals back, as does the end of a ``with`` block.

    A function that several patches share is put back when all of them are undone. A function that other code has
    replaced after the patch stays as it is.

    Args:
        replacements: maps each place to its new value. The constructor puts the values there. A value that is there
            already, from another patch, is shared with that patch.
        model: the model that is patched, for `undo_all`.
    """

    def __init__(self, replacements: Mapping[Place, object], model: torch.nn.Module | None = None):
        self._held: list[_Held] = []
        for (owner, name), new in replacements.items():
            present, known = vars(owner).get(name, _ABSENT), _REPLACED.setdefault(owner, {})
            shared = present is new and name in known and known[name].new is _function(new)
            if not shared:
                known[name] = _Replaced(present, _function(new))
                setattr(owner, name, new)
            known[name].patches += 1
            self._held.append(_Held(weakref.ref(owner), name, known[name], shared))
        if model is not None:
            _PATCHES[model] = [patch for patch in _PATCHES.get(model, ()) if patch._held] + [self]

    @property
    def functions(self) -> list[str]:
        """The names of the replaced functions, ``"module.name"`` or ``"Class.name"``."""
        return self._names(shared=False)

    def _names(self, shared: bool) -> list[str]:
        held = [each for each in self._held if each.shared == shared and callable(each.replaced.new)]
        owners = [(each.owner(), each.name) for each in held]
        return sorted({f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name in owners})

    def __repr__(self) -> str:
        already = [f"already patched: {', '.join(names)}"] if (names := self._names(shared=True)) else []
        new = [f"patch of {', '.join(self.functions) or 'nothing'}"] if self.functions or not already else []
        return f"<{'; '.join(new + already)}>"

    def undo(self) -> None:
        """Put the originals back where the replacements still are. A second call does nothing."""
        while self._held:
            held = self._held.pop()
            owner, name, replaced = held.owner(), held.name, held.replaced
            replaced.patches -= 1
            if owner is None or replaced.patches:
                continue
            if _REPLACED[owner].get(name) is replaced:
                del _REPLACED[owner][name]
            if _function(vars(owner).get(name)) is not replaced.new:
                continue
            if replaced.original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, replaced.original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.undo()


def check_model(model: torch.nn.Module) -> None:
    """Raise TypeError unless the argument ``model`` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {shown(model)}")


def undo_all(model: torch.nn.Module) -> None:
    """Undo all patches of a model, also those of which nobody kept what `patch` returned."""
    for patch in _PATCHES.pop(model, ()):
        patch.undo()


def is_replaced(owner: Any, name: str) -> bool:
    """Whether what the owner has under the name comes from a patch that is not undone."""
    replaced = _REPLACED.get(owner, {}).get(name)
    return replaced is not None and _function(vars(owner).get(name)) is replaced.new


def places(name: str, function: Callable) -> Iterator[Place]:
    """Each loaded module that has the function under the name."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and vars(module).get(name) is function:
            yield module, name


def with_names(function: Any, names: Mapping[str, object], code: types.CodeType | None = None) -> Any:
    """A copy of a function for which some global names mean something else, perhaps with other code.

    The copy's globals lack ``__name__``. With the name of a module, torch.compile would look the names up there.
    """
    known = {key: value for key, value in function.__globals__.items() if key != "__name__"} | dict(names)
    code = function.__code__ if code is None else code
    new = types.FunctionType(code, known, function.__name__, function.__defaults__, function.__closure__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


class _Replaced:
    """The original of an attribute, the function in its place, and the number of patches that want the function there.

    ``new`` is the function of a bound method, because a method would keep its module alive.
    """

    def __init__(self, original: object, new: object):
        self.original, self.new, self.patches = original, new, 0


class _Held(NamedTuple):
    owner: weakref.ref
    name: str
    replaced: _Replaced
    shared: bool


def _function(value: object) -> object:
    return getattr(value, "__func__", value)


_REPLACED: weakref.WeakKeyDictionary[Any, dict[str, _Replaced]] = weakref.WeakKeyDictionary()
_PATCHES: weakref.WeakKeyDictionary[torch.nn.Module, list[Patch]] = weakref.WeakKeyDictionary()
"""The patches of each model that are not undone."""
