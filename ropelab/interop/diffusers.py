"""Patch the transformers of diffusers, so that they rotate with the kernel.

The models of diffusers 0.42 rotate q and k apart. Flux, HunyuanVideo, CogVideoX and Lumina use functions of
``diffusers.models.embeddings``. Qwen-Image and LTX use functions of their own files, and Wan uses a function inside of
a processor's ``__call__``.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ropelab.interop.calls import Call, Complex, ForeignRotation, Rotating, Turn, rotation_of
from ropelab.interop.patch import Patch, Place, check_model, is_replaced, undo_all, with_names

_NAME = re.compile(r"_?apply_(\w+_)?rotary_emb(_\w+)?$|apply_rope$")
_INNER = "_rotation_over_ropelab"
"""The global name that stands for a function inside of a function."""


@dataclass(frozen=True)
class TwoInOne(Call):
    """One argument with cosines and sines, which get axes of size 1 by an index."""

    index: tuple = ()

    def turns(self, arguments):
        both = arguments[self.tables[0]]
        if not isinstance(both, (tuple, list)) or len(both) != 2 or not isinstance(both[0], torch.Tensor):
            return None
        x, (cos, sin) = arguments[self.rotated[0]], both
        if cos.ndim != len(self.table) + 1 or x.ndim != len(self.axes):
            return None
        return [Turn(self.rotated, cos[self.index].to(x.device), sin[self.index].to(x.device))]

    def _probe_tables(self, draw, columns, width):
        rows = super()._probe_tables
        cos, sin = (rows(draw, columns, width)[self.tables[0]] for _ in range(2))
        return {self.tables[0]: (cos, sin)}


_X, _TABLES = ("x",), ("freqs_cis",)
_ALL = slice(None)
_SHARED = tuple(
    TwoInOne(
        _X,
        axes,
        "s",
        _TABLES,
        {"use_real": True, "use_real_unbind_dim": unbind, "sequence_dim": axes.index("s")},
        index,
    )
    for axes, index in (("bhsd", ()), ("bshd", (_ALL, None)))
    for unbind in (-1, -2)
)
CALLS: Mapping[tuple[str, ...], Sequence[Call]] = {
    # diffusers.models.embeddings
    ("x", "freqs_cis", "use_real", "use_real_unbind_dim", "sequence_dim"): (
        *_SHARED, Complex(_X, "bshd", "bs", _TABLES, {"use_real": False}, (_ALL, _ALL, None)),
    ),
    # Qwen-Image
    ("x", "freqs_cis", "use_real", "use_real_unbind_dim"): (
        *(TwoInOne(_X, "bhsd", "s", _TABLES, {"use_real": True, "use_real_unbind_dim": unbind}) for unbind in (-1, -2)),
        Complex(_X, "bshd", "s", _TABLES, {"use_real": False}, (_ALL, None)),
    ),
    ("x", "freqs"): (TwoInOne(_X, "bsd", "bs", ("freqs",)),),  # LTX
    ("hidden_states", "freqs_cos", "freqs_sin"): (  # Wan, SkyReels V2
        Call(("hidden_states",), "bshd", "1s1", ("freqs_cos", "freqs_sin")),
    ),
    ("x_in", "freqs_cis"): (Complex(("x_in",), "bshd", "bs", _TABLES, index=(_ALL, _ALL, None)),),  # Z-Image
}  # fmt: skip
"""The names of a function's parameters -> the calls to try, one for each value of the options.

:meta hide-value:
"""


def patch(model: torch.nn.Module) -> Patch:
    """Make a transformer of diffusers rotate with the kernel: ``patch(model)``, or ``with patch(model): ...``.

    The patch replaces functions of modules, and ``__call__`` of processors that define their rotation inside. The patch
    therefore affects every model in the process that uses the same functions. The patch calls each function with small
    random tensors to learn its convention. It leaves functions that follow no known convention as they are, if it knows
    another function of the model.

    A call that one launch cannot compute goes to the original function. The dtype of the result stays. The results are
    computed in float32 or wider and rounded once, as by most originals.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has no rotation of a known convention. The patch replaces nothing then.
    """
    check_model(model)
    new: dict[Place, object] = {}
    refusals: list[str] = []
    for place, function in rotation_functions(model):
        try:
            name = f"{place[0].__name__}.{place[1]}"
            new[place] = function if rotation_of(function) else ForeignRotation(name, function, CALLS).over_kernel()
        except ValueError as reason:
            refusals.append(str(reason))
    for kind in _processors(model):
        try:
            new |= _with_inner_rotation(kind)
        except ValueError as reason:
            refusals.append(str(reason))
    if not new:
        expected = "a transformer of diffusers with a rotation"
        raise ValueError(refusals[0] if refusals else f"model: expected {expected}, got {type(model).__name__}")
    return Patch(new, model)


def unpatch(model: torch.nn.Module) -> None:
    """Undo every patch of a model. A function stays replaced while the patch of another model wants it."""
    check_model(model)
    undo_all(model)


def is_patched(model: torch.nn.Module) -> bool:
    """Whether a model rotates with the kernel, by its own patch or that of another model with the same functions."""
    check_model(model)
    functions = (function for _, function in rotation_functions(model))
    return any(map(rotation_of, functions)) or any(is_replaced(kind, "__call__") for kind in _processors(model))


def rotation_functions(model: torch.nn.Module) -> Iterator[tuple[Place, Rotating]]:
    """((module, name), function) of the rotations in the files of the model's layers and processors."""
    files = [*(type(layer).__module__ for layer in model.modules()), *(k.__module__ for k in _processors(model))]
    for name in dict.fromkeys(files):
        for attribute, value in list(vars(sys.modules[name]).items()):
            if name.startswith("diffusers.") and inspect.isfunction(value) and _NAME.match(attribute):
                yield (sys.modules[name], attribute), value
    if any(name.startswith("diffusers.") for name in files):  # processors import it when they are called
        embeddings = importlib.import_module("diffusers.models.embeddings")
        yield (embeddings, "apply_rotary_emb"), embeddings.apply_rotary_emb


def _processors(model: torch.nn.Module) -> list[type]:
    """The classes of the objects that compute the attention of the model's layers."""
    found = (getattr(layer, "processor", None) for layer in model.modules())
    return list(dict.fromkeys(type(processor) for processor in found if processor is not None))


def _with_inner_rotation(kind: type) -> dict[Place, object]:
    """The ``__call__`` of a processor that defines a rotation inside of it, over the kernel; nothing for others.

    Raises:
        ValueError: as for `ForeignRotation`; or the rotation reads variables of ``__call__``.
    """
    call = kind.__call__
    constants = call.__code__.co_consts if inspect.isfunction(call) else ()
    inner = [c for c in constants if isinstance(c, types.CodeType) and _NAME.match(c.co_name)]
    if is_replaced(kind, "__call__"):
        return {(kind, "__call__"): call}
    if not inner:
        return {}
    [code] = inner
    name = f"{kind.__module__}.{kind.__qualname__}.{code.co_name}"
    if code.co_freevars:
        raise ValueError(f"{name}: expected a function of its arguments, got one that reads {code.co_freevars}")
    over_kernel = ForeignRotation(name, types.FunctionType(code, call.__globals__), CALLS).over_kernel()
    constants = tuple(_stand_in.__code__ if c is code else c for c in constants)
    return {(kind, "__call__"): with_names(call, {_INNER: over_kernel}, call.__code__.replace(co_consts=constants))}


def _stand_in(*args, **kwargs):
    """The code that takes the place of a function inside of ``__call__``."""
    return _rotation_over_ropelab(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821  the globals of the new `__call__` have it
