"""Compute cosine and sine of ``position x frequency`` without a table, in torch operations.

The method serves every int32 position. A float32 product of position and frequency has an error of position x
frequency x 2^-24 rad: a full turn at a position of a hundred million. The functions therefore multiply integers,
because integers wrap around where angles do. Let ``g`` be the frequency in turns per position, rounded to 96 bits
behind the binary point. Then

    t = position g mod 1           with 64 bits; the bits that wrap around are whole turns
    k = nearest(4 t)               the quarter turn
    x = 2 pi (t - k / 4)           at most pi/4 in magnitude; an integer with 61 bits behind the binary point

x is the sum of a head and a tail. The head has 12 bits, so that its square has no rounding error. Head and tail enter
the Taylor series in an order in which only the last addition rounds by half an ulp (`sine_and_cosine`).

Float32 and integer operations in this order round in the same way on every device, so `angles_triton` gives the same
bits.
"""

import torch

HIGH, LOW, FACTOR = range(3)
"""The columns of the frequencies, int64 ``[R/2, 3]``.

HIGH holds the first 64 bits of the turns per position behind the binary point; they wrap around. LOW holds the next 32
bits. FACTOR holds the bits of the attention factor in float32."""

TWO_PI_HEAD, TWO_PI_TAIL = divmod(3622009729038561421, 2**31)
"""2 pi x 2^59, rounded to the nearest integer and written as head x 2^31 + tail."""

SINE = (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880)
"""The coefficients of sin x = x + x^3 (s0 + s1 x^2 + ...) - x^11/39916800 ...

The terms from x^11 on are left out: their sum is below 2e-9 for x up to pi/4."""

COSINE = (1 / 24, -1 / 720, 1 / 40320, -1 / 3628800)
"""The coefficients of cos x = 1 - x^2/2 + x^4 (c0 + c1 x^2 + ...) + x^12/479001600 ...

The terms from x^12 on are left out: their sum is below 2e-10 for x up to pi/4."""


def cos_sin(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine times the attention factor.

    Before the multiplication by the factor, both are within 1 ulp of the values at an angle (`sine_and_cosine`). This
    angle is within 4.05 x 2^-61 rad of the exact one for the 96 bits of the frequency, which shows only near a zero.
    The sine of 6e-12 rad, the smallest of all int32 positions for a base of 10,000, is off by 2.05 ulps of itself.

    Args:
        positions: int32 or int64, of a magnitude below 2^31.
        frequencies: int64 ``[R/2, 3]``, see `HIGH`.

    Returns:
        ``(cos, sin)``, float32 ``[*positions.shape, R/2]``.
    """
    count = positions.long().abs()[..., None]
    high, low, factor = frequencies.unbind(-1)
    turns = count * high + ((count * low) >> 32)
    quarter = (turns + 2**61) >> 62
    rest = turns - (quarter << 62)  # in turns, 64 bits behind the binary point, at most an eighth
    rest_head, rest_tail = rest >> 31, rest & (2**31 - 1)
    x = rest_head * TWO_PI_HEAD + ((rest_head * TWO_PI_TAIL) >> 31) + ((rest_tail * TWO_PI_HEAD) >> 31)
    head = (x + 2**48) >> 49
    sin, cos = sine_and_cosine(head.float() * 2.0**-12, (x - (head << 49)).float() * 2.0**-61)
    # A quarter turn replaces sin by cos and cos by -sin.
    odd, back = (quarter & 1) != 0, (quarter & 2) != 0
    sin, cos = torch.where(odd, cos, sin), torch.where(odd, -sin, cos)
    sin = torch.where(back != (positions < 0)[..., None], -sin, sin)
    factor = factor.int().view(torch.float32)
    return torch.where(back, -cos, cos) * factor, sin * factor


def sine_and_cosine(head: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine and cosine of ``x = head + tail``, where ``x`` is at most pi/4 in magnitude; float32.

    The errors are at most 0.92 ulp for the sine and 0.58 ulp for the cosine. The repository's
    test_sine_proofs.py proves these bounds by interval arithmetic. Let u = 2^-24. The tail has a rounding error
    of u tail, x^2 has an error of about u x^2, and each of the two results rounds once in its last sum. The series
    behind the leading terms is at most 0.078 for the sine and 0.016 for the cosine. Its few rounding errors are smaller
    than the rounding error of the result by the same factor.

    Args:
        head: the multiple of 2^-12 that is nearest to ``x``.
        tail: the rest of ``x``.
    """
    x = head + tail
    exact, rest = head * head, (head + x) * tail
    square = exact + rest
    sine, cosine = torch.full_like(x, SINE[-1]), torch.full_like(x, COSINE[-1])
    for s, c in zip(SINE[-2::-1], COSINE[-2::-1], strict=True):
        sine, cosine = sine * square + s, cosine * square + c
    sine = head + (tail + x * square * sine)
    leading = 1.0 - 0.5 * exact
    lost = (1.0 - leading) - 0.5 * exact
    return sine, leading + ((lost - 0.5 * rest) + square * square * cosine)
