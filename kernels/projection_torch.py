"""The product with a rotation of q and k in torch operations, rounded once, for any device and strides."""

import torch

from ropelab.kernels import paged_cache_torch, qk_norm_torch, rotate_torch
from ropelab.kernels.rotation import Norm, Rotation
from ropelab.kernels.tensors import ProjectionTensors, RotateTensors


def serves(t: ProjectionTensors, rotation: Rotation) -> bool:
    """Whether the heads lie in the order of x; torch operations serve all calls but those of ``sbhd``."""
    return t.qkv.is_contiguous()


def project(
    t: ProjectionTensors,
    rotation: Rotation,
    q_heads: int,
    k_heads: int,
    norm: Norm | None = None,
    first_position: int = 0,
) -> None:
    """Write ``x weight^T + bias``, in which the heads of q and k are normalized and turned.

    The heads go to ``qkv``; with caches, those of q go there, and those of k and v to slots. The product, the norm and
    the rotation have the precision of the arithmetic (`rotate_torch.compute_dtype`), and each feature is rounded once,
    when it is written. The heads of v do not turn, also without a position.
    """
    wide = rotate_torch.compute_dtype(t.x, t.cos)
    bias = None if t.bias is None else t.bias.to(wide)
    product = torch.nn.functional.linear(t.x.to(wide), t.weight.to(wide), bias)
    heads = q_heads, k_heads, k_heads
    batch, seq_len, _, head_dim = t.qkv.shape
    made = product.view(batch, seq_len, sum(heads), head_dim).split(heads, -2)
    caches = [cache for cache in (t.k_cache, t.v_cache) if cache is not None]
    if t.slots is None:
        out = t.qkv.split(heads, -2)
    else:
        out = t.qkv, *(torch.empty_like(x, dtype=t.x.dtype) for x in made[1:])
    turning = made[:2]
    if norm is not None:
        weights = [w.to(wide) for w in (t.q_weight, t.k_weight) if w is not None]
        turning = [qk_norm_torch.normed(x, norm.eps)[0] * w for x, w in zip(turning, weights, strict=True)]
    rotate_torch.rotate(RotateTensors.of(turning, out[:2], t.cos, t.sin, t.positions), rotation, first_position)
    out[2].copy_(made[2])
    if t.slots is not None:
        for x, cache in zip(out[1:], caches, strict=True):
            tokens, row = paged_cache_torch.rows_of_slots(t.slots, cache)
            cache[row] = x.flatten(0, 1)[tokens].to(cache.dtype)
