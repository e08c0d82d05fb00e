"""Rotations with block scales in torch operations, with the bits of `block_scales_triton`; the sums of a norm apart."""

import torch

from ropelab.kernels import qk_norm_torch, rotate_torch
from ropelab.kernels.block_scales import ABOVE_LARGEST, E4M3_EXPONENT, Blocks, Page, blocks_of_cache
from ropelab.kernels.float8 import to_float8
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.tensors import BlockScaledCacheTensors, QuantizeTensors, RotateTensors


def quantize(
    t: QuantizeTensors, rotation: Rotation, blocks: Blocks, weight_scale: float, first_position: int = 0
) -> None:
    """Rotate the heads, and write 8-bit floats and scales, or weights times the scales.

    Args:
        rotation: of interleaved pairs.
        blocks: see `Blocks`.
        weight_scale: a factor of ``weights_out``.
        first_position: as for `run.run`.
    """
    y = _turned(t.x, t, rotation, first_position)
    if blocks.round_first:
        y = y.to(t.x.dtype)
    values, exponents = scaled(y, blocks)
    head_dim, group_heads = t.x.shape[3], t.out.shape[3] // t.x.shape[3]
    out = t.out.view(torch.uint8).unflatten(-1, (group_heads, head_dim))  # [B, S, G, H / G, D]
    out.copy_(values.view(torch.uint8).view(out.shape))
    if t.scales is not None:
        grouped = exponents[0].reshape(*t.scales.shape[:2], group_heads * exponents.shape[-1])
        t.scales.copy_(_packed(grouped) if t.scales.dtype == torch.int32 else power_of_two(grouped))
    if t.weights_out is not None and t.weights is not None:
        t.weights_out.copy_(t.weights.float() * weight_scale * power_of_two(exponents[0, ..., 0]))


def write(
    t: BlockScaledCacheTensors,
    rotation: Rotation,
    norm_eps: float,
    page_tokens: int,
    block_dim: int,
    first_position: int = 0,
) -> None:
    """Normalize and rotate q, and write the rotated kv into slots of the cache.

    Args:
        norm_eps: the number that the norm adds to the mean of the squares.
        page_tokens: the tokens of a page of the cache.
        block_dim: the features with a common scale.
        rotation, first_position: as for `quantize`.
    """
    page = Page.of(t, rotation, page_tokens, block_dim)
    q, rstd = qk_norm_torch.normed(t.q.to(rotate_torch.compute_dtype(t.q, t.cos)), norm_eps)
    q = q.masked_fill(rstd.isinf(), 0)  # zeros stay zeros where eps is 0
    t.q_out.copy_(_turned(q, t, rotation, first_position))
    kv = _turned(t.kv[None, :, None], t, rotation, first_position)[0, :, 0].to(t.kv.dtype)
    capacity = len(t.kv_cache) * page.tokens
    has_slot = (t.slots >= 0) & (t.slots < capacity)
    slots, kv = t.slots[has_slot].long(), kv[: len(t.slots)][has_slot]
    values, exponents = scaled(kv[:, : page.nope_dim], blocks_of_cache(block_dim))
    data, scales = rows_of_cache(t.kv_cache, page)
    row = slots // page.tokens, slots % page.tokens
    data[row] = torch.cat((values.view(torch.uint8), kv[:, page.nope_dim :].contiguous().view(torch.uint8)), -1)
    scales[row] = torch.nn.functional.pad(exponents, (0, page.scale_bytes - page.scales)).to(torch.uint8)


def rows_of_cache(kv_cache: torch.Tensor, page: Page) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of data ``[pages, page.tokens, page.data_bytes]`` and of scales, both views of the cache."""
    end = page.tokens * page.data_bytes
    data, scales = kv_cache[:, :end], kv_cache[:, end : page.bytes]
    return data.unflatten(1, (page.tokens, -1)), scales.unflatten(1, (page.tokens, -1))


def scaled(y: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """``y [..., D]`` in float8_e4m3fn, and the exponents of its blocks with the bias 127, int32 ``[..., D / dim]``."""
    y = y.float().unflatten(-1, (-1, blocks.dim))
    amax = y.abs().nan_to_num(0.0, posinf=float("inf")).amax(-1, keepdim=True).clamp_min(blocks.amax_epsilon)
    exponents = ((amax.contiguous().view(torch.int32) + ABOVE_LARGEST) >> 23) - E4M3_EXPONENT
    values = to_float8(y * power_of_two(254 - exponents), torch.float8_e4m3fn)
    return values.flatten(-2), exponents.squeeze(-1)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """``2^(exponents - 127)`` in float32."""
    return (exponents << 23).view(torch.float32)


def _packed(exponents: torch.Tensor) -> torch.Tensor:
    """Four exponents in an int32, the first in its lowest byte."""
    return exponents.to(torch.uint8).contiguous().view(torch.int32)


def _turned(x: torch.Tensor, t, rotation: Rotation, first_position: int) -> torch.Tensor:
    """The rotated ``x [B, S, H, D]`` in the dtype of the arithmetic."""
    x = x.to(rotate_torch.compute_dtype(x, t.cos))
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    rotate_torch.rotate(RotateTensors.of([x], [turned], t.cos, t.sin, t.positions), rotation, first_position)
    return turned
