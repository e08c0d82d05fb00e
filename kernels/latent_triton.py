"""This file holds the Triton kernels that assemble the heads of multi-head latent attention (MLA), and their transpose.

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
from dataclasses import dataclass

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
    table_rows_of,
    table_strides,
    turn,
)
from ropelab.kernels.heads_triton import load_heads, load_rotation, store_heads
from ropelab.kernels.latent_torch import LANES
from ropelab.kernels.launch import Launch, compiler_options
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.kernels.rotation import Rotation, row_count
from ropelab.kernels.tiles import ACCESS_BYTES, Tile, next_power_of_2

_LANES, _LEVELS = tl.constexpr(LANES), tl.constexpr(LANES.bit_length() - 1)


@triton.jit
def _load(row, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH adjacent features of every head, ``[tokens, heads, BLOCK]``."""
    feature = tl.arange(0, BLOCK)[None, None, :]
    at = tl.broadcast_to(row + feature, [mask.shape[0], mask.shape[1], BLOCK])
    return tl.load(at, mask=mask & (feature < WIDTH), other=0)


@triton.jit
def _store(row, mask, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    feature = tl.arange(0, BLOCK)[None, None, :]
    tl.store(row + feature, x, mask=mask & (feature < WIDTH))


@triton.jit(do_not_specialize=[
    "first_position", "table_rows", "seq_len",
    "x_stride_b", "x_stride_s", "x_stride_h", "pe_stride_b", "pe_stride_s", "pe_stride_h",
    "y_stride_b", "y_stride_s", "y_stride_h", "v_stride_b", "v_stride_s", "v_stride_h",
    "cos_stride_b", "cos_stride_p", "sin_stride_b", "sin_stride_p", "positions_stride_b", "positions_stride_s",
])  # fmt: skip
def _assemble_kernel(
    x_ptr, pe_ptr, y_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr,
    first_position, table_rows, seq_len,
    x_stride_b, x_stride_s, x_stride_h, pe_stride_b, pe_stride_s, pe_stride_h,
    y_stride_b, y_stride_s, y_stride_h, v_stride_b, v_stride_s, v_stride_h,
    cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
    HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, INNERMOST: tl.constexpr,
    NOPE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, IN_PLACE: tl.constexpr,
    INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, GROUP: tl.constexpr, SAME_STRIDES: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Write y = [x[:N], R pe] and v = x[N:] for a block of tokens and heads; the grid is as in `rotate_triton`.

    VALUE_DIM is 0 if the caller wants no v. A token without a position gets zeros in y.
    """
    SIGNED: tl.constexpr = POSITIONS != "none"
    head_block, token_block, batch = blocks_of_program(HEAD_BLOCKS, INNERMOST)
    first_seq = token_block * BLOCK_TOKENS
    head, token = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_TOKENS)
    # The grid is exact for blocks of one token; a block of several tokens may reach past the end.
    is_token = token >= 0 if BLOCK_TOKENS == 1 else first_seq + token < seq_len
    mask = is_token[:, None, None] & (head < HEADS)[None, :, None]
    x = x_ptr + offsets_of(x_stride_b, x_stride_s, x_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
    pe = pe_ptr + offsets_of(pe_stride_b, pe_stride_s, pe_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
    y = y_ptr + offsets_of(y_stride_b, y_stride_s, y_stride_h, batch, first_seq, token, head, ALIGN, WIDE)

    # All loads come before the first store, because the compiler may not move a load across a store.
    if NOPE_DIM > 0 and not IN_PLACE:
        kept = _load(x, mask, NOPE_DIM, BLOCK_NOPE)
    if VALUE_DIM > 0:
        value = _load(x + NOPE_DIM, mask, VALUE_DIM, BLOCK_VALUE)
    x0, x1 = load_heads(pe, mask, ROTARY_DIM, ROTARY_DIM, 0, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, "")
    cos0, cos1, sin0, sin1, has_position = load_rotation(
        cos_ptr, sin_ptr, positions_ptr, first_position, table_rows,
        cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
        batch, first_seq, token, is_token, mask,
        ROTARY_DIM, INTERLEAVED, FULL_WIDTH, POSITIONS, TABLE_ALIGN, SAME_STRIDES, BLOCK_PAIRS,
        COMPUTE_DTYPE,
    )  # fmt: skip
    y0, y1 = turn(x0, x1, cos0, cos1, sin0, sin1, TRANSPOSE)
    if SIGNED:
        y0, y1 = tl.where(has_position, y0, 0.0), tl.where(has_position, y1, 0.0)
    if IN_PLACE and INTERLEAVED != OUT_INTERLEAVED:
        tl.debug_barrier()  # a thread overwrites features that other threads read
    if NOPE_DIM > 0:
        if IN_PLACE:
            if SIGNED:
                zeros = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_NOPE], y_ptr.dtype.element_ty)
                _store(y, mask & (has_position == 0), zeros, NOPE_DIM, BLOCK_NOPE)
        elif SIGNED:
            _store(y, mask, tl.where(has_position, kept, 0.0).to(kept.dtype), NOPE_DIM, BLOCK_NOPE)
        else:
            _store(y, mask, kept, NOPE_DIM, BLOCK_NOPE)
    if VALUE_DIM > 0:
        v = v_ptr + offsets_of(v_stride_b, v_stride_s, v_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
        _store(v, mask, value, VALUE_DIM, BLOCK_VALUE)
    store_heads(y + NOPE_DIM, mask, y0, y1, ROTARY_DIM, ROTARY_DIM, 0, OUT_INTERLEAVED, GROUP, BLOCK_PAIRS)


@triton.jit
def _sum_of_lanes(x):
    """The sum of ``x [tokens, lanes, pairs]`` over the lanes, in neighbouring pairs, ``[tokens, 1, pairs]``."""
    x = tl.permute(x, (0, 2, 1))
    for _ in tl.static_range(_LEVELS):
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
        x = even + odd
    return tl.permute(x, (0, 2, 1))


@triton.jit
def _move_gradients(
    kg, vg, dkv, positions, tables, tile, head_block,
    HEADS: tl.constexpr, NOPE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, POSITIONS: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, SAME_STRIDES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Write dkv = [gk[:N], gv] for a block of heads; gk[:N] counts as zero for tokens without a position."""
    batch, first_seq, token, is_token = tile
    kg_ptr, kg_stride_b, kg_stride_s, kg_stride_h = kg
    vg_ptr, vg_stride_b, vg_stride_s, vg_stride_h = vg
    dkv_ptr, dkv_stride_b, dkv_stride_s, dkv_stride_h = dkv
    head = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    mask = is_token[:, None, None] & (head < HEADS)[None, :, None]
    k_row = kg_ptr + offsets_of(kg_stride_b, kg_stride_s, kg_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
    v_row = vg_ptr + offsets_of(vg_stride_b, vg_stride_s, vg_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
    row = dkv_ptr + offsets_of(dkv_stride_b, dkv_stride_s, dkv_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
    value = _load(v_row, mask, VALUE_DIM, BLOCK_VALUE)
    if NOPE_DIM > 0:
        kept = _load(k_row, mask, NOPE_DIM, BLOCK_NOPE)
        if POSITIONS != "none":
            _, _, _, has_position, _ = table_rows_of(
                positions, tables, batch, first_seq, token, is_token, POSITIONS, TABLE_ALIGN, SAME_STRIDES
            )
            kept = tl.where(has_position[:, None, None], kept, 0.0).to(kept.dtype)
        _store(row, mask, kept, NOPE_DIM, BLOCK_NOPE)
    _store(row + NOPE_DIM, mask, value, VALUE_DIM, BLOCK_VALUE)


@triton.jit
def _sum_gradients(
    kg, dpe, cos_ptr, sin_ptr, positions, tables, tile,
    HEADS: tl.constexpr, NOPE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    GROUP: tl.constexpr, SAME_STRIDES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write dk_pe = R^T (sum over the heads of gk[N:]): one rotation of the sum, because the rotation is linear."""
    batch, first_seq, token, is_token = tile
    kg_ptr, kg_stride_b, kg_stride_s, kg_stride_h = kg
    dpe_ptr, dpe_stride_b, dpe_stride_s = dpe
    positions_ptr, positions_stride_b, positions_stride_s, first_position = positions
    table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p = tables
    lane, shared = tl.arange(0, _LANES), tl.arange(0, 1)
    total0 = tl.zeros([BLOCK_TOKENS, _LANES, BLOCK_PAIRS], COMPUTE_DTYPE)
    total1 = tl.zeros([BLOCK_TOKENS, _LANES, BLOCK_PAIRS], COMPUTE_DTYPE)
    for first_head in tl.range(0, HEADS, _LANES, loop_unroll_factor=8):
        head = first_head + lane
        mask = is_token[:, None, None] & (head < HEADS)[None, :, None]
        row = kg_ptr + offsets_of(kg_stride_b, kg_stride_s, kg_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
        g0, g1 = load_heads(
            row + NOPE_DIM, mask, ROTARY_DIM, ROTARY_DIM, 0, INTERLEAVED, GROUP, BLOCK_PAIRS, COMPUTE_DTYPE, ""
        )
        total0 += g0
        total1 += g1
    is_first = is_token[:, None, None] & (shared == 0)[None, :, None]
    cos0, cos1, sin0, sin1, has_position = load_rotation(
        cos_ptr, sin_ptr, positions_ptr, first_position, table_rows,
        cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
        batch, first_seq, token, is_token, is_first,
        ROTARY_DIM, INTERLEAVED, FULL_WIDTH, POSITIONS, TABLE_ALIGN, SAME_STRIDES, BLOCK_PAIRS,
        COMPUTE_DTYPE,
    )  # fmt: skip
    dx0, dx1 = turn(_sum_of_lanes(total0), _sum_of_lanes(total1), cos0, cos1, sin0, sin1, TRANSPOSE)
    if POSITIONS != "none":
        dx0, dx1 = tl.where(has_position, dx0, 0.0), tl.where(has_position, dx1, 0.0)
    row = dpe_ptr + offsets_of(dpe_stride_b, dpe_stride_s, 0, batch, first_seq, token, shared, ALIGN, WIDE)
    store_heads(row, is_first, dx0, dx1, ROTARY_DIM, ROTARY_DIM, 0, OUT_INTERLEAVED, GROUP, BLOCK_PAIRS)


@triton.jit(do_not_specialize=[
    "first_position", "table_rows", "seq_len",
    "kg_stride_b", "kg_stride_s", "kg_stride_h", "vg_stride_b", "vg_stride_s", "vg_stride_h",
    "dkv_stride_b", "dkv_stride_s", "dkv_stride_h", "dpe_stride_b", "dpe_stride_s",
    "cos_stride_b", "cos_stride_p", "sin_stride_b", "sin_stride_p", "positions_stride_b", "positions_stride_s",
])  # fmt: skip
def _gradient_kernel(
    kg_ptr, vg_ptr, dkv_ptr, dpe_ptr, cos_ptr, sin_ptr, positions_ptr,
    first_position, table_rows, seq_len,
    kg_stride_b, kg_stride_s, kg_stride_h, vg_stride_b, vg_stride_s, vg_stride_h,
    dkv_stride_b, dkv_stride_s, dkv_stride_h, dpe_stride_b, dpe_stride_s,
    cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
    HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, INNERMOST: tl.constexpr,
    NOPE_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, GROUP: tl.constexpr, SAME_STRIDES: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Write dkv for a block of tokens and heads or, in the last block of heads, dk_pe for a block of tokens.

    INTERLEAVED is the layout of the gradient of the key, and OUT_INTERLEAVED the layout of dk_pe.
    """
    head_block, token_block, batch = blocks_of_program(HEAD_BLOCKS, INNERMOST)
    first_seq = token_block * BLOCK_TOKENS
    token = tl.arange(0, BLOCK_TOKENS)
    is_token = token >= 0 if BLOCK_TOKENS == 1 else first_seq + token < seq_len
    tile = batch, first_seq, token, is_token
    kg = kg_ptr, kg_stride_b, kg_stride_s, kg_stride_h
    tables = table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p
    positions = positions_ptr, positions_stride_b, positions_stride_s, first_position
    if head_block < HEAD_BLOCKS - 1:
        _move_gradients(
            kg, (vg_ptr, vg_stride_b, vg_stride_s, vg_stride_h), (dkv_ptr, dkv_stride_b, dkv_stride_s, dkv_stride_h),
            positions, tables, tile, head_block,
            HEADS, NOPE_DIM, VALUE_DIM, POSITIONS, ALIGN, TABLE_ALIGN, SAME_STRIDES, WIDE,
            BLOCK_HEADS, BLOCK_NOPE, BLOCK_VALUE,
        )  # fmt: skip
    else:
        _sum_gradients(
            kg, (dpe_ptr, dpe_stride_b, dpe_stride_s), cos_ptr, sin_ptr, positions, tables, tile,
            HEADS, NOPE_DIM, ROTARY_DIM, INTERLEAVED, OUT_INTERLEAVED, TRANSPOSE, FULL_WIDTH,
            POSITIONS, COMPUTE_DTYPE, ALIGN, TABLE_ALIGN, GROUP, SAME_STRIDES, WIDE, BLOCK_TOKENS, BLOCK_PAIRS,
        )  # fmt: skip


def forward(
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
    tile: Tile | None = None,
) -> None:
    """Write ``key = [kv[:N], R k_pe]`` and, unless it is None, ``value = kv[N:]`` in one launch.

    Args:
        kv: ``[B, S, H, N + V]``, any strides; a last stride other than 1 costs a copy.
        k_pe: ``[B, S, 1, R]``, of the dtype of kv.
        key: ``[B, S, H, N + R]`` with a last stride of 1; every element is written.
        value: ``[B, S, H, V]`` with a last stride of 1; every element is written.
        rotation: its ``first`` is N. The other arguments are as for `rotate_triton.rotate`.
        tile: for sweeps; by default `choose_tile` decides.
    """
    _launched(plan_forward, (kv, k_pe), (key, value), cos, sin, rotation, positions, first_position, tile)


def turn_tail(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
    tile: Tile | None = None,
) -> None:
    """Rotate the features from ``rotation.first`` on in place; the layout may change.

    Args:
        q: ``[B, S, H, N + R]``; a last stride other than 1 costs a copy.
    """
    target = q if q.stride(-1) == 1 else q.contiguous()
    _launched(plan_turn_tail, (), (target,), cos, sin, rotation, positions, first_position, tile)
    if target is not q:
        q.copy_(target)


def backward(
    key_grad: torch.Tensor,
    value_grad: torch.Tensor,
    kv_grad: torch.Tensor,
    k_pe_grad: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
    tile: Tile | None = None,
) -> None:
    """Write ``kv_grad = [key_grad[:N], value_grad]`` and ``k_pe_grad``, the turned sum of ``key_grad[N:]`` over heads.

    Args:
        key_grad, value_grad: as ``key`` and ``value`` of `forward`, any strides.
        kv_grad, k_pe_grad: as ``kv`` and ``k_pe`` of `forward`, with last strides of 1; every element is written.
        rotation: the transposed rotation, which reads the layout of the key.
    """
    grads = (key_grad, value_grad), (kv_grad, k_pe_grad)
    _launched(plan_backward, *grads, cos, sin, rotation, positions, first_position, tile)


def _launched(plan: Callable, sources, targets, cos, sin, rotation, positions, first_position: int, tile) -> None:
    """Launch ``plan`` for each part of at most ``MAX_BATCH`` batches."""
    sources, cos, sin = [readable(x) for x in sources], readable(cos), readable(sin)
    for start in range(0, targets[0].shape[0], MAX_BATCH):
        part = slice(start, start + MAX_BATCH)
        tensors = [None if x is None else x[part] for x in (*sources, *targets)]
        cos_part, sin_part = (table[part] if table.ndim == 3 else table for table in (cos, sin))
        positions_part = None if positions is None else positions[part]
        launch = plan(*tensors, cos_part, sin_part, positions_part, rotation, tile)
        where = cos_part, sin_part, cos if positions_part is None else positions_part
        launch(*tensors, *where, first_position, row_count(cos))


def plan_forward(kv, k_pe, key, value, cos, sin, positions, rotation: Rotation, tile: Tile | None = None):
    """The launch that `forward` makes for tensors like these; a caller can repeat the launch, see `rotate_triton.plan`.

    The arguments are as for `forward`, but have last strides of 1 and at most ``MAX_BATCH`` batches.

    Returns:
        ``launch(kv, k_pe, key, value, cos, sin, positions, first_position, table_rows)``; cos stands in for positions
        that are missing.
    """
    value_dim = 0 if value is None else value.shape[3]
    tensors, pe_strides = (kv, key, key if value is None else value), (*k_pe.stride()[:2], 0)
    return Assemble(_plan(_assemble_kernel, tensors, pe_strides, value_dim, cos, sin, positions, rotation, tile))


@dataclass(frozen=True)
class Assemble:
    """The launch of `forward`. The kernel ignores the tensor that stands in for a missing value."""

    launch: Callable[..., None]

    def __call__(self, kv, k_pe, key, value, *where) -> None:
        self.launch(kv, k_pe, key, key if value is None else value, *where)


def plan_turn_tail(q, cos, sin, positions, rotation: Rotation, tile: Tile | None = None):
    """The launch of `turn_tail`: ``launch(q, cos, sin, positions, first_position, table_rows)``."""
    strides = q.stride()[:3]
    return TurnTail(
        _plan(_assemble_kernel, (q, q, q), strides, 0, cos, sin, positions, rotation, tile, IN_PLACE=True),
        rotation.first,
    )


@dataclass(frozen=True)
class TurnTail:
    """The launch of `turn_tail` for the features from ``first`` on."""

    launch: Callable[..., None]
    first: int

    def __call__(self, q, *where) -> None:
        self.launch(q, q[..., self.first :], q, q, *where)


def plan_backward(
    key_grad, value_grad, kv_grad, k_pe_grad, cos, sin, positions, rotation: Rotation, tile: Tile | None = None
):
    """The launch of `backward`: ``launch(key_grad, value_grad, kv_grad, k_pe_grad, cos, ..., table_rows)``."""
    tensors, pe_strides = (key_grad, value_grad, kv_grad), k_pe_grad.stride()[:2]
    value_dim = value_grad.shape[3]
    return _plan(_gradient_kernel, tensors, pe_strides, value_dim, cos, sin, positions, rotation, tile)


def _plan(
    kernel, tensors, pe_strides, value_dim: int, cos, sin, positions, rotation: Rotation, tile: Tile | None, **switches
) -> Callable[..., None]:
    """The launch of ``kernel``.

    Args:
        tensors: the tensors with all heads, in the order of the kernel.
        pe_strides: the strides of the features that rotate; the kernels have them after the first tensor
            (`_assemble_kernel`) or last (`_gradient_kernel`).
        switches: further constants of the kernel.
    """
    x = tensors[-1]
    batch, seq_len, heads = x.shape[:3]
    assembles = kernel is _assemble_kernel
    if x.numel() == 0:
        return _launch_nothing if assembles else _sum_nothing
    nope_dim, pairs = rotation.first, rotation.rotary_dim // 2
    order = innermost(tensors[0])
    widest = rotation.rotary_dim if switches else max(nope_dim, rotation.rotary_dim, value_dim)
    tile = tile or choose_tile(widest, heads, seq_len, order, x.itemsize)
    head_blocks = triton.cdiv(heads, tile.block_heads) + (0 if assembles else 1)
    grid, order = launch_grid(batch, triton.cdiv(seq_len, tile.block_tokens), head_blocks, tile.innermost)
    of_tensors = [t.stride()[:3] for t in tensors]
    strides = [s for of_tensor in of_tensors for s in of_tensor]
    strides = [*strides[:3], *pe_strides, *strides[3:]] if assembles else [*strides, *pe_strides]
    cos_strides, sin_strides = table_strides(cos), table_strides(sin)
    positions_strides = (0, 0) if positions is None else (*positions.stride(), 0)[:2]
    constants = {
        "HEADS": heads, "HEAD_BLOCKS": head_blocks, "INNERMOST": order,
        "NOPE_DIM": nope_dim, "ROTARY_DIM": rotation.rotary_dim, "VALUE_DIM": value_dim,
        **({"IN_PLACE": False} if assembles else {}), **switches,
        "INTERLEAVED": rotation.interleaved, "OUT_INTERLEAVED": rotation.out_interleaved,
        "TRANSPOSE": rotation.transpose, "FULL_WIDTH": rotation.full_width, "POSITIONS": mode(positions, rotation),
        "COMPUTE_DTYPE": TL_DTYPE[compute_dtype(x, cos)],
        "ALIGN": common_alignment(strides), "TABLE_ALIGN": common_alignment([*cos_strides, *sin_strides]),
        "GROUP": min(common_alignment([pairs]), tile.pairs_per_access), "SAME_STRIDES": cos_strides == sin_strides,
        "WIDE": max([tile.block_tokens * pe_strides[1], *(reach(t, tile.block_tokens) for t in tensors)]) >= 2**31,
        "BLOCK_TOKENS": tile.block_tokens, "BLOCK_HEADS": tile.block_heads,
        "BLOCK_NOPE": next_power_of_2(max(1, nope_dim)), "BLOCK_PAIRS": next_power_of_2(pairs),
        "BLOCK_VALUE": next_power_of_2(max(1, value_dim)),
    }  # fmt: skip
    numbers = (seq_len, *strides, *cos_strides, *sin_strides, *positions_strides)
    in_order = {name: constants[name] for name in kernel.arg_names[-len(constants) :]}
    # Without fused multiply-add the results have the same bits as in `latent_torch`.
    options = compiler_options(tile.num_warps, tile.max_registers, fuse=False)
    return Launch(kernel, grid, numbers, in_order, options, x.device)


def choose_tile(widest: int, heads: int, seq_len: int, innermost: str = "heads", itemsize: int = 2) -> Tile:
    """The tile of 128 threads; one access of each thread reads the widest part of the heads, ``widest`` features.

    Where heads are innermost, a program takes heads of one token, if the token has enough heads. Where tokens are
    innermost, a program takes two heads of several tokens. The choice rests on the repository's study `latent_tiles`.
    """
    warps = 4
    rows = max(1, 32 * warps * ACCESS_BYTES // (next_power_of_2(widest) * itemsize))
    block_heads = min(2 if innermost == "tokens" else rows, rows, next_power_of_2(heads))
    block_tokens = min(max(1, rows // block_heads), next_power_of_2(max(1, seq_len)))
    return Tile(block_tokens, block_heads, warps, innermost)


def _launch_nothing(*arguments) -> None:
    """Do nothing, because an empty grid cannot be launched."""


def _sum_nothing(key_grad, value_grad, kv_grad, k_pe_grad, *rest) -> None:
    """Write the sum over no heads."""
    k_pe_grad.zero_()
