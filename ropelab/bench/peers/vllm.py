"""This file calls the operators of vLLM, out of the library of its wheel. vLLM itself is not imported."""

from types import SimpleNamespace

import torch

from ropelab.bench import packages
from ropelab.bench.peers import torch_library
from ropelab.bench.peers.cos_sin_cache import flat, positions
from ropelab.bench.peers.peer import Rotate
from ropelab.bench.workloads import Workload

PACKAGE = "vllm"
LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_C.abi3.so")
"""The library with the operators, in versions of 2026 and in earlier versions."""


def operators(version: str | None = None) -> SimpleNamespace:
    """The operators of a version of vLLM, by default of the newest version that is installed.

    Returns:
        An object with the operators, which work on CUDA tensors. The positions are int64 ``[T]``, and a cache has the
        cosines of a position before the sines, ``[P, R]``.

        - ``rotary_embedding(positions, q, k, head_size, cache, is_neox)`` overwrites q and k ``[T, H D]``.
        - ``fused_qk_norm_rope(qkv, q_heads, k_heads, v_heads, head_dim, eps, q_weight, k_weight, cache, is_neox,
          positions)`` overwrites q and k in qkv ``[T, (Hq + 2 Hk) D]``.
        - ``fused_qknorm_rope_cache(q_out, k_out, v_out, qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache,
          v_cache, head_dim, q_heads, k_heads, rotary_pairs, eps, weight_bias)`` writes q, k and v, and also writes k
          and v into the slots of the caches ``[blocks, block_size, Hk, D]``.
        - ``concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, cache, is_neox, slots, kv_cache, "auto",
          scale)`` overwrites q_pe ``[T, H, R]`` and k_pe ``[T, R]``, and writes kv_c ``[T, L]`` and k_pe into the
          slots of the cache ``[blocks, block_size, L + R]``.

        An operator that the version does not have is missing.

    Raises:
        NotInstalled: the version is not installed, or its library cannot be loaded here.
    """
    version, _ = packages.locate(PACKAGE, version)
    torch_library.load(PACKAGE, version, LIBRARIES)
    spaces = torch.ops._C, torch.ops._C_cache_ops
    names = ("rotary_embedding", "fused_qk_norm_rope", "fused_qknorm_rope_cache", "concat_and_cache_mla_rope_fused")
    return SimpleNamespace(**{name: getattr(space, name) for name in names for space in spaces if hasattr(space, name)})


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Bind the operator, with a cache in the dtype of q."""
    apply = operators(version).rotary_embedding
    rows = positions(workload, cos.device, torch.int64)
    cache = torch.cat((cos, sin), dim=-1).to(workload.dtype)
    is_neox = workload.layout == "split_half"

    def rotate(q, k):
        q, k = (None if x is None else x.detach() for x in (q, k))
        flat_q, flat_k = flat(q, workload, "vllm"), flat(k, workload, "vllm")
        apply(rows, flat_q, flat_k, workload.head_dim, cache, is_neox)
        return q, k

    return rotate
