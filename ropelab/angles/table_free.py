"""Bring frequencies into the form from which the kernels compute cosines and sines without a table.

A table of four million positions takes 2 GB for heads of 128 features. The frequencies take 1.5 kB.
"""

import math

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.arguments import check_tensor, number, tensor
from ropelab.arguments import device as usable
from ropelab.foreign import hinted
from ropelab.not_compiled import not_compiled

_PER_TURN = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E410
"""The integer nearest to 2^192 / (2 pi)."""


@hinted
@not_compiled  # a compiler splits arithmetic with Python's integers into four graphs, and takes a minute
def rotary_frequencies(
    rotary_dim: int, base: float = 10000.0, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """The ``frequencies`` that `apply_rope` takes in place of the tables of ``rotary_table(..., rotary_dim, base)``.

    Example: ``q = apply_rope(q, frequencies=rotary_frequencies(128, base=500_000.0))``.

    Call this function once, outside of compiled code. In compiled code the call breaks the graph, and with
    ``fullgraph=True`` the compiler raises.

    Returns:
        int64 ``[rotary_dim/2, 3]`` on ``device``, by default torch's default device; see `fixed_point`.

    Raises:
        TypeError, ValueError: ``rotary_dim`` is not a positive even integer, or ``base`` is not a positive number.
    """
    return fixed_point(inverse_frequencies(rotary_dim, base), device=device)


@not_compiled
def fixed_point(
    frequencies: torch.Tensor, attention_factor: float = 1.0, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Any inverse frequencies in turns per position, with 96 bits behind the point, and the factor of cos and sin.

    The function takes the float64 frequencies as exact. Its rounding moves an angle by position x 2^-97 turns, far less
    than the rounding of a frequency to float64 does.

    Args:
        frequencies: float64 ``[R/2]``, rad per position: see `ropelab.angles.frequencies`.
        attention_factor: a positive factor of cos and sin, rounded to float32. The kernel multiplies float32 cosines
            and sines by it, so a factor other than 1 rounds them once more.

    Returns:
        int64 ``[R/2, 3]``: the first 64 bits behind the point, the next 32 bits, and the bits of the factor in float32.

    Raises:
        TypeError: ``frequencies`` is not a floating tensor, or ``attention_factor`` is not a number.
        ValueError: ``frequencies`` has another shape or an element that is not finite, or ``attention_factor`` is not
            a positive normal number of float32.
    """
    check_tensor("frequencies", tensor("frequencies", frequencies), (1,), "[rotary_dim/2]")
    if frequencies.device.type == "meta" or not len(frequencies):
        got = f"shape {tuple(frequencies.shape)} on {frequencies.device}"
        raise ValueError(f"frequencies: expected values for at least one plane, got {got}")
    thetas = frequencies.tolist()
    if not all(map(math.isfinite, thetas)):
        raise ValueError(f"frequencies: expected finite numbers, got {thetas}")
    single = torch.finfo(torch.float32)
    number("attention_factor", attention_factor, at_least=single.tiny, at_most=single.max)
    factor = torch.tensor(attention_factor, dtype=torch.float32, device="cpu").view(torch.int32).item()
    rows = [(*_turns(theta), factor) for theta in thetas]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(usable("device", device))


def _turns(theta: float) -> tuple[int, int]:
    """``theta`` rad in turns modulo 1: the first 64 bits behind the point, as int64 holds them, and the next 32."""
    numerator, denominator = theta.as_integer_ratio()
    turns = numerator * _PER_TURN // denominator  # 192 bits behind the point
    high, low = divmod((turns + (1 << 95) >> 96) % 2**96, 2**32)
    return high - 2**64 if high >= 2**63 else high, low
