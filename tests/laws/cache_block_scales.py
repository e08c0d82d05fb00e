"""Right operators with block scales in plain torch, method by method, and their form in each convention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ropelab.kernels import NO_POSITION
from ropelab.kernels.float8 import to_float8
from ropelab.study.faults.correct import turn

E4M3 = torch.float8_e4m3fn


class BlockScaled:
    """The passes of `ropelab.block_scales`, which describes the arguments. A fault overrides one method."""

    def quantize(
        self, x, out, scales, *, cos, sin, block_dim, amax_epsilon, positions, rotary_slice, inverse=False,
        round_first=False,
    ) -> torch.Tensor:  # fmt: skip
        """Write heads and the scales of blocks, if there is a tensor for them, and return the exponents."""
        y = self.turned(x, cos, sin, positions, rotary_slice, inverse)
        y = y.to(x.dtype) if round_first else y
        values, exponents = self.blocks(y.float(), block_dim, amax_epsilon)
        out = self.place(out)
        out.copy_(values.view(torch.uint8).reshape(out.shape))
        if scales is not None:
            rows = exponents.reshape(*scales.shape[:2], -1)
            scales.copy_(self.packed(rows) if scales.dtype == torch.int32 else torch.exp2(rows.float()))
        return exponents

    def write(
        self, q, kv, kv_cache, slots, *, cos, sin, block_size, eps, block_dim, positions, rotary_slice, q_out
    ) -> torch.Tensor:
        """Write q and the rows of a cache."""
        wide = q.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        q_out.copy_(self.turned(normed, cos, sin, positions, rotary_slice, False))
        kv = self.turned(kv[:, None], cos, sin, positions, rotary_slice, False)[:, 0].to(kv.dtype)
        tokens = (slots >= 0).nonzero()[:, 0]
        nope, turned = kv[tokens, : rotary_slice[0]], kv[tokens, rotary_slice[0] :].contiguous()
        values, exponents = self.blocks(nope.float(), block_dim, 1e-4)
        row = torch.cat((values.view(torch.uint8), self.stored(turned, exponents).view(torch.uint8)), -1)
        scales = torch.nn.functional.pad(exponents + 127, (0, -exponents.shape[-1] % 4)).to(torch.uint8)
        end = block_size * row.shape[-1]
        parts = kv_cache[:, :end], kv_cache[:, end : end + block_size * scales.shape[-1]]
        for part, rows in zip(parts, (row, scales), strict=True):
            place = slots[tokens] // block_size, slots[tokens] % block_size
            part.unflatten(1, (block_size, -1))[place] = rows
        return q_out

    def turned(self, x, cos, sin, positions, rotary_slice, inverse):
        """Return the rotated heads ``[T, H, D]`` in the precision of the arithmetic."""
        placed, (first, end) = positions != NO_POSITION, rotary_slice
        rows = torch.where(placed, positions, 0)
        wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
        cos, sin = cos[rows.abs()].to(wide), sin[rows.abs()].to(wide) * rows.sign()[:, None]
        sin = self.direction(sin, inverse)
        y = x.to(wide).clone()
        y[..., first:end] = turn(y[..., first:end], cos[:, None], sin[:, None], "interleaved")
        return torch.where(placed[:, None, None], y, 0)

    def direction(self, sin, inverse):
        """Return the sines of the rotation that is wanted."""
        return -sin if inverse else sin

    def blocks(self, y, block_dim, amax_epsilon):
        """Return ``y [..., D]`` in 8-bit floats, and the exponents of the scales ``[..., D / block_dim]``."""
        y = y.unflatten(-1, (-1, block_dim))
        exponents = self.exponents(y.abs().amax(-1).clamp_min(amax_epsilon))
        values = to_float8(torch.ldexp(y, -exponents[..., None]), E4M3)
        return values.flatten(-2), self.kept(exponents)

    def exponents(self, amax):
        """Return ``ceil(log2(amax / 448))``; frexp has ``amax = m 2^k`` with m below 1, and 448 is ``7/8 2^9``."""
        significand, exponent = torch.frexp(amax)
        return exponent - 9 + (significand > 0.875).int()

    def kept(self, exponents):
        """Return the exponents that the operator stores."""
        return exponents

    def packed(self, exponents):
        """Return four exponents in an int32, the first in its lowest byte."""
        return (exponents + 127).to(torch.uint8).contiguous().view(torch.int32)

    def place(self, out):
        """Return the bytes of the result, ``[T, groups, features]``."""
        return out.view(torch.uint8)

    def stored(self, turned, exponents):
        """Return what the cache stores of the features that rotate."""
        return turned


def as_rope_and_quantize(operator: BlockScaled) -> Callable[..., Any]:
    """Return the operator in the convention of `ropelab.rope_and_quantize`."""

    def rope_and_quantize(x, *, groups, scale_dtype, out, scales, **options):
        operator.quantize(x, out, scales, **options)
        return out, scales

    return rope_and_quantize


def as_rope_and_quantize_indexer(operator: BlockScaled) -> Callable[..., Any]:
    """Return the operator in the convention of `ropelab.rope_and_quantize_indexer`."""

    def rope_and_quantize_indexer(q, weights, *, weight_scale, out, weights_out, **options):
        exponents = operator.quantize(q, out, None, block_dim=q.shape[-1], round_first=True, **options)
        return out, weights_out.copy_(torch.ldexp(weights.float() * weight_scale, exponents[..., 0]))

    return rope_and_quantize_indexer


def as_rope_and_block_scaled_cache(operator: BlockScaled) -> Callable[..., Any]:
    """Return the operator in the convention of `ropelab.rope_and_block_scaled_cache`."""

    def rope_and_block_scaled_cache(q, kv, kv_cache, slot_mapping, **options):
        return operator.write(q, kv, kv_cache, slot_mapping, **options)

    return rope_and_block_scaled_cache


BLOCK_FORMS: dict[str, Callable[[BlockScaled], Callable[..., Any]]] = {
    "rope_and_quantize": as_rope_and_quantize,
    "rope_and_quantize_packed": as_rope_and_quantize,
    "rope_and_quantize_indexer": as_rope_and_quantize_indexer,
    "rope_and_block_scaled_cache": as_rope_and_block_scaled_cache,
}
"""Convention -> the function that gives an operator that form."""
