"""Run the forward of a server's attention layer with other parts than its own, and find out what it computes.

A server's layer projects its input, may normalize the heads, rotates them, and calls the attention. The plugins keep
this forward, and give it stand-ins: norms and a rotation that return what they get, and an attention that does the work
of all three in one pass. This is right only if nothing else happens between norm, rotation and attention. `probe` finds
that out for each layer, with random numbers in place of all results.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_TOKENS = 3


class Unlike(Exception):
    """A layer computes something else than norm, rotation and attention; the message says what."""


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
class Call:
    """What a part of a layer was given and what it returned in a probe."""

    name: str
    given: tuple
    named: dict[str, Any]
    returned: Any


@dataclass
class Trace:
    """The calls of a layer's parts, in order."""

    calls: list[Call] = field(default_factory=list)

    def recorded(self, name: str, returns: Callable[..., Any]) -> Callable[..., Any]:
        """A part of the name that records its calls."""

        def part(*given: Any, **named: Any) -> Any:
            returned = returns(*given, **named)
            self.calls.append(Call(name, given, named, returned))
            return returned

        return part

    def only(self, name: str) -> Call:
        """The one call of a part.

        Raises:
            Unlike: there is no such call or more than one.
        """
        found = [call for call in self.calls if call.name == name]
        if len(found) != 1:
            raise Unlike(f"its forward calls {name} {len(found)} times")
        return found[0]


def arguments_of(forward: Callable[..., Any], tokens: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of ``tokens`` whose names the forward of a layer has as arguments.

    Raises:
        Unlike: the forward needs an argument that is not in ``tokens``.
    """
    named = {}
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.name in tokens:
            named[parameter.name] = tokens[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise Unlike(f"its forward has the argument {parameter.name}")
    return named


def random_tokens() -> dict[str, torch.Tensor]:
    """Positions and hidden states of a few tokens, under the names that servers give them."""
    positions, hidden = torch.arange(_TOKENS), torch.randn(_TOKENS, 8)
    return {"positions": positions, "position_ids": positions, "hidden_states": hidden}


def random_heads(*features: int) -> torch.Tensor:
    """Random numbers for the tokens of a probe."""
    return torch.randn(_TOKENS, *features)


def same_numbers(x: Any, y: torch.Tensor) -> bool:
    """Whether x has the numbers of y in the same order for each token."""
    return isinstance(x, torch.Tensor) and x.numel() == y.numel() and torch.equal(x.reshape(y.shape), y)


def _same_arguments(given: tuple, again: tuple) -> bool:
    pairs = [(x, y) for x, y in zip(given, again, strict=True) if isinstance(x, torch.Tensor)]
    return all(same_numbers(x, y) for x, y in pairs)


@dataclass(frozen=True)
class Found:
    """The norms that a layer applies to q and k, by name, and their place."""

    q_norm: str | None = None
    k_norm: str | None = None
    norm_first: bool = True


def probe(
    forward: Callable[..., Any],
    layer: torch.nn.Module,
    *,
    rotary: str,
    attention: str,
    norms: tuple[str, ...],
    parts: Mapping[str, Callable[..., Any]],
    attention_width: int,
) -> Found:
    """Find out which norms a layer applies to its heads, and that it does nothing else around the rotation.

    Args:
        forward: the layer's forward, not bound to the layer.
        layer: the layer.
        rotary, attention, norms: the names of its rotation, its attention, and modules that may be norms of heads.
        parts: for all other modules of the layer, functions that return the same numbers, at random, in each call.
        attention_width: the features that the attention returns for a token.

    Raises:
        Unlike: the layer computes something else.
    """
    tokens, attended = random_tokens(), random_heads(attention_width)

    def run() -> Trace:
        trace = Trace()

        def rotated(positions, q, k, *rest, **named):
            return torch.randn(q.shape), torch.randn(k.shape)

        stands = {name: trace.recorded(name, part) for name, part in parts.items()}
        stands |= {name: trace.recorded(name, lambda x, *rest, **named: torch.randn(x.shape)) for name in norms}
        stands[rotary] = trace.recorded(rotary, rotated)
        stands[attention] = trace.recorded(attention, lambda *given, **named: attended)
        try:
            with torch.no_grad(), torch.device("cpu"):
                forward(StandIn(layer, stands), **arguments_of(forward, tokens))
        except Unlike:
            raise
        except Exception as error:
            raise Unlike(f"its forward did not run with stand-ins: {type(error).__name__}: {error}") from error
        return trace

    trace, again = run(), run()  # norms and rotation return other numbers, and nothing but the attention may see them
    for name in parts:
        seen, seen_again = ([call.given for call in t.calls if call.name == name] for t in (trace, again))
        if len(seen) != len(seen_again) or not all(map(_same_arguments, seen, seen_again)):
            raise Unlike(f"{name} uses q or k besides the attention")
    turn, attend = trace.only(rotary), trace.only(attention)
    if len(turn.given) != 3 or turn.named or turn.given[0] is not tokens["positions"]:
        raise Unlike("it rotates by other positions than those of its tokens, or with further arguments")
    if len(attend.given) < 3:
        raise Unlike("its attention is not called with q, k and v")
    heads, names = attend.given[:2], []
    for place, x in enumerate(heads):
        names.append(_norm_around(trace, norms, place, turn, x))
    (q_norm, first), (k_norm, k_first) = names
    if (q_norm is None) != (k_norm is None) or first != k_first:
        raise Unlike("q and k are not normalized alike")
    return Found(q_norm, k_norm, first)


def _norm_around(
    trace: Trace, norms: tuple[str, ...], place: int, turn: Call, attended: Any
) -> tuple[str | None, bool]:
    """The norm of q (place 0) or of k (place 1), and whether it comes before the rotation."""
    given, turned, name = turn.given[1 + place], turn.returned[place], "qk"[place]
    calls = [call for call in trace.calls if call.name in norms]
    before = [call for call in calls if same_numbers(given, call.returned)]
    after = [call for call in calls if same_numbers(call.given[0], turned)]
    if len(before) + len(after) > 1:
        raise Unlike(f"{name} has more than one norm")
    last = after[0].returned if after else turned
    if not same_numbers(attended, last):
        raise Unlike(f"something happens to {name} between its rotation and the attention")
    if any(len(call.given) != 1 or call.named for call in (*before, *after)):
        raise Unlike(f"the norm of {name} has further arguments")
    return (before or after)[0].name if before or after else None, not after
