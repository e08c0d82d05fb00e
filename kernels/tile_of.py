"""The tile of every kernel: how much of a call one program takes, in how many warps, and why.

===========================  ==========================================  ======================================
kernel                       tile                                        what decides
===========================  ==========================================  ======================================
`rotate_triton`              `rotate`: the cheapest of its candidates    `tile_cost`, fitted to `tile_regret`
the same, without tables     `table_free`: an angle for each thread      counts of instructions
`qk_norm_triton`             `qk_norm`: 512 pairs                        bytes of a thread, registers
its backward                 `qk_norm_backward`: 512 pairs, many blocks  registers of a multiprocessor
its sum of rows              `SUM_ROWS` by `SUM_FEATURES`                reads under way at once
`latent_triton`              `latent`: one access of each thread         the sweep `latent_tiles`
`paged_cache_triton`         `paged_cache`: rows of few tokens           the sweep `one_pass_tiles`
`cached_keys_triton`         `cached_keys`: as for rows of a cache       the sweep `one_pass_tiles`
`block_scales_triton`        `block_scales`: heads in one warp           the bytes of the call
`projection_triton`          `PROJECTION`                                the sweep `projection_tiles`
`positions_triton`           `POSITIONS`                                 one program a multiprocessor
===========================  ==========================================  ======================================

A sweep is a record of the repository with the times of the tile and of its neighbours. Where the table names none, the
reason is that of the docstring alone.
"""

from dataclasses import replace

import torch

from ropelab.kernels.addressing import innermost, table_strides
from ropelab.kernels.rotation import Rotation, pairs_of_head
from ropelab.kernels.tensors import CachedKeys, CacheTensors, NormGradients, NormTensors, RotateTensors
from ropelab.kernels.tile_cost import REGISTERS, choose
from ropelab.kernels.tiles import (
    ACCESS_BYTES,
    PAIRS_PER_ACCESS,
    BackwardTile,
    CacheTile,
    FlatTile,
    ProjectionTile,
    Tile,
    Work,
    fit_tile,
    next_power_of_2,
    reads_several_axes,
)

PROJECTION = ProjectionTile(tokens=128, features=256, inputs=64, num_warps=8, num_stages=3, group=8)
"""The accumulator fills half of the registers, and the operands of three steps take 144 KB of shared memory.

With 1,024 tokens, smaller tiles of the sweep were faster: these leave multiprocessors idle."""

POSITIONS = 512, 1024
"""The tokens of a program, and the sequences whose lengths it checks at once: 65,536 tokens then make one program for
each multiprocessor of a large GPU."""

SUM_ROWS, SUM_FEATURES, SUM_WARPS = 512, 16, 8
"""Few programs read all rows, so each must have many reads under way at once: 32 for each of 256 threads."""

REGISTERS_ACROSS = 96
"""The limit on the registers of a thread under a norm across heads; the assembler would take up to 113.

It leaves room for a fifth program of 128 threads on a multiprocessor, and no register is spilled."""

_TABLE_FREE_HEADS = 16

# ----------------------------------------------------------------------------------------------------- the rotation


def rotate(t: RotateTensors, rotation: Rotation) -> Tile | FlatTile:
    """The tile of `rotate_triton`: the candidate that costs least, or the tile for a call without tables."""
    work = work_of(t, rotation)
    if rotation.table_free:
        return table_free(rotation.rotary_dim, work.heads[0], work.seq_len, work.innermost, itemsize=work.itemsize)
    return choose(work)


def work_of(t: RotateTensors, rotation: Rotation) -> Work:
    """The call, as far as the choice of a tile needs it."""
    q = t.q_out  # the strides of an expanded input do not show the order of its axes
    batch, seq_len, _, head_dim = q.shape
    reads_positions = t.positions is not None
    only_pairs = t.k is None and rotation.rotary_dim == head_dim and not rotation.full_width
    same_offsets = t.same_strides and table_strides(t.cos) == table_strides(t.sin)
    return Work(
        rotation, tuple(y.shape[2] for _, y in t.pairs),
        next_power_of_2(max(1, batch)), next_power_of_2(max(1, seq_len)),
        innermost="batches" if _batches_read_anew(t) else innermost(q),
        rest=0 if t.in_place and not reads_positions else head_dim - rotation.rotary_dim,
        positions=reads_positions, itemsize=q.itemsize, column_bytes=t.cos.itemsize,
        bare_q=only_pairs and t.cos.itemsize <= 4 and same_offsets, in_place=t.in_place,
    )  # fmt: skip


_TABLES_STAY = 2**23
"""The bytes of tables up to which the tables are still in the cache when the next batch reads them.

On an H200, tables of this size stayed in the cache, and tables of twice the size did not."""


def _batches_read_anew(t: RotateTensors) -> bool:
    """Whether the batches share tables that are large, and that leave the cache before the next batch reads them.

    Tables are large if their row for a token has at least an eighth of the bytes that the rotation of the token's heads
    reads and writes.
    """
    if t.positions is not None or (t.cos.ndim == 3 and len(t.cos) > 1) or len(t.q) == 1:
        return False
    row = 2 * t.cos.shape[-1] * t.cos.itemsize
    heads = 2 * sum(x.shape[2] * x.shape[3] * x.itemsize for x, _ in t.pairs)
    return t.q.shape[1] * row > _TABLES_STAY and 8 * row >= heads


def table_free(rotary_dim: int, q_heads: int, seq_len: int, innermost: str = "heads", *, itemsize: int = 2) -> Tile:
    """The tile for a kernel that computes cosines and sines; the arguments are as for `fit_tile`.

    The tile has as many tokens as give each thread one angle to compute. With fewer angles than threads, the compiler
    would make every thread compute the angles of its own pairs: eight times as many angles. Many heads share the
    angles, so that a thread has 16 pairs. Where heads are adjacent, two warps make a program: the threads of a program
    wait for each other, and many small programs wait less than few large programs.
    """
    width = next_power_of_2(rotary_dim // 2)
    threads = max(32 * (4 if innermost == "tokens" else 2), min(width, 256))
    heads = min(_TABLE_FREE_HEADS, next_power_of_2(max(q_heads, 1)))
    # With few heads the tile has more tokens, so that a thread still moves 16 bytes at once.
    access = _access(itemsize > 2)
    tokens = max(threads, threads * access // heads) // width
    tokens = min(max(1, tokens), next_power_of_2(max(seq_len, 1)))
    return Tile(tokens, heads, threads // 32, innermost, access)


def _access(narrow: bool) -> int:
    """The pairs that fill 16 bytes: eight members of 16 bits each, or four of 32 bits, or four adjacent pairs of 16."""
    return PAIRS_PER_ACCESS if narrow else 2 * PAIRS_PER_ACCESS


# ---------------------------------------------------------------------------------------------- the norm of each head


def qk_norm(t: NormTensors, rotation: Rotation) -> Tile:
    """The tile of the forward: 512 pairs.

    512 pairs are 8 heads of 128 features; q and k usually have no fewer. A thread takes 16 bytes of each member of its
    pairs. Half as many interleaved pairs would fill 16 bytes too, but twice as many threads then share a head, and the
    sum over the head holds them up: 0.89 of a copy instead of 0.97. Where tokens are innermost, a program takes few
    heads.
    """
    heads, features, order = _norm_shape(t, rotation)
    wide = t.q.itemsize > 2
    most_heads = (2 if wide else 1) if order == "tokens" else None
    tile = fit_tile(features, heads, t.q.shape[1], order, _access(wide), 4 if wide else 2, most_heads)
    return replace(tile, shares_columns=reads_several_axes(rotation))


def qk_norm_backward(t: NormGradients, rotation: Rotation) -> BackwardTile:
    """The tile of the backward: 512 pairs, four for each thread, because a thread holds x and its gradient at once.

    The order of the sums over a head depends on the pairs that a thread holds. The tile therefore has so many heads
    that every thread holds four pairs of a head: a gradient has the same bits for any number of tokens and heads.

    There are as many programs as the registers of the GPU allow at once. All programs then run at the same time, and no
    program waits until others are done.
    """
    heads, features, order = _norm_shape(t, rotation)
    most_heads = 2 if order == "tokens" else None
    tile = fit_tile(features, heads, t.q.shape[1], order, PAIRS_PER_ACCESS, 4, most_heads)
    block_heads = max(tile.block_heads, 32 * PAIRS_PER_ACCESS // (tile.block_tokens * features // 2))
    tile = BackwardTile(tile.block_tokens, block_heads, tile.num_warps)
    registers = 32 * tile.num_warps * norm_registers(tile, features // 2, t.q.itemsize)
    return replace(tile, programs_per_multiprocessor=max(1, REGISTERS // registers))


def _norm_shape(t: NormTensors | NormGradients, rotation: Rotation) -> tuple[int, int, str]:
    """The heads and their padded features, and the axis whose neighbours are adjacent in memory."""
    features = 2 * next_power_of_2(pairs_of_head(t.q.shape[3], rotation))
    return max(t.q.shape[2], t.k.shape[2]), features, innermost(t.q)


def norm_registers(tile: Tile, block_pairs: int, itemsize: int) -> int:
    """The limit on the registers of a thread under a norm of each head: 64 for four pairs of features of two bytes.

    Without a limit the assembler saves a few registers by moving loads behind the first arithmetic. These registers do
    not make room for another program, and every program then waits for memory twice.
    """
    pairs_per_thread = tile.block_tokens * tile.block_heads * block_pairs / (32 * tile.num_warps)
    return min(255, max(64, int(16 * pairs_per_thread * max(itemsize, 2) / 2)))


# ------------------------------------------------------------------------------- latent attention, and block scales


def latent(widest: int, heads: int, seq_len: int, innermost: str = "heads", itemsize: int = 2) -> Tile:
    """The tile of 128 threads; one access of each thread reads the widest part of the heads, ``widest`` features.

    Where heads are innermost, a program takes heads of one token, if the token has enough heads. Where tokens are
    innermost, a program takes two heads of several tokens.
    """
    warps = 4
    rows = max(1, 32 * warps * ACCESS_BYTES // (next_power_of_2(widest) * itemsize))
    block_heads = min(2 if innermost == "tokens" else rows, rows, next_power_of_2(heads))
    block_tokens = min(max(1, rows // block_heads), next_power_of_2(max(1, seq_len)))
    return Tile(block_tokens, block_heads, warps, innermost)


def block_scales(x: torch.Tensor) -> Tile:
    """The tile for heads ``x [1, S, H, D]``: a thread moves 16 bytes in a tiny call, 32 in a small one, 64 in others.

    A program has one warp, so the maximum of a block and the sum of a norm stay within a warp. A program of kv, which
    has one head, takes as many tokens as another takes heads.
    """
    size = x.numel() * x.itemsize
    thread = 16 if size <= 2**18 else 32 if size <= 2**21 else 64
    return Tile(1, max(1, 32 * thread // x.itemsize // next_power_of_2(x.shape[3])), 1)


# ------------------------------------------------------------------------------------------------- rows of a cache


def paged_cache(t: CacheTensors, rotation: Rotation) -> CacheTile:
    """The tile of `paged_cache_triton`.

    Under a norm across heads a program takes all heads of q or of k of a token, 16 pairs in a thread. This tile does
    not depend on the number of tokens, so the sum of the norm has one order.
    """
    batch, seq_len, q_heads, head_dim = t.q.shape
    width, narrow = block_pairs(t, rotation), rotation.interleaved or t.q.itemsize > 2
    if t.norm_across_heads:
        rows = next_power_of_2(max(1, q_heads, t.k.shape[2]))
        return CacheTile(rows, min(16, max(1, rows * width // (32 * 16))), _access(narrow))
    if t.shares_scale or (t.q_nope is not None and t.q_scale_out is not None):
        # A program holds all features of its rows. More rows would take more registers than there are.
        return CacheTile(max(1, 32 * PAIRS_PER_ACCESS // width), 1, _access(narrow))
    if rotation.table_free:
        return _table_free_rows(width, q_heads, narrow)
    rows = batch * seq_len * sum(rows_of_token(t, rotation).values())
    pairs, apart = pairs_of_head(head_dim, rotation), t.q_nope is not None
    return cache_rows(pairs, rows, interleaved=rotation.interleaved, itemsize=t.q.itemsize, nope_apart=apart)


def cached_keys(t: CachedKeys, rotation: Rotation) -> CacheTile:
    """The tile of `cached_keys_triton`: as for rows that `paged_cache_triton` writes."""
    heads, lanes = t.k_cache.shape[2], rotation.rotary_dim if t.k_scale_cache is None else t.k_cache.shape[3]
    width, itemsize = next_power_of_2(pairs_of_head(lanes, rotation)), max(2, t.k_cache.itemsize)
    if rotation.table_free:
        return _table_free_rows(width, heads, rotation.interleaved or itemsize > 2)
    return cache_rows(width, len(t.slots) * heads, interleaved=rotation.interleaved, itemsize=itemsize)


def block_pairs(t: CacheTensors, rotation: Rotation, pieces: int = 1) -> int:
    """The pairs of a piece of a row, also those that do not rotate, padded to a power of two."""
    return next_power_of_2(-(-pairs_of_head(t.q.shape[3], rotation) // pieces))


def rows_of_token(t: CacheTensors, rotation: Rotation, pieces: int = 1) -> dict[str, int]:
    """The rows of a token of q, k, v, and features of q that lie apart, as far as programs of their own move them.

    A wide head of the last two makes several rows, unless the kernel makes its scale.
    """
    width, (q_heads, k_heads) = 2 * block_pairs(t, rotation, pieces), (t.q.shape[2], t.k.shape[2])
    v_pieces = 1 if t.v_scale_cache is not None else -(-t.v.shape[3] // width)
    nope_pieces = 0 if t.q_nope is None or t.q_scale_out is not None else -(-t.q_nope.shape[3] // width)
    v_rows = 0 if t.shares_scale else k_heads * v_pieces
    return {"Q": q_heads, "K": k_heads, "V": v_rows, "NOPE": q_heads * nope_pieces}


def _table_free_rows(width: int, heads: int, narrow: bool) -> CacheTile:
    """The tile of one token whose heads share computed cosines and sines: each thread computes one angle."""
    rows = min(_TABLE_FREE_HEADS, next_power_of_2(max(1, heads)))
    return CacheTile(rows, min(8, max(1, width // 32)), _access(narrow))


_FEW_BYTES, _FEW_PAIRS = 2**22, 32
"""An H100 or an H200 holds the warps of a pass over a small call at once: 4,096 warps of a kilobyte, 31 on each
multiprocessor. In further passes a warp would do alone what idle warps could do at the same time."""


def cache_rows(pairs: int, rows: int, *, interleaved: bool, itemsize: int, nope_apart: bool = False) -> CacheTile:
    """The tile for ``rows`` rows of all tokens, whose heads have ``pairs`` pairs.

    A thread moves 16 bytes at once, as in `rotate`. The sum of a norm has one order whatever the tile is, so a token
    has the same bits alone and among other tokens.

    A thread of a large call moves 64 bytes or more, in as many passes as that takes, and a program has one warp: each
    program reads the cosines and sines of its tokens once for all passes. If padding would leave many lanes idle, a
    program takes each head in pieces, see `pieces_of`. All pieces of a head belong to the same few threads, which move
    8 bytes at once.

    A small call takes one pass, so that no row waits for another, and programs of four warps, because fewer programs
    start sooner. In a small call, heads of up to ``_FEW_PAIRS`` pairs take one warp and 32 bytes, unless features of q
    lie apart.

    Args:
        interleaved: whether the pairs are interleaved.
        itemsize: the bytes of an element of q.
        nope_apart: whether features of q that do not rotate are moved too.
    """
    access, width = _access(interleaved or itemsize > 2), next_power_of_2(pairs)
    few = rows * 2 * width * itemsize <= _FEW_BYTES
    pieces = 1 if few else pieces_of(pairs, interleaved)
    if pieces > 1:
        access, width = PAIRS_PER_ACCESS, next_power_of_2(-(-pairs // pieces))
    bytes_of_pass = 2 * itemsize * pieces * max(access, width // 32)
    warps, passes = 1, -(-64 // bytes_of_pass)
    if few and (width > _FEW_PAIRS or nope_apart):
        warps, passes = 4, 1
    elif few:
        passes = -(-32 // bytes_of_pass)
    return CacheTile(max(1, 32 * warps * access // width), warps, access, passes, pieces)


_PIECE = 16


def pieces_of(pairs: int, interleaved: bool) -> int:
    """The pieces of a head: as few as leave the fewest lanes idle.

    The width of a piece is a power of two. For example, 80 adjacent pairs are 5 pieces of 16, and 96 pairs are 3 pieces
    of 32; one piece would have 128 lanes. A piece has at least ``_PIECE`` pairs: in 16 bits, their members fill a
    sector of memory, 32 bytes. Halves have at most 3 pieces and adjacent pairs at most 6. These limits were the faster
    ones in a trial on an H200, and no record has these widths yet.
    """
    widths = [_PIECE << i for i in range(max(1, (next_power_of_2(pairs) // _PIECE).bit_length()))]
    counts = [n for width in widths if (n := -(-pairs // width)) <= (6 if interleaved else 3)]
    return min(counts, key=lambda n: (n * next_power_of_2(-(-pairs // n)), n))
