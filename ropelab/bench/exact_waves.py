"""This file computes cosines and sines of large angles far more precisely than float32, to compare others with."""

import math

import torch

LAST = 2**24
"""The last position that is exact here."""

_HALF_PI = tuple(map(float.fromhex, ("0x1.921fb54p+0", "0x1.10b461p-30", "0x1.a62633p-58", "0x1.45c06e0e68948p-86")))
"""pi/2 in parts. The first three end 28, 56 and 84 bits behind the point: float64 holds their multiples up to 2^24."""


def exact_product(positions: torch.Tensor, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``position x theta`` as a sum of two float64 ``[P, R/2]``, without any error.

    ``theta`` is the sum of two numbers of 26 bits, whose products with a position float64 holds exactly.

    Args:
        positions: ``[P]``, from 0 to `LAST`.
        theta: float64 ``[R/2]``.

    Raises:
        ValueError: a position beyond `LAST`.
    """
    if len(positions) and positions.max() > LAST:
        raise ValueError(f"positions: expected at most {LAST}, got {int(positions.max())}")
    theta = theta.to(positions.device)
    _, exponent = torch.frexp(theta)
    head = torch.ldexp(torch.round(torch.ldexp(theta, 26 - exponent)), exponent - 26)
    return positions.double()[:, None] * head, positions.double()[:, None] * (theta - head)


def exact_waves(positions: torch.Tensor, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the exact product, to a few 1e-16 of their size, by other means than the kernel's.

    The product is exact, and multiples of pi/2 are taken off in parts, each loss kept (Cody and Waite; Dekker's sum).

    Args:
        positions: ``[P]``, from 0 to `LAST`.
        theta: float64 ``[R/2]``, rad per position, at most 1.

    Returns:
        ``(cos, sin)``, float64 ``[P, R/2]``, on the device of ``positions``.
    """
    large, small = exact_product(positions, theta)
    quarter = torch.round(large / (math.pi / 2))
    first, second, third, fourth = (quarter * part for part in _HALF_PI)
    angle, lost = large - first, 0.0  # exact: the two are near each other
    for term in (-second, small, -third):
        total = angle + term
        back = total - angle
        angle, lost = total, lost + ((angle - (total - back)) + (term - back))
    angle = angle + (lost - fourth)
    sin, cos = angle.sin(), angle.cos()
    odd, half = quarter.long() % 2 == 1, quarter.long() % 4 >= 2
    sin, cos = torch.where(odd, cos, sin), torch.where(odd, -sin, cos)
    return torch.where(half, -cos, cos), torch.where(half, -sin, sin)


def ulps(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error in units of the last place of float32."""
    size = exact.abs().float()
    ulp = torch.nextafter(size, size.new_tensor(math.inf)).double() - size.double()
    return ((actual.double() - exact).abs() / ulp).max().item()
