"""This file holds the rotation as one Triton kernel: q and k in one launch, both layouts, any strides, in place or not.

RoPE moves every element once and computes almost nothing, so the speed of a memory copy is its limit. To come close to
this limit, queries and keys share a launch. A program takes several heads of a token, which share a row of cosines and
sines. Threads move 16 bytes at a time. A program computes little before its loads begin.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from ropelab.kernels import rotate_flat_triton
from ropelab.kernels.addressing import (
    MAX_BATCH,
    TL_DTYPE,
    blocks_of_program,
    common_alignment,
    innermost,
    launch_grid,
    load_pairs,
    load_table,
    mode,
    narrow,
    offsets_of,
    reach,
    readable,
    sign_of,
    table_rows_of,
    table_strides,
    turn,
)
from ropelab.kernels.angles_triton import computed_columns
from ropelab.kernels.launch import Launch, compiler_options
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.kernels.rotation import Rotation, row_count
from ropelab.kernels.tile_cost import choose
from ropelab.kernels.tiles import FlatTile, Tile, Work, next_power_of_2

_TABLES_STAY = 2**23
"""The bytes of tables up to which the tables are still in the cache when the next batch reads them.

On an H200, tables of this size stayed in the cache, and tables of twice the size did not."""


@triton.jit
def _store_pairs(row, mask, y0, y1, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        feature = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        y = tl.reshape(tl.join(y0, y1), [y0.shape[0], y0.shape[1], 2 * BLOCK_PAIRS])
        tl.store(row + feature, narrow(y, row.dtype.element_ty), mask=mask & (feature < 2 * PAIRS))
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        tl.store(row + pair, narrow(y0, row.dtype.element_ty), mask=mask & (pair < PAIRS))
        tl.store(row + PAIRS + pair, narrow(y1, row.dtype.element_ty), mask=mask & (pair < PAIRS))


@triton.jit
def _copy_features(
    x_row, y_row, mask, kept, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr
):
    """Copy the features ``[FIRST, END)``, which do not rotate; write zeros for tokens that are not kept."""
    if END > FIRST:
        feature = FIRST + tl.arange(0, BLOCK)[None, None, :]
        inside = mask & (feature < END)
        if IN_PLACE:
            zeros = tl.zeros([mask.shape[0], mask.shape[1], BLOCK], y_row.dtype.element_ty)
            tl.store(y_row + feature, zeros, mask=inside & (kept == 0))
        else:
            tl.store(y_row + feature, tl.load(x_row + feature, mask=inside & kept, other=0), mask=inside)


@triton.jit
def _read_heads(
    x, tile,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, ALIGN: tl.constexpr,
    SAME_STRIDES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Read the heads of q or k that belong to one program.

    Returns:
        The offsets to read from and to write to, their mask, and both members of every pair.
    """
    x_ptr, stride_b, stride_s, stride_h, y_stride_b, y_stride_s, y_stride_h = x
    batch, first_seq, token, is_token, head_block = tile
    head = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    mask = is_token[:, None, None] & (head < HEADS)[None, :, None]
    at = offsets_of(stride_b, stride_s, stride_h, batch, first_seq, token, head, ALIGN, WIDE)
    y_at = at
    if not SAME_STRIDES:
        y_at = offsets_of(y_stride_b, y_stride_s, y_stride_h, batch, first_seq, token, head, ALIGN, WIDE)
    x0, x1 = load_pairs(x_ptr + at + FIRST, mask, None, PAIRS, BLOCK_PAIRS, INTERLEAVED, "")
    return at, y_at, mask, x0.to(COMPUTE_DTYPE), x1.to(COMPUTE_DTYPE)


@triton.jit
def _read_columns(
    cos_row, sin_row, heads, has_row, is_negative,
    PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, FULL_WIDTH: tl.constexpr,
    SIGNED: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
):  # fmt: skip
    """The cosines and sines of both members of every pair of ``heads``, read from tables."""
    # Positions that count up from a checked start have rows and no sign, so these steps are left out for them.
    mask = heads[2] & has_row if SIGNED else heads[2]
    cos0, cos1 = load_table(cos_row, mask, None, PAIRS, BLOCK_PAIRS, INTERLEAVED, FULL_WIDTH)
    sin0, sin1 = load_table(sin_row, mask, None, PAIRS, BLOCK_PAIRS, INTERLEAVED, FULL_WIDTH)
    # The sines are widened before they are negated, because the interpreter has no arithmetic for bfloat16.
    sin0, sin1 = sin0.to(COMPUTE_DTYPE), sin1.to(COMPUTE_DTYPE)
    if SIGNED:
        sign = sign_of(has_row, is_negative, COMPUTE_DTYPE)
        sin0, sin1 = sin0 * sign, sin1 * sign
    return cos0.to(COMPUTE_DTYPE), cos1.to(COMPUTE_DTYPE), sin0, sin1


@triton.jit
def _write_heads(
    x_ptr, y_ptr, heads, columns, has_position,
    HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    OUT_INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr, SIGNED: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    at, y_at, mask, x0, x1 = heads
    cos0, cos1, sin0, sin1 = columns
    y0, y1 = turn(x0, x1, cos0, cos1, sin0, sin1, TRANSPOSE)
    written = mask
    if SIGNED:
        # A second store costs less than a selection for every element, because a token hardly ever lacks a position.
        written = mask & has_position
        zeros = tl.zeros_like(y0)
        _store_pairs(
            y_ptr + y_at + FIRST, mask & (has_position == 0), zeros, zeros, PAIRS, BLOCK_PAIRS, OUT_INTERLEAVED
        )  # fmt: skip
    _store_pairs(y_ptr + y_at + FIRST, written, y0, y1, PAIRS, BLOCK_PAIRS, OUT_INTERLEAVED)
    if SIGNED or not IN_PLACE:
        END: tl.constexpr = FIRST + 2 * PAIRS
        _copy_features(x_ptr + at, y_ptr + y_at, mask, has_position, 0, FIRST, BLOCK_HEAD, IN_PLACE)
        _copy_features(x_ptr + at, y_ptr + y_at, mask, has_position, END, HEAD_DIM, BLOCK_TAIL, IN_PLACE)


@triton.jit(do_not_specialize=[
    "first_position", "table_rows", "seq_len",
    "q_stride_b", "q_stride_s", "q_stride_h", "k_stride_b", "k_stride_s", "k_stride_h",
    "qy_stride_b", "qy_stride_s", "qy_stride_h", "ky_stride_b", "ky_stride_s", "ky_stride_h",
    "cos_stride_b", "cos_stride_p", "sin_stride_b", "sin_stride_p", "positions_stride_b", "positions_stride_s",
])  # fmt: skip
def _rotate_kernel(
    q_ptr, k_ptr, qy_ptr, ky_ptr, cos_ptr, sin_ptr, positions_ptr,
    first_position, table_rows, seq_len,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    qy_stride_b, qy_stride_s, qy_stride_h, ky_stride_b, ky_stride_s, ky_stride_h,
    cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, OUT_INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr,
    FULL_WIDTH: tl.constexpr, TABLE_FREE: tl.constexpr, POSITIONS: tl.constexpr, IN_PLACE: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, HEADS_FIRST: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr, SAME_STRIDES: tl.constexpr, WIDE: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, INNERMOST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_Q_HEADS: tl.constexpr, BLOCK_K_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Write y0 = x0 cos - x1 sin and y1 = x1 cos + x0 sin for a block of tokens and a share of the heads of q and k.

    The grid follows memory: programs that start together take data that are close together. A position without a row
    yields NaN, and the kernel reads no memory for it. A token at NO_POSITION yields zeros. See `ropelab.positions`.
    """
    PAIRS: tl.constexpr = ROTARY_DIM // 2
    SIGNED: tl.constexpr = POSITIONS != "none"
    head_block, token_block, batch = blocks_of_program(HEAD_BLOCKS, INNERMOST)
    first_seq = token_block * BLOCK_TOKENS
    token = tl.arange(0, BLOCK_TOKENS)
    # The grid is exact for blocks of one token; a block of several tokens may reach past the end.
    is_token = token >= 0 if BLOCK_TOKENS == 1 else first_seq + token < seq_len

    tile = batch, first_seq, token, is_token, head_block
    q_in = q_ptr, q_stride_b, q_stride_s, q_stride_h, qy_stride_b, qy_stride_s, qy_stride_h
    k_in = k_ptr, k_stride_b, k_stride_s, k_stride_h, ky_stride_b, ky_stride_s, ky_stride_h
    positions = positions_ptr, positions_stride_b, positions_stride_s, first_position
    tables = table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p
    # All loads come before the first store, because the compiler may not move a load across a store.
    if not HEADS_FIRST:
        rows = table_rows_of(
            positions, tables, batch, first_seq, token, is_token, POSITIONS, TABLE_ALIGN, SAME_STRIDES
        )  # fmt: skip
    q = _read_heads(
        q_in, tile, Q_HEADS, BLOCK_Q_HEADS,
        FIRST, PAIRS, BLOCK_PAIRS, INTERLEAVED, COMPUTE_DTYPE, ALIGN, SAME_STRIDES, WIDE,
    )  # fmt: skip
    if HEADS_FIRST:
        if K_HEADS > 0:
            k = _read_heads(
                k_in, tile, K_HEADS, BLOCK_K_HEADS,
                FIRST, PAIRS, BLOCK_PAIRS, INTERLEAVED, COMPUTE_DTYPE, ALIGN, SAME_STRIDES, WIDE,
            )  # fmt: skip
        # The threads exchange nothing here, but the compiler moves no instruction across a barrier. Without the barrier
        # it would move the instructions that wait for the positions in front of the loads of the heads, and these loads
        # would begin only after the positions have arrived.
        tl.debug_barrier()
        rows = table_rows_of(
            positions, tables, batch, first_seq, token, is_token, POSITIONS, TABLE_ALIGN, SAME_STRIDES
        )  # fmt: skip
    cos_at, sin_at, has_row, has_position, is_negative = rows
    cos_at, sin_at = cos_at[:, None, None], sin_at[:, None, None]
    has_row, has_position, is_negative = has_row[:, None, None], has_position[:, None, None], is_negative[:, None, None]
    if not TABLE_FREE:
        q_columns = _read_columns(
            cos_ptr + cos_at, sin_ptr + sin_at, q, has_row, is_negative,
            PAIRS, BLOCK_PAIRS, INTERLEAVED, FULL_WIDTH, SIGNED, COMPUTE_DTYPE,
        )  # fmt: skip
    if K_HEADS > 0:
        if not HEADS_FIRST:
            k = _read_heads(
                k_in, tile, K_HEADS, BLOCK_K_HEADS,
                FIRST, PAIRS, BLOCK_PAIRS, INTERLEAVED, COMPUTE_DTYPE, ALIGN, SAME_STRIDES, WIDE,
            )  # fmt: skip
        if not TABLE_FREE:
            k_columns = _read_columns(
                cos_ptr + cos_at, sin_ptr + sin_at, k, has_row, is_negative,
                PAIRS, BLOCK_PAIRS, INTERLEAVED, FULL_WIDTH, SIGNED, COMPUTE_DTYPE,
            )  # fmt: skip
    if TABLE_FREE:
        # The computation follows the loads, so that it runs while the loads are under way.
        q_columns = computed_columns(
            cos_ptr, cos_stride_p, positions_ptr, positions_stride_b, positions_stride_s, first_position,
            batch, first_seq, seq_len, PAIRS, BLOCK_TOKENS, BLOCK_PAIRS, POSITIONS, COMPUTE_DTYPE,
        )  # fmt: skip
        k_columns = q_columns
    _write_heads(
        q_ptr, qy_ptr, q, q_columns, has_position,
        HEAD_DIM, FIRST, PAIRS, BLOCK_PAIRS, OUT_INTERLEAVED, TRANSPOSE, SIGNED, IN_PLACE, BLOCK_HEAD, BLOCK_TAIL,
    )  # fmt: skip
    if K_HEADS > 0:
        _write_heads(
            k_ptr, ky_ptr, k, k_columns, has_position,
            HEAD_DIM, FIRST, PAIRS, BLOCK_PAIRS, OUT_INTERLEAVED, TRANSPOSE, SIGNED, IN_PLACE, BLOCK_HEAD, BLOCK_TAIL,
        )  # fmt: skip


def rotate(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
    tile: Tile | FlatTile | None = None,
) -> None:
    """Write the rotation of each ``xs[i]`` to ``outs[i]`` in one launch.

    Args:
        xs: q, or q and k, ``[B, S, H_i, D]``, of one dtype on one GPU, any strides; see `readable`.
        outs: as ``xs``; ``outs[i] is xs[i]`` rotates in place. Every element of every output is written.
        cos, sin: ``[P, W]`` or ``[B, P, W]``, with a column for each pair, or for each feature with
            ``rotation.full_width``. With ``rotation.table_free``, both are the frequencies, int64 ``[R/2, 3]`` (see
            `angles_torch`).
        positions: ``[B, S]``, or ``[B]`` with ``rotation.offsets``; int32 or int64. None means that positions count up
            from ``first_position`` (>= 0); the tables must then have their rows.
        tile: for sweeps; by default `tile_for` decides.

    Raises:
        ValueError: more tokens than a grid can hold.
    """
    sources = [readable(x) for x in xs]
    targets = [y if y.stride(-1) == 1 else torch.empty_like(y, memory_format=torch.contiguous_format) for y in outs]
    cos, sin = readable(cos), readable(sin)
    for start in range(0, xs[0].shape[0], MAX_BATCH):
        part = slice(start, start + MAX_BATCH)
        x_parts, y_parts = [x[part] for x in sources], [y[part] for y in targets]
        cos_part, sin_part = (table[part] if table.ndim == 3 else table for table in (cos, sin))
        positions_part = None if positions is None else positions[part]
        launch = plan(x_parts, y_parts, cos_part, sin_part, positions_part, rotation, tile)
        launch(
            x_parts[0], x_parts[-1], y_parts[0], y_parts[-1], cos_part, sin_part,
            cos if positions_part is None else positions_part, first_position, row_count(cos),
        )  # fmt: skip
    for target, out in zip(targets, outs, strict=True):
        if target is not out:
            out.copy_(target)


def plan(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotation: Rotation,
    tile: Tile | FlatTile | None = None,
) -> Callable[..., None]:
    """The launch that `rotate` makes for tensors like these; a caller can keep the launch and repeat it.

    Args:
        xs, outs, cos, sin: as for `rotate`, but with last strides of 1 and at most ``MAX_BATCH`` batches.

    Returns:
        ``launch(q, k, q_out, k_out, cos, sin, positions, first_position, table_rows)``. It serves tensors that agree
        with these in everything except contents, addresses and the number of rows of the tables. The launch takes only
        the addresses of the tensors of a call, so the order of their axes does not matter. A call without k passes q
        and q_out in place of k and k_out, and a call without positions passes cos in place of positions. The kernel
        ignores these stand-ins.
    """
    q, qy = xs[0], outs[0]
    k, ky = xs[-1], outs[-1]  # without k, the arguments of q stand in for it, and the kernel ignores them
    batch, seq_len, q_heads, head_dim = q.shape
    k_heads = k.shape[2] if len(xs) > 1 else 0
    pairs = rotation.rotary_dim // 2
    if q.numel() + k.numel() == 0:
        return _launch_nothing
    tile = tile or tile_for(xs, outs, cos, sin, positions, rotation)
    if isinstance(tile, FlatTile):
        return rotate_flat_triton.plan(xs, outs, cos, sin, positions, rotation, tile)
    token_blocks = triton.cdiv(seq_len, tile.block_tokens)
    head_blocks = max(1, triton.cdiv(q_heads, tile.block_heads))
    grid, order = launch_grid(batch, token_blocks, head_blocks, tile.innermost)
    x_strides, y_strides = _strides(xs), _strides(outs)
    cos_strides, sin_strides = table_strides(cos), table_strides(sin)
    positions_strides = (0, 0) if positions is None else (*positions.stride(), 0)[:2]
    features_per_access = tile.pairs_per_access * (2 if rotation.interleaved else 1)
    constants = {
        "Q_HEADS": q_heads, "K_HEADS": k_heads, "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotation.rotary_dim, "FIRST": rotation.first,
        "INTERLEAVED": rotation.interleaved, "OUT_INTERLEAVED": rotation.out_interleaved,
        "TRANSPOSE": rotation.transpose, "FULL_WIDTH": rotation.full_width, "TABLE_FREE": rotation.table_free,
        "POSITIONS": mode(positions, rotation),
        "IN_PLACE": all(x is y for x, y in zip(xs, outs, strict=True)),
        "COMPUTE_DTYPE": TL_DTYPE[compute_dtype(q, cos)],
        "HEADS_FIRST": tile.heads_first and positions is not None,
        "ALIGN": min(common_alignment([*x_strides, *y_strides]), features_per_access),
        "TABLE_ALIGN": common_alignment([*cos_strides, *sin_strides]),
        "SAME_STRIDES": _one_offset(xs, outs, cos, sin),
        "WIDE": any(reach(x, tile.block_tokens) >= 2**31 for x in (q, k, qy, ky)),
        "HEAD_BLOCKS": head_blocks, "INNERMOST": order,
        "BLOCK_TOKENS": tile.block_tokens, "BLOCK_Q_HEADS": tile.block_heads,
        "BLOCK_K_HEADS": triton.next_power_of_2(triton.cdiv(k_heads, head_blocks)),
        "BLOCK_PAIRS": triton.next_power_of_2(pairs),
        "BLOCK_HEAD": triton.next_power_of_2(max(1, rotation.first)),
        "BLOCK_TAIL": triton.next_power_of_2(max(1, head_dim - rotation.first - rotation.rotary_dim)),
    }  # fmt: skip
    numbers = (seq_len, *x_strides, *y_strides, *cos_strides, *sin_strides, *positions_strides)
    # Without fused multiply-add the results have the same bits as in `rotate_torch`.
    options = compiler_options(tile.num_warps, tile.max_registers, fuse=False)
    return Launch(_rotate_kernel, grid, numbers, constants, options, q.device)


def tile_for(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotation: Rotation,
) -> Tile | FlatTile:
    """The tile that `plan` chooses for tensors like these."""
    return choose(work_of(xs, outs, cos, sin, positions, rotation))


def work_of(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotation: Rotation,
) -> Work:
    """The call, as far as the choice of a tile needs it."""
    q = outs[0]  # the strides of an expanded input do not show the order of its axes
    batch, seq_len, _, head_dim = q.shape
    heads = tuple(y.shape[2] for y in outs)
    in_place = all(x is y for x, y in zip(xs, outs, strict=True))
    only_pairs = len(heads) == 1 and rotation.rotary_dim == head_dim and not rotation.full_width
    return Work(
        rotation, heads, next_power_of_2(max(1, batch)), next_power_of_2(max(1, seq_len)),
        innermost="batches" if _batches_read_anew(q, sum(heads[1:]), cos, positions) else innermost(q),
        rest=0 if in_place and positions is None else head_dim - rotation.rotary_dim,
        positions=positions is not None, itemsize=q.itemsize, column_bytes=cos.itemsize,
        lean=only_pairs and cos.itemsize <= 4 and _one_offset(xs, outs, cos, sin), in_place=in_place,
    )  # fmt: skip


def _strides(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The strides of q and k without the last strides, as these are 1."""
    return [*tensors[0].stride()[:3], *tensors[-1].stride()[:3]]


def _one_offset(xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether one offset serves input and output, and one offset serves cos and sin."""
    return _strides(xs) == _strides(outs) and table_strides(cos) == table_strides(sin)


def _batches_read_anew(q: torch.Tensor, k_heads: int, cos: torch.Tensor, positions: torch.Tensor | None) -> bool:
    """Whether the batches share tables that are large, and that leave the cache before the next batch reads them.

    Tables are large if their row for a token has at least an eighth of the bytes that the rotation of the token's heads
    reads and writes.
    """
    batch, seq_len, q_heads, head_dim = q.shape
    row = 2 * cos.shape[-1] * cos.itemsize
    heads = 2 * (q_heads + k_heads) * head_dim * q.itemsize
    return batch > 1 and positions is None and cos.ndim == 2 and seq_len * row > _TABLES_STAY and 8 * row >= heads


def _launch_nothing(*arguments) -> None:
    """Do nothing, because an empty grid cannot be launched."""
