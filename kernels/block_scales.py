"""Blocks of features with a common scale, and the page of a cache whose rows have such scales.

A block is a group of adjacent features of a head. Its scale is a power of two, so that a byte holds it (UE8M0 of
the OCP Microscaling Formats): the byte e stands for ``2^(e - 127)``. With the largest magnitude ``amax`` of the block,
the scale is::

    scale = 2^ceil(log2(max(amax, amax_epsilon) / 448))

and the stored number is ``value / scale`` rounded to float8_e4m3fn, whose largest number is 448. This is the recipe of
DeepSeek-V4 (``act_quant`` in ``inference/kernel.py`` of its checkpoint).

The largest number is ``1.75 2^8``. For ``amax = m 2^k`` with ``1 <= m < 2``, the exponent of the scale is ``k - 8`` for
``m <= 1.75``, and ``k - 7`` otherwise. The kernels decide this on the bits of ``amax``: no logarithm and no division
rounds. The product with the reciprocal of the scale is exact too, so a stored number has one rounding: to 8 bits.

A NaN becomes NaN and does not count for ``amax``. A block with an infinity has the scale ``2^120``: the infinity
becomes 448, which that scale makes infinite in float32, and the finite values become zeros.
"""

from dataclasses import dataclass

from ropelab.kernels.rotation import Rotation
from ropelab.kernels.tensors import BlockScaledCacheTensors

E4M3_EXPONENT = 8
"""The exponent of 448, the largest number of float8_e4m3fn."""

ABOVE_LARGEST = 0x1FFFFF
"""The sum of this number and the bits of a float32 has the next exponent if the significand is above that of 448."""


@dataclass(frozen=True)
class Page:
    """The layout of a page of the cache: ``tokens`` rows of data, and after them ``tokens`` rows of scales.

    A row of data has the first ``nope_dim`` features in float8_e4m3fn and then ``rotary_dim`` features in the dtype of
    the input, of ``itemsize`` bytes. A row of scales has a byte for each block of ``block_dim`` features, and zeros up
    to a multiple of four bytes. FlashMLA and vLLM read this layout (``fp8_ds_mla`` of DeepSeek-V4: 448 features with
    seven scales, and 64 features in bfloat16; ``vllm/models/deepseek_v4/common/ops/cache_utils.py`` of vLLM 0.33.0).
    """

    tokens: int
    nope_dim: int
    rotary_dim: int
    block_dim: int
    itemsize: int

    @classmethod
    def of(cls, t: BlockScaledCacheTensors, rotation: Rotation, tokens: int, block_dim: int) -> "Page":
        """The layout for a call: all features before those that rotate become 8-bit floats."""
        return cls(tokens, rotation.first, rotation.rotary_dim, block_dim, t.kv.itemsize)

    @property
    def data_bytes(self) -> int:
        """The bytes of a row of data."""
        return self.nope_dim + self.rotary_dim * self.itemsize

    @property
    def scales(self) -> int:
        """The scales of a row."""
        return self.nope_dim // self.block_dim

    @property
    def scale_bytes(self) -> int:
        """The bytes of a row of scales."""
        return -(-self.scales // 4) * 4

    @property
    def bytes(self) -> int:
        """The bytes of a page; a cache may have more bytes between its pages."""
        return self.tokens * (self.data_bytes + self.scale_bytes)


@dataclass(frozen=True)
class Blocks:
    """How features become 8-bit floats: see `ropelab.block_scales.rope_and_quantize`.

    Attributes:
        dim: the features of a block, a power of two.
        amax_epsilon: the least ``amax``.
        round_first: round the rotated features to the dtype of the input before the scale is computed.
    """

    dim: int
    amax_epsilon: float
    round_first: bool


def blocks_of_cache(dim: int) -> Blocks:
    """How a cache stores blocks of ``dim`` features: as DeepSeek-V4 and vLLM."""
    return Blocks(dim, amax_epsilon=1e-4, round_first=True)
