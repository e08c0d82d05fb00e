"""The entry points by which vLLM and SGLang find ropelab. Each does nothing until the operator names it.

A server that is told of no plugins calls the entry points of all packages that are installed. Who installs ropelab for
something else would get another server, so only a variable that names ropelab switches a plugin on::

    VLLM_PLUGINS=ropelab vllm serve MODEL
    SGLANG_PLUGINS=ropelab python -m sglang.launch_server --model-path MODEL

This module lies outside of the package, so that a server without the plugin does not import ropelab.
"""

import os

VARIABLES = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}
"""The variable of each server that names its plugins, with commas between."""


def why_off(server: str) -> str:
    """Why a server keeps its own kernels; empty if the operator has switched the plugin on."""
    if os.environ.get("ROPELAB_DISABLE", "0") not in ("", "0"):
        return "ROPELAB_DISABLE is set"
    named = (name.strip() for name in os.environ.get(VARIABLES[server], "").split(","))
    return "" if "ropelab" in named else f"{VARIABLES[server]}=ropelab switches it on"


def vllm() -> None:
    """Serve the models that vLLM loads from now on with the one pass, if the operator has switched it on."""
    if not why_off("vllm"):
        from ropelab.interop.vllm_plugin import register

        register()


def sglang() -> None:
    """Make SGLang rotate with the kernel, if the operator has switched it on."""
    if not why_off("sglang"):
        from ropelab.interop.sglang_plugin import register

        register()
