"""A plugin of vLLM: QK norm, rotation and the write into the cache in one kernel a layer.

The wheel has the entry point ``ropelab`` in the group ``vllm.general_plugins`` (`ropelab_plugins`). By it each process
of vLLM calls `register`, if the environment variable ``VLLM_PLUGINS`` names ``ropelab``::

    VLLM_PLUGINS=ropelab vllm serve MODEL

When vLLM has loaded a model, the plugin runs the forward of each attention layer once with stand-ins for its modules.
A layer that computes norm, rotation and attention, and nothing else between them, calls `ropelab.rope_and_cache` from
then on, and a layer of multi-head latent attention `ropelab.mla_rope_and_cache`. All other layers stay as they are. The
log names them and the reasons, each reason once. With ``ROPELAB_DISABLE=1`` all layers stay.

A call that fails makes its layer call vLLM's own norm, rotation and cache write from then on, and the log says so.
"""

import functools
import os
from collections import Counter
from typing import Any

import torch

from ropelab.interop.log import say
from ropelab.interop.probe import Refused


def register() -> None:
    """Make vLLM serve the models that it loads from now on with the one pass; a second call does nothing."""
    if os.environ.get("ROPELAB_DISABLE", "0") not in ("", "0"):
        say("info", "switched off by ROPELAB_DISABLE")
        return
    try:
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        from ropelab.interop import vllm_writes

        vllm_writes.define()
        load = BaseModelLoader.load_model
        if not hasattr(load, "of_ropelab"):
            BaseModelLoader.load_model = _serving(load)
    except Exception as error:  # a server starts without the plugin
        say("warning", f"switched off, because this vLLM has another interface: {type(error).__name__}: {error}")


def _serving(load):
    """The method of vLLM that loads a model, with `serve` after it."""

    @functools.wraps(load)
    def load_model(self, vllm_config, *given, **named):
        model = load(self, vllm_config, *given, **named)
        try:
            serve(model, vllm_config)
        except Exception as error:  # a server goes on without the plugin
            say("warning", f"not all layers were looked at: {type(error).__name__}: {error}", exc_info=True)
        return model

    load_model.of_ropelab = True  # type: ignore[attr-defined]
    return load_model


def serve(model: torch.nn.Module, vllm_config: Any) -> Counter[str]:
    """Make the layers of a model call the one pass where they can, and log what became of them.

    Args:
        model: a model of vLLM with its weights.
        vllm_config: the ``VllmConfig`` of the engine. Its compilation learns of the operators.

    Returns:
        The number of layers for each outcome: "served", or the reason why a layer keeps its own calls.
    """
    from ropelab.interop.vllm_layers import is_attention, is_latent_attention, serve_attention, serve_latent_attention

    outcomes: Counter[str] = Counter()
    for name, layer in list(model.named_modules()):
        children = list(layer.children())
        if any(map(is_attention, children)):
            serve_layer = serve_attention
        elif any(map(is_latent_attention, children)):
            serve_layer = serve_latent_attention
        else:
            continue
        try:
            gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            with torch.random.fork_rng(devices=gpus):  # a server's random numbers stay as they are
                serve_layer(layer, name, vllm_config)
        except Exception as error:  # a layer that the plugin does not understand stays as it is
            reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            outcomes[reason] += 1
            if outcomes[reason] == 1:
                say("info", f"{name} ({type(layer).__name__}) keeps vLLM's own calls: {reason}")
        else:
            outcomes["served"] += 1
    if outcomes["served"]:
        _tell_the_compiler(vllm_config)
    say(
        "info",
        f"{outcomes['served']} of {outcomes.total()} layers will call one kernel for norm, rotation and cache write",
    )
    return outcomes


def _tell_the_compiler(vllm_config: Any) -> None:
    """Have vLLM run the operators where it runs its own cache write, and compile anew with and without the plugin."""
    from ropelab import __version__
    from ropelab.interop.vllm_writes import ATTENTION, LATENT

    config = vllm_config.compilation_config
    splits = config.splitting_ops
    if splits and "vllm::unified_kv_cache_update" in splits:
        config.splitting_ops = [*splits, *(name for name in (ATTENTION, LATENT) if name not in splits)]
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config["ropelab"] = __version__  # part of the key of vLLM's cache of compiled models
