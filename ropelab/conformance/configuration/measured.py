"""Ask a tensor, a module or a function for the cosines and sines of positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropelab.arguments import shown

Waves = tuple[np.ndarray, np.ndarray]
"""Cosines and sines in float64, ``[K, pairs]``, each with the attention factor."""


@dataclass(frozen=True)
class Measured:
    """The cosines and sines that somebody's code makes.

    Attributes:
        at: maps positions, int64 ``[K]`` or ``[axes, K]``, to `Waves`.
        kind: what was measured, in words.
        unit: the unit roundoff of the dtype of the numbers.
        rows: the number of positions that a table has; None if there is no table.
        layout: the pairs of features that rotate together; None if nothing rotates.
        rotary: ``(first, end)``, the features that rotate; None if nothing rotates.
        scaled: whether the numbers contain the attention factor; frequencies do not.
    """

    at: Callable[[torch.Tensor], Waves]
    kind: str
    unit: float = 2.0**-24
    rows: int | None = None
    layout: str | None = None
    rotary: tuple[int, int] | None = None
    scaled: bool = True


class NotMeasured(ValueError):
    """The target is nothing that makes cosines and sines; the message says what was expected and what came."""


def load(path: Path) -> Any:
    """The tensor or the dict of tensors in a file of torch or numpy.

    Raises:
        NotMeasured: the file has another form.
    """
    if path.suffix == ".npz":
        return {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path))
    if path.suffix in (".pt", ".pth", ".bin"):
        return torch.load(path, map_location="cpu", weights_only=True)
    raise NotMeasured(f"against: expected a file .pt, .npy or .npz, got {path}")


def measured(target: Any, head_dim: int, layer_type: str | None = None, axes: int = 0) -> Measured:
    """The measurement of a target.

    Args:
        target: frequencies ``[R/2]``; a cache ``[P, R]`` with the cosines before the sines (vLLM, SGLang), or complex
            ``[P, R/2]``; ``(cos, sin)``; a dict with the keys ``cos`` and ``sin``, ``cos_sin_cache`` or ``inv_freq``; a
            module; or a function of ``positions`` or of ``x, positions`` that returns tables or the rotated ``x``
            ``[1, K, 1, D]``.
        head_dim: the number of features of a head.
        layer_type: passed to a function or module that takes an argument of this name.
        axes: the number of axes of the positions; 0 for one.

    Raises:
        NotMeasured: the target is nothing of that kind.
    """
    if isinstance(target, Mapping):
        return _of_mapping(target, head_dim, layer_type, axes)
    if isinstance(target, np.ndarray):
        target = torch.from_numpy(target)
    if isinstance(target, torch.Tensor):
        return _of_tensor(target.detach().cpu())
    if isinstance(target, tuple) and len(target) == 2:
        return _of_tables(*(torch.as_tensor(part).detach().cpu() for part in target))
    if isinstance(target, torch.nn.Module):
        return _of_module(target, head_dim, layer_type, axes)
    if callable(target):
        return _of_function(target, head_dim, layer_type, axes)
    raise NotMeasured(f"against: expected frequencies, tables, a module or a function, got {shown(target)}")


def _of_mapping(target: Mapping, head_dim: int, layer_type: str | None, axes: int) -> Measured:
    if layer_type in target:
        return measured(target[layer_type], head_dim, layer_type, axes)
    if "cos" in target and "sin" in target:
        return measured((target["cos"], target["sin"]), head_dim)
    for name in ("cos_sin_cache", "freqs_cis", "inv_freq", "frequencies"):
        if name in target:
            return measured(target[name], head_dim)
    raise NotMeasured(f"against: expected cos and sin, cos_sin_cache or inv_freq, got the keys {sorted(target)}")


def _of_tensor(x: torch.Tensor) -> Measured:
    if x.ndim == 1 and x.is_floating_point():
        theta = x.double().numpy()

        def turned(positions: torch.Tensor) -> Waves:
            angles = positions.double().numpy()[..., None] * theta
            return np.cos(angles), np.sin(angles)

        return Measured(turned, f"{len(theta)} frequencies", torch.finfo(x.dtype).eps / 2, scaled=False)
    if x.is_complex():
        return _of_tables(x.real, x.imag)
    if x.ndim >= 2 and x.is_floating_point() and x.shape[-1] % 2 == 0:
        return _of_tables(*x.reshape(-1, x.shape[-1]).chunk(2, -1))
    raise NotMeasured(f"against: expected frequencies [R/2] or a cache [P, R], got shape {tuple(x.shape)} {x.dtype}")


def _of_tables(cos: torch.Tensor, sin: torch.Tensor) -> Measured:
    if cos.shape != sin.shape or cos.ndim < 2:
        raise NotMeasured(f"against: expected cos and sin [P, R/2], got {tuple(cos.shape)} and {tuple(sin.shape)}")
    unit = torch.finfo(cos.dtype).eps / 2
    tables = [_planes(x.reshape(-1, x.shape[-1]).double().numpy()) for x in (cos, sin)]
    rows = len(tables[0])
    return Measured(lambda at: (tables[0][at.numpy()], tables[1][at.numpy()]), f"tables of {rows} rows", unit, rows)


def _planes(table: np.ndarray) -> np.ndarray:
    """One column for each pair, where a table has a column for each feature."""
    half = table.shape[-1] // 2
    if half and table.shape[-1] % 2 == 0 and len(table) > 1:
        if np.array_equal(table[..., :half], table[..., half:], equal_nan=True):
            return table[..., :half]
        if np.array_equal(table[..., ::2], table[..., 1::2], equal_nan=True):
            return table[..., ::2]
    return table


def _of_module(module: torch.nn.Module, head_dim: int, layer_type: str | None, axes: int) -> Measured:
    """A rotary module, or the first one of a model: `forward` counts, and a cache only where forward cannot be run."""
    rotary = next((part for part in module.modules() if _attribute(part, layer_type) is not None), module)
    attribute = _attribute(rotary, layer_type)
    cache = attribute if attribute is not None and attribute.ndim > 1 else None
    rows = None if cache is None else cache.shape[0]
    failures = []
    if cache is not None and hasattr(rotary, "is_neox_style"):
        call = getattr(rotary, "forward_native", rotary.forward)
        try:
            return _rotation(_server_call(call, head_dim), head_dim, f"{type(rotary).__name__}.forward", rows, axes)
        except Exception as error:
            failures.append(str(error))
    else:
        try:
            found = _of_function(rotary, head_dim, layer_type, axes)
            return found if rows is None else Measured(**{**vars(found), "rows": rows})
        except NotMeasured as error:
            failures.append(str(error))
    if attribute is not None:
        return _of_tensor(attribute.detach().cpu())
    raise NotMeasured(f"against: expected a rotary module, got {type(module).__name__} ({'; '.join(failures)})")


def _attribute(module: Any, layer_type: str | None) -> torch.Tensor | None:
    names = (f"{layer_type}_inv_freq", "cos_sin_cache", "inv_freq", "freqs_cis")
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, torch.Tensor)), None)


def _server_call(forward: Callable, head_dim: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """vLLM's and SGLang's ``forward(positions, query, key)`` as a function of ``x`` ``[1, K, 1, D]`` and positions."""

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        query = x.reshape(-1, head_dim).clone()
        return forward(positions, query, query.clone())[0].reshape(x.shape)

    return rotate


_SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "[1, K, 1, D]": lambda x: x, "[K, 1, D]": lambda x: x[0], "[1, K, D]": lambda x: x[:, :, 0],
    "[K, D]": lambda x: x[0, :, 0],
}  # fmt: skip
"""The shapes of x that a function of x and positions may take, made of ``[1, K, 1, D]``."""


def _of_function(function: Callable, head_dim: int, layer_type: str | None, axes: int) -> Measured:
    """A function of ``positions`` or of ``x, positions``, tried on four tokens; x has one of `_SHAPES`."""
    try:
        forward = function.forward if isinstance(function, torch.nn.Module) else function
        takes = inspect.signature(forward).parameters
    except (TypeError, ValueError):
        takes = {}  # type: ignore[assignment]
    named = {"layer_type": layer_type} if layer_type is not None and "layer_type" in takes else {}
    name = getattr(function, "__name__", type(function).__name__)
    few = torch.arange(4) if not axes else torch.arange(4).expand(axes, 4).contiguous()
    x = torch.zeros(1, 4, 1, head_dim)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "x, positions [1, K]": lambda at: function(x.new_zeros(1, at.shape[-1], head_dim), at.unsqueeze(-2), **named),
        "positions": lambda at: function(at, **named),
        "positions [1, K]": lambda at: function(at.unsqueeze(-2), **named),
    }
    failures = []
    for words, call in calls.items():
        try:
            with torch.no_grad():
                tables = _tables_of(call(few), few)
        except Exception as error:
            failures.append(f"({words}) {type(error).__name__}: {error}")
            continue
        if tables is not None:
            unit = torch.finfo(tables[0].dtype).eps / 2

            def asked(at: torch.Tensor, call=call) -> Waves:
                with torch.no_grad():
                    found = _tables_of(call(at), at)
                assert found is not None
                cos, sin = (_planes(part.double().cpu().numpy()) for part in found)
                return cos, sin

            return Measured(asked, f"{name}({words})", unit)
    for words, of_rank in _SHAPES.items():

        def rotate(x: torch.Tensor, at: torch.Tensor, of_rank=of_rank) -> Any:
            y = function(of_rank(x), at, **named)
            return y.reshape(x.shape) if isinstance(y, torch.Tensor) and y.shape == of_rank(x).shape else y

        try:
            with torch.no_grad():
                return _rotation(rotate, head_dim, f"{name}(x {words}, positions)", None, axes)
        except Exception as error:
            failures.append(f"(x {words}, positions) {type(error).__name__}: {error}")
    raise NotMeasured(f"against: expected a function of positions, or of x and positions, got {name}: {failures[0]}")


def _tables_of(result: Any, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines ``[K, columns]`` of a result; None if the result is no table."""
    count = at.shape[-1]
    if isinstance(result, torch.Tensor) and result.is_complex():
        result = (result.real, result.imag)
    elif isinstance(result, torch.Tensor) and result.squeeze().ndim == 2 and len(result.squeeze()) == count:
        result = result.chunk(2, -1)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        return None
    cos, sin = result
    if not all(isinstance(part, torch.Tensor) and part.is_floating_point() for part in (cos, sin)):
        return None
    if cos.shape != sin.shape or cos.numel() % count or cos.ndim < 2 or not cos.any():  # zeros are a rotated x
        return None
    if at.ndim == 2 and cos.shape[0] == len(at) and cos.numel() // cos.shape[-1] == len(at) * count:
        return None  # a table for each axis: the sections are applied elsewhere
    if cos.numel() // cos.shape[-1] != count:
        return None
    return cos.reshape(count, -1), sin.reshape(count, -1)


def _rotation(
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], head_dim: int, kind: str, rows: int | None, axes: int
) -> Measured:
    """The matrices of a rotation, from basis vectors: the pairs of features, and their cosines and sines."""

    def matrices(at: torch.Tensor) -> np.ndarray:
        count = at.shape[-1]
        found = np.empty((count, head_dim, head_dim))
        for feature in range(head_dim):
            x = torch.zeros(1, count, 1, head_dim)
            x[..., feature] = 1
            y = rotate(x, at)
            if not isinstance(y, torch.Tensor) or y.shape != x.shape:
                raise NotMeasured(f"{kind}: expected a result of the shape of x, got {shown(y)}")
            found[:, :, feature] = y.detach().double().numpy()[0, :, 0]
        return found

    at = torch.arange(1, 6)
    probe = matrices(at if not axes else torch.stack([at + 2 * axis for axis in range(axes)]))
    off = abs(probe).max(0) * (1 - np.eye(head_dim))
    partners = off.argmax(0)
    turning = np.flatnonzero(off.max(0) > 1e-9)
    if not len(turning):
        raise NotMeasured(f"{kind}: expected a rotation, got x unchanged")
    first, end = int(turning.min()), int(turning.max()) + 1
    end += (end - first) % 2
    apart = abs(partners[turning] - turning)
    layout = "interleaved" if (apart == 1).all() and end - first > 2 else "split_half"
    half = (end - first) // 2 if layout == "interleaved" else int(np.bincount(apart).argmax())
    end = max(end, first + 2 * half)
    i0 = first + (2 * np.arange(half) if layout == "interleaved" else np.arange(half))
    i1 = i0 + (1 if layout == "interleaved" else half)

    def waves(at: torch.Tensor) -> Waves:
        found = matrices(at)
        return found[:, i0, i0], found[:, i1, i0]

    return Measured(waves, kind, rows=rows, layout=layout, rotary=(first, end))
