"""Run the forward of a foreign layer with other parts than its own, and find out what it computes.

An adapter that does the work of several steps of a layer in one pass keeps the layer's forward, and gives it stand-ins:
norms and a rotation that return what they get, and an attention or a cache that does the work of all. This is right
only if nothing else happens between these steps, which a run with random numbers finds out.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Refused(Exception):
    """A layer computes something else than the steps that the one pass replaces; the message says what."""


class Reached(Exception):
    """Ends the run of a forward."""


def run(forward: Callable[..., Any], layer: Any, arguments: Mapping[str, Any]) -> None:
    """Call a forward without gradients, until it returns or a stand-in raises `Reached`.

    Raises:
        Refused: the forward fails.
    """
    try:
        with torch.no_grad():
            forward(layer, **arguments)
    except (Reached, Refused) as stop:
        if isinstance(stop, Refused):
            raise
    except Exception as error:
        raise Refused(f"its forward did not run with random numbers: {type(error).__name__}: {error}") from error


class Uses(TorchDispatchMode):
    """Remembers the memory of tensors from which an operation made a tensor in other memory."""

    def __init__(self):
        super().__init__()
        self.used: set[int] = set()
        self._alive: list[torch.Tensor] = []  # memory that is freed could be that of another tensor later

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self._alive += made + read
        self.used |= set(map(memory, read)) - set(map(memory, made))
        return result


def memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


class StandIn:
    """The ``self`` of a layer's forward, in which some attributes are others.

    Args:
        layer: the module that has all other attributes.
        parts: attribute -> what the forward finds in its place.
    """

    def __init__(self, layer: Any, parts: Mapping[str, Any]):
        self._ropelab_layer = layer
        self._ropelab_parts = parts

    def __getattr__(self, name: str) -> Any:
        parts = self._ropelab_parts
        if name in parts:
            return parts[name]
        found = getattr(self._ropelab_layer, name)
        if isinstance(found, types.MethodType):  # a method of the layer, which must see the parts as well
            return types.MethodType(found.__func__, self)
        return found


@dataclass
class PartCall:
    """What a part of a layer was given and what it returned in a run."""

    name: str
    given: tuple
    named: dict[str, Any]
    returned: Any


@dataclass
class Trace:
    """The calls of a layer's parts, in order."""

    calls: list[PartCall] = field(default_factory=list)

    @classmethod
    def of(cls, layer: torch.nn.Module, parts: Mapping[str, Callable[..., Any] | None], arguments) -> "Trace":
        """Run a layer's forward on the CPU with other parts; a part of None is None for the forward, too.

        Raises:
            Refused: as for `run`.
        """
        trace = cls()
        stands = {name: part if part is None else trace._recorded(name, part) for name, part in parts.items()}
        with torch.device("cpu"):
            run(type(layer).forward, StandIn(layer, stands), arguments)
        return trace

    def _recorded(self, name: str, returns: Callable[..., Any]) -> Callable[..., Any]:
        def part(*given: Any, **named: Any) -> Any:
            returned = returns(*given, **named)
            self.calls.append(PartCall(name, given, named, returned))
            return returned

        return part

    def only(self, name: str) -> PartCall:
        """The one call of a part.

        Raises:
            Refused: there is no such call or more than one.
        """
        found = [call for call in self.calls if call.name == name]
        if len(found) != 1:
            raise Refused(f"its forward calls {name} {len(found)} times")
        return found[0]


def same_numbers(x: Any, y: torch.Tensor) -> bool:
    """Whether x has the numbers of y in the same order for each token."""
    return isinstance(x, torch.Tensor) and x.numel() == y.numel() and torch.equal(x.reshape(y.shape), y)
