"""What the catalogue says of a fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A small implementation of RoPE that is wrong in one way.

    Attributes:
        name: identifier, snake_case.
        sentence: what is wrong.
        symptom: what its users saw.
        seen_in: where it was reported, as ``repository#number``; None if it was made up.
        convention: of ``function``, a name that `ropelab.conformance.verify` knows.
        function: the faulty implementation.
        must_fail: laws that have to fail.
        options: what ``verify`` must be told to see it, such as ``layout`` or ``rotary_dim``.
        triton: whether it is a Triton kernel, which a CPU can only interpret.
        race: on a GPU, what comes out depends on which program is faster; interpreted, it is always wrong.
        only_definition: why no law can see it but agreement with the definition, at whatever positions and in
            whatever dtype; empty if one can.
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
        """The faulty implementation."""
        return self.function(*arguments, **keywords)


@dataclass(frozen=True)
class NotExpressed:
    """A fault that is known but not in the catalogue, and why it cannot be."""

    name: str
    sentence: str
    seen_in: str
    reason: str


def fault(sentence: str, **about) -> Callable[[Callable], Fault]:
    """Make a function or class the fault of its name; ``about`` are the attributes of `Fault`."""

    def make(function: Callable) -> Fault:
        return Fault(name=_snake_case(function.__name__), sentence=sentence, function=function, **about)

    return make


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
