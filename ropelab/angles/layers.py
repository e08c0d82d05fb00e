"""Which layers of a model rotate.

Some layers have attention without positions (NoPE), and some have no attention. The type of a layer decides, or a list
with an entry for each layer.
"""

from collections.abc import Mapping
from typing import Any

from ropelab.angles import model_types
from ropelab.arguments import integer, sequence, shown


def check_rotates(settings: dict, name: str, layer_type: str) -> None:
    """Raise ValueError if no layer of the type rotates; ``name`` is the model type without ``_text``."""
    if layer_type in _unrotated_types(settings, name):
        of_model = f" in {name!r}" if name else ""
        raise ValueError(f"layer_type: expected layers that rotate, got {layer_type!r}, which never rotate{of_model}")


def type_of(settings: dict, name: str, layer: int) -> tuple[bool, str | None]:
    """Whether a layer rotates, and its type, as far as the settings state types.

    Raises:
        TypeError, ValueError: ``layer`` is no number of a layer, or the model needs ``layer_types`` and states none.
    """
    count = settings.get("num_hidden_layers")
    layer = integer("layer", layer, 0, None if count is None else integer("num_hidden_layers", count, at_least=0))
    nested = settings.get("rope_parameters")
    types = _entry(settings, "layer_types", layer)
    if types is None and (name in model_types.UNROTATED or name in model_types.LAYERED_MODELS):
        expected = "a value for layer_types, as transformers' AutoConfig states them"
        raise ValueError(f"config: expected {expected}, because the layers of {name!r} differ, got none")
    rotates = (
        types not in _unrotated_types(settings, name) or _is_dense_prefix(settings, layer),
        not (isinstance(nested, Mapping) and types in nested and nested[types] is None),
        _entry(settings, "no_rope_layers", layer, _no_rope_layers(settings, name, layer)) != 0,
        _entry(settings, "layer_rope_theta", layer) != 0,
        layer not in _list(settings, "cross_attention_layers"),
        settings.get("use_mem_rope") is not False,
    )
    return all(rotates), types


def base_of(settings: dict, name: str, layer: int | None) -> float | None:
    """The base of a layer's frequencies, where the model lists the bases of its layers, else None.

    Raises:
        ValueError: ``layer`` is None and the bases differ.
    """
    if name not in model_types.LAYER_BASES:
        return None
    bases = dict.fromkeys(base for base in _list(settings, "layer_rope_theta") if base)
    if layer is None and len(bases) > 1:
        raise ValueError(f"layer: expected a layer of {name!r}, whose layer_rope_theta differs, got None")
    return next(iter(bases), None) if layer is None else _entry(settings, "layer_rope_theta", layer)


def _unrotated_types(settings: dict, name: str) -> frozenset[str]:
    of_model = model_types.UNROTATED.get(name, frozenset())
    if name in model_types.WITHOUT_WINDOW_ALL_ROTATE and settings.get("sliding_window", 0) is None:
        of_model = frozenset()
    return model_types.NO_ATTENTION | of_model


def _is_dense_prefix(settings: dict, layer: int) -> bool:
    """Whether a layer is one of the first layers of Cohere 2 MoE, which rotate whatever their type is."""
    pattern = settings.get("prefix_dense_sliding_window_pattern")
    return pattern == 1 and _entry(settings, "mlp_layer_types", layer) == "dense"


def _no_rope_layers(settings: dict, name: str, layer: int) -> int | None:
    """The entry of a list that the configuration leaves to an interval: 1 for a layer that rotates."""
    if name not in model_types.INTERVAL_MODELS:
        return None
    stated = settings.get("no_rope_layer_interval")
    interval = 4 if stated is None else integer("no_rope_layer_interval", stated, at_least=1)
    return int((layer + 1) % interval != 0)


def _list(settings: dict, key: str) -> tuple:
    return () if settings.get(key) is None else sequence(key, settings[key])


def _entry(settings: dict, key: str, layer: int, default: Any = None) -> Any:
    """The entry of a layer in a list; ``default`` where the list is missing or empty."""
    entries = _list(settings, key)
    if entries and layer >= len(entries):
        raise ValueError(f"layer: expected a layer below {len(entries)}, as {key} has, got {shown(layer)}")
    return entries[layer] if entries else default


SETTINGS = (
    "num_hidden_layers", "sliding_window", "no_rope_layers", "no_rope_layer_interval", "layer_rope_theta",
    "cross_attention_layers", "use_mem_rope", "mlp_layer_types", "prefix_dense_sliding_window_pattern",
)  # fmt: skip
"""The keys of a configuration that this file reads, besides ``layer_types`` and ``rope_parameters``."""
