"""The projection to q, k and v whose epilogue normalizes and rotates q and k, as a Triton kernel.

The epilogue writes q, k and v side by side, or k and v straight into the slots of a paged cache.

A program stays on its multiprocessor and takes one tile of the product after another. The loop over the tiles and the
loop over the inputs are one loop for the compiler (``flatten``), so the memory loads the first operands of a tile while
the tile before is still turned and written. Descriptors move whole blocks (Hopper's tensor memory accelerator).

A tile holds whole heads in the registers of the accumulator. On these GPUs a thread has the same features of every head
of its tokens: both members of an adjacent pair, and both members of a pair of halves. So the members of a pair meet
without an exchange, and one read of the tables serves all heads of a tile. The heads turn in pieces of 32 pairs,
because the columns of a whole head would not fit beside the operands. Columns that are computed need no exchange.
"""

from dataclasses import dataclass
from functools import cache
from math import pi
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ropelab.kernels import angles_torch, tile_of
from ropelab.kernels.addressing import common_alignment, strides_of, turning
from ropelab.kernels.backends import INTERPRETED
from ropelab.kernels.choices import Turning
from ropelab.kernels.direct_launch import VERSION
from ropelab.kernels.launch import Launch
from ropelab.kernels.place_triton import Angles, Slots, Tokens, cached_at, position_of, rows_at, slots_of, table_rows_of
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION, Norm, Rotation
from ropelab.kernels.stages_triton import Columns, read_columns, turn, write_features
from ropelab.kernels.tensors import ProjectionTensors
from ropelab.kernels.tiles import ProjectionTile

HEAD_DIMS = 64, 128, 256
"""The widths of a head that a tile can hold whole."""

_DTYPES = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
"""Triton's interpreter multiplies the bits of bfloat16 as integers."""

_INTERPRETED, _RADIANS = tl.constexpr(INTERPRETED), tl.constexpr(2 * pi / 2**32)
_HIGH, _FACTOR = tl.constexpr(angles_torch.HIGH), tl.constexpr(angles_torch.FACTOR)
_INVALID_POSITION, _NO_POSITION = tl.constexpr(INVALID_POSITION), tl.constexpr(NO_POSITION)


NUMBERS = [
    "first_position", "table_rows", "token_count", "seq_len", "width", "inputs", "q_heads", "turning_heads",
    "slot_count", "pages",
]  # fmt: skip
"""The numbers of the kernel. None of them changes its code, so all products of a model share a compiled kernel."""


@dataclass(frozen=True)
class ProjectionChoices(Turning):
    """The choices of `_project_kernel`.

    Attributes:
        TILE_TOKENS, TILE_FEATURES, TILE_INPUTS, GROUP_ROWS: as in `ProjectionTile`.
        TURNS: whether any heads turn.
        BIAS: whether the product has a bias.
        NORM: whether heads are normalized before they turn; NORM_EPS is the number that the norm adds.
        REPEATS: whether several sequences share their positions.
        CACHE: whether k and v go to slots of a paged cache. The cache has pages of PAGE slots, and CACHE_ALIGN and
            NARROW_SLOTS are as for `cached_at`.
    """

    TILE_TOKENS: int
    TILE_FEATURES: int
    TILE_INPUTS: int
    GROUP_ROWS: int
    TURNS: bool
    BIAS: bool
    NORM: bool
    NORM_EPS: float
    REPEATS: bool
    CACHE: bool
    PAGE: int
    CACHE_ALIGN: int
    NARROW_SLOTS: bool


class Part(NamedTuple):
    """Where a tile lies: its first token and head; and how many tokens, heads of q, and heads that turn there are."""

    first: tl.tensor
    first_head: tl.tensor
    token_count: tl.tensor
    q_heads: tl.tensor
    turning_heads: tl.tensor


class Epilogue(NamedTuple):
    """What turns the heads of a tile.

    Attributes:
        angles, tokens: whose cosines and sines are computed, piece by piece; or
        columns, has_position: the cosines and sines of each piece out of tables, and whether tokens have a position.
        turns: whether each head is one of q or k, ``[heads]``.
        rstd, weight: the factor of the norm, and the address of the weights of each head; None without a norm.
    """

    angles: Angles
    tokens: Tokens
    columns: tuple | None
    has_position: tl.tensor
    turns: tl.tensor
    rstd: tl.tensor
    weight: tl.tensor


@triton.jit
def _tile_of(number, rows, columns, GROUP_ROWS: tl.constexpr):
    """The row and the column of a tile. Tiles in succession share operands, which the L2 cache then holds."""
    group = number // (GROUP_ROWS * columns)
    first = group * GROUP_ROWS
    height = min(rows - first, GROUP_ROWS)
    within = number % (GROUP_ROWS * columns)
    return first + within % height, within // height


@triton.jit
def _halved(x):
    """The first and the second half of the pairs of every head."""
    tokens: tl.constexpr = x.shape[0]
    heads: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, [tokens, heads, 2, x.shape[2] // 2]), (0, 1, 3, 2)))


@triton.jit
def _joined(x, y):
    """The inverse of `_halved`."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 1, 3, 2)), [x.shape[0], x.shape[1], 2 * x.shape[2]])


@triton.jit
def _folded(x, PIECES: tl.constexpr):
    """The sum of the pieces of every head, which has the layout of a piece."""
    if PIECES == 1:
        return x
    else:
        first, second = _halved(x)
        return _folded(first + second, PIECES // 2)


@triton.jit
def _weights(weights, exists, PIECE: tl.constexpr, C: tl.constexpr):
    """The weights of the norm for both members of a piece of every head, each ``[1, heads, pairs]``, and 1 for v."""
    if C.INTERLEAVED:
        feature = 2 * PIECE * C.BLOCK_PAIRS + tl.arange(0, 2 * C.BLOCK_PAIRS)[None, :]
        pairs = tl.load(weights + feature, mask=exists, other=1)
        w0, w1 = tl.split(tl.reshape(pairs, [pairs.shape[0], C.BLOCK_PAIRS, 2]))
    else:
        feature = PIECE * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS)[None, :]
        w0 = tl.load(weights + feature, mask=exists, other=1)
        w1 = tl.load(weights + feature + C.LANE_DIM // 2, mask=exists, other=1)
    return w0.to(tl.float32)[None, :, :], w1.to(tl.float32)[None, :, :]


@triton.jit
def _for_all_heads(column):
    """A column ``[tokens, 1, pairs]`` as it is, in the layout of the accumulator instead of the layout of its loads.

    The compiler finds no layout of loads behind a new axis, so it moves the column to the threads that hold the heads.
    Otherwise it would move the heads.
    """
    return tl.reshape(column, [column.shape[0], column.shape[2]])[:, None, :]


@triton.jit
def _read(angles, tokens, exists, PIECES: tl.constexpr, C: tl.constexpr):
    """The cosines and sines of one piece of a head after another out of tables; and whether tokens have a position.

    All loads come before the first use, so a tile waits for memory once.
    """
    rows = table_rows_of(angles, tokens, C)
    pieces = ()
    for i in tl.static_range(PIECES):
        columns = read_columns(rows, 0, exists[:, None, None], C, True, i)
        pieces += ((columns.cos0, columns.sin0),)  # type: ignore[assignment]
    return pieces, rows.has_position


@triton.jit
def _sine_and_cosine(x):
    """Sine and cosine for ``x`` in [-pi, pi], each within 2^-20 (PTX ISA, ``sin.approx``): one instruction each."""
    if _INTERPRETED:
        return tl.sin(x), tl.cos(x)
    else:
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return sin, cos


@triton.jit
def _computed(angles, tokens, PIECE: tl.constexpr, C: tl.constexpr):
    """The cosines and sines of a piece of the heads, computed, and whether the tokens have a position.

    A frequency is a fraction of a turn, times 2^64. The angle, in turns times 2^32, is the product with the position;
    whole turns leave 32 bits by themselves, so the reduction of the angle costs nothing and is within 2^-31 turns.
    """
    frequencies, strides = angles.cos
    position = position_of(angles, tokens, None, C)[:, None]
    pair = PIECE * C.BLOCK_PAIRS + tl.arange(0, C.BLOCK_PAIRS)
    rotates = (pair < C.ROTARY_DIM // 2)[None, :]
    at = frequencies + (pair * strides[1])[None, :]
    frequency = tl.load(at + _HIGH, mask=rotates, other=0, eviction_policy="evict_last")
    factor = tl.load(at + _FACTOR, mask=rotates, other=0, eviction_policy="evict_last")
    factor = factor.to(tl.int32).to(tl.float32, bitcast=True)
    count = tl.abs(position).to(tl.uint32)
    turns = count * (frequency >> 32).to(tl.uint32) + tl.umulhi(count, frequency.to(tl.uint32))
    sin, cos = _sine_and_cosine(turns.to(tl.int32, bitcast=True).to(tl.float32) * _RADIANS)
    sin = tl.where(position < 0, -sin, sin) * factor
    cos = cos * factor
    if C.POSITIONS != "none":
        exists = (position > _INVALID_POSITION) & (position.to(tl.int64) < 2**31)
        cos, sin = tl.where(exists, cos, float("nan")), tl.where(exists, sin, float("nan"))
    if (PIECE + 1) * C.BLOCK_PAIRS > C.ROTARY_DIM // 2:
        cos, sin = tl.where(rotates, cos, 1.0), tl.where(rotates, sin, 0.0)
    return cos[:, None, :], sin[:, None, :], (position != _NO_POSITION)[:, :, None]


@triton.jit
def _turned_pairs(x0, x1, epilogue, FIRST: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr):
    """PIECES pieces of heads from FIRST on: q and k normalized and turned, v as it is."""
    if PIECES > 1:
        a0, b0 = _halved(x0)
        a1, b1 = _halved(x1)
        a0, a1 = _turned_pairs(a0, a1, epilogue, FIRST, PIECES // 2, C)
        b0, b1 = _turned_pairs(b0, b1, epilogue, FIRST + PIECES // 2, PIECES // 2, C)
        return _joined(a0, b0), _joined(a1, b1)
    else:
        has_position, turns = epilogue.has_position, epilogue.turns
        if C.NORM:
            w0, w1 = _weights(epilogue.weight, turns[:, None], FIRST, C)
            x0, x1 = w0 * (x0 * epilogue.rstd), w1 * (x1 * epilogue.rstd)
        if C.TABLE_FREE:
            cos, sin, has_position = _computed(epilogue.angles, epilogue.tokens, FIRST, C)
        else:
            cos, sin = epilogue.columns[FIRST]
            cos, sin = _for_all_heads(cos), _for_all_heads(sin)
        y0, y1 = turn(x0, x1, Columns(cos, cos, sin, sin), C.TRANSPOSE)
        if C.POSITIONS != "none":
            y0, y1 = tl.where(has_position, y0, 0.0), tl.where(has_position, y1, 0.0)
        turns = turns[None, :, None]
        return tl.where(turns, y0, x0), tl.where(turns, y1, x1)


@triton.jit
def _turned(acc, ptr, angles, tokens, part, C: tl.constexpr):
    """The tile ``[tokens, features]`` with its heads of q and k normalized and turned."""
    PAIRS: tl.constexpr = C.LANE_DIM // 2
    HEADS: tl.constexpr = C.TILE_FEATURES // C.LANE_DIM
    PIECES: tl.constexpr = PAIRS // C.BLOCK_PAIRS
    head = part.first_head + tl.arange(0, HEADS)
    needs_angles = tokens.exists & (part.first_head < part.turning_heads)
    is_q, turns = head < part.q_heads, head < part.turning_heads
    columns, has_position = None, None
    if not C.TABLE_FREE:
        columns, has_position = _read(angles, tokens, needs_angles, PIECES, C)
    if C.INTERLEAVED:
        x0, x1 = tl.split(tl.reshape(acc, [C.TILE_TOKENS, HEADS, PAIRS, 2]))
    else:
        x0, x1 = tl.split(tl.permute(tl.reshape(acc, [C.TILE_TOKENS, HEADS, 2, PAIRS]), (0, 1, 3, 2)))
    rstd, weight = None, None
    if C.NORM:
        squares = tl.sum(_folded(x0 * x0 + x1 * x1, PIECES), axis=2)
        rstd = tl.where(turns[None, :], tl.rsqrt(squares / C.LANE_DIM + C.NORM_EPS), 1.0)[:, :, None]
        weight = tl.where(is_q[:, None], ptr.q_weight, ptr.k_weight)
    epilogue = Epilogue(angles, tokens, columns, has_position, turns, rstd, weight)
    y0, y1 = _turned_pairs(x0, x1, epilogue, 0, PIECES, C)
    y = tl.join(y0, y1)
    return tl.reshape(y if C.INTERLEAVED else tl.permute(y, (0, 1, 3, 2)), [C.TILE_TOKENS, C.TILE_FEATURES])


@triton.jit
def _write_rows(y, ptr, strides, part, slots, C: tl.constexpr):
    """Write the heads of a tile ``[tokens, features]``: those of q side by side, those of k and v to their slots.

    All heads take one store, whose addresses and masks differ. A branch would hold the accumulator.
    """
    HEADS: tl.constexpr = C.TILE_FEATURES // C.LANE_DIM
    row = tl.arange(0, C.TILE_TOKENS * HEADS)
    head = part.first_head + row % HEADS
    is_q, is_v = head < part.q_heads, head >= part.turning_heads
    distance = row // HEADS
    tokens = Tokens(tl.full([], 0, tl.int32), part.first, distance, part.first + distance < part.token_count)
    slots = slots_of(slots, tokens, 0)
    cached_head = head - tl.where(is_v, part.turning_heads, part.q_heads)
    k_row, in_cache = cached_at((ptr.k_cache, strides.k_cache), slots, cached_head, C.CACHE_ALIGN, C)
    v_row, _ = cached_at((ptr.v_cache, strides.v_cache), slots, cached_head, C.CACHE_ALIGN, C)
    q_row = rows_at((ptr.qkv, strides.qkv), tokens, head, C.ALIGN, C)
    to = tl.where(is_q[:, None, None], q_row, tl.where(is_v[:, None, None], v_row, k_row))
    is_kv = in_cache & (cached_head < part.turning_heads - part.q_heads)[:, None, None]
    exists = tokens.exists[:, None, None] & (is_q[:, None, None] | is_kv)
    write_features(to, exists, tl.reshape(y, [row.shape[0], 1, C.LANE_DIM]), C.LANE_DIM, C.LANE_DIM)


@triton.jit(do_not_specialize=NUMBERS)
def _project_kernel(
    ptr, first_position, table_rows, x, weight, qkv, token_count, seq_len, width, inputs, q_heads, turning_heads,
    slot_count, pages, strides, C: tl.constexpr,
):  # fmt: skip
    """Compute tiles of the product, turn the heads of q and k, and write the tiles.

    With C.REPEATS, positions begin again after every ``seq_len`` tokens, whether given or counted.
    """
    rows, columns = tl.cdiv(token_count, C.TILE_TOKENS), tl.cdiv(width, C.TILE_FEATURES)
    steps = tl.cdiv(inputs, C.TILE_INPUTS)
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    slots = Slots(ptr.slots, strides.slots, slot_count, pages)
    HEADS: tl.constexpr = C.TILE_FEATURES // C.LANE_DIM
    for number in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
        row, column = _tile_of(number, rows, columns, C.GROUP_ROWS)
        first, feature = row * C.TILE_TOKENS, column * C.TILE_FEATURES
        acc = tl.zeros([C.TILE_TOKENS, C.TILE_FEATURES], tl.float32)
        for step in range(steps):
            left = x.load([first, step * C.TILE_INPUTS])
            right = weight.load([feature, step * C.TILE_INPUTS])
            acc = tl.dot(left, right.T, acc)
        if C.BIAS:
            of_tile = feature + tl.arange(0, C.TILE_FEATURES)
            acc += tl.load(ptr.bias + of_tile, mask=of_tile < width, other=0).to(tl.float32)[None, :]
        # v turns by nothing, without a branch: after a branch that holds the accumulator, the assembler waits for every
        # instruction of the product, which then takes 1.2 to 1.7 times as long.
        distance = tl.arange(0, C.TILE_TOKENS)
        tokens = Tokens(tl.full([], 0, tl.int32), first, distance, first + distance < token_count)
        if C.REPEATS:
            tokens = Tokens(tokens.batch, 0, (first + distance) % seq_len, tokens.exists)
        part = Part(first, column * HEADS, token_count, q_heads, turning_heads)
        if C.TURNS:
            acc = _turned(acc, ptr, angles, tokens, part, C)
        if C.CACHE:
            _write_rows(acc.to(ptr.qkv.dtype.element_ty), ptr, strides, part, slots, C)
        else:
            qkv.store([first, feature], acc.to(qkv.dtype))


def serves(t: ProjectionTensors, rotation: Rotation) -> bool:
    """Whether the kernel can serve a call.

    It serves heads of `HEAD_DIMS`, 16 bits, rows of whole 16 bytes, pairs whose members a thread holds, and tables for
    all sequences; one axis of positions where it computes cosines and sines; and caches of the dtype of x.
    """
    (sequences, seq_len, _, head_dim), positions = t.qkv.shape, t.positions
    pairs = rotation.interleaved or rotation.rotary_dim == head_dim
    plain = not (rotation.full_width or rotation.offsets or rotation.first or (rotation.axes and rotation.table_free))
    adjacent = [x for x in (t.bias, t.q_weight, t.k_weight, t.cos, t.sin) if x is not None]
    caches = [cache for cache in (t.k_cache, t.v_cache) if cache is not None]
    return (
        head_dim in HEAD_DIMS and t.x.dtype in _DTYPES and t.x.numel() > 0 and pairs and plain
        and rotation.interleaved == rotation.out_interleaved and t.cos.ndim == t.sin.ndim == 2
        and (rotation.table_free or compute_dtype(t.x, t.cos) == torch.float32)
        and all(number % 8 == 0 for number in t.weight.shape) and all(x.stride(-1) == 1 for x in adjacent)
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (t.qkv, t.x, t.weight))
        and (positions is None or sequences == 1 or positions.stride(0) in (0, seq_len * positions.stride(1)))
        and _multiprocessors(t.x.device) > 0 and all(cache.dtype == t.x.dtype for cache in caches)
    )  # fmt: skip


class _Matrix(TensorDescriptor):
    """A matrix whose address and strides `serves` has checked."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class ProjectionLaunch:
    """The kernel for tensors that agree in everything except contents and addresses.

    Attributes:
        launch: the launch, whose first numbers the descriptors of x, of the weight and of qkv follow.
        x, weight, qkv: the shape, the strides and the block of each descriptor; qkv has none where there are caches.
    """

    launch: Launch
    x: tuple
    weight: tuple
    qkv: tuple | None

    def __call__(self, tensors: tuple, first_position: int, table_rows: int) -> None:
        """Launch for tensors in the order of `ProjectionTensors`, whose addresses alone matter."""
        self.launch(tensors, first_position, table_rows, *self.descriptors(tensors))

    def descriptors(self, tensors: tuple) -> tuple[TensorDescriptor | None, ...]:
        """The descriptors of x, of the weight and of qkv."""
        _, _, x, weight, _, _, _, _, qkv, *_ = tensors
        made = None if self.qkv is None else _Matrix(qkv, *self.qkv)
        return _Matrix(x, *self.x), _Matrix(weight, *self.weight), made


def plan_project(
    t: ProjectionTensors,
    rotation: Rotation,
    q_heads: int,
    k_heads: int,
    norm: Norm | None = None,
    tile: ProjectionTile = tile_of.PROJECTION,
) -> ProjectionLaunch:
    """Plan the launch of `projection_torch.project`, which `serves`; ``tile`` is for sweeps."""
    sequences, seq_len, _, head_dim = t.qkv.shape
    tokens, (width, inputs), has_cache = sequences * seq_len, t.weight.shape, t.slots is not None
    given: Any = t
    strides = strides_of(given._replace(x=None, weight=None, qkv=None))  # they have descriptors
    if has_cache:  # one token of each sequence may have any stride along the tokens
        strides = strides._replace(qkv=(0, t.qkv[0, 0].numel(), head_dim))
    if t.positions is not None:
        strides = strides._replace(positions=(0, *t.positions.stride()[1:]))
        if t.positions.stride(0):  # the positions of all sequences are one row
            seq_len = tokens
    caches = [cache for cache in (t.k_cache, t.v_cache) if cache is not None]
    pages, page = caches[0].shape[:2] if caches else (0, 1)
    choices = ProjectionChoices(
        **turning(t, rotation, torch.float32, [t.qkv], tile.tokens, access=16), LANE_DIM=head_dim, FIRST=0,
        BLOCK_PAIRS=min(32, head_dim // 2), GROUP=0, INNERMOST="heads",
        TILE_TOKENS=tile.tokens, TILE_FEATURES=tile.features, TILE_INPUTS=tile.inputs, GROUP_ROWS=tile.group,
        TURNS=q_heads + k_heads > 0, BIAS=t.bias is not None, NORM=norm is not None, NORM_EPS=norm.eps if norm else 0.0,
        REPEATS=seq_len < tokens, CACHE=bool(caches), PAGE=page,
        CACHE_ALIGN=min(common_alignment(caches), 8) if caches else 1, NARROW_SLOTS=pages * page < 2**31,
    )  # fmt: skip
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(width, tile.features)
    slot_count = 0 if t.slots is None else len(t.slots)
    launch = Launch(
        _project_kernel, (min(tiles, _multiprocessors(t.x.device)), 1, 1),
        (tokens, seq_len, width, inputs, q_heads, q_heads + k_heads, slot_count, pages),
        strides, choices, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}, t.x.device,
    )  # fmt: skip
    return ProjectionLaunch(
        launch,
        ([tokens, inputs], [inputs, 1], [tile.tokens, tile.inputs]),
        ([width, inputs], [inputs, 1], [tile.features, tile.inputs]),
        None if has_cache else ([tokens, width], [width, 1], [tile.tokens, tile.features]),
    )


_COMPILERS = "3.6", "3.7"
"""The versions of Triton that compile the kernel well. 3.9 spills registers, or takes more shared memory than a
multiprocessor has; 3.8 was not tried."""


@cache
def _multiprocessors(device: torch.device) -> int:
    """The multiprocessors that the kernel can use: of an H100, an H200 or another sm_90; in the interpreter three."""
    if device.type != "cuda":
        return 3
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 and VERSION in _COMPILERS else 0
