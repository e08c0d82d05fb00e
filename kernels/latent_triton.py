"""The assembly of the heads of multi-head latent attention (MLA) and its transpose, as Triton kernels.

A head of q has N features that do not rotate and R features that do. The projection kv has, for every head, N features
of the key and V features of the value. All heads of the key share the R features k_pe. With the rotation R_t of token
t, the heads h are::

    query_h = [q_h[:N], R_t q_h[N:]],    key_h = [kv_h[:N], R_t k_pe],    value_h = kv_h[N:]

(DeepSeek-V2, arXiv 2405.04434, equations 14 to 18.) The assembly is linear, so its gradient is the transpose. With the
gradients gk and gv of key and value::

    dkv_h = [gk_h[:N], gv_h],    dk_pe = R_t^T (sum over h of gk_h[N:])

The gradient of q is the rotation of its tail by R_t^T. One kernel assembles key and value, or turns the tail of q in
place. For the tail, q is the source of all its features. For a key, the stride of the heads of k_pe is 0. A second
kernel computes dkv and dk_pe. Its sum over the heads has the same order for all tiles: head h joins the partial sum of
lane ``h mod 16``, and the lanes are then added in neighbouring pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ropelab.kernels import tile_of
from ropelab.kernels.addressing import heads_of, innermost, launch_grid, strides_of, turning, whole_heads
from ropelab.kernels.angles_triton import read_angles
from ropelab.kernels.choices import Turning
from ropelab.kernels.latent_torch import LANES
from ropelab.kernels.launch import Launch, compiler_options, launch_nothing
from ropelab.kernels.place_triton import (
    Angles,
    block_of_tokens,
    blocks_of_program,
    heads_at,
    heads_of_block,
    table_rows_of,
)
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.stages_triton import read_features, read_heads, turn, write_features, write_heads
from ropelab.kernels.tensors import LatentGradients, LatentTensors, TailTensors
from ropelab.kernels.tiles import Tile, next_power_of_2

_LANES, _LEVELS = tl.constexpr(LANES), tl.constexpr(LANES.bit_length() - 1)


@dataclass(frozen=True)
class LatentChoices(Turning):
    """The choices of both kernels. The lanes of a head are the features that rotate.

    Attributes:
        HEADS, HEAD_BLOCKS: the heads, and their blocks; the backward has a further block.
        NOPE_DIM, VALUE_DIM: the features of a head that do not rotate, and those of the value; the latter is 0 if the
            caller wants no value.
        IN_PLACE: the tail of q turns in place.
        BLOCK_TOKENS, BLOCK_HEADS: the tokens and heads of a program.
        BLOCK_NOPE, BLOCK_VALUE: NOPE_DIM and VALUE_DIM rounded up to powers of two.
    """

    HEADS: int
    HEAD_BLOCKS: int
    NOPE_DIM: int
    VALUE_DIM: int
    IN_PLACE: bool
    BLOCK_TOKENS: int
    BLOCK_HEADS: int
    BLOCK_NOPE: int
    BLOCK_VALUE: int


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len"])
def _assemble_kernel(ptr, first_position, table_rows, seq_len, strides, C: tl.constexpr):
    """Write key = [kv[:N], R k_pe] and value = kv[N:] for a block of tokens and heads; the grid is as in
    `rotate_triton`.

    A token without a position gets zeros in the key.
    """
    SIGNED: tl.constexpr = C.POSITIONS != "none"
    head_block, token_block, batch = blocks_of_program(C.HEAD_BLOCKS, C.INNERMOST)
    tokens = block_of_tokens(batch, token_block, seq_len, C.BLOCK_TOKENS)
    head, exists = heads_of_block(tokens, head_block, C.HEADS, C.BLOCK_HEADS)
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    kv = heads_at((ptr.kv, strides.kv), tokens, head, C)
    k_pe = heads_at((ptr.k_pe, strides.k_pe), tokens, head, C)
    key = heads_at((ptr.key, strides.key), tokens, head, C)

    # Loads first, see `stages_triton`.
    if C.NOPE_DIM > 0 and not C.IN_PLACE:
        kept = read_features(kv, exists, C.NOPE_DIM, C.BLOCK_NOPE)
    if C.VALUE_DIM > 0:
        value = read_features(kv + C.NOPE_DIM, exists, C.VALUE_DIM, C.BLOCK_VALUE)
    x0, x1 = read_heads(k_pe, exists, "", C)
    columns, has_position = read_angles(angles, tokens, exists, seq_len, C)
    y0, y1 = turn(x0, x1, columns, C.TRANSPOSE)
    if C.IN_PLACE and C.INTERLEAVED != C.OUT_INTERLEAVED:
        tl.debug_barrier()  # a thread overwrites features that other threads read
    if C.NOPE_DIM > 0:
        if C.IN_PLACE:
            if SIGNED:
                zeros = tl.zeros([C.BLOCK_TOKENS, C.BLOCK_HEADS, C.BLOCK_NOPE], ptr.key.dtype.element_ty)
                write_features(key, exists & (has_position == 0), zeros, C.NOPE_DIM, C.BLOCK_NOPE)
        else:
            if SIGNED:
                kept = tl.where(has_position, kept, 0.0).to(kept.dtype)
            write_features(key, exists, kept, C.NOPE_DIM, C.BLOCK_NOPE)
    if C.VALUE_DIM > 0:
        value_at = heads_at((ptr.value, strides.value), tokens, head, C)
        write_features(value_at, exists, value, C.VALUE_DIM, C.BLOCK_VALUE)
    write_heads(key + C.NOPE_DIM, exists, has_position, y0, y1, C.OUT_INTERLEAVED, C)


@triton.jit
def _sum_of_lanes(x):
    """The sum of ``x [tokens, lanes, pairs]`` over the lanes, in neighbouring pairs, ``[tokens, 1, pairs]``."""
    x = tl.permute(x, (0, 2, 1))
    for _ in tl.static_range(_LEVELS):
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
        x = even + odd
    return tl.permute(x, (0, 2, 1))


@triton.jit
def _move_gradients(ptr, strides, angles, tokens, head_block, C: tl.constexpr):
    """Write dkv = [gk[:N], gv] for a block of heads; gk[:N] counts as zero for tokens without a position."""
    head, exists = heads_of_block(tokens, head_block, C.HEADS, C.BLOCK_HEADS)
    key_grad = heads_at((ptr.key_grad, strides.key_grad), tokens, head, C)
    value_grad = heads_at((ptr.value_grad, strides.value_grad), tokens, head, C)
    kv_grad = heads_at((ptr.kv_grad, strides.kv_grad), tokens, head, C)
    value = read_features(value_grad, exists, C.VALUE_DIM, C.BLOCK_VALUE)
    if C.NOPE_DIM > 0:
        kept = read_features(key_grad, exists, C.NOPE_DIM, C.BLOCK_NOPE)
        if C.POSITIONS != "none":
            has_position = table_rows_of(angles, tokens, C).has_position
            kept = tl.where(has_position, kept, 0.0).to(kept.dtype)
        write_features(kv_grad, exists, kept, C.NOPE_DIM, C.BLOCK_NOPE)
    write_features(kv_grad + C.NOPE_DIM, exists, value, C.VALUE_DIM, C.BLOCK_VALUE)


@triton.jit
def _sum_gradients(ptr, strides, angles, tokens, seq_len, C: tl.constexpr):
    """Write dk_pe = R^T (sum over the heads of gk[N:]): one rotation of the sum, because the rotation is linear."""
    lane, shared = tl.arange(0, _LANES), tl.arange(0, 1)
    total0 = tl.zeros([C.BLOCK_TOKENS, _LANES, C.BLOCK_PAIRS], C.COMPUTE_DTYPE)
    total1 = tl.zeros([C.BLOCK_TOKENS, _LANES, C.BLOCK_PAIRS], C.COMPUTE_DTYPE)
    for first_head in tl.range(0, C.HEADS, _LANES, loop_unroll_factor=8):
        head = first_head + lane
        exists = tokens.exists[:, None, None] & (head < C.HEADS)[None, :, None]
        row = heads_at((ptr.key_grad, strides.key_grad), tokens, head, C)
        g0, g1 = read_heads(row + C.NOPE_DIM, exists, "", C)
        total0 += g0
        total1 += g1
    is_first = tokens.exists[:, None, None] & (shared == 0)[None, :, None]
    columns, has_position = read_angles(angles, tokens, is_first, seq_len, C)
    dx0, dx1 = turn(_sum_of_lanes(total0), _sum_of_lanes(total1), columns, C.TRANSPOSE)
    row = heads_at((ptr.k_pe_grad, strides.k_pe_grad), tokens, shared, C)
    write_heads(row, is_first, has_position, dx0, dx1, C.OUT_INTERLEAVED, C)


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len"])
def _gradient_kernel(ptr, first_position, table_rows, seq_len, strides, C: tl.constexpr):
    """Write dkv for a block of tokens and heads or, in the last block of heads, dk_pe for a block of tokens.

    INTERLEAVED is the layout of the gradient of the key, and OUT_INTERLEAVED the layout of dk_pe.
    """
    head_block, token_block, batch = blocks_of_program(C.HEAD_BLOCKS, C.INNERMOST)
    tokens = block_of_tokens(batch, token_block, seq_len, C.BLOCK_TOKENS)
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    if head_block < C.HEAD_BLOCKS - 1:
        _move_gradients(ptr, strides, angles, tokens, head_block, C)
    else:
        _sum_gradients(ptr, strides, angles, tokens, seq_len, C)


def plan_forward(t: LatentTensors, rotation: Rotation, tile: Tile | None = None) -> Callable[..., None]:
    """Plan the launch of `latent_torch.forward`; see `rotate_triton.plan_rotate`.

    Args:
        t: tensors with last strides of 1 and at most ``MAX_BATCH`` batches. Every element of key and value is written.
        rotation: its ``first`` is N.
        tile: for sweeps; by default `tile_of.latent` decides.
    """
    if t.key.numel() == 0:
        return launch_nothing
    t = t._replace(k_pe=t.k_pe.expand(*t.kv.shape[:3], -1))
    value_dim = 0 if t.value is None else t.value.shape[3]
    return _launch(_assemble_kernel, t, t.key, rotation, value_dim, tile)


@dataclass(frozen=True)
class TurnTail:
    """The launch of a `plan_turn_tail` for the features from ``first`` on: q is the source of all its features."""

    launch: Callable[..., None]
    first: int

    def __call__(self, tensors: tuple, *numbers: int) -> None:
        self.launch(_as_latent(TailTensors(*tensors), self.first), *numbers)


def _as_latent(t: TailTensors, first: int) -> LatentTensors:
    return LatentTensors(t.q, t.q[..., first:], t.q, None, *t[1:])


def plan_turn_tail(t: TailTensors, rotation: Rotation, tile: Tile | None = None) -> Callable[..., None]:
    """Plan the launch of `latent_torch.turn_tail`, under which the layout may change; see `plan_forward`."""
    if t.q.numel() == 0:
        return launch_nothing
    launch = _launch(_assemble_kernel, _as_latent(t, rotation.first), t.q, rotation, 0, tile, in_place=True)
    return TurnTail(launch, rotation.first)


def plan_backward(t: LatentGradients, rotation: Rotation, tile: Tile | None = None) -> Callable[..., None]:
    """Plan the launch of `latent_torch.backward`, the transposed rotation, which reads the layout of the key."""
    if t.kv_grad.numel() == 0:
        return _sum_nothing
    return _launch(_gradient_kernel, t, t.kv_grad, rotation, t.value_grad.shape[3], tile)


def _launch(
    kernel, t, x: torch.Tensor, rotation: Rotation, value_dim: int, tile: Tile | None, *, in_place: bool = False
) -> Launch:
    """The launch of ``kernel`` for ``x``, a tensor with all heads."""
    batch, seq_len, heads = x.shape[:3]
    widest = rotation.rotary_dim if in_place else max(rotation.first, rotation.rotary_dim, value_dim)
    tile = tile or tile_of.latent(widest, heads, seq_len, innermost(t[0]), x.itemsize)
    head_blocks = triton.cdiv(heads, tile.block_heads) + (1 if kernel is _gradient_kernel else 0)
    grid, order = launch_grid(batch, triton.cdiv(seq_len, tile.block_tokens), head_blocks, tile.innermost)
    choices = LatentChoices(
        **turning(t, rotation, compute_dtype(x, t.cos), heads_of(t), tile.block_tokens, access=16),
        **whole_heads(rotation.rotary_dim, replace(rotation, first=0), tile.pairs_per_access), INNERMOST=order,
        HEADS=heads, HEAD_BLOCKS=head_blocks, NOPE_DIM=rotation.first, VALUE_DIM=value_dim, IN_PLACE=in_place,
        BLOCK_TOKENS=tile.block_tokens, BLOCK_HEADS=tile.block_heads,
        BLOCK_NOPE=next_power_of_2(max(1, rotation.first)), BLOCK_VALUE=next_power_of_2(max(1, value_dim)),
    )  # fmt: skip
    # Without fused multiply-add the results have the same bits as in `latent_torch`.
    options = compiler_options(tile.num_warps, tile.max_registers, fuse=False)
    return Launch(kernel, grid, (seq_len,), strides_of(t), choices, options, x.device)


def _sum_nothing(tensors: tuple, *numbers: int) -> None:
    """Write the sum over no heads."""
    LatentGradients(*tensors).k_pe_grad.zero_()
