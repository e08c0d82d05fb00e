"""This file replaces functions in the modules of other packages, and puts the originals back."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

Place = tuple[ModuleType, str]
"""A module, and the name of an attribute of the module."""

_ABSENT = object()
"""Stands for the original of an attribute that the module did not have."""


class Patch:
    """The functions that a patch replaced. ``undo()`` puts the originals back, as does the end of a ``with`` block.

    A function that other code has replaced after the patch stays as it is.

    Args:
        replacements: maps each place to its new value. The constructor puts the values there.
    """

    def __init__(self, replacements: Mapping[Place, object]):
        self._replaced = {place: (getattr(*place, _ABSENT), new) for place, new in replacements.items()}
        for (module, name), (_, new) in self._replaced.items():
            setattr(module, name, new)

    @property
    def functions(self) -> list[str]:
        """The names of the replaced functions, ``"module.name"``."""
        places = [place for place, (_, new) in self._replaced.items() if callable(new)]
        return sorted(f"{module.__name__}.{name}" for module, name in places)

    def undo(self) -> None:
        """Put the originals back where the replacements still are. A second call does nothing."""
        while self._replaced:
            (module, name), (original, replacement) = self._replaced.popitem()
            if getattr(module, name, None) is not replacement:
                continue
            if original is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.undo()
