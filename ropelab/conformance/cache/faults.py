"""A catalogue of faults of operators that rotate and write a paged cache, each with its source."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ropelab.conformance.cache.correct import FORMS, Operator
from ropelab.conformance.cache.correct_block_scales import BlockScaled
from ropelab.conformance.faults.fault import Fault, fault
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8


def cache_fault(sentence: str, *, convention: str = "rope_and_cache", **about) -> Callable[[type], Fault]:
    """Return a decorator that makes a wrong operator, in the form of a convention, the fault of its name.

    The class is an `Operator`, or `BlockScaled` for a convention with block scales.

    Args:
        sentence: the mistake.
        convention: a name of ``CACHE_CONVENTIONS``.
        about: the other attributes of `Fault`.
    """

    def make(operator: type) -> Fault:
        function = FORMS[convention](operator())
        function.__name__ = operator.__name__
        return fault(sentence, convention=convention, **about)(function)

    return make


# ----------------------------------------------------------------------------------------------------------- slots


@cache_fault(
    "The block of a slot is counted from one.",
    symptom="attention reads blocks that nobody wrote",
    seen_in=None,
    must_fail=("definition", "other_slots_unchanged", "cache_arrangement"),
)
class SlotOffByOneBlock(Operator):
    def address(self, slots, cache, other):
        return (slots // cache.shape[1] + 1) % cache.shape[0], slots % cache.shape[1]


@cache_fault(
    "Slots are divided by the block size of another view of the cache.",
    symptom="an illegal memory access, or rows in blocks of other sequences",
    seen_in="vllm#47056",
    must_fail=("definition", "other_slots_unchanged", "cache_arrangement"),
)
class BlockSizeOfAnotherView(Operator):
    def address(self, slots, cache, other):
        size = max(1, cache.shape[1] // 4)
        return slots // size % cache.shape[0], slots % size


@cache_fault(
    "A negative slot counts from the end of the cache, as in Python.",
    symptom="the padding of a CUDA graph overwrites the last slot",
    seen_in="vllm#43810",
    must_fail=("skipped_slots", "other_slots_unchanged"),
)
class SkippedSlotsWritten(Operator):
    def live(self, slots, cache):
        capacity = cache.shape[0] * cache.shape[1]
        return torch.arange(len(slots), device=slots.device), slots.clamp(min=-capacity) % capacity


@cache_fault(
    "Tokens without a slot are written to slot 0, which is reserved for padding.",
    symptom="NaN of a padding row reaches every request that reads the reserved slot",
    seen_in="sglang#36207",
    convention="concat_and_cache_mla_rope_fused",
    must_fail=("skipped_slots", "other_slots_unchanged"),
)
class SkippedSlotsWrittenToSlotZero(Operator):
    def live(self, slots, cache):
        # The tokens with a slot come last, so that they win where a token has slot 0.
        order = torch.argsort((slots >= 0).long(), stable=True)
        return order, slots[order].clamp(min=0)


@cache_fault(
    "The number of tokens is taken for the number of slots.",
    symptom="under padding the kernel reads past the slots and writes anywhere",
    seen_in="vllm#13922",
    must_fail=("fewer_slots",),
)
class MoreTokensThanSlots(Operator):
    def __call__(self, q, k, v, key_cache, value_cache, slots, **options):
        # Zeros stand for the memory behind the slots.
        slots = torch.nn.functional.pad(slots, (0, len(q) - len(slots)))
        return super().__call__(q, k, v, key_cache, value_cache, slots, **options)


@cache_fault(
    "The offset of a slot is computed in int32, here in 10 bits.",
    symptom="an illegal memory access, or rows at wrong addresses, in a large cache",
    seen_in="vllm#1486",
    must_fail=("definition", "other_slots_unchanged"),
)
class OffsetsOverflow(Operator):
    def write(self, cache, slots, rows, scale, other):
        # The model overflows after 2^10 elements, because a test cannot fill a cache of 2^31 elements.
        offsets = slots * cache.stride(1)
        super().write(cache, offsets % 2**10 // cache.stride(1), rows, scale, other)


# --------------------------------------------------------------------------------------------------------- strides


@cache_fault(
    "The value cache is addressed by the strides of the key cache.",
    symptom="silent corruption when keys and values have different layouts",
    seen_in="aiter#4531 (review)",
    must_fail=("other_slots_unchanged", "cache_arrangement"),
)
class StrideOfTheWrongCache(Operator):
    def write(self, cache, slots, rows, scale, other):
        same_place = cache.shape == other.shape and cache.storage_offset() > other.storage_offset()
        if same_place and cache.stride() != other.stride():
            cache = cache.as_strided(cache.shape, other.stride(), cache.storage_offset())
        super().write(cache, slots, rows, scale, other)


@cache_fault(
    "The heads of a block are taken to be adjacent, as in NHD.",
    symptom="tokens and heads change places in a cache in HND",
    seen_in="aiter#4356",
    must_fail=("other_slots_unchanged", "cache_arrangement"),
)
class BlocksTakenAsContiguous(Operator):
    def write(self, cache, slots, rows, scale, other):
        blocks, size, heads, features = cache.shape
        dense = (cache.stride(0), heads * features, features, 1)
        super().write(cache.as_strided(cache.shape, dense, cache.storage_offset()), slots, rows, scale, other)


# ---------------------------------------------------------------------------------------------------------- scales


@cache_fault(
    "Values are multiplied by the scale of the cache, not divided.",
    symptom="keys and values are off by the square of the scale",
    seen_in="vllm-xpu-kernels#475",
    convention="concat_and_cache_mla_rope_fused",
    must_fail=("float8", "scale_law"),
)
class ScaleInverted(Operator):
    def divide(self, x, scale):
        return x if scale is None else x.float() * scale


@cache_fault(
    "The scale is not passed on, and 1 is used.",
    symptom="readers multiply by a scale that no writer divided by",
    seen_in="sglang#34765",
    must_fail=("float8", "scale_law"),
)
class ScaleIgnored(Operator):
    def divide(self, x, scale):
        return x.float()


@cache_fault(
    "The scale of the keys serves the values, too.",
    symptom="the values are off by the ratio of both scales",
    seen_in=None,
    must_fail=("float8", "scales_apart"),
)
class ScaleOfKeysForValues(Operator):
    def scale(self, scales, which):
        return scales[1]


@cache_fault(
    "Quotients beyond the largest 8-bit float are not clamped.",
    symptom="NaN or infinity in the cache",
    seen_in="vllm-xpu-kernels#475",
    convention="concat_and_cache_mla_rope_fused",
    must_fail=("float8",),
)
class NotClamped(Operator):
    def convert(self, x, dtype, scale):
        y = super().convert(x, dtype, scale)
        if dtype not in FLOAT8_DTYPES:
            return y
        # Versions of torch differ in their own conversion, so the model writes the code of NaN.
        beyond = ~(self.divide(x, scale).float().abs() <= torch.finfo(dtype).max)
        return y.view(torch.uint8).masked_fill(beyond, 0x7F).view(dtype)


@cache_fault(
    "All heads of a token get the scale of their largest number.",
    symptom="heads with small numbers lose bits",
    seen_in=None,
    convention="rope_and_cache_row_scales",
    must_fail=("row_scales",),
)
class ScaleOfAToken(Operator):
    def row_scale(self, x, dtype):
        scale = super().row_scale(x, dtype)
        return scale.amax(1, keepdim=True).expand(scale.shape)


@cache_fault(
    "The scale that belongs to a slot stays that of the token before.",
    symptom="keys and values come out larger or smaller than they are",
    seen_in=None,
    convention="rope_and_cache_row_scales",
    must_fail=("definition", "float8", "row_scales"),
)
class ScaleNotUpdated(Operator):
    def keep(self, scales, slots, scale):
        pass


# ------------------------------------------------------------------------------------------------------------ norm


@cache_fault(
    "The keys are normalized with the weights of the queries.",
    symptom="wrong scores in models whose norms have different weights",
    seen_in=None,
    must_fail=("definition", "keys_independent"),
)
class WeightsOfQueriesForKeys(Operator):
    def weights(self, q_weight, k_weight):
        return q_weight, q_weight


@cache_fault(
    "The normalized head is rounded to the dtype of the inputs before the weight and the rotation.",
    symptom="two more roundings than the operator declares",
    seen_in="vllm-xpu-kernels#534",
    options={"dtype": torch.bfloat16, "maths": "wide"},
    must_fail=("definition",),
    only_definition="the additional roundings are the same in every call",
)
class NormAfterRounding(Operator):
    def __call__(self, q, *arguments, **options):
        self.dtype = q.dtype
        return super().__call__(q, *arguments, **options)

    def norm(self, x, weight, eps, offset, wide):
        one = torch.ones_like(weight)
        normed = super().norm(x, one, eps, 0.0, wide).to(self.dtype).to(wide)
        return (normed * (weight.to(wide) + offset)).to(self.dtype).to(wide)


@cache_fault(
    "eps is added to the root of the mean, not to the mean.",
    symptom="small heads come out too small",
    seen_in=None,
    must_fail=("definition",),
    only_definition="a norm with another eps is a norm as well",
)
class EpsOutsideOfTheRoot(Operator):
    def norm(self, x, weight, eps, offset, wide):
        x = x.to(wide)
        return x / (x.square().mean(-1, keepdim=True).sqrt() + eps**0.5) * (weight.to(wide) + offset)


@cache_fault(
    "The weights are used as stored where the model multiplies by 1 + w.",
    symptom="heads are nearly zero in Gemma's and Qwen3-Next's attention",
    seen_in=None,
    must_fail=("definition",),
    only_definition="it is right for other weights",
)
class WeightOffsetIgnored(Operator):
    def norm(self, x, weight, eps, offset, wide):
        return super().norm(x, weight, eps, 0.0, wide)


@cache_fault(
    "The heads are normalized before the rotation where the model normalizes the rotated heads.",
    symptom="slightly wrong scores in Hunyuan's attention",
    seen_in="vllm-metal#660",
    options={"norm_last": True},
    must_fail=("definition",),
    only_definition="the order does not matter if both features of every pair have one weight",
)
class NormBeforeTheRotation(Operator):
    def turned(self, x, weight, cos, sin, layout, norm_last, eps, offset, wide):
        return super().turned(x, weight, cos, sin, layout, False, eps, offset, wide)


@cache_fault(
    "Every head is normalized by itself where the model normalizes all heads of a token together.",
    symptom="heads of different sizes come out alike, in OLMo's and Wan's attention",
    seen_in="vllm-metal#691",
    options={"norm_across": True},
    must_fail=("definition",),
    only_definition="a norm of each head is a norm as well",
)
class NormOfEachHead(Operator):
    def normalized(self, x, weight, eps, offset, wide):
        return self.norm(x, weight.view(-1, x.shape[-1]), eps, offset, wide)


@cache_fault(
    "A norm across heads takes the mean over the heads of one rank of tensor parallelism, here over half of them.",
    symptom="results depend on the number of GPUs",
    seen_in="gpt-neox#1424",
    options={"norm_across": True},
    must_fail=("definition",),
    only_definition="a norm of half of the heads is a norm as well",
)
class NormOverTheHeadsOfARank(Operator):
    def normalized(self, x, weight, eps, offset, wide):
        if len(weight) == x.shape[-1]:
            return super().normalized(x, weight, eps, offset, wide)
        ranks = zip(x.tensor_split(2, dim=1), weight.view(-1, x.shape[-1]).tensor_split(2), strict=True)
        parts = [Operator.normalized(self, y, w.flatten(), eps, offset, wide) for y, w in ranks]
        return torch.cat(parts, dim=1)


# -------------------------------------------------------------------------------------------------------- rotation


@cache_fault(
    "Without tables, the angle is a product in float32.",
    symptom="the rotation drifts with the position",
    seen_in="imp#1316",
    options={"table_free": True},
    must_fail=("definition",),
    only_definition="the errors of the angles are small at the positions of the laws",
)
class AnglesInFloat32(Operator):
    def angles(self, positions, per_position):
        return positions.float()[:, None] * per_position.float()


@cache_fault(
    "The shared key is rotated in place, and once more on its way to the cache.",
    symptom="scores depend on absolute positions",
    seen_in=None,
    convention="concat_and_cache_mla_rope_fused",
    must_fail=("definition", "relative_position", "stored_is_the_result"),
)
class KeyTurnedTwice(Operator):
    def rotate(self, x, cos, sin, layout):
        self.again = cos, sin, layout
        return super().rotate(x, cos, sin, layout)

    def stored(self, turned, k):
        return super().rotate(turned, *self.again).to(k.dtype)


@cache_fault(
    "A cached key turns back by its delta.",
    symptom="attention to a reused prefix fades with the shift",
    seen_in=None,
    convention="rotate_cached_keys",
    must_fail=("definition", "float8"),
)
class CachedKeyTurnedBack(Operator):
    def turn_by(self, cos, sin):
        return cos, -sin


@cache_fault(
    "The cache gets k as it was before the rotation.",
    symptom="scores depend on absolute positions",
    seen_in=None,
    must_fail=("definition", "relative_position", "stored_is_the_result"),
)
class KeyStoredBeforeTheRotation(Operator):
    def stored(self, turned, k):
        return k


@cache_fault(
    "Positions are read as in the padded batch, although the tokens without a slot were removed.",
    symptom="after the first padding every token turns by the angle of another token",
    seen_in="sglang#33253",
    must_fail=("definition",),
)
class PositionsOfThePaddedBatch(Operator):
    def positions(self, positions, slots):
        live = torch.nn.functional.pad(slots, (0, len(positions) - len(slots)), value=-1) >= 0
        index = (live.long().cumsum(0) - 1).clamp(min=0)
        return positions.long()[index]


# ---------------------------------------------------------------------------------------------------- block scales

_ONLY_THE_DEFINITION = "the wrong numbers are the same in every call, and lie where the right ones belong"


@cache_fault(
    "The output of attention keeps the rotation of the values: it is not rotated back.",
    symptom="the output depends on absolute positions, and the loss stays high",
    seen_in="Primus#928",
    convention="rope_and_quantize",
    must_fail=("definition", "float8"),
    only_definition=_ONLY_THE_DEFINITION,
)
class RotationNotInverted(BlockScaled):
    def direction(self, sin, inverse):
        return sin


@cache_fault(
    "The scale is the power of two below the largest magnitude over the largest 8-bit float, not the one above.",
    symptom="the largest features of most blocks are clamped",
    seen_in="humming#39",
    convention="rope_and_quantize",
    must_fail=("definition", "float8"),
    only_definition=_ONLY_THE_DEFINITION,
)
class ScaleRoundedDown(BlockScaled):
    def exponents(self, amax):
        significand, _ = torch.frexp(amax)
        return super().exponents(amax) - (significand != 0.875).int()  # 448 is 0.875 times 2^9


@cache_fault(
    "The scales of the groups of a token change places: features meet the scale of the neighbouring group.",
    symptom="garbage from the grouped output projection of DeepSeek-V4",
    seen_in="sglang#29036",
    convention="rope_and_quantize",
    must_fail=("definition", "float8"),
    only_definition=_ONLY_THE_DEFINITION,
)
class ScaleOfTheNeighbouringGroup(BlockScaled):
    def kept(self, exponents):
        return exponents.roll(exponents.shape[1] // 2, dims=1)


@cache_fault(
    "All rows of a group follow each other, where the reader has the groups of a token side by side.",
    symptom="tokens and groups change places",
    seen_in=None,
    convention="rope_and_quantize",
    must_fail=("definition", "float8", "neighbours"),
)
class RowsInGroupMajorOrder(BlockScaled):
    def place(self, out):
        tokens, groups, features = out.shape
        return super().place(out).as_strided(out.shape, (features, tokens * features, 1))


@cache_fault(
    "The first of four exponents is in the highest byte of an int32.",
    symptom="blocks get the scales of other blocks",
    seen_in=None,
    convention="rope_and_quantize_packed",
    must_fail=("definition", "float8"),
    only_definition=_ONLY_THE_DEFINITION,
)
class FirstExponentInTheHighestByte(BlockScaled):
    def packed(self, exponents):
        return super().packed(exponents.unflatten(-1, (-1, 4)).flip(-1).flatten(-2))


@cache_fault(
    "Four scales that are no powers of two are packed without a mask: their significands reach the exponents below.",
    symptom="NaN, or far too large numbers, on GPUs that read packed scales",
    seen_in="DeepGEMM#337",
    convention="rope_and_quantize_packed",
    must_fail=("definition", "float8"),
    only_definition=_ONLY_THE_DEFINITION,
)
class SignificandsInPackedScales(BlockScaled):
    def exponents(self, amax):
        self.scale_bits = (amax / 448).view(torch.int32)
        return super().exponents(amax)

    def packed(self, exponents):
        first, second, third, fourth = self.scale_bits.reshape(*exponents.shape[:2], -1, 4).unbind(-1)
        return (first >> 23) | (second >> 15) | (third >> 7) | (fourth << 1)


@cache_fault(
    "The features that rotate become 8-bit floats as well, with the scale of features before them.",
    symptom="the rotated features are clamped, because they are larger than the others",
    seen_in="vllm#42956",
    convention="rope_and_block_scaled_cache",
    options={"dtype": torch.bfloat16},
    must_fail=("definition", "float8"),
    only_definition=_ONLY_THE_DEFINITION,
)
class RotatedFeaturesInEightBits(BlockScaled):
    def stored(self, turned, exponents):
        scale = torch.exp2(exponents[:, -1:].float())
        return (to_float8(turned.float() / scale, FLOAT8_DTYPES[0]).float() * scale).to(turned.dtype)


CACHE_FAULTS: dict[str, Fault] = {value.name: value for value in list(vars().values()) if isinstance(value, Fault)}
"""Name -> fault."""
