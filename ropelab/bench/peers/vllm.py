"""Call the operators of vLLM, out of the library of its wheel. vLLM itself is not imported."""

import torch

from ropelab.bench import packages
from ropelab.bench.peers import torch_library
from ropelab.bench.peers.cos_sin_cache import bind_in_place
from ropelab.bench.peers.peer import Rotate
from ropelab.bench.peers.torch_library import Operators
from ropelab.bench.workloads import Workload

PACKAGE = "vllm"
LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_C.abi3.so")
"""The library with the operators, in versions of 2026 and in earlier versions."""


def operators(version: str | None = None) -> Operators:
    """The operators of a version of vLLM, by default of the newest version that is installed.

    The operators work on CUDA tensors and return nothing. Positions and slots are int64 ``[T]``. A cache of cosines and
    sines has the cosines of a position before its sines, ``[P, R]``.

    - ``rotary_embedding(positions, q, k, head_size, cache, is_neox)`` overwrites q and k ``[T, H D]``; k may be None.
    - ``fused_qk_norm_rope(qkv, q_heads, k_heads, v_heads, head_dim, eps, q_weight, k_weight, cache, is_neox,
      positions)`` overwrites q and k in qkv ``[T, (Hq + 2 Hk) D]``.
    - ``fused_qknorm_rope_cache(q_out, k_out, v_out, qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache,
      v_cache, head_dim, q_heads, k_heads, rotary_pairs, eps, weight_bias)`` rotates halves. It writes q, k and v, and
      writes k and v also into the slots of the caches ``[blocks, block_size, Hk, D]``.
    - ``concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, cache, is_neox, slots, kv_cache, "auto", scale)``
      overwrites q_pe ``[T, H, R]`` and k_pe ``[T, R]``, and writes kv_c ``[T, L]`` and k_pe into the slots of the cache
      ``[blocks, block_size, L + R]``.

    A token with a negative slot is not stored. (Facts from the schemas of the library and from ``vllm/_custom_ops.py``
    of vLLM 0.33.0.)

    Raises:
        NotInstalled: the version is not installed, or its library cannot be loaded here.
    """
    version, _ = packages.locate(PACKAGE, version)
    return torch_library.load(PACKAGE, version, LIBRARIES, ("_C", "_C_cache_ops"))


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Bind ``rotary_embedding``, with a cache in the dtype of q."""
    return bind_in_place(operators(version).rotary_embedding, PACKAGE, workload, cos, sin)
