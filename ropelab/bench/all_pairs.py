"""Rotate every pair of bfloat16 numbers by some angles, and compare with the correctly rounded result."""

from collections.abc import Iterator

import pandas as pd
import torch

from ropelab import apply_rope
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench.cells import progress
from ropelab.bench.exact_waves import exact_waves
from ropelab.bench.unavailable import Unavailable
from ropelab.conformance.bounds import Arithmetic, rotate_exactly, rotation_bound
from ropelab.layout.pairing import LAYOUTS, join, pairs

ROTARY_DIM, BASE = 128, 5e5
"""The features and the base of Llama 3."""
ANGLES = (
    (0, 0),
    (1, 0),
    (1, 63),
    (-3, 20),
    (4095, 1),
    (4095, 40),
    (131_071, 0),
    (131_071, 31),
    (2**22, 0),
    (-(2**22), 50),
)
"""Positions, and the planes whose frequency turns them; a negative position turns back."""
_COLUMNS = 2**6
"""The second members that are rotated at once with all 2^16 first members; a tensor of float64 fits the L2 cache."""
_EVERY = 2**16
_LARGEST = "worst_ulps", "fraction"
"""The columns that are the largest of all blocks; the others are sums."""


def all_pairs(*, smoke: bool = False, device: str = "cuda") -> pd.DataFrame:
    """Rotate all 2^32 pairs of bfloat16 numbers by each of `ANGLES`, in one layout after the other.

    Columns: position and plane of the angle; layout; results, the number of finite ones, two for each pair; right, how
        many are correctly rounded; undecided, how many lie so near to the middle of two bfloat16 numbers that float64
        cannot tell; neighbour, how many of the others are the number beside; worst_ulps, the largest error in units in
        the last place of the exact result; fraction, the largest error as a fraction of `rotation_bound`; special, how
        many results of infinities, of NaN and beyond the largest number are other than IEEE 754 has them.

    Args:
        smoke: 2 angles, and only every 2^12th first member.

    Raises:
        Unavailable: there is no GPU for ``device="cuda"``.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("all pairs take a GPU")
    step = 2**12 if smoke else 1
    rows: list[dict[str, object]] = []
    # The line of an angle shows its row: a run that is cut leaves the rows that it has.
    for i, (position, plane) in enumerate(progress(ANGLES[:2] if smoke else ANGLES, lambda _: str(rows[-1]))):
        layout = LAYOUTS[i % 2]
        rows.append(
            {"position": position, "plane": plane, "layout": layout} | _angle(position, plane, layout, step, device)
        )
    return pd.DataFrame(rows)


def _angle(position: int, plane: int, layout: str, step: int, device: str) -> dict[str, float]:
    theta = inverse_frequencies(ROTARY_DIM, BASE)[plane : plane + 1]
    cos, sin = (wave.item() for wave in exact_waves(torch.tensor([abs(position)]), theta))
    sin = -sin if position < 0 else sin
    total: dict[str, torch.Tensor] = {}
    for x0, x1 in _pairs(step, device):
        for found in compared(x0, x1, cos, sin, layout):
            for name, value in found.items():
                combine = torch.maximum if name in _LARGEST else torch.add
                total[name] = combine(total[name], value) if name in total else value
    return {name: value.item() for name, value in total.items()}


def _pairs(step: int, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All pairs of bfloat16 numbers, or those of every so many first members, as blocks ``[1, S, 1, pairs]``."""
    first = torch.arange(0, _EVERY, step, device=device).to(torch.uint16).view(torch.bfloat16)
    for start in range(0, _EVERY, _COLUMNS):
        second = torch.arange(start, start + _COLUMNS, device=device).to(torch.uint16).view(torch.bfloat16)
        shape = 1, _COLUMNS, 1, len(first)
        yield first.expand(shape), second[None, :, None, None].expand(shape)


def compared(
    x0: torch.Tensor, x1: torch.Tensor, cos: float, sin: float, layout: str
) -> Iterator[dict[str, torch.Tensor]]:
    """Rotate pairs ``[1, S, 1, pairs]`` in bfloat16 and compare both members with their correctly rounded values.

    Args:
        cos, sin: of the exact angle, within 4e-16 of themselves.
    """
    # Heads of many pairs of one angle: a row of the tables has the same cosine for each of them.
    width = min(128, x0.shape[-1])
    heads = [x.reshape(1, x.shape[1], -1, width) for x in (x0, x1)]
    tables = [
        torch.full((x0.shape[1], width), wave, dtype=torch.float64, device=x0.device).float() for wave in (cos, sin)
    ]
    y = apply_rope(join(*heads, layout), cos=tables[0], sin=tables[1], layout=layout)
    members = [x.double() for x in heads]
    arithmetic = Arithmetic.of_kernel(torch.bfloat16, interpreted=False)
    bounds = rotation_bound(*members, cos, sin, arithmetic, 4e-16)
    sizes = [abs(members[i] * cos) + abs(members[1 - i] * sin) for i in (0, 1)]
    for got, exact, bound, size in zip(
        pairs(y, layout), rotate_exactly(*members, cos, sin), bounds, sizes, strict=True
    ):
        yield _counted(got, exact, bound, size)


def _counted(
    got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, size: torch.Tensor
) -> dict[str, torch.Tensor]:
    nearest, unit, middle = rounded(exact)
    finite = nearest.isfinite()
    got = got.double()
    error = abs(got - exact)
    # The reference is off by up to 8e-16 of the sum of both products.
    undecided = finite & (middle <= 8e-16 * size)
    right = finite & (got == nearest)
    wrong = finite & ~right & ~undecided
    special = ~finite & ~((got == nearest) | (got.isnan() & nearest.isnan()))
    return {
        "results": finite.sum(), "right": right.sum(), "undecided": (undecided & ~right).sum(),
        "neighbour": (wrong & (abs(got - nearest) <= unit)).sum(), "special": special.sum(),
        "worst_ulps": torch.where(finite, error / unit, 0.0).max(),
        "fraction": torch.where(finite, error / bound, 0.0).max(),
    }  # fmt: skip


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 numbers rounded to the nearest bfloat16, ties to even, in one rounding.

    A conversion by torch rounds to float32 before, and so twice.

    Returns:
        The rounded numbers, the units in the last place of bfloat16, and the distances to the middle of two numbers.
    """
    _, exponent = torch.frexp(x)
    exponent = exponent.clamp(min=-125) - 8
    unit = torch.ldexp(torch.ones_like(x), exponent)
    steps = x / unit
    nearest = torch.round(steps) * unit
    largest = torch.finfo(torch.bfloat16).max
    nearest = torch.where(abs(nearest) > largest, torch.sign(x) * torch.inf, nearest)
    middle = abs(abs(steps - torch.floor(steps)) - 0.5) * unit
    return torch.where(x.isfinite(), nearest, x), unit, middle
