"""The definition of RoPE, in float64 and in plain torch, to compare other implementations with.

The module imports nothing from the kernels, so it shares no mistake with them.
"""

from collections.abc import Sequence

import torch

from ropelab.layout.pairing import join, pairs
from ropelab.layout.seq_format import from_bshd, to_bshd

_NO_POSITION = -(2**31)  # as in ropelab.kernels


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    layout: str = "split_half",
    out_layout: str | None = None,
    seq_format: str = "bshd",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate every pair of features of every head by the angle of the token's position.

    `ropelab.positions` says which row of the tables the token reads. ``c0`` and ``s0`` are the columns of the row for
    the first member of a pair, ``c1`` and ``s1`` for the second member::

        y0 = x0 c0 - x1 s0
        y1 = x1 c1 + x0 s1

    (Su et al., RoFormer, equation 34, where ``c0 = c1`` and ``s0 = s1``.) The arguments are the arguments of
    `ropelab.apply_rope`. All positions but ``NO_POSITION`` must have a row.

    Returns:
        A new float64 tensor of the shape of ``x``, differentiable by plain autograd.
    """
    x = to_bshd(x.double(), seq_format)
    batch, seq_len = x.shape[:2]
    if positions is None:
        starts = torch.as_tensor(offsets, device=x.device).long().expand(batch)[:, None]
        # An offset without a position gives no token of the sequence a position.
        positions = torch.where(starts == _NO_POSITION, starts, starts + torch.arange(seq_len, device=x.device))
    along = positions.long()[: max(axes) + 1] if axes is not None else positions.long()[None]
    along = along if along.ndim == 3 else along[:, None]
    positions = along.expand(-1, batch, seq_len).movedim(0, -1)  # along each axis
    is_token = (positions != _NO_POSITION).any(-1)[..., None, None]
    if axes is not None:
        positions = positions[..., list(axes)]  # of each column
    has_row = positions != _NO_POSITION

    cos, sin = (t.double().expand(batch, *t.shape[-2:]) for t in (cos, sin))
    row, column = torch.where(has_row, positions.abs(), 0), torch.arange(cos.shape[-1], device=x.device)
    each = torch.arange(batch, device=x.device)[:, None, None]
    cos, sin = (torch.where(has_row, t[each, row, column], 0)[:, :, None] for t in (cos, sin))
    sin = torch.where((positions < 0)[:, :, None], -sin, sin)

    first, end = rotary_slice or (0, 2 * cos.shape[-1])
    full_width = cos.shape[-1] == end - first
    c0, c1 = pairs(cos, layout) if full_width else (cos, cos)
    s0, s1 = pairs(sin, layout) if full_width else (sin, sin)
    if inverse:  # the transposed matrix
        s0, s1 = -s1, -s0
    x0, x1 = pairs(x[..., first:end], layout)
    rotated = join(x0 * c0 - x1 * s0, x1 * c1 + x0 * s1, out_layout or layout)
    y = torch.cat((x[..., :first], rotated, x[..., end:]), dim=-1)
    return from_bshd(torch.where(is_token, y, 0.0), seq_format)
