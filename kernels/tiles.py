"""The tiles that programs may take of the work, and the candidates for a rotation; `tile_of` has the tile of a call."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from ropelab.kernels.rotation import Rotation

PAIRS_PER_ACCESS = 4
"""The pairs whose features, or whose cosines, a thread reads at once: 16 bytes of a table in float32."""

ACCESS_BYTES = 16
"""The most bytes that a thread reads at once."""


@dataclass(frozen=True)
class Tile:
    """The tokens and query heads of one program, and its warps. A program takes its share of the key heads too.

    Attributes:
        innermost: the order in which programs start. "heads": the next program takes further heads of the same tokens,
            and after the last heads further tokens. "batches": the next program takes further heads of the same tokens,
            and after the last heads further batches. "tokens": the next program takes further tokens.
        pairs_per_access: the pairs whose features, or whose cosines, a thread reads at once.
        max_registers: the limit on the registers of a thread; None leaves it to the assembler.
        heads_first: where positions are read, read them after the loads of all heads have begun. Otherwise the compiler
            makes the heads wait for the positions, and the rows of the tables arrive together with the heads.
        shares_columns: the threads of a program share cosines and sines that they read from tables.
    """

    block_tokens: int
    block_heads: int
    num_warps: int
    innermost: str = "heads"
    pairs_per_access: int = PAIRS_PER_ACCESS
    max_registers: int | None = None
    heads_first: bool = False
    shares_columns: bool = False


@dataclass(frozen=True)
class FlatTile:
    """The accesses of one program of the mapping of flat rows, and its warps.

    An access is ``pairs_per_access`` adjacent pairs, or as many adjacent features that are copied.

    Attributes:
        accesses: the accesses of a program, a power of two.
        innermost, max_registers, heads_first, shares_columns: as for `Tile`.
        pairs_per_access: the most pairs of an access, a power of two.
        block_heads: the heads that share the tokens of a program where tokens are innermost; else 1.
    """

    accesses: int
    num_warps: int
    innermost: str = "heads"
    pairs_per_access: int = 2 * PAIRS_PER_ACCESS
    block_heads: int = 1
    max_registers: int | None = None
    heads_first: bool = False
    shares_columns: bool = False


@dataclass(frozen=True)
class BackwardTile(Tile):
    """The tile that a program of the norm's backward takes at a time, and the programs.

    A program goes through many blocks of tokens and keeps its share of dw in registers. Each multiprocessor of the GPU
    gets a few programs, and all programs run at once, so that few rows of dw are left to be summed.
    """

    programs_per_multiprocessor: int = 1


@dataclass(frozen=True)
class CacheTile:
    """The rows that a program of the kernels of caches takes, and its warps.

    Attributes:
        block_rows: the rows of a program, a power of two.
        num_warps: the warps of a program.
        pairs_per_access: as for `Tile`.
        passes: how often a program takes that many rows of the same tokens.
        pieces: a program takes the pairs of a row in so many pieces; 1 if it computes cosines and sines.
    """

    block_rows: int
    num_warps: int
    pairs_per_access: int
    passes: int = 1
    pieces: int = 1


@dataclass(frozen=True)
class ProjectionTile:
    """The part of a product that a program computes at once.

    Attributes:
        tokens, features, inputs: its rows and columns, and the inputs that one step adds up.
        num_warps, num_stages: the warps of a program, and the steps whose operands are under way.
        group: so many neighbouring rows of tiles share a column of the weight in turn.
    """

    tokens: int
    features: int
    inputs: int
    num_warps: int
    num_stages: int
    group: int


# These are limits on the registers of a thread that takes more than four pairs, or two accesses of flat rows. Without a
# limit the assembler saves a few registers by moving half of the loads behind the first arithmetic. The saved registers
# make no room for another program, and every program then waits for memory twice. A thread that may use 96 registers,
# more than it needs, keeps all loads in front. A thread of a bare q (see `Work`) keeps all loads in front with 40
# registers. 40 registers leave room for twelve programs of 128 threads on a multiprocessor instead of ten. For split-
# half heads with positions the assembler finds an equally good number without a limit.
_PLENTY, _ENOUGH_IF_LEAN = 96, 40

# Up to _FEW_TOKENS tokens, a head may be a program of one warp, so that all heads are under way at once.
_FEW_TOKENS = 8

# From _MANY_FEATURES on, the threads of a program share cosines and sines: they save instructions and wait for an
# exchange. The number follows from counts of both in machine code. The record `mrope` has calls on both sides of it.
_MANY_FEATURES = 2**22


@dataclass(frozen=True)
class Work:
    """A call, as far as the choice of a tile needs it.

    Attributes:
        rotation: the rotation.
        heads: the numbers of heads of q and, if there is a k, of k.
        batch, seq_len: the number of sequences, and of the tokens of a sequence, rounded up to powers of two: calls
            of similar size then share a compiled kernel.
        innermost: the axis whose neighbours are adjacent in memory: "heads" (bshd, thd), "batches" (sbhd: the heads of
            a token, then the batches) or "tokens" (bhsd); see `addressing.innermost`.
        rest: the number of features of a head that the kernel copies, or may have to make zero.
        positions: whether positions are read. A program then waits for memory twice: for the positions of its tokens,
            and for their rows of the tables.
        itemsize: the bytes of an element of the input.
        column_bytes: the bytes of a cosine.
        bare_q: whether a thread holds only pairs of q, and one cosine and one sine for each pair, in float32 or less.
            This requires that there is no k, that all features rotate, that the tables have a column for each pair,
            that one offset serves input and output, and that one offset serves both tables.
        in_place: whether the results overwrite the inputs.
    """

    rotation: Rotation
    heads: tuple[int, ...]
    batch: int
    seq_len: int
    innermost: str
    rest: int
    positions: bool
    itemsize: int
    column_bytes: int
    bare_q: bool
    in_place: bool


def candidates(work: Work) -> list[Tile | FlatTile]:
    """The tiles among which the cost decides: see `tile_cost`.

    A thread moves 16 bytes at once, or the half. In elements of two bytes, 16 bytes are eight members of split-half
    pairs or four interleaved pairs. 64 or 128 threads make a program, because a GPU starts programs at a limited rate.
    """
    found: list[Tile | FlatTile] = [*_flat_tiles(work), *_whole_tiles(work)]
    if work.positions:
        found += [_heads_first(tile) for tile in found if tile.num_warps > 1]
    if reads_several_axes(work.rotation):
        found = _for_several_axes(work, found)
    return list(dict.fromkeys(found))


def _for_several_axes(work: Work, found: list[Tile | FlatTile]) -> list[Tile | FlatTile]:
    """In a large call, the tiles that share columns. In a small call, flat rows or single heads, because a thread with
    further heads would read the columns again for each.
    """
    features = work.batch * work.seq_len * sum(work.heads) * (work.rotation.rotary_dim + work.rest)
    if features >= _MANY_FEATURES:
        return [replace(tile, shares_columns=True) for tile in found if can_share(work, tile)] or found
    return [tile for tile in found if isinstance(tile, FlatTile) or tile.block_heads == 1] or found


def can_share(work: Work, tile: Tile | FlatTile) -> bool:
    """Whether the threads of a program can share cosines and sines: a program has a thread for each of these values.

    The compiler then exchanges the values at once. With more values it exchanges the heads too, and with fewer values
    every thread reads the values of its own pairs. A program of flat rows must take whole heads of one token.
    """
    tokens = tile.block_tokens if isinstance(tile, Tile) else 1
    if isinstance(tile, FlatTile):
        line = line_of(work, tile)
        if tile.accesses % line.per_head or line.accesses % tile.accesses or tile.innermost == "tokens":
            return False
    return 2 * tokens * next_power_of_2(work.rotation.rotary_dim // 2) == 32 * tile.num_warps


def _heads_first(tile: Tile | FlatTile) -> Tile | FlatTile:
    """The tile with the heads first. The barrier behind the heads keeps the loads of accesses in front."""
    limit = None if isinstance(tile, FlatTile) else tile.max_registers
    return replace(tile, heads_first=True, max_registers=limit)


def _flat_tiles(work: Work) -> Iterator[FlatTile]:
    rotation, access = work.rotation, pairs_per_access(work.rotation, work.rest)
    converts = rotation.interleaved != rotation.out_interleaved
    is_wide = work.column_bytes > 4 or work.itemsize > 4
    if rotation.table_free or is_wide or access == 1 or (converts and (work.in_place or work.rest)):
        return
    both = rotation.interleaved and rotation.out_interleaved
    wide = min(access, ACCESS_BYTES // work.itemsize // (2 if both else 1))
    for accesses, warps, registers in ((64, 2, None), (128, 4, None), (256, 4, _PLENTY)):
        for heads in (1, 2, 4) if work.innermost == "tokens" and accesses == 128 else (1,):
            yield FlatTile(accesses, warps, work.innermost, wide, heads, registers)


def _whole_tiles(work: Work) -> Iterator[Tile]:
    """Tiles of whole heads. Where tokens are innermost, a program takes few heads, because each head is elsewhere."""
    shape = work.rotation.rotary_dim, work.heads[0], work.seq_len, work.innermost
    for access, warps in ((PAIRS_PER_ACCESS, 4), (2 * PAIRS_PER_ACCESS, 4), (2 * PAIRS_PER_ACCESS, 2)):
        for heads in (2, 4) if work.innermost == "tokens" else (None,):
            yield fit_tile(*shape, access, warps, heads, _registers(work, access))
    if work.batch * work.seq_len <= _FEW_TOKENS:
        yield Tile(1, 1, 1, work.innermost)


def _registers(work: Work, pairs: int) -> int | None:
    if pairs <= PAIRS_PER_ACCESS:
        return None
    if work.bare_q and work.itemsize == 2:
        return None if work.positions else _ENOUGH_IF_LEAN
    return _PLENTY


def pairs_per_access(rotation: Rotation, rest: int) -> int:
    """The largest power of two of pairs, up to eight, into which the features of a head divide.

    An access begins at a multiple of its features, also where the features before ``rotation.first`` stay as they are.

    Args:
        rest: the number of features of a head that the kernel copies.
    """
    # The members of a pair of features that are copied are half of all these features apart.
    before = [n // 2 if n % 2 == 0 else 1 for n in (rest, rotation.first)]
    return gcd(2 * PAIRS_PER_ACCESS, rotation.rotary_dim // 2, *before)


class Line(NamedTuple):
    """The accesses of a token under a `FlatTile`: those of all heads, or of one head where tokens are innermost.

    Attributes:
        pairs: the pairs of an access.
        per_head, accesses: the accesses of a head, and of the line.
        block_tokens, pieces: so many tokens make so many programs, all of which are full.
        blocks: the blocks of heads that have lines of their own.
    """

    pairs: int
    per_head: int
    accesses: int
    block_tokens: int
    pieces: int
    blocks: int


def line_of(work: Work, tile: FlatTile) -> Line:
    """The line of a token of a call."""
    pairs = min(tile.pairs_per_access, pairs_per_access(work.rotation, work.rest))
    per_head, heads = (work.rotation.rotary_dim + work.rest) // (2 * pairs), sum(work.heads)
    accesses, lines = (per_head, heads) if tile.innermost == "tokens" else (per_head * heads, 1)
    along = tile.accesses // tile.block_heads
    common = gcd(along, accesses)
    return Line(pairs, per_head, accesses, along // common, accesses // common, -(-lines // tile.block_heads))


def axis_group(rotation: Rotation) -> int:
    """The number of adjacent pairs that read the position along the same axis, as a power of two up to 16."""
    axes = rotation.axes or ()
    return gcd(16, *(i for i in range(1, len(axes)) if axes[i] != axes[i - 1]))


def reads_several_axes(rotation: Rotation) -> bool:
    """Whether four adjacent pairs read positions along several axes."""
    return axis_group(rotation) < PAIRS_PER_ACCESS


def fit_tile(
    rotary_dim: int,
    q_heads: int,
    seq_len: int,
    innermost: str,
    pairs_per_access: int,
    num_warps: int,
    most_heads: int | None = None,
    max_registers: int | None = None,
) -> Tile:
    """The tile that fills ``num_warps`` warps with one access for each thread.

    The tile has as many heads of one token as fit, or at most ``most_heads`` heads of several tokens. If the call has
    too few heads, the tile has more tokens. If the call has too few tokens, the tile has more heads. If the call has
    too few heads and tokens, the tile has fewer warps.
    """
    width = next_power_of_2(rotary_dim // 2)
    program = 32 * num_warps * pairs_per_access
    all_heads, all_tokens = next_power_of_2(max(q_heads, 1)), next_power_of_2(max(seq_len, 1))
    held = max(1, program // width)
    heads = min(most_heads or held, held, all_heads)
    tokens = min(max(1, program // (heads * width)), all_tokens)
    heads = min(max(heads, program // (tokens * width)), all_heads)
    num_warps = min(max(1, tokens * heads * width // pairs_per_access // 32), num_warps)
    return Tile(tokens, heads, num_warps, innermost, pairs_per_access, max_registers)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n >= 1``."""
    return 1 << (n - 1).bit_length()
