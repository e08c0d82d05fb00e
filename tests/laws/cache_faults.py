"""A catalogue of faults of operators that rotate and write a paged cache, each with its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8
from ropelab.study.faults.fault import Fault, fault
from tests.laws.cache_block_scales import BlockScaled
from tests.laws.cache_correct import BLOCK_FORMS, FORMS, Operator

SLOTS = "definition", "other_slots_unchanged", "cache_arrangement"
ONE_SCALE = "concat_and_cache_mla_rope_fused"
"""A convention whose caches share a scale."""


def cache_fault(
    sentence: str, method: str = "", *, convention: str = "rope_and_cache", seen_in: str | None = None, **about: Any
) -> Callable[[Any], Fault]:
    """Return a decorator that makes a wrong operator, in the form of a convention, the fault of its name.

    Args:
        sentence: the mistake.
        method: the method that the decorated function takes the place of, in `Operator`, or in `BlockScaled` for a
            convention with block scales; by default the decorated class is the operator.
        convention: a name of ``CACHE_CONVENTIONS``.
        seen_in, about: the other attributes of `Fault`.
    """

    def make(change: Any) -> Fault:
        right = BlockScaled if convention in BLOCK_FORMS else Operator
        operator = type(change.__name__, (right,), {method: change}) if method else change
        function = FORMS[convention](operator())
        function.__name__ = operator.__name__
        return fault(sentence, convention=convention, seen_in=seen_in, **about)(function)

    return make


# ----------------------------------------------------------------------------------------------------------- slots


@cache_fault("The block of a slot is counted from one.", "address",
             symptom="attention reads blocks that nobody wrote", must_fail=SLOTS)  # fmt: skip
def slot_off_by_one_block(operator, slots, cache, other):
    return (slots // cache.shape[1] + 1) % cache.shape[0], slots % cache.shape[1]


@cache_fault("Slots are divided by the block size of another view of the cache.", "address", seen_in="vllm#47056",
             symptom="an illegal memory access, or rows in blocks of other sequences", must_fail=SLOTS)  # fmt: skip
def block_size_of_another_view(operator, slots, cache, other):
    size = max(1, cache.shape[1] // 4)
    return slots // size % cache.shape[0], slots % size


@cache_fault("A negative slot counts from the end of the cache, as in Python.", "live", seen_in="vllm#43810",
             symptom="the padding of a CUDA graph overwrites the last slot",
             must_fail=("skipped_slots", "other_slots_unchanged"))  # fmt: skip
def skipped_slots_written(operator, slots, cache):
    capacity = cache.shape[0] * cache.shape[1]
    return torch.arange(len(slots), device=slots.device), slots.clamp(min=-capacity) % capacity


@cache_fault("Tokens without a slot are written to slot 0, which is reserved for padding.", "live",
             symptom="NaN of a padding row reaches every request that reads the reserved slot",
             seen_in="sglang#36207", convention=ONE_SCALE,
             must_fail=("skipped_slots", "other_slots_unchanged"))  # fmt: skip
def skipped_slots_written_to_slot_zero(operator, slots, cache):
    # The tokens with a slot come last, so that they win where a token has slot 0.
    order = torch.argsort((slots >= 0).long(), stable=True)
    return order, slots[order].clamp(min=0)


@cache_fault("The number of tokens is taken for the number of slots.", "__call__", seen_in="vllm#13922",
             symptom="under padding the kernel reads past the slots and writes anywhere",
             must_fail=("fewer_slots",))  # fmt: skip
def more_tokens_than_slots(operator, q, k, v, key_cache, value_cache, slots, **options):
    # Zeros stand for the memory behind the slots.
    slots = torch.nn.functional.pad(slots, (0, len(q) - len(slots)))
    return Operator.__call__(operator, q, k, v, key_cache, value_cache, slots, **options)


@cache_fault("The offset of a slot is computed in int32, here in 10 bits.", "write", seen_in="vllm#1486",
             symptom="an illegal memory access, or rows at wrong addresses, in a large cache",
             must_fail=("definition", "other_slots_unchanged"))  # fmt: skip
def offsets_overflow(operator, cache, slots, rows, scale, other):
    # The model overflows after 2^10 elements, because a test cannot fill a cache of 2^31 elements.
    offsets = slots * cache.stride(1)
    Operator.write(operator, cache, offsets % 2**10 // cache.stride(1), rows, scale, other)


# --------------------------------------------------------------------------------------------------------- strides


@cache_fault("The value cache is addressed by the strides of the key cache.", "write",
             symptom="silent corruption when keys and values have different layouts",
             seen_in="aiter#4531 (review)", must_fail=("other_slots_unchanged", "cache_arrangement"))  # fmt: skip
def stride_of_the_wrong_cache(operator, cache, slots, rows, scale, other):
    same_place = cache.shape == other.shape and cache.storage_offset() > other.storage_offset()
    if same_place and cache.stride() != other.stride():
        cache = cache.as_strided(cache.shape, other.stride(), cache.storage_offset())
    Operator.write(operator, cache, slots, rows, scale, other)


@cache_fault("The heads of a block are taken to be adjacent, as in NHD.", "write", seen_in="aiter#4356",
             symptom="tokens and heads change places in a cache in HND",
             must_fail=("other_slots_unchanged", "cache_arrangement"))  # fmt: skip
def blocks_taken_as_contiguous(operator, cache, slots, rows, scale, other):
    _, _, heads, features = cache.shape
    dense = cache.as_strided(cache.shape, (cache.stride(0), heads * features, features, 1), cache.storage_offset())
    Operator.write(operator, dense, slots, rows, scale, other)


# ---------------------------------------------------------------------------------------------------------- scales


@cache_fault("Values are multiplied by the scale of the cache, not divided.", "divide",
             symptom="keys and values are off by the square of the scale",
             seen_in="vllm-xpu-kernels#475", convention=ONE_SCALE, must_fail=("float8", "scale_law"))  # fmt: skip
def scale_inverted(operator, x, scale):
    return x if scale is None else x.float() * scale


@cache_fault("The scale is not passed on, and 1 is used.", "divide", seen_in="sglang#34765",
             symptom="readers multiply by a scale that no writer divided by",
             must_fail=("float8", "scale_law"))  # fmt: skip
def scale_ignored(operator, x, scale):
    return x.float()


@cache_fault("The scale of the keys serves the values, too.", "scale",
             symptom="the values are off by the ratio of both scales",
             must_fail=("float8", "scales_apart"))  # fmt: skip
def scale_of_keys_for_values(operator, scales, which):
    return scales[1]


@cache_fault("Quotients beyond the largest 8-bit float are not clamped.", "convert",
             symptom="NaN or infinity in the cache", seen_in="vllm-xpu-kernels#475", convention=ONE_SCALE,
             must_fail=("float8",))  # fmt: skip
def not_clamped(operator, x, dtype, scale):
    y = Operator.convert(operator, x, dtype, scale)
    if dtype not in FLOAT8_DTYPES:
        return y
    # Versions of torch differ in their own conversion, so the model writes the code of NaN.
    beyond = ~(operator.divide(x, scale).float().abs() <= torch.finfo(dtype).max)
    return y.view(torch.uint8).masked_fill(beyond, 0x7F).view(dtype)


@cache_fault("All heads of a token get the scale of their largest number.", "row_scale",
             symptom="heads with small numbers lose bits", convention="rope_and_cache_row_scales",
             must_fail=("row_scales",))  # fmt: skip
def scale_of_a_token(operator, x, dtype):
    scale = Operator.row_scale(operator, x, dtype)
    return scale.amax(1, keepdim=True).expand(scale.shape)


@cache_fault("The scale that belongs to a slot stays that of the token before.", "keep",
             symptom="keys and values come out larger or smaller than they are",
             convention="rope_and_cache_row_scales", must_fail=("definition", "float8", "row_scales"))  # fmt: skip
def scale_not_updated(operator, scales, slots, scale):
    pass


# ------------------------------------------------------------------------------------------------------------ norm


@cache_fault("The keys are normalized with the weights of the queries.", "weights",
             symptom="wrong scores in models whose norms have different weights",
             must_fail=("definition", "keys_independent"))  # fmt: skip
def weights_of_queries_for_keys(operator, q_weight, k_weight):
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


@cache_fault("eps is added to the root of the mean, not to the mean.", "norm", must_fail=("definition",),
             symptom="small heads come out too small",
             only_definition="a norm with another eps is a norm as well")  # fmt: skip
def eps_outside_of_the_root(operator, x, weight, eps, offset, wide):
    x = x.to(wide)
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps**0.5) * (weight.to(wide) + offset)


@cache_fault("The weights are used as stored where the model multiplies by 1 + w.", "norm", must_fail=("definition",),
             symptom="heads are nearly zero in Gemma's and Qwen3-Next's attention",
             only_definition="it is right for other weights")  # fmt: skip
def weight_offset_ignored(operator, x, weight, eps, offset, wide):
    return Operator.norm(operator, x, weight, eps, 0.0, wide)


@cache_fault("The heads are normalized before the rotation where the model normalizes the rotated heads.", "turned",
             symptom="slightly wrong scores in Hunyuan's attention", seen_in="vllm-metal#660",
             options={"norm_last": True}, must_fail=("definition",),
             only_definition="the order does not matter if both features of every pair have one weight")  # fmt: skip
def norm_before_the_rotation(operator, x, weight, cos, sin, layout, norm_last, *of):
    return Operator.turned(operator, x, weight, cos, sin, layout, False, *of)


@cache_fault("Every head is normalized by itself where the model normalizes all heads of a token together.",
             "normalized", symptom="heads of different sizes come out alike, in OLMo's and Wan's attention",
             seen_in="vllm-metal#691", options={"norm_across": True}, must_fail=("definition",),
             only_definition="a norm of each head is a norm as well")  # fmt: skip
def norm_of_each_head(operator, x, weight, *of):
    return operator.norm(x, weight.view(-1, x.shape[-1]), *of)


@cache_fault("A norm across heads takes the mean over the heads of one rank of tensor parallelism, here over half of "
             "them.", "normalized", symptom="results depend on the number of GPUs", seen_in="gpt-neox#1424",
             options={"norm_across": True}, must_fail=("definition",),
             only_definition="a norm of half of the heads is a norm as well")  # fmt: skip
def norm_over_the_heads_of_a_rank(operator, x, weight, *of):
    if len(weight) == x.shape[-1]:
        return Operator.normalized(operator, x, weight, *of)
    ranks = zip(x.tensor_split(2, dim=1), weight.view(-1, x.shape[-1]).tensor_split(2), strict=True)
    return torch.cat([Operator.normalized(operator, y, w.flatten(), *of) for y, w in ranks], dim=1)


# -------------------------------------------------------------------------------------------------------- rotation


@cache_fault("Without tables, the angle is a product in float32.", "angles", seen_in="imp#1316",
             symptom="the rotation drifts with the position", options={"table_free": True}, must_fail=("definition",),
             only_definition="the errors of the angles are small at the positions of the laws")  # fmt: skip
def angles_in_float32(operator, positions, per_position):
    return positions.float()[:, None] * per_position.float()


@cache_fault("The shared key is rotated in place, and once more on its way to the cache.", convention=ONE_SCALE,
             symptom="scores depend on absolute positions",
             must_fail=("definition", "relative_position", "stored_is_the_result"))  # fmt: skip
class KeyTurnedTwice(Operator):
    def rotate(self, x, cos, sin, layout):
        self.again = cos, sin, layout
        return super().rotate(x, cos, sin, layout)

    def stored(self, turned, k):
        return super().rotate(turned, *self.again).to(k.dtype)


@cache_fault("A cached key turns back by its delta.", "turn_by", convention="rotate_cached_keys",
             symptom="attention to a reused prefix fades with the shift",
             must_fail=("definition", "float8"))  # fmt: skip
def cached_key_turned_back(operator, cos, sin):
    return cos, -sin


@cache_fault("The cache gets k as it was before the rotation.", "stored", symptom="scores depend on absolute positions",
             must_fail=("definition", "relative_position", "stored_is_the_result"))  # fmt: skip
def key_stored_before_the_rotation(operator, turned, k):
    return k


@cache_fault("Positions are read as in the padded batch, although the tokens without a slot were removed.",
             "positions", symptom="after the first padding every token turns by the angle of another token",
             seen_in="sglang#33253", must_fail=("definition",))  # fmt: skip
def positions_of_the_padded_batch(operator, positions, slots):
    live = torch.nn.functional.pad(slots, (0, len(positions) - len(slots)), value=-1) >= 0
    return positions.long()[(live.long().cumsum(0) - 1).clamp(min=0)]


@cache_fault("A call with a single token turns by one position too many.", "positions", seen_in="sglang#25015",
             symptom="the first token of an answer is right, and the following ones lose the thread",
             must_fail=("decode",))  # fmt: skip
def decoding_a_position_ahead(operator, positions, slots):
    return positions.long() + (len(positions) == 1)


@cache_fault("Slots that were written are taken to hold accepted tokens, and are not written again.",
             symptom="after a rejected draft the answer differs from the one without drafts", seen_in="mlx-lm#1109",
             must_fail=("drafts",))  # fmt: skip
class RejectedDraftsStay(Operator):
    def __init__(self):
        self.known = {}

    def write(self, cache, slots, rows, scale, other):
        _, written = self.known.setdefault(cache.data_ptr(), (cache, set()))
        self.known = dict(list(self.known.items())[-2:])  # it holds both caches, so that no others have their addresses
        new = torch.tensor([slot not in written for slot in slots.tolist()], dtype=torch.bool, device=slots.device)
        written.update(slots.tolist())
        super().write(cache, slots[new], rows[new], scale if scale is None or scale.numel() < 2 else scale[new], other)


# ---------------------------------------------------------------------------------------------------- block scales


def _block_fault(sentence: str, method: str = "", convention: str = "rope_and_quantize", **about: Any):
    """Return `cache_fault` for wrong numbers that are the same in every call."""
    about = {"must_fail": ("definition", "float8"),
             "only_definition": "the wrong numbers are the same in every call, and lie where the right ones belong",
             **about}  # fmt: skip
    return cache_fault(sentence, method, convention=convention, **about)


@_block_fault("The output of attention keeps the rotation of the values: it is not rotated back.", "direction",
              symptom="the output depends on absolute positions, and the loss stays high",
              seen_in="Primus#928")  # fmt: skip
def rotation_not_inverted(operator, sin, inverse):
    return sin


@_block_fault("The scale is the power of two below the largest magnitude over the largest 8-bit float, not the one "
              "above.", "exponents", symptom="the largest features of most blocks are clamped",
              seen_in="humming#39")  # fmt: skip
def scale_rounded_down(operator, amax):
    significand, _ = torch.frexp(amax)
    return BlockScaled.exponents(operator, amax) - (significand != 0.875).int()  # 448 is 0.875 times 2^9


@_block_fault("The scales of the groups of a token change places: features meet the scale of the neighbouring group.",
              "kept", symptom="garbage from the grouped output projection of DeepSeek-V4",
              seen_in="sglang#29036")  # fmt: skip
def scale_of_the_neighbouring_group(operator, exponents):
    return exponents.roll(exponents.shape[1] // 2, dims=1)


@_block_fault("All rows of a group follow each other, where the reader has the groups of a token side by side.",
              "place", symptom="tokens and groups change places", must_fail=("definition", "float8", "neighbours"),
              only_definition="")  # fmt: skip
def rows_in_group_major_order(operator, out):
    tokens, groups, features = out.shape
    return BlockScaled.place(operator, out).as_strided(out.shape, (features, tokens * features, 1))


@_block_fault("The first of four exponents is in the highest byte of an int32.", "packed", "rope_and_quantize_packed",
              symptom="blocks get the scales of other blocks")  # fmt: skip
def first_exponent_in_the_highest_byte(operator, exponents):
    return BlockScaled.packed(operator, exponents.unflatten(-1, (-1, 4)).flip(-1).flatten(-2))


@_block_fault("Four scales that are no powers of two are packed without a mask: their significands reach the "
              "exponents below.", convention="rope_and_quantize_packed", seen_in="DeepGEMM#337",
              symptom="NaN, or far too large numbers, on GPUs that read packed scales")  # fmt: skip
class SignificandsInPackedScales(BlockScaled):
    def exponents(self, amax):
        self.scale_bits = (amax / 448).view(torch.int32)
        return super().exponents(amax)

    def packed(self, exponents):
        first, second, third, fourth = self.scale_bits.reshape(*exponents.shape[:2], -1, 4).unbind(-1)
        return (first >> 23) | (second >> 15) | (third >> 7) | (fourth << 1)


@_block_fault("The features that rotate become 8-bit floats as well, with the scale of features before them.",
              "stored", "rope_and_block_scaled_cache", seen_in="vllm#42956", options={"dtype": torch.bfloat16},
              symptom="the rotated features are clamped, because they are larger than the others")  # fmt: skip
def rotated_features_in_eight_bits(operator, turned, exponents):
    scale = torch.exp2(exponents[:, -1:].float())
    return (to_float8(turned.float() / scale, FLOAT8_DTYPES[0]).float() * scale).to(turned.dtype)


CACHE_FAULTS: dict[str, Fault] = {value.name: value for value in list(vars().values()) if isinstance(value, Fault)}
"""Name -> fault."""
