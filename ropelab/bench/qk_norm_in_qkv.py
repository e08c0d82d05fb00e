"""Call operators of inference engines that normalize and rotate q and k in place in a packed qkv."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ropelab.bench import packages
from ropelab.bench.peers import sglang_kernel, vllm
from ropelab.bench.peers.cos_sin_cache import positions
from ropelab.bench.workloads import Buffers, Workload

BASE = 10000.0
"""The base of the frequencies, for an operator that computes the angles itself: the default of `rotary_table`."""


@dataclass(frozen=True)
class InQKV:
    """An operator, bound to a workload in bshd and to the weights of the norms.

    Attributes:
        shape: the workload.
        run: a function that overwrites q and k in ``[T, (Hq + 2 Hk) D]``.
    """

    shape: Workload
    run: Callable[[torch.Tensor], object] = field(compare=False)

    def packed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """A new qkv ``[T, (Hq + 2 Hk) D]`` with q, k and zeros for v."""
        return torch.cat((q, k, torch.zeros_like(k)), dim=2).detach().flatten(0, 1).flatten(1)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new q and k of q and k ``[B, S, H, D]``. The operator has the weights already.

        Raises:
            ValueError: the operator changed v.
        """
        qkv = self.packed(q, k)
        self.run(qkv)
        heads = qkv.view(*q.shape[:2], -1, self.shape.head_dim)
        new_q, new_k, v = heads.split((self.shape.q_heads, self.shape.k_heads, self.shape.k_heads), dim=2)
        if v.count_nonzero():
            raise ValueError("v: expected no change, got other values")
        return new_q, new_k

    def calls(self, sets: Sequence[Buffers]) -> list[Callable[[], object]]:
        """One call for each set of buffers, each in a qkv of its own."""

        def call(qkv):
            return lambda: self.run(qkv)

        return [call(self.packed(*b.inputs)) for b in sets]


def operators(
    shape: Workload, buffers: Buffers, weights: Sequence[torch.Tensor], eps: float
) -> tuple[dict[str, InQKV], dict[str, str]]:
    """The operators of vLLM ("vllm") and SGLang ("sglang"), and the status of each contender that cannot run here."""
    sizes = (shape.q_heads, shape.k_heads, shape.k_heads, shape.head_dim, eps)
    q_weight, k_weight = (weight.detach() for weight in weights)
    is_neox = shape.layout == "split_half"
    found, missing = {}, {}
    try:
        operator = vllm.operators().fused_qk_norm_rope
        rows = positions(shape, buffers.q.device, torch.int64)
        cache = torch.cat((buffers.cos, buffers.sin), dim=-1).to(shape.dtype)
        found["vllm"] = InQKV(shape, lambda qkv: operator(qkv, *sizes, q_weight, k_weight, cache, is_neox, rows))
    except packages.NotInstalled as error:
        missing["vllm"] = f"not run: {error}"
    try:
        own_angles = sglang_kernel.operators().fused_qk_norm_rope
        # The rows of the tables count from the first position; the operator needs the positions themselves.
        own_positions = positions(shape, buffers.q.device, torch.int32) + shape.first_position
        without_yarn = (1.0, 1.0, 1.0, 1.0, shape.rotary_dim)
        found["sglang"] = InQKV(
            shape,
            lambda qkv: own_angles(qkv, *sizes, q_weight, k_weight, BASE, is_neox, own_positions, *without_yarn),
        )
    except packages.NotInstalled as error:
        missing["sglang"] = f"not run: {error}"
    return found, missing
