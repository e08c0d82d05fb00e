"""The rotation as one Triton kernel: q and k in one launch, both layouts, any strides, in place or not.

RoPE moves every element once and computes almost nothing, so its limit is a memory copy. What the kernel
does about that: queries and keys share a launch; a program takes several heads of a token, so that they share
a row of cosines and sines; threads move 8 or 16 bytes at a time; and little is computed before the loads begin.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.kernels.tiles import Tile, choose_tile

INTERPRETED = triton.knobs.runtime.interpret

_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}
_MAX_GRID_X, _MAX_GRID_Y = 2**31 - 1, 65535

# Four pairs to a thread: their cosines and their sines in float32 are one 16-byte load each. With eight, the
# compiler moves half of the table loads behind the first arithmetic, and every program waits for memory twice.
_PAIRS_PER_ACCESS = 4


@triton.jit
def _offsets(stride_b, stride_s, stride_h, batch, first_seq, token, head, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """Where the rows of a tile begin, ``[tokens, heads, 1]``.

    The tile as a whole begins at a 64-bit offset: B * S * H * D passes 2**31 in long-context training. Within
    the tile 32 bits do unless it is WIDE, and every thread computes that part, so it pays to keep it short. The
    hint says what all strides are multiples of, without which the compiler reads element by element.
    """
    if WIDE:
        token, head = token.to(tl.int64), head.to(tl.int64)
    first = tl.multiple_of(batch.to(tl.int64) * stride_b + first_seq.to(tl.int64) * stride_s, ALIGN)
    token_offset = tl.multiple_of(token * stride_s, ALIGN)
    head_offset = tl.multiple_of(head * stride_h, ALIGN)
    return first + (token_offset[:, None, None] + head_offset[None, :, None])


@triton.jit
def _load_pairs(row, mask, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two members of every pair, each ``[tokens, heads, BLOCK_PAIRS]``."""
    if INTERLEAVED:
        # Pairs are adjacent: one wide load for both members, parted in registers.
        feature = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        x = tl.load(row + feature, mask=mask & (feature < 2 * PAIRS))
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], BLOCK_PAIRS, 2]))
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        x0 = tl.load(row + pair, mask=mask & (pair < PAIRS))
        x1 = tl.load(row + PAIRS + pair, mask=mask & (pair < PAIRS))
        return x0, x1


@triton.jit
def _load_table(row, mask, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """The tokens' rows ``[tokens, heads, BLOCK_PAIRS]``, read anew for every head.

    So each thread reads what belongs to the pairs it holds, and nothing has to change hands between threads; the
    repeats come from the L1 cache. Layers, heads and batches share a table while q and k pass by once, hence
    evict_last: keep it.
    """
    pair = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    return tl.load(
        tl.broadcast_to(row + pair, [mask.shape[0], mask.shape[1], BLOCK_PAIRS]),
        mask=mask & (pair < PAIRS),
        eviction_policy="evict_last",
    )


@triton.jit
def _turn(x0, x1, cos, sin, INVERSE: tl.constexpr):
    """The rotation of a pair, by minus the angle if INVERSE."""
    if INVERSE:
        sin = -sin
    return x0 * cos - x1 * sin, x1 * cos + x0 * sin


@triton.jit
def _store_pairs(row, mask, y0, y1, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        feature = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        y = tl.reshape(tl.join(y0, y1), [y0.shape[0], y0.shape[1], 2 * BLOCK_PAIRS])
        tl.store(row + feature, y.to(row.dtype.element_ty), mask=mask & (feature < 2 * PAIRS))
    else:
        pair = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        tl.store(row + pair, y0.to(row.dtype.element_ty), mask=mask & (pair < PAIRS))
        tl.store(row + PAIRS + pair, y1.to(row.dtype.element_ty), mask=mask & (pair < PAIRS))


@triton.jit
def _copy_tail(x_row, y_row, mask, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    feature = FIRST + tl.arange(0, BLOCK)[None, None, :]
    tl.store(y_row + feature, tl.load(x_row + feature, mask=mask & (feature < END)), mask=mask & (feature < END))


@triton.jit(do_not_specialize=[
    "seq_len",
    "q_stride_b", "q_stride_s", "q_stride_h", "k_stride_b", "k_stride_s", "k_stride_h",
    "qy_stride_b", "qy_stride_s", "qy_stride_h", "ky_stride_b", "ky_stride_s", "ky_stride_h",
])  # fmt: skip
def _rotate_kernel(
    q_ptr, k_ptr, qy_ptr, ky_ptr, cos_ptr, sin_ptr,
    seq_len,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    qy_stride_b, qy_stride_s, qy_stride_h, ky_stride_b, ky_stride_s, ky_stride_h,
    cos_stride, sin_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, COPY_TAIL: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    SAME_STRIDES: tl.constexpr, WIDE: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_Q_HEADS: tl.constexpr, BLOCK_K_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin, for a block of tokens and its share of the q and k heads.

    Grid: tokens x head blocks on axis 0, batches on axis 1. Finding the batch by a division instead costs up to
    5% of the speed of a copy: nothing can be loaded before its result is there.
    """
    PAIRS: tl.constexpr = ROTARY_DIM // 2
    program = tl.program_id(0)
    batch = tl.program_id(1)
    head_block = program % HEAD_BLOCKS
    first_seq = program // HEAD_BLOCKS * BLOCK_TOKENS
    token = tl.arange(0, BLOCK_TOKENS)
    # The grid is exact for single tokens; blocks of several may reach past the end.
    is_token = token >= 0 if BLOCK_TOKENS == 1 else first_seq + token < seq_len

    seq = (first_seq + token).to(tl.int64)
    cos_at = tl.multiple_of(seq * cos_stride, TABLE_ALIGN)[:, None, None]
    sin_at = cos_at if SAME_STRIDES else tl.multiple_of(seq * sin_stride, TABLE_ALIGN)[:, None, None]
    cos_row, sin_row = cos_ptr + cos_at, sin_ptr + sin_at

    # All loads come before the first store: the compiler may not move a load across a store by itself.
    q_head = head_block * BLOCK_Q_HEADS + tl.arange(0, BLOCK_Q_HEADS)
    q_mask = is_token[:, None, None] & (q_head < Q_HEADS)[None, :, None]
    q_at = _offsets(q_stride_b, q_stride_s, q_stride_h, batch, first_seq, token, q_head, ALIGN, WIDE)
    qy_at = q_at
    if not SAME_STRIDES:
        qy_at = _offsets(qy_stride_b, qy_stride_s, qy_stride_h, batch, first_seq, token, q_head, ALIGN, WIDE)
    q0, q1 = _load_pairs(q_ptr + q_at, q_mask, PAIRS, BLOCK_PAIRS, INTERLEAVED)
    q_cos = _load_table(cos_row, q_mask, PAIRS, BLOCK_PAIRS).to(COMPUTE_DTYPE)
    q_sin = _load_table(sin_row, q_mask, PAIRS, BLOCK_PAIRS).to(COMPUTE_DTYPE)
    if K_HEADS > 0:
        k_head = head_block * BLOCK_K_HEADS + tl.arange(0, BLOCK_K_HEADS)
        k_mask = is_token[:, None, None] & (k_head < K_HEADS)[None, :, None]
        k_at = _offsets(k_stride_b, k_stride_s, k_stride_h, batch, first_seq, token, k_head, ALIGN, WIDE)
        ky_at = k_at
        if not SAME_STRIDES:
            ky_at = _offsets(ky_stride_b, ky_stride_s, ky_stride_h, batch, first_seq, token, k_head, ALIGN, WIDE)
        k0, k1 = _load_pairs(k_ptr + k_at, k_mask, PAIRS, BLOCK_PAIRS, INTERLEAVED)
        k_cos = _load_table(cos_row, k_mask, PAIRS, BLOCK_PAIRS).to(COMPUTE_DTYPE)
        k_sin = _load_table(sin_row, k_mask, PAIRS, BLOCK_PAIRS).to(COMPUTE_DTYPE)

    y0, y1 = _turn(q0.to(COMPUTE_DTYPE), q1.to(COMPUTE_DTYPE), q_cos, q_sin, INVERSE)
    _store_pairs(qy_ptr + qy_at, q_mask, y0, y1, PAIRS, BLOCK_PAIRS, INTERLEAVED)
    if COPY_TAIL:
        _copy_tail(q_ptr + q_at, qy_ptr + qy_at, q_mask, ROTARY_DIM, HEAD_DIM, BLOCK_TAIL)
    if K_HEADS > 0:
        y0, y1 = _turn(k0.to(COMPUTE_DTYPE), k1.to(COMPUTE_DTYPE), k_cos, k_sin, INVERSE)
        _store_pairs(ky_ptr + ky_at, k_mask, y0, y1, PAIRS, BLOCK_PAIRS, INTERLEAVED)
        if COPY_TAIL:
            _copy_tail(k_ptr + k_at, ky_ptr + ky_at, k_mask, ROTARY_DIM, HEAD_DIM, BLOCK_TAIL)


def rotate(
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    inverse: bool,
    tile: Tile | None = None,
) -> None:
    """Write the rotation of each ``xs[i]`` to ``outs[i]`` in one launch.

    Args:
        xs: one or two tensors ``[B, S, H_i, D]`` of one dtype on one GPU, any strides. A tensor whose last
            stride is not 1 is copied first: single-element strides cannot be read 16 bytes at a time.
        outs: as ``xs``; ``outs[i] is xs[i]`` rotates in place. Every element of every output is written.
        cos, sin: ``[P, R/2]``, ``P >= S``, ``R <= D``; row ``s`` belongs to token ``s``.
        interleaved: pairs ``(2i, 2i+1)`` instead of ``(i, i + R/2)``.
        inverse: rotate by minus the angle (the transpose).
        tile: for sweeps; otherwise ``choose_tile`` decides.

    Raises:
        ValueError: more tokens than a grid can hold.
    """
    sources = [x if x.stride(-1) == 1 else x.contiguous() for x in xs]
    targets = [y if y.stride(-1) == 1 else torch.empty_like(y, memory_format=torch.contiguous_format) for y in outs]
    options = {
        "interleaved": interleaved,
        "inverse": inverse,
        "copy_tail": any(x is not y for x, y in zip(sources, targets, strict=True)),
        "tile": tile,
    }
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    with torch.cuda.device_of(xs[0]):  # Triton launches on the current device
        if xs[0].shape[0] <= _MAX_GRID_Y:
            _launch(sources, targets, cos, sin, **options)
        else:
            source_parts = zip(*(x.split(_MAX_GRID_Y) for x in sources), strict=True)
            target_parts = zip(*(y.split(_MAX_GRID_Y) for y in targets), strict=True)
            for source_part, target_part in zip(source_parts, target_parts, strict=True):
                _launch(source_part, target_part, cos, sin, **options)
    for target, out in zip(targets, outs, strict=True):
        if target is not out:
            out.copy_(target)


def _launch(sources, targets, cos, sin, *, interleaved: bool, inverse: bool, copy_tail: bool, tile: Tile | None):
    q, qy = sources[0], targets[0]
    k, ky = sources[-1], targets[-1]  # without k, the arguments of q stand in for it and are never touched
    batch, seq_len, q_heads, head_dim = q.shape
    k_heads = k.shape[2] if len(sources) > 1 else 0
    rotary_dim = 2 * cos.shape[-1]
    if q.numel() + k.numel() == 0:
        return
    tile = tile or choose_tile(rotary_dim, q_heads, seq_len)
    head_blocks = max(1, triton.cdiv(q_heads, tile.block_heads))
    blocks = triton.cdiv(seq_len, tile.block_tokens) * head_blocks
    if blocks > _MAX_GRID_X:
        raise ValueError(f"q: expected at most {_MAX_GRID_X} blocks of tokens and heads, got {blocks}")
    strides = [*q.stride()[:3], *k.stride()[:3], *qy.stride()[:3], *ky.stride()[:3]]
    _rotate_kernel[(blocks, batch)](
        q, k, qy, ky, cos, sin,
        seq_len, *strides, cos.stride(0), sin.stride(0),
        Q_HEADS=q_heads, K_HEADS=k_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
        INTERLEAVED=interleaved, INVERSE=inverse,
        COPY_TAIL=copy_tail and rotary_dim < head_dim,
        COMPUTE_DTYPE=_TL_DTYPE[compute_dtype(q, cos)],
        ALIGN=min(_common_alignment(strides), _PAIRS_PER_ACCESS * (2 if interleaved else 1)),
        TABLE_ALIGN=_common_alignment([cos.stride(0), sin.stride(0)]),
        # One offset then serves input and output, and one serves cos and sin.
        SAME_STRIDES=strides[:6] == strides[6:] and cos.stride(0) == sin.stride(0),
        WIDE=any(_reach(x, tile.block_tokens) >= 2**31 for x in (q, k, qy, ky)),
        HEAD_BLOCKS=head_blocks, BLOCK_TOKENS=tile.block_tokens, BLOCK_Q_HEADS=tile.block_heads,
        BLOCK_K_HEADS=triton.next_power_of_2(triton.cdiv(k_heads, head_blocks)),
        BLOCK_PAIRS=triton.next_power_of_2(rotary_dim // 2),
        BLOCK_TAIL=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        num_warps=tile.num_warps,
        enable_fp_fusion=False,  # no fused multiply-add: the same bits as the torch path
    )  # fmt: skip


def _reach(x: torch.Tensor, block_tokens: int) -> int:
    """An upper bound of the offsets within a tile: all heads, padded to a power of two, of its tokens."""
    return block_tokens * x.stride(1) + 2 * x.shape[2] * x.stride(2) + x.shape[3]


def _common_alignment(strides: Sequence[int]) -> int:
    """The largest power of two up to 16 that divides every stride.

    Triton itself only tells multiples of 16 from the rest. Heads of 72 elements (8 x 9) would then be read
    element by element, although 16-byte reads are possible.
    """
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits
