"""The entries of the catalogue: a fault, and a fault that cannot be expressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A small implementation of RoPE that is wrong in one way.

    Attributes:
        name: the identifier, in snake_case.
        sentence: the mistake.
        symptom: the effect that users saw.
        seen_in: the report of the fault, as ``repository#number``; None if the fault is made up.
        convention: how ``function`` is called, a name of ``CONVENTIONS``.
        function: the faulty implementation.
        must_fail: the names of the laws that it must fail.
        options: the arguments of `ropelab.conformance.verify` that show the fault, such as ``rotary_dim``.
        triton: whether the implementation is a Triton kernel, which a CPU can only interpret.
        race: whether the result depends on the order of programs on a GPU; the interpreter always gets it wrong.
        only_definition: why only laws that compare with the definition can see the fault; empty if other laws can.
    """

    name: str
    sentence: str
    symptom: str
    seen_in: str | None
    convention: str
    function: Callable[..., Any]
    must_fail: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    triton: bool = False
    race: bool = False
    only_definition: str = ""

    def __call__(self, *arguments, **keywords):
        """Call the faulty implementation."""
        return self.function(*arguments, **keywords)


@dataclass(frozen=True)
class NotExpressed:
    """A known fault that the catalogue cannot express.

    Attributes:
        name, sentence, seen_in: as for `Fault`.
        reason: why no function in the catalogue can show it.
    """

    name: str
    sentence: str
    seen_in: str
    reason: str


def fault(sentence: str, **about) -> Callable[[Callable], Fault]:
    """Return a decorator that makes a function or class the fault of its name.

    Args:
        sentence: the mistake.
        about: the other attributes of `Fault`.
    """

    def make(function: Callable) -> Fault:
        return Fault(name=_snake_case(function.__name__), sentence=sentence, function=function, **about)

    return make


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
