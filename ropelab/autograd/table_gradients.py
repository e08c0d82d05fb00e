"""The gradients of the rotation with respect to the tables of cosines and sines.

The gradients are torch operations, because tables are rarely trained, and because autograd can differentiate torch
operations once more. `ropelab.positions` says which row of the tables a position reads.
"""

import torch

from ropelab.call.where import Where, along_axes
from ropelab.kernels import NO_POSITION
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.layout.pairing import join, pairs
from ropelab.layout.seq_format import to_bshd


def table_gradients(xs, y_grads, where: Where):
    """The gradients of cos and sin: each row is a sum over the heads, batches and tokens that read the row.

    With g the gradient of y, the pair ``y0 = x0 c0 - x1 s0``, ``y1 = x1 c1 + x0 s1`` gives::

        dc0 = g0 x0,   dc1 = g1 x1,   ds0 = -g0 x1,   ds1 = g1 x0

    For the transposed rotation, g and x change places in these formulas. The products and the sums have the dtype of
    the rotation's arithmetic, so a table that is narrower than the input gets a gradient that is rounded once.

    Args:
        xs, y_grads: q and k, and the gradients of their rotations; None where q or k has no gradient or is missing.
    """
    cos, (_, positions, first_position, options) = where.angles.cos, where
    wide = compute_dtype(xs[0], cos)
    first, end = options.slice(cos.shape[-1])
    if all(g is None for g in y_grads):
        return None, None
    of_cos, of_sin = [], []
    for x, g in zip(xs, y_grads, strict=False):
        if x is None or g is None:
            continue
        x0, x1 = _wide_pairs(x, first, end, options.layout, options.seq_format, wide)
        g0, g1 = _wide_pairs(g, first, end, options.out_layout, options.seq_format, wide)
        if options.transpose:
            x0, x1, g0, g1 = g0, g1, x0, x1
        of_cos.append(_columns(g0 * x0, g1 * x1, cos, end - first, options.layout))
        of_sin.append(_columns(-g0 * x1, g1 * x0, cos, end - first, options.layout))
    cos_tokens, sin_tokens = sum(of_cos[1:], of_cos[0]), sum(of_sin[1:], of_sin[0])
    if positions is None:
        rows = torch.arange(cos_tokens.shape[1], device=cos.device) + first_position
        return tuple(_add_rows(cos, tokens, rows[:, None].expand(tokens.shape)) for tokens in (cos_tokens, sin_tokens))
    if options.offsets:
        along = torch.arange(cos_tokens.shape[1], device=cos.device)
        positions = torch.where(positions[:, None] == NO_POSITION, NO_POSITION, positions[:, None] + along)
    if options.axes is None:
        positions = positions.expand(cos_tokens.shape[:2])[..., None]
    else:
        positions = along_axes(positions, options.axes)[list(options.axes)].movedim(0, -1)
    positions = positions.long().expand(cos_tokens.shape)
    rows = positions.abs()
    # A position without a row makes the result NaN. Here the position must not become an address.
    known = (rows >= 0) & (rows < cos.shape[-2])
    rows = torch.where(known, rows, 0)
    sin_tokens = torch.where(positions < 0, -sin_tokens, sin_tokens)
    return tuple(_add_rows(cos, torch.where(known, t, 0), rows) for t in (cos_tokens, sin_tokens))


def _add_rows(table: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The sum of ``tokens [B, S, W]`` over all tokens that share an entry of the table, in ``rows [B, S, W]``."""
    columns = torch.arange(rows.shape[-1], device=table.device).expand(rows.shape)
    index: tuple[torch.Tensor, ...] = (rows, columns)
    if table.ndim == 3:
        index = torch.arange(table.shape[0], device=table.device)[:, None, None].expand(rows.shape), *index
    return tokens.new_zeros(table.shape).index_put(index, tokens, accumulate=True).to(table.dtype)


def _columns(of_x0, of_x1, table: torch.Tensor, rotary_dim: int, layout: str) -> torch.Tensor:
    """The sum over heads, ``[B, S, W]``, in one column for both members of a pair or in a column for each member."""
    of_x0, of_x1 = of_x0.sum(2), of_x1.sum(2)
    return join(of_x0, of_x1, layout) if table.shape[-1] == rotary_dim else of_x0 + of_x1


def _wide_pairs(x, first: int, end: int, layout: str, seq_format: str, dtype: torch.dtype):
    return (half.to(dtype) for half in pairs(to_bshd(x, seq_format)[..., first:end], layout))
