"""The identification names mistakes of operators that write a cache or normalize: addresses, norms, scales, memory."""

import itertools

import pytest
import torch

from ropelab.conformance import verify
from ropelab.conformance.cache.correct import CORRECT, FORMS, Operator
from ropelab.conformance.cache.correct_block_scales import BlockScaled
from ropelab.conformance.cache.faults import CACHE_FAULTS
from ropelab.conformance.cache.identify import identify_cache
from ropelab.conformance.declared import declare
from ropelab.conformance.limits import roundest
from ropelab.conformance.report import text
from ropelab.conformance.surroundings import Surroundings
from ropelab.kernels.float8 import to_float8
from ropelab.layout.pairing import permutation
from tests.laws.test_identify import one_thread  # noqa: F401

SAYS = {}


def says(*lines, convention="rope_and_cache", **options):
    def keep(operator):
        made = operator() if isinstance(operator, type) else operator
        SAYS[operator.__name__] = made, convention, lines, options
        return operator

    return keep


NORMED, OF_BASE = "fused_qk_norm_rope", "sglang_fused_qk_norm_rope"
VLLM, LATENT, MADE = "fused_qknorm_rope_cache", "concat_and_cache_mla_rope_fused", "rope_and_cache_row_scales"


# -------------------------------------------------------------------------------------------------------- addresses


@says("the stored k is in the slot before the right one", "the stored v is in the slot before the right one")
class SlotsFromOne(Operator):
    def address(self, slots, cache, other):
        return super().address((slots - 1).clamp(min=0), cache, other)


@says("the stored k of a token with a negative slot is in a slot counted from the end of the cache",
      "the stored v of a token with a negative slot is in a slot counted from the end of the cache",
      convention=VLLM)  # fmt: skip
class PaddingWritten(Operator):
    def live(self, slots, cache):
        return torch.arange(len(slots)), slots % (cache.shape[0] * cache.shape[1])


@says("the stored v is addressed by the strides of the other cache in caches in apart", "q is right")
class StridesOfKeys(Operator):
    def write(self, cache, slots, rows, scale, other):
        if cache.storage_offset() > other.storage_offset():
            cache = cache.as_strided(cache.shape, other.stride(), cache.storage_offset())
        super().write(cache, slots, rows, scale, other)


@says("the stored k is in the slots of the earlier call in a call after another with as many tokens",
      "the stored v is in the slots of the earlier call in a call after another with as many tokens")  # fmt: skip
class SlotsOfACapturedGraph(Operator):
    def __init__(self):
        self.slots = {}

    def live(self, slots, cache):
        return super().live(self.slots.setdefault(len(slots), slots.clone()), cache)


@says("q takes the positions of the earlier call in a call after another with as many tokens", "the stored v is right",
      convention=LATENT)  # fmt: skip
class PositionsOfACapturedGraph(Operator):
    def __init__(self):
        self.kept = {}

    def positions(self, positions, slots):
        return self.kept.setdefault(len(positions), positions.long().clone())


@says("the stored k is not rotated", "k is right", "the stored v is right", convention=LATENT)
class WrittenBeforeTheRotation(Operator):
    def stored(self, turned, k):
        return k


# --------------------------------------------------------------------------------------------------------- rotation


@says("the stored k turns by the magnitude of a negative position", convention="rope_and_quantize")
class MagnitudeOfPositions(BlockScaled):
    def turned(self, x, cos, sin, positions, rotary_slice, inverse):
        return super().turned(x, cos, sin, positions.abs().where(positions > -1000, positions), rotary_slice, inverse)


@says("q pairs feature i with the feature half a head further, and not half of the features that rotate",
      "the stored k pairs feature i with the feature half a head further, and not half of the features that rotate",
      convention=VLLM, rotary_dim=8)  # fmt: skip
class HalfAHead(Operator):
    def rotate(self, x, cos, sin, layout):
        half, count = x.shape[-1] // 2, cos.shape[-1]
        y, a, b = x.clone(), x[..., :count], x[..., half : half + count]
        y[..., :count], y[..., half : half + count] = a * cos - b * sin, b * cos + a * sin
        return y


@says("q is written with the pairs as split_half", "the stored v is right", convention=LATENT, layout="interleaved")
class ReordersPairs(Operator):
    def rotate(self, x, cos, sin, layout):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@says("q computes second members of pairs from first members that are already rotated", convention=NORMED)
class InTurn(Operator):
    def rotate(self, x, cos, sin, layout):
        y, count = x.clone(), cos.shape[-1]
        y[..., :count] = x[..., :count] * cos - x[..., count : 2 * count] * sin
        y[..., count : 2 * count] = x[..., count : 2 * count] * cos + y[..., :count] * sin
        return y


def with_yarn(cosines, sines):
    """SGLang's operator with powers of the attention factor on cosines and on sines."""
    fused = FORMS[NORMED](Operator())

    def operator(qkv, hq, hk, hv, head_dim, eps, qw, kw, base, is_neox, position_ids, factor, low, high, m, rotary_dim):
        theta = base ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        if factor != 1:
            share = ((torch.arange(len(theta)) - low) / (high - low)).clamp(0, 1)
            theta = share * theta / factor + (1 - share) * theta
        angles = torch.arange(int(position_ids.max()) + 1)[:, None] * theta
        cache = torch.cat((m**cosines * angles.cos(), m**sines * angles.sin()), -1)
        fused(qkv, hq, hk, hv, head_dim, eps, qw, kw, cache.float(), is_neox, position_ids)

    return operator


SAYS["sines_only"] = with_yarn(0, 1), OF_BASE, (
    "q has the attention factor on the sines, and not on the cosines where the call asks for YaRN",), {}  # fmt: skip
SAYS["square_on_cosines"] = with_yarn(2, 1), OF_BASE, (
    "q has cosines multiplied by 1.25 where the call asks for YaRN",), {}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- norm


@says("q adds eps to the root of the mean square, not to the mean square for heads of small numbers",
      "the stored v is right", convention=VLLM)  # fmt: skip
class EpsBesideTheRoot(Operator):
    def norm(self, x, weight, eps, offset, wide):
        x = x.to(wide)
        return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * (weight.to(wide) + offset)


@says("q is normalized with eps 3e-05", "the stored k is normalized with eps 3e-05")
class OwnEps(Operator):
    def norm(self, x, weight, eps, offset, wide):
        return super().norm(x, weight, 3e-5, offset, wide)


@says("q is normalized by the mean square of the features that rotate for heads of 16 features",
      "the stored k is normalized by the mean square of the features that rotate for heads of 16 features",
      rotary_dim=8)  # fmt: skip
class MeanOfRotatingFeatures(Operator):
    def norm(self, x, weight, eps, offset, wide):
        mean = x.to(wide)[..., :8].square().mean(-1, keepdim=True)
        return x.to(wide) * torch.rsqrt(mean + eps) * (weight.to(wide) + offset)


@says(
    "q is normalized in the features that rotate only, by their own mean square for heads of 16 features",
    convention=NORMED,
    rotary_dim=8,
)
class NormOfRotatingFeatures(Operator):
    def norm(self, x, weight, eps, offset, wide):
        turned = super().norm(x[..., :8], weight[:8], eps, offset, wide)
        return torch.cat((turned, x[..., 8:].to(wide)), -1)


@says("q is normalized with 1 added to the weights", "the stored k is normalized with 1 added to the weights")
class Gemma(Operator):
    def norm(self, x, weight, eps, offset, wide):
        return super().norm(x, weight, eps, offset + 1, wide)


# ----------------------------------------------------------------------------------------------------------- scales


@says("the scale of the stored v is that of the stored k", "the stored v, for its scale, is right", "q is right",
      convention=MADE)  # fmt: skip
class ScaleOfKeysStored(Operator):
    def keep(self, scales, slots, scale):
        self.first = self.first if getattr(self, "first", None) is not None else scale
        super().keep(scales, slots, self.first)

    def __call__(self, *of, **options):
        self.first = None
        return super().__call__(*of, **options)


@says("the scale of the stored k is its reciprocal", "the stored k, for its scale, is right", convention=MADE)
class ReciprocalStored(Operator):
    def keep(self, scales, slots, scale):
        super().keep(scales, slots, 1 / scale)


@says("the stored v is multiplied by its scale, in place of divided in caches of float8_e4m3fn", "q is right")
class ValuesMultiplied(Operator):
    def __call__(self, *of, scales=(None, None, None), **options):
        q, k, v = scales
        return super().__call__(*of, scales=(q, k, None if v is None else 1 / v), **options)


@says("the stored k has the bits of float8_e4m3fn in caches of float8_e5m2", convention=VLLM)
class OneFormat(Operator):
    def convert(self, x, dtype, scale):
        if dtype != torch.float8_e5m2:
            return super().convert(x, dtype, scale)
        return to_float8(self.divide(x, scale), torch.float8_e4m3fn).view(dtype)


@says("the stored k rounds the exponents of its scales to the nearest, not up, and clips",
      convention="rope_and_quantize")  # fmt: skip
class NearestExponents(BlockScaled):
    def exponents(self, amax):
        return torch.log2(amax.double() / 448).round().int()


def weights_without(q, weights, *, weights_out, weight_scale, **options):
    found = CORRECT["rope_and_quantize_indexer"](q, weights, weights_out=weights_out, weight_scale=1.0, **options)
    return found[0], weights_out


SAYS["weights_without_their_factor"] = weights_without, "rope_and_quantize_indexer", (
    "the stored k has right features, and its weights lack the factor weight_scale",), {}  # fmt: skip


def weights_alone(q, weights, *, weights_out, weight_scale, **options):
    CORRECT["rope_and_quantize_indexer"](q, weights, weights_out=weights_out, weight_scale=weight_scale, **options)
    return options["out"], weights_out.copy_(weights.float() * weight_scale)


SAYS["weights_without_the_scale"] = weights_alone, "rope_and_quantize_indexer", (
    "the stored k has right features, and its weights lack the scale of the query",), {}  # fmt: skip


@says("the stored v is not written: the slots keep their contents in features >= 64", "the stored k is right",
      convention="mla_rope_and_cache")  # fmt: skip
class LatentOfOneBlock(Operator):
    def write(self, cache, slots, rows, scale, other):
        wide = cache.shape[-1] > 32  # the latent, beside the key
        super().write(cache[..., :64] if wide else cache, slots, rows[..., :64] if wide else rows, scale, other)


@says("the stored k is not rotated in blocks of the cache other than 0", convention="rotate_cached_keys")
class FirstBlockOnly(Operator):
    def turn_again(self, key_cache, slots, deltas, **options):
        return super().turn_again(key_cache, torch.where(slots < key_cache.shape[1], slots, -1), deltas, **options)


@says("the scale of the stored k is in the slot with the number of the token among those with a slot", convention=MADE)
class ScalesOneAfterAnother(Operator):
    calls = 0

    def keep(self, scales, slots, scale):
        self.calls += 1
        super().keep(scales, torch.arange(len(slots)) if self.calls % 2 else slots, scale)


@says("the stored k has the bits of float8_e4m3fnuz in caches of float8_e4m3fn", "q is right")
class UnsignedZeros(Operator):
    def write(self, cache, slots, rows, scale, other):
        if cache.dtype == torch.float8_e4m3fn:
            rows = (rows.float() / scale).clamp(-240, 240).to(torch.float8_e4m3fnuz).view(cache.dtype)
        super().write(cache, slots, rows, scale, other)

    def convert(self, x, dtype, scale):
        return x if x.dtype == dtype else super().convert(x, dtype, scale)


@says("q makes pairs of the features (0, 8), (1, 9), (2, 10), (3, 11), ... in place of (0, 6), (1, 7), (2, 8), (3, 9), "
      "... for every second head for heads of 16 features", "the stored v is right", convention=NORMED)  # fmt: skip
class PartnersHalfAHeadAway(Operator):
    def rotate(self, x, cos, sin, layout):
        y, count, half = super().rotate(x, cos, sin, layout), cos.shape[-1], x.shape[-1] // 2
        a, b = (x[:, 1::2, at : at + count] for at in (0, half))
        y[:, 1::2, :count], y[:, 1::2, count : 2 * count] = a * cos - b * sin, b * cos + a * sin
        return y


@says(
    "q is not rotated for tokens behind the last slot in a call with fewer slots than tokens", "the stored v is right"
)
class UnrotatedBehindTheSlots(Operator):
    def positions(self, positions, slots):
        return torch.where(torch.arange(len(positions)) < len(slots), positions.long(), 0)


@says("the stored k is divided by the largest magnitude of a block over 448, beside the next power of two as the scale",
      convention="rope_and_quantize")  # fmt: skip
class DividedBeforeTheScaleIsRounded(BlockScaled):
    def blocks(self, y, block_dim, amax_epsilon):
        _, exponents = super().blocks(y, block_dim, amax_epsilon)
        y = y.unflatten(-1, (-1, block_dim))
        scale = y.abs().amax(-1, keepdim=True).clamp_min(amax_epsilon) / 448
        return to_float8(y / scale, torch.float8_e4m3fn).flatten(-2), exponents


@says("the stored k pairs features as split_half", convention="rope_and_quantize_indexer")
class IndexerInHalves(BlockScaled):
    def turned(self, x, cos, sin, positions, rotary_slice, inverse):
        first, end = rotary_slice
        order = permutation(end - first, "split_half", "interleaved")
        x = torch.cat((x[..., :first], x[..., first:end][..., order]), -1)
        y = super().turned(x, cos, sin, positions, rotary_slice, inverse)
        return torch.cat((y[..., :first], y[..., first:end][..., order.argsort()]), -1)


# ------------------------------------------------------------------------------------------------------ many tokens

MANY = {"token_counts": (64, 512)}
"""The law `token_counts` asks for 65 and for 513 tokens."""


@says("q takes the position of the token before in calls of more than 300 tokens",
      "the stored k takes the position of the token before in calls of more than 300 tokens", **MANY)  # fmt: skip
class PositionsOfNeighboursInLongCalls(Operator):
    def positions(self, positions, slots):
        found = super().positions(positions, slots)
        return found.roll(1) if len(found) > 300 else found


@says("q is not rotated in tokens >= 300 in calls of more than 300 tokens", convention=NORMED, **MANY)
class RotatesTheFirst300Tokens(Operator):
    def rotate(self, x, cos, sin, layout):
        y = super().rotate(x, cos, sin, layout)
        return torch.cat((y[:300], x[300:].to(y.dtype)))


@says("q is not rotated in calls of more than 1000 heads of q of all tokens",
      "the stored k is not rotated in calls of more than 1000 heads of k of all tokens", **MANY)  # fmt: skip
class NoRotationOfManyHeads(Operator):
    def rotate(self, x, cos, sin, layout):
        return x if x.shape[0] * x.shape[1] > 1000 else super().rotate(x, cos, sin, layout)


@says("the stored k is in the slot after the right one in calls of more than 300 tokens", **MANY)
class SlotsFromZeroInLongCalls(Operator):
    def write(self, cache, slots, rows, scale, other):
        moved = len(rows) > 200  # of 300 tokens, 200 have a slot
        slots = (slots + 1) % (cache.shape[0] * cache.shape[1]) if moved else slots
        super().write(cache, slots, rows, scale, other)


def unrounded_in_numbers_and_weights(
    q, weights, *, cos, sin, weight_scale, amax_epsilon, positions, rotary_slice, out, weights_out
):
    y = BlockScaled().turned(q, cos, sin, positions, rotary_slice, False).to(q.dtype).float()
    scale = y.abs().amax(-1).clamp_min(amax_epsilon) / 448
    out.view(torch.uint8).copy_(to_float8(y / scale[..., None], torch.float8_e4m3fn).view(torch.uint8))
    return out, weights_out.copy_(weights.float() * weight_scale * scale)


SAYS["unrounded_in_numbers_and_weights"] = unrounded_in_numbers_and_weights, "rope_and_quantize_indexer", (
    "the stored k has the largest magnitude over 448 for its scale, in numbers and in weights, not the next power of "
    "two",), {}  # fmt: skip


def scales_in_the_first_block(q, kv, kv_cache, slot_mapping, *, block_size, **options):
    before, write = kv_cache.clone(), CORRECT["rope_and_block_scaled_cache"]
    data = options["rotary_slice"][0] + (q.shape[-1] - options["rotary_slice"][0]) * q.element_size()
    y = write(q, kv, kv_cache, slot_mapping, block_size=block_size, **options)
    scales = kv_cache[:, block_size * data :].clone()
    kv_cache[:, block_size * data :] = before[:, block_size * data :]
    width = scales.shape[-1] // block_size
    for slot in slot_mapping[slot_mapping >= 0].tolist():
        block, place = divmod(slot, block_size)
        first = block_size * data + place * width
        kv_cache[0, first : first + width] = scales[block, place * width : (place + 1) * width]
    return y


SAYS["scales_in_the_first_block"] = scales_in_the_first_block, "rope_and_block_scaled_cache", (
    "the scales of the stored k are in the first block, at the place of its slot in a block", "q is right",
), {"dtype": torch.bfloat16}  # fmt: skip


def identified(operator, convention, **options):
    declaration = declare(convention, **options)
    function = FORMS[convention](operator) if isinstance(operator, (Operator, BlockScaled)) else operator
    return identify_cache(declaration.subject(function, Surroundings()), declaration.sizes)


@pytest.mark.parametrize("name", SAYS)
def test_a_mistake_is_named(name):
    operator, convention, lines, options = SAYS[name]
    found = identified(operator, convention, **options)
    told = [*map(str, found.deviations), *(f"{part} is right" for part in found.right)]
    assert found.proven and set(lines) <= set(told), found.words()


@pytest.mark.parametrize("convention", FORMS)
def test_a_right_operator_has_no_description(convention):
    options = {"dtype": torch.bfloat16} if convention == "rope_and_block_scaled_cache" else {}
    assert identified(CORRECT[convention], convention, **options).silent


def test_what_no_mistake_explains_is_told_with_its_reach():
    class Odd(Operator):
        def rotate(self, x, cos, sin, layout):
            y = super().rotate(x, cos, sin, layout)
            y[:, -1] += 0.1 * y[:, -1].sin()
            return y

    found = identified(Odd(), "fused_qk_norm_rope")
    assert not found.proven and "for the last head" in found.unexplained[0], found.words()
    assert "the stored v is right" in found.facts


def test_a_verdict_has_the_description():
    report = verify(FORMS[LATENT](WrittenBeforeTheRotation()), LATENT, laws=["definition"], shrink=False)
    assert "the stored k is not rotated" in map(str, report.identification.deviations)


def test_an_operator_that_does_not_get_v_has_no_line_about_it():
    faults = [fault for fault in CACHE_FAULTS.values() if fault.convention == "rotate_cached_keys"]
    for fault in faults:
        assert "stored v" not in text(verify(fault.function, fault.convention))
    assert faults


def test_elements_without_a_cause_are_confined_to_the_fewest_heads():
    def odd_heads(q, *arguments, **options):
        found = CORRECT["rope_and_cache"](q, *arguments, **options)
        found[..., 1::2, :] += torch.rand_like(found[..., 1::2, :].float()).to(found.dtype)
        return found

    report = verify(odd_heads, "rope_and_cache", laws=["definition"])
    assert "all of them for every second head" in text(report)


def test_the_roundest_number_of_a_range_is_found_among_all_of_int32():
    """A token without a position has the number -2^31, so a range has up to 2^32 numbers."""
    for low, high in itertools.product(range(-9, 10), range(-9, 10)):
        if low <= high:
            slow = max(range(low, high + 1), key=lambda n: (n & -n) if n else 1 << 62)
            assert roundest(low, high) == slow
    assert roundest(-(2**31), 0) == 0 and roundest(7, 2**31 - 1) == 2**30
