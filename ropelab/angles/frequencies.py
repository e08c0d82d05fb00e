"""Inverse frequencies of every published variant, always in float64.

Float32 angles are off by position * frequency * 6e-8 rad. All functions return float64 tensors on the CPU, in rad per
position, one for each rotated plane. `ropelab.rope_from_config` chooses among them for a model. All raise TypeError or
ValueError for arguments that are no numbers, not finite or out of range, and where frequencies would not
be finite.
"""

import math
import sys
from collections.abc import Sequence

import torch

from ropelab.arguments import flag, integer, number, numbers, sequence
from ropelab.layout.pairing import check_rotary_dim


def inverse_frequencies(rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """``theta_i = base ** (-2i / rotary_dim)`` rad per position, for ``i`` in ``[0, rotary_dim/2)``.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    Returns:
        float64 ``[rotary_dim/2]`` on the CPU, also within ``with torch.device(...)``.

    Raises:
        ValueError: ``rotary_dim`` not a positive even number, or ``base`` not positive.
    """
    rotary_dim, base = check_rotary_dim(rotary_dim), _positive("base", base)
    return base ** -(_count(0, rotary_dim, 2) / rotary_dim)


def linear(rotary_dim: int, base: float, factor: float) -> torch.Tensor:
    """``theta_i / factor``: positions squeezed into the trained range (position interpolation).

    Source: Chen et al., Extending Context Window of LLMs via Positional Interpolation (arXiv 2306.15595), equation 4.
    """
    return _finite(inverse_frequencies(rotary_dim, base) / _positive("factor", factor), "factor", factor)


def ntk_aware(rotary_dim: int, base: float, factor: float) -> torch.Tensor:
    """``base`` raised to ``base * factor ** (R / (R - 2))``: the slowest plane slows by ``factor``, the fastest not.

    Source: bloc97 2023, in the form of Peng et al., YaRN (arXiv 2309.00071), definition 1.

    Raises:
        ValueError: as `inverse_frequencies`, ``factor`` not positive, or ``rotary_dim`` below 4: a single plane, which
            would have to slow and not to slow.
    """
    rotary_dim, base, factor = check_rotary_dim(rotary_dim), _positive("base", base), _positive("factor", factor)
    if rotary_dim < 4:
        raise ValueError(f"rotary_dim: expected at least 4 for an NTK-aware base, got {rotary_dim}")
    try:
        raised = base * factor ** (rotary_dim / (rotary_dim - 2))
    except OverflowError:
        raised = math.inf
    if not sys.float_info.min <= raised < math.inf:
        raise ValueError(f"factor: expected a base of {base} to stay within float64, got {factor}")
    return inverse_frequencies(rotary_dim, raised)


def dynamic_ntk(
    rotary_dim: int, base: float, factor: float, seq_len: int, max_position_embeddings: int
) -> torch.Tensor:
    """NTK-aware with the factor ``factor L / L_max - (factor - 1)`` for sequences of ``L = seq_len`` tokens.

    Up to ``L_max = max_position_embeddings`` tokens these are the unscaled frequencies. Source: emozilla 2023, as
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
    """Planes that turn ``beta_fast`` times or more in the trained length keep their frequency, those that turn
    ``beta_slow`` times or fewer are slowed by ``factor``, with a linear ramp over their indices in between::

        c(r) = R ln(L / (2 pi r)) / (2 ln base)            the index of the plane that turns r times
        g_i  = clamp((i - c(beta_fast)) / (c(beta_slow) - c(beta_fast)), 0, 1)
        f_i  = g_i theta_i / factor + (1 - g_i) theta_i

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2, with the ramp over indices that its authors' code and
    transformers use. cos and sin also take a factor: `yarn_attention_factor`.

    Args:
        original_max_position_embeddings: L, the length before the extension.
        truncate: round the ends of the ramp outwards to whole planes (GPT-OSS does not).

    Raises:
        ValueError: as `inverse_frequencies`; ``base`` at most 1, or ``beta_fast`` below ``beta_slow``.
    """
    theta = inverse_frequencies(rotary_dim, base)
    rotary_dim, base, factor = int(rotary_dim), float(base), _positive("factor", factor)
    length = _length("original_max_position_embeddings", original_max_position_embeddings)
    beta_slow, beta_fast = _positive("beta_slow", beta_slow), _positive("beta_fast", beta_fast)
    if base <= 1:
        raise ValueError(f"base: expected more than 1 for a ramp over planes that turn ever slower, got {base}")
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
        last += 0.001  # a step
    slowed = ((_count(0, rotary_dim // 2) - first) / (last - first)).clamp(0, 1)
    return _finite(slowed * theta / factor + (1 - slowed) * theta, "factor", factor)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """``m(mscale) / m(mscale_all_dim)`` if both are given, else ``m(1)``, where ``m(a) = 0.1 a ln(factor) + 1``.

    Source: YaRN, equation 22 (``sqrt(1/t)``), and DeepSeek-V2's code for the quotient. DeepSeek multiplies its
    softmax scale by ``m(mscale_all_dim)**2`` as well; that is the attention's part, not the rotation's.
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
    """``theta_i / lambda_i`` with a searched factor for each plane: one list for short and one for long sequences.

    Source: Ding et al., LongRoPE (arXiv 2402.13753), equation 3.

    Raises:
        ValueError: as `inverse_frequencies`, or not one positive factor for each plane.
    """
    theta = inverse_frequencies(rotary_dim, base)
    factors = numbers("rescale_factors", rescale_factors, above=0)
    if len(factors) != len(theta):
        raise ValueError(f"rescale_factors: expected one for each of {len(theta)} planes, got {len(factors)}")
    slowed = theta / torch.tensor(factors, dtype=torch.float64, device="cpu")
    return _finite(slowed, "rescale_factors", min(factors))


def longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    """``sqrt(1 + ln(factor) / ln(L))``, L the trained length. Source: LongRoPE's code, section 3.3 of the paper."""
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
    """Planes that turn ``high_freq_factor`` times or more in the trained length keep their frequency, those that turn
    ``low_freq_factor`` times or fewer are slowed by ``factor``, with a linear ramp over their turns in between::

        turns_i = L theta_i / (2 pi)
        g_i = clamp((turns_i - low) / (high - low), 0, 1)
        f_i = (1 - g_i) theta_i / factor + g_i theta_i

    Source: Llama 3.1's model code (``apply_scaling``).

    Raises:
        ValueError: as `inverse_frequencies`, ``factor`` not positive, or ``high_freq_factor`` below the other.
    """
    length = _length("original_max_position_embeddings", original_max_position_embeddings)
    factor = _positive("factor", factor)
    low_freq_factor = _positive("low_freq_factor", low_freq_factor)
    high_freq_factor = _positive("high_freq_factor", high_freq_factor)
    if high_freq_factor < low_freq_factor:
        raise ValueError(
            f"high_freq_factor: expected at least low_freq_factor {low_freq_factor}, got {high_freq_factor}"
        )
    theta = inverse_frequencies(rotary_dim, base)
    turns = length * theta / (2 * math.pi)
    if high_freq_factor == low_freq_factor:
        kept = (turns >= low_freq_factor).double()  # a step: Llama 4 Scout
    else:
        kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return _finite((1 - kept) * theta / factor + kept * theta, "factor", factor)


def proportional(head_dim: int, base: float, rotated_fraction: float, factor: float = 1.0) -> torch.Tensor:
    """The frequencies of the entire head, of which only the first ``rotated_fraction`` turn and the others are 0.

    Unlike a partial rotation, pairs and exponents are those of ``head_dim``. Source: Gemma 4's model code, as
    ``proportional`` in transformers.

    Returns:
        float64 ``[head_dim/2]``.
    """
    head_dim, rotated_fraction = check_rotary_dim(head_dim, "head_dim"), _fraction("rotated_fraction", rotated_fraction)
    theta = _finite(inverse_frequencies(head_dim, base) / _positive("factor", factor), "factor", factor)
    theta[int(rotated_fraction * head_dim // 2) :] = 0
    return theta


def axial(axes_dims: Sequence[int], base: float = 10000.0) -> torch.Tensor:
    """The frequencies of each axis, side by side: axis ``a`` has ``axes_dims[a]`` features.

    Source: Flux, Wan, HunyuanVideo and Qwen-Image (``axes_dims_rope``). `ropelab.positions.axes` has the positions.
    """
    dims = [check_rotary_dim(dim, f"axes_dims[{axis}]") for axis, dim in enumerate(sequence("axes_dims", axes_dims))]
    if not dims:
        raise ValueError("axes_dims: expected at least one axis, got ()")
    return torch.cat([inverse_frequencies(dim, base) for dim in dims])


def _count(*start_stop_step: int) -> torch.Tensor:
    return torch.arange(*start_stop_step, dtype=torch.float64, device="cpu")


def _positive(name: str, value: float) -> float:
    """``value`` as a float whose reciprocal is one too."""
    found = number(name, value)
    if found < sys.float_info.min:
        raise ValueError(f"{name}: expected a positive number, got {value}")
    return found


def _fraction(name: str, value: float) -> float:
    found = number(name, value)
    if not 0 < found <= 1:
        raise ValueError(f"{name}: expected more than 0 and at most 1, got {value}")
    return found


def _length(name: str, value: int, at_least: int = 1) -> int:
    return integer(name, value, at_least, below=sys.maxsize)


def _finite(theta: torch.Tensor, name: str, value: float) -> torch.Tensor:
    """``theta``, unless ``value`` has made it leave float64."""
    if not theta.isfinite().all():
        raise ValueError(f"{name}: expected frequencies within float64, got {value}")
    return theta
