"""This file calls the operators of SGLang, out of the library of its wheel. SGLang itself is not imported."""

from types import SimpleNamespace

from ropelab.bench import packages

PACKAGES = ("sglang-kernel", "sgl-kernel")
"""The name of the package since 2026, and the name before."""
LIBRARIES = ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/common_ops.abi3.so")


def operators(version: str | None = None) -> SimpleNamespace:
    """The operators of a version of SGLang's kernels, by default of the newest version that is installed.

    Returns:
        An object with the operators, which work on CUDA tensors:

        - ``apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_size, cache, is_neox)`` overwrites q and k
          ``[T, H D]``; the positions are int64 ``[T]``, and the cache is float32 ``[P, R]``.

        An operator that the version does not have is missing.

    Raises:
        NotInstalled: the version is not installed, or its library cannot be loaded here.
    """
    raise packages.NotInstalled(f"{' or '.join(PACKAGES)} {version or ''}".strip() + " not installed")
