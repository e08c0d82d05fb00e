"""Methods to compute cos and sin of ``position * frequency``, and a bound of each method's error.

A `Method` is a function of positions and inverse frequencies, with a `Bound`. The bound is derived from the formats to
which the method rounds, and from no measurement. All other functions here work on any method. To compare another
method, add it to ``METHODS``.

Rounding to ``t`` significant binary digits, to nearest, puts ``x`` off by at most ``2**-t * ufp(x)``. The unit in the
first place, ``ufp(x)``, is the largest power of two up to ``|x|`` (Rump, Ogita and Oishi 2008). Integers up to ``2**t``
and powers of two stay as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ropelab.angles.table_free import fixed_point
from ropelab.bench.exact_waves import exact_product, ulps
from ropelab.bench.table_free import kernel_waves
from ropelab.kernels import angles_torch
from ropelab.study.faults.tables_and_precision import to_tf32

REFERENCE = 2.0**-50
"""An upper limit of the error of the reference, `ropelab.bench.exact_waves`."""

Waves = tuple[torch.Tensor, torch.Tensor]
Function = Callable[[torch.Tensor, torch.Tensor], Waves]


def ufp(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two up to ``|x|``, and 0 for 0."""
    mantissa, _ = torch.frexp(x)  # in [1/2, 1): the quotient is a power of two, exactly
    return torch.where(x == 0, 0.0, x / mantissa / 2)


def chord(angle: torch.Tensor) -> torch.Tensor:
    """The largest distance that a unit vector moves if it turns by up to ``angle``: ``|exp(i a) - 1|``."""
    return 2 * torch.sin(angle.clamp(max=math.pi) / 2)


# ------------------------------------------------------------------------------------------------------------ bounds


@dataclass(frozen=True)
class Bound:
    """The largest error of a method, derived from the roundings of the method.

    Attributes:
        positions, frequencies, products: the significant binary digits of each rounding of the positions, of the
            frequencies and of their products, one after the other.
        reduction: the largest angle to reduce to one turn -> the largest error of the reduction (rad).
        wave: the largest distance of the pair (cos, sin) from the exact pair of the method's own angle.
    """

    positions: tuple[int, ...] = ()
    frequencies: tuple[int, ...] = ()
    products: tuple[int, ...] = ()
    reduction: Callable[[torch.Tensor], torch.Tensor] | None = None
    wave: float = 0.0

    def drift(self, frequencies: torch.Tensor) -> torch.Tensor:
        """The error of the frequency, rad per position. The error of the angle grows in proportion to the position."""
        return _rounded_once(frequencies.double(), self.frequencies)

    def noise(self, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """The part of an angle's error that differs from position to position (rad), ``[P, F]``.

        With ``p' = p + a``, ``f' = f + b`` the angle is ``fl(p' f') = p f + p b + a f' + c``. The result bounds
        ``a f' + c`` and the error of the reduction.
        """
        p, f = positions.double().abs()[:, None], frequencies.double()
        a = _rounded_once(p, self.positions)
        a = torch.where(p <= 2.0 ** min(self.positions, default=0), 0.0, a)
        f = f + self.drift(f)
        product = _rounded((p + a) * f, self.products)
        noise = a * f + product
        return noise if self.reduction is None else noise + self.reduction((p + a) * f + product)

    def angle(self, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """The error of the angle (rad), ``[P, F]``."""
        drift = positions.double().abs()[:, None] * self.drift(frequencies)
        return (drift + self.noise(positions, frequencies)) * (1 + 2.0**-48)  # these sums round as well

    def output(self, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """The distance of (cos, sin) from the truth, which is the relative error of a rotated pair, ``[P, F]``."""
        return chord(self.angle(positions, frequencies)) + self.wave + REFERENCE


def _rounded(x: torch.Tensor, digits: tuple[int, ...]) -> torch.Tensor:
    """The largest error of numbers up to ``x`` after roundings to these numbers of digits, one after the other."""
    return sum((2.0**-t for t in digits), start=0.0) * ufp(x)


def _rounded_once(x: torch.Tensor, digits: tuple[int, ...]) -> torch.Tensor:
    """The largest error of the numbers ``x`` themselves after `_rounded`'s roundings; powers of two stay exact."""
    return torch.where(x == ufp(x), 0.0, _rounded(x, digits))


def wave_error(digits: int, halves: int = 1) -> float:
    """The error of the pair (cos, sin) if each is off by ``halves`` half-ulps of a number in [1/2, 1)."""
    return math.sqrt(2) * halves * 2.0 ** -(digits + 1)


# ----------------------------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Method:
    """A way to compute cos and sin.

    Attributes:
        waves: (positions int64 ``[P]``, inverse frequencies float64 ``[F]``) -> (cos, sin), ``[P, F]``.
        bound: the largest error.
        angles: the angles behind ``waves``, if the method has angles. Angles show errors of more than half a turn.
    """

    waves: Function
    bound: Bound
    angles: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)


def from_angles(angles: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bound: Bound) -> Method:
    """The method that takes torch's cosine and sine of float32 angles."""

    def waves(positions: torch.Tensor, frequencies: torch.Tensor) -> Waves:
        found = angles(positions, frequencies)
        return found.cos(), found.sin()

    return Method(waves, bound, angles=angles)


def _fp32_angles(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    return positions.float()[:, None] * frequencies.float()


def _bf16_positions(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    return positions.bfloat16().float()[:, None] * frequencies.float()


def _bf16_frequencies(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    return positions.float()[:, None] * frequencies.float().bfloat16().float()


def _tf32_emulated(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    return to_tf32(positions.float())[:, None] * to_tf32(frequencies.float())


def float64_tables(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype = torch.float32) -> Waves:
    """The rows of `ropelab.rotary_table` at these positions, without the rows in between."""
    angles = torch.outer(positions.double(), frequencies.double())
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _table_free(positions: torch.Tensor, frequencies: torch.Tensor) -> Waves:
    """cos and sin by the kernel on a GPU, and elsewhere by the same operations in torch, with the same bits."""
    waves = kernel_waves if positions.is_cuda else angles_torch.cos_sin
    return waves(positions, fixed_point(frequencies, device=positions.device))


def _bf16_tables(positions: torch.Tensor, frequencies: torch.Tensor) -> Waves:
    return float64_tables(positions, frequencies, torch.bfloat16)


# The significant binary digits of each format.
BF16, TF32, FP32, FP64 = 8, 11, 24, 53

# Library cosines in float32 are right to 1 ulp (SLEEF, on a CPU) or 2 (CUDA), which is 4 halves.
_FP32_LIBRARY = wave_error(FP32, halves=4)
_FP64_LIBRARY = wave_error(FP64, halves=4)

METHODS: dict[str, Method] = {
    "bf16 positions": from_angles(_bf16_positions, Bound((BF16,), (FP32,), (FP32,), wave=_FP32_LIBRARY)),
    "bf16 frequencies": from_angles(_bf16_frequencies, Bound((), (FP32, BF16), (FP32,), wave=_FP32_LIBRARY)),
    # A product of 11 and 11 digits has 22 digits, so it is exact in float32.
    "TF32, emulated": from_angles(_tf32_emulated, Bound((TF32,), (FP32, TF32), (), wave=_FP32_LIBRARY)),
    "fp32 angles": from_angles(_fp32_angles, Bound((FP32,), (FP32,), (FP32,), wave=_FP32_LIBRARY)),
    # Numbers go from float64 to bfloat16 by way of float32.
    "bf16 tables": Method(
        _bf16_tables, Bound(products=(FP64,), wave=wave_error(BF16) + wave_error(FP32) + _FP64_LIBRARY)
    ),
    "float64-built tables": Method(float64_tables, Bound(products=(FP64,), wave=wave_error(FP32) + _FP64_LIBRARY)),
    # The kernel promises an ulp, two halves.
    "table-free kernel": Method(_table_free, Bound(wave=wave_error(FP32, halves=2))),
}
"""Name -> method, the largest errors first. `ropelab.study.topics.precision.gpu` has the methods that need a GPU."""


# ------------------------------------------------------------------------------------------------------------ errors


def angle_error(method: Method, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """``|angle - position * frequency|`` (rad) of a method that has angles, full turns included."""
    high, low = exact_product(positions, frequencies)
    return (method.angles(positions, frequencies).double().cpu() - high - low).abs()


def turned(waves: Waves, truth: Waves) -> torch.Tensor:
    """The angle between (cos, sin) and the truth (rad), at most half a turn."""
    (c, s), (c0, s0) = ((wave.double().cpu() for wave in pair) for pair in (waves, truth))
    return torch.atan2(s * c0 - c * s0, c * c0 + s * s0).abs()


def output_error(waves: Waves, truth: Waves) -> torch.Tensor:
    """The distance of (cos, sin) from the truth: ``|R' x - R x| / |x|``, which is the same for every pair x."""
    return torch.hypot(*(wave.double().cpu() - right for wave, right in zip(waves, truth, strict=True)))


def worst_ulps(waves: Waves, truth: Waves) -> float:
    """The largest error of a cosine or sine in float32 ulps of the value; an ulp is tiny near a zero."""
    return max(ulps(wave.cpu(), right) for wave, right in zip(waves, truth, strict=True))
