"""Read the rotation of a model from its configuration, in the form of Hugging Face transformers.

A configuration is ``config.json`` as a dict, or the object of transformers, of version 5 (``rope_parameters``, nested
where layer types differ) or of an earlier version (``rope_scaling`` and ``rope_theta``). The module does not import
transformers. A missing key raises an error, and so does an unknown key: a guessed base would rotate every token wrong,
and nobody would see the error at small positions.
"""

import copy
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any, cast, overload

import torch

from ropelab.angles import frequencies, layers, model_types
from ropelab.angles.rope_parameters import ANY_LENGTH, Rope
from ropelab.arguments import choice, flag, integer, integers, number, numbers, sequence, shown
from ropelab.foreign import hinted
from ropelab.layout.pairing import MOST_FEATURES, Layout, check_layout, check_rotary_dim
from ropelab.positions import axes


@overload
def rope_from_config(
    config: Any, *, layer_type: str | None = None, layer: None = None, layout: Layout | None = None,
    seq_len: int | None = None,
) -> Rope: ...  # fmt: skip
@overload
def rope_from_config(
    config: Any, *, layer_type: None = None, layer: int, layout: Layout | None = None, seq_len: int | None = None
) -> Rope | None: ...
@hinted
def rope_from_config(
    config: Any,
    *,
    layer_type: str | None = None,
    layer: int | None = None,
    layout: Layout | None = None,
    seq_len: int | None = None,
) -> Rope | None:
    """The rotation of a model, of its layers of one type, or of one layer, from a configuration of transformers.

    Example: ``cos, sin = rope_from_config(config).tables(4096)``.

    Args:
        config: a mapping (``config.json``), an object with ``to_dict()``, or an object with the keys as attributes. The
            function reads no other attributes. For a model with several parts, pass the configuration of one part, such
            as ``config.text_config``. The function copies the values, so later changes of ``config`` have no effect.
        layer_type: ``"full_attention"`` or ``"sliding_attention"``, where layers differ (Gemma 3 and 4, ModernBERT);
            DeepSeek-V4's types, or ``"main"`` or ``"compress"``. A type that never rotates is refused (Cohere 2, linear
            attention). The model itself decides which layers have scaled frequencies (Molmo 2).
        layer: the number of a layer, in place of ``layer_type``. The result is None for a layer without a rotation.
        layout: the pairs of features, as for `apply_rope`, for a ``model_type`` that this function does not know.
        seq_len: the length of the sequences, cache included, for dynamic NTK and LongRoPE; by default 0, a short one.

    Without ``original_max_position_embeddings``, YaRN, LongRoPE and Llama 3's scaling take ``max_position_embeddings``
    in its place, as transformers does, and the attribute ``inferred`` of the result records the substitution.

    The result equals the model's own rotary class for every ``model_type`` of transformers 5.23 that this function does
    not refuse; data/models/configurations.csv has the list. Models of images read ``rope_type`` ``axial``; the axes of
    the result are the columns of the model's ``position_ids``. In latent attention (DeepSeek) the result describes the
    part of a head that rotates. A configuration without ``model_type`` pairs halves, as Llama does.

    Raises:
        TypeError: the value of a key has another type. The message names the key.
        ValueError: a key is missing, is unknown for the ``rope_type``, has an impossible value or contradicts another
            key. The message names the key. Or the model type is unknown and ``layout`` is missing, or no `Rope`
            describes the model: the message says what to pass.
    """
    if layer is not None:
        if layer_type is not None:
            raise ValueError(f"layer: expected None beside layer_type, got {shown(layer)}")
        settings = _settings(config)
        rotates, layer_type = layers.type_of(settings, _model_type(settings), layer)
        if not rotates:
            return None
    settings, parameters = stated(config, layer_type, layer)
    if base := layers.base_of(settings, _model_type(settings), layer):
        parameters["rope_theta"] = base
    return rope_of(settings, parameters, layer_type=layer_type, layout=layout, seq_len=seq_len)


def stated(config: Any, layer_type: str | None = None, layer: int | None = None) -> tuple[dict, dict]:
    """``(settings, parameters)``: copies of the model's settings, and of the parameters of one type of layers.

    The parameters have the flat form of version 5's ``rope_parameters``. The arguments and the errors are those of
    `rope_from_config`.
    """
    settings = _settings(config)
    name = _model_type(settings)
    if "text_config" in settings and "hidden_size" not in settings:
        expected = "the configuration of one part of the model, such as config.text_config"
        raise ValueError(f"config: expected {expected}, got the configuration of all parts")
    if layer is None and isinstance(layer_type, str):
        layers.check_rotates(settings, name, layer_type)
    return settings, _parameters(settings, layer_type, name)


def rope_of(
    settings: dict,
    parameters: dict,
    *,
    layer_type: str | None = None,
    layout: str | None = None,
    seq_len: int | None = None,
) -> Rope:
    """The rotation that the results of `stated` describe; `rope_from_config` has the other arguments and the errors."""
    name = _model_type(settings)
    read, written = _layouts(settings, name, layout)
    seq_len = 0 if seq_len is None else integer("seq_len", seq_len, at_least=0, below=sys.maxsize)
    rope_type = _rope_type(parameters)
    if name in model_types.AXIAL_MODELS and rope_type == "default":
        rope_type = "axial"  # as transformers takes it; old configurations do not state it
    if (rope_type == "axial") != (name in model_types.AXIAL_MODELS):
        axial = ", ".join(sorted(model_types.AXIAL_MODELS))
        raise ValueError(f"rope_type: expected 'axial' for {axial}, and for no other, got {rope_type!r} for {name!r}")
    _check_keys(rope_type, parameters)
    model, stated_parameters = settings, parameters
    parameters = {key: value for key, value in parameters.items() if value is not None}
    if layer_type is not None:
        settings = settings | _overrides(settings, layer_type)

    base = _require(parameters, "rope_theta", ", the base of the frequencies, whose default differs between models")
    base = number("rope_theta", base, at_least=sys.float_info.min)
    reader = _Reader(parameters, settings)
    head_dim = _head_dim(settings, name)
    columns: tuple[int, ...] | None
    if rope_type == "axial":
        theta, columns = _axial(name, head_dim, base)
        attention_factor, lengths = 1.0, ANY_LENGTH
    else:
        rotary_dim = _rotary_dim(rope_type, head_dim, parameters, settings, name)
        theta, attention_factor, lengths = _VARIANTS[rope_type](reader, rotary_dim, base, seq_len)
        columns = _axis_of_each_plane(parameters, rotary_dim, name)
        if settings.get("qk_rope_head_dim") is not None and name not in model_types.LAST_FEATURES_MODELS:
            head_dim = rotary_dim
    return Rope(
        inverse_frequencies=-theta if name in model_types.REVERSED_MODELS else theta,
        attention_factor=parameters.get("attention_factor", attention_factor),
        head_dim=head_dim,
        first_feature=head_dim - rotary_dim if name in model_types.LAST_FEATURES_MODELS else 0,
        layout=read,
        out_layout=written,
        axes=columns,
        max_seq_len=_max_seq_len(settings),
        lengths=lengths,
        remake=None
        if lengths == ANY_LENGTH
        else partial(rope_of, model, stated_parameters, layer_type=layer_type, layout=layout),
        inferred=reader.inferred,
    )


# The reading of a configuration


class _Reader:
    """The values that a variant needs, from the parameters of the rotation or from the settings of the model.

    A value that neither has raises ValueError with the name of its key.

    Attributes:
        inferred: maps each key that the configuration leaves open to the keys that its value was taken from.
    """

    def __init__(self, parameters: dict, settings: dict):
        self._parameters, self._settings = parameters, settings
        self.inferred: dict[str, str] = {}

    def get(self, key: str, default: Any = None) -> Any:
        return self._parameters.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return _require(self._parameters, key)

    @property
    def max_seq_len(self) -> int:
        return _length_setting(self._settings, "max_position_embeddings")

    @property
    def trained_len(self) -> int:
        """The trained length: the model's setting (Phi-3), else the parameter, else the model's length.

        transformers looks in the same order.
        """
        for stated in (self._settings, self._parameters):
            if stated.get(_TRAINED) is not None:
                return _length_setting(stated, _TRAINED)
        if self._settings.get("max_position_embeddings") is None:
            raise ValueError(f"config: expected {_TRAINED} or max_position_embeddings, got neither")
        self.inferred[_TRAINED] = "max_position_embeddings"
        return self.max_seq_len

    @property
    def factor(self) -> float:
        """The parameter or, where it is left open (DeepSeek, Phi-3), the model's length over the trained length."""
        if self._parameters.get("factor") is not None:
            return self._parameters["factor"]
        self.inferred["factor"] = f"max_position_embeddings / {_TRAINED}"
        return self.max_seq_len / self.trained_len


def _require(settings: dict, key: str, explanation: str = "") -> Any:
    if settings.get(key) is None:
        raise ValueError(f"config: expected a value for {key}{explanation}, got none")
    return settings[key]


def _settings(config: Any) -> dict:
    """A copy of the keys that this file reads. Other attributes of an object may be properties that raise."""
    if not isinstance(config, (Mapping, type)) and callable(getattr(config, "to_dict", None)):
        types = getattr(config, "layer_types", None)  # a property in some classes (Bamba)
        config = config.to_dict() | ({} if types is None else {"layer_types": types})
    if isinstance(config, Mapping):
        found = {key: config[key] for key in _SETTINGS if key in config}
    else:
        found = {key: getattr(config, key) for key in _SETTINGS if hasattr(config, key)}
        if not found or isinstance(config, type):
            read = "json.load(open(path))" if str(config).endswith(".json") else "AutoConfig.from_pretrained(name)"
            hint = f" (pass {read})" if isinstance(config, (str, PurePath)) else ""
            raise TypeError(
                f"config: expected a configuration of transformers, as a dict or an object, got {shown(config)}{hint}"
            )
    return copy.deepcopy(found)


def _parameters(settings: dict, layer_type: str | None, name: str) -> dict:
    """The parameters of one type of layers, in the flat form of version 5's ``rope_parameters``."""
    parameters = _stated(settings)
    if not parameters and name in model_types.STATED["rope_parameters"]:
        _require({}, "rope_parameters", f", whose default is its own in {name!r}")
    values = parameters.values()
    nested = bool(parameters) and all(value is None or isinstance(value, Mapping) for value in values)
    nested = nested and not parameters.keys() & _ALL_KEYS
    local_base = next((settings[key] for key in _LOCAL_BASE if settings.get(key) is not None), None)
    if isinstance(layer_type, str):
        layer_type = model_types.LAYER_KINDS.get(name, {}).get(layer_type, layer_type)
    types = tuple(parameters) if nested else ("full_attention", "sliding_attention") if local_base is not None else ()
    if layer_type is not None and not isinstance(layer_type, str):
        raise TypeError(f"layer_type: expected a string or None, got {shown(layer_type)}")
    if types and layer_type not in types:
        raise ValueError(f"layer_type: expected one of {types}, because layers differ, got {layer_type!r}")
    if not types and name in model_types.LAYERED_MODELS:
        expected = f"parameters for each type of layers of {name!r}, as transformers' AutoConfig nests them"
        raise ValueError(f"rope_parameters: expected {expected}, got {shown(dict(parameters))}")
    if not types and layer_type is not None:
        choice("layer_type", layer_type, dict.fromkeys(_layer_types(settings)) or _LAYER_TYPES)
    if nested:
        if parameters[layer_type] is None:
            raise ValueError(f"layer_type: expected layers that rotate, got {layer_type!r}, whose parameters are None")
        parameters = parameters[layer_type]
    elif local_base is not None and layer_type == "sliding_attention":
        parameters = {"rope_theta": local_base}  # Gemma 3 before version 5 scales the frequencies of other layers only
    parameters = dict(parameters)
    for key, elsewhere in _BESIDE.items():
        for name in elsewhere:
            value = settings.get(name)
            if parameters.get(key) is None and value is not None:
                parameters[key] = value
            elif not types and value is not None and value != parameters[key]:
                raise ValueError(
                    f"{name}: expected None or {parameters[key]!r}, which another key states for {key}, got {value!r}"
                )
    return parameters


def _stated(settings: dict) -> Mapping:
    """``rope_parameters`` or, before version 5, ``rope_scaling``; ValueError where both are there and disagree."""
    found = {}
    for name in ("rope_parameters", "rope_scaling"):
        parameters = settings.get(name)
        if parameters is not None and not isinstance(parameters, Mapping):
            raise TypeError(f"{name}: expected a dict, got {shown(parameters)}")
        if parameters:
            found[name] = parameters
    if len(found) == 2:
        new, old = (
            {k: v for k, v in p.items() if k not in _BESIDE} | {"rope_type": _rope_type(p)} for p in found.values()
        )
        for parameters in (new, old):
            parameters.pop("type", None)
        old_base = {key: found["rope_scaling"][key] for key in _BESIDE if key in found["rope_scaling"]}
        if new != old or any(found["rope_parameters"].get(key) != value for key, value in old_base.items()):
            raise ValueError(
                f"rope_scaling: expected None or the values of rope_parameters, got {found['rope_scaling']!r}"
            )
    return next(iter(found.values()), {})


def _layer_types(settings: dict) -> tuple:
    return () if settings.get("layer_types") is None else sequence("layer_types", settings["layer_types"])


# Keys of version 5's rope_parameters -> the names that the model's settings have for them: ModernBERT, GPT-NeoX,
# StableLM.
_BESIDE = {
    "rope_theta": ("rope_theta", "global_rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
}
_LOCAL_BASE = ("rope_local_base_freq", "local_rope_theta")  # Gemma 3, ModernBERT
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""The types of layers that rotate, for a configuration that does not list its types."""

_FORMER_NAMES = {"mrope": "default", "su": "longrope"}


def _rope_type(parameters: Mapping) -> str:
    found = {}
    for key in ("rope_type", "type"):
        if parameters.get(key) is not None:
            stated = choice("rope_type", parameters[key], (*_KEYS, *_FORMER_NAMES))
            found[key] = _FORMER_NAMES.get(stated, stated)
    if len(set(found.values())) > 1:
        expected = f"{parameters['type']!r}, the value of the key 'type'"
        raise ValueError(f"rope_type: expected {expected}, got {parameters['rope_type']!r}")
    return next(iter(found.values()), "default")


def _check_keys(rope_type: str, parameters: dict) -> None:
    required, optional = _KEYS[rope_type]
    if not all(isinstance(key, str) for key in parameters):
        raise TypeError(f"rope_parameters: expected keys that are strings, got {list(parameters)}")
    for key in required:
        if key not in parameters:
            expected = f"the key {key} for rope_type {rope_type!r}"
            raise ValueError(f"rope_parameters: expected {expected}, got the keys {sorted(parameters)}")
    for key in parameters:
        if key not in (*required, *optional, *_COMMON_KEYS):
            known = sorted({*required, *optional, *_COMMON_KEYS})
            raise ValueError(f"rope_parameters: expected keys among {known} for rope_type {rope_type!r}, got {key}")


def _overrides(settings: dict, layer_type: str) -> dict:
    """The settings in which layers of this type differ from the model: Gemma 4's full attention has wider heads."""
    if layer_type == "full_attention" and settings.get("global_head_dim") is not None:
        return {"head_dim": integer("global_head_dim", settings["global_head_dim"], 2, MOST_FEATURES)}
    per_layer = settings.get("per_layer_config") or {}
    if not isinstance(per_layer, Mapping) or not all(isinstance(values, Mapping) for values in per_layer.values()):
        raise TypeError(f"per_layer_config: expected a dict of dicts, got {shown(per_layer)}")
    per_layer = {str(layer): dict(values) for layer, values in per_layer.items()}
    places = [str(i) for i, name in enumerate(_layer_types(settings)) if name == layer_type]
    return next((per_layer[place] for place in places if place in per_layer), {})


def _head_dim(settings: dict, name: str) -> int:
    keys = ("head_dim", *_ELSEWHERE["head_dim"])
    if name in model_types.STATED["head_dim"] and all(settings.get(key) is None for key in keys):
        _require(settings, "head_dim", f", whose default is its own in {name!r}")
    for key in (*keys, "qk_rope_head_dim"):
        if settings.get(key) is not None:
            return integer(key, settings[key], at_least=2, below=MOST_FEATURES)
    if settings.get("memory_attention_hidden_size") is not None:  # SAM 2
        keys = (
            "memory_attention_hidden_size",
            "memory_attention_downsample_rate",
            "memory_attention_num_attention_heads",
        )
        hidden, *parts = (integer(key, _require(settings, key), at_least=1, below=MOST_FEATURES) for key in keys)
        return hidden // math.prod(parts)
    key = next(
        (key for key in _ELSEWHERE["num_attention_heads"] if settings.get(key) is not None), "num_attention_heads"
    )
    heads = integer(key, _require(settings, key, " or for head_dim"), at_least=1)
    key = next((key for key in _ELSEWHERE["hidden_size"] if settings.get(key) is not None), "hidden_size")
    hidden = integer(key, _require(settings, key, " or for head_dim"), 2, MOST_FEATURES)
    if hidden % heads:
        raise ValueError(
            f"{key}: expected a multiple of num_attention_heads = {heads} where head_dim is missing, got {hidden}"
        )
    return hidden // heads


# Key -> other names of it: Zamba 2 and JetMoE; DBRX, GPT-J, Moonshine and models of images; DBRX, GPT-J, Qwen2-VL.
_ELSEWHERE = {
    "head_dim": ("attention_head_dim", "kv_channels"),
    "num_attention_heads": ("num_heads", "n_heads", "n_head", "decoder_num_attention_heads"),
    "hidden_size": ("d_model", "n_embd", "embed_dim"),
}


def _rotary_dim(rope_type: str, head_dim: int, parameters: dict, settings: dict, name: str) -> int:
    """The number of features that rotate.

    In ``proportional`` all features count: the fraction chooses the planes whose frequency is not 0.
    """
    if name in model_types.STATED["partial_rotary_factor"]:
        _require(parameters, "partial_rotary_factor", f", whose default is its own in {name!r}")
    fraction = number("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0), above=0, at_most=1)
    if rope_type == "proportional":
        return check_rotary_dim(head_dim, "head_dim")
    if settings.get("rotary_dim") is not None:
        rotary_dim = check_rotary_dim(settings["rotary_dim"])
        if rotary_dim > head_dim:
            raise ValueError(f"rotary_dim: expected at most the {head_dim} features of a head, got {rotary_dim}")
        if "partial_rotary_factor" in parameters and int(head_dim * fraction) != rotary_dim:
            stated = f"{int(head_dim * fraction)}, partial_rotary_factor {fraction} of head_dim {head_dim}"
            raise ValueError(f"rotary_dim: expected None or {stated}, got {rotary_dim}")
        return rotary_dim
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        name, given = ("head_dim", head_dim) if fraction == 1 else ("partial_rotary_factor", fraction)
        raise ValueError(
            f"{name}: expected a value by which a positive even number of the {head_dim} features of a head rotate, "
            f"got {given}, by which {rotary_dim} rotate"
        )
    return rotary_dim


def _max_seq_len(settings: dict) -> int | None:
    key = "max_position_embeddings"
    return None if settings.get(key) is None else _length_setting(settings, key)


def _length_setting(settings: dict, key: str) -> int:
    return integer(key, _require(settings, key), at_least=1, below=sys.maxsize)


def _axis_of_each_plane(parameters: dict, rotary_dim: int, name: str) -> tuple[int, ...] | None:
    planes = rotary_dim // 2
    interleaved = parameters.get("mrope_interleaved")
    interleaved = None if interleaved is None else flag("mrope_interleaved", interleaved)
    arrange, default = model_types.SECTIONS.get(name, (axes.interleaved_sections if interleaved else axes.sections, ()))
    if interleaved not in (None, arrange is not axes.sections):
        raise ValueError(
            f"mrope_interleaved: expected None or {not interleaved}, as {name!r} rotates, got {interleaved}"
        )
    widths = parameters.get("mrope_section", (planes // 2,) * 2 if default is None else default)
    if not isinstance(widths, tuple) or widths:
        widths = integers("mrope_section", widths, at_least=0)
    elif not widths:
        return None
    found = arrange(widths, "mrope_section")
    if len(found) != planes:
        raise ValueError(
            f"mrope_section: expected widths whose sum is the number of planes, {planes}, got {list(widths)}"
        )
    return found


def _model_type(settings: dict) -> str:
    """The model type without ``_text``, "" where it is missing; ValueError where no `Rope` describes the model."""
    name = settings.get("model_type")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"model_type: expected a string, got {shown(name)}")
    name = (name or "").removesuffix("_text")
    if name in model_types.REFUSED:
        raise ValueError(
            f"model_type: expected a model that a Rope describes, got {name!r}: {model_types.REFUSED[name]}"
        )
    for key, values in _ROTATES.items():
        if key in settings and settings[key] not in values:
            raise ValueError(f"{key}: expected one of {values}, with which the model rotates, got {settings[key]!r}")
    return name


def _layouts(settings: dict, name: str, given: str | None) -> tuple[Layout, Layout | None]:
    if given is not None:
        check_layout(given)
    stated = settings.get("rope_interleave")
    stated = None if stated is None else flag("rope_interleave", stated)
    if name in model_types.KNOWN_MODELS or not name and stated is not None:
        deinterleaves = name in model_types.DEINTERLEAVING_MODELS if stated is None else stated
        interleaved = deinterleaves or name in model_types.INTERLEAVED_MODELS
        known: Layout = "interleaved" if interleaved else "split_half"
        if given not in (None, known):
            raise ValueError(f"layout: expected None or {known!r}, the layout of {name!r}, got {given!r}")
        return known, "split_half" if deinterleaves else None
    latent = settings.get("qk_rope_head_dim") is not None
    keys = (*(key for names in _BESIDE.values() for key in names), *_LOCAL_BASE, "rotary_dim")
    rotates = latent or _stated(settings) or any(settings.get(key) is not None for key in keys)
    if given is None and name and not rotates:
        raise ValueError(
            f"config: expected rope_theta or rope_parameters, the keys of a rotation, got model_type {name!r} without "
            "them (BERT, GPT-2 and T5 do not rotate; for a model that does, pass layout and these keys)"
        )
    if given is None and (name or latent):
        expected = "'split_half' or 'interleaved', as the model's own code pairs features"
        got = f"None for model_type {name!r}" + " with latent attention" * latent
        raise ValueError(f"layout: expected {expected}, got {got}, which is not known")
    return cast(Layout, given or "split_half"), None


# Key -> the values with which a model rotates.
_ROTATES = {"alibi": (False, None), "position_embedding_type": ("rope", "rotary")}


def _axial(name: str, head_dim: int, base: float) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The frequencies of images and video, and the axis of each plane."""
    order, arrangement = model_types.AXIAL_MODELS[name]
    planes = head_dim // (2 * len(order))
    if planes == 0 or len(order) == 2 and head_dim % 4:
        raise ValueError(f"head_dim: expected a multiple of {2 * len(order)} for {name!r}, got {head_dim}")
    columns = axes.sections((planes,) * len(order))
    if arrangement == "dealt":
        theta = frequencies.inverse_frequencies(head_dim, base).view(planes, -1).T.flatten()
    else:
        theta = frequencies.axial((2 * planes,) * len(order), base)
    if arrangement == "turns":
        columns, theta = axes.interleaved_sections((planes,) * len(order)), theta.view(-1, planes).T.flatten()
    return theta, tuple(order[column] for column in columns)


# Each variant maps (parameters, rotary_dim, base, seq_len) to (frequencies, attention factor, lengths).


def _default(parameters, rotary_dim, base, seq_len):
    return frequencies.inverse_frequencies(rotary_dim, base), 1.0, ANY_LENGTH


def _linear(parameters, rotary_dim, base, seq_len):
    return frequencies.linear(rotary_dim, base, parameters["factor"]), 1.0, ANY_LENGTH


def _ntk(parameters, rotary_dim, base, seq_len):
    return frequencies.ntk_aware(rotary_dim, base, parameters["factor"]), 1.0, ANY_LENGTH


def _dynamic(parameters, rotary_dim, base, seq_len):
    longest = parameters.max_seq_len
    theta = frequencies.dynamic_ntk(rotary_dim, base, parameters["factor"], seq_len, longest)
    return theta, 1.0, range(longest + 1) if seq_len <= longest else range(seq_len, seq_len + 1)


def _yarn(parameters, rotary_dim, base, seq_len):
    options = {key: parameters.get(key) for key in ("beta_fast", "beta_slow", "truncate")}
    options = {key: value for key, value in options.items() if value is not None}
    number("rope_theta", base, above=1)
    theta = frequencies.yarn(rotary_dim, base, parameters.factor, parameters.trained_len, **options)
    mscales = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return theta, frequencies.yarn_attention_factor(parameters.factor, *mscales), ANY_LENGTH


def _longrope(parameters, rotary_dim, base, seq_len):
    trained, planes = parameters.trained_len, rotary_dim // 2
    for key in ("short_factor", "long_factor"):
        if len(numbers(key, parameters[key], above=0)) != planes:
            raise ValueError(f"{key}: expected a factor for each of {planes} planes, got {len(parameters[key])}")
    which, lengths = ("long", range(trained + 1, sys.maxsize)) if seq_len > trained else ("short", range(trained + 1))
    theta = frequencies.longrope(rotary_dim, base, parameters[f"{which}_factor"])
    attention_factor = parameters.get(f"{which}_mscale")  # Phi-3.5-MoE
    if attention_factor is not None:
        attention_factor = number(f"{which}_mscale", attention_factor, above=0)
    else:
        attention_factor = frequencies.longrope_attention_factor(parameters.factor, trained)
    return theta, attention_factor, lengths


def _llama3(parameters, rotary_dim, base, seq_len):
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (parameters[key] for key in keys)
    return frequencies.llama3(rotary_dim, base, factor, low, high, parameters.trained_len), 1.0, ANY_LENGTH


def _proportional(parameters, head_dim, base, seq_len):
    fraction, factor = parameters.get("partial_rotary_factor", 1.0), parameters.get("factor", 1.0)
    return frequencies.proportional(head_dim, base, fraction, factor), 1.0, ANY_LENGTH


_VARIANTS = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,  # vLLM
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}

# rope_type -> the keys that it requires, and the optional keys that it knows.
_TRAINED = "original_max_position_embeddings"
_KEYS = {
    "default": ((), ()),
    "axial": ((), ()),
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor",),
        (_TRAINED, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        (_TRAINED, "factor", "attention_factor", "short_mscale", "long_mscale"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_TRAINED,)),
    "proportional": ((), ("factor",)),
}
_COMMON_KEYS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
    # Ministral 3 has the scaling of another part of the attention here, and a copy of the model's length.
    "llama_4_scaling_beta", "max_position_embeddings",
)  # fmt: skip
_ALL_KEYS = {key for required, optional in _KEYS.values() for key in (*required, *optional)} | {*_COMMON_KEYS}

_SETTINGS = (
    "rope_parameters", "rope_scaling", *(name for names in _BESIDE.values() for name in names), *_LOCAL_BASE,
    "max_position_embeddings", _TRAINED, "head_dim", "qk_rope_head_dim", "global_head_dim", "hidden_size",
    "num_attention_heads", "rotary_dim", "per_layer_config", "layer_types", "model_type", "rope_interleave",
    "text_config", "memory_attention_hidden_size", "memory_attention_downsample_rate",
    "memory_attention_num_attention_heads", *(name for names in _ELSEWHERE.values() for name in names), *_ROTATES,
    *layers.SETTINGS,
)  # fmt: skip
"""The keys of a configuration that this file reads."""
