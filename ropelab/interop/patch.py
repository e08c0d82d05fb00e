"""Replace functions in the modules and objects of other packages, and put the originals back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Place = tuple[Any, str]
"""A module or another object, and the name of an attribute of its own."""

_ABSENT = object()
"""Stands for the original of an attribute that the owner did not have."""


class Patch:
    """The functions that a patch replaced. ``undo()`` puts the originals back, as does the end of a ``with`` block.

    A function that other code has replaced after the patch stays as it is.

    Args:
        replacements: maps each place to its new value. The constructor puts the values there.
    """

    def __init__(self, replacements: Mapping[Place, object]):
        self._replaced = {
            (owner, name): (vars(owner).get(name, _ABSENT), new) for (owner, name), new in replacements.items()
        }
        for (owner, name), (_, new) in self._replaced.items():
            setattr(owner, name, new)

    @property
    def functions(self) -> list[str]:
        """The names of the replaced functions, ``"module.name"`` or ``"Class.name"``."""
        places = [place for place, (_, new) in self._replaced.items() if callable(new)]
        return sorted({f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name in places})

    def __repr__(self) -> str:
        return f"<patch of {', '.join(self.functions) or 'nothing'}>"

    def undo(self) -> None:
        """Put the originals back where the replacements still are. A second call does nothing."""
        while self._replaced:
            (owner, name), (original, replacement) = self._replaced.popitem()
            if vars(owner).get(name) is not replacement:
                continue
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.undo()
