"""Cosine and sine of ``position x frequency`` for any int32 position, without a table: in torch operations.

A float32 product of position and frequency is off by position x frequency x 2^-24 rad: by a full turn at a hundred
million. So the product is made in integers, which wrap around where angles do. With ``g`` the frequency in turns per
position, rounded to 96 bits behind the point,

    t = position g mod 1           64 bits of it: what wraps is whole turns
    k = nearest(4 t)               the quarter turn
    x = 2 pi (t - k / 4)           at most pi/4, again in integers: 61 bits behind the point

x falls into a head of 12 bits, whose square has no rounding error, and a tail, and both enter the series of Taylor in
such an order that only the last addition rounds by half an ulp (`sine_and_cosine`).

Float32 and integer operations in this order round alike everywhere: `angles_triton` gives the same bits.
"""

import torch

HIGH, LOW, FACTOR = range(3)
"""Columns of the frequencies ``[R/2, 3]``, int64: the first 64 bits of the turns per position (they wrap), 32 more,
and the bits of the attention factor in float32."""

TWO_PI_HEAD, TWO_PI_TAIL = divmod(3622009729038561421, 2**31)
"""2 pi x 2^59, the nearest integer, as head x 2^31 + tail."""

SINE = (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880)
"""sin x = x + x^3 (s0 + s1 x^2 + ...) - x^11/39916800 ..., what is left out is below 2e-9 for x up to pi/4."""

COSINE = (1 / 24, -1 / 720, 1 / 40320, -1 / 3628800)
"""cos x = 1 - x^2/2 + x^4 (c0 + c1 x^2 + ...) + x^12/479001600 ..., what is left out is below 2e-10."""


def cos_sin(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine times the attention factor, float32 ``[*positions.shape, R/2]``.

    Within 1 ulp of the exact value for the 96 bits of the frequency, before the factor (`sine_and_cosine`).

    Args:
        positions: int32 or int64, magnitude below 2^31.
        frequencies: int64 ``[R/2, 3]``, see `HIGH`.
    """
    count = positions.long().abs()[..., None]
    high, low, factor = frequencies.unbind(-1)
    turns = count * high + ((count * low) >> 32)
    quarter = (turns + 2**61) >> 62
    rest = turns - (quarter << 62)  # of a turn, 64 bits behind the point, at most an eighth
    rest_head, rest_tail = rest >> 31, rest & (2**31 - 1)
    x = rest_head * TWO_PI_HEAD + ((rest_head * TWO_PI_TAIL) >> 31) + ((rest_tail * TWO_PI_HEAD) >> 31)
    head = (x + 2**48) >> 49
    sin, cos = sine_and_cosine(head.float() * 2.0**-12, (x - (head << 49)).float() * 2.0**-61)
    # A quarter turn makes cos of sin and -sin of cos.
    odd, back = (quarter & 1) != 0, (quarter & 2) != 0
    sin, cos = torch.where(odd, cos, sin), torch.where(odd, -sin, cos)
    sin = torch.where(back != (positions < 0)[..., None], -sin, sin)
    factor = factor.int().view(torch.float32)
    return torch.where(back, -cos, cos) * factor, sin * factor


def sine_and_cosine(head: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``x = head + tail``, at most pi/4, head the nearest multiple of 2^-12; float32.

    With u = 2^-24: the tail rounds by u tail, x^2 by about u x^2, and either sum once at the end. The series behind the
    leading terms is at most 0.078 for the sine and 0.016 for the cosine, and its few roundings are as much smaller
    than those of the result: 0.95 ulp for the sine and 0.62 ulp for the cosine at most (tests/test_angles.py).
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
