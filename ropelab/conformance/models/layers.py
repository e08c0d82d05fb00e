"""Say in which layer, and at which token, two runs of a model begin to differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model: the longest list of modules whose length is a number of layers of its configuration."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(config, "num_hidden_layers", None)
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    return next((list(part) for part in lists if len(part) == count), [])


class Recorder:
    """The layer that runs now, and the results of the layers in each call of the model.

    Attributes:
        layer: the number of the layer that runs; None outside of all layers.
        runs: for each call of the model the results of its layers, ``[B, S, D]`` each.
    """

    def __init__(self) -> None:
        self.layer: int | None = None
        self.runs: list[list[torch.Tensor]] = []


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[Recorder]:
    """Record the layers of a model while the context lasts."""
    recorder, handles = Recorder(), []
    for number, layer in enumerate(layers_of(model)):

        def before(module, arguments, number=number) -> None:
            recorder.layer = number
            if number == 0:
                recorder.runs.append([])

        def after(module, arguments, returned) -> None:
            recorder.layer = None
            y = returned[0] if isinstance(returned, tuple) else returned
            if isinstance(y, torch.Tensor):
                recorder.runs[-1].append(y.detach().double())

        handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def first_difference(runs: list[list[torch.Tensor]], allowed: float) -> str:
    """Where the first run and all further runs together begin to differ, in words; empty if that cannot be told.

    Args:
        runs: the results of the layers; those of the further runs follow each other along the tokens or the batch.
        allowed: the largest difference that rounding explains, as a share of the largest element of a layer.
    """
    if len(runs) < 2:
        return ""
    for number, whole in enumerate(runs[0]):
        parts = [run[number] for run in runs[1:] if number < len(run)]
        for axis in (1, 0):
            try:
                joined = torch.cat(parts, axis)
            except RuntimeError:
                continue
            if joined.shape != whole.shape:
                continue
            apart = (joined - whole).abs().amax(-1) > allowed * whole.abs().max()
            if apart.any():
                tokens = apart.any(0).nonzero().flatten().tolist()
                return f"layer {number} is the first that differs, from token {tokens[0]} on"
    return ""
