"""The RMS norm of every head of q and k, followed by the rotation, as Triton kernels.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ropelab.kernels import tile_of
from ropelab.kernels.addressing import heads_of, launch_grid, strides_of, turning, whole_heads
from ropelab.kernels.angles_triton import read_angles
from ropelab.kernels.choices import Choices, Turning
from ropelab.kernels.launch import Launch, compiler_options, launch_nothing
from ropelab.kernels.place_triton import Angles, block_of_tokens, blocks_of_program, heads_at
from ropelab.kernels.qk_norm_torch import compute_dtype
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.stages_triton import (
    lane_feature,
    members_of,
    normalize,
    read_heads,
    turn,
    write_heads,
    write_pairs,
)
from ropelab.kernels.tensors import NormGradients, NormTensors
from ropelab.kernels.tiles import BackwardTile, Tile


@dataclass(frozen=True)
class NormChoices(Turning):
    """The choices of the forward and of the backward.

    Attributes:
        Q_HEADS, K_HEADS: the heads of q and of k.
        Q_BLOCKS, HEAD_BLOCKS: the blocks of heads of q, and of q and k.
        BLOCK_TOKENS, BLOCK_HEADS: the tokens and heads of a program.
        EPS: the number that is added to the mean of the squares.
        SAME_STRIDES: one offset serves all tensors of q, or of k.
        WEIGHT_GRADS: the backward writes the gradients of the weights.
    """

    Q_HEADS: int
    K_HEADS: int
    Q_BLOCKS: int
    HEAD_BLOCKS: int
    BLOCK_TOKENS: int
    BLOCK_HEADS: int
    EPS: float
    SAME_STRIDES: bool
    WEIGHT_GRADS: bool = False


@triton.jit
def _heads_of_block(head_block, C: tl.constexpr):
    """Whether a block has heads of q, else of k; the heads; and whether they exist, ``[1, heads, 1]``."""
    is_q = head_block < C.Q_BLOCKS
    head = tl.where(is_q, head_block, head_block - C.Q_BLOCKS) * C.BLOCK_HEADS + tl.arange(0, C.BLOCK_HEADS)
    return is_q, head, (head < tl.where(is_q, C.Q_HEADS, C.K_HEADS))[None, :, None]


@triton.jit
def _rows_at(is_q, q, k, strides_q, strides_k, tokens, head, C: tl.constexpr):
    """The addresses of heads of q or of k."""
    stride_b, stride_s = tl.where(is_q, strides_q[0], strides_k[0]), tl.where(is_q, strides_q[1], strides_k[1])
    strides = stride_b, stride_s, tl.where(is_q, strides_q[2], strides_k[2])
    return heads_at((tl.where(is_q, q, k), strides), tokens, head, C)


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len"])
def _qk_norm_rope_kernel(ptr, first_position, table_rows, seq_len, strides, C: tl.constexpr):
    """Write y = R (w x / sqrt(mean(x^2) + eps)) for a block of tokens and heads; the grid is as in `rotate_triton`."""
    head_block, token_block, batch = blocks_of_program(C.HEAD_BLOCKS, C.INNERMOST)
    tokens = block_of_tokens(batch, token_block, seq_len, C.BLOCK_TOKENS)
    is_q, head, is_head = _heads_of_block(head_block, C)
    exists = tokens.exists[:, None, None] & is_head
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)

    # Loads first, see `stages_triton`.
    x_at = _rows_at(is_q, ptr.q, ptr.k, strides.q, strides.k, tokens, head, C)
    x0, x1 = read_heads(x_at, exists, "", C)
    columns, has_position = read_angles(angles, tokens, exists, seq_len, C)
    w0, w1 = read_heads(tl.where(is_q, ptr.q_weight, ptr.k_weight), exists, "evict_last", C)

    x0, x1 = normalize(x0, x1, w0, w1, C.LANE_DIM, C.EPS, False, False)
    y0, y1 = turn(x0, x1, columns, False)

    if C.SAME_STRIDES:
        y_at = _rows_at(is_q, ptr.q_out, ptr.k_out, strides.q, strides.k, tokens, head, C)
    else:
        y_at = _rows_at(is_q, ptr.q_out, ptr.k_out, strides.q_out, strides.k_out, tokens, head, C)
    write_heads(y_at, exists, has_position, y0, y1, C.INTERLEAVED, C)


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len", "token_blocks", "blocks"])
def _qk_norm_rope_backward_kernel(
    ptr, first_position, table_rows, seq_len, token_blocks, blocks, strides, C: tl.constexpr
):
    """Write dx for some blocks of tokens of one block of heads, and their share of dw as one of the rows.

    Axis 0 of the grid has the blocks of heads, the blocks of q first. Axis 1 has the programs that share the blocks of
    tokens of all batches. These programs take the blocks in turn, so that at any time all of them work on tokens that
    are close together. The rows of dw have the order of the blocks of heads, so the rows of k follow the rows of q.
    """
    SIGNED: tl.constexpr = C.POSITIONS != "none"
    head_block = tl.program_id(0)
    is_q, head, is_head = _heads_of_block(head_block, C)
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    all_tokens = (tl.arange(0, C.BLOCK_TOKENS) >= 0)[:, None, None]
    w0, w1 = read_heads(tl.where(is_q, ptr.q_weight, ptr.k_weight), all_tokens & is_head, "evict_last", C)
    dw0 = tl.zeros([C.BLOCK_TOKENS, C.BLOCK_HEADS, C.BLOCK_PAIRS], C.COMPUTE_DTYPE)
    dw1 = tl.zeros([C.BLOCK_TOKENS, C.BLOCK_HEADS, C.BLOCK_PAIRS], C.COMPUTE_DTYPE)

    program, programs = tl.program_id(1), tl.num_programs(1)
    batch, token_block = program // token_blocks, program % token_blocks
    batch_step, token_step = programs // token_blocks, programs % token_blocks
    for _ in range(program, blocks, programs):
        tokens = block_of_tokens(batch, token_block, seq_len, C.BLOCK_TOKENS)
        exists = tokens.exists[:, None, None] & is_head
        x_at = _rows_at(is_q, ptr.q, ptr.k, strides.q, strides.k, tokens, head, C)
        if C.SAME_STRIDES:
            g_at = _rows_at(is_q, ptr.q_grad, ptr.k_grad, strides.q, strides.k, tokens, head, C)
            dx_at = _rows_at(is_q, ptr.q_dx, ptr.k_dx, strides.q, strides.k, tokens, head, C)
        else:
            g_at = _rows_at(is_q, ptr.q_grad, ptr.k_grad, strides.q_grad, strides.k_grad, tokens, head, C)
            dx_at = _rows_at(is_q, ptr.q_dx, ptr.k_dx, strides.q_dx, strides.k_dx, tokens, head, C)
        x0, x1 = read_heads(x_at, exists, "", C)
        g0, g1 = read_heads(g_at, exists, "", C)
        columns, has_position = read_angles(angles, tokens, exists, seq_len, C)

        gn0, gn1 = turn(g0, g1, columns, True)
        counts = exists
        if SIGNED:  # a token without a position may hold any values, and its row of the tables is NaN
            counts = exists & has_position
            x0, x1 = tl.where(counts, x0, 0.0), tl.where(counts, x1, 0.0)
            gn0, gn1 = tl.where(counts, gn0, 0.0), tl.where(counts, gn1, 0.0)
        rstd = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1, axis=2, keep_dims=True) / C.LANE_DIM + C.EPS)
        rstd = tl.where(counts, rstd, 0.0)  # the rstd of zeros is infinite if eps is 0
        xhat0, xhat1 = x0 * rstd, x1 * rstd
        wg0, wg1 = w0 * gn0, w1 * gn1
        mean = tl.sum(wg0 * xhat0 + wg1 * xhat1, axis=2, keep_dims=True) / C.LANE_DIM
        if C.WEIGHT_GRADS:
            dw0 += gn0 * xhat0
            dw1 += gn1 * xhat1
        dx0, dx1 = rstd * (wg0 - xhat0 * mean), rstd * (wg1 - xhat1 * mean)
        write_pairs(members_of(dx_at, exists, C.INTERLEAVED, C), dx0, dx1, C.INTERLEAVED)

        # This finds the next block without a division, because the loads would wait for the quotient.
        token_block += token_step
        wraps = token_block >= token_blocks
        token_block = tl.where(wraps, token_block - token_blocks, token_block)
        batch += tl.where(wraps, batch_step + 1, batch_step)

    if C.WEIGHT_GRADS:
        row = ptr.rows + (head_block * programs + program).to(tl.int64) * C.LANE_DIM
        feature0, exists0 = lane_feature(0, C.INTERLEAVED, C)
        feature1, exists1 = lane_feature(1, C.INTERLEAVED, C)
        tl.store(row + feature0, tl.sum(tl.sum(dw0, axis=0), axis=0), mask=exists0)
        tl.store(row + feature1, tl.sum(tl.sum(dw1, axis=0), axis=0), mask=exists1)


@dataclass(frozen=True)
class SumChoices(Choices):
    """The choices of `_sum_rows_kernel`: the features of a head, and the rows and features of a program."""

    DIM: int
    BLOCK_ROWS: int
    BLOCK_FEATURES: int


@triton.jit(do_not_specialize=["q_rows", "rows"])
def _sum_rows_kernel(ptr, q_rows, rows, strides, C: tl.constexpr):
    """Write the sum of the rows of dw of q, or of k, for a block of features; the order of the sum is always the same.

    Axis 0 of the grid has q and k, axis 1 has the blocks of features.
    """
    is_q = tl.program_id(0) == 0
    feature = tl.program_id(1) * C.BLOCK_FEATURES + tl.arange(0, C.BLOCK_FEATURES)
    total = tl.zeros([C.BLOCK_ROWS, C.BLOCK_FEATURES], ptr.rows.dtype.element_ty)
    for first in range(tl.where(is_q, 0, q_rows), tl.where(is_q, q_rows, rows), C.BLOCK_ROWS):
        row = first + tl.arange(0, C.BLOCK_ROWS)
        inside = (row < tl.where(is_q, q_rows, rows))[:, None] & (feature < C.DIM)[None, :]
        total += tl.load(ptr.rows + row[:, None] * C.DIM + feature[None, :], mask=inside, other=0)
    dw = tl.sum(total, axis=0).to(ptr.q_dw.dtype.element_ty)
    tl.store(tl.where(is_q, ptr.q_dw, ptr.k_dw) + feature, dw, mask=feature < C.DIM)


def plan_forward(t: NormTensors, rotation: Rotation, eps: float, tile: Tile | None = None) -> Callable[..., None]:
    """Plan the launch of `qk_norm_torch.forward`; see `rotate_triton.plan_rotate`.

    Args:
        t: tensors with last strides of 1 and at most ``MAX_BATCH`` batches. Every element of the results is written.
        rotation: the results have the layout of the inputs, and ``rotation.transpose`` is ignored.
        eps: the number that is added to the mean of the squares.
        tile: for sweeps; by default `tile_of.qk_norm` decides.
    """
    if t.q.numel() + t.k.numel() == 0:
        return launch_nothing
    tile = tile or tile_of.qk_norm(t, rotation)
    head_blocks = _head_blocks(t, tile)
    grid, order = launch_grid(t.q.shape[0], triton.cdiv(t.q.shape[1], tile.block_tokens), head_blocks, tile.innermost)
    chosen = {"HEAD_BLOCKS": head_blocks, "INNERMOST": order}
    return _launch(_qk_norm_rope_kernel, grid, (), t, rotation, eps, tile, chosen, fuse=False)


def plan_backward(
    t: NormGradients, rotation: Rotation, eps: float, tile: BackwardTile | None = None
) -> Callable[..., None]:
    """Plan the launches of `qk_norm_torch.backward`, for tensors with last strides of 1 and any number of batches.

    The order in which the gradients in the weights are summed depends on the shapes and the GPU only, so that a
    repeated call gives the same bits.
    """
    if t.q.numel() + t.k.numel() == 0:
        return _launch_backward_of_nothing
    batch, seq_len, _, head_dim = t.q.shape
    tile = tile or tile_of.qk_norm_backward(t, rotation)
    head_blocks, token_blocks = _head_blocks(t, tile), triton.cdiv(seq_len, tile.block_tokens)
    programs = tile.programs_per_multiprocessor * _multiprocessors(t.q.device) // head_blocks
    programs = max(1, min(programs, batch * token_blocks))
    chosen = {"HEAD_BLOCKS": head_blocks, "INNERMOST": "heads", "WEIGHT_GRADS": t.q_dw is not None}
    grid, numbers = (head_blocks, programs, 1), (token_blocks, batch * token_blocks)
    launch = _launch(_qk_norm_rope_backward_kernel, grid, numbers, t, rotation, eps, tile, chosen, fuse=True)
    if t.q_dw is None:
        return lambda tensors, *numbers: launch(NormGradients(*tensors), *numbers)  # the launch has rows too
    rows, q_rows = head_blocks * programs, triton.cdiv(t.q.shape[2], tile.block_heads) * programs
    no_strides = NormGradients._make([None] * len(t))
    sum_rows = Launch(
        _sum_rows_kernel, (2, triton.cdiv(head_dim, tile_of.SUM_FEATURES), 1), (q_rows, rows), no_strides,
        SumChoices(head_dim, tile_of.SUM_ROWS, tile_of.SUM_FEATURES),
        compiler_options(tile_of.SUM_WARPS, None, fuse=True), t.q.device,
    )  # fmt: skip
    return Backward(launch, sum_rows, (rows, head_dim), compute_dtype(t))


@dataclass(frozen=True)
class Backward:
    """The launch that writes dx and one row of dw for each of its programs, and the launch that sums the rows."""

    gradients: Launch
    sum_rows: Launch
    rows_shape: tuple[int, int]
    rows_dtype: torch.dtype

    def __call__(self, tensors: tuple, *numbers: int) -> None:
        t = NormGradients(*tensors)
        t = t._replace(rows=torch.empty(self.rows_shape, dtype=self.rows_dtype, device=t.q.device))
        self.gradients(t, *numbers)
        self.sum_rows(t)


def _launch(kernel, grid, numbers, t, rotation: Rotation, eps: float, tile, chosen: dict[str, Any], *, fuse: bool):
    """The launch of the forward or of the backward."""
    lanes, access = whole_heads(t.q.shape[3], rotation, tile.pairs_per_access), tile.pairs_per_access
    heads, strides = heads_of(t), strides_of(t)
    choices = NormChoices(
        **turning(
            t, rotation, compute_dtype(t), heads, tile.block_tokens, access * (2 if rotation.interleaved else 1),
            tile.shares_columns,
        ), **lanes, **chosen,
        Q_HEADS=t.q.shape[2], K_HEADS=t.k.shape[2], Q_BLOCKS=triton.cdiv(t.q.shape[2], tile.block_heads),
        BLOCK_TOKENS=tile.block_tokens, BLOCK_HEADS=tile.block_heads, EPS=float(eps),
        SAME_STRIDES=all(x.stride()[:3] == heads[i % 2].stride()[:3] for i, x in enumerate(heads)),
    )  # fmt: skip
    registers = tile_of.norm_registers(tile, lanes["BLOCK_PAIRS"], t.q.itemsize)
    options = compiler_options(tile.num_warps, registers, fuse=fuse)
    return Launch(kernel, grid, (t.q.shape[1], *numbers), strides, choices, options, t.q.device)


def _launch_backward_of_nothing(tensors: tuple, *numbers: int) -> None:
    t = NormGradients(*tensors)
    for dw in (t.q_dw, t.k_dw):
        if dw is not None:
            dw.zero_()


def _head_blocks(t: NormTensors | NormGradients, tile) -> int:
    return sum(triton.cdiv(x.shape[2], tile.block_heads) for x in (t.q, t.k))


def _multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU, or 1 without a GPU: the kernel is interpreted, or compiled for inspection."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
