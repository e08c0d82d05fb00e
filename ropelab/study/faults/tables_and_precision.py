"""The faults of frequencies, angles, cosines and sines, and of the dtypes that they are computed in."""

import math

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.study.faults import correct
from ropelab.study.faults.fault import fault


def _frequencies(x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return inverse_frequencies(x.shape[-1]).to(x.device, dtype)


@fault(
    "The inverse frequencies are rounded to bfloat16.",
    symptom="angles off by whole radians at a few hundred tokens",
    seen_in="transformers#29285, modalities#462",
    convention="plain",
    must_fail=("definition", "large_positions"),
    only_definition="it is a consistent rotation by other frequencies",
)
def frequencies_in_bfloat16(x, positions):
    return correct.turn_by(x, positions.double()[..., None] * _frequencies(x, torch.bfloat16).double())


@fault(
    "The positions are cast to bfloat16.",
    symptom="neighbouring positions above 256 become equal",
    seen_in="candle#3520",
    convention="plain",
    must_fail=("large_positions",),
    only_definition="only the law large_positions goes so far, and it compares with the definition",
)
def positions_in_bfloat16(x, positions):
    return correct.plain(x, positions.bfloat16())


@fault(
    "The angles are a matrix product, which autocast rounds to bfloat16.",
    symptom="results collapse under mixed precision",
    seen_in="diffusers#13922",
    convention="plain",
    must_fail=("autocast",),
)
def angles_under_autocast(x, positions):
    angles = positions.float()[..., None] @ _frequencies(x, torch.float32)[None]
    # Without autocast the angles are exact, so that only the effect of autocast is the fault.
    exact = positions.double()[..., None] * _frequencies(x)
    return correct.turn_by(x, exact if angles.dtype == torch.float32 else angles.double())


@fault(
    "The angles are a matrix product, which tensor cores round to TF32.",
    symptom="errors beyond 2048 tokens",
    seen_in="transformers#48428",
    convention="plain",
    must_fail=("matmul_precision",),
)
def angles_into_tf32(x, positions):
    positions, frequencies = positions.double(), _frequencies(x)
    if torch.get_float32_matmul_precision() != "highest":  # a CPU has no tensor cores, so that the rounding is emulated
        positions, frequencies = to_tf32(positions), to_tf32(frequencies)
    return correct.turn_by(x, positions[..., None] * frequencies)


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded to 10 explicit bits of the significand, like the operands of tensor cores."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


@fault(
    "Cosine and sine come from fast maths, whose argument is reduced in float32.",
    symptom="errors of 1e-2 at position 131072",
    seen_in="imp#1325, mlxcel#1055",
    convention="plain",
    must_fail=("definition", "large_positions"),
    only_definition="it rotates by another angle, and a rotation by any angle is consistent",
)
def fast_math_sine(x, positions):
    angles = (positions.double()[..., None] * _frequencies(x)).float()
    turns = (angles / (2 * math.pi)).round()
    return correct.turn_by(x, angles - turns * torch.tensor(2 * math.pi, dtype=torch.float32))


@fault(
    "The frequencies stay uninitialised if the model is first made without memory.",
    symptom="garbage or NaN after loading a checkpoint",
    seen_in="transformers#45902",
    convention="module",
    must_fail=("definition", "all_written"),
)
def frequencies_uninitialised(head_dim, **options):
    with torch.device("meta"):
        module = correct.Module(head_dim, **options)
    return module.to_empty(device="cpu")  # no checkpoint fills the buffer of frequencies


@fault(
    "The attention factor is applied although the tables already contain it.",
    symptom="logits are too large by the square of the factor",
    seen_in="sglang#33558",
    convention="flash_attn",
    must_fail=("definition", "isometry"),
)
def attention_factor_twice(x, cos, sin, *arguments, **options):
    factor = 0.1 * math.log(4) + 1  # YaRN's factor for four times the context
    return correct.flash_attn(x, factor * cos, factor * sin, *arguments, **options)


@fault(
    "The attention factor in the tables is dropped.",
    symptom="logits have the wrong scale beyond the original context",
    seen_in="vllm#48351",
    convention="flash_attn",
    must_fail=("definition", "isometry"),
)
def attention_factor_ignored(x, cos, sin, *arguments, **options):
    angles = torch.atan2(sin, cos)
    return correct.flash_attn(x, angles.cos(), angles.sin(), *arguments, **options)


@fault(
    "The frequencies are scaled for a longer context, but the unscaled frequencies are returned.",
    symptom="drift at long contexts",
    seen_in="transformers#32330",
    convention="module",
    options={"base": 500_000.0},
    must_fail=("definition",),
    only_definition="it is a consistent rotation by other frequencies",
)
class ScaledFrequenciesDropped(correct.Module):
    def __init__(self, head_dim, rotary_dim=None, base=10000.0):
        super().__init__(head_dim, rotary_dim)
        scaled = inverse_frequencies(rotary_dim or head_dim, base)
        assert scaled.shape == self.inv_freq.shape  # the only use of the scaled frequencies


@fault(
    "A long prompt rescales the cached frequencies, and short prompts never restore them.",
    symptom="the answer to a short prompt depends on earlier prompts",
    seen_in="transformers#25306",
    convention="module",
    must_fail=("determinism",),
)
class RescaledCacheStays(correct.Module):
    def angles(self, seq_len, device):
        angles = super().angles(seq_len, device)
        longest = 16
        if seq_len > longest:
            self.inv_freq *= longest / seq_len
        return angles


@fault(
    "The table has the rows of the original context, not of the scaled context.",
    symptom="reads out of bounds at the last valid positions",
    seen_in="vllm#55910",
    convention="plain",
    must_fail=("large_positions",),
    only_definition="only the law large_positions goes so far, and it compares with the definition",
)
def table_not_sized_for_scaling(x, positions):
    rows = 4096  # a kernel would read beyond the table; here such positions take the last row
    return correct.plain(x, positions.clamp(max=rows - 1))


@fault(
    "The exponent is an integer division, so that all frequencies are 1.",
    symptom="wrong from position 1 on",
    seen_in="LeetCUDA#289",
    convention="plain",
    must_fail=("definition", "large_positions"),
    only_definition="it is a consistent rotation by other frequencies",
)
def integer_division_in_the_exponent(x, positions):
    pair = torch.arange(x.shape[-1] // 2, device=x.device)
    frequencies = 10000.0 ** -(2 * pair // x.shape[-1]).double()
    return correct.turn_by(x, positions.double()[..., None] * frequencies)


@fault(
    "The exponent is divided by head_dim instead of rotary_dim.",
    symptom="drift in models with partial rotation",
    seen_in="pie#603",
    convention="module",
    options={"rotary_dim": 8},
    must_fail=("definition",),
    only_definition="it is a consistent rotation by other frequencies",
)
class ExponentByHeadDim(correct.Module):
    def __init__(self, head_dim, rotary_dim=None, base=10000.0):
        super().__init__(head_dim, rotary_dim, base)
        self.inv_freq = inverse_frequencies(head_dim, base)[: len(self.inv_freq)]
