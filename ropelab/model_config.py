"""The rotation that a model's configuration describes.

Reads the configurations of Hugging Face transformers, ``config.json`` as a dict or the object, in the form of its
version 5 (``rope_parameters``, nested where layer types differ) and before (``rope_scaling`` and ``rope_theta``). It
does not import transformers. What a configuration does not say is asked for, and a key that is not known is refused:
a guessed base rotates everything wrong, and nobody sees it at small positions.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from ropelab import axes, frequencies
from ropelab.layout import check_rotary_dim
from ropelab.rope_parameters import ANY_LENGTH, Rope


def rope_from_config(config: Any, *, layer_type: str | None = None, seq_len: int | None = None) -> Rope:
    """The rotation of the model, or of its layers of one type, that a configuration of transformers describes.

    ``cos, sin = rope_from_config(config).tables(4096)``

    Args:
        config: a mapping (``config.json``), an object with ``to_dict()``, or one with the keys as attributes. Of a
            model with parts the part that is meant: ``config.text_config``.
        layer_type: ``"full_attention"`` or ``"sliding_attention"``, where layers differ (Gemma 3 and 4, ModernBERT).
            Which layers rotate at all (``no_rope_layers`` of Llama 4 and SmolLM3) is left to the model.
        seq_len: length of the sequences, cache included, for dynamic NTK and LongRoPE; by default a short one.

    Raises:
        ValueError: a key that is missing, not known for its ``rope_type``, or has an impossible value; the message
            names it.
    """
    settings = _as_dict(config)
    if "text_config" in settings and "hidden_size" not in settings:
        raise ValueError("config: expected that of one part of the model, such as config.text_config, got all parts")
    parameters = _parameters(settings, layer_type)
    kind = _kind(parameters)
    _check_keys(kind, parameters)
    parameters = {key: value for key, value in parameters.items() if value is not None}
    if layer_type is not None:
        settings = settings | _overrides(settings, layer_type)

    head_dim = _head_dim(settings)
    fraction = parameters.get("partial_rotary_factor", 1.0)
    rotary_dim = head_dim if kind == "proportional" else settings.get("rotary_dim") or int(head_dim * fraction)
    check_rotary_dim(rotary_dim)
    base = _require(parameters, "rope_theta", "the base of the frequencies; transformers' defaults differ by model")
    theta, attention_factor, lengths = _VARIANTS[kind](
        _Reader(parameters, settings), rotary_dim, base, 0 if seq_len is None else seq_len
    )
    layout, out_layout = _layouts(settings)
    return Rope(
        inverse_frequencies=theta,
        attention_factor=float(parameters.get("attention_factor", attention_factor)),
        head_dim=head_dim,
        layout=layout,
        out_layout=out_layout,
        axes=_axes(parameters, rotary_dim),
        max_seq_len=settings.get("max_position_embeddings"),
        lengths=lengths,
        remake=None if lengths == ANY_LENGTH else partial(rope_from_config, config, layer_type=layer_type),
    )


# Reading a configuration


class _Reader:
    """The parameters of the rotation, then the model's settings; what neither has is asked for by name."""

    def __init__(self, parameters: dict, settings: dict):
        self._parameters, self._settings = parameters, settings

    def get(self, key: str, default: Any = None) -> Any:
        return self._parameters.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return _require(self._parameters, key)

    @property
    def max_seq_len(self) -> int:
        return _require(self._settings, "max_position_embeddings")

    @property
    def trained_len(self) -> int:
        """Phi-3 has it beside the parameters, where it takes precedence (as in transformers)."""
        return self._settings.get("original_max_position_embeddings") or self["original_max_position_embeddings"]

    @property
    def factor(self) -> float:
        """Where it is left open (DeepSeek, Phi-3): by how much the model's length exceeds the trained one."""
        return self._parameters.get("factor") or self.max_seq_len / self.trained_len


def _require(settings: dict, key: str, meaning: str = "a value") -> Any:
    if settings.get(key) is None:
        raise ValueError(f"config: expected {key}, {meaning}, got none")
    return settings[key]


def _as_dict(config: Any) -> dict:
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    return {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}


def _parameters(settings: dict, layer_type: str | None) -> dict:
    """``rope_parameters`` as of version 5, flat, for one type of layers."""
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters: expected a dict, got {parameters!r}")
    nested = bool(parameters) and all(value is None or isinstance(value, Mapping) for value in parameters.values())
    local_base = next((settings[key] for key in _LOCAL_BASE if settings.get(key) is not None), None)
    types = tuple(parameters) if nested else ("full_attention", "sliding_attention") if local_base else ()
    if types and layer_type not in types:
        raise ValueError(f"layer_type: expected one of {types}, for layers differ, got {layer_type!r}")
    if nested:
        if parameters[layer_type] is None:
            raise ValueError(f"layer_type: expected layers that rotate, got {layer_type!r}, whose parameters are None")
        parameters = parameters[layer_type]
    elif local_base and layer_type == "sliding_attention":  # Gemma 3 before version 5: no scaling there
        parameters = {"rope_theta": local_base}
    parameters = dict(parameters)
    for key, elsewhere in _BESIDE.items():
        value = next((settings[name] for name in elsewhere if settings.get(name) is not None), None)
        if value is not None and parameters.get(key) is None:
            parameters[key] = value
    return parameters


# Names of what version 5 has in rope_parameters and others beside them: ModernBERT, GPT-NeoX, StableLM.
_BESIDE = {
    "rope_theta": ("rope_theta", "global_rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
}
_LOCAL_BASE = ("rope_local_base_freq", "local_rope_theta")  # Gemma 3, ModernBERT


def _kind(parameters: dict) -> str:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)  # former names
    if kind not in _VARIANTS:
        raise ValueError(f"rope_type: expected one of {tuple(_VARIANTS)}, got {kind!r}")
    return kind


def _check_keys(kind: str, parameters: dict) -> None:
    required, optional = _KEYS[kind]
    for key in required:
        if key not in parameters:
            raise ValueError(f"rope_parameters: expected {key} for rope_type {kind!r}, got only {sorted(parameters)}")
    for key in parameters:
        if key not in (*required, *optional, *_COMMON_KEYS):
            known = sorted({*required, *optional, *_COMMON_KEYS})
            raise ValueError(f"rope_parameters: expected for rope_type {kind!r} only {known}, got {key}")


def _overrides(settings: dict, layer_type: str) -> dict:
    """What layers of this type have differently: Gemma 4's full attention has wider heads."""
    if layer_type == "full_attention" and settings.get("global_head_dim"):
        return {"head_dim": settings["global_head_dim"]}
    per_layer = {int(layer): values for layer, values in (settings.get("per_layer_config") or {}).items()}
    types = settings.get("layer_types") or []
    return next((per_layer[i] for i, name in enumerate(types) if name == layer_type and i in per_layer), {})


def _head_dim(settings: dict) -> int:
    for key in ("head_dim", "qk_rope_head_dim"):
        if settings.get(key):
            return settings[key]
    heads = _require(settings, "num_attention_heads", "or head_dim")
    return _require(settings, "hidden_size", "or head_dim") // heads


def _axes(parameters: dict, rotary_dim: int) -> tuple[int, ...] | None:
    sections = parameters.get("mrope_section")
    if sections is None:
        return None
    assign = axes.interleaved_sections if parameters.get("mrope_interleaved") else axes.sections
    found = assign(sections)
    if len(found) != rotary_dim // 2:
        raise ValueError(f"mrope_section: expected a sum of {rotary_dim // 2}, one for each plane, got {sections}")
    return found


def _layouts(settings: dict) -> tuple[str, str | None]:
    model_type = str(settings.get("model_type", "")).removesuffix("_text")
    if settings.get("rope_interleave", model_type in DEINTERLEAVING_MODELS):
        return "interleaved", "split_half"
    return ("interleaved" if model_type in INTERLEAVED_MODELS else "split_half"), None


INTERLEAVED_MODELS = frozenset(
    "blt codegen cohere cohere2 cohere2_moe deepseek_v2 deepseek_v4 ernie4_5 ernie4_5_moe ernie4_5_vl_moe glm glm4 "
    "glm4v glm_ocr gptj helium llama4 moonshine moonshine_streaming openai_privacy_filter".split()
)
"""``model_type`` (less ``_text``) of transformers' models that pair adjacent features."""

DEINTERLEAVING_MODELS = frozenset(
    "axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite glm_moe_dsa longcat_flash mistral4 "
    "mistral_large4 youtu".split()
)
"""Those that read adjacent pairs and write halves, unless ``rope_interleave`` says no."""


# Variants: (parameters, rotary_dim, base, seq_len) -> frequencies, attention factor, lengths


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
    theta = frequencies.yarn(rotary_dim, base, parameters.factor, parameters.trained_len, **options)
    mscales = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return theta, frequencies.yarn_attention_factor(parameters.factor, *mscales), ANY_LENGTH


def _longrope(parameters, rotary_dim, base, seq_len):
    trained = parameters.trained_len
    which, lengths = ("long", range(trained + 1, sys.maxsize)) if seq_len > trained else ("short", range(trained + 1))
    theta = frequencies.longrope(rotary_dim, base, parameters[f"{which}_factor"])
    attention_factor = parameters.get(f"{which}_mscale")  # Phi-3.5-MoE
    if attention_factor is None:
        attention_factor = frequencies.longrope_attention_factor(parameters.factor, trained)
    return theta, attention_factor, lengths


def _llama3(parameters, rotary_dim, base, seq_len):
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return frequencies.llama3(rotary_dim, base, *(parameters[key] for key in keys)), 1.0, ANY_LENGTH


def _proportional(parameters, head_dim, base, seq_len):
    fraction, factor = parameters.get("partial_rotary_factor", 1.0), parameters.get("factor", 1.0)
    return frequencies.proportional(head_dim, base, fraction, factor), 1.0, ANY_LENGTH


_VARIANTS = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,  # vLLM's
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}

# rope_type -> keys that it requires, and those that it knows beside them.
_TRAINED = "original_max_position_embeddings"
_KEYS = {
    "default": ((), ()),
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
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _TRAINED), ()),
    "proportional": ((), ("factor",)),
}
_COMMON_KEYS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
    # Of other parts of the attention, and a copy: Ministral 3.
    "llama_4_scaling_beta", "max_position_embeddings",
)  # fmt: skip
