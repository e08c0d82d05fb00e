"""Ask a tensor, a module or a function for the cosines and sines of positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropelab.angles.rope_parameters import Rope
from ropelab.arguments import shown
from ropelab.conformance.configuration.readings import Reading
from ropelab.conformance.convention import required
from ropelab.conformance.words import said
from ropelab.layout.pairing import permutation

Waves = tuple[np.ndarray, np.ndarray]
"""Cosines and sines in float64, ``[K, pairs]``, each with the attention factor."""


@dataclass(frozen=True)
class Measured:
    """The cosines and sines that somebody's code makes.

    Attributes:
        waves: maps positions, int64 ``[K]``, or ``[axes, K]`` where there are several axes, to `Waves`.
        kind: what was measured, in words.
        pairs: the number of pairs that have a cosine.
        axes: the number of axes of positions: 1 for frequencies and tables.
        unit: the unit roundoff of the dtype of the numbers.
        rows: the number of positions that a table has; None if there is no table.
        layout: the pairs of features that rotate together; None if nothing rotates.
        rotary: ``(first, end)``, the features that rotate; None if nothing rotates.
        scaled: whether the numbers contain the attention factor; frequencies do not.
    """

    waves: Callable[[torch.Tensor], Waves]
    kind: str
    pairs: int
    axes: int = 1
    unit: float = 2.0**-24
    rows: int | None = None
    layout: str | None = None
    rotary: tuple[int, int] | None = None
    scaled: bool = True

    def at(self, positions: torch.Tensor) -> Waves:
        """The cosines and sines of positions.

        Raises:
            NotMeasured: the target does not make one of each for every position and pair.
        """
        found = self.waves(positions)
        expected = (positions.shape[-1], self.pairs)
        if (shapes := tuple(part.shape for part in found)) != (expected, expected):
            raise NotMeasured(f"{self.kind}: expected cosines and sines of shape {expected}, got {shapes}")
        return found


class NotMeasured(ValueError):
    """The target is nothing that makes cosines and sines; the message says what was expected and what came."""


def load(path: Path) -> Any:
    """The tensor or the dict of tensors in a file of torch or numpy, which gets to run no code.

    Raises:
        NotMeasured: the file has another form, or cannot be read.
    """
    try:
        if path.suffix == ".npz":
            return {name: torch.from_numpy(value) for name, value in np.load(path).items()}
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path))
        if path.suffix in (".pt", ".pth", ".bin"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise NotMeasured(f"against: no such file: {str(path)!r}") from None
    except Exception as error:  # of damaged files, torch and numpy raise nearly anything
        first = said(error).partition("\n")[0]
        raise NotMeasured(f"against: expected a file of tensors, got {path} ({first})") from None
    raise NotMeasured(f"against: expected a file .json, .pt, .npy or .npz, got {path}")


def measured(target: Any, rope: Rope, layer_type: str | None = None, config: Any = None) -> Measured:
    """The measurement of a target.

    Args:
        target: frequencies ``[R/2]``; a cache ``[P, R]`` with the cosines before the sines (vLLM, SGLang), or complex
            ``[P, R/2]``; ``(cos, sin)``; a dict with the keys ``cos`` and ``sin``, ``cos_sin_cache`` or ``inv_freq``; a
            `Rope`; a module; a function of ``positions`` or of ``x, positions`` that returns tables or the rotated
            ``x`` ``[1, K, 1, D]``; or a class, or a function of ``config``, that takes a configuration.
        rope: the rotation that the target is compared with.
        layer_type: passed to a function or module that takes an argument of this name.
        config: what such a class or function is called with.

    Raises:
        NotMeasured: the target is nothing of that kind.
    """
    if isinstance(target, Mapping):
        return _of_mapping(target, rope, layer_type)
    if inspect.isclass(target) or (inspect.isfunction(target) and required(target) == ("config",)):
        return measured(_made(target, config), rope, layer_type)
    if isinstance(target, Rope):
        return of_rope(target, rope)
    if isinstance(target, np.ndarray):
        target = torch.from_numpy(target)
    if isinstance(target, torch.Tensor):
        return _of_tensor(target.detach().cpu(), rope)
    if isinstance(target, tuple) and len(target) == 2:
        cos, sin = (torch.as_tensor(part).detach().cpu() for part in target)
        return _of_tables(cos, sin, rope)
    if isinstance(target, torch.nn.Module):
        return _of_module(target, rope, layer_type)
    if callable(target):
        return _of_function(target, rope, layer_type)
    raise NotMeasured(f"against: expected frequencies, tables, a module or a function, got {shown(target)}")


def of_rope(target: Rope, rope: Rope, kind: str = "a Rope") -> Measured:
    """The measurement of a rotation as data, such as a description; pairs without axes of their own read axis 0."""

    def waves(at: torch.Tensor) -> Waves:
        reading = Reading.of(target.at_length(int(at.max()) + 1))
        angles = reading.angles(at.numpy())
        return reading.factor * np.cos(angles), reading.factor * np.sin(angles)

    pairs, axes = target.rotary_dim // 2, max(_axes(target), _axes(rope))
    return Measured(waves, kind, pairs, axes, layout=target.layout, rotary=target.rotary_slice)


def _axes(rope: Rope) -> int:
    return 1 if rope.axes is None else max(rope.axes) + 1


def _head_dim(rope: Rope) -> int:
    return rope.head_dim or rope.rotary_dim


def _made(kind: Callable[..., Any], config: Any) -> Any:
    """What a class or a function makes of a configuration; of its object in transformers where that is a mapping."""
    try:
        if isinstance(config, Mapping) and "model_type" in config:
            with suppress(ImportError):
                from transformers.models.auto import CONFIG_MAPPING

                if config["model_type"] in CONFIG_MAPPING:
                    config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        return getattr(kind, "from_config", kind)(config)
    except Exception as error:
        expected = "a class that takes the configuration alone, or an object of it"
        raise NotMeasured(f"against: expected {expected}, got {kind.__name__} ({said(error)})") from None


def _of_mapping(target: Mapping, rope: Rope, layer_type: str | None) -> Measured:
    if layer_type in target:
        return measured(target[layer_type], rope, layer_type)
    if "cos" in target and "sin" in target:
        return measured((target["cos"], target["sin"]), rope)
    for name in ("cos_sin_cache", "freqs_cis", "inv_freq", "frequencies"):
        if name in target:
            return measured(target[name], rope)
    raise NotMeasured(f"against: expected cos and sin, cos_sin_cache or inv_freq, got the keys {sorted(target)}")


def _of_tensor(x: torch.Tensor, rope: Rope) -> Measured:
    if x.ndim == 1 and x.is_floating_point():
        theta = x.double().numpy()

        def turned(positions: torch.Tensor) -> Waves:
            angles = positions.double().numpy()[:, None] * theta
            return np.cos(angles), np.sin(angles)

        unit = torch.finfo(x.dtype).eps / 2
        return Measured(turned, f"{len(theta)} frequencies", len(theta), unit=unit, scaled=False)
    if x.is_complex():
        return _of_tables(x.real, x.imag, rope)
    if x.ndim >= 2 and x.is_floating_point() and x.shape[-1] % 2 == 0:
        cos, sin = x.reshape(-1, x.shape[-1]).chunk(2, -1)
        return _of_tables(cos, sin, rope)
    raise NotMeasured(f"against: expected frequencies [R/2] or a cache [P, R], got shape {tuple(x.shape)} {x.dtype}")


def _of_tables(cos: torch.Tensor, sin: torch.Tensor, rope: Rope) -> Measured:
    if cos.shape != sin.shape or cos.ndim < 2:
        raise NotMeasured(f"against: expected cos and sin [P, R/2], got {tuple(cos.shape)} and {tuple(sin.shape)}")
    unit = torch.finfo(cos.dtype).eps / 2
    cosines, sines = (x.reshape(-1, x.shape[-1]).double().numpy() for x in (cos, sin))
    columns = _columns(cosines, sines, rope)
    cosines, sines = cosines[:, columns], sines[:, columns]
    rows, pairs = cosines.shape
    return Measured(
        lambda at: (cosines[at.numpy()], sines[at.numpy()]), f"tables of {rows} rows", pairs, unit=unit, rows=rows
    )


def _columns(cos: np.ndarray, sin: np.ndarray, rope: Rope) -> slice:
    """The columns of tables ``[K, columns]`` that are one for each pair; tables may have one for each feature.

    The pairs of images may repeat their frequencies, so that tables of as many columns as pairs are alike in halves.
    """
    count, theta = cos.shape[-1], rope.inverse_frequencies
    if count % 2 == 0 and len(cos) > 1:
        for one, other in ((slice(count // 2), slice(count // 2, None)), (slice(0, None, 2), slice(1, None, 2))):
            if count == len(theta) and torch.equal(theta[one], theta[other]):
                continue
            if all(np.array_equal(x[:, one], x[:, other], equal_nan=True) for x in (cos, sin)):
                return one
    return slice(None)


def _of_module(module: torch.nn.Module, rope: Rope, layer_type: str | None) -> Measured:
    """A rotary module, or the first one of a model: `forward` counts, and a cache only where forward cannot be run."""
    rotary = next((part for part in module.modules() if _attribute(part, layer_type) is not None), module)
    attribute = _attribute(rotary, layer_type)
    cache = attribute if attribute is not None and attribute.ndim > 1 else None
    rows = None if cache is None else cache.shape[0]
    try:
        if cache is not None and hasattr(rotary, "is_neox_style"):
            call = _server_call(getattr(rotary, "forward_native", rotary.forward))
            return _rotation(call, rope, f"{type(rotary).__name__}.forward", rows)
        return replace(_of_function(rotary, rope, layer_type), rows=rows)
    except NotMeasured as error:
        if attribute is None:
            expected = f"against: expected a rotary module, got {type(module).__name__}"
            raise NotMeasured(f"{expected} ({error})") from None
    return _of_tensor(attribute.detach().cpu(), rope)


def _attribute(module: Any, layer_type: str | None) -> torch.Tensor | None:
    names = (f"{layer_type}_inv_freq", "cos_sin_cache", "inv_freq", "freqs_cis")
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, torch.Tensor)), None)


def _server_call(forward: Callable) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """vLLM's and SGLang's ``forward(positions, query, key)`` as a function of ``x`` ``[1, K, 1, D]`` and positions."""

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        query = x.reshape(-1, x.shape[-1]).clone()
        return forward(positions, query, query.clone())[0].reshape(x.shape)

    return rotate


_SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "[1, K, 1, D]": lambda x: x, "[K, 1, D]": lambda x: x[0], "[1, K, D]": lambda x: x[:, :, 0],
    "[K, D]": lambda x: x[0, :, 0],
}  # fmt: skip
"""The shapes of x that a function of x and positions may take, made of ``[1, K, 1, D]``."""


def _of_function(function: Callable, rope: Rope, layer_type: str | None) -> Measured:
    """A function of ``positions`` or of ``x, positions``, tried on four tokens; x has one of `_SHAPES`."""
    forward = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        signature = inspect.signature(lambda *arguments: None)  # of some functions in C there is none
    takes = signature.parameters
    named = {"layer_type": layer_type} if layer_type is not None and "layer_type" in takes else {}
    name = getattr(function, "__name__", type(function).__name__)
    if next(iter(takes), "") == "self":
        raise NotMeasured(f"against: expected a function, a class or an object, got {name}, a method without an object")
    head_dim = _head_dim(rope)
    x = torch.zeros(1, 4, 1, head_dim)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "x, positions [1, K]": lambda at: function(x.new_zeros(1, at.shape[-1], head_dim), at.unsqueeze(-2), **named),
        "x, positions [K, axes]": lambda at: function(x.new_zeros(1, at.shape[-1], head_dim), at.mT, **named),
        "positions": lambda at: function(at, **named),
        "positions [1, K]": lambda at: function(at.unsqueeze(-2), **named),
    }
    takes_x, takes_one = (_binds(signature, count, named) for count in (2, 1))
    failures = []
    for axes in dict.fromkeys((_axes(rope), 1)):
        for words, call in calls.items():
            if not (takes_x if words.startswith("x") else takes_one) or (axes == 1 and "axes" in words):
                continue
            try:
                return _function_of_positions(call, rope, f"{name}({words})", axes)
            except NotMeasured as error:
                failures.append(error)
    for words, of_rank in _SHAPES.items() if takes_x else ():

        def rotate(x: torch.Tensor, at: torch.Tensor, of_rank=of_rank) -> Any:
            y = function(of_rank(x), at, **named)
            return y.reshape(x.shape) if isinstance(y, torch.Tensor) and y.shape == of_rank(x).shape else y

        try:
            return _rotation(rotate, rope, f"{name}(x {words}, positions)")
        except NotMeasured as error:
            failures.append(error)
    reason, cause = (str(failures[0]), failures[0].__cause__) if failures else (f"it takes {signature}", None)
    expected = "against: expected a function of positions, or of x and positions"
    raise NotMeasured(f"{expected}, got {name} ({reason})") from cause


def _binds(signature: inspect.Signature, count: int, named: Mapping[str, Any]) -> bool:
    """Whether a signature takes a number of positional arguments beside the named ones."""
    try:
        signature.bind(*[None] * count, **named)
    except TypeError:
        return False
    return True


def _function_of_positions(call: Callable[[torch.Tensor], Any], rope: Rope, kind: str, axes: int) -> Measured:
    """A function that returns tables, from its result for four tokens.

    Raises:
        NotMeasured: the result is no table.
    """

    def tables(at: torch.Tensor) -> Waves:
        try:
            with torch.no_grad():
                found = _tables_of(call(at), at)
        except Exception as error:
            raise NotMeasured(f"{kind}: expected cosines and sines, got {said(error)}") from error
        if found is None:
            raise NotMeasured(f"{kind}: expected cosines and sines of each position")
        unit.append(torch.finfo(found[0].dtype).eps / 2)
        cos, sin = (part.double().cpu().numpy() for part in found)
        return cos, sin

    unit: list[float] = []
    cosines, sines = tables(_few(4, axes))
    columns = _columns(cosines, sines, rope)
    pairs = cosines[:, columns].shape[1]

    def waves(at: torch.Tensor) -> Waves:
        cos, sin = tables(at)
        return cos[:, columns], sin[:, columns]

    return Measured(waves, kind, pairs, axes, unit[0])


def _few(count: int, axes: int, first: int = 0) -> torch.Tensor:
    """Positions ``[count]``, or ``[axes, count]`` that differ between axes."""
    at = torch.arange(first, first + count)
    return at if axes == 1 else torch.stack([at + 2 * axis for axis in range(axes)])


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
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rope: Rope, kind: str, rows: int | None = None
) -> Measured:
    """The matrices of a rotation, from basis vectors: the pairs of features, and their cosines and sines.

    Raises:
        NotMeasured: ``rotate`` raises, or does not rotate.
    """
    head_dim = _head_dim(rope)

    back = np.arange(head_dim)  # the order of the results in which pairs lie as in x

    def matrices(at: torch.Tensor) -> np.ndarray:
        count = at.shape[-1]
        found = np.empty((count, head_dim, head_dim))
        for feature in range(head_dim):
            x = torch.zeros(1, count, 1, head_dim)
            x[..., feature] = 1
            try:
                with torch.no_grad():
                    y = rotate(x, at)
            except Exception as error:
                raise NotMeasured(f"{kind}: expected a rotation of x, got {said(error)}") from error
            if not isinstance(y, torch.Tensor) or y.shape != x.shape:
                raise NotMeasured(f"{kind}: expected a result of the shape of x, got {shown(y)}")
            found[:, :, feature] = y.detach().double().cpu().numpy()[0, :, 0]
        return found[:, back]

    axes = _axes(rope)
    try:
        probe = matrices(_few(5, axes, first=1))
    except NotMeasured:
        if axes == 1:
            raise
        axes, probe = 1, matrices(_few(5, 1, first=1))
    if rope.out_layout is not None:
        rotating = np.arange(*rope.rotary_slice)
        still = matrices(torch.zeros_like(_few(1, axes)))[0, rotating].argmax(1)
        if np.array_equal(still, rotating[permutation(rope.rotary_dim, rope.layout, rope.out_layout)]):
            back[rotating] = rotating[permutation(rope.rotary_dim, rope.out_layout, rope.layout)]
            probe = probe[:, back]
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

    return Measured(waves, kind, half, axes, rows=rows, layout=layout, rotary=(first, end))
