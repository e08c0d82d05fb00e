"""Compute the inverse frequencies of every published variant, always in float64.

Frequencies in float32 would move an angle by position * frequency * 6e-8 rad. All functions of frequencies return a
float64 tensor on the CPU, in rad per position, with an element for each rotated plane. `ropelab.rope_from_config`
chooses among the functions for a model.

All functions raise TypeError for an argument that is not a number, and ValueError for a number that is not finite, that
is out of range, or that makes a frequency infinite.
"""

import math
import sys
from collections.abc import Sequence

import torch

from ropelab.arguments import flag, integer, number, numbers, sequence
from ropelab.layout.pairing import check_rotary_dim


def inverse_frequencies(rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """The unscaled frequencies ``theta_i = base ** (-2i / rotary_dim)``, for ``i`` in ``[0, rotary_dim/2)``.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    Returns:
        float64 ``[rotary_dim/2]``, rad per position, on the CPU, also within ``with torch.device(...)``.

    Raises:
        ValueError: ``rotary_dim`` is not a positive even number, or ``base`` is not positive.
    """
    rotary_dim, base = check_rotary_dim(rotary_dim), _positive("base", base)
    return base ** -(_count(0, rotary_dim, 2) / rotary_dim)


def linear(rotary_dim: int, base: float, factor: float) -> torch.Tensor:
    """The frequencies ``theta_i / factor``, which squeeze positions into the trained range (position interpolation).

    Source: Chen et al., Extending Context Window of LLMs via Positional Interpolation (arXiv 2306.15595), equation 4.
    """
    return _finite(inverse_frequencies(rotary_dim, base) / _positive("factor", factor), "factor", factor)


def ntk_aware(rotary_dim: int, base: float, factor: float) -> torch.Tensor:
    """The frequencies of the base ``base * factor ** (R / (R - 2))``, with ``R = rotary_dim``.

    The slowest plane slows down by ``factor``, and the fastest plane keeps its frequency. Source: bloc97 2023, in the
    form of Peng et al., YaRN (arXiv 2309.00071), definition 1.

    Raises:
        ValueError: as `inverse_frequencies`; ``factor`` is not positive; or ``rotary_dim`` is below 4, because a single
            plane is both the slowest and the fastest.
    """
    rotary_dim, base, factor = check_rotary_dim(rotary_dim), _positive("base", base), _positive("factor", factor)
    if rotary_dim < 4:
        raise ValueError(f"rotary_dim: expected at least 4 features for an NTK-aware base, got {rotary_dim}")
    try:
        raised = base * factor ** (rotary_dim / (rotary_dim - 2))
    except OverflowError:
        raised = math.inf
    if not sys.float_info.min <= raised < math.inf:
        raise ValueError(f"factor: expected a factor that keeps the raised base {base} within float64, got {factor}")
    return inverse_frequencies(rotary_dim, raised)


def dynamic_ntk(
    rotary_dim: int, base: float, factor: float, seq_len: int, max_position_embeddings: int
) -> torch.Tensor:
    """The NTK-aware frequencies with the factor ``factor L / L_max - (factor - 1)``, for ``L = seq_len`` tokens.

    Sequences of up to ``L_max = max_position_embeddings`` tokens have the unscaled frequencies. Source: emozilla 2023,
    ``dynamic`` in Hugging Face transformers.
    """
    longest = _length("max_position_embeddings", max_position_embeddings)
    seq_len, factor = max(_length("seq_len", seq_len, 0), longest), _positive("factor", factor)
    return ntk_aware(rotary_dim, base, factor * seq_len / longest - (factor - 1))


def yarn(
    rotary_dim: int,
    base: float,
    factor: float,
    original_max_position_embeddings: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> torch.Tensor:
    """The frequencies of YaRN, which keeps fast planes and slows slow planes down by ``factor``.

    A plane that turns ``beta_fast`` times or more within the trained length keeps its frequency. A plane that turns
    ``beta_slow`` times or fewer slows down by ``factor``. Between the two there is a linear ramp over the indices of
    the planes::

        c(r) = R ln(L / (2 pi r)) / (2 ln base)            the index of the plane that turns r times
        g_i  = clamp((i - c(beta_fast)) / (c(beta_slow) - c(beta_fast)), 0, 1)
        f_i  = g_i theta_i / factor + (1 - g_i) theta_i

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2, with the ramp over indices that the authors' code and
    transformers use. YaRN multiplies cos and sin by a factor as well: `yarn_attention_factor`.

    Args:
        original_max_position_embeddings: L, the trained length, before the extension.
        truncate: whether the ends of the ramp are rounded outwards to whole planes. GPT-OSS does not round them.

    Raises:
        ValueError: as `inverse_frequencies`; ``base`` is at most 1; or ``beta_fast`` is below ``beta_slow``.
    """
    theta = inverse_frequencies(rotary_dim, base)
    rotary_dim, base, factor = int(rotary_dim), float(base), _positive("factor", factor)
    length = _length("original_max_position_embeddings", original_max_position_embeddings)
    beta_slow, beta_fast = _positive("beta_slow", beta_slow), _positive("beta_fast", beta_fast)
    if base <= 1:
        raise ValueError(f"base: expected a number > 1, so that frequencies fall from plane to plane, got {base}")
    if beta_fast < beta_slow:
        raise ValueError(f"beta_fast: expected at least beta_slow = {beta_slow}, got {beta_fast}")

    def plane(rotations: float) -> float:
        turned_once = length / (2 * math.pi * rotations)
        return rotary_dim * math.log(turned_once) / (2 * math.log(base))

    first, last = plane(beta_fast), plane(beta_slow)
    if flag("truncate", truncate):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # the ramp becomes a step
    slowed = ((_count(0, rotary_dim // 2) - first) / (last - first)).clamp(0, 1)
    return _finite(slowed * theta / factor + (1 - slowed) * theta, "factor", factor)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor of cos and sin in YaRN: ``m(mscale) / m(mscale_all_dim)`` if both are given, else ``m(1)``.

    ``m(a)`` is ``0.1 a ln(factor) + 1`` for a ``factor`` above 1, else 1. A value of 0 counts as not given. Source:
    YaRN, equation 22 (``sqrt(1/t)``), and DeepSeek-V2's code for the quotient. DeepSeek multiplies the scale of the
    softmax by ``m(mscale_all_dim)**2`` as well. The scale belongs to the attention, so it is no part of this factor.
    """

    factor = _positive("factor", factor)
    mscale, mscale_all_dim = (
        None if value is None else number(name, value, at_least=0)
        for name, value in (("mscale", mscale), ("mscale_all_dim", mscale_all_dim))
    )

    def m(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return m(mscale) / m(mscale_all_dim) if mscale and mscale_all_dim else m(1.0)


def longrope(rotary_dim: int, base: float, rescale_factors: Sequence[float]) -> torch.Tensor:
    """The frequencies ``theta_i / lambda_i``, with a searched factor ``lambda_i`` for each plane.

    A model has a list of factors for short sequences and another list for long sequences. Source: Ding et al.,
    LongRoPE (arXiv 2402.13753), equation 3.

    Raises:
        ValueError: as `inverse_frequencies`, or ``rescale_factors`` does not have a positive factor for each plane.
    """
    theta = inverse_frequencies(rotary_dim, base)
    factors = numbers("rescale_factors", rescale_factors, above=0)
    if len(factors) != len(theta):
        raise ValueError(f"rescale_factors: expected a factor for each of {len(theta)} planes, got {len(factors)}")
    slowed = theta / torch.tensor(factors, dtype=torch.float64, device="cpu")
    return _finite(slowed, "rescale_factors", min(factors))


def longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    """The factor of cos and sin in LongRoPE, ``sqrt(1 + ln(factor) / ln(L))`` for a ``factor`` above 1, else 1.

    ``L`` is the trained length. Source: LongRoPE's code, section 3.3 of the paper.
    """
    factor = _positive("factor", factor)
    length = _length("original_max_position_embeddings", original_max_position_embeddings, 2)
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0


def llama3(
    rotary_dim: int,
    base: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> torch.Tensor:
    """The frequencies of Llama 3.1, which keeps fast planes and slows slow planes down by ``factor``.

    A plane that turns ``high_freq_factor`` times or more within the trained length keeps its frequency. A plane that
    turns ``low_freq_factor`` times or fewer slows down by ``factor``. Between the two there is a linear ramp over the
    turns of the planes::

        turns_i = L theta_i / (2 pi)
        g_i = clamp((turns_i - low) / (high - low), 0, 1)
        f_i = (1 - g_i) theta_i / factor + g_i theta_i

    Source: Llama 3.1's model code (``apply_scaling``).

    Raises:
        ValueError: as `inverse_frequencies`; ``factor`` is not positive; or ``high_freq_factor`` is below
            ``low_freq_factor``.
    """
    length = _length("original_max_position_embeddings", original_max_position_embeddings)
    factor = _positive("factor", factor)
    low_freq_factor = _positive("low_freq_factor", low_freq_factor)
    high_freq_factor = _positive("high_freq_factor", high_freq_factor)
    if high_freq_factor < low_freq_factor:
        raise ValueError(
            f"high_freq_factor: expected at least low_freq_factor = {low_freq_factor}, got {high_freq_factor}"
        )
    theta = inverse_frequencies(rotary_dim, base)
    turns = length * theta / (2 * math.pi)
    if high_freq_factor == low_freq_factor:
        kept = (turns >= low_freq_factor).double()  # the ramp is a step, as in Llama 4 Scout
    else:
        kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return _finite((1 - kept) * theta / factor + kept * theta, "factor", factor)


def proportional(head_dim: int, base: float, rotated_fraction: float, factor: float = 1.0) -> torch.Tensor:
    """The frequencies of the entire head, whose first planes turn and whose other planes have frequency 0.

    The first ``rotated_fraction`` of the planes turn. The pairs and the exponents extend over all ``head_dim``
    features, unlike in a partial rotation. Source: Gemma 4's model code, ``proportional`` in transformers.

    Returns:
        float64 ``[head_dim/2]``.
    """
    head_dim, rotated_fraction = check_rotary_dim(head_dim, "head_dim"), _fraction("rotated_fraction", rotated_fraction)
    theta = _finite(inverse_frequencies(head_dim, base) / _positive("factor", factor), "factor", factor)
    theta[int(rotated_fraction * head_dim // 2) :] = 0
    return theta


def axial(axes_dims: Sequence[int], base: float = 10000.0) -> torch.Tensor:
    """The frequencies of all axes, side by side: axis ``a`` has ``axes_dims[a]`` features.

    Source: Flux, Wan, HunyuanVideo and Qwen-Image (``axes_dims_rope``). `ropelab.positions.axes` makes the positions.
    """
    dims = [check_rotary_dim(dim, f"axes_dims[{axis}]") for axis, dim in enumerate(sequence("axes_dims", axes_dims))]
    if not dims:
        raise ValueError("axes_dims: expected at least one axis, got ()")
    return torch.cat([inverse_frequencies(dim, base) for dim in dims])


def _count(*start_stop_step: int) -> torch.Tensor:
    return torch.arange(*start_stop_step, dtype=torch.float64, device="cpu")


def _positive(name: str, value: float) -> float:
    """``value`` as a float whose reciprocal is finite."""
    found = number(name, value)
    if found < sys.float_info.min:
        raise ValueError(f"{name}: expected a positive number, got {value}")
    return found


def _fraction(name: str, value: float) -> float:
    found = number(name, value)
    if not 0 < found <= 1:
        raise ValueError(f"{name}: expected a number > 0 and <= 1, got {value}")
    return found


def _length(name: str, value: int, at_least: int = 1) -> int:
    return integer(name, value, at_least, below=sys.maxsize)


def _finite(theta: torch.Tensor, name: str, value: float) -> torch.Tensor:
    """Return ``theta``, or raise ValueError if ``value`` has made a frequency infinite or NaN."""
    if not theta.isfinite().all():
        raise ValueError(f"{name}: expected a value that keeps every frequency finite in float64, got {value}")
    return theta
