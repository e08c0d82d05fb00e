"""Build a tiny random model of each architecture of Transformers that rotates queries and keys."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ropelab.conformance.models.configs import HIDDEN, VOCABULARY, tiny

ROTATES = re.compile(r"(?:apply|vision_apply)_(?:\w+_)?rotary_|rotate_queries_or_keys")
"""The names of functions that rotate. Methods that rotate are found by their text, `_METHODS`."""
_METHODS = re.compile(r"def _?apply_rotary_\w+\(|def rotate_queries_or_keys")
_ORDER = ("ForCausalLM", "TextModel", "LanguageModel", "Model", "ForMaskedLM", "Encoder", "Decoder", "")
"""The ends of the names of classes, in the order in which the factory tries the classes."""
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
"""The rotation of models for images that expect three axes without saying so in their default configuration."""
_CHOICES: tuple[dict[str, Any], ...] = ({}, {"rope_parameters": _AXES})
LARGEST = 8_000_000
"""The largest number of weights of a model that the factory makes."""


@dataclass(frozen=True)
class TinyModel:
    """A model with random weights, and inputs for it.

    Attributes:
        architecture: the name of the folder in ``transformers.models``.
        model: the model, in evaluation mode.
        inputs: the keyword arguments of a call.
    """

    architecture: str
    model: torch.nn.Module
    inputs: dict[str, Any]

    def double(self) -> TinyModel:
        """This model in float64, in place."""
        self.model.double()
        return replace(self, inputs={n: _to(torch.float64, x) for n, x in self.inputs.items()})

    def single(self) -> TinyModel:
        """This model in float32, in place. Weights that came from float32 have the same values in both dtypes."""
        self.model.float()
        return replace(self, inputs={n: _to(torch.float32, x) for n, x in self.inputs.items()})

    @property
    def takes_tokens(self) -> bool:
        """Whether the model takes token ids."""
        return "input_ids" in self.inputs

    def output(self, **changed: Any) -> torch.Tensor:
        """The first floating tensor that the model returns, for its inputs with some changed."""
        return first_tensor(self.model(**(self.inputs | changed)))


class NotBuilt(Exception):
    """An error that says why the factory has no model of an architecture."""


def architectures() -> list[str]:
    """The names of all architectures with a function or a method that rotates."""
    import transformers.models

    names = sorted(module.name for module in pkgutil.iter_modules(transformers.models.__path__) if module.ispkg)
    return [name for name in names if any(True for _ in modeling_files(name))]


def modeling_files(architecture: str) -> Iterator[str]:
    """The names of the modules of an architecture that define a rotation."""
    package = importlib.import_module(f"transformers.models.{architecture}")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("modeling_"):
            spec = importlib.util.find_spec(f"{package.__name__}.{module.name}")
            text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
            if re.search(r"^def " + ROTATES.pattern, text, re.M) or _METHODS.search(text):
                yield f"{package.__name__}.{module.name}"


def build(architecture: str, accepted: Callable[[TinyModel], bool] = lambda model: True) -> TinyModel:
    """A tiny model of an architecture.

    Args:
        architecture: a name of `architectures`.
        accepted: says whether a model will do; otherwise the factory tries the next class.

    Raises:
        NotBuilt: no class could be built and called. The message gives the error of the first class.
    """
    first: str | None = None
    for kind, chosen in itertools.product(_classes(architecture), _CHOICES):
        try:
            made = made_of(architecture, kind, **chosen)
            with torch.no_grad():
                made.output()
            if accepted(made):
                return made
            reason = "it does not rotate"
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {words[-1][:160]}"
        first = first or f"{kind.__name__}: {reason}"
    raise NotBuilt(first or "it defines no model")


def made_of(architecture: str, kind: Any, *, seed: int = 0, **chosen: Any) -> TinyModel:
    """A tiny model of a class, without a trial call; ``chosen`` are fields of its configuration."""
    config = tiny(kind.config_class, **chosen)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > LARGEST:
        raise NotBuilt(f"{size:,} weights remain")
    torch.manual_seed(seed)
    model = kind(config).eval()
    randomize(model, seed)
    return TinyModel(architecture, model, _inputs(kind, config))


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give all weights values that let each layer matter: products of size one, factors near one, small biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # for example a table of sines
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.ndim > 1:
            noise *= parameter[0].numel() ** -0.5 if "embed" not in name else 1.0
        else:
            noise = noise * 0.1 + parameter.detach().float()
        parameter.data.copy_(noise)


def first_tensor(returned: Any) -> torch.Tensor:
    """The first floating tensor among the results of a model."""
    values = returned.values() if hasattr(returned, "values") else returned
    values = [values] if isinstance(values, torch.Tensor) else list(values)
    return next(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


def _to(dtype: torch.dtype, x: Any) -> Any:
    """An argument of a call in another dtype, if it is a floating tensor or a tuple of such."""
    if isinstance(x, tuple):
        return tuple(_to(dtype, part) for part in x)
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _classes(architecture: str) -> list[Any]:
    """The classes of models of an architecture, in the order of `_ORDER`."""
    from transformers import PreTrainedModel

    found: list[Any] = []
    for name in modeling_files(architecture):
        module: ModuleType = importlib.import_module(name)
        for kind in vars(module).values():
            own = inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.__module__ == name
            if own and kind.config_class is not None and not kind.__name__.endswith("PreTrainedModel"):
                found.append(kind)
    rank = {kind: next(i for i, end in enumerate(_ORDER) if kind.__name__.endswith(end)) for kind in found}
    takes = {kind: "input_ids" in inspect.signature(kind.forward).parameters for kind in found}
    return sorted(found, key=lambda kind: (not takes[kind], rank[kind]))


def _inputs(kind: Any, config: Any) -> dict[str, Any]:
    """Random inputs for the parameters of a model's forward that need a value."""
    generator = torch.Generator().manual_seed(1)
    parameters = inspect.signature(kind.forward).parameters
    vision = getattr(config, "vision_config", config)
    channels = next((n for f in ("num_channels", "in_channels", "in_chans") if (n := getattr(vision, f, None))), 3)
    if "input_ids" in parameters:
        inputs = {"input_ids": torch.randint(3, VOCABULARY - 4, (2, 9), generator=generator)}
        if "decoder_input_ids" in parameters:
            inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY - 4, (2, 7), generator=generator)
        return inputs
    if "grid_thw" in parameters:
        patch = getattr(vision, "patch_size", 4)
        size = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
        first = next(name for name in parameters if name in ("hidden_states", "pixel_values"))
        return {first: torch.randn(16, size, generator=generator), "grid_thw": torch.tensor([[1, 4, 4]])}
    if "input_features" in parameters:
        sizes = (getattr(config, name, None) for name in ("feature_projection_input_dim", "num_mel_bins"))
        return {"input_features": torch.randn(1, 32, next(filter(None, sizes), HIDDEN), generator=generator)}
    if "pixel_values" in parameters:
        size = getattr(vision, "image_size", 16)
        size = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.randn(1, channels, size, size, generator=generator)}
    if "inputs_embeds" in parameters:
        return {"inputs_embeds": torch.randn(2, 9, HIDDEN, generator=generator)}
    if "hidden_states" in parameters:
        return {"hidden_states": torch.randn(2, 9, HIDDEN, generator=generator)}
    raise NotBuilt(f"its forward takes {', '.join(list(parameters)[1:4])}")
