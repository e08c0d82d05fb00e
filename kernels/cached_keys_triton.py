"""The rotation of keys that a paged cache holds, as a Triton kernel.

The kernel reads heads from the slots of the cache, turns them and writes them back. With a scale for each row the
kernel reads whole heads, because a new scale changes all of their features; otherwise it reads what rotates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ropelab.kernels import tile_of
from ropelab.kernels.addressing import common_alignment, fitting, strides_of, turning, whole_heads
from ropelab.kernels.angles_triton import read_angles
from ropelab.kernels.cache_rows_triton import (
    Block,
    Caching,
    Kind,
    convert,
    largest_of_pairs,
    rows_of_program,
    turn_some,
)
from ropelab.kernels.cached_keys_torch import compute_dtype
from ropelab.kernels.float8_triton import INTEGER_CONVERSIONS, conversion, from_float8, scale_of_row
from ropelab.kernels.launch import Launch, LaunchWithBytes, compiler_options, launch_nothing
from ropelab.kernels.place_triton import Angles, Slots, cached_at, slots_of
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.stages_triton import members_of, narrow, read_pairs, write_pairs
from ropelab.kernels.tensors import CachedKeys
from ropelab.kernels.tiles import CacheTile, next_power_of_2


@dataclass(frozen=True)
class CachedKeysChoices(Caching):
    """The choices of `_cached_keys_kernel`: ``K`` is the kind of its rows."""

    K: Kind


class Keys(NamedTuple):
    """The keys of a pass: where their rows and scales lie, both members of their pairs, and their scales.

    ``exists`` is whether the cache has the row and its token has a position.
    """

    row: tl.tensor
    exists: tl.tensor
    x0: tl.tensor
    x1: tl.tensor
    scale_at: tl.tensor
    scale: tl.tensor


@triton.jit(do_not_specialize=["first_position", "table_rows", "slot_count", "pages"])
def _cached_keys_kernel(ptr, first_position, table_rows, slot_count, pages, strides, C: tl.constexpr):
    """Turn the heads in slots of a cache. The rows of a token of `cache_rows_triton` are the heads of a slot here."""
    K: tl.constexpr = C.K
    first, part = (tl.program_id(0) // K.PROGRAMS) * C.BLOCK_TOKENS, tl.program_id(0) % K.PROGRAMS
    block = Block(tl.program_id(1), first, slot_count, part)
    cache, scales = (ptr.k_cache, strides.k_cache), (ptr.k_scale_cache, strides.k_scale_cache)
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    rows = rows_of_program(block, K.HEADS, 0, K, C)
    # The loads of keys wait for the slots, and the loads from the tables wait for the positions, at the same time.
    slots = slots_of(Slots(ptr.slots, strides.slots, slot_count, pages), rows.tokens, slot_count)
    columns, has_position = read_angles(angles, rows.tokens, rows.exists[:, None, None], slot_count, C)
    read = ()
    for i in tl.static_range(K.PASSES):
        rows = rows_of_program(block, K.HEADS, i, K, C)
        row, in_cache = cached_at(cache, slots, rows.head, C.ALIGN, C)
        exists = rows.exists[:, None, None] & in_cache & has_position
        x0, x1 = read_pairs(members_of(row, exists, C.INTERLEAVED, C), 0.0, "", C.INTERLEAVED)
        scale_at, scale = row, 1.0
        if K.SCALES == "row":
            scale_at, _ = cached_at(scales, slots, rows.head, 1, C)
            # Along one axis a thread loads a scale once, and not once for each of its pairs.
            at_rows, of_rows = tl.reshape(scale_at, [C.BLOCK_ROWS]), tl.reshape(exists, [C.BLOCK_ROWS])
            scale = tl.load(at_rows, mask=of_rows, other=1.0)[:, None, None]
        read += (Keys(row, exists, x0, x1, scale_at, scale),)
    SOURCE: tl.constexpr = ptr.k_cache.dtype.element_ty if K.CONVERSION == "none" else C.COMPUTE_DTYPE
    for i in tl.static_range(K.PASSES):
        keys = Keys(*read[i])  # Triton 3.6 forgets the names of a tuple within a tuple
        x0, x1, scale = keys.x0, keys.x1, keys.scale
        if K.CONVERSION != "none":
            x0, x1 = from_float8(x0, K.CONVERSION), from_float8(x1, K.CONVERSION)
        y0, y1 = turn_some(x0.to(C.COMPUTE_DTYPE), x1.to(C.COMPUTE_DTYPE), columns, C)
        if K.SCALES == "row":
            y0, y1 = narrow(y0, tl.float32) * scale, narrow(y1, tl.float32) * scale
            scale = scale_of_row(largest_of_pairs(y0, y1, has_position, K), K.LARGEST, K.CONVERSION)
            tl.store(keys.scale_at, scale, mask=keys.exists)
        y0, y1 = convert(y0, scale, SOURCE, SOURCE, K), convert(y1, scale, SOURCE, SOURCE, K)
        write_pairs(members_of(keys.row, keys.exists, C.INTERLEAVED, C), y0, y1, C.INTERLEAVED)


def plan_rotate(t: CachedKeys, rotation: Rotation, tile: CacheTile | None = None) -> Callable[..., None]:
    """Plan the launch of `cached_keys_torch.rotate`; see `rotate_triton.plan_rotate`.

    Args:
        t: the features of the cache are adjacent.
        tile: for sweeps; by default `tile_of.cached_keys` decides.

    Raises:
        ValueError: more programs than a grid can hold.
    """
    (pages, page, heads, head_dim), count = t.k_cache.shape, len(t.slots)
    if pages * heads * count == 0:
        return launch_nothing
    tile = tile or tile_of.cached_keys(t, rotation)
    tokens = 1 if rotation.table_free else next_power_of_2(count)
    tokens = min(tokens, tile.block_rows // gcd(tile.block_rows, heads))
    head_blocks = triton.cdiv(heads, tile.block_rows // tokens)
    passes = min(tile.passes, next_power_of_2(head_blocks))
    programs, align = triton.cdiv(head_blocks, passes), common_alignment([t.k_cache])
    grid = fitting("slots", triton.cdiv(count, tokens) * programs)
    how, makes = conversion(t.k_cache.dtype, t.k_cache.device), t.k_scale_cache is not None
    kind = Kind(
        HEADS=heads, DIM=head_dim, PARTS=1, PIECES=1, PROGRAMS=programs, TOKENS=tokens, PASSES=passes,
        CACHED=True, COPIED=False, SCALES="row" if makes else "none", APART=None, CONVERSION=how,
        LARGEST=torch.finfo(t.k_cache.dtype).max if makes else 0.0, ALIGN=align,
    )  # fmt: skip
    access = tile.pairs_per_access * (2 if rotation.interleaved else 1)
    lanes = head_dim if makes else rotation.rotary_dim
    choices = CachedKeysChoices(
        **turning(t, rotation, compute_dtype(t), [], tokens, access) | {"ALIGN": min(align, access)},
        **whole_heads(lanes, rotation, tile.pairs_per_access), INNERMOST="heads", K=kind,
        PAGE=page, NARROW_SLOTS=pages * page < 2**31, BLOCK_TOKENS=tokens, BLOCK_ROWS=tile.block_rows, HEAD_PIECES=1,
    )  # fmt: skip
    # The rotation has the bits of `rotate_torch` without fused multiply-add.
    options = compiler_options(tile.num_warps, None, fuse=False)
    launch = Launch(_cached_keys_kernel, grid, (count, pages), strides_of(t), choices, options, t.k_cache.device)
    return LaunchWithBytes(launch) if how in INTEGER_CONVERSIONS else launch
