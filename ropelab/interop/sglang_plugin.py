"""A plugin of SGLang, which puts the kernel in the place of SGLang's rotary embedding.

The wheel has the entry point ``ropelab`` in the group ``sglang.srt.plugins``. By this entry point SGLang calls
`register` in each of its processes, if the environment variable ``SGLANG_PLUGINS`` names ``ropelab`` or is not set::

    SGLANG_PLUGINS=ropelab python -m sglang.launch_server --model-path MODEL

The plugin serves ``RotaryEmbedding`` and ``MRotaryEmbedding`` on CUDA and the classes that inherit their
``forward_cuda``: Llama 3, YaRN, linear, NTK, Gemma 4, DeepSeek. The kernel reads the positions ``[3, T]`` of M-RoPE
itself. Classes with another rotation (Ernie 4.5 VL) stay, and so does a call that also writes into the cache. The
interface comes from SGLang 0.5.23 (``HookRegistry``).
"""

from collections.abc import Callable
from typing import Any

import torch

from ropelab.interop.sglang.operators import apply_rope_with_cos_sin_cache_inplace
from ropelab.positions.axes import mrope_axes

TARGET = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda"
MROPE_TARGET = "sglang.srt.layers.rotary_embedding.mrope.MRotaryEmbedding.forward_cuda"


def register() -> None:
    """Make SGLang rotate with the kernel; SGLang applies the hook after it has loaded all plugins."""
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
    """Rotate query and key in place, and return them, as SGLang's method ``original`` does."""
    if offsets is not None or fused_set_kv_buffer_arg is not None:
        return original(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
    if self.cos_sin_cache.device != query.device:
        self.cos_sin_cache = self.cos_sin_cache.to(query.device)
    apply_rope_with_cos_sin_cache_inplace(positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style)
    return query, key


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
