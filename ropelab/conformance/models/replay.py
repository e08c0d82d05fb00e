"""Check a rotation that was seen in a model, by calling it again with other tensors.

A method, a function inside of a function, or a function with parameters of its own follows no known convention. The
values of its arguments in one call say what they are: tensors that rotate, cosines, sines, angles or positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import Any

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.angles import simple, slopes
from ropelab.conformance.declared import declare
from ropelab.conformance.models.trace import Traced, Turn, turned
from ropelab.conformance.report import Report
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.verify import judge
from ropelab.conformance.words import said
from ropelab.layout.pairing import LAYOUTS, join

NEAR = 1e-4
"""Measured cosines agree with an argument if they differ by less. Models compute them in float32."""
NOT_ASKED = ("empty", "bad_input", "compile", "token_counts", "second_order")
"""Laws that do not apply to a part of a model: a model always has tokens, and checks its own arguments."""
ORDERS = {(4, 1): "bshd", (4, 2): "bhsd", (4, 0): "sbhd", (3, 0): "shd", (3, 1): "hsd"}
"""(number of axes, number of the axis of the tokens) -> the axes."""

Path = tuple[Any, ...]
"""The name of a parameter, and the number of a member if its value is a tuple or list."""
Map = Callable[[torch.Tensor], torch.Tensor]
Table = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Make = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
"""Makes an argument from positions ``[b, s]`` and frequencies ``[R/2]`` for inputs of a dtype."""


class NotUnderstood(Exception):
    """An error that says why a traced rotation cannot be called with other tensors."""


@dataclass(frozen=True)
class Replay:
    """A traced rotation, and what its arguments are.

    Attributes:
        traced: the rotation.
        turns: the tensors that its first call rotated.
        order: the axes of these tensors.
        made: how to make the arguments that depend on positions.
        shared: whether these arguments are the same for all sequences.
        theta: the frequencies ``[R/2]``, of the function itself if it gets positions.
        reversed: whether it turns by minus the angle.
        words: the arguments in words.
        passed: arguments of the same axes that the function returns as they came, such as values.
    """

    traced: Traced
    turns: tuple[Turn, ...]
    order: str
    made: dict[Path, Make]
    shared: bool
    theta: torch.Tensor
    reversed: bool
    words: str
    passed: dict[Path, torch.Tensor] = field(default_factory=dict)

    def reports(self) -> Iterator[tuple[str, Report]]:
        """Yield the report for each tensor that rotates, under its name."""
        for number, turn in enumerate(self.turns):
            rotary_dim = self.traced.rotary_dim
            declaration = declare(
                "plain", layout=turn.layout, out_layout=turn.out_layout, head_dim=rotary_dim,
                q_heads=self._heads(turn), sign="reversed" if self.reversed else "standard", skip=NOT_ASKED,
            )  # fmt: skip
            declaration = replace(declaration, claims=declaration.claims | {"frequencies": self.theta})

            def rotate(x: torch.Tensor, positions: torch.Tensor, number: int = number) -> torch.Tensor:
                try:
                    return self(number, x, positions)
                except Exception as refusal:  # the model shows that its own calls raise nothing
                    raise NotImplementedError(said(refusal)) from refusal

            yield turn.name, judge(rotate, declaration, Surroundings(), shrink=False)

    def __call__(self, number: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate ``x [B, S, H, R]`` in the place of a tensor of the first call; the others get random numbers.

        Args:
            number: the number of the tensor.
            x: the tensor.
            positions: ``[S]`` or ``[B, S]``.
        """
        if x.dtype.itemsize < 4:
            raise NotImplementedError("the model runs in float32")
        if bool((positions < 0).any()):
            raise NotImplementedError("a model has no negative positions")
        positions = positions.expand(x.shape[:2])
        if (self.shared and bool((positions != positions[:1]).any())) or "b" not in self.order:
            rows = (self._called(number, x[i : i + 1], positions[i : i + 1]) for i in range(len(x)))
            return torch.cat(list(rows)) if len(x) else x.clone()
        return self._called(number, x, positions)

    def _called(self, number: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not self.made and bool((positions != torch.arange(x.shape[1])).any()):
            raise NotImplementedError("the function takes no positions")
        given = dict(self.traced.given)
        tokens = self.turns[0].before.shape[self.order.index("s")]
        for name, value in given.items():
            if isinstance(value, int) and not isinstance(value, bool) and value == tokens:
                given[name] = x.shape[1]
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                given[name] = value.float()
        generator = torch.Generator().manual_seed(1)
        for i, turn in enumerate(self.turns):
            if i == number:
                ends = turn.first, self.traced.head_dim - turn.first - x.shape[-1]
                before, behind = (x.new_zeros(*x.shape[:-1], width) for width in ends)
                wide = torch.cat((before, x, behind), -1) if sum(ends) else x
            else:
                wide = self._random(x, self._heads(turn), self.traced.head_dim, generator)
            _put(given, _path(turn.name), self._in_order(wide))
        for path, value in self.passed.items():
            heads = value.shape[self.order.index("h")]
            _put(given, path, self._in_order(self._random(x, heads, value.shape[-1], generator)))
        for path, make in self.made.items():
            _put(given, path, make(positions[:1] if self.shared else positions, self.theta, x.dtype))
        assert self.traced.replayed is not None
        returned = self.traced.replayed(given)
        results = [returned] if isinstance(returned, torch.Tensor) else list(returned)
        y = [y for y in results if isinstance(y, torch.Tensor)][number]
        y = _permuted(y, self.order, _first(self.order))
        first = self.turns[number].first
        return (y if "b" in self.order else y[None])[..., first : first + x.shape[-1]]

    def _random(self, x: torch.Tensor, heads: int, width: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn((*x.shape[:2], heads, width), generator=generator).to(x.dtype)

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        return _permuted(x if "b" in self.order else x[0], _first(self.order), self.order)

    def _heads(self, turn: Turn) -> int:
        return turn.before.shape[self.order.index("h")]


def understood(traced: Traced) -> Replay:
    """Find out what the arguments of a traced rotation are.

    Raises:
        NotUnderstood: the arguments say nothing.
    """
    turns = tuple(turn for turn in traced.turns if turn.call == traced.turns[0].call)
    if traced.replayed is None:
        raise NotUnderstood("it cannot be called apart from the model")
    if turns[0].before.ndim == 5:
        return _of_five_axes(traced, turns)
    cosine, sine = turned(turns[0], traced.rotary_dim)
    order = _order(cosine, sine)
    cos, sin = (_permuted(t, order, _first(order)).nanmean(-2) for t in (cosine, sine))
    cos, sin = (t if "b" in order else t[None] for t in (cos, sin))  # [B, S, pairs]
    theta = torch.from_numpy(slopes(torch.atan2(sin, cos)[0].numpy())[0])
    made: dict[Path, Make] = {}
    shared, own, said, backwards = True, True, [], bool(theta[0] < 0)
    rotated = {_path(turn.name) for turn in turns}
    passed: dict[Path, torch.Tensor] = {}
    for path, value in _tensors(traced.given):
        if path in rotated:
            continue
        found = _role(value, cos, sin, traced.factor, traced.head_dim)
        if found is None and _passes(traced, value, turns[0]):
            passed[path] = value
            continue
        if found is None and cos.shape[1] in value.shape:
            raise NotUnderstood(f"{path[0]} {list(value.shape)} belongs to the tokens, and is none of their angles")
        if found is None:
            continue
        role, make, alike = found
        made[path] = make
        shared, own = shared and alike, own and role == "positions"
        backwards = backwards != role.startswith("minus")
        said.append(f"{role} {list(value.shape)}")
    if own and abs(traced.factor - 1) > NEAR:
        raise NotUnderstood("it multiplies cosines and sines by a factor of its own")
    pairs = len(theta)
    chosen = _frequencies(theta.abs(), traced.stated) if own else inverse_frequencies(2 * pairs)
    words = ", ".join(said) or "no positions"
    return Replay(traced, turns, order, made, shared, chosen, backwards, words, passed)


def _of_five_axes(traced: Traced, turns: tuple[Turn, ...]) -> Replay:
    """Return the replay of a rotation of q and k in one tensor, whose heads then count both.

    The axis that counts the tensors is the first for which the function takes three sequences with positions of their
    own.

    Raises:
        NotUnderstood: there is no such axis, or the arguments say nothing.
    """
    reason = NotUnderstood("its angles do not belong to one axis of tokens")
    for order in permutations(range(4)):  # tensors, sequences, tokens, heads
        folded = _folded(traced, turns, order)
        try:
            found = understood(folded)
            if found.order == "bshd":
                x = torch.randn(3, 4, folded.turns[0].before.shape[2], traced.rotary_dim)
                found(0, x, torch.arange(4) + torch.arange(3)[:, None])
                return found
        except NotUnderstood as other:
            reason = other
        except Exception:  # the function does not take such tensors
            continue
    raise reason


def _folded(traced: Traced, turns: tuple[Turn, ...], order: tuple[int, ...]) -> Traced:
    """Return a rotation of tensors ``[B, S, tensors * H, D]`` that calls the function with five axes."""
    tensors, batch, tokens, heads = order
    axes = batch, tokens, tensors, heads, 4
    back = [axes.index(axis) for axis in range(5)]
    count = turns[0].before.shape[tensors]

    def fold(x: Any) -> Any:
        return x.permute(axes).flatten(2, 3) if isinstance(x, torch.Tensor) and x.ndim == 5 else x

    def again(given: dict[str, Any]) -> Any:
        wide, short = dict(given), 0
        for name in {_path(turn.name)[0] for turn in turns}:
            x = given[name]
            short = -x.shape[2] % count
            x = torch.nn.functional.pad(x, (0, 0, 0, short))
            wide[name] = x.unflatten(2, (count, -1)).permute(back)
        assert traced.replayed is not None, "it can be called apart from the model"
        returned = traced.replayed(wide)
        results = [fold(y) for y in (returned if isinstance(returned, (tuple, list)) else (returned,))]
        return [y[:, :, : y.shape[2] - short] if isinstance(y, torch.Tensor) and y.ndim == 4 else y for y in results]

    parts = tuple(replace(turn, before=fold(turn.before), after=fold(turn.after)) for turn in turns)
    given = {name: fold(value) for name, value in traced.given.items()}
    return replace(traced, turns=parts, given=given, replayed=again)


def _passes(traced: Traced, value: torch.Tensor, turn: Turn) -> bool:
    """Whether an argument has the axes of the tensors that rotate, and the function returns it as it came."""
    if value.ndim != turn.before.ndim or traced.replayed is None:
        return False
    returned = traced.replayed(dict(traced.given))
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    return any(isinstance(y, torch.Tensor) and y.shape == value.shape and torch.equal(y, value) for y in results)


def _frequencies(theta: torch.Tensor, known: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The frequencies of the configuration that were measured, or those of a base with few digits."""
    pairs = len(theta)
    if pairs > 1 and theta[-1] > 0:
        known = *known, inverse_frequencies(2 * pairs, simple(float(theta[-1]) ** (-pairs / (pairs - 1))))
    for candidate in known:
        if len(candidate) == pairs and torch.allclose(candidate, theta, rtol=NEAR, atol=1e-7):
            return candidate
    raise NotUnderstood("its frequencies are not those of the configuration")


def _order(cosine: torch.Tensor, sine: torch.Tensor) -> str:
    """The axes of a tensor whose angles differ along the tokens only."""
    angles = torch.stack((cosine, sine)).nan_to_num()
    axes = [a for a in range(cosine.ndim - 1)
            if ((angles - angles.narrow(a + 1, 0, 1)).abs() > NEAR).any()]  # fmt: skip
    found = ORDERS.get((cosine.ndim, axes[0])) if len(axes) == 1 else None
    if found is None:
        raise NotUnderstood("its angles do not belong to one axis of tokens")
    return found


def _role(
    value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, factor: float, head_dim: int
) -> tuple[str, Make, bool] | None:
    """The role of an argument, how to make it, and whether it is one for all sequences; None for anything else.

    Args:
        value: the argument.
        cos, sin: the measured cosines and sines ``[B, S, pairs]``, with the factor.
        factor: the factor.
        head_dim: the number of all features of a head.
    """
    batch, tokens, count = cos.shape
    plain = not value.is_floating_point() and not value.is_complex()
    sizes = value.shape if plain else value.shape[:-1]
    place = "".join("s" if n == tokens else "b" if n == batch else "1" if n == 1 else "?" for n in sizes)
    if place.count("s") != 1 or place.count("b") > 1 or "?" in place:
        return None
    axes = place.replace("1", "")
    kept = value.reshape([n for n, a in zip(value.shape, place + " ", strict=False) if a != "1"])
    kept = kept if axes != "sb" else kept.transpose(0, 1)  # [s], [b, s], or with columns

    def laid_out(rows: torch.Tensor) -> torch.Tensor:
        rows = rows if "b" in axes else rows[0]
        rows = rows if axes != "sb" else rows.transpose(0, 1)
        shape = iter(rows.shape)
        return rows.reshape([1 if a == "1" else next(shape) for a in place] + ([] if plain else [rows.shape[-1]]))

    shared = "b" not in axes
    if plain:
        same = bool((kept == torch.arange(tokens)).all())
        return ("positions", lambda p, theta, dtype: laid_out(p).to(value.dtype), shared) if same else None

    def near(table: torch.Tensor) -> bool:
        return bool(((kept - (table[0] if shared else table)).abs() < NEAR * max(factor, 1)).all())

    def maker(of: Map, dtype: torch.dtype | None = None) -> Make:
        def make(positions: torch.Tensor, theta: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
            return laid_out(of(positions[..., None].double() * theta)).to(dtype or wanted)

        return make

    if value.is_complex():
        for role, sense in (("complex numbers", 1.0), ("minus the angles of complex numbers", -1.0)):
            if value.shape[-1] == count and near(torch.complex(cos, sense * sin)):
                return role, maker(lambda a: torch.polar(torch.ones_like(a), a), torch.complex64), shared
        return None
    columns: list[Map] = [lambda t: t, *(partial(_twice, layout=layout) for layout in LAYOUTS)]
    for role, rest, of in _tables(columns):
        width = of(cos, sin).shape[-1]
        more = value.shape[-1] - width
        if more and (more < 0 or value.shape[-1] != head_dim):
            continue
        for ends in {(0, more), (more, 0)}:  # features that pass have cosine 1 and sine 0

            def whole(angles: torch.Tensor, of=of, ends=ends, rest=rest) -> torch.Tensor:
                return torch.nn.functional.pad(of(angles.cos(), angles.sin()), ends, value=rest)

            if near(torch.nn.functional.pad(of(cos, sin), ends, value=rest)):
                return role, maker(whole), shared
    for spread in columns:
        if spread(cos).shape[-1] != value.shape[-1]:
            continue
        turn = kept[None] if shared else kept
        if all(
            ((function(turn) - spread(table) / factor).abs() < NEAR).all()
            for function, table in ((torch.cos, cos), (torch.sin, sin))
        ):
            return "angles", maker(spread, torch.float32), shared
    return None


def _twice(table: torch.Tensor, layout: str) -> torch.Tensor:
    return join(table, table, layout)


def _tables(columns: list[Map]) -> Iterator[tuple[str, float, Table]]:
    """Yield roles of tables, what they have for features that pass, and how cosines and sines make them."""
    yield "cosines and sines", 0.0, partial(_columns, lambda c, s: (c, s))
    yield "sines and cosines", 0.0, partial(_columns, lambda c, s: (s, c))
    for spread in columns:
        yield "cosines", 1.0, partial(_columns, lambda c, s: (c,), spread=spread)
        yield "sines", 0.0, partial(_columns, lambda c, s: (s,), spread=spread)
        yield "minus sines", 0.0, partial(_columns, lambda c, s: (-s,), spread=spread)
    for layout in LAYOUTS:
        yield "sines with the signs of their terms", 0.0, partial(_signed, layout=layout, sense=1)
        yield "minus sines with the signs of their terms", 0.0, partial(_signed, layout=layout, sense=-1)


def _columns(
    of: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]], c: torch.Tensor, s: torch.Tensor,
    spread: Map = lambda t: t,
) -> torch.Tensor:  # fmt: skip
    return spread(torch.cat(of(c, s), -1))


def _signed(c: torch.Tensor, s: torch.Tensor, layout: str, sense: int) -> torch.Tensor:
    return join(-sense * s, sense * s, layout)


def _first(order: str) -> str:
    """The same axes in the order in which this file takes them."""
    return "bshd" if "b" in order else "shd"


def _permuted(x: torch.Tensor, axes: str, wanted: str) -> torch.Tensor:
    return x.permute(*(axes.index(a) for a in wanted))


def _tensors(given: dict[str, Any]) -> Iterator[tuple[Path, torch.Tensor]]:
    for name, value in given.items():
        for path, part in [((name,), value)] if not isinstance(value, (tuple, list)) else [
            ((name, i), part) for i, part in enumerate(value)
        ]:  # fmt: skip
            if isinstance(part, torch.Tensor):
                yield path, part


def _path(name: str) -> Path:
    """The place of an argument that `trace` names ``q`` or ``pair[0]``."""
    first, _, number = name.removesuffix("]").partition("[")
    return (first, int(number)) if number else (first,)


def _put(given: dict[str, Any], path: Path, value: torch.Tensor) -> None:
    if len(path) == 1:
        given[path[0]] = value
        return
    members = list(given[path[0]])
    members[path[1]] = value
    given[path[0]] = tuple(members) if isinstance(given[path[0]], tuple) else members
