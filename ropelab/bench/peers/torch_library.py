"""Call operators that the library of a package registers with torch. The package itself is not imported."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ropelab.bench import packages


@dataclass(frozen=True)
class Library:
    """The library of an inference engine.

    Attributes:
        packages: the names of the package that has it, today's first.
        files: its path in the package, in versions of 2026 and in earlier versions.
        namespaces: those of its operators in ``torch.ops``.
    """

    packages: Sequence[str]
    files: Sequence[str]
    namespaces: Sequence[str]


LIBRARIES = {
    "vllm": Library(
        ("vllm",), ("vllm/_C_stable_libtorch.abi3.so", "vllm/_C.abi3.so"), ("_C", "_C_cache_ops"),
    ),
    "sglang": Library(
        ("sglang-kernel", "sgl-kernel"),
        ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/common_ops.abi3.so"), ("sgl_kernel",),
    ),
}  # fmt: skip
"""The operators work on CUDA tensors and return nothing. Positions and slots are int64 ``[T]``. A cache of cosines and
sines has the cosines of a position before its sines, ``[P, R]``.

Of both engines:

- ``rotary_embedding(positions, q, k, head_size, cache, is_neox)`` overwrites q and k ``[T, H D]`` with a cache in the
  dtype of q; k may be None.

Of vLLM, where a token with a negative slot is not stored:

- ``fused_qk_norm_rope(qkv, q_heads, k_heads, v_heads, head_dim, eps, q_weight, k_weight, cache, is_neox, positions)``
  overwrites q and k in qkv ``[T, (Hq + 2 Hk) D]``.
- ``fused_qknorm_rope_cache(q_out, k_out, v_out, qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache, v_cache,
  head_dim, q_heads, k_heads, rotary_pairs, eps, weight_bias)`` rotates halves. It writes q, k and v, and writes k and v
  also into the slots of the caches ``[blocks, block_size, Hk, D]``.
- ``concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, cache, is_neox, slots, kv_cache, "auto", scale)``
  overwrites q_pe ``[T, H, R]`` and k_pe ``[T, R]``, and writes kv_c ``[T, L]`` and k_pe into the slots of the cache
  ``[blocks, block_size, L + R]``.

Of SGLang:

- ``fused_qk_norm_rope(qkv, q_heads, k_heads, v_heads, head_dim, eps, q_weight, k_weight, base, is_neox, positions, 1.0,
  low, high, 1.0, rotary_dim)`` overwrites q and k in bfloat16 qkv ``[T, (Hq + 2 Hk) D]``. The positions are int32
  ``[T]``, and the operator computes the angles itself. The factors of 1.0 turn YaRN off.

(Facts from the schemas of the libraries and from the Python files of vLLM 0.33.0 and sglang-kernel 0.4.4.)
"""


class Operators:
    """The operators that the library of a package registers.

    An operator is an attribute: ``operators.rotary_embedding``. An operator that the version does not have raises
    `NotInstalled`.

    Attributes:
        version: of the package.
        file: the library that was loaded.
    """

    def __init__(self, package: str, version: str, file: Path, namespaces: Sequence[str]):
        self.package, self.version, self.file = package, version, file
        self._namespaces = namespaces

    def __getattr__(self, name: str) -> Callable:
        for namespace in self._namespaces:
            if not name.startswith("_") and hasattr(getattr(torch.ops, namespace), name):
                return getattr(getattr(torch.ops, namespace), name)
        raise packages.NotInstalled(f"{self.package} {self.version} has no operator {name}")

    @property
    def about(self) -> dict[str, str]:
        """The version, and the hash of the library, in hexadecimal."""
        with self.file.open("rb") as file:
            return {"version": self.version, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def operators(engine: str, version: str | None = None) -> Operators:
    """The operators of one of `LIBRARIES`, by default of the newest version that is installed.

    The process can have the operators of one version of a package only. If the package was imported before, its library
    is loaded already, and nothing happens.

    Raises:
        NotInstalled: the version is not installed, has none of the libraries, or its library cannot be loaded here.
    """
    names = LIBRARIES[engine].packages
    package = next((name for name in names if packages.installations(name)), names[0])
    return _loaded(engine, package, packages.locate(package, version)[0])


@cache
def _loaded(engine: str, package: str, version: str) -> Operators:
    library = LIBRARIES[engine]
    _, directory = packages.locate(package, version)
    for file in (directory / name for name in library.files):
        if file.is_file():
            try:
                torch.ops.load_library(file)
            except (OSError, RuntimeError) as error:
                reason = str(error.__cause__ or error).splitlines()[0].replace(f"{file.resolve().parent}/", "")
                raise packages.NotInstalled(f"{package} {version} cannot be loaded: {reason}") from error
            return Operators(package, version, file, library.namespaces)
    raise packages.NotInstalled(f"{package} {version} has no {' or '.join(library.files)}")
