"""Bring the description of a rotation into the form that `rope_from_config` reads.

A description is a configuration of transformers, the arguments of vLLM's or SGLang's ``get_rope``, or the parameters of
llama.cpp, with the names that its command line or a GGUF file has for them.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropelab.angles.model_config import stated
from ropelab.arguments import shown

SUFFIXES = (".json", ".npy", ".npz", ".pt", ".pth", ".bin")
"""The ends of names of files that have a configuration, a description or tensors."""
LLAMA_CPP = ("freq_base", "rope_freq_base", "rope.freq_base")
"""Keys of which a description in llama.cpp's form has one."""
_NAMES = {
    "rope_theta": LLAMA_CPP,
    "head_dim": ("n_rot", "rope.dimension_count", "head_dim"),
    "factor": ("rope.scaling.factor", "rope_scale"),
    "1 / factor": ("freq_scale", "rope_freq_scale"),
    "max_position_embeddings": ("context_length", "n_ctx_train", "n_ctx"),
    "original_max_position_embeddings": ("rope.scaling.original_context_length", "yarn_orig_ctx", "n_ctx_orig"),
    "rope_type": ("rope.scaling.type", "rope_scaling"),
    "beta_fast": ("yarn_beta_fast", "rope.scaling.yarn_beta_fast"),
    "beta_slow": ("yarn_beta_slow", "rope.scaling.yarn_beta_slow"),
}
"""Keys of a configuration of transformers -> the names that llama.cpp has for them."""
_SERVER = {"rope_theta": "base", "max_position_embeddings": "max_position", "head_dim": "head_size",
           "attention_factor": "attn_factor", "truncate": "apply_truncate"}  # fmt: skip
"""Keys of a configuration of transformers -> the names that ``get_rope`` has for them."""
_SERVER_TYPES = {"deepseek_yarn": "yarn", "mllama4": "llama3"}
"""Names of vLLM and SGLang for a ``rope_type`` of transformers."""


def read(config: Any) -> Any:
    """The configuration that a name stands for; anything but a string is returned as it is.

    Args:
        config: a file of JSON or the folder of a ``config.json``; ``"package.module:name"`` of a configuration or of a
            function without arguments that returns one; or the name of an architecture of transformers.

    Raises:
        ValueError: the name stands for none of these, or the file has no configuration.
    """
    if not isinstance(config, (str, Path)):
        return config
    if is_file(config) or Path(config).is_dir():
        return read_json("config", Path(config, "config.json") if Path(config).is_dir() else Path(config))
    module, _, name = str(config).partition(":")
    if name:
        found = getattr(importlib.import_module(module), name)
        return found() if callable(found) else found
    expected = "a file, a folder with config.json, package.module:name or an architecture of transformers"
    try:
        from transformers.models.auto import CONFIG_MAPPING
    except ImportError as error:
        raise ValueError(f"config: expected {expected}, got {config!r} ({error})") from None
    if str(config) not in CONFIG_MAPPING:
        raise ValueError(f"config: expected {expected}, got {config!r}")
    return CONFIG_MAPPING[str(config)]()


def is_file(name: str | Path) -> bool:
    """Whether a name is that of a file, by its form where there is no such file."""
    path = Path(name)
    return path.is_file() or path.suffix in SUFFIXES or os.sep in str(name)


def read_json(name: str, path: Path) -> dict[str, Any]:
    """The object in a file of JSON.

    Args:
        name: the argument that names the file, for the message.
        path: the file.

    Raises:
        ValueError: the file cannot be read, is no JSON, or has something else than an object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno} column {error.colno}: {error.msg}"
    except (OSError, RecursionError, ValueError) as error:
        if not path.exists():
            raise ValueError(f"{name}: no such file: {str(path)!r}") from None
        reason = str(error)
    else:
        if isinstance(found, dict):
            return found
        reason = f"it has {shown(found)}"
    raise ValueError(f"{name}: expected an object in JSON, got {path} ({reason})") from None


def spelled(config: Any) -> dict[str, str]:
    """The keys of `described` whose names in the description are others -> these names, ``1 / name`` for an inverse."""
    if not isinstance(config, Mapping):
        return {}
    own = dict(zip(_plain(config), map(str, config), strict=True))
    theirs = {"rope_parameters": "rope_scaling"} if "rope_parameters" not in own and "rope_scaling" in own else {}
    if "head_size" in own:
        inside = config.get(own.get("rope_parameters", "rope_scaling")) or {}
        theirs |= {ours: own[name] for ours, name in _SERVER.items() if name in own}
        return theirs | {ours: name for ours, name in _SERVER.items() if name in inside}
    if not any(key in own for key in LLAMA_CPP):
        return theirs
    found = {ours: own[name] for ours, theirs in _NAMES.items() if (name := next((n for n in theirs if n in own), ""))}
    inverse = found.pop("1 / factor", None)
    return {"factor": f"1 / {inverse}"} | found if inverse else found


def written(config: Any) -> set[str] | None:
    """The keys of a description, and of what stands in it; None for an object, which has them all."""
    if not isinstance(config, Mapping):
        return None
    return {str(key) for key in config}.union(*(written(value) or () for value in config.values()))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys without dashes, and without the name of an architecture before them."""
    keys = {str(key).removeprefix("--").replace("-", "_"): value for key, value in config.items()}
    return {key.removeprefix(f"{keys.get('general.architecture')}."): value for key, value in keys.items()}


def described(config: Any) -> tuple[Any, str | None]:
    """The configuration in transformers' form, and the layout if the description states one.

    Raises:
        ValueError: a key is missing.
    """
    if not isinstance(config, Mapping):
        text = getattr(config, "text_config", None)
        return (config if text is None or getattr(config, "hidden_size", None) else text), None
    keys = _plain(config)
    if "head_size" in keys:
        return _server(keys)
    if any(key in keys for key in LLAMA_CPP):
        return _llama_cpp(keys)
    if "text_config" in keys and "hidden_size" not in keys:
        return keys["text_config"], None
    return config, None


def layer_types(config: Any) -> list[str | None]:
    """The types of layers that have parameters of their own; ``[None]`` if all layers are alike.

    Raises:
        TypeError, ValueError: `rope_from_config` refuses the configuration.
    """
    try:
        stated(config)
    except ValueError as refusal:
        if not str(refusal).startswith("layer_type: expected one of"):
            raise
        get = config.get if isinstance(config, Mapping) else lambda key: getattr(config, key, None)
        nested = get("rope_parameters") or get("rope_scaling") or {}
        found = [kind for kind, value in nested.items() if isinstance(value, Mapping)]
        return found or ["full_attention", "sliding_attention"]
    return [None]


def _server(keys: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The arguments of ``get_rope``, of vLLM or SGLang."""
    parameters = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters["rope_type"] = _SERVER_TYPES.get(kind, kind)
    if "base" in keys:
        parameters.setdefault("rope_theta", keys["base"])
    for ours in ("attention_factor", "truncate"):
        if (theirs := _SERVER[ours]) in parameters:
            value = parameters.pop(theirs)
            if ours == "truncate" or value != 1:
                parameters.setdefault(ours, value)
    for ignored in ("extrapolation_factor", "is_neox_style", "dtype", "use_fope"):
        parameters.pop(ignored, None)
    head_size = keys["head_size"]
    config = {"head_dim": head_size, "max_position_embeddings": _first(keys, "max_position", "max_position_embeddings")}
    if keys.get("rotary_dim") not in (None, head_size):
        config["rotary_dim"] = keys["rotary_dim"]
    return config | {"rope_parameters": parameters}, "split_half" if keys.get("is_neox_style", True) else "interleaved"


def _llama_cpp(keys: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """llama.cpp's ``freq_base``, ``freq_scale``, ``n_rot``, YaRN's numbers, and ``rope_freqs`` of a GGUF file.

    ``rope_freqs`` divides the frequency of each pair, and ``freq_scale`` multiplies all of them.
    """
    dim = _first(keys, *_NAMES["head_dim"])
    if dim is None:
        raise ValueError(f"config: expected n_rot or rope.dimension_count, got the keys {shown(sorted(keys))}")
    factor, scale = _first(keys, *_NAMES["factor"]), _first(keys, *_NAMES["1 / factor"])
    factor = factor if factor else 1 / (scale or 1.0)
    length = _first(keys, *_NAMES["max_position_embeddings"])
    trained = _first(keys, *_NAMES["original_max_position_embeddings"]) or length
    parameters: dict[str, Any] = {"rope_theta": _first(keys, *LLAMA_CPP)}
    kind = _first(keys, *_NAMES["rope_type"]) or ("linear" if factor != 1 else "none")
    freqs = _first(keys, "rope_freqs", "rope_freqs.weight", "freq_factors")
    if kind == "yarn":
        parameters |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        for ours in ("beta_fast", "beta_slow", "attention_factor"):
            if (value := _first(keys, *_NAMES.get(ours, (ours,)))) is not None:
                parameters[ours] = value
    elif freqs is not None:
        factors = [float(value) * factor for value in freqs]
        length = length or trained or 2  # both lists of factors are equal, so no length decides
        parameters |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors,
                       "attention_factor": 1.0, "original_max_position_embeddings": trained or length}  # fmt: skip
    elif factor != 1:
        parameters |= {"rope_type": "linear", "factor": factor}
    style = keys.get("rope_type", keys.get("rope_style"))
    layout = {"norm": "interleaved", 0: "interleaved", "neox": "split_half", 2: "split_half"}.get(style)
    return {"head_dim": dim, "max_position_embeddings": length, "rope_parameters": parameters}, layout


def _first(keys: Mapping[str, Any], *names: str) -> Any:
    return next((keys[name] for name in names if keys.get(name) is not None), None)
