"""A plugin of vLLM, which puts the kernel in the place of vLLM's rotary embeddings.

The wheel has the entry point ``ropelab`` in the group ``vllm.general_plugins``. By this entry point vLLM calls
`register` in each of its processes, if the environment variable ``VLLM_PLUGINS`` names ``ropelab`` or is not set::

    VLLM_PLUGINS=ropelab vllm serve MODEL

The plugin serves ``RotaryEmbedding``, ``MRotaryEmbedding``, and the classes that differ from them in their angles
alone: Llama 3, YaRN, linear, NTK, Gemma 4. The kernel reads the positions ``[3, T]`` of M-RoPE itself, so no tables are
gathered. Classes with another rotation (Ernie 4.5 VL, XD-RoPE, DeepSeek, Fourier) stay. The interface comes from vLLM
0.33.0 (``CustomOp.register_oot``).
"""

from typing import Any

import torch

from ropelab.interop.sglang.operators import apply_rope_with_cos_sin_cache_inplace
from ropelab.positions.axes import mrope_axes

_ROTATIONS = ("forward", "forward_native", "forward_cuda", "forward_hip", "forward_static")
"""The methods of vLLM's class that rotate."""


def register() -> None:
    """Make vLLM build classes over the kernel from now on; a second call does nothing."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers import rotary_embedding

    for name, found in vars(rotary_embedding).items():
        if not isinstance(found, type) or name in op_registry_oot:
            continue
        for base in (rotary_embedding.RotaryEmbedding, rotary_embedding.MRotaryEmbedding):
            if issubclass(found, base) and all(_method(found, name) is _method(base, name) for name in _ROTATIONS):
                CustomOp.register_oot(_over_kernel(found), name=name)


def _method(layer: type, name: str) -> Any:
    return getattr(layer, name, None)  # MRotaryEmbedding has no forward_static


def _over_kernel(base: Any) -> type:
    """The subclass of a class of vLLM that rotates with the kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        section = getattr(self, "mrope_section", None)
        self.axes = mrope_axes(section, mrope_interleaved=self.mrope_interleaved) if section else None

    def forward_cuda(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key in place, and return them; vLLM's M-RoPE ignores ``offsets`` too."""
        cache = self._match_cos_sin_cache_dtype(query)
        apply_rope_with_cos_sin_cache_inplace(
            positions, query, key, self.head_size, cache, self.is_neox_style,
            axes=self.axes if positions.ndim == 2 else None,
        )  # fmt: skip
        return query, key

    def forward_native(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rotated query and key, as new tensors; vLLM calls this method where it compiles the model."""
        return forward_cuda(self, positions, query.clone(), None if key is None else key.clone())

    methods = {
        "__init__": __init__, "forward_cuda": forward_cuda, "forward_hip": forward_cuda,
        "forward_native": forward_native,
    }  # fmt: skip
    return type(base.__name__, (base,), methods)
