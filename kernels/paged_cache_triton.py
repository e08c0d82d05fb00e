"""The way from the projections to attention in one pass, as a Triton kernel.

The kernel normalizes the heads of q and k, rotates them, writes q, and writes k and v into the slots of a paged cache.
Separate launches write k and read it again in between; this kernel reads q, k and v once and writes each result once.

A program takes rows of q, rows of k or rows of v, where a row is a head of a token. All rows of a program share one
code, so no program converts or looks up what another kind of row needs. A program takes the same heads of a few
neighbouring tokens, as few as fill it. In further passes it takes further heads of these tokens, which rotate by the
cosines and sines that the program has read. The programs of q, k and v for the same few tokens are neighbours, because
they share the rows of the tables, and often one packed tensor.

Two kinds of calls make programs of a single token. Under a norm across heads a program takes all heads of q, or all
heads of k, because the heads share a mean. Without tables, the heads of a program share the cosines and sines that the
program computes.

Where q and the cache are in 8-bit floats, instructions are as scarce as bytes. An H200 executes 25 for each feature
in the time in which it moves the 3 bytes of the feature. A row of q takes 16 for a feature, as
``tests/compile/compile_paged_cache.py`` counts in the machine code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from ropelab.kernels import tile_of
from ropelab.kernels.addressing import common_alignment, fitting, strides_of, turning, whole_heads
from ropelab.kernels.cache_rows_triton import Block, Caching, Kind, KindTensors, move_rows, turn_rows
from ropelab.kernels.float8_triton import INTEGER_CONVERSIONS, conversion
from ropelab.kernels.launch import Launch, LaunchWithBytes, compiler_options, launch_nothing
from ropelab.kernels.paged_cache_torch import compute_dtype
from ropelab.kernels.place_triton import Angles, Slots
from ropelab.kernels.rotation import Norm, Rotation
from ropelab.kernels.tensors import CacheTensors
from ropelab.kernels.tiles import CacheTile, next_power_of_2


@dataclass(frozen=True)
class PagedChoices(Caching):
    """The choices of `_paged_cache_kernel`.

    Attributes:
        Q, K, V, NOPE: the kinds of rows, in the order of their programs.
        NORM: a norm of each "head", of each "token", or "none".
        NORM_FIRST, EPS, WEIGHT_OFFSET: as in `paged_cache.Norm`.
    """

    Q: Kind
    K: Kind
    V: Kind
    NOPE: Kind
    NORM: str
    NORM_FIRST: bool
    EPS: float
    WEIGHT_OFFSET: float


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len", "slot_count", "pages"])
def _paged_cache_kernel(ptr, first_position, table_rows, seq_len, slot_count, pages, strides, C: tl.constexpr):
    """Write rows of q, rows of k to the cache, rows of v to the cache, or features of q that do not rotate."""
    K_FIRST: tl.constexpr = C.Q.PROGRAMS
    V_FIRST: tl.constexpr = K_FIRST + C.K.PROGRAMS
    NOPE_FIRST: tl.constexpr = V_FIRST + C.V.PROGRAMS
    PROGRAMS: tl.constexpr = NOPE_FIRST + C.NOPE.PROGRAMS
    first, part = (tl.program_id(0) // PROGRAMS) * C.BLOCK_TOKENS, tl.program_id(0) % PROGRAMS
    batch = tl.program_id(1)
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    slots = Slots(ptr.slots, strides.slots, slot_count, pages)
    q_out, nope_out = (ptr.q_out, strides.q_out), (ptr.q_nope_out, strides.q_nope_out)
    q_scales = ptr.q_scale_out, strides.q_scale_out
    k_scales, v_scales = (ptr.k_scale_cache, strides.k_scale_cache), (ptr.v_scale_cache, strides.v_scale_cache)
    k_copy, k_cache = (ptr.k_out, strides.k_out), (ptr.k_cache, strides.k_cache)
    v_copy, v_cache = (ptr.v_out, strides.v_out), (ptr.v_cache, strides.v_cache)
    q = KindTensors((ptr.q, strides.q), q_out, q_out, ptr.q_weight, ptr.q_scale, q_scales)
    nope = KindTensors((ptr.q_nope, strides.q_nope), nope_out, nope_out, None, ptr.q_scale, q_scales)
    k = KindTensors((ptr.k, strides.k), k_copy, k_cache, ptr.k_weight, ptr.k_scale, k_scales)
    v = KindTensors((ptr.v, strides.v), v_copy, v_cache, None, ptr.v_scale, v_scales)
    # The kinds of rows are not branches of one condition: the compiler would demand that equal names have equal shapes.
    if part < K_FIRST:
        turn_rows(q, nope, slots, angles, Block(batch, first, seq_len, part), C.Q, C)
    if (part >= K_FIRST) & (part < V_FIRST):
        turn_rows(k, v, slots, angles, Block(batch, first, seq_len, part - K_FIRST), C.K, C)
    if C.V.PROGRAMS > 0:
        if (part >= V_FIRST) & (part < NOPE_FIRST):
            move_rows(v, slots, Block(batch, first, seq_len, part - V_FIRST), C.V, C)
    if C.NOPE.PROGRAMS > 0:
        if part >= NOPE_FIRST:
            move_rows(nope, slots, Block(batch, first, seq_len, part - NOPE_FIRST), C.NOPE, C)


def plan_write(
    t: CacheTensors, rotation: Rotation, norm: Norm | None, tile: CacheTile | None = None
) -> Callable[..., None]:
    """Plan the launch of `paged_cache_torch.write`; see `rotate_triton.plan_rotate`.

    Args:
        t: tensors with last strides of 1 and at most ``MAX_BATCH`` batches.
        tile: for sweeps; by default `tile_of.paged_cache` decides.

    Raises:
        ValueError: more programs than a grid can hold.
    """
    batch, seq_len, q_heads, head_dim = t.q.shape
    if batch * seq_len * (q_heads + t.k.shape[2]) == 0:
        return launch_nothing
    tile = tile or tile_of.paged_cache(t, rotation)
    block_tokens, kinds = _kinds(t, rotation, tile)
    programs = sum(kind.PROGRAMS for kind in kinds.values())
    grid = fitting("q", triton.cdiv(seq_len, block_tokens) * programs, batch)
    rows = (t.q, t.k, t.v, t.q_out, t.k_out, t.v_out, t.q_nope, t.q_nope_out, t.q_scale_out)
    tiled = [x for x in rows if x is not None]
    access = tile.pairs_per_access * (2 if rotation.interleaved else 1)
    turned = [x for x in (t.q, t.k, t.q_out, t.k_out, t.k_cache) if x is not None]
    choices = PagedChoices(
        **turning(t, rotation, compute_dtype(t), tiled, block_tokens, access)
        | {"ALIGN": min(common_alignment(turned), access)},
        **whole_heads(head_dim, rotation, tile.pairs_per_access, tile.pieces), **kinds, INNERMOST="heads",
        NORM="none" if norm is None else "token" if t.norm_across_heads else "head",
        NORM_FIRST=norm is None or norm.first, EPS=0.0 if norm is None else norm.eps,
        WEIGHT_OFFSET=0.0 if norm is None else norm.weight_offset,
        PAGE=t.k_cache.shape[1], NARROW_SLOTS=t.k_cache.shape[0] * t.k_cache.shape[1] < 2**31,
        BLOCK_TOKENS=block_tokens, BLOCK_ROWS=tile.block_rows, HEAD_PIECES=tile.pieces,
    )  # fmt: skip
    numbers = seq_len, len(t.slots), len(t.k_cache)
    # The norm rounds as in `qk_norm_triton`, and the rotation alone as in `rotate_triton`. Computed cosines and sines
    # have the bits of `angles_torch` without fused multiply-add.
    options = compiler_options(tile.num_warps, tile_of.REGISTERS_ACROSS if t.norm_across_heads else None, fuse=False)
    launch = Launch(_paged_cache_kernel, grid, numbers, strides_of(t), choices, options, t.q.device)
    as_bytes = [conversion(x.dtype, x.device) in INTEGER_CONVERSIONS for x in (t.q_out, t.k_cache, t.v_cache)]
    return LaunchWithBytes(launch) if any(as_bytes) else launch


def _kinds(t: CacheTensors, rotation: Rotation, tile: CacheTile) -> tuple[int, dict[str, Any]]:
    """The tokens of a block, and the kinds of rows.

    A program takes so many tokens that no row is idle, but not more tokens than there are. For example, 28 heads and 8
    rows a program give 2 tokens with 4 heads of each: a block then has 7 programs of one pass. The block has the tokens
    of the kind that takes the most.
    """
    width, all_rows = 2 * tile_of.block_pairs(t, rotation, tile.pieces), tile_of.rows_of_token(t, rotation, tile.pieces)
    most = 1 if t.norm_across_heads or rotation.table_free else next_power_of_2(t.q.shape[1])
    tokens = {name: min(most, tile.block_rows // gcd(tile.block_rows, rows)) for name, rows in all_rows.items()}
    block_tokens = max(tokens.values())

    def kind(name: str, x, target, copy, scale, made_scales, apart=None) -> Kind:
        head_blocks = triton.cdiv(all_rows[name], tile.block_rows // tokens[name])
        pieces = 1 if x is None else max(1, triton.cdiv(x.shape[3], width))
        is_whole = made_scales is not None  # else each piece of a head that is only moved is a row
        most_passes = tile.passes * (1 if is_whole or name in ("Q", "K") else tile.pieces)
        passes = 1 if apart else min(most_passes, next_power_of_2(max(1, head_blocks)))
        return Kind(
            HEADS=1 if x is None else max(1, x.shape[2]), DIM=0 if x is None else x.shape[3],
            PARTS=1 if is_whole else pieces, PIECES=pieces if is_whole else 1,
            PROGRAMS=block_tokens // tokens[name] * triton.cdiv(head_blocks, passes),
            TOKENS=tokens[name], PASSES=passes, CACHED=name in ("K", "V"), COPIED=copy is not None,
            SCALES="row" if is_whole else "none" if scale is None else "tensor" if scale.numel() == 1 else "head",
            APART=apart, CONVERSION="none" if target is None else conversion(target.dtype, target.device),
            LARGEST=torch.finfo(target.dtype).max if is_whole and target is not None else 0.0,
            ALIGN=common_alignment([y for y in (x, target, copy) if y is not None]),
        )  # fmt: skip

    nope = kind("NOPE", t.q_nope, t.q_nope_out, None, t.q_scale, t.q_scale_out)
    v = kind("V", t.v, t.v_cache, t.v_out, t.v_scale, t.k_scale_cache if t.shares_scale else t.v_scale_cache)
    nope_apart = None if t.q_nope is None or t.q_scale_out is None else nope
    q = kind("Q", t.q, t.q_out, None, t.q_scale, t.q_scale_out, nope_apart)
    k = kind("K", t.k, t.k_cache, t.k_out, t.k_scale, t.k_scale_cache, v if t.shares_scale else None)
    return block_tokens, {"Q": q, "K": k, "V": v, "NOPE": nope}
