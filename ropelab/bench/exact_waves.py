"""Compute cosines and sines of large angles far more precisely than float32, as a reference."""

import math

import torch

LAST = 2**24
"""The largest position for which `exact_product` is exact."""

_HALF_PI = tuple(map(float.fromhex, ("0x1.921fb54p+0", "0x1.10b461p-30", "0x1.a62633p-58", "0x1.45c06e0e68948p-86")))
"""pi/2 as a sum of four parts.

The first three parts end 28, 56 and 84 bits after the binary point. float64 holds their multiples up to 2^24 exactly.
"""


def exact_product(positions: torch.Tensor, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of position and theta as a pair of float64 ``[P, R/2]``, whose sum is exact.

    The function splits ``theta`` into two numbers of 26 bits. float64 holds their products with a position exactly.

    Args:
        positions: ``[P]``, from 0 to `LAST`.
        theta: float64 ``[R/2]``.

    Raises:
        ValueError: a position is above `LAST`.
    """
    if len(positions) and positions.max() > LAST:
        raise ValueError(f"positions: expected at most {LAST}, got {int(positions.max())}")
    theta = theta.to(positions.device)
    _, exponent = torch.frexp(theta)
    head = torch.ldexp(torch.round(torch.ldexp(theta, 26 - exponent)), exponent - 26)
    return positions.double()[:, None] * head, positions.double()[:, None] * (theta - head)


def exact_waves(positions: torch.Tensor, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the exact product, with a relative error of a few 1e-16.

    The method shares nothing with the kernel. It subtracts a multiple of pi/2 from the exact product in parts (Cody and
    Waite), and keeps the rounding error of each subtraction (the compensated sum of Dekker).

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
    """The largest error of ``actual``, in units in the last place of ``exact`` in float32."""
    size = exact.abs().float()
    ulp = torch.nextafter(size, size.new_tensor(math.inf)).double() - size.double()
    return ((actual.double() - exact).abs() / ulp).max().item()
