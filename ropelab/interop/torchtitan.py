"""Two overrides of torchtitan, which put the kernel in the place of its rotary embeddings.

A training run takes an override by the name of its function::

    --override.imports ropelab.interop.torchtitan.cos_sin_rope
    --override.imports ropelab.interop.torchtitan.complex_rope

The modules keep torchtitan's angles, in float32. A position without a row gives NaN, where torchtitan raises later. The
interface comes from torchtitan 0.3.0 (``torchtitan.config.override``, ``torchtitan.models.common.rope``), whose tensors
are ``[B, S, H, dim]``, and from its main branch since pytorch/torchtitan#4121, with ``[T, H, dim]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import Proxy
from torchtitan.config import derive, override
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from ropelab.arguments import check_tensor
from ropelab.call.refusals import in_words
from ropelab.call.traced import recorded
from ropelab.interop import dtensor
from ropelab.rope import apply_rope


class KernelCosSinRoPE(CosSinRoPE):
    """torchtitan's ``CosSinRoPE``, pairs ``(i, i + dim/2)``, in one launch for q and k."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The fields of torchtitan's configuration."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated query and key, ``[B, S, H, dim]`` or ``[T, H, dim]``.

        ``positions`` is ``[B, S]``, ``[1, S]``, for three axes ``[T]``, or None: then tokens count from 0.
        """
        if isinstance(query, Proxy):
            return recorded(self.forward, locals())
        pairs = self.config.dim // 2  # the cache repeats the columns of the cosines, and the columns of the sines
        cos, sin = self.cache[:, :pairs], self.cache[:, 2 * pairs : 3 * pairs]
        return _rotated(query, key, cos, sin, positions, "split_half")


class KernelComplexRoPE(ComplexRoPE):
    """torchtitan's ``ComplexRoPE``, pairs ``(2i, 2i + 1)``, in one launch for q and k.

    The cache holds the real parts and then the imaginary parts, ``[positions, dim]`` in float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """The fields of torchtitan's configuration."""

    def _precompute_cache(self) -> torch.Tensor:
        turns = super()._precompute_cache()
        return torch.cat((turns.real, turns.imag), dim=-1)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated query and key, ``[B, S, H, dim]`` or ``[T, H, dim]``.

        ``positions`` is ``[B, S]``, ``[1, S]``, for three axes ``[T]``, or None: then tokens count from 0.
        """
        if isinstance(query, Proxy):
            return recorded(self.forward, locals())
        cos, sin = self.cache.chunk(2, dim=-1)
        return _rotated(query, key, cos, sin, positions, "interleaved")


@override(target=CosSinRoPE.Config, exact=True, description="RoPE of halves in one launch (ropelab)")
def cos_sin_rope(cfg: CosSinRoPE.Config) -> KernelCosSinRoPE.Config:
    """The configuration that builds `KernelCosSinRoPE`."""
    return derive(cfg, KernelCosSinRoPE.Config)


@override(target=ComplexRoPE.Config, exact=True, description="RoPE of adjacent pairs in one launch (ropelab)")
def complex_rope(cfg: ComplexRoPE.Config) -> KernelComplexRoPE.Config:
    """The configuration that builds `KernelComplexRoPE`."""
    return derive(cfg, KernelComplexRoPE.Config)


def _rotated(query, key, cos, sin, positions, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate tensors of one process, or DTensors whose positions belong to the rank's own tokens."""
    check_tensor("query", query, (3, 4), "[T, H, dim] or [B, S, H, dim]")
    rotate: Any = dtensor.apply_rope if isinstance(query, DTensor) else apply_rope
    if isinstance(query, DTensor) and positions is not None and not isinstance(positions, DTensor):
        along_tokens = [p if isinstance(p, Shard) and p.dim < query.ndim - 2 else Replicate() for p in query.placements]
        positions = DTensor.from_local(positions, query.device_mesh, along_tokens, run_check=False)
    rotate = in_words(rotate, q="query", k="key", cos="query", sin="query")
    seq_format = "thd" if query.ndim == 3 else "bshd"
    return rotate(query, key, cos=cos, sin=sin, layout=layout, seq_format=seq_format, positions=positions)
