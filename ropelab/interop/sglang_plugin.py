"""A plugin of SGLang, which puts the kernel in the place of SGLang's rotary embedding.

The wheel has the entry point ``ropelab`` in the group ``sglang.srt.plugins`` (`ropelab_plugins`). By it each process of
SGLang calls `register`, if the environment variable ``SGLANG_PLUGINS`` names ``ropelab``::

    SGLANG_PLUGINS=ropelab python -m sglang.launch_server --model-path MODEL

The plugin serves ``RotaryEmbedding`` and ``MRotaryEmbedding`` on CUDA and the classes that inherit their
``forward_cuda``: Llama 3, YaRN, linear, NTK, Gemma 4, DeepSeek. The kernel reads the positions ``[3, T]`` of M-RoPE
itself. Where SGLang has the rotation write the cache (``fused_set_kv_buffer_arg``, for a pool in bfloat16), one call of
`ropelab.rope_and_cache` does both. Classes with another rotation (Ernie 4.5 VL) stay. A call with offsets
stays, and so does a call whose argument for the cache lacks a part that SGLang 0.5.23 has. The interface comes from
that version (``HookRegistry``). With ``ROPELAB_DISABLE=1`` SGLang keeps its own rotation.

A call that fails goes to SGLang's own method, and the log says so once.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from ropelab.interop.log import say
from ropelab.interop.sglang import apply_rope_with_cos_sin_cache_inplace
from ropelab.paged_cache import rope_and_cache
from ropelab.positions.axes import mrope_axes

TARGET = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda"
MROPE_TARGET = "sglang.srt.layers.rotary_embedding.mrope.MRotaryEmbedding.forward_cuda"


def register() -> None:
    """Make SGLang rotate with the kernel; SGLang applies the hook after it has loaded all plugins."""
    if os.environ.get("ROPELAB_DISABLE", "0") not in ("", "0"):
        say("info", "switched off by ROPELAB_DISABLE", "sglang.ropelab")
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, forward_cuda, HookType.AROUND)
    HookRegistry.register(MROPE_TARGET, mrope_forward_cuda, HookType.AROUND)


def forward_cuda(
    original: Callable,
    self,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key in place, and return them, as SGLang's method ``original`` does; it may write the cache."""
    if self.cos_sin_cache.device != query.device:
        self.cos_sin_cache = self.cos_sin_cache.to(query.device)
    fused = fused_set_kv_buffer_arg
    known = fused is None or all(hasattr(fused, name) for name in _FUSED)
    if offsets is None and known:
        try:
            if fused is None:
                apply_rope_with_cos_sin_cache_inplace(
                    positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style
                )
            else:
                _rotate_and_write(self, positions, query, key, fused)
            return query, key
        except (TypeError, ValueError, NotImplementedError) as error:  # raised before anything is written
            say("warning", f"SGLang's own rotation: {type(error).__name__}: {error}", "sglang.ropelab")
    return original(self, positions, query, key, offsets, fused_set_kv_buffer_arg)


_FUSED = ("value", "k_buffer", "v_buffer", "cache_loc")
"""The parts of SGLang's ``FusedSetKVBufferArg``."""


def _rotate_and_write(module: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, fused: Any) -> None:
    """Rotate query and key in place, and write key and value into the pool, in one pass.

    Args:
        fused: ``value [T, Hk * Dv]`` or ``[T, Hk, Dv]``; ``k_buffer [slots, Hk * D]`` and
            ``v_buffer [slots, Hk * Dv]``; ``cache_loc [T]``, the slots.
    """
    size = module.head_size
    q, k = (x.reshape(len(x), -1, size) for x in (query, key))
    heads = k.shape[1]
    value = fused.value.reshape(len(k), heads, -1)
    if q.data_ptr() != query.data_ptr() or k.data_ptr() != key.data_ptr():
        raise ValueError("query, key: expected tensors that a view gives an axis of heads, got others")
    k_cache, v_cache = (x.view(len(x), 1, heads, -1) for x in (fused.k_buffer, fused.v_buffer))  # blocks of one slot
    cos, sin = module.cos_sin_cache.chunk(2, dim=-1)
    rope_and_cache(
        q, k, value, k_cache, v_cache, fused.cache_loc, cos=cos, sin=sin, positions=positions,
        layout="split_half" if module.is_neox_style else "interleaved", q_out=q, k_out=k,
    )  # fmt: skip


def mrope_forward_cuda(
    original: Callable,
    self,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    fused_set_kv_buffer_arg: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key in place by positions ``[T]`` or ``[3, T]``, and return them."""
    if fused_set_kv_buffer_arg is not None:
        return original(self, positions, query, key, fused_set_kv_buffer_arg)
    self._match_cos_sin_cache_dtype(query)
    apply_rope_with_cos_sin_cache_inplace(
        positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style,
        axes=_axes(self) if positions.ndim == 2 else None,
    )  # fmt: skip
    return query, key


def _axes(module: Any) -> tuple[int, ...]:
    """The axis of each pair, read once: the host waits for SGLang's ``axis_map``, where a module has one (GLM-V)."""
    axes = vars(module).get("_axes_of_ropelab")
    if axes is None:
        table = getattr(module, "axis_map", None)
        if table is None:
            axes = mrope_axes(module.mrope_section, mrope_interleaved=bool(module.mrope_interleaved))
        else:
            axes = tuple(table.tolist())
        vars(module)["_axes_of_ropelab"] = axes
    return axes
