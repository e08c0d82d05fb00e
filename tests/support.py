"""What several test files need: random inputs, and the comparison with the definition."""

import torch

from ropelab import reference
from ropelab.kernels import rotate_triton
from ropelab.layout import join, pairs
from ropelab.seq_format import to_bshd


def draw(batch, seq_len, heads, head_dim, *, seq_format="bshd", dtype=torch.float32, device="cpu") -> torch.Tensor:
    """Standard normal numbers, contiguous in ``seq_format``."""
    like = torch.empty(batch, seq_len, heads, head_dim, device="meta")
    return torch.randn(to_bshd(like, seq_format).shape, dtype=torch.float64).to(device, dtype)


def assert_rotated(actual, x, cos, sin, *, layout, seq_format="bshd", inverse=False):
    """``actual`` is the rotation of ``x`` up to the roundings that the arithmetic cannot avoid.

    y0 = x0 c - x1 s in a compute type of unit roundoff u rounds two products and a difference, which is at most
    ((1 + u)^2 - 1)(|x0 c| + |x1 s|); storing rounds once more, by u_out |y| (2 u_out where the interpreter
    truncates bfloat16). Features that are not rotated must be the same bits.
    """
    assert actual.shape == x.shape and actual.dtype == x.dtype
    options = {"layout": layout, "seq_format": seq_format, "inverse": inverse}
    expected = reference.rotate(x, cos, sin, **options)
    rotary_dim = 2 * cos.shape[1]

    unit = torch.finfo(torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)).eps / 2
    x0, x1 = pairs(x[..., :rotary_dim].double().abs(), layout)
    magnitude = join(x0 + x1, x0 + x1, layout) * max(cos.abs().max().item(), sin.abs().max().item())
    # The reference itself computes in float64: the same bound once more.
    bound = ((1 + unit) ** 2 - 1 + 2 * torch.finfo(torch.float64).eps) * magnitude
    out = torch.finfo(x.dtype)
    unit_out = out.eps if x.dtype == torch.bfloat16 and rotate_triton.INTERPRETED else out.eps / 2
    bound = bound + unit_out * (expected[..., :rotary_dim].abs() + bound) + out.tiny * out.eps

    error = (actual[..., :rotary_dim].double() - expected[..., :rotary_dim]).abs()
    assert (error <= bound).all(), f"error {error.max():.3g} over bound by a factor of {(error / bound).max():.3g}"
    assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])
