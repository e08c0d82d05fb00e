"""Inverse frequencies of every published variant, always in float64.

Float32 angles are off by position * frequency * 6e-8 rad. All functions return float64 tensors on the CPU, in rad per
position, one for each rotated plane. `ropelab.model_config.rope_from_config` chooses among them for a model.
"""

import math
from collections.abc import Sequence

import torch

from ropelab.layout import check_rotary_dim


def inverse_frequencies(rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    """``theta_i = base ** (-2i / rotary_dim)`` rad per position, for ``i`` in ``[0, rotary_dim/2)``.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2.

    Returns:
        float64 ``[rotary_dim/2]`` on the CPU, also within ``with torch.device(...)``.

    Raises:
        ValueError: ``rotary_dim`` not a positive even number, or ``base`` not positive.
    """
    check_rotary_dim(rotary_dim)
    _check_positive("base", base)
    return base ** -(_count(0, rotary_dim, 2) / rotary_dim)


def linear(rotary_dim: int, base: float, factor: float) -> torch.Tensor:
    """``theta_i / factor``: positions squeezed into the trained range (position interpolation).

    Source: Chen et al., Extending Context Window of LLMs via Positional Interpolation (arXiv 2306.15595), equation 4.
    """
    _check_positive("factor", factor)
    return inverse_frequencies(rotary_dim, base) / factor


def ntk_aware(rotary_dim: int, base: float, factor: float) -> torch.Tensor:
    """``base`` raised to ``base * factor ** (R / (R - 2))``: the slowest plane slows by ``factor``, the fastest not.

    Source: bloc97 2023, in the form of Peng et al., YaRN (arXiv 2309.00071), definition 1.

    Raises:
        ValueError: as `inverse_frequencies`, ``factor`` not positive, or ``rotary_dim`` below 4: a single plane, which
            would have to slow and not to slow.
    """
    if rotary_dim < 4:
        raise ValueError(f"rotary_dim: expected at least 4 for an NTK-aware base, got {rotary_dim}")
    _check_positive("factor", factor)
    return inverse_frequencies(rotary_dim, base * factor ** (rotary_dim / (rotary_dim - 2)))


def dynamic_ntk(
    rotary_dim: int, base: float, factor: float, seq_len: int, max_position_embeddings: int
) -> torch.Tensor:
    """NTK-aware with the factor ``factor L / L_max - (factor - 1)`` for sequences of ``L = seq_len`` tokens.

    Up to ``L_max = max_position_embeddings`` tokens these are the unscaled frequencies. Source: emozilla 2023, as
    ``dynamic`` in Hugging Face transformers.
    """
    _check_positive("max_position_embeddings", max_position_embeddings)
    seq_len = max(seq_len, max_position_embeddings)
    return ntk_aware(rotary_dim, base, factor * seq_len / max_position_embeddings - (factor - 1))


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
    """
    _check_positive("factor", factor)
    _check_positive("original_max_position_embeddings", original_max_position_embeddings)
    theta = inverse_frequencies(rotary_dim, base)

    def plane(rotations: float) -> float:
        turned_once = original_max_position_embeddings / (2 * math.pi * rotations)
        return rotary_dim * math.log(turned_once) / (2 * math.log(base))

    first, last = plane(beta_fast), plane(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # a step
    slowed = ((_count(0, rotary_dim // 2) - first) / (last - first)).clamp(0, 1)
    return slowed * theta / factor + (1 - slowed) * theta


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """``m(mscale) / m(mscale_all_dim)`` if both are given, else ``m(1)``, where ``m(a) = 0.1 a ln(factor) + 1``.

    Source: YaRN, equation 22 (``sqrt(1/t)``), and DeepSeek-V2's code for the quotient. DeepSeek multiplies its
    softmax scale by ``m(mscale_all_dim)**2`` as well; that is the attention's part, not the rotation's.
    """

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
    if len(rescale_factors) != len(theta):
        raise ValueError(f"rescale_factors: expected one for each of {len(theta)} planes, got {len(rescale_factors)}")
    _check_positive("rescale_factors", min(rescale_factors))
    return theta / torch.tensor(rescale_factors, dtype=torch.float64, device="cpu")


def longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    """``sqrt(1 + ln(factor) / ln(L))``, L the trained length. Source: LongRoPE's code, section 3.3 of the paper."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings)) if factor > 1 else 1.0


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
    _check_positive("factor", factor)
    if not high_freq_factor >= low_freq_factor:
        raise ValueError(
            f"high_freq_factor: expected at least low_freq_factor {low_freq_factor}, got {high_freq_factor}"
        )
    theta = inverse_frequencies(rotary_dim, base)
    turns = original_max_position_embeddings * theta / (2 * math.pi)
    if high_freq_factor == low_freq_factor:
        kept = (turns >= low_freq_factor).double()  # a step: Llama 4 Scout
    else:
        kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - kept) * theta / factor + kept * theta


def proportional(head_dim: int, base: float, rotated_fraction: float, factor: float = 1.0) -> torch.Tensor:
    """The frequencies of the entire head, of which only the first ``rotated_fraction`` turn and the others are 0.

    Unlike a partial rotation, pairs and exponents are those of ``head_dim``. Source: Gemma 4's model code, as
    ``proportional`` in transformers.

    Returns:
        float64 ``[head_dim/2]``.
    """
    _check_positive("factor", factor)
    _check_fraction("rotated_fraction", rotated_fraction)
    theta = inverse_frequencies(head_dim, base) / factor
    theta[int(rotated_fraction * head_dim // 2) :] = 0
    return theta


def axial(axes_dims: Sequence[int], base: float = 10000.0) -> torch.Tensor:
    """The frequencies of each axis, side by side: axis ``a`` has ``axes_dims[a]`` features.

    Source: Flux, Wan, HunyuanVideo and Qwen-Image (``axes_dims_rope``). See `ropelab.axes` for their positions.
    """
    if not axes_dims:
        raise ValueError(f"axes_dims: expected at least one axis, got {tuple(axes_dims)}")
    return torch.cat([inverse_frequencies(dim, base) for dim in axes_dims])


def _count(*start_stop_step: int) -> torch.Tensor:
    return torch.arange(*start_stop_step, dtype=torch.float64, device="cpu")


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}: expected a positive number, got {value}")


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name}: expected more than 0 and at most 1, got {value}")
