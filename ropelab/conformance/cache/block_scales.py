"""The calling conventions of operators that store 8-bit floats with a scale for each block of features.

What such an operator writes lies in a memory of bytes. The key cache of a case has the bytes of the features, and the
value cache has those of the scales. A convention reads both as numbers that the definition has, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ropelab.conformance.block_scale_bounds import E4M3, exponent_range
from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, NO_ROUNDING, Rounding
from ropelab.conformance.cache.case import CacheCase, numbers
from ropelab.conformance.cache.convention import CacheConvention, Written, positions_of
from ropelab.conformance.cache_bounds import float8_bound
from ropelab.conformance.case import Broken, NotApplicable
from ropelab.conformance.convention import Arguments

BIAS = 127
WEIGHT_SCALE = 0.375
Bounded = tuple[np.ndarray, np.ndarray]


class BlockScales(CacheConvention):
    """A convention of an operator with block scales.

    Attributes:
        amax_epsilon: the least magnitude that a scale is made of.
    """

    partial = True
    float8_only = True
    scales_differ = False
    rotates_last = True
    signed = True
    fewer_slots = False
    orders = ("layers",)
    layouts = ("interleaved",)
    amax_epsilon = 1e-4

    def block_dim(self, features: int) -> int:
        """Return the features of a block: a power of two."""
        raise NotImplementedError

    def scaled_features(self, case: CacheCase) -> int:
        """Return how many features of a head are in 8-bit floats: the first."""
        return case.inputs[1].shape[-1]

    def read(self, case: CacheCase, memory: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Return what the memory says of the tokens with a slot: features ``[n, H, D]``, the exponents of their scales
        ``[n, H, blocks]``, and where the operator writes more, that."""
        raise NotImplementedError

    def truth(self, case: CacheCase, y: np.ndarray, error: np.ndarray) -> tuple[Bounded, ...]:
        """Return value and bound of what `read` returns, from the exact features and their bound before 8-bit floats.

        A stored number times its scale is off by E, and by half a unit in the last place of the 8-bit float. This unit
        times the scale is largest for the largest scale that E allows.
        """
        if case.inputs[1].dtype == torch.float64:  # the scale and the quotient follow from float32
            error = error + Rounding.nearest(torch.float32).of(abs(y) + error)
        block_dim = self.block_dim(y.shape[-1])
        blocks = (*y.shape[:-1], y.shape[-1] // block_dim, block_dim)
        lowest, highest = exponent_range(y.reshape(blocks), error.reshape(blocks), self.amax_epsilon)
        scale = np.repeat(np.ldexp(EXACT(1), highest), block_dim, -1)
        bound = float8_bound(y, error, scale, E4M3, NO_ROUNDING) * scale
        return (y, bound), ((lowest + highest) / EXACT(2), (highest - lowest) / EXACT(2))


class RopeAndQuantize(BlockScales):
    """The convention of `ropelab.rope_and_quantize` for the inverse rotation: token t has row t of the results."""

    name = "rope_and_quantize"
    signature = (
        "fn(x, *, cos, sin, groups, block_dim, scale_dtype, amax_epsilon, inverse, positions, rotary_slice, out, "
        "scales), with scales in float32"
    )
    addressed = False
    queries = False
    inverse = True
    unrounded = True
    amax_epsilon = 1e-10
    scale_dtype = torch.float32

    def block_dim(self, features):
        return max(4, min(128, _power_of_two(features) // 4))

    def extents(self, sizes):
        return sizes.q_heads, 1

    def cached(self, heads, dim, value_dim, rotary_dim, itemsize):
        blocks = heads * dim // self.block_dim(dim) // _groups(heads)
        return (heads, dim), (_groups(heads), blocks * (1 if self.scale_dtype == torch.int32 else 4))

    def arguments(self, implementation, case, key_cache, value_cache):
        options, out = _options(self, implementation, case), _rows(case, key_cache).view(E4M3)
        heads, head_dim = out.shape[1:]
        groups, block_dim = _groups(heads), self.block_dim(head_dim)
        if head_dim % block_dim or value_cache.shape[-1] % 4:
            raise NotApplicable(f"{self.name}: {head_dim} features and {heads} heads do not fill blocks and int32")
        options |= {
            "groups": groups, "block_dim": block_dim, "scale_dtype": self.scale_dtype, "inverse": True,
            "amax_epsilon": self.amax_epsilon, "out": out.view(len(out), groups, -1),
            "scales": _rows(case, value_cache).view(self.scale_dtype),
        }  # fmt: skip
        return Arguments((key_cache,), (case.inputs[1][0],), options)

    def outputs(self, case, returned, arguments, memory):
        return Written(None, None, memory)

    def read(self, case, memory):
        values, scales = case.rows(memory)
        if self.scale_dtype == torch.int32:
            exponents = numbers(scales) - BIAS
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                exponents = np.log2(numbers(scales.view(torch.float32)))
        exponents = exponents.reshape(*values.shape[:2], -1)
        return _scaled(numbers(values.view(E4M3)), exponents), exponents


class RopeAndQuantizePacked(RopeAndQuantize):
    """The convention of `ropelab.rope_and_quantize` for the exponents of four blocks in an int32."""

    name = "rope_and_quantize_packed"
    signature = RopeAndQuantize.signature.replace("float32", "int32")
    scale_dtype = torch.int32


class RopeAndQuantizeIndexer(BlockScales):
    """The convention of `ropelab.rope_and_quantize_indexer`: token t has row t, and v is the weight of each head."""

    name = "rope_and_quantize_indexer"
    signature = (
        "fn(q, weights, *, cos, sin, weight_scale, amax_epsilon, positions, rotary_slice, out, weights_out)"
    )  # fmt: skip
    addressed = False
    queries = False

    def block_dim(self, features):
        return features

    def extents(self, sizes):
        return sizes.q_heads, 1

    def cached(self, heads, dim, value_dim, rotary_dim, itemsize):
        return (heads, dim), (heads, 4)

    def arguments(self, implementation, case, key_cache, value_cache):
        _, q, weights = (x[0] for x in case.inputs)
        if q.shape[-1] != max(4, _power_of_two(q.shape[-1])):
            raise NotApplicable(f"{self.name}: {q.shape[-1]} features are no power of two from 4 on")
        options = _options(self, implementation, case) | {
            "weight_scale": WEIGHT_SCALE, "amax_epsilon": self.amax_epsilon, "out": _rows(case, key_cache).view(E4M3),
            "weights_out": _rows(case, value_cache).view(torch.float32)[..., 0],
        }  # fmt: skip
        return Arguments((key_cache,), (q, weights[..., 0].float()), options)

    def outputs(self, case, returned, arguments, memory):
        return Written(None, None, memory)

    def read(self, case, memory):
        """The third result is the weight, divided by its scale and by what it was before: 1, but for rounding."""
        values, folded = case.rows(memory)
        given = numbers(case.inputs[2][0].float()) * WEIGHT_SCALE
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = numbers(folded.view(torch.float32)) / given
            exponents = np.rint(np.log2(ratio))
        return _scaled(numbers(values.view(E4M3)), exponents), exponents, ratio / np.exp2(exponents)

    def truth(self, case, y, error):
        """An operator may multiply by the factors of the scale one by one: three roundings."""
        one = np.ones((*y.shape[:-1], 1), EXACT)
        return *super().truth(case, y, error), (one, one * ((1 + EXACT(FLOAT32_UNIT)) ** 3 - 1))


class RopeAndBlockScaledCache(BlockScales):
    """The convention of `ropelab.rope_and_block_scaled_cache`: k has one head, and v is left out.

    A row of the key cache has the features before the rotation in 8-bit floats, and the others in the dtype of k. A row
    of the value cache has the exponents of the scales.
    """

    name = "rope_and_block_scaled_cache"
    signature = (
        "fn(q, kv, kv_cache, slot_mapping, *, cos, sin, block_size, eps, block_dim, positions, rotary_slice, q_out) "
        "-> q_out, in bfloat16 or float16"
    )
    dtypes = (torch.bfloat16, torch.float16)
    norm = True
    weighted = False
    fewer_slots = True

    def block_dim(self, features):
        return min(64, _power_of_two(features))

    def scaled_features(self, case):
        return super().scaled_features(case) - case.rotary_dim

    def extents(self, sizes):
        return 1, 1

    def cached(self, heads, dim, value_dim, rotary_dim, itemsize):
        nope = dim - rotary_dim
        scales = nope // self.block_dim(nope) if nope else 0
        return (1, nope + rotary_dim * itemsize), (1, -(-scales // 4) * 4)

    def arguments(self, implementation, case, key_cache, value_cache):
        q, k, _ = (x[0] for x in case.inputs)
        nope, size = q.shape[-1] - case.rotary_dim, key_cache.shape[1]
        if q.dtype not in self.dtypes or nope % 4 or not nope:
            raise NotApplicable(
                f"{self.name}: expected bfloat16 or float16, and a multiple of 4 features that do not rotate, got "
                f"{q.dtype} and {nope}"
            )
        page = key_cache.as_strided(
            (len(key_cache), size * (key_cache.shape[-1] + value_cache.shape[-1])), (key_cache.stride(0), 1)
        )
        q_out = torch.full_like(q, float("nan"))
        options = _options(self, implementation, case) | {
            "block_size": size, "eps": case.eps, "block_dim": self.block_dim(nope), "q_out": q_out,
        }  # fmt: skip
        return Arguments((page, q_out), (q, k[:, 0], page, case.slots.clone()), options)

    def outputs(self, case, returned, arguments, memory):
        q_out = arguments.keywords["q_out"]
        if not isinstance(returned, torch.Tensor) or returned.data_ptr() != q_out.data_ptr():
            raise Broken(f"the function, called as {self.signature}, returned another tensor than q_out")
        return Written(q_out, None, memory)

    def read(self, case, memory):
        """The third result has the bytes behind the exponents: zeros."""
        data, scales = case.rows(memory)
        nope = case.inputs[1].shape[-1] - case.rotary_dim
        blocks = nope // self.block_dim(nope)
        exponents = numbers(scales[..., :blocks]) - BIAS
        stored = _scaled(numbers(data[..., :nope].contiguous().view(E4M3)), exponents)
        turned = numbers(data[..., nope:].contiguous().view(case.inputs[1].dtype))
        return np.concatenate((stored, turned), -1), exponents, numbers(scales[..., blocks:])

    def truth(self, case, y, error):
        nope = y.shape[-1] - case.rotary_dim
        (stored, bound), exponents = super().truth(case, y[..., :nope], error[..., :nope])
        blocks = exponents[0].shape[-1]
        zeros = np.zeros((*y.shape[:-1], -blocks % 4), EXACT)
        features = np.concatenate((stored, y[..., nope:]), -1), np.concatenate((bound, error[..., nope:]), -1)
        return features, exponents, (zeros, zeros)


BLOCK_SCALES: tuple[BlockScales, ...] = (
    RopeAndQuantize(), RopeAndQuantizePacked(), RopeAndQuantizeIndexer(), RopeAndBlockScaledCache(),
)  # fmt: skip
PARTS = ("stored features", "exponents of scales", "what else is stored")
"""The results of `BlockScales.read`."""


def parts(subject, case: CacheCase, memory: torch.Tensor) -> Iterator[tuple[str, np.ndarray, Bounded]]:
    """Yield name, value and truth of what an operator stored for the tokens with a slot."""
    kind, live = subject.convention, case.live.numpy()
    value, bound = subject.expected(case)[1]
    yield from zip(PARTS, kind.read(case, memory), kind.truth(case, value[live], bound[live]), strict=False)


def _options(convention: CacheConvention, implementation, case: CacheCase) -> dict:
    """Return the keyword arguments that say where the tokens are, and which features turn: the last."""
    dim = case.inputs[0].shape[-1]
    return {
        **convention.angles(implementation, case), "positions": positions_of(implementation, case),
        "rotary_slice": (dim - case.rotary_dim, dim),
    }  # fmt: skip


def _rows(case: CacheCase, cache: torch.Tensor) -> torch.Tensor:
    """Return the rows of all tokens, ``[T, heads, bytes]``."""
    if not torch.equal(case.slots.cpu(), torch.arange(case.tokens)) or len(cache) != 1:
        raise NotApplicable("the row of a token is its place among the tokens")
    return cache[0]


def _scaled(values: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return the features that stored numbers and the exponents of their scales stand for."""
    return values * np.repeat(np.exp2(exponents), values.shape[-1] // exponents.shape[-1], -1)


def _groups(heads: int) -> int:
    return 2 if heads % 2 == 0 else 1


def _power_of_two(number: int) -> int:
    """Return the largest power of two that divides a number."""
    return number & -number
