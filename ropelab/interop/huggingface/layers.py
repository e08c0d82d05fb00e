"""Find the attention layers that normalize q and k and then rotate them, and make both one pass.

A layer is called with small random hidden states up to its rotation. The layer qualifies if both tensors that it
rotates are views of results of its norms, which nothing else has used, and if the norms are RMS norms of a head.
The layer then gets a ``forward`` with the same code, in which the name of the rotation means the fused pass.

A new ``forward`` holds names and numbers, and finds modules through its ``self``. So a deep copy of a layer computes
with its own weights.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ropelab.interop.calls import ForeignRotation, Rotating
from ropelab.interop.patch import Place, with_names
from ropelab.interop.probe import Reached, Refused, Uses, memory, run

EPS_NAMES = ("variance_epsilon", "eps", "norm_eps", "epsilon")
"""The names that the classes of Transformers give to the number that they add to the mean of the squares."""


class Norm(NamedTuple):
    """An RMS norm of a head, by its name in the layer: ``x / sqrt(mean(x^2) + eps) * (offset + weight)``."""

    name: str
    eps: float
    offset: int

    def weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The factors ``[D]``."""
        weight = getattr(layer, self.name).weight
        return weight + self.offset if self.offset else weight


def fused_layers(
    model: torch.nn.Module, rotations: Mapping[Place, ForeignRotation]
) -> tuple[dict[Place, object], dict[torch.nn.Module, list[Norm]]]:
    """The new ``forward`` of each layer that can be fused, and of its norms; and the two norms of each such layer.

    Raises:
        ValueError: no layer can be fused; the message gives the reason of the first layer that rotates.
    """
    norms: dict[torch.nn.Module, list[Norm]] = {}

    def fused(layer: torch.nn.Module, name: str, rotation: ForeignRotation) -> dict[Place, object]:
        forwards, norms[layer] = _fused(layer, name, rotation)
        return forwards

    return changed_layers(model, rotations, fused, "normalizes q and k and then rotates them"), norms


Change = Callable[[Any, str, ForeignRotation], Mapping[Place, object]]
"""Returns the new forwards of a layer, and of its parts, from its rotation and the name of it; or raises `Refused`."""


def changed_layers(
    model: torch.nn.Module, rotations: Mapping[Place, ForeignRotation], change: Change, what: str = ""
) -> dict[Place, object]:
    """The new forwards of the layers that rotate and that ``change`` does not refuse.

    Raises:
        ValueError: there is none, and ``what`` says what such a layer does; the message gives the reason of the first
            layer that rotates.
    """
    new: dict[Place, object] = {}
    reasons: list[tuple[str, object]] = []
    for path, layer in model.named_modules():
        used = _rotations_of(layer, rotations)
        try:
            if len(used) > 1:
                raise Refused(f"it calls {len(used)} rotations")
            for name, rotation in used.items():
                new |= change(layer, name, rotation)
        except Refused as reason:
            reasons.append((path, reason))
    if what and not new:
        path, why = (reasons or [("its layers", "none calls a rotation in its forward")])[0]
        raise ValueError(f"model: expected a layer that {what}, got {path}: {why}")
    return new


def _rotations_of(layer: torch.nn.Module, rotations: Mapping[Place, ForeignRotation]) -> dict[str, ForeignRotation]:
    """The rotations of a layer's file that its ``forward`` names, by name."""
    function, file = inspect.unwrap(type(layer).forward), type(layer).__module__
    named = function.__code__.co_names if inspect.isfunction(function) else ()
    return {name: each for (module, name), each in rotations.items() if module.__name__ == file and name in named}


def _fused(layer: torch.nn.Module, name: str, rotation: ForeignRotation) -> tuple[dict[Place, object], list[Norm]]:
    """The new ``forward`` of a layer and of its two norms, and the norms.

    Raises:
        Refused: the layer does something else than normalize q and k and rotate them.
    """
    function = forward_of(layer)
    modules = _norms_before(layer, name, rotation)
    norms = [_norm(_attribute(layer, module), module, features) for module, features in modules]
    if norms[0].eps != norms[1].eps:
        raise Refused(f"its norms have eps {norms[0].eps} and {norms[1].eps}")
    if any("forward" in vars(module) for module, _ in modules):
        raise Refused("the forward of a norm is replaced")
    if _decides(function, {name, *(norm.name for norm in norms)}):
        raise Refused("an argument of the call decides whether it normalizes or rotates")
    originals = [type(module).forward for module, _ in modules]
    new = with_rotation(function, name, _norm_and_rotate(rotation, norms, originals), gives_self=True)
    forwards: dict[Place, object] = {(module, "forward"): own(_same, module) for module, _ in modules}
    return forwards | {(layer, "forward"): own(new, layer)}, norms


_OWN: weakref.WeakSet[Rotating] = weakref.WeakSet()


def own(forward: Rotating, module: torch.nn.Module) -> types.MethodType:
    """A function as the ``forward`` of one module. A deep copy has it too; pickle gives a module its class's own."""
    _OWN.add(forward)
    return types.MethodType(forward, module)


def is_own(module: torch.nn.Module) -> bool:
    """Whether `own` made the ``forward`` of the module, or of the module that it is a deep copy of."""
    return _function_of(module) in _OWN


def is_of_class(module: torch.nn.Module) -> bool:
    """Whether the module itself has the ``forward`` of its class, as pickle leaves a patched module."""
    return _function_of(module) is type(module).forward


def _function_of(module: torch.nn.Module) -> Any:
    return getattr(vars(module).get("forward"), "__func__", None)


def forward_of(layer: torch.nn.Module) -> Rotating:
    """The forward of the layer's class, a function in Python, perhaps with decorators that can be copied.

    Raises:
        Refused: the layer has a forward of its own, or a decorator does not keep what it decorates in its closure.
    """
    if is_own(layer):
        raise Refused("it is patched already; unpatch the model first")
    found = function = type(layer).forward
    while inspect.isfunction(function) and "forward" not in vars(layer):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return found
        if all(cell.cell_contents is not inner for cell in function.__closure__ or ()):
            break
        function = inner
    raise Refused("its forward is wrapped or replaced")


def with_rotation(function: Rotating, name: str, rotation: Rotating, *, gives_self: bool = False) -> Rotating:
    """A copy of a function, and of its decorators, for which a global name means another rotation.

    Args:
        gives_self: the copy calls the rotation with its own first argument before all others.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        copied = types.CellType(with_rotation(inner, name, rotation, gives_self=gives_self))
        closure = tuple(copied if cell.cell_contents is inner else cell for cell in function.__closure__ or ())
        decorator = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        return functools.wraps(copied.cell_contents)(decorator)
    return with_names(function, {name: rotation}, _giving_self(function, name) if gives_self else None)


def _giving_self(function: Rotating, name: str) -> types.CodeType:
    """The code of a method in which each call of ``name`` has ``self`` as a further argument, the first."""
    if function.__code__.co_freevars:  # they would become globals
        raise Refused("its forward is a closure")
    definition = _definition(function)
    definition.decorator_list = []
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call) and _is_name(node.func, name)]
    if sum(_is_name(node, name) for node in ast.walk(definition)) != len(calls):
        raise Refused("it does more with its rotation than to call it")
    for call in calls:
        call.args.insert(0, ast.Name(definition.args.args[0].arg, ast.Load()))
    tree = ast.fix_missing_locations(ast.Module([definition], type_ignores=[]))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    compiled = compile(tree, function.__code__.co_filename, "exec", dont_inherit=True)
    return next(x for x in compiled.co_consts if isinstance(x, types.CodeType) and x.co_name == definition.name)


def _same(self, hidden_states: torch.Tensor) -> torch.Tensor:
    """The ``forward`` of a norm whose work the fused pass does."""
    return hidden_states


_same.__name__ = "forward"  # a module is pickled with the method of this name


def _norm_and_rotate(rotation: ForeignRotation, norms: list[Norm], originals: list[Rotating]) -> Rotating:
    """The rotation of a layer that normalizes before: in one launch where it can, else by the original functions."""
    rotated = rotation.understood[0].call.rotated

    def norm_and_rotate(layer, *args, **kwargs):
        matching = rotation.matching(args, kwargs)
        found = None if matching is None else _in_one_launch(*matching, layer, norms)
        if found is not None:
            return found
        bound = inspect.signature(rotation.original).bind(*args, **kwargs)
        for name, norm, forward in zip(rotated, norms, originals, strict=True):
            bound.arguments[name] = forward(getattr(layer, norm.name), bound.arguments[name])
        return rotation.original(*bound.args, **bound.kwargs)

    return norm_and_rotate


def _in_one_launch(understood, arguments: dict[str, Any], layer: torch.nn.Module, norms: list[Norm]) -> Any:
    turns = understood.turns(arguments)
    weights = [norm.weight(layer) for norm in norms]
    if turns is None or len(turns) > 1 or any(w.dtype != arguments[turns[0].names[0]].dtype for w in weights):
        return None
    [(names, cos, sin)] = turns
    found = understood.kind.norm_and_rotate([arguments[name] for name in names], weights, cos, sin, norms[0].eps)
    return None if found is None else tuple(found)


# ------------------------------------------------------------------------------------------- what a layer does


class Observed:
    """What a layer did with random hidden states up to its rotation, or on to the update of its cache.

    Attributes:
        given: the arguments of the layer.
        rotated: the arguments of its rotation, by name.
        heads: q and k, which it rotates.
        uses: the memory that it used from the start, or from the rotation on.
        updated: the arguments of the update: in the place of k there is this object.
    """

    def __init__(self, layer: torch.nn.Module):
        self.given, self.uses = arguments_of(layer), Uses()
        self.rotated: Any = {}
        self.heads: list[torch.Tensor] = []
        self.updated: tuple = ()


def observed(layer: torch.nn.Module, name: str, rotation: ForeignRotation, cache: str = "") -> Observed:
    """Run a layer with random hidden states up to its rotation, or to the update of its argument ``cache``.

    Args:
        name: the global name by which the layer calls the rotation.

    Raises:
        Refused: the layer cannot be run so, or does not rotate q and k as the kernel does in one pass with other steps.
    """
    seen, understood = Observed(layer), rotation.understood[0]

    def rotate(*args, **kwargs):
        seen.rotated = rotation.bound(args, kwargs)
        if not cache:
            raise Reached
        seen.uses.used.clear()
        return seen.rotated[understood.call.rotated[0]], seen  # no operation takes an object of this class

    def update(*args, **kwargs):
        seen.updated = args
        raise Reached

    stands = {cache: types.SimpleNamespace(update=update)} if cache else {}
    with seen.uses:
        run(with_rotation(type(layer).forward, name, rotate), layer, seen.given | stands)
    if seen.rotated == {}:
        raise Refused("it does not rotate")
    if seen.rotated is None or len(understood.call.rotated) != 2 or not understood.kind.norms:
        expected = "its rotation does not take q and k together, or reorders, turns back, or rotates the last features"
        raise Refused(expected)
    seen.heads = [seen.rotated[each] for each in understood.call.rotated]
    return seen


def _norms_before(layer: torch.nn.Module, name: str, rotation: ForeignRotation) -> list[tuple[torch.nn.Module, int]]:
    """The two norms whose results a layer rotates, and the number of features of a head.

    Raises:
        Refused: as for `_fused`.
    """
    results: list[tuple[torch.nn.Module, torch.Tensor]] = []
    handles = [
        child.register_forward_hook(lambda module, _, y: results.append((module, y)))
        for child in layer.children()
        if not isinstance(child, torch.nn.Linear)
    ]
    try:
        seen = observed(layer, name, rotation)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for x in seen.heads:
        made = [(module, y) for module, y in results if isinstance(y, torch.Tensor) and memory(y) == memory(x)]
        if len(made) != 1:
            raise Refused("it rotates q or k without a norm before")
        [(module, y)] = made
        if y.numel() != x.numel() or y.shape[-1] != x.shape[-1] or x.stride(-1) != 1:
            raise Refused("its norm is not over the features of a head")
        if memory(y) in seen.uses.used:
            raise Refused("it uses q or k between the norm and the rotation")
        found.append((module, x.shape[-1]))
    return found


def arguments_of(layer: torch.nn.Module) -> dict[str, Any]:
    """Random hidden states, and stand-ins for tables. All other arguments without a default are None."""
    projection = next((child for child in layer.children() if isinstance(child, torch.nn.Linear)), None)
    if projection is None:
        raise Refused("it has no linear projection")
    weight = projection.weight
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's random numbers stay as they are
    hidden = torch.randn(1, 3, projection.in_features, generator=generator, device="cpu").to(weight)
    table = torch.zeros(1, 3, 2).to(weight)
    given = {"hidden_states": hidden, "position_embeddings": (table, table)}
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: None for p in needed} | {p.name: given[p.name] for p in parameters if p.name in given}


def _norm(name: str, module: torch.nn.Module, features: int) -> Norm:
    """The norm that a module of the name computes, found by calling a copy of it.

    Raises:
        Refused: the module is no RMS norm of a head with a weight.
    """
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (features,) or list(module.buffers()):
        raise Refused(f"its norm {kind} is not an RMS norm of a head with a weight")
    eps = next((value for name in EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None:
        raise Refused(f"its norm {kind} names no eps")
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    if weight.is_meta:
        raise Refused("its weights have no memory yet")
    twin: Any = copy.deepcopy(module).to("cpu", torch.float64)
    factors, x = draw(features), draw(4, features) * torch.tensor([[1.0], [1.0], [eps**0.5], [eps**0.5]])
    with torch.no_grad():
        twin.weight.copy_(factors)
        found = twin(x).double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0, 1):
        if torch.allclose(found, normed * (factors + offset), rtol=1e-5, atol=1e-5):
            return Norm(name, eps, offset)
    raise Refused(f"its norm {kind} is not an RMS norm of a head with a weight")


def _attribute(layer: torch.nn.Module, child: torch.nn.Module) -> str:
    return next(name for name, module in layer.named_children() if module is child)


def _decides(function: Rotating, names: set[str]) -> bool:
    """Whether a condition on more than ``self`` encloses a call of ``names``, or a return comes before the call."""
    tree = _definition(function)
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.lineno < max(lines):
            return True
        if isinstance(node, (ast.If, ast.IfExp, ast.For, ast.While, ast.Try)):
            inside = any(isinstance(n, ast.Call) and _called(n) in names for n in ast.walk(node))
            reads = {n.id for n in ast.walk(getattr(node, "test", node)) if isinstance(n, ast.Name)}
            if inside and reads != {"self"}:
                return True
    return False


def _definition(function: Rotating) -> ast.FunctionDef:
    """The source of a function, or of the function that it decorates."""
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except OSError as error:
        raise Refused("its source cannot be read") from error
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _called(node: ast.Call) -> str:
    """The last name of what is called: ``q_norm`` for ``self.q_norm(x)``."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
