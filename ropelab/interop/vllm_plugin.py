"""A plugin of vLLM, which puts the kernel in the place of vLLM's rotary embeddings.

The wheel has the entry point ``ropelab`` in the group ``vllm.general_plugins``. By this entry point vLLM calls
`register` in each of its processes, if the environment variable ``VLLM_PLUGINS`` names ``ropelab`` or is not set::

    VLLM_PLUGINS=ropelab vllm serve MODEL

The plugin serves ``RotaryEmbedding`` and the classes that differ from it in their angles alone: Llama 3, YaRN, linear,
NTK, Gemma 4. Classes with a rotation of their own (M-RoPE, DeepSeek, Fourier) stay. The interface comes from vLLM
0.33.0 (``CustomOp.register_oot``).
"""

import torch

from ropelab.interop.sglang.operators import apply_rope_with_cos_sin_cache_inplace

_ROTATIONS = ("forward", "forward_native", "forward_cuda", "forward_hip", "forward_static")
"""The methods of vLLM's class that rotate."""


def register() -> None:
    """Make vLLM build classes over the kernel from now on; a second call does nothing."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers import rotary_embedding

    base = rotary_embedding.RotaryEmbedding
    for name, found in vars(rotary_embedding).items():
        if not (isinstance(found, type) and issubclass(found, base)) or name in op_registry_oot:
            continue
        if all(getattr(found, method) is getattr(base, method) for method in _ROTATIONS):
            CustomOp.register_oot(_over_kernel(found), name=name)


def _over_kernel(base: type) -> type:
    """The subclass of a class of vLLM that rotates with the kernel."""

    def forward_cuda(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key in place, and return them."""
        cache = self._match_cos_sin_cache_dtype(query)
        apply_rope_with_cos_sin_cache_inplace(positions, query, key, self.head_size, cache, self.is_neox_style)
        return query, key

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rotated query and key, as new tensors; vLLM calls this method where it compiles the model."""
        return forward_cuda(self, positions, query.clone(), None if key is None else key.clone())

    methods = {"forward_cuda": forward_cuda, "forward_hip": forward_cuda, "forward_native": forward_native}
    return type(base.__name__, (base,), methods)
