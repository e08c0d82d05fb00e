"""An override of torchtitan for DeepSeek-V3: one launch for the query, one for the key, and v as a view.

A training run takes the override by the name of its function::

    --override.imports ropelab.interop.torchtitan_mla.fused_mla

It builds torchtitan's own ``FusedMLAAttention`` over the functions of this file, which have the names and arguments of
torchtitan 0.3.0 (``torchtitan.overrides.fused_mla``, pytorch/torchtitan#4134). The functions differ from torchtitan's
in these points:

- The gradient of k_pe is rounded once. torchtitan also rounds the sum over the heads before it turns back.
- The query is a new tensor, as on torchtitan's main branch. The function of 0.3.0 overwrites the projection.
- The results are differentiable any number of times, and bits do not depend on a tuned tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.deepseek_v3.model import Attention
from torchtitan.overrides import fused_mla as theirs

from ropelab.arguments import check_tensor
from ropelab.call.refusals import in_words
from ropelab.call.traced import one_node
from ropelab.interop.dtensor import grad_placements
from ropelab.interop.patch import Patch
from ropelab.interop.torchtitan import complex_rope
from ropelab.latent_attention import assemble_mla_kv, rotate_mla_query

_WORDS = {"nope_dim": "q_nope_dim", "cos": "rope_cache", "sin": "rope_cache"}


@one_node
def fused_mla_q(
    q: torch.Tensor, rope_cache: torch.Tensor, positions: torch.Tensor | None, q_nope_dim: int
) -> torch.Tensor:
    """The query: the rotation of the features of every head of ``q`` from ``q_nope_dim`` on, in a new tensor.

    Args:
        q: ``[B, S, H, q_nope_dim + R]``, of one process or a DTensor that is sharded along B, S and H only.
        rope_cache: complex ``[P, R/2]``; or the cache of `ropelab.interop.torchtitan.KernelComplexRoPE`.
        positions: ``[S]``, ``[1, S]`` or ``[B, S]``, for the tokens of this rank; by default they count from 0.

    Raises:
        TypeError, ValueError: as `ropelab.rotate_mla_query`, in the words of these arguments.
    """
    query = in_words(rotate_mla_query, **_WORDS)(_local(q), q_nope_dim, **_where(rope_cache, positions))
    return _placed_as(q, query)


@one_node
def fused_mla_kv(
    kv: torch.Tensor, k_pe: torch.Tensor, rope_cache: torch.Tensor, positions: torch.Tensor | None, q_nope_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key, and the value as a view of ``kv``.

    Args:
        kv: ``[B, S, H, q_nope_dim + V]``, of one process or a DTensor that is sharded along B, S and H only.
        k_pe: ``[B, S, R]``, a DTensor if ``kv`` is one. Where heads are sharded, its gradient is a partial sum.
        rope_cache, positions: as for `fused_mla_q`.

    Raises:
        TypeError, ValueError: as `ropelab.assemble_mla_kv`, in the words of these arguments.
    """
    check_tensor("k_pe", k_pe, (3,), "[B, S, R]")
    key, value = in_words(assemble_mla_kv, **_WORDS)(
        _local(kv), _shared(k_pe, kv)[:, :, None], q_nope_dim, **_where(rope_cache, positions), copy_value=False
    )
    return _placed_as(kv, key), _placed_as(kv, value)


@override(target=Attention.Config, description="Heads of latent attention in one launch each, v as a view (ropelab)")
def fused_mla(cfg: Attention.Config) -> theirs.FusedMLAAttention.Config:
    """The configuration that builds torchtitan's attention over the functions of this file, in this process for all."""
    Patch({(theirs, function.__name__): function for function in (fused_mla_q, fused_mla_kv)})
    rope = complex_rope(cfg.rope) if isinstance(cfg.rope, ComplexRoPE.Config) else cfg.rope
    return derive(cfg, theirs.FusedMLAAttention.Config, rope=rope)


def _where(rope_cache: torch.Tensor, positions: torch.Tensor | None) -> dict[str, Any]:
    cache = _local(rope_cache)
    cos, sin = (cache.real, cache.imag) if cache.is_complex() else cache.chunk(2, dim=-1)
    return {"cos": cos, "sin": sin, "layout": "interleaved", "positions": _local(positions)}


def _local(x):
    """The part of a DTensor on this rank; other values as they are."""
    return x.to_local() if isinstance(x, DTensor) else x


def _shared(k_pe: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The part of ``k_pe`` on this rank, whose gradient sums over the heads of this rank only."""
    if not (isinstance(k_pe, DTensor) and isinstance(kv, DTensor)):
        return _local(k_pe)
    return k_pe.to_local(grad_placements=grad_placements(k_pe.placements, kv))


def _placed_as(x: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return local
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
