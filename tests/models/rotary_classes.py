"""Compare `rope_from_config` with the rotary classes of Transformers, on default configurations.

The model's class makes cosines and sines, the function of the model's file rotates random q by them, all in float64.
Frequencies, factor, axes, slice, layout and direction decide the result, so an equal result has all of them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ropelab import reference
from ropelab.angles.model_config import rope_from_config
from ropelab.angles.rope_parameters import Rope
from ropelab.bench import replaced

_CLASS = re.compile(r"(Rotary|RoPE|Rope)\w*Embedding$")
_FUNCTIONS = (
    "apply_rotary_pos_emb",
    "apply_rotary_emb",
    "apply_rotary_pos_emb_2d",
    "apply_rotary_pos_emb_2d_self_attn",
)
_LONGEST = 1 << 20
TOLERANCE = _LONGEST * 64 * torch.finfo(torch.float64).eps
"""The largest error relative to the length of a pair: an angle is below `_LONGEST` rad, and 64 roundings bound the
relative error of a frequency, which a power of a base up to e^40 makes."""
_TEXT = {"rope_type": "default", "rope_theta": 1e4}
_CHOSEN: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _TEXT, "sliding_attention": _TEXT}},
    "EsmConfig": {"position_embedding_type": "rotary"},
    "Glm4MoeConfig": {"head_dim": 128},
    "Glm4vMoeTextConfig": {"head_dim": 128},
    "GraniteMoeHybridConfig": {"position_embedding_type": "rope"},
    "Glm4vTextConfig": {"rope_parameters": _TEXT | {"partial_rotary_factor": 0.5}},
    "GlmImageTextConfig": {"rope_parameters": _TEXT | {"partial_rotary_factor": 0.5}},
    "MiniMaxM3VLTextConfig": {"rope_parameters": _TEXT | {"partial_rotary_factor": 0.5}},
    "Qwen3OmniMoeTextConfig": {"head_dim": 128},
    "Qwen3OmniMoeTalkerTextConfig": {"head_dim": 128},
    "Qwen4ExpTextConfig": {"rope_parameters": _TEXT | {"partial_rotary_factor": 0.25}},
}
"""Class of a configuration -> fields without which the default configuration does not rotate, or is of no model."""
_PARTS = {
    "Qwen2_5OmniRotaryEmbedding": "Text|Talker",
    "Qwen2_5OmniDiTRotaryEmbedding": "DiT",
    "Qwen3OmniMoeRotaryEmbedding": "CodePredictor|Code2Wav",
    "Qwen3OmniMoeTalkerRotaryEmbedding": "TalkerText",
    "Qwen3OmniMoeThinkerTextRotaryEmbedding": "MoeText",
}
"""Rotary class -> the configurations with which its model makes it, where it takes more of the architecture's."""


@dataclass(frozen=True)
class Compared:
    """A rotary class, or its layers of one type, beside `rope_from_config`.

    Attributes:
        outcome: ``equal``, ``differs``, ``refused`` or ``not compared``.
        reason: the message of the refusal, or the difference.
    """

    architecture: str
    rotary_class: str = ""
    model_type: str = ""
    layer_type: str = ""
    rope: Rope | None = None
    outcome: str = "equal"
    reason: str = ""


def rotary_classes(architecture: str) -> Iterator[type]:
    """The rotary classes that the modeling file of an architecture defines."""
    code = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    for name, value in vars(code).items():
        if inspect.isclass(value) and value.__module__ == code.__name__ and _CLASS.search(name):
            yield value


def compared(architecture: str) -> list[Compared]:
    """A result for each rotary class of an architecture and each type of layers, or one that says why there is none."""
    found = list(_of_classes(architecture))
    for config in () if found else configurations(architecture):
        row = Compared(architecture, model_type=config.model_type)
        try:
            rope_from_config(config)
        except ValueError as refusal:
            found.append(replace(row, outcome="refused", reason=str(refusal)))
        else:
            found.append(replace(row, outcome="not compared", reason="the file has no rotary class"))
    return found


def _of_classes(architecture: str) -> Iterator[Compared]:
    for rotary_class in rotary_classes(architecture):
        for config in configurations(architecture):
            rotary = _built(rotary_class, config)
            if rotary is None:
                continue
            row = Compared(architecture, rotary_class.__name__, config.model_type)
            types = getattr(rotary, "layer_types", None) or [None]
            for layer_type in (name for name in types if name is None or hasattr(rotary, f"{name}_inv_freq")):
                yield _compared(replace(row, layer_type=layer_type or ""), config, rotary, layer_type)


def _compared(row: Compared, config: Any, rotary: torch.nn.Module, layer_type: str | None) -> Compared:
    try:
        rope = rope_from_config(config, layer_type=layer_type)
    except ValueError as refusal:
        return replace(row, outcome="refused", reason=str(refusal))
    row = replace(row, rope=rope)
    code = importlib.import_module(type(rotary).__module__)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(_LONGEST, (_axes(rotary), 5), generator=generator)
    if rope.axes is not None and max(rope.axes) >= len(positions):
        return replace(row, outcome="differs", reason=f"axes {sorted(set(rope.axes))}, not {len(positions)}")
    columns = [0] * (rope.rotary_dim // 2) if rope.axes is None else list(rope.axes)
    angles = positions[columns].T * rope.inverse_frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    head_dim = rope.head_dim or rope.rotary_dim
    q = torch.randn(1, 5, 2, head_dim, dtype=torch.float64, generator=generator)
    layouts = {"layout": rope.layout, "out_layout": rope.out_layout}
    expected = reference.rotate(q, cos, sin, rotary_slice=rope.rotary_slice, **layouts)
    try:
        actual = in_float64(lambda: _rotated(code, config, rotary, q, positions, layer_type, rope.rotary_slice))
    except (RuntimeError, ValueError, TypeError) as error:
        return replace(row, outcome="differs", reason=str(error).splitlines()[0])
    difference = (actual - expected).abs().max() / q.abs().max()
    if difference > TOLERANCE:
        return replace(row, outcome="differs", reason=f"{difference:.1g} apart")
    return row


def configurations(architecture: str) -> Iterator[Any]:
    """The default configurations of an architecture, of all its parts."""
    from transformers import PreTrainedConfig

    files = importlib.import_module(f"transformers.models.{architecture}.configuration_{architecture}")
    for kind in vars(files).values():
        if inspect.isclass(kind) and issubclass(kind, PreTrainedConfig) and kind.__module__ == files.__name__:
            yield kind(**_CHOSEN.get(kind.__name__, {}))


def _built(rotary_class: type, config: Any) -> Any:
    """The rotary class's object in float64, or None where the class does not take the configuration."""
    if not re.search(_PARTS.get(rotary_class.__name__, ""), type(config).__name__):
        return None
    try:
        return in_float64(lambda: rotary_class(config))
    except Exception:  # whatever the class raises for the configuration of another part
        return None


def _axes(rotary: torch.nn.Module) -> int:
    """The number of axes of the positions that a rotary class takes."""
    source = "".join(inspect.getsource(kind) for kind in type(rotary).__mro__[:2])
    stated = re.search(r"position_ids.expand\((\d)", source)
    if getattr(rotary, "rope_type", None) == "axial":
        return 3 if "dim // 3" in source else 2
    return int(stated[1]) if stated else 1


def _rotated(
    code: ModuleType, config: Any, rotary: Any, q: Any, positions: Any, layer_type: str | None, part: tuple[int, int]
) -> torch.Tensor:
    """q ``[1, S, heads, D]`` as the model's code rotates it; some models pass only a part of a head."""
    axial = getattr(rotary, "rope_type", None) == "axial"
    ids = positions.T if axial else positions if len(positions) == 1 else positions[:, None]
    waves = rotary(q, ids) if layer_type is None else rotary(q, ids, layer_type)
    waves = waves if isinstance(waves, tuple) else (waves,)
    names = [*_FUNCTIONS]
    if axial:
        names.insert(0, "apply_rotary_pos_emb_vision")
    elif getattr(config, "rope_interleave", True) and "Audio" not in type(config).__name__:
        names.insert(0, "apply_rotary_pos_emb_interleave")
    function = next((vars(code)[name] for name in names if name in vars(code)), None)
    if function is None:
        raise ValueError("the file has no function that rotates")
    if axial and "vision" not in function.__name__:
        waves = tuple(wave if wave.ndim == 3 else wave[None] for wave in waves)
    first, end = part
    try:
        return _applied(function, q, waves)
    except RuntimeError:
        return torch.cat((q[..., :first], _applied(function, q[..., first:end], waves), q[..., end:]), dim=-1)


def _applied(function: Callable[..., Any], q: torch.Tensor, waves: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """q after a function that takes ``[S, heads, D]``, ``[1, S, heads, D]`` or, by default, ``[1, heads, S, D]``."""
    source = inspect.getsource(function)
    vision, bshd = "cos.unsqueeze(-2)" in source or "cos[:, None" in source, "[:, :, None" in source
    x = q[0] if vision else q if bshd else q.transpose(1, 2)
    alone = next(iter(inspect.signature(function).parameters)) == "x"
    y = function(x, *waves) if alone else function(x, x, *waves)[0]
    return y[None] if vision else y if bshd else y.transpose(1, 2)


def in_float64(call: Callable[[], Any]) -> Any:
    """Call code that asks for float32 so that it gets float64."""
    before = torch.get_default_dtype()
    with (
        replaced.attributes(torch, float=torch.float64, float32=torch.float64),
        replaced.attributes(torch.Tensor, float=torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            return call()
        finally:
            torch.set_default_dtype(before)
