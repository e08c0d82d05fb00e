"""Rotations whose results become 8-bit floats with a scale for each block of features, as Triton kernels.

One kernel rotates heads and writes 8-bit floats and their scales. The other kernel normalizes and rotates q, rotates
kv, and writes kv into a cache whose rows have scales. `block_scales` has the arithmetic of a scale.

Pairs are interleaved, so the pairs of a head follow its features: a block of features is a block of pairs, and its
largest magnitude is a maximum within a few neighbouring threads. All pairs of a head turn, and a selection keeps those
that do not rotate; a warp has the whole head, so a branch would save nothing. The tables are read once for all heads of
a program.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ropelab.kernels import tile_of
from ropelab.kernels.addressing import alignment, fitting, launch_grid, strides_of, turning, whole_heads
from ropelab.kernels.block_scales import ABOVE_LARGEST, E4M3_EXPONENT, Blocks, Page, blocks_of_cache
from ropelab.kernels.choices import Turning
from ropelab.kernels.float8_triton import INTEGER_CONVERSIONS, conversion, round_to, to_float8
from ropelab.kernels.launch import Launch, LaunchWithBytes, compiler_options, launch_nothing
from ropelab.kernels.place_triton import (
    Angles,
    Slots,
    block_of_tokens,
    blocks_of_program,
    cached_at,
    heads_at,
    heads_of_block,
    slots_of,
    table_rows_of,
)
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.stages_triton import (
    Members,
    members_of,
    normalize,
    read_columns,
    read_heads,
    turn,
    write_heads,
    write_pairs,
)
from ropelab.kernels.tensors import BlockScaledCacheTensors, QuantizeTensors
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, Tile, next_power_of_2

_WARP_PAIRS = tl.constexpr(32 * PAIRS_PER_ACCESS)
"""The pairs that a warp reads at once."""
_ABOVE, _E4M3 = tl.constexpr(ABOVE_LARGEST), tl.constexpr(E4M3_EXPONENT)


@dataclass(frozen=True)
class Scaling(Turning):
    """The choices of both kernels. ``FIRST`` is 0: the lanes of a head are its features in their order.

    Attributes:
        FIRST_PAIR: the first pair that rotates.
        HEADS, BLOCK_HEADS, HEAD_BLOCKS: the heads, those of a program, and the programs of a token.
        BLOCK_TOKENS: the tokens of a program.
        BLOCK_DIM, AMAX_EPSILON: as in `block_scales.Blocks`.
        CONVERSION: the way to 8-bit floats, see `float8_triton.conversion`.
    """

    FIRST_PAIR: int
    HEADS: int
    BLOCK_HEADS: int
    HEAD_BLOCKS: int
    BLOCK_TOKENS: int
    BLOCK_DIM: int
    AMAX_EPSILON: float
    CONVERSION: str


@dataclass(frozen=True)
class QuantizeChoices(Scaling):
    """The choices of `_quantize_kernel`.

    Attributes:
        GROUP_HEADS: the heads of a group of ``out``.
        SCALE_DTYPE: the dtype of the scales, "float32", "int32" or "none".
        ROUND_FIRST: as in `block_scales.Blocks`.
        FOLD, WEIGHT_SCALE: multiply weights by the scales of heads, and by this number.
    """

    GROUP_HEADS: int
    SCALE_DTYPE: str
    ROUND_FIRST: bool
    FOLD: bool
    WEIGHT_SCALE: float


@dataclass(frozen=True)
class CacheChoices(Scaling):
    """The choices of `_write_kernel`.

    Attributes:
        NORM_EPS: the number that the norm adds to the mean of the squares.
        KV_TOKENS: the tokens of a program for kv.
        PAGE, NOPE_DIM, DATA_BYTES, SCALES, SCALE_BYTES: the tokens and the other numbers of `block_scales.Page`.
        CACHE_ALIGN: a power of two that divides the bytes of a row of data and of a page.
        NARROW_SLOTS: see `cache_rows_triton.Caching`.
    """

    NORM_EPS: float
    KV_TOKENS: int
    PAGE: int
    NOPE_DIM: int
    DATA_BYTES: int
    SCALES: int
    SCALE_BYTES: int
    CACHE_ALIGN: int
    NARROW_SLOTS: bool


@triton.jit
def _turn_heads(x0, x1, tokens, angles, C: tl.constexpr):
    """The rotated pairs of whole heads, and whether the tokens have a position.

    All heads of a token share the columns if a head takes all threads of a warp. Otherwise every head reads the columns
    again, because threads would exchange them.
    """
    rows = table_rows_of(angles, tokens, C)
    pair = tl.arange(0, C.BLOCK_PAIRS) - C.FIRST_PAIR
    rotates = ((pair >= 0) & (pair < C.ROTARY_DIM // 2))[None, None, :]
    exists = tokens.exists[:, None, None] & rotates
    if C.BLOCK_PAIRS < _WARP_PAIRS:
        exists = tl.broadcast_to(exists, x0.shape)
    columns = read_columns(rows, -C.FIRST_PAIR, exists, C, False)
    y0, y1 = turn(x0, x1, columns, C.TRANSPOSE)
    return tl.where(rotates, y0, x0), tl.where(rotates, y1, x1), rows.has_position


@triton.jit
def _exponents(y0, y1, C: tl.constexpr):
    """The exponent of the scale of each block, with the bias 127, int32 ``[tokens, heads, blocks]``."""
    size = tl.maximum(tl.abs(y0), tl.abs(y1))
    PAIRS: tl.constexpr = C.BLOCK_DIM // 2
    amax = tl.max(tl.reshape(size, [size.shape[0], size.shape[1], size.shape[2] // PAIRS, PAIRS]), axis=3)
    return ((tl.maximum(amax, C.AMAX_EPSILON).to(tl.int32, bitcast=True) + _ABOVE) >> 23) - _E4M3


@triton.jit
def _power_of_two(exponents):
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantize(y0, y1, exponents, C: tl.constexpr):
    """The quotients of pairs and the scales of their blocks, for a store of 8-bit floats."""
    PAIRS: tl.constexpr = C.BLOCK_DIM // 2
    tokens: tl.constexpr = exponents.shape[0]
    heads: tl.constexpr = exponents.shape[1]
    blocks: tl.constexpr = exponents.shape[2]
    reciprocal = _power_of_two(254 - exponents)[:, :, :, None]
    reciprocal = tl.reshape(
        tl.broadcast_to(reciprocal, [tokens, heads, blocks, PAIRS]), [tokens, heads, blocks * PAIRS]
    )
    return to_float8(y0 * reciprocal, C.CONVERSION), to_float8(y1 * reciprocal, C.CONVERSION)


@triton.jit
def _only(members, which):
    """Those members of interleaved pairs of whose features ``which`` is true."""
    return Members(members.first, members.first_exists & which, members.second, members.second_exists)


@triton.jit
def _for_float8(address, C: tl.constexpr):
    """The address of bytes for 8-bit floats: of e4m3 where an instruction makes them."""
    if C.CONVERSION == "instruction":
        return address.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        return address


@triton.jit
def _write_scales(scales, exponents, tokens, head, exists, C: tl.constexpr):
    """Write the scales of heads, a row for each group: numbers in float32, or bytes, four of which make an int32."""
    address, strides = scales
    BLOCKS: tl.constexpr = C.LANE_DIM // C.BLOCK_DIM
    block = tl.arange(0, exponents.shape[2])[None, None, :]
    in_row = (head % C.GROUP_HEADS)[None, :, None] * BLOCKS + block
    row = (tokens.first.to(tl.int64) + tokens.distance)[:, None, None] * strides[0]
    row += (head // C.GROUP_HEADS).to(tl.int64)[None, :, None] * strides[1]
    exists = exists & (block < BLOCKS)
    if C.SCALE_DTYPE == "float32":
        tl.store(address + (row + in_row.to(tl.int64) * strides[2]), _power_of_two(exponents), mask=exists)
    else:
        address = address.to(tl.pointer_type(tl.uint8), bitcast=True)
        offset = 4 * (row + (in_row // 4).to(tl.int64) * strides[2]) + in_row % 4
        tl.store(address + offset, exponents.to(tl.uint8), mask=exists)


@triton.jit
def _fold(ptr, strides, exponents, tokens, head, exists, C: tl.constexpr):
    """Write the weights of heads times the scales of the heads, each of which is one block."""
    token = (tokens.first.to(tl.int64) + tokens.distance)[:, None]
    exists = tl.reshape(tl.broadcast_to(exists, exponents.shape), [exponents.shape[0], exponents.shape[1]])
    weights = ptr.weights + token * strides.weights[0] + head[None, :] * strides.weights[1]
    weight = tl.load(weights, mask=exists, other=0).to(tl.float32) * C.WEIGHT_SCALE
    weight *= _power_of_two(tl.reshape(exponents, exists.shape))
    tl.store(
        ptr.weights_out + token * strides.weights_out[0] + head[None, :] * strides.weights_out[1], weight, mask=exists
    )


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len"])
def _quantize_kernel(ptr, first_position, table_rows, seq_len, strides, C: tl.constexpr):
    """Rotate a block of heads, and write them as 8-bit floats with their scales."""
    head_block, token_block, batch = blocks_of_program(C.HEAD_BLOCKS, C.INNERMOST)
    tokens = block_of_tokens(batch, token_block, seq_len, C.BLOCK_TOKENS)
    head, exists = heads_of_block(tokens, head_block, C.HEADS, C.BLOCK_HEADS)
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    x0, x1 = read_heads(heads_at((ptr.x, strides.x), tokens, head, C), exists, "", C)
    tl.debug_barrier()
    y0, y1, has_position = _turn_heads(x0, x1, tokens, angles, C)
    y0, y1 = y0.to(tl.float32), y1.to(tl.float32)
    if C.ROUND_FIRST:
        SOURCE: tl.constexpr = ptr.x.dtype.element_ty
        y0, y1 = round_to(y0, SOURCE, C.CONVERSION), round_to(y1, SOURCE, C.CONVERSION)
    if C.POSITIONS != "none":
        exponents = _exponents(tl.where(has_position, y0, 0.0), tl.where(has_position, y1, 0.0), C)
    else:
        exponents = _exponents(y0, y1, C)
    y0, y1 = _quantize(y0, y1, exponents, C)
    row = heads_at((ptr.out, strides.out), tokens, head // C.GROUP_HEADS, C)
    row += tl.multiple_of(head % C.GROUP_HEADS * C.LANE_DIM, C.ALIGN)[None, :, None]
    write_heads(row, exists, has_position, y0, y1, True, C)
    if C.SCALE_DTYPE != "none":
        _write_scales((ptr.scales, strides.scales), exponents, tokens, head, exists, C)
    if C.FOLD:
        _fold(ptr, strides, exponents, tokens, head, exists, C)


@triton.jit
def _write_q(ptr, strides, angles, part, seq_len, C: tl.constexpr):
    """Normalize, rotate and write a block of heads of q."""
    tokens = block_of_tokens(tl.program_id(1), part // C.HEAD_BLOCKS, seq_len, C.BLOCK_TOKENS)
    head, exists = heads_of_block(tokens, part % C.HEAD_BLOCKS, C.HEADS, C.BLOCK_HEADS)
    x0, x1 = read_heads(heads_at((ptr.q, strides.q), tokens, head, C), exists, "", C)
    tl.debug_barrier()
    x0, x1 = normalize(x0, x1, 1.0, 1.0, C.LANE_DIM, C.NORM_EPS, False, True)
    y0, y1, has_position = _turn_heads(x0, x1, tokens, angles, C)
    write_heads(heads_at((ptr.q_out, strides.q_out), tokens, head, C), exists, has_position, y0, y1, True, C)


@triton.jit
def _store_kv(ptr, strides, angles, slots, part, seq_len, C: tl.constexpr):
    """Rotate kv of a block of tokens, and write it to the pages of the cache; see `block_scales.Page`."""
    SOURCE: tl.constexpr = ptr.kv.dtype.element_ty
    tokens, shared = block_of_tokens(tl.program_id(1), part, seq_len, C.KV_TOKENS), tl.arange(0, 1)
    exists = tokens.exists[:, None, None]
    kv = ptr.kv, (0, strides.kv[0], 0)
    x0, x1 = read_heads(heads_at(kv, tokens, shared, C), exists, "", C)
    tl.debug_barrier()
    slots = slots_of(slots, tokens, seq_len)
    y0, y1, has_position = _turn_heads(x0, x1, tokens, angles, C)
    if C.POSITIONS != "none":
        y0, y1 = tl.where(has_position, y0, 0.0), tl.where(has_position, y1, 0.0)
    y0, y1 = round_to(y0.to(tl.float32), SOURCE, C.CONVERSION), round_to(y1.to(tl.float32), SOURCE, C.CONVERSION)
    exponents = _exponents(y0, y1, C)
    z0, z1 = _quantize(y0, y1, exponents, C)

    data = ptr.kv_cache, (strides.kv_cache[0], C.DATA_BYTES, 0)
    row, in_cache = cached_at(data, slots, shared, C.CACHE_ALIGN, C)
    exists = exists & in_cache
    _write_data(row, exists, (z0, z1), (y0, y1), SOURCE, C)
    scales = ptr.kv_cache + C.PAGE * C.DATA_BYTES, (strides.kv_cache[0], C.SCALE_BYTES, 0)
    row, _ = cached_at(scales, slots, shared, 1, C)
    _write_row_of_scales(row, exists, exponents, C)


@triton.jit
def _write_data(row, exists, quotients, turned, SOURCE: tl.constexpr, C: tl.constexpr):
    """Write rows of data: the first NOPE_DIM features as bytes, and after these bytes the others in SOURCE."""
    is_nope = (tl.arange(0, 2 * C.BLOCK_PAIRS) < C.NOPE_DIM)[None, None, :]
    z0, z1 = quotients
    write_pairs(_only(members_of(_for_float8(row, C), exists, True, C), is_nope), z0, z1, True)
    # Feature i begins NOPE_DIM + (i - NOPE_DIM) * BYTES bytes after the row: i elements of SOURCE after this address.
    BYTES: tl.constexpr = SOURCE.primitive_bitwidth // 8
    tail = row.to(tl.pointer_type(SOURCE), bitcast=True) + (C.NOPE_DIM // BYTES - C.NOPE_DIM)
    y0, y1 = turned
    write_pairs(_only(members_of(tail, exists, True, C), is_nope == 0), y0, y1, True)


@triton.jit
def _write_row_of_scales(row, exists, exponents, C: tl.constexpr):
    """Write rows of scales: a byte for each block of features, and zeros up to a multiple of four bytes."""
    block = tl.arange(0, exponents.shape[2])[None, None, :]
    tl.store(row + block, exponents.to(tl.uint8), mask=exists & (block < C.SCALES))
    if C.SCALES < C.SCALE_BYTES:
        pad = C.SCALES + tl.arange(0, 4)[None, None, :]
        tl.store(row + pad, tl.zeros(pad.shape, tl.uint8), mask=exists & (pad < C.SCALE_BYTES))


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len", "slot_count", "pages"])
def _write_kernel(ptr, first_position, table_rows, seq_len, slot_count, pages, strides, C: tl.constexpr):
    """Write kv of a block of tokens, which comes first because it takes longest, or heads of q."""
    part, kv_programs = tl.program_id(0), tl.cdiv(seq_len, C.KV_TOKENS)
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    # The kinds of rows are not branches of one condition: the compiler would demand that equal names have equal shapes.
    if part < kv_programs:
        _store_kv(ptr, strides, angles, Slots(ptr.slots, strides.slots, slot_count, pages), part, seq_len, C)
    if part >= kv_programs:
        _write_q(ptr, strides, angles, part - kv_programs, seq_len, C)


def plan_quantize(
    t: QuantizeTensors, rotation: Rotation, blocks: Blocks, weight_scale: float, tile: Tile | None = None
) -> Callable[..., None]:
    """Plan the launch of `block_scales_torch.quantize`; see `rotate_triton.plan_rotate`.

    The features of all tensors are adjacent.

    Args:
        tile: for sweeps; by default `tile_of.block_scales` decides.

    Raises:
        ValueError: more programs than a grid can hold.
    """
    _, seq_len, heads, head_dim = t.x.shape
    if t.x.numel() == 0:
        return launch_nothing
    tile = tile or tile_of.block_scales(t.x)
    chosen = _scaling(t, t.x, rotation, blocks, tile, [t.x, t.out])
    grid, order = launch_grid(1, seq_len, chosen["HEAD_BLOCKS"], "heads")
    choices = QuantizeChoices(
        **chosen, INNERMOST=order, GROUP_HEADS=t.out.shape[3] // head_dim, ROUND_FIRST=blocks.round_first,
        SCALE_DTYPE="none" if t.scales is None else str(t.scales.dtype).removeprefix("torch."),
        FOLD=t.weights_out is not None, WEIGHT_SCALE=weight_scale,
    )  # fmt: skip
    options = compiler_options(tile.num_warps, None, fuse=False)
    launch = Launch(_quantize_kernel, grid, (seq_len,), strides_of(t), choices, options, t.x.device)
    return LaunchWithBytes(launch) if chosen["CONVERSION"] in INTEGER_CONVERSIONS else launch


def plan_write(
    t: BlockScaledCacheTensors,
    rotation: Rotation,
    norm_eps: float,
    page_tokens: int,
    block_dim: int,
    tile: Tile | None = None,
) -> Callable[..., None]:
    """Plan the launch of `block_scales_torch.write`, for pages whose bytes are adjacent; see `plan_quantize`."""
    seq_len = t.q.shape[1]
    if seq_len == 0:
        return launch_nothing
    tile = tile or tile_of.block_scales(t.q)
    page = Page.of(t, rotation, page_tokens, block_dim)
    chosen = _scaling(t, t.q, rotation, blocks_of_cache(block_dim), tile, [t.q, t.q_out])
    kv_tokens = min(tile.block_heads, next_power_of_2(seq_len))
    grid = fitting("q", triton.cdiv(seq_len, kv_tokens) + seq_len * chosen["HEAD_BLOCKS"])
    choices = CacheChoices(
        **chosen | {"ALIGN": min(chosen["ALIGN"], alignment(t.kv.stride()[:1]))}, INNERMOST="heads",
        NORM_EPS=norm_eps, KV_TOKENS=kv_tokens, PAGE=page.tokens,
        NOPE_DIM=page.nope_dim, DATA_BYTES=page.data_bytes, SCALES=page.scales, SCALE_BYTES=page.scale_bytes,
        CACHE_ALIGN=alignment([page.data_bytes, t.kv_cache.stride(0)]),
        NARROW_SLOTS=len(t.kv_cache) * page.tokens < 2**31,
    )  # fmt: skip
    options = compiler_options(tile.num_warps, None, fuse=False)
    numbers = seq_len, len(t.slots), len(t.kv_cache)
    return Launch(_write_kernel, grid, numbers, strides_of(t), choices, options, t.q.device)


def _scaling(
    t: Any, x: torch.Tensor, rotation: Rotation, blocks: Blocks, tile: Tile, heads: list[torch.Tensor]
) -> dict[str, Any]:
    """The choices of `Scaling` but the order of programs, for ``x [1, S, H, D]`` and the tensors with its heads."""
    in_order = replace(rotation, rotary_dim=x.shape[3], first=0)
    block_heads = min(tile.block_heads, next_power_of_2(x.shape[2]))
    return {
        **turning(t, rotation, compute_dtype(x, t.cos), heads, 1, access=2 * PAIRS_PER_ACCESS),
        **whole_heads(x.shape[3], in_order, PAIRS_PER_ACCESS), "FIRST_PAIR": rotation.first // 2,
        "HEADS": x.shape[2], "BLOCK_HEADS": block_heads, "HEAD_BLOCKS": triton.cdiv(x.shape[2], block_heads),
        "BLOCK_TOKENS": 1, "BLOCK_DIM": blocks.dim, "AMAX_EPSILON": blocks.amax_epsilon,
        "CONVERSION": conversion(torch.float8_e4m3fn, x.device),
    }  # fmt: skip
