"""The rotation as one Triton kernel: q and k in one launch, both layouts, any strides, in place or not.

RoPE moves every element once and computes almost nothing, so the speed of a memory copy is its limit. To come close to
this limit, queries and keys share a launch. A program takes several heads of a token, which share a row of cosines and
sines. Threads move 16 bytes at a time. A program computes little before its loads begin.

The stage `place` has two mappings, and each is far slower alone. With whole heads (`Tile`) a program takes a block of
heads of q and its share of the heads of k. Some of its threads have nothing to do if the number of heads or of pairs is
no power of two. With flat rows (`FlatTile`) the programs are full for every number and every width of heads. A thread
reads the pairs of an access at once. The accesses of a token form a line, head after head and q before k. Each program
takes the next piece of the line. The length of a piece is a power of two, so a piece may begin within a head and end in
another token. Features that do not rotate make further accesses of each head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from ropelab.kernels import tile_of
from ropelab.kernels.addressing import heads_of, launch_grid, strides_of, turning
from ropelab.kernels.angles_triton import shared_columns
from ropelab.kernels.choices import Turning
from ropelab.kernels.launch import Launch, compiler_options, launch_nothing
from ropelab.kernels.place_triton import (
    Angles,
    Tokens,
    block_of_tokens,
    blocks_of_program,
    heads_at,
    rows_at,
    table_rows_of,
)
from ropelab.kernels.rotate_torch import compute_dtype
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.stages_triton import (
    Columns,
    Members,
    members_of,
    narrow,
    read_columns,
    read_pairs,
    turn,
    write_pairs,
)
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import FlatTile, Tile, line_of, next_power_of_2


@dataclass(frozen=True)
class RotateChoices(Turning):
    """The choices of `_rotate_kernel`.

    Attributes:
        Q_HEADS, K_HEADS: the heads of q and of k; the latter may be 0.
        BEFORE, AFTER: the features of a head before and after those that rotate.
        IN_PLACE: the results overwrite the input.
        SAME_STRIDES: the results have the strides of the input.
        HEADS_FIRST: see `Tile`.
        BLOCK_TOKENS: the tokens of a program; of flat rows, the tokens of a whole number of pieces.
        FLAT: the mapping is flat rows. The attributes that follow belong to one mapping only.
        HEAD_BLOCKS, BLOCK_Q_HEADS, BLOCK_K_HEADS: the blocks of heads of a token, and their heads of q and of k.
        BLOCK_BEFORE, BLOCK_AFTER: BEFORE and AFTER rounded up to powers of two.
        PER_HEAD, ACCESSES_PER_LINE: the accesses of a head, and of a line.
        PIECES: the programs of BLOCK_TOKENS tokens.
        ACCESSES: the accesses of a program.
        BLOCK_HEADS: the heads that share the tokens of a program.
    """

    Q_HEADS: int
    K_HEADS: int
    BEFORE: int
    AFTER: int
    IN_PLACE: bool
    SAME_STRIDES: bool
    HEADS_FIRST: bool
    BLOCK_TOKENS: int
    FLAT: bool = False
    HEAD_BLOCKS: int = 1
    BLOCK_Q_HEADS: int = 1
    BLOCK_K_HEADS: int = 1
    BLOCK_BEFORE: int = 1
    BLOCK_AFTER: int = 1
    PER_HEAD: int = 1
    ACCESSES_PER_LINE: int = 1
    PIECES: int = 1
    ACCESSES: int = 1
    BLOCK_HEADS: int = 1


class Part(NamedTuple):
    """Heads of a program: the addresses at which they begin, and whether they exist, each ``[tokens, heads, 1]``.

    ``access`` is the number of each access in its head; it means nothing for whole heads.
    """

    at: tl.tensor
    exists: tl.tensor
    access: tl.tensor


@triton.jit
def _whole_heads(q, k, seq_len, C: tl.constexpr):
    """The mapping of whole heads: the tokens of a program, its heads of q, and its heads of k."""
    head_block, token_block, batch = blocks_of_program(C.HEAD_BLOCKS, C.INNERMOST)
    tokens = block_of_tokens(batch, token_block, seq_len, C.BLOCK_TOKENS)
    q_part = _block_of_heads(q, tokens, head_block, C.Q_HEADS, C.BLOCK_Q_HEADS, C)
    if C.K_HEADS > 0:
        return tokens, (q_part, _block_of_heads(k, tokens, head_block, C.K_HEADS, C.BLOCK_K_HEADS, C))
    else:
        return tokens, (q_part,)


@triton.jit
def _block_of_heads(x, tokens, head_block, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, C: tl.constexpr):
    head = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    exists = tokens.exists[:, None, None] & (head < HEADS)[None, :, None]
    return Part(heads_at(x, tokens, head, C), exists, head)


@triton.jit
def _flat_rows(q, k, seq_len, C: tl.constexpr):
    """The mapping of flat rows: the tokens of a program's accesses, and the accesses as the only part.

    Every division is by a constant, see `blocks_of_program`.
    """
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if C.INNERMOST == "batches":
        token_block, batch, head_block = y, x // C.PIECES, 0
    elif C.INNERMOST == "tokens":
        token_block, batch, head_block = x // C.PIECES, z, y
    else:
        token_block, batch, head_block = x // C.PIECES, z, 0
    ALONG: tl.constexpr = C.ACCESSES // C.BLOCK_HEADS
    i = tl.arange(0, C.ACCESSES)
    in_line = (x % C.PIECES) * ALONG + i % ALONG
    if C.BLOCK_TOKENS == 1:
        distance = tl.zeros([C.ACCESSES], tl.int32)
    else:
        distance = in_line // C.ACCESSES_PER_LINE
        in_line = in_line % C.ACCESSES_PER_LINE
    head, first = head_block * C.BLOCK_HEADS + i // ALONG + in_line // C.PER_HEAD, token_block * C.BLOCK_TOKENS
    is_token = distance >= 0 if C.BLOCK_TOKENS == 1 else first + distance < seq_len
    exists = is_token
    if C.ACCESSES_PER_LINE == C.PER_HEAD or C.ACCESSES_PER_LINE * C.BLOCK_TOKENS != C.PIECES * C.ACCESSES:
        exists = is_token & (head < C.Q_HEADS + C.K_HEADS)
    tokens = Tokens(batch, first, distance, is_token)
    return tokens, (Part(_line_at(q, k, tokens, head, C), exists[:, None, None], in_line % C.PER_HEAD),)


@triton.jit
def _line_at(q, k, tokens, head, C: tl.constexpr):
    """The addresses of the heads of accesses, ``[accesses, 1, 1]``; the heads of k follow the heads of q.

    From 3.8 on, Triton forgets the alignment of addresses that it selects, so they get it as a hint.
    """
    row = rows_at(q, tokens, head, C.ALIGN, C)
    if C.K_HEADS > 0:
        k_row = rows_at(k, tokens, head - C.Q_HEADS, C.ALIGN, C)
        row = tl.where((head < C.Q_HEADS)[:, None, None], row, k_row)
        if C.ALIGNED:
            STRIDE: tl.constexpr = C.ALIGN * row.dtype.element_ty.primitive_bitwidth // 8
            BYTES: tl.constexpr = STRIDE if STRIDE < 16 else 16
            row = tl.multiple_of(row, [BYTES, BYTES, BYTES])
    return row


@triton.jit
def _members_of_accesses(row, exists, access, INTERLEAVED: tl.constexpr, C: tl.constexpr):
    """The `Members` of each access.

    The first accesses of a head rotate. The other accesses hold the features before and after those that rotate; the
    second member of a pair of them is half of all these features apart.
    """
    WIDTH: tl.constexpr = 2 * C.BLOCK_PAIRS if INTERLEAVED else C.BLOCK_PAIRS
    ROTATING: tl.constexpr = C.ROTARY_DIM // 2 // C.BLOCK_PAIRS
    first = C.BEFORE + access * WIDTH
    second = first + C.ROTARY_DIM // 2
    if C.PER_HEAD > ROTATING:
        HALF: tl.constexpr = (C.PER_HEAD - ROTATING) * C.BLOCK_PAIRS
        lane = (access - ROTATING) * WIDTH
        other = lane + HALF
        lane += tl.where(lane >= C.BEFORE, C.ROTARY_DIM, 0)
        other += tl.where(other >= C.BEFORE, C.ROTARY_DIM, 0)
        first, second = tl.where(access < ROTATING, first, lane), tl.where(access < ROTATING, second, other)
    within = tl.arange(0, WIDTH)[None, None, :]
    at0 = row + tl.multiple_of(first, WIDTH)[:, None, None] + within
    at1 = row + tl.multiple_of(second, C.BLOCK_PAIRS)[:, None, None] + within
    exists = tl.broadcast_to(exists, at0.shape)
    return Members(at0, exists, at1, exists)


@triton.jit
def _copy_features(
    source, part, has_position, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr
):
    """Copy COUNT features of whole heads, which do not rotate; write zeros for tokens without a position."""
    if COUNT > 0:
        feature = FIRST + tl.arange(0, BLOCK)[None, None, :]
        inside = part.exists & (feature < FIRST + COUNT)
        if C.IN_PLACE:
            zeros = tl.zeros([part.exists.shape[0], part.exists.shape[1], BLOCK], part.at.dtype.element_ty)
            tl.store(part.at + feature, zeros, mask=inside & (has_position == 0))
        else:
            x = tl.load(source.at + feature, mask=inside & has_position, other=0)
            tl.store(part.at + feature, x, mask=inside)


@triton.jit
def _place(q, k, seq_len, C: tl.constexpr):
    """The tokens of a program, and its parts of q and k."""
    if C.FLAT:
        return _flat_rows(q, k, seq_len, C)
    else:
        return _whole_heads(q, k, seq_len, C)


@triton.jit
def _members(part, exists, INTERLEAVED: tl.constexpr, C: tl.constexpr):
    if C.FLAT:
        return _members_of_accesses(part.at, exists, part.access, INTERLEAVED, C)
    else:
        return members_of(part.at + C.BEFORE, exists, INTERLEAVED, C)


@triton.jit
def _rotating(part, C: tl.constexpr):
    """Whether the pairs of a part exist and rotate; all pairs of whole heads do."""
    ROTATING: tl.constexpr = C.ROTARY_DIM // 2 // C.BLOCK_PAIRS
    if C.FLAT and C.PER_HEAD > ROTATING:
        return part.exists & (part.access < ROTATING)[:, None, None]
    else:
        return part.exists


@triton.jit
def _read_heads(part, C: tl.constexpr):
    """Read the pairs of a part. In place, features that do not rotate stay as they are."""
    exists = _rotating(part, C) if C.IN_PLACE else part.exists
    return read_pairs(_members(part, exists, C.INTERLEAVED, C), None, "", C.INTERLEAVED)


@triton.jit
def _read_columns(part, rows, C: tl.constexpr):
    first_pair = (part.access * C.BLOCK_PAIRS)[:, None, None] if C.FLAT else 0
    return read_columns(rows, first_pair, _rotating(part, C), C, False)


@triton.jit
def _shared_columns(angles, tokens, seq_len, C: tl.constexpr):
    """The `Columns` that the threads of a program share. The accesses of flat rows belong to heads of one token."""
    if C.FLAT:
        token = Tokens(tokens.batch, tokens.first, tl.arange(0, 1), tl.arange(0, 1) == 0)
        columns = shared_columns(angles, token, seq_len, triton.next_power_of_2(C.ROTARY_DIM // 2), C)
        cos, sin = _of_accesses(columns.cos0, C), _of_accesses(columns.sin0, C)
        return Columns(cos, cos, sin, sin)
    else:
        return shared_columns(angles, tokens, seq_len, C.BLOCK_PAIRS, C)


@triton.jit
def _of_accesses(column, C: tl.constexpr):
    """Values of the pairs of a head, ``[1, 1, pairs]``, for the accesses of a program; others get any values."""
    OF_HEAD: tl.constexpr = triton.next_power_of_2(C.ROTARY_DIM // 2) // C.BLOCK_PAIRS
    column = tl.reshape(column, [1, OF_HEAD, C.BLOCK_PAIRS])
    column = tl.broadcast_to(column, [C.ACCESSES // OF_HEAD, OF_HEAD, C.BLOCK_PAIRS])
    return tl.reshape(column, [C.ACCESSES, 1, C.BLOCK_PAIRS])


@triton.jit
def _write_heads(source, part, heads, columns, has_position, C: tl.constexpr):
    """Turn the pairs of ``source``, and write them and the features that do not rotate to ``part``.

    Tokens without a position get zeros. A second store costs less than a selection for every element, because a token
    hardly ever lacks a position.
    """
    SIGNED: tl.constexpr = C.POSITIONS != "none"
    x0, x1 = heads
    y0, y1 = turn(x0.to(C.COMPUTE_DTYPE), x1.to(C.COMPUTE_DTYPE), columns, C.TRANSPOSE)
    exists = _rotating(part, C) if C.IN_PLACE else part.exists
    if C.FLAT and not C.IN_PLACE and C.BEFORE + C.AFTER > 0:
        rotates = (part.access < C.ROTARY_DIM // 2 // C.BLOCK_PAIRS)[:, None, None]
        y0, y1 = tl.where(rotates, narrow(y0, x0.dtype), x0), tl.where(rotates, narrow(y1, x1.dtype), x1)
    if SIGNED:
        nowhere = _members(part, part.exists & (has_position == 0), C.OUT_INTERLEAVED, C)
        write_pairs(nowhere, tl.zeros_like(y0), tl.zeros_like(y1), C.OUT_INTERLEAVED)
        exists = exists & has_position
    write_pairs(_members(part, exists, C.OUT_INTERLEAVED, C), y0, y1, C.OUT_INTERLEAVED)
    if not C.FLAT and (SIGNED or not C.IN_PLACE):
        _copy_features(source, part, has_position, 0, C.BEFORE, C.BLOCK_BEFORE, C)
        _copy_features(source, part, has_position, C.BEFORE + C.ROTARY_DIM, C.AFTER, C.BLOCK_AFTER, C)


@triton.jit(do_not_specialize=["first_position", "table_rows", "seq_len"])
def _rotate_kernel(ptr, first_position, table_rows, seq_len, strides, C: tl.constexpr):
    """Write y0 = x0 cos - x1 sin and y1 = x1 cos + x0 sin for the heads of q and k that a program takes.

    The grid follows memory: programs that start together take data that are close together. A position without a row
    yields NaN, and the kernel reads no memory for it. A token at NO_POSITION yields zeros. See `ropelab.positions`.
    """
    PARTS: tl.constexpr = 1 if C.FLAT or C.K_HEADS == 0 else 2
    positions = ptr.positions, strides.positions
    angles = Angles((ptr.cos, strides.cos), (ptr.sin, strides.sin), positions, first_position, table_rows)
    q, k = (ptr.q, strides.q), (ptr.k, strides.k)
    tokens, parts = _place(q, k, seq_len, C)

    # Loads first, see `stages_triton`.
    heads, columns = (), ()
    if not C.HEADS_FIRST:
        rows = table_rows_of(angles, tokens, C)
    for i in tl.static_range(PARTS):
        heads += (_read_heads(parts[i], C),)
        if not C.HEADS_FIRST and not C.SHARED_COLUMNS:
            columns += (_read_columns(parts[i], rows, C),)
    if C.HEADS_FIRST:
        # The threads exchange nothing here, but the compiler moves no instruction across a barrier. Without the barrier
        # it would move the instructions that wait for the positions in front of the loads of the heads, and these loads
        # would begin only after the positions have arrived.
        tl.debug_barrier()
        rows = table_rows_of(angles, tokens, C)
        if not C.SHARED_COLUMNS:
            for i in tl.static_range(PARTS):
                columns += (_read_columns(parts[i], rows, C),)
    if C.SHARED_COLUMNS:
        # The computation follows the loads, so that it runs while the loads are under way.
        shared = _shared_columns(angles, tokens, seq_len, C)
        columns = shared, shared
    # The addresses of the results come after the barrier, so that they take no registers before.
    if C.IN_PLACE and C.FLAT:
        results = parts
    elif C.SAME_STRIDES:  # one offset serves both
        _, results = _place((ptr.q_out, strides.q), (ptr.k_out, strides.k), seq_len, C)
    else:
        _, results = _place((ptr.q_out, strides.q_out), (ptr.k_out, strides.k_out), seq_len, C)
    for i in tl.static_range(PARTS):
        _write_heads(parts[i], results[i], heads[i], columns[i], rows.has_position, C)


def plan_rotate(t: RotateTensors, rotation: Rotation, tile: Tile | FlatTile | None = None) -> Callable[..., None]:
    """Plan the launch that writes the rotation of q and of k to their results, as `rotate_torch.rotate` does.

    A caller can keep the launch and repeat it. `run.run` launches it for tensors of any strides.

    Args:
        t: tensors of one GPU with last strides of 1 and at most ``MAX_BATCH`` batches; q and k have one dtype. Every
            element of the results is written.
        tile: for sweeps; by default `tile_of.rotate` decides.

    Returns:
        ``launch(tensors, first_position, table_rows)``. It serves tensors that agree with these in everything except
        contents, addresses and the number of rows of the tables. The launch takes only the addresses of the tensors of
        a call, so the order of their axes does not matter.
    """
    if sum(x.numel() for x in heads_of(t)) == 0:
        return launch_nothing
    tile = tile or tile_of.rotate(t, rotation)
    mapped = _flat(t, rotation, tile) if isinstance(tile, FlatTile) else _whole(t, rotation, tile)
    grid, block_tokens, access, chosen = mapped
    choices = RotateChoices(
        **turning(t, rotation, compute_dtype(t.q, t.cos), heads_of(t), block_tokens, access, tile.shares_columns),
        **chosen,
        LANE_DIM=rotation.rotary_dim, FIRST=0, GROUP=0,
        BEFORE=rotation.first, AFTER=t.q.shape[3] - rotation.first - rotation.rotary_dim,
        Q_HEADS=t.q.shape[2], K_HEADS=0 if t.k is None else t.k.shape[2], BLOCK_TOKENS=block_tokens,
        IN_PLACE=t.in_place, SAME_STRIDES=t.same_strides, HEADS_FIRST=tile.heads_first and t.positions is not None,
    )  # fmt: skip
    # Without fused multiply-add the results have the same bits as in `rotate_torch`.
    options = compiler_options(tile.num_warps, tile.max_registers, fuse=False)
    return Launch(_rotate_kernel, grid, (t.q.shape[1],), strides_of(t), choices, options, t.q.device)


def _whole(t: RotateTensors, rotation: Rotation, tile: Tile):
    """The grid, the tokens of a program, the features of an access, and the choices of the mapping of whole heads."""
    batch, seq_len, q_heads, head_dim = t.q.shape
    head_blocks = max(1, triton.cdiv(q_heads, tile.block_heads))
    grid, order = launch_grid(batch, triton.cdiv(seq_len, tile.block_tokens), head_blocks, tile.innermost)
    k_heads = 0 if t.k is None else t.k.shape[2]
    after = head_dim - rotation.first - rotation.rotary_dim
    chosen = {
        "INNERMOST": order, "HEAD_BLOCKS": head_blocks, "BLOCK_Q_HEADS": tile.block_heads,
        "BLOCK_K_HEADS": next_power_of_2(max(1, triton.cdiv(k_heads, head_blocks))),
        "BLOCK_PAIRS": next_power_of_2(rotation.rotary_dim // 2),
        "BLOCK_BEFORE": next_power_of_2(max(1, rotation.first)), "BLOCK_AFTER": next_power_of_2(max(1, after)),
    }  # fmt: skip
    return grid, tile.block_tokens, tile.pairs_per_access * (2 if rotation.interleaved else 1), chosen


def _flat(t: RotateTensors, rotation: Rotation, tile: FlatTile):
    """As `_whole`, for flat rows, with tables in place of frequencies.

    Results in the other layout must not overwrite an input, because a program would overwrite pairs that another
    program has yet to read. All features of such results must rotate, because copied features have no pairs.
    """
    line = line_of(tile_of.work_of(t, rotation), tile)
    token_blocks = triton.cdiv(t.q.shape[1], line.block_tokens)
    blocks = (token_blocks * line.pieces, line.blocks) if tile.innermost == "tokens" else (token_blocks, line.pieces)
    grid, order = launch_grid(len(t.q), *blocks, tile.innermost)
    chosen = {
        "INNERMOST": order, "FLAT": True, "PER_HEAD": line.per_head, "ACCESSES_PER_LINE": line.accesses,
        "PIECES": line.pieces, "ACCESSES": tile.accesses, "BLOCK_HEADS": tile.block_heads, "BLOCK_PAIRS": line.pairs,
    }  # fmt: skip
    access = line.pairs * (2 if rotation.interleaved or rotation.out_interleaved else 1)
    return grid, line.block_tokens, access, chosen
