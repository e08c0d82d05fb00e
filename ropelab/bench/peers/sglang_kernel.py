"""Call the operators of SGLang, out of the library of its wheel. SGLang itself is not imported."""

from collections.abc import Callable

import torch

from ropelab.bench import packages
from ropelab.bench.peers import torch_library
from ropelab.bench.peers.cos_sin_cache import bind_in_place
from ropelab.bench.peers.peer import Rotate
from ropelab.bench.peers.torch_library import Operators
from ropelab.bench.workloads import Workload

PACKAGE, FORMER_PACKAGE = "sglang-kernel", "sgl-kernel"
"""The name of the package since version 0.4.0, and its name before."""
LIBRARIES = ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/common_ops.abi3.so")
"""The library for the GPUs of compute capability 9.0, and the only library of early versions."""


class _Operators(Operators):
    @property
    def apply_rope_with_cos_sin_cache_inplace(self) -> Callable[..., None]:
        """``apply(positions, q, k, head_size, cache, is_neox)``, as the function of this name in SGLang's package.

        Raises:
            NotInstalled: the version has no such operator. Version 0.4.0 is the last version that has it.
        """
        operator = self.apply_rope_pos_ids_cos_sin_cache

        def apply(positions, q, k, head_size, cache, is_neox):
            q, k = (x.view(len(x), -1, head_size) for x in (q, k))
            operator(q, k, q, k, cache, positions, not is_neox, False, None, None, None, None)

        return apply


def operators(version: str | None = None) -> _Operators:
    """The operators of a version of SGLang's kernels, by default of the newest version that is installed.

    The operators work on CUDA tensors and return nothing.

    - ``rotary_embedding(positions, q, k, head_size, cache, is_neox)`` overwrites q and k ``[T, H D]``. The positions
      are int64 ``[T]``. The cache ``[P, R]`` has the dtype of q.
    - ``apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_size, cache, is_neox)`` does so with a float32
      cache. The operator is FlashInfer's.
    - ``fused_qk_norm_rope(qkv, q_heads, k_heads, v_heads, head_dim, eps, q_weight, k_weight, base, is_neox, positions,
      1.0, low, high, 1.0, rotary_dim)`` overwrites q and k in bfloat16 qkv ``[T, (Hq + 2 Hk) D]``. The positions are
      int32 ``[T]``, and the operator computes the angles itself. The factors of 1.0 turn YaRN off.

    (Facts from the Python files and the schemas of sglang-kernel 0.4.4.)

    Raises:
        NotInstalled: the version is not installed, or its library cannot be loaded here.
    """
    package = PACKAGE if packages.installations(PACKAGE) else FORMER_PACKAGE
    try:
        version, _ = packages.locate(package, version)
    except packages.NotInstalled as error:
        raise packages.NotInstalled(f"{PACKAGE} {version or ''}".strip() + " not installed") from error
    loaded = torch_library.load(package, version, LIBRARIES, ("sgl_kernel",))
    return _Operators(package, version, loaded.library, ("sgl_kernel",))


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Bind ``rotary_embedding``, with a cache in the dtype of q."""
    return bind_in_place(operators(version).rotary_embedding, PACKAGE, workload, cos, sin)
