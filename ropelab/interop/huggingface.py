"""This file holds ``apply_rotary_pos_emb`` of Transformers over the kernel, and a patch that makes a model use it."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ropelab.arguments import integer, shown, tensor
from ropelab.interop.broadcast import check_tables, formula, rotate_in_one_launch
from ropelab.interop.patch import Patch, Place
from ropelab.layout.pairing import check_layout

RotationFunction = Callable[..., "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    layout: str = "split_half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k in one launch, in the convention of most models of Hugging Face's Transformers.

    The result is ``x * cos + rotate_half(x) * sin`` with the unsqueezed tables, for all shapes that broadcast. Where
    one launch cannot compute the result (see `ropelab.interop.broadcast.rotate_in_one_launch`), torch operations
    compute the formula.

    Args:
        q, k: ``[B, H, S, D]`` for ``unsqueeze_dim=1``, ``[B, S, H, D]`` for 2; any strides. The number of heads of q
            and k may differ (GQA).
        cos, sin: ``[B, S, R]`` or ``[1, S, R]`` with ``R <= D`` even, a column for each feature. Features from R on
            pass unchanged.
        unsqueeze_dim: the place at which the tables get the axis of the heads.
        layout: ``"split_half"`` (Llama and most models) or ``"interleaved"`` with each column twice in a row (Cohere).

    Returns:
        ``(q, k)``, each in the dtype to which the tensor and the tables promote; models cast the tables to q's dtype.
        The kernel computes in float32 or wider and rounds once. The results are differentiable any number of times,
        also in the tables.

    Raises:
        TypeError: an argument is not a tensor, q or k holds bools, the tables are not floating, or a number has another
            type.
        ValueError: the number of columns is odd or larger than the number of features, shapes do not broadcast, devices
            differ, or the layout is unknown.
    """
    check_layout(layout)
    unsqueeze_dim = integer("unsqueeze_dim", unsqueeze_dim)
    for name, table in (("cos", cos), ("sin", sin)):
        rank = tensor(name, table).ndim
        if not -1 - rank <= unsqueeze_dim <= rank or unsqueeze_dim in (-1, rank):
            raise ValueError(f"unsqueeze_dim: expected a place before the last axis of {name}, got {unsqueeze_dim}")
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    check_tables({"q": q, "k": k}, {"cos": cos, "sin": sin})
    rotated = rotate_in_one_launch([_promoted(x, cos) for x in (q, k)], cos, sin, layout=layout)
    q_out, k_out = (formula(x, cos, sin, layout) for x in (q, k)) if rotated is None else rotated
    return q_out, k_out


def patch(model: torch.nn.Module) -> Patch:
    """Make a Transformers model rotate with the kernel: ``patch(model)``, or ``with patch(model): ...``.

    The patch replaces the functions ``apply_rotary_pos_emb...`` in the files of the model's layers, so it affects every
    model of the architecture in the process. The patch calls each function with small random tensors to learn its
    convention, and does not look at the model's name. It knows halves (Llama), adjacent pairs (GPT-J, Cohere, GLM),
    adjacent pairs that become halves (DeepSeek), functions of one tensor or of two, and tables with a column for each
    feature or for each pair.

    A call that one launch cannot compute goes to the original function, and so does a call with wrong arguments. With
    bfloat16 the result is closer to the definition than the result of the original, which rounds after every operation.
    The dtype of the result stays.

    A function that is patched already stays patched until the first patch is undone.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no rotation, or a rotation of another convention. The patch replaces nothing then.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {shown(model)}")
    functions = dict(_rotation_functions(model))
    if not functions:
        raise ValueError(
            f"model: expected a Transformers model whose files define apply_rotary_pos_emb, got {type(model).__name__}"
        )
    new = {
        (module, name): _over_kernel(f"{module.__name__}.{name}", function)
        for (module, name), function in functions.items()
        if not _is_ours(function)
    }
    return Patch(new)


# ----------------------------------------------------------------------------------- the convention of a function


@dataclass(frozen=True)
class _Kind:
    """A convention for the order of features and for the columns of tables.

    Attributes:
        layout, out_layout: as for `ropelab.apply_rope`.
        columns: ``"feature"`` for tables with a column for each feature, ``"pair"`` for a column for each pair, and
            ``"twice"`` for a column for each pair and then all columns again, where the kernel reads the first half.
        equal_halves: the original function reads the second half as well, and `patch` compares with it only for tables
            whose halves are equal.
    """

    layout: str
    columns: str
    out_layout: str | None = None
    equal_halves: bool = False

    def rotate_in_one_launch(
        self, xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """`ropelab.interop.broadcast.rotate_in_one_launch` with the tables of this kind."""
        if self.columns == "twice":
            cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
        per_pair = self.columns != "feature"
        return rotate_in_one_launch(xs, cos, sin, layout=self.layout, out_layout=self.out_layout, per_pair=per_pair)


_KINDS = (
    _Kind("split_half", "feature"),  # Llama, GPT-NeoX
    _Kind("interleaved", "feature"),  # Cohere
    _Kind("interleaved", "twice"),  # GLM
    _Kind("split_half", "pair"),  # gpt-oss
    _Kind("interleaved", "pair"),  # GPT-J
    _Kind("interleaved", "twice", out_layout="split_half", equal_halves=True),  # DeepSeek-V3
)


_ROTATED = {
    ("q", "k", "cos", "sin", "unsqueeze_dim"): ("q", "k"),
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"): ("q", "k"),  # position_ids is unused in recent versions
    ("q", "k", "cos", "sin"): ("q", "k"),  # vision towers
    ("x", "cos", "sin", "unsqueeze_dim"): ("x",),
    ("tensor", "sin", "cos"): ("tensor",),
}
"""The names of a function's parameters -> the names of the parameters that the function rotates."""
_LAST_BUT_ONE = -2
"""The place at which tables get the axis of the heads if a function has no such parameter: ``[..., S, H, D]``."""


def _rotation_functions(model: torch.nn.Module) -> Iterator[tuple[Place, RotationFunction]]:
    """((module, name), function) of all rotations in the files that define the model's layers."""
    for name in dict.fromkeys(type(layer).__module__ for layer in model.modules()):
        module = sys.modules.get(name)
        if module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value) and re.match(r"apply_(\w+_)?rotary_", attribute):
                yield (module, attribute), value


def _is_ours(function: RotationFunction) -> bool:
    return getattr(function, "_rotates_with_ropelab", False)


def _over_kernel(name: str, original: RotationFunction) -> RotationFunction:
    """The function over the kernel that replaces ``original``.

    Raises:
        ValueError: ``original`` has other parameters, or follows none of the known conventions.
    """
    signature = inspect.signature(original.forward if isinstance(original, torch.nn.Module) else original)
    parameters = tuple(signature.parameters)
    if parameters not in _ROTATED:
        raise ValueError(f"{name}: expected parameters such as (q, k, cos, sin, unsqueeze_dim), got {parameters}")
    rotated_names = _ROTATED[parameters]
    heads_axis = _LAST_BUT_ONE
    if "unsqueeze_dim" in parameters:
        heads_axis = signature.parameters["unsqueeze_dim"].default

    def attempt(kind: _Kind, arguments: dict) -> list[torch.Tensor] | None:
        axis = arguments.get("unsqueeze_dim", heads_axis)
        cos, sin = (arguments[table].unsqueeze(axis) for table in ("cos", "sin"))
        return kind.rotate_in_one_launch([arguments[x] for x in rotated_names], cos, sin)

    def computes(kind: _Kind) -> bool:
        probe = _probe(rotated_names, heads_axis, kind)
        try:
            returned = original(**probe)
        except (RuntimeError, TypeError, ValueError, IndexError):  # for example for tables of another width
            return False
        found = (returned,) if len(rotated_names) == 1 else returned
        ours = attempt(kind, probe)
        if ours is None or not isinstance(found, tuple):
            return False
        return len(found) == len(ours) and all(map(_agree, found, ours))

    kind = next(filter(computes, _KINDS), None)
    if kind is None:
        raise ValueError(f"{name}: expected a rotation of halves or of adjacent pairs, got another function")
    required = {name for name, p in signature.parameters.items() if p.default is inspect.Parameter.empty}
    promotes = _promotes(original, _probe(rotated_names, heads_axis, kind), rotated_names)

    def over_kernel(*args, **kwargs):
        arguments = dict(zip(parameters, args, strict=False))
        fits = len(args) <= len(parameters) and kwargs.keys() <= set(parameters[len(args) :])
        arguments |= kwargs
        fits = fits and required <= arguments.keys()
        if not fits or not all(isinstance(arguments[x], torch.Tensor) for x in (*rotated_names, "cos", "sin")):
            return original(*args, **kwargs)  # the original says what is wrong
        if promotes:
            arguments |= {x: _promoted(arguments[x], arguments["cos"]) for x in rotated_names}
        rotated = None if arguments.get("position_ids") is not None else attempt(kind, arguments)
        if rotated is None:
            return original(*args, **kwargs)
        return rotated[0] if len(rotated) == 1 else tuple(rotated)

    over_kernel.__dict__["_rotates_with_ropelab"] = True
    return functools.update_wrapper(over_kernel, original) if inspect.isfunction(original) else over_kernel


def _probe(names: tuple[str, ...], heads_axis: int, kind: _Kind) -> dict[str, torch.Tensor]:
    """Random arguments for a function. All sizes differ, and columns differ as far as the kind allows."""
    generator = torch.Generator("cpu").manual_seed(0)
    batch, tokens, head_dim = 2, 5, 8

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    columns = head_dim // 2 if kind.columns == "pair" or kind.equal_halves else head_dim
    tables = {name: draw(batch, tokens, columns) for name in ("cos", "sin")}
    if kind.equal_halves:
        tables = {name: torch.cat((table, table), dim=-1) for name, table in tables.items()}
    heads = dict(zip(names, (3, 1), strict=False))
    sizes = [(batch, n, tokens, head_dim) if heads_axis == 1 else (batch, tokens, n, head_dim) for n in heads.values()]
    return {name: draw(*size) for name, size in zip(heads, sizes, strict=True)} | tables


def _agree(found: object, expected: torch.Tensor) -> bool:
    """Whether the results are equal up to the rounding of float32. Another convention is off by far more."""
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, atol=1e-5)


def _promotes(original: RotationFunction, probe: dict[str, torch.Tensor], names: tuple[str, ...]) -> bool:
    """Whether float16 with float32 tables becomes float32, as in Llama, or stays float16, as in Cohere."""
    found = original(**{name: x.half() if name in names else x for name, x in probe.items()})
    return (found if isinstance(found, torch.Tensor) else found[0]).dtype == torch.float32


def _promoted(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, cos.dtype))
