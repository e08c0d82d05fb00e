"""Load files of Megatron-LM without the rest of Megatron-LM.

They hold the Triton kernels for multi-head latent attention (MLA), and the rotation in torch operations.
"""

import hashlib
import sys
from functools import cache
from types import ModuleType

from ropelab.bench import packages, replaced

PACKAGE = "megatron-core"
FILE = "megatron/core/fusions/fused_mla_yarn_rope_apply.py"
UTILS = "megatron/core/models/common/embeddings/rope_utils.py"


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
    # The file takes one name from Megatron-LM, a decorator that it uses if there is no Triton.
    utils = ModuleType("megatron.core.utils")
    utils.null_decorator = None
    return _loaded(FILE, version, {utils.__name__: utils})


@cache
def rope_utils(version: str | None = None) -> ModuleType:
    """The module with Megatron-LM's rotation in torch operations, by default of the newest version that is installed.

    TransformerEngine's kernels are left out. ``cp_group`` must be given, because there is no parallel state.

    Raises:
        NotInstalled: the version, or a package that the file imports, is not installed.
    """
    absent = dict.fromkeys(("megatron.core.extensions", "flash_attn"))
    return _loaded(UTILS, version, {"megatron.core.parallel_state": ModuleType("parallel_state"), **absent})


def _loaded(file: str, version: str | None, modules: dict[str, ModuleType | None]) -> ModuleType:
    """A file of Megatron-LM that imports nothing of Megatron-LM but ``modules``; None stands for a missing module."""
    version, _ = packages.locate(PACKAGE, version)
    parents = {name: ModuleType(name) for name in ("megatron", "megatron.core")}
    for name, module in modules.items():
        if module is not None:
            setattr(parents["megatron.core"], name.rpartition(".")[2], module)
    try:
        with replaced.entries(sys.modules, parents | modules):
            module = packages.load_file(PACKAGE, version, file)
    except ModuleNotFoundError as error:
        raise packages.NotInstalled(f"{PACKAGE} {version} needs {error.name}") from error
    sys.modules[module.__name__] = module  # Triton and the compiler of torch find a module by its name
    return module


def sha256(version: str) -> str:
    """The hash of the file with the kernels, in hexadecimal."""
    _, directory = packages.locate(PACKAGE, version)
    return hashlib.sha256((directory / FILE).read_bytes()).hexdigest()
