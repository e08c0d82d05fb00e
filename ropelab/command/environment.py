"""What a report of a fault needs to know about a machine: ``ropelab env``."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import ropelab
from ropelab.kernels.backends import HAS_TRITON, INTERPRETED
from ropelab_plugins import why_off

READ = ("TRITON_INTERPRET", "ROPELAB_LOG", "ROPELAB_DISABLE", "VLLM_PLUGINS", "SGLANG_PLUGINS", "CUDA_VISIBLE_DEVICES")
"""The variables that decide what runs."""


def report() -> str:
    """The environment as lines of text."""
    packages = ("torch", "triton", "transformers", "diffusers", "vllm", "sglang", "quack-kernels")
    found = {
        "ropelab": f"{ropelab.__version__} in {Path(ropelab.__file__).parent}",
        "Python": f"{platform.python_version()}, {platform.platform()}",
        **{name: _version(name) for name in packages},
        "CUDA of torch": torch.version.cuda or torch.version.hip or "none",
        "GPU": _gpus(),
        "backend": _backend(),
        "plugin of vLLM": _plugin("vllm"),
        "plugin of SGLang": _plugin("sglang"),
        "variables": ", ".join(f"{name}={os.environ[name]}" for name in READ if name in os.environ) or "none",
    }
    return "\n".join(f"{name + ':':18}{value}" for name, value in found.items())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return ", ".join(f"{gpu.name} ({gpu.major}.{gpu.minor}, {gpu.total_memory >> 30} GiB)" for gpu in gpus)
    try:
        torch.cuda.init()
    except Exception as error:  # of several kinds: no driver, no device, a torch without CUDA
        return f"none that torch can use ({str(error).partition('. ')[0]})"
    return "none that torch can use"


def _backend() -> str:
    if not HAS_TRITON:
        return "torch operations, because Triton is not installed"
    if INTERPRETED:
        return "Triton's interpreter on every device, because TRITON_INTERPRET is set"
    return "Triton kernels for tensors on a GPU, torch operations for others"


def _plugin(server: str) -> str:
    off = why_off(server)
    return f"off ({off})" if off else "on"
