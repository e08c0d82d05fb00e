"""``apply_rotary_pos_emb`` of Transformers over the kernel, and a patch that makes a model use it."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from ropelab.arguments import integer, shown, tensor
from ropelab.interop.broadcast import check_tables, formula, rotate
from ropelab.layout.pairing import check_layout

Rotate = Callable[..., "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]


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

    The result is ``x * cos + rotate_half(x) * sin`` with the unsqueezed tables, for any shapes that broadcast. What a
    launch cannot do (see `ropelab.interop.broadcast.rotate`) takes that formula.

    Args:
        q, k: ``[B, H, S, D]`` for ``unsqueeze_dim=1``, ``[B, S, H, D]`` for 2; any strides, heads of their own (GQA).
        cos, sin: ``[B, S, R]`` or ``[1, S, R]``, a column for each feature, ``R <= D`` even; features from R on pass.
        unsqueeze_dim: where the tables get the axis of the heads.
        layout: ``"split_half"`` (Llama and most) or ``"interleaved"`` with each column twice in a row (Cohere).

    Returns:
        ``(q, k)`` in the dtype that they and the tables promote to; models cast their tables to q's dtype. The maths
        is in float32 or wider and rounds once. Differentiable any number of times, also in the tables.

    Raises:
        TypeError: not a tensor, bools, tables that are not floating, a number of another type.
        ValueError: tables of an odd number of columns, or of more than q or k has features; shapes that do not
            broadcast; devices that differ; an unknown layout.
    """
    check_layout(layout)
    unsqueeze_dim = integer("unsqueeze_dim", unsqueeze_dim)
    for name, table in (("cos", cos), ("sin", sin)):
        rank = tensor(name, table).ndim
        if not -1 - rank <= unsqueeze_dim <= rank or unsqueeze_dim in (-1, rank):
            raise ValueError(f"unsqueeze_dim: expected an axis before the last of {name}'s, got {unsqueeze_dim}")
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    check_tables({"q": q, "k": k}, {"cos": cos, "sin": sin})
    rotated = rotate([_promoted(x, cos) for x in (q, k)], cos, sin, layout=layout)
    q_out, k_out = (formula(x, cos, sin, layout) for x in (q, k)) if rotated is None else rotated
    return q_out, k_out


class Patch:
    """What `patch` replaced. ``undo()`` puts it back; as a context manager, at the end of the block.

    A function that somebody else has replaced since stays theirs.
    """

    def __init__(self, replaced: dict[tuple[ModuleType, str], tuple[Rotate, Rotate]]):
        self._replaced = replaced

    @property
    def functions(self) -> list[str]:
        """The functions replaced, ``"module.name"``."""
        return sorted(f"{module.__name__}.{name}" for module, name in self._replaced)

    def undo(self) -> None:
        """Put the originals back where the replacements still are; a second time does nothing."""
        while self._replaced:
            (module, name), (original, replacement) = self._replaced.popitem()
            if getattr(module, name, None) is replacement:
                setattr(module, name, original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.undo()


def patch(model: torch.nn.Module) -> Patch:
    """Make a Transformers model rotate with the kernel: ``patch(model)``, or ``with patch(model): ...``.

    The functions ``apply_rotary_pos_emb...`` in the files of the model's layers are replaced, so the patch holds for
    every model of that architecture in the process. What each of them computes is found out by calling it with small
    random tensors, not by the model's name: halves (Llama), adjacent pairs (GPT-J, Cohere, GLM), adjacent pairs
    written as halves (DeepSeek), one tensor or two, tables of a column for each feature or for each pair. A call that
    one launch cannot do goes to the original, and so does a call that the original refuses. With bfloat16 the result is
    closer to the definition than the original's, which rounds after every operation; the dtype is the original's.

    Functions that are patched already stay so, until the patch that replaced them is undone.

    Raises:
        TypeError: not a module.
        ValueError: the model has no such function, or one that does something else; nothing is replaced then.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {shown(model)}")
    functions = dict(_rotations(model))
    if not functions:
        raise ValueError(
            f"model: expected a Transformers model whose files define apply_rotary_pos_emb, got {type(model).__name__}"
        )
    new = {
        (module, name): _over_kernel(f"{module.__name__}.{name}", function)
        for (module, name), function in functions.items()
        if not _is_ours(function)
    }
    for (module, name), function in new.items():
        setattr(module, name, function)
    return Patch({place: (functions[place], replacement) for place, replacement in new.items()})


# ------------------------------------------------------------------------------------ what a function computes


@dataclass(frozen=True)
class _Kind:
    """A way to lay out features and tables.

    Attributes:
        columns: of the tables: one for each ``"feature"``, one for each ``"pair"``, or ``"twice"``: one for each pair
            and then all of them again, of which the first half is read.
        equal_halves: the original reads the second half too, and is known for tables that repeat only.
    """

    layout: str
    columns: str
    out_layout: str | None = None
    equal_halves: bool = False

    def rotate(self, xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor] | None:
        """As `ropelab.interop.broadcast.rotate`, with the tables of this kind."""
        if self.columns == "twice":
            cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
        per_pair = self.columns != "feature"
        return rotate(xs, cos, sin, layout=self.layout, out_layout=self.out_layout, per_pair=per_pair)


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
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"): ("q", "k"),  # position_ids is not used any more
    ("q", "k", "cos", "sin"): ("q", "k"),  # of the vision towers
    ("x", "cos", "sin", "unsqueeze_dim"): ("x",),
    ("tensor", "sin", "cos"): ("tensor",),
}
"""The parameters of functions -> those that are rotated."""
_LAST_BUT_ONE = -2
"""Where the tables get the axis of the heads if a function is not told: ``[..., S, H, D]``."""


def _rotations(model: torch.nn.Module) -> Iterator[tuple[tuple[ModuleType, str], Rotate]]:
    """(module, name) and function of all rotations in the files that define the model's layers."""
    for name in dict.fromkeys(type(layer).__module__ for layer in model.modules()):
        module = sys.modules.get(name)
        if module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value) and re.match(r"apply_(\w+_)?rotary_", attribute):
                yield (module, attribute), value


def _is_ours(function: Rotate) -> bool:
    return getattr(function, "_rotates_with_ropelab", False)


def _over_kernel(name: str, original: Rotate) -> Rotate:
    """A function to take the place of ``original``.

    Raises:
        ValueError: nobody knows what it does.
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
        return kind.rotate([arguments[x] for x in rotated_names], cos, sin)

    def computes(kind: _Kind) -> bool:
        probe = _probe(rotated_names, heads_axis, kind)
        try:
            returned = original(**probe)
        except (RuntimeError, TypeError, ValueError, IndexError):  # tables of another width, for one
            return False
        found = (returned,) if len(rotated_names) == 1 else returned
        ours = attempt(kind, probe)
        if ours is None or not isinstance(found, tuple):
            return False
        return len(found) == len(ours) and all(map(_agree, found, ours))

    kind = next(filter(computes, _KINDS), None)
    if kind is None:
        raise ValueError(f"{name}: expected a rotation of halves or of adjacent pairs; it computes something else")
    required = {name for name, p in signature.parameters.items() if p.default is inspect.Parameter.empty}
    promotes = _promotes(original, _probe(rotated_names, heads_axis, kind), rotated_names)

    def over_kernel(*args, **kwargs):
        arguments = dict(zip(parameters, args, strict=False))
        fits = len(args) <= len(parameters) and kwargs.keys() <= set(parameters[len(args) :])
        arguments |= kwargs
        fits = fits and required <= arguments.keys()
        if not fits or not all(isinstance(arguments[x], torch.Tensor) for x in (*rotated_names, "cos", "sin")):
            return original(*args, **kwargs)  # which says what is wrong
        if promotes:
            arguments |= {x: _promoted(arguments[x], arguments["cos"]) for x in rotated_names}
        rotated = None if arguments.get("position_ids") is not None else attempt(kind, arguments)
        if rotated is None:
            return original(*args, **kwargs)
        return rotated[0] if len(rotated) == 1 else tuple(rotated)

    over_kernel.__dict__["_rotates_with_ropelab"] = True
    return functools.update_wrapper(over_kernel, original) if inspect.isfunction(original) else over_kernel


def _probe(names: tuple[str, ...], heads_axis: int, kind: _Kind) -> dict[str, torch.Tensor]:
    """Arguments with sizes that all differ, and tables whose columns differ as far as the kind allows."""
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
    """Equal but for float32's rounding; another convention is off by numbers of the size of these."""
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, atol=1e-5)


def _promotes(original: Rotate, probe: dict[str, torch.Tensor], names: tuple[str, ...]) -> bool:
    """Whether float16 with float32 tables becomes float32, as in Llama, or stays, as in Cohere."""
    found = original(**{name: x.half() if name in names else x for name, x in probe.items()})
    return (found if isinstance(found, torch.Tensor) else found[0]).dtype == torch.float32


def _promoted(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, cos.dtype))
