"""This file holds the Triton kernels for the RMS norm of every head of q and k, followed by the rotation.

One kernel computes the forward. Two kernels compute the backward; the second sums rows of the gradients of the weights.

A separate norm and rotation read and write q and k twice. The fused kernel moves only the bytes of the rotation. The
norm adds a sum over the features of a head. The threads that hold a head are neighbours, so the sum takes a few
exchanges within a warp. For an x of q or k, with weight w and rotation R::

    rstd = 1 / sqrt(mean(x^2) + eps),   xhat = rstd x,   y = R (w xhat)

and, with g the gradient of y::

    gn = R^T g,   dw = sum over tokens and heads of gn xhat,   dx = rstd (w gn - xhat mean(w gn xhat))

The backward computes rstd again: it has to read x in any case, and the forward then keeps nothing for it.

A program works on heads of q or on heads of k, never on both, so q and k share one launch and one code. Features that
do not rotate form pairs too, whose angle is zero, so that one tile holds all features of a head.

In the forward, the compiler may not fuse products and sums on its own, because it would decide anew for every tile.
Together with the order of the sums (`head_sums_triton`) this gives a token the same bits in every call. The sums over a
head have another order than in `qk_norm_torch`, so the results of both agree within rounding and not bit for bit. The
backward leaves the fusion and the order of the sums to the compiler, because a sum of `head_sums_triton` in its loop
moves tensors between threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ropelab.kernels.addressing import (
    MAX_BATCH,
    TL_DTYPE,
    blocks_of_program,
    common_alignment,
    innermost,
    launch_grid,
    mode,
    offsets_of,
    reach,
    readable,
    table_strides,
    turn,
)
from ropelab.kernels.head_sums_triton import sum_of_products
from ropelab.kernels.heads_triton import feature_of, load_heads, load_rotation, slot_of, store_heads
from ropelab.kernels.launch import Launch, compiler_options
from ropelab.kernels.qk_norm_torch import compute_dtype
from ropelab.kernels.rotation import Rotation, row_count
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, Tile, fit_tile, next_power_of_2


@dataclass(frozen=True)
class BackwardTile:
    """The tokens and heads that a program of the backward takes at a time, its warps, and the number of programs.

    A program goes through many blocks of tokens and keeps its share of dw in registers. Each multiprocessor of the GPU
    gets a few programs, and all programs run at once, so that few rows of dw are left to be summed.
    """

    block_tokens: int
    block_heads: int
    num_warps: int
    programs_per_multiprocessor: int
    pairs_per_access: int = PAIRS_PER_ACCESS


@triton.jit(do_not_specialize=[
    "first_position", "table_rows", "seq_len",
    "q_stride_b", "q_stride_s", "q_stride_h", "k_stride_b", "k_stride_s", "k_stride_h",
    "qy_stride_b", "qy_stride_s", "qy_stride_h", "ky_stride_b", "ky_stride_s", "ky_stride_h",
    "cos_stride_b", "cos_stride_p", "sin_stride_b", "sin_stride_p", "positions_stride_b", "positions_stride_s",
])  # fmt: skip
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, qy_ptr, ky_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, positions_ptr,
    first_position, table_rows, seq_len,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    qy_stride_b, qy_stride_s, qy_stride_h, ky_stride_b, ky_stride_s, ky_stride_h,
    cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    INNERMOST: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr, EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL_WIDTH: tl.constexpr, POSITIONS: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, GROUP: tl.constexpr, SAME_STRIDES: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write y = R (w x / sqrt(mean(x^2) + eps)) for a block of tokens and heads; the grid is as in `rotate_triton`."""
    head_block, token_block, batch = blocks_of_program(HEAD_BLOCKS, INNERMOST)
    first_seq = token_block * BLOCK_TOKENS
    is_q = head_block < Q_BLOCKS
    head = tl.where(is_q, head_block, head_block - Q_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    token = tl.arange(0, BLOCK_TOKENS)
    # The grid is exact for blocks of one token; a block of several tokens may reach past the end.
    is_token = token >= 0 if BLOCK_TOKENS == 1 else first_seq + token < seq_len
    mask = is_token[:, None, None] & (head < tl.where(is_q, Q_HEADS, K_HEADS))[None, :, None]

    at = offsets_of(
        tl.where(is_q, q_stride_b, k_stride_b), tl.where(is_q, q_stride_s, k_stride_s),
        tl.where(is_q, q_stride_h, k_stride_h), batch, first_seq, token, head, ALIGN, WIDE,
    )  # fmt: skip
    # All loads come before the first store, because the compiler may not move a load across a store.
    x0, x1 = load_heads(
        tl.where(is_q, q_ptr, k_ptr) + at, mask,
        HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, "",
    )  # fmt: skip
    cos0, cos1, sin0, sin1, has_position = load_rotation(
        cos_ptr, sin_ptr, positions_ptr, first_position, table_rows,
        cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
        batch, first_seq, token, is_token, mask,
        ROTARY_DIM, INTERLEAVED, FULL_WIDTH, POSITIONS, TABLE_ALIGN, SAME_STRIDES, BLOCK_PAIRS,
        COMPUTE_DTYPE,
    )  # fmt: skip
    w0, w1 = load_heads(
        tl.where(is_q, qw_ptr, kw_ptr), mask,
        HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, "evict_last",
    )  # fmt: skip

    rstd = tl.rsqrt(sum_of_products(x0, x0, x1, x1) / HEAD_DIM + EPS)
    y0, y1 = turn(w0 * (x0 * rstd), w1 * (x1 * rstd), cos0, cos1, sin0, sin1, False)
    if POSITIONS != "none":
        y0, y1 = tl.where(has_position, y0, 0.0), tl.where(has_position, y1, 0.0)

    y_at = at
    if not SAME_STRIDES:
        y_at = offsets_of(
            tl.where(is_q, qy_stride_b, ky_stride_b), tl.where(is_q, qy_stride_s, ky_stride_s),
            tl.where(is_q, qy_stride_h, ky_stride_h), batch, first_seq, token, head, ALIGN, WIDE,
        )  # fmt: skip
    store_heads(
        tl.where(is_q, qy_ptr, ky_ptr) + y_at, mask, y0, y1,
        HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS,
    )  # fmt: skip


@triton.jit(do_not_specialize=[
    "first_position", "table_rows", "seq_len", "token_blocks", "blocks",
    "q_stride_b", "q_stride_s", "q_stride_h", "k_stride_b", "k_stride_s", "k_stride_h",
    "qg_stride_b", "qg_stride_s", "qg_stride_h", "kg_stride_b", "kg_stride_s", "kg_stride_h",
    "qdx_stride_b", "qdx_stride_s", "qdx_stride_h", "kdx_stride_b", "kdx_stride_s", "kdx_stride_h",
    "cos_stride_b", "cos_stride_p", "sin_stride_b", "sin_stride_p", "positions_stride_b", "positions_stride_s",
])  # fmt: skip
def _qk_norm_rope_backward_kernel(
    q_ptr, k_ptr, qg_ptr, kg_ptr, qdx_ptr, kdx_ptr, qw_ptr, kw_ptr, dw_ptr, cos_ptr, sin_ptr, positions_ptr,
    first_position, table_rows, seq_len, token_blocks, blocks,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    qg_stride_b, qg_stride_s, qg_stride_h, kg_stride_b, kg_stride_s, kg_stride_h,
    qdx_stride_b, qdx_stride_s, qdx_stride_h, kdx_stride_b, kdx_stride_s, kdx_stride_h,
    cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr, EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL_WIDTH: tl.constexpr, POSITIONS: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    WEIGHT_GRADS: tl.constexpr, ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, GROUP: tl.constexpr,
    SAME_STRIDES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write dx for some blocks of tokens of one block of heads, and their share of dw as one row of ``dw_ptr``.

    Axis 0 of the grid has the blocks of heads, the blocks of q first. Axis 1 has the programs that share the blocks of
    tokens of all batches. These programs take the blocks in turn, so that at any time all of them work on tokens that
    are close together. The rows of dw have the order of the blocks of heads, so the rows of k follow the rows of q.
    """
    head_block = tl.program_id(0)
    is_q = head_block < Q_BLOCKS
    head = tl.where(is_q, head_block, head_block - Q_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = (head < tl.where(is_q, Q_HEADS, K_HEADS))[None, :, None]
    token = tl.arange(0, BLOCK_TOKENS)
    w0, w1 = load_heads(
        tl.where(is_q, qw_ptr, kw_ptr), (token >= 0)[:, None, None] & is_head,
        HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, "evict_last",
    )  # fmt: skip
    dw0 = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS], COMPUTE_DTYPE)
    dw1 = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_PAIRS], COMPUTE_DTYPE)

    program, programs = tl.program_id(1), tl.num_programs(1)
    dw_row = head_block * programs + program
    batch, token_block = program // token_blocks, program % token_blocks
    batch_step, token_step = programs // token_blocks, programs % token_blocks
    for _ in range(program, blocks, programs):
        first_seq = token_block * BLOCK_TOKENS
        is_token = token >= 0 if BLOCK_TOKENS == 1 else first_seq + token < seq_len
        mask = is_token[:, None, None] & is_head
        at = offsets_of(
            tl.where(is_q, q_stride_b, k_stride_b), tl.where(is_q, q_stride_s, k_stride_s),
            tl.where(is_q, q_stride_h, k_stride_h), batch, first_seq, token, head, ALIGN, WIDE,
        )  # fmt: skip
        g_at, dx_at = at, at
        if not SAME_STRIDES:
            g_at = offsets_of(
                tl.where(is_q, qg_stride_b, kg_stride_b), tl.where(is_q, qg_stride_s, kg_stride_s),
                tl.where(is_q, qg_stride_h, kg_stride_h), batch, first_seq, token, head, ALIGN, WIDE,
            )  # fmt: skip
            dx_at = offsets_of(
                tl.where(is_q, qdx_stride_b, kdx_stride_b), tl.where(is_q, qdx_stride_s, kdx_stride_s),
                tl.where(is_q, qdx_stride_h, kdx_stride_h), batch, first_seq, token, head, ALIGN, WIDE,
            )  # fmt: skip
        x0, x1 = load_heads(
            tl.where(is_q, q_ptr, k_ptr) + at, mask,
            HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, "",
        )  # fmt: skip
        g0, g1 = load_heads(
            tl.where(is_q, qg_ptr, kg_ptr) + g_at, mask,
            HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, "",
        )  # fmt: skip
        cos0, cos1, sin0, sin1, has_position = load_rotation(
            cos_ptr, sin_ptr, positions_ptr, first_position, table_rows,
            cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
            batch, first_seq, token, is_token, mask,
            ROTARY_DIM, INTERLEAVED, FULL_WIDTH, POSITIONS, TABLE_ALIGN, SAME_STRIDES, BLOCK_PAIRS,
            COMPUTE_DTYPE,
        )  # fmt: skip

        gn0, gn1 = turn(g0, g1, cos0, cos1, sin0, sin1, True)
        counts = mask
        if POSITIONS != "none":  # a token without a position may hold any values, and its row of the tables is NaN
            counts = mask & has_position
            x0, x1 = tl.where(counts, x0, 0.0), tl.where(counts, x1, 0.0)
            gn0, gn1 = tl.where(counts, gn0, 0.0), tl.where(counts, gn1, 0.0)
        rstd = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1, axis=2, keep_dims=True) / HEAD_DIM + EPS)
        rstd = tl.where(counts, rstd, 0.0)  # the rstd of zeros is infinite if eps is 0
        xhat0, xhat1 = x0 * rstd, x1 * rstd
        wg0, wg1 = w0 * gn0, w1 * gn1
        mean = tl.sum(wg0 * xhat0 + wg1 * xhat1, axis=2, keep_dims=True) / HEAD_DIM
        if WEIGHT_GRADS:
            dw0 += gn0 * xhat0
            dw1 += gn1 * xhat1
        store_heads(
            tl.where(is_q, qdx_ptr, kdx_ptr) + dx_at, mask, rstd * (wg0 - xhat0 * mean), rstd * (wg1 - xhat1 * mean),
            HEAD_DIM, ROTARY_DIM, FIRST, INTERLEAVED, GROUP, BLOCK_PAIRS,
        )  # fmt: skip

        # This finds the next block without a division, because the loads would wait for the quotient.
        token_block += token_step
        wraps = token_block >= token_blocks
        token_block = tl.where(wraps, token_block - token_blocks, token_block)
        batch += tl.where(wraps, batch_step + 1, batch_step)

    if WEIGHT_GRADS:
        row = dw_ptr + dw_row.to(tl.int64) * HEAD_DIM
        slot0, inside0 = slot_of(0, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        slot1, inside1 = slot_of(1, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        tl.store(row + feature_of(slot0, ROTARY_DIM, FIRST), tl.sum(tl.sum(dw0, axis=0), axis=0), mask=inside0)
        tl.store(row + feature_of(slot1, ROTARY_DIM, FIRST), tl.sum(tl.sum(dw1, axis=0), axis=0), mask=inside1)


@triton.jit(do_not_specialize=["q_rows", "rows"])
def _sum_rows_kernel(
    dw_ptr, q_dw_ptr, k_dw_ptr, q_rows, rows,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Write the sum of the rows of dw of q, or of k, for a block of features; the order of the sum is always the same.

    Axis 0 of the grid has q and k, axis 1 has the blocks of features.
    """
    is_q = tl.program_id(0) == 0
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    total = tl.zeros([BLOCK_ROWS, BLOCK_FEATURES], dw_ptr.dtype.element_ty)
    for first in range(tl.where(is_q, 0, q_rows), tl.where(is_q, q_rows, rows), BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = (row < tl.where(is_q, q_rows, rows))[:, None] & (feature < HEAD_DIM)[None, :]
        total += tl.load(dw_ptr + row[:, None] * HEAD_DIM + feature[None, :], mask=inside, other=0)
    dw = tl.sum(total, axis=0).to(q_dw_ptr.dtype.element_ty)
    tl.store(tl.where(is_q, q_dw_ptr, k_dw_ptr) + feature, dw, mask=feature < HEAD_DIM)


def forward(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    eps: float,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
    tile: Tile | None = None,
) -> None:
    """Write ``R (w x / sqrt(mean(x^2) + eps))`` for q and k to ``outs`` in one launch.

    Args:
        xs: q and k, ``[B, S, H_i, D]``, of one dtype on one GPU, any strides; a last stride other than 1 costs a copy.
        outs: the results for q and k, as ``xs``, with last strides of 1. Every element of both is written.
        weights: the weights of q and k, ``[D]``, of one floating dtype.
        cos, sin, rotation, positions, first_position: as for `rotate_triton.rotate`. The outputs have the layout of the
            inputs, and ``rotation.transpose`` is ignored.
        eps: the number that is added to the mean of the squares.
        tile: for sweeps; by default `choose_forward_tile` decides.
    """
    xs, weights, (cos, sin) = ([readable(x) for x in tensors] for tensors in (xs, weights, (cos, sin)))
    for start in range(0, xs[0].shape[0], MAX_BATCH):
        part = slice(start, start + MAX_BATCH)
        x_parts, y_parts = [x[part] for x in xs], [y[part] for y in outs]
        cos_part, sin_part = (table[part] if table.ndim == 3 else table for table in (cos, sin))
        positions_part = None if positions is None else positions[part]
        plan_forward(x_parts, y_parts, weights, cos_part, sin_part, positions_part, rotation, eps, tile)(
            *x_parts, *y_parts, *weights, cos_part, sin_part, cos if positions is None else positions_part,
            first_position, row_count(cos),
        )  # fmt: skip


def backward(
    xs: Sequence[torch.Tensor],
    gs: Sequence[torch.Tensor],
    dxs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    dws: Sequence[torch.Tensor] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    eps: float,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
    tile: BackwardTile | None = None,
) -> None:
    """Write the gradients in q and k to ``dxs`` and, unless ``dws`` is None, the gradients in their weights to ``dws``.

    Args:
        gs: the gradients of the outputs, as ``xs``.
        dxs: the gradients in q and k, as ``outs`` of `forward`.
        dws: the gradients in the weights, as ``weights`` and contiguous; or None.
        tile: for sweeps; by default `choose_backward_tile` decides.

    All other arguments are as for `forward`. The order in which the gradients in the weights are summed depends on the
    shapes and the GPU only, so that a repeated call gives the same bits.
    """
    xs, gs, weights, (cos, sin) = ([readable(x) for x in tensors] for tensors in (xs, gs, weights, (cos, sin)))
    plan_backward(xs, gs, dxs, weights, dws, cos, sin, positions, rotation, eps, tile)(
        *xs, *gs, *dxs, *weights, dws, cos, sin, cos if positions is None else positions, first_position, row_count(cos)
    )


def plan_forward(xs, outs, weights, cos, sin, positions, rotation: Rotation, eps: float, tile: Tile | None = None):
    """The launch that `forward` makes for tensors like these; a caller can repeat the launch, see `rotate_triton.plan`.

    The arguments are as for `forward`, but have last strides of 1 and at most ``MAX_BATCH`` batches.

    Returns:
        ``launch(q, k, q_out, k_out, q_weight, k_weight, cos, sin, positions, first_position, table_rows)``
    """
    batch, seq_len, q_heads, head_dim = xs[0].shape
    if xs[0].numel() + xs[1].numel() == 0:
        return _launch_nothing
    most_heads = max(q_heads, xs[1].shape[2])
    features, order = 2 * _block_pairs(head_dim, rotation), innermost(xs[0])
    tile = tile or choose_forward_tile(features, most_heads, seq_len, order, xs[0].itemsize)
    constants, strides = _plan(xs, (outs,), weights, cos, sin, positions, rotation, eps, tile)
    grid, order = launch_grid(batch, triton.cdiv(seq_len, tile.block_tokens), _head_blocks(xs, tile), tile.innermost)
    constants |= {"HEAD_BLOCKS": _head_blocks(xs, tile), "INNERMOST": order}
    return _launch(_qk_norm_rope_kernel, grid, (seq_len, *strides), constants, tile, xs[0], fuse=False)


def plan_backward(
    xs, gs, dxs, weights, dws, cos, sin, positions, rotation: Rotation, eps: float, tile: BackwardTile | None = None
) -> Callable[..., None]:
    """The launches that `backward` makes for tensors like these; a caller can repeat them.

    The arguments are as for `backward`, but have last strides of 1.

    Returns:
        ``launch(q, k, q_grad, k_grad, q_dx, k_dx, q_weight, k_weight, dws, cos, sin, positions, first_position,
        table_rows)`` with ``dws`` as for `backward`.
    """
    batch, seq_len, q_heads, head_dim = xs[0].shape
    if xs[0].numel() + xs[1].numel() == 0:
        return _launch_backward_of_nothing
    most_heads = max(q_heads, xs[1].shape[2])
    features, order = 2 * _block_pairs(head_dim, rotation), innermost(xs[0])
    tile = tile or choose_backward_tile(features, most_heads, seq_len, order, xs[0].itemsize)
    constants, strides = _plan(xs, (gs, dxs), weights, cos, sin, positions, rotation, eps, tile)
    constants |= {"WEIGHT_GRADS": dws is not None}
    head_blocks = _head_blocks(xs, tile)
    token_blocks = triton.cdiv(seq_len, tile.block_tokens)
    programs = tile.programs_per_multiprocessor * _multiprocessors(xs[0].device) // head_blocks
    programs = max(1, min(programs, batch * token_blocks))
    numbers = (seq_len, token_blocks, batch * token_blocks, *strides)
    grid = (head_blocks, programs, 1)
    launch = _launch(_qk_norm_rope_backward_kernel, grid, numbers, constants, tile, xs[0], fuse=True)
    if dws is None:
        return Backward(launch)
    rows, q_rows = head_blocks * programs, constants["Q_BLOCKS"] * programs
    sum_rows = Launch(
        _sum_rows_kernel, (2, triton.cdiv(head_dim, _SUM_FEATURES), 1), (q_rows, rows),
        {"HEAD_DIM": head_dim, "BLOCK_ROWS": _SUM_ROWS, "BLOCK_FEATURES": _SUM_FEATURES},
        compiler_options(8, None, fuse=True), xs[0].device,
    )  # fmt: skip
    return Backward(launch, sum_rows, (rows, head_dim), compute_dtype(xs[0], cos, weights))


@dataclass(frozen=True)
class Backward:
    """The launch that writes dx and one row of dw for each of its programs, and the launch that sums the rows."""

    gradients: Launch
    sum_rows: Launch | None = None
    rows_shape: tuple[int, int] = (0, 0)
    rows_dtype: torch.dtype = torch.float32

    def __call__(self, q, k, q_grad, k_grad, q_dx, k_dx, q_weight, k_weight, dws, *rest) -> None:
        rows = q_dx  # stands in for the rows, because the kernel ignores this argument without dws
        if self.sum_rows is not None:
            rows = torch.empty(self.rows_shape, dtype=self.rows_dtype, device=q.device)
        self.gradients(q, k, q_grad, k_grad, q_dx, k_dx, q_weight, k_weight, rows, *rest)
        if self.sum_rows is not None:
            self.sum_rows(rows, *dws)


# Few programs read all rows, so each program must have many reads under way at once: 32 for each of 256 threads.
_SUM_ROWS, _SUM_FEATURES = 512, 16


_REGISTERS = 65536
"""The registers of a multiprocessor; every NVIDIA GPU from sm_70 on has so many."""


def choose_forward_tile(features: int, heads: int, seq_len: int, innermost: str = "heads", itemsize: int = 2) -> Tile:
    """The tile of the forward: 512 pairs of tokens that have ``heads`` heads of ``features`` features.

    512 pairs are 8 heads of 128 features; q and k usually have no fewer. A thread takes 16 bytes of each member of its
    pairs. Half as many interleaved pairs would fill 16 bytes too, but twice as many threads then share a head, and the
    sum over the head holds them up: 0.89 of a copy instead of 0.97. Where tokens are innermost, a program takes few
    heads.
    """
    if itemsize > 2:
        most_heads = 2 if innermost == "tokens" else None
        return fit_tile(features, heads, seq_len, innermost, PAIRS_PER_ACCESS, 4, most_heads)
    most_heads = 1 if innermost == "tokens" else None
    return fit_tile(features, heads, seq_len, innermost, 2 * PAIRS_PER_ACCESS, 2, most_heads)


def choose_backward_tile(
    features: int, heads: int, seq_len: int, innermost: str = "heads", itemsize: int = 2
) -> BackwardTile:
    """The tile of the backward: 512 pairs, four for each thread, because a thread holds x and its gradient at once.

    The order of the sums over a head depends on the pairs that a thread holds. The tile therefore has so many heads
    that every thread holds four pairs of a head: a gradient has the same bits for any number of tokens and heads.

    There are as many programs as the registers of the GPU allow at once. All programs then run at the same time, and no
    program waits until others are done.
    """
    most_heads = 2 if innermost == "tokens" else None
    tile = fit_tile(features, heads, seq_len, innermost, PAIRS_PER_ACCESS, 4, most_heads)
    lanes = 32 * PAIRS_PER_ACCESS // (tile.block_tokens * features // 2)
    tile = replace(tile, block_heads=max(tile.block_heads, lanes))
    registers = 32 * tile.num_warps * _registers(tile, features // 2, itemsize)
    return BackwardTile(tile.block_tokens, tile.block_heads, tile.num_warps, max(1, _REGISTERS // registers))


def _plan(xs, others, weights, cos, sin, positions, rotation: Rotation, eps: float, tile) -> tuple[dict, tuple]:
    """The constants of both kernels, and the strides."""
    tensors = [*xs, *(x for pair in others for x in pair)]
    head_dim = xs[0].shape[3]
    strides = [[s for x in pair for s in x.stride()[:3]] for pair in (xs, *others)]
    cos_strides, sin_strides = table_strides(cos), table_strides(sin)
    positions_strides = (0, 0) if positions is None else (*positions.stride(), 0)[:2]
    all_strides = [s for of_pair in strides for s in of_pair]
    rest_pairs = (head_dim - rotation.rotary_dim + 1) // 2
    constants = {
        "Q_HEADS": xs[0].shape[2], "K_HEADS": xs[1].shape[2], "Q_BLOCKS": triton.cdiv(xs[0].shape[2], tile.block_heads),
        "HEAD_DIM": head_dim, "ROTARY_DIM": rotation.rotary_dim, "FIRST": rotation.first, "EPS": float(eps),
        "INTERLEAVED": rotation.interleaved, "FULL_WIDTH": rotation.full_width,
        "POSITIONS": mode(positions, rotation),
        "COMPUTE_DTYPE": TL_DTYPE[compute_dtype(xs[0], cos, weights)],
        "ALIGN": min(common_alignment(all_strides), tile.pairs_per_access * (2 if rotation.interleaved else 1)),
        "TABLE_ALIGN": common_alignment([*cos_strides, *sin_strides]),
        "GROUP": min(common_alignment([rotation.rotary_dim // 2, rest_pairs, rotation.first]), tile.pairs_per_access),
        # With SAME_STRIDES, one offset serves all tensors of q, or of k, and one offset serves cos and sin.
        "SAME_STRIDES": all(of_pair == strides[0] for of_pair in strides) and cos_strides == sin_strides,
        "WIDE": any(reach(x, tile.block_tokens) >= 2**31 for x in tensors),
        "BLOCK_TOKENS": tile.block_tokens, "BLOCK_HEADS": tile.block_heads,
        "BLOCK_PAIRS": _block_pairs(head_dim, rotation),
    }  # fmt: skip
    return constants, (*all_strides, *cos_strides, *sin_strides, *positions_strides)


def _launch(kernel, grid, numbers, constants: dict, tile, x: torch.Tensor, *, fuse: bool) -> Launch:
    in_order = {name: constants[name] for name in kernel.arg_names[-len(constants) :]}
    registers = _registers(tile, constants["BLOCK_PAIRS"], x.itemsize)
    return Launch(kernel, grid, numbers, in_order, compiler_options(tile.num_warps, registers, fuse=fuse), x.device)


def _registers(tile, block_pairs: int, itemsize: int) -> int:
    """The limit on the registers of a thread: 64 for four pairs of features of two bytes.

    Without a limit the assembler saves a few registers by moving loads behind the first arithmetic. These registers do
    not make room for another program, and every program then waits for memory twice.
    """
    pairs_per_thread = tile.block_tokens * tile.block_heads * block_pairs / (32 * tile.num_warps)
    return min(255, max(64, int(16 * pairs_per_thread * max(itemsize, 2) / 2)))


def _launch_nothing(*arguments) -> None:
    """Do nothing, because an empty grid cannot be launched."""


def _launch_backward_of_nothing(q, k, qg, kg, q_dx, k_dx, q_weight, k_weight, dws, *rest) -> None:
    for dw in dws or ():
        dw.zero_()


def _block_pairs(head_dim: int, rotation: Rotation) -> int:
    return next_power_of_2(rotation.rotary_dim // 2 + (head_dim - rotation.rotary_dim + 1) // 2)


def _head_blocks(xs: Sequence[torch.Tensor], tile) -> int:
    return sum(triton.cdiv(x.shape[2], tile.block_heads) for x in xs)


def _multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU, or 1 without a GPU: the kernel is interpreted, or compiled for inspection."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
