"""The frequencies in the form of which kernels compute cosines and sines, where a table would be too large.

A table of four million positions takes 2 GB for heads of 128 features; this takes 1.5 kB.
"""

import math

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.arguments import check_tensor, number, tensor
from ropelab.arguments import device as usable
from ropelab.not_compiled import not_compiled

_PER_TURN = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E410
"""2^192 / (2 pi), the nearest integer."""


@not_compiled  # of arithmetic with Python's integers it makes four graphs, and C++ of them for a minute
def rotary_frequencies(
    rotary_dim: int, base: float = 10000.0, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """What `apply_rope` takes as ``frequencies``, in place of the tables of ``rotary_table(..., rotary_dim, base)``.

    To be made once, outside of what is compiled: there a call breaks the graph (with ``fullgraph=True`` it raises).

    Returns:
        int64 ``[rotary_dim/2, 3]`` on ``device``, by default torch's default device; see `fixed_point`.

    Raises:
        TypeError, ValueError: ``rotary_dim`` not a positive even integer, ``base`` not a positive number.
    """
    return fixed_point(inverse_frequencies(rotary_dim, base), device=device)


@not_compiled
def fixed_point(
    frequencies: torch.Tensor, attention_factor: float = 1.0, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Any inverse frequencies in turns per position, 96 bits behind the point, and the factor of cos and sin.

    The rounding moves an angle by position x 2^-97 turns, far below what the float64 of the frequency leaves open.

    Args:
        frequencies: float64 ``[R/2]``, rad per position: see `ropelab.angles.frequencies`; taken as exact.
        attention_factor: of cos and sin, rounded to float32; they are rounded once more when it is not 1.

    Returns:
        int64 ``[R/2, 3]``: the first 64 bits, 32 more, and the bits of the factor in float32.

    Raises:
        TypeError: frequencies that are no floating tensor, a factor that is no number.
        ValueError: frequencies of another shape or not finite, a factor that is not positive in float32.
    """
    check_tensor("frequencies", tensor("frequencies", frequencies), (1,), "[rotary_dim/2]")
    if frequencies.device.type == "meta" or not len(frequencies):
        got = f"{tuple(frequencies.shape)} on {frequencies.device}"
        raise ValueError(f"frequencies: expected those of at least one plane, with values, got {got}")
    thetas = frequencies.tolist()
    if not all(map(math.isfinite, thetas)):
        raise ValueError(f"frequencies: expected finite numbers, got {thetas}")
    single = torch.finfo(torch.float32)
    number("attention_factor", attention_factor, at_least=single.tiny, at_most=single.max)
    factor = torch.tensor(attention_factor, dtype=torch.float32, device="cpu").view(torch.int32).item()
    rows = [(*_turns(theta), factor) for theta in thetas]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(usable("device", device))


def _turns(theta: float) -> tuple[int, int]:
    """``theta`` rad in turns modulo 1: 64 bits (as int64 holds them) and 32 more."""
    numerator, denominator = theta.as_integer_ratio()
    turns = numerator * _PER_TURN // denominator  # 192 bits behind the point
    high, low = divmod((turns + (1 << 95) >> 96) % 2**96, 2**32)
    return high - 2**64 if high >= 2**63 else high, low
