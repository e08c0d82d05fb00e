"""This file loads Megatron-LM's Triton kernels for multi-head latent attention (MLA), without Megatron-LM itself."""

import hashlib
import sys
from functools import cache
from types import ModuleType
from unittest import mock

from ropelab.bench import packages

PACKAGE = "megatron-core"
FILE = "megatron/core/fusions/fused_mla_yarn_rope_apply.py"


@cache
def kernels(version: str | None = None) -> ModuleType:
    """The module with Megatron-LM's two functions for MLA, by default of the newest version that is installed.

    Both functions are differentiable. They take sbhd, or thd with ``cu_seqlens`` int32 ``[n + 1]``. They read adjacent
    pairs and write halves. ``cos`` and ``sin`` are ``[S, 1, 1, R]``, contiguous, with the cosines of halves: a column
    for each feature. (Facts from the docstrings of megatron-core 0.16.1.)

    - ``fused_apply_mla_rope_for_q(q, cos, sin, nope_dim, R, cu_seqlens)`` overwrites the last R features of q ``[S, B,
      H, nope_dim + R]`` and returns q. Its backward overwrites the gradient.
    - ``fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, R, nope_dim, v_dim, cu_seqlens)`` takes kv ``[S, B, H,
      nope_dim + v_dim]`` and k_pe ``[S, B, 1, R]``. It returns the key ``[S, B, H, nope_dim + R]`` with the rotated
      k_pe in every head, and the value ``[S, B, H, v_dim]``.

    Raises:
        NotInstalled: the version, or a package that the file imports, is not installed.
    """
    version, _ = packages.locate(PACKAGE, version)
    # The file takes one name from Megatron-LM, a decorator that it uses if there is no Triton.
    utils = ModuleType("megatron.core.utils")
    utils.null_decorator = None
    modules = {"megatron": ModuleType("megatron"), "megatron.core": ModuleType("megatron.core"), utils.__name__: utils}
    try:
        with mock.patch.dict(sys.modules, modules):
            module = packages.load_file(PACKAGE, version, FILE)
    except ModuleNotFoundError as error:
        raise packages.NotInstalled(f"{PACKAGE} {version} needs {error.name}") from error
    sys.modules[module.__name__] = module  # Triton and the compiler of torch find a module by its name
    return module


def sha256(version: str) -> str:
    """The hash of the file with the kernels, in hexadecimal."""
    _, directory = packages.locate(PACKAGE, version)
    return hashlib.sha256((directory / FILE).read_bytes()).hexdigest()
