"""An operator under test: it takes cases, next to the exact results and their bounds."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.bounds import (
    EXACT,
    FLOAT32_UNIT,
    NO_ROUNDING,
    REFERENCE,
    Arithmetic,
    Rounding,
    exact,
    rotate_exactly,
    table_angle_error,
)
from ropelab.conformance.cache.block_scales import BlockScales
from ropelab.conformance.cache.case import CacheCase, arranged
from ropelab.conformance.cache.convention import ROWS, CacheConvention, Written
from ropelab.conformance.cache_bounds import (
    DIVIDE,
    cache_bound,
    float8_bound,
    norm_bound,
    norm_error,
    rms_norm,
    row_scale,
)
from ropelab.conformance.case import Sizes
from ropelab.conformance.convention import call, check_tensor
from ropelab.conformance.implementation import Implementation
from ropelab.kernels import NO_POSITION
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8
from ropelab.layout.pairing import pairs

BLOCK_SIZE = 16
"""The slots of a block in most cases, as by default in vLLM and FlashInfer."""
SCALES = (0.75, 0.40625, 0.15625)
"""The scales of 8-bit floats in most cases: none is another times a power of two, and no value of most cases is beyond
the largest number."""

Bounded = tuple[np.ndarray, np.ndarray]


def _nearest(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return the values nearest to ``x`` that 8-bit floats of a scale have."""
    return (to_float8(x.float() / scale, dtype).float() * scale).to(x.dtype)


@dataclass(frozen=True)
class CacheSubject(Implementation):
    """An operator with the convention by which it is called.

    ``subject(case)`` calls the function on copies of everything that it may overwrite.

    Attributes:
        convention: how to call the function.
        norm_last: whether the norm comes after the rotation (Hunyuan), not before it (Qwen3).
        norm_across: whether all heads of q, and all heads of k, of a token share a norm (Wan, OLMo 2).
        table_free: whether the caller passes frequencies (`ropelab.rotary_frequencies`) in place of tables.

    `Implementation` describes the other attributes.
    """

    convention: CacheConvention
    _: KW_ONLY
    norm_last: bool = False
    norm_across: bool = False
    table_free: bool = False

    # ---------------------------------------------------------------------------------- how the function is called

    def draw(
        self,
        sizes: Sizes,
        *,
        cache_dtype: torch.dtype | None = None,
        norm: bool | None = None,
        skipped: bool = True,
        order: str | None = None,
        block_size: int = BLOCK_SIZE,
        wider: int = 0,
        weight_offset: float = 0.0,
        seed: int = 0,
    ) -> CacheCase:
        """Return a case of standard normal numbers at random positions and slots, with ``batch * tokens`` tokens.

        Args:
            sizes: the extents of the inputs.
            cache_dtype: the dtype of the caches; by default the subject's dtype, or e4m3 where a convention has 8-bit
                floats only.
            norm: whether the operator normalizes; by default it does if it can.
            skipped: whether every third token has no slot.
            order: the arrangement of the caches, one of `ORDERS`; by default the first of the convention.
            block_size: the slots of a block.
            wider: how many more features a head of v has than usual.
            weight_offset: as for `CacheCase`; for a convention with an offset.
            seed: two cases of one seed and one size have the same numbers.
        """
        kind = self.convention
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(self.device)

        tokens, dim = sizes.batch * sizes.tokens, sizes.head_dim
        heads, value_dim = kind.extents(sizes)
        value_dim += wider
        inputs = tuple(normal(1, tokens, *shape) for shape in ((sizes.q_heads, dim), (heads, dim), (heads, value_dim)))
        wants_norm = kind.norm if norm is None else norm
        shares = [x.shape[2] if self.norm_across else 1 for x in inputs[:2]]
        weights = tuple(normal(n * dim) for n in shares) if wants_norm else ()
        if wants_norm and not kind.weighted:
            weights = (torch.ones(dim, dtype=self.dtype, device=self.device),)
        blocks = -(-(2 * tokens + 3) // block_size) + 1
        slots = torch.randperm(blocks * block_size - 1, generator=generator)[:tokens]  # the last slot stays free
        if skipped:
            slots[1::3] = -1
        if not kind.addressed:
            blocks, block_size, slots = 1, tokens, torch.arange(tokens)
        float8 = kind.float8_only or cache_dtype in FLOAT8_DTYPES
        cache_dtype = cache_dtype or (FLOAT8_DTYPES[0] if kind.float8_only else self.dtype)
        shapes = kind.cached(heads, dim, value_dim, sizes.rotary_dim, self.dtype.itemsize)
        order = kind.orders[0] if order is None else order
        size, places = arranged(order, blocks, block_size, shapes, kind.latent)
        positions = torch.randint(-ROWS + 1 if kind.signed else 0, ROWS, (tokens,), generator=generator)
        if kind.signed and not kind.turns_cached:
            positions[3::7] = NO_POSITION
        if isinstance(kind, BlockScales):
            memory = torch.randint(256, (size,), generator=generator).to(self.device, torch.uint8)
        else:
            memory = normal(size, dtype=torch.float32).to(cache_dtype)
        scales = SCALES if kind.scales_differ else (SCALES[0], SCALES[1], SCALES[1])
        if kind.turns_cached and float8:  # the keys are values of 8-bit floats, and have few enough bits for the dtype
            inputs = (inputs[0], *(_nearest(x, cache_dtype, s) for x, s in zip(inputs[1:], scales[1:], strict=True)))
        return CacheCase(
            inputs, sizes.rotary_dim, positions=positions, slots=slots.to(self.device), memory=memory, places=places,
            weights=weights, norm_last=self.norm_last, weight_offset=weight_offset,
            scales=scales if float8 else (1.0, 1.0, 1.0),
            q_dtype=cache_dtype if kind.float8_only and not isinstance(kind, BlockScales) else None,
            table_free=self.table_free,
        )  # fmt: skip

    def __call__(self, case: CacheCase, memory: torch.Tensor | None = None) -> Written:
        """Return the results; the case stays as it is.

        Args:
            case: the call.
            memory: the memory of the caches that the call writes; by default a copy of the one of the case.

        Raises:
            NotApplicable: the convention cannot express the case, or the function raised NotImplementedError.
            Broken: the function returned something else than the convention says.
        """
        memory = case.memory.clone() if memory is None else memory
        return self.call(case, self.convention.translate(self, case, memory), memory)

    def call(self, case: CacheCase, arguments, memory: torch.Tensor) -> Written:
        """Call the function on these very tensors."""
        with self.surroundings.theirs():
            returned = call(self.function, arguments, self.convention.signature)
        self.surroundings.returned = True
        written = self.convention.outputs(case, returned, arguments, memory)
        for name in ("q", "k", "v"):
            if (y := getattr(written, name)) is not None:
                check_tensor(name, y, memory.device)
        return written

    # ----------------------------------------------------------------------------------------- the exact results

    def expected(self, case: CacheCase) -> tuple[Bounded, Bounded, Bounded]:
        """Return value and bound of q, k and v before 8-bit floats, ``[T, H, D]`` each, by the definition."""
        return self.part(case, 0), self.part(case, 1), self.part(case, 2)

    def part(self, case: CacheCase, which: int) -> Bounded:
        """Return value and bound of q, k or v (``which`` is 0, 1 or 2).

        An operator may round k to the dtype of the inputs before it converts k to the dtype of the cache; the bound
        allows it.
        """
        value = exact(case.inputs[which][0])
        if which == 2:
            return value, np.zeros_like(value)
        arithmetic = self.arithmetic()
        c, s, table = self.cosines(case)
        turning = replace(arithmetic, table=table, store=NO_ROUNDING)
        value = value * (case.token_positions()[0] != NO_POSITION).numpy()[:, None, None]
        if which >= len(case.weights):
            stored = turning if self.convention.unrounded else replace(turning, store=arithmetic.store)
            return self._turned(value, c, s, case.rotary_dim, stored)
        weight = exact(case.weights[which]) + EXACT(case.weight_offset)
        relative = self.norm_error(case, weight.size)
        if case.norm_last:
            turned, error = self._turned(value, c, s, case.rotary_dim, turning)
            normed = rms_norm(turned, weight, case.eps)
            bound = norm_bound(turned, error, weight, case.eps, relative, arithmetic.compute)
        else:
            normed = rms_norm(value, weight, case.eps)
            normed, bound = self._turned(normed, c, s, case.rotary_dim, turning, relative)
        return normed, bound + arithmetic.store.of(abs(normed) + bound)

    def cosines(self, case: CacheCase) -> tuple[np.ndarray, np.ndarray, Rounding]:
        """Return the exact cos and sin ``[T, 1, R/2]``, and how far the operator's cos and sin may be from them.

        Entries of tables that the caller passes are exact. An operator that gets frequencies computes both itself, to
        within a unit in the last place of float32, and a narrow operator rounds them once more.
        """
        positions = case.token_positions()[0].numpy()
        if not case.table_free and not self.convention.own_angles:
            positions = np.where(positions == NO_POSITION, 0, positions)
            cos, sin = (exact(table)[abs(positions)][:, None] for table in self.convention.tables(self, case))
            sin = sin * np.sign(positions)[:, None, None]
            cast = Rounding.nearest(self.dtype) if self.lenient and not self.narrow else NO_ROUNDING
            return cos, -sin if self.reversed != self.convention.inverse else sin, cast
        frequencies = exact(inverse_frequencies(case.rotary_dim, self.base))
        factor, low, high, attention_factor = case.yarn
        if factor != 1:
            share = np.clip((np.arange(len(frequencies), dtype=EXACT) - low) / (high - low), 0, 1)
            frequencies = frequencies * (1 - share) + frequencies / factor * share
        angles = positions[:, None, None].astype(EXACT) * frequencies
        computed, kept = (
            Rounding.truncating(torch.float32),
            self.arithmetic().compute if self.rounds_operations else NO_ROUNDING,
        )
        unit = (1 + computed.unit) * (1 + kept.unit) * (1 + REFERENCE.unit) - 1
        absolute = computed.underflow + kept.underflow + float(table_angle_error(angles).max(initial=0))
        if (
            self.convention.own_angles
        ):  # as for `ropelab.conformance.rotation_conventions.OwnAngles`, and YaRN's mixture
            inexact = FLOAT32_UNIT * abs(angles) * (3 * abs(np.log(frequencies)) + 10)
            absolute += float(inexact.max(initial=0))
        sines = np.sin(-angles if self.reversed else angles)
        tables = attention_factor * np.cos(angles), attention_factor * sines
        return *tables, Rounding(unit, attention_factor * absolute)

    def _turned(self, value, c, s, rotary_dim: int, arithmetic: Arithmetic, relative: float = 0.0) -> Bounded:
        y, bound = value.copy(), abs(value) * relative
        turning = self.turning(value.shape[-1], rotary_dim)
        pair = pairs(value[..., turning], self.layout)
        bounds = cache_bound(*pair, c, s, arithmetic, relative)
        for whole, parts in ((y, rotate_exactly(*pair, c, s)), (bound, bounds)):
            for features, part in zip(pairs(whole[..., turning], self.layout), parts, strict=True):
                features[...] = part
        return y, bound

    def turning(self, head_dim: int, rotary_dim: int) -> slice:
        """Return the features of a head that turn: the first, or the last."""
        return slice(head_dim - rotary_dim, None) if self.convention.rotates_last else slice(rotary_dim)

    def arithmetic(self) -> Arithmetic:
        """Return the roundings after the norm that a right operator may make on the subject's dtype.

        As for a rotation alone, an operation in 16 bits may be off by a unit in the last place rather than half a unit.
        A wide operator that keeps k in float32 rounds less often.
        """
        wide = torch.promote_types(self.dtype, torch.float32)
        kept = self.dtype if self.rounds_operations else wide
        compute = Rounding.truncating(kept) if kept != wide else Rounding.nearest(kept)
        store = NO_ROUNDING if kept == self.dtype else Rounding.truncating(self.dtype)
        return Arithmetic(NO_ROUNDING, compute, store)

    def norm_error(self, case: CacheCase, features: int) -> float:
        """Return the largest relative error of a normalized feature, for a norm over ``features`` features.

        The norm is in float32 or wider, even in a narrow operator, which rounds the normalized head and its product
        with the weight (and the sum of the weight and an offset) to the dtype of the inputs.
        """
        wide = Rounding.nearest(torch.promote_types(self.dtype, torch.float32))
        offset = bool(case.weight_offset)
        kept = self.arithmetic().compute.unit if self.rounds_operations else 0.0
        error = (1 + EXACT(norm_error(features, wide, offset=offset))) * (1 + EXACT(kept)) ** (3 if offset else 2) - 1
        return float(error + norm_error(features, REFERENCE, offset=offset))

    def stored(
        self,
        case: CacheCase,
        which: int,
        value: np.ndarray,
        bound: np.ndarray,
        dtype: torch.dtype,
        scales: np.ndarray | None = None,
    ) -> Bounded:
        """Return value and bound of a result in ``dtype``: of q, of k in its cache or of v (``which`` is 0, 1 or 2).

        Args:
            scales: those that the operator made, ``[n, H]``; by default those of the case, or those that the exact
                values have.
        """
        if dtype not in FLOAT8_DTYPES:
            return value, bound
        divisor = np.asarray(self.convention.divisor(case.scales[which]), EXACT)
        if scales is not None:
            divisor = scales[..., None]
        elif self.convention.row_scales:
            scales, error = row_scale(value, bound, dtype)
            divisor, bound = scales[..., None], bound + abs(value) * (error / scales)[..., None]
        largest = EXACT(torch.finfo(dtype).max)
        return np.clip(value / divisor, -largest, largest), float8_bound(value, bound, divisor, dtype, DIVIDE)
