"""This file chooses how much of the work one Triton program takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

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
    """

    block_tokens: int
    block_heads: int
    num_warps: int
    innermost: str = "heads"
    pairs_per_access: int = PAIRS_PER_ACCESS
    max_registers: int | None = None
    heads_first: bool = False


@dataclass(frozen=True)
class FlatTile:
    """The accesses of one program of `rotate_flat_triton`, and its warps.

    An access is ``pairs_per_access`` adjacent pairs, or as many adjacent features that are copied.

    Attributes:
        accesses: the accesses of a program, a power of two.
        innermost, max_registers, heads_first: as for `Tile`.
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


# These are limits on the registers of a thread that takes more than four pairs. Without a limit the assembler saves a
# few registers by moving half of the loads behind the first arithmetic. The saved registers make no room for another
# program, and every program then waits for memory twice. A thread that may use 96 registers, more than it needs, keeps
# all loads in front. A lean thread (see `choose_tile`) keeps all loads in front with 40 registers. 40 registers leave
# room for twelve programs of 128 threads on a multiprocessor instead of ten. A lean thread that also reads positions is
# faster with 32 registers and sixteen programs; 32 registers suffice if a program takes one token and reads the heads
# first. For split-half heads with positions the assembler finds an equally good number without a limit.
_PLENTY, _ENOUGH_IF_LEAN, _LEAN_WITH_POSITIONS = 96, 40, 32

# Up to _FEW_TOKENS tokens of at least _MANY_HEADS heads, each head is a program of one warp. All heads are then under
# way at once.
_FEW_TOKENS, _MANY_HEADS = 8, 32

# Up to _FEW_PAIRS pairs of q, the time that a GPU takes to start all programs matters. Half as many programs of twice
# the size are then better.
_FEW_PAIRS = 2**20

_TABLE_FREE_HEADS = 16

# Up to _FEW_ACCESSES accesses, all programs of a call are under way at once.
_FEW_ACCESSES = 2**16


@dataclass(frozen=True)
class Work:
    """A call, as far as the choice of a tile needs it.

    Attributes:
        rotation: the rotation.
        heads: the numbers of heads of q and, if there is a k, of k.
        batch, seq_len: the number of sequences, and of the tokens of a sequence.
        innermost: the axis whose neighbours are adjacent in memory: see `choose_tile`.
        rest: the number of features of a head that the kernel copies.
        positions: whether positions are read.
        itemsize: the bytes of an element of the input.
        column_bytes: the bytes of a cosine.
        lean: see `choose_tile`.
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
    lean: bool
    in_place: bool


def candidates(work: Work) -> list[Tile | FlatTile]:
    """The tiles among which the cost decides."""
    rotation, order = work.rotation, work.innermost
    found: list[Tile | FlatTile] = []
    access = pairs_per_access(rotation, work.rest)
    converts = rotation.interleaved != rotation.out_interleaved
    is_served = not rotation.table_free and work.column_bytes <= 4 and work.itemsize <= 4
    if is_served and access > 1 and not (converts and (work.in_place or work.rest)):
        both = rotation.interleaved and rotation.out_interleaved
        wide = min(access, ACCESS_BYTES // work.itemsize // (2 if both else 1))
        for accesses, warps in ((64, 2), (128, 4), (256, 8), (256, 4)):
            for heads in (1, 2, 4) if order == "tokens" and accesses == 128 else (1,):
                found.append(FlatTile(accesses, warps, order, wide, heads))
    shape = rotation.rotary_dim, work.heads[0], work.seq_len, order
    for access in (PAIRS_PER_ACCESS, 2 * PAIRS_PER_ACCESS):
        for warps in (4, 2):
            for heads in (2, 4) if order == "tokens" else (None,):
                tile = fit_tile(*shape, access, warps, heads)
                found.append(replace(tile, max_registers=_registers(work, tile)))
    if work.batch * work.seq_len <= _FEW_TOKENS:
        found.append(Tile(1, 1, 1, order))
    if work.positions:
        found += [replace(tile, heads_first=True) for tile in found if tile.num_warps > 1]
    return list(dict.fromkeys(found))


def _registers(work: Work, tile: Tile) -> int | None:
    if tile.pairs_per_access <= PAIRS_PER_ACCESS:
        return None
    if work.lean and work.itemsize == 2:
        return _ENOUGH_IF_LEAN if not work.positions else None
    return _PLENTY


def choose_tile(
    rotary_dim: int,
    q_heads: int,
    seq_len: int,
    innermost: str = "heads",
    *,
    batch: int = 1,
    interleaved: bool = False,
    positions: bool = False,
    lean: bool = False,
    itemsize: int = 2,
) -> Tile:
    """The tile for ``batch`` times ``seq_len`` tokens with ``q_heads`` heads, of which ``rotary_dim`` features rotate.

    A thread moves 16 bytes at once. In elements of two bytes, these are eight members of split-half pairs or four
    interleaved pairs. A thread takes eight interleaved pairs where fewer or larger programs are better. It takes four
    pairs of a single tensor whose tokens are adjacent: no k shares the program there, and eight pairs gain nothing.

    128 threads make a program, because a GPU starts programs at a limited rate. Smaller programs would wait for their
    start instead of for memory.

    Args:
        innermost: the axis whose neighbours are adjacent in memory: "heads" (bshd, thd), "batches" (sbhd: the heads of
            a token, then the batches) or "tokens" (bhsd); see `addressing.innermost`.
        interleaved: whether the pairs of the input are interleaved.
        positions: whether positions are read. A program then waits for memory twice: for the positions of its tokens,
            and for their rows of the tables. More data must therefore be under way at the same time: a thread takes
            eight interleaved pairs too. Where heads are adjacent, the program also loads its heads while it waits,
            unless the heads of k are interleaved and take too many registers.
        lean: whether a thread holds only pairs of q, and one cosine and one sine for each pair, in float32 or less.
            This requires that there is no k, that all features rotate, that the tables have a column for each pair,
            that one offset serves input and output, and that one offset serves both tables.
        itemsize: the bytes of an element of the input.

    The choice rests on the repository's study `tiles`, which times other tiles in the same run.
    """
    few_tokens = batch * seq_len <= _FEW_TOKENS
    if few_tokens and q_heads >= _MANY_HEADS:
        return Tile(1, 1, 1, innermost)
    if innermost == "tokens":
        # A program takes few heads, because each head is elsewhere in memory. The heads share the rows of the tables.
        # A program that reads positions waits longer for these rows: it takes more heads, and half as many threads, so
        # that more programs wait side by side.
        warps, heads = (2, 4) if positions else (4, 2)
        narrow = lean and not positions or itemsize > 2
        access, registers = (PAIRS_PER_ACCESS, None) if narrow else (2 * PAIRS_PER_ACCESS, _PLENTY)
        return fit_tile(rotary_dim, q_heads, seq_len, innermost, access, warps, heads, registers)
    # If the pairs of a head are no power of two, some threads have nothing to do, and the others take more pairs.
    padded = rotary_dim != 2 * next_power_of_2(rotary_dim // 2)
    few_pairs = batch * seq_len * q_heads * rotary_dim // 2 <= _FEW_PAIRS
    narrow = interleaved and not (positions or padded or few_pairs) or itemsize > 2
    access = PAIRS_PER_ACCESS if narrow else 2 * PAIRS_PER_ACCESS
    if next_power_of_2(rotary_dim // 2) >= 128 and itemsize <= 4:
        # A program of wide heads takes twice as many pairs, so that the single key head of MQA is a small part of it.
        access = 2 * PAIRS_PER_ACCESS
    tile = fit_tile(rotary_dim, q_heads, seq_len, innermost, access, 4)
    # A few tokens are all under way at once in any case. Their longest wait is for the positions and then for the rows,
    # so they read positions first.
    heads_first = positions and not few_tokens and (lean or not interleaved)
    registers = _PLENTY if access > PAIRS_PER_ACCESS else None
    if registers and lean and itemsize == 2:
        registers = _ENOUGH_IF_LEAN
        if positions and not interleaved:
            registers = None
        elif heads_first and tile.block_tokens == 1:
            registers = _LEAN_WITH_POSITIONS
    return replace(tile, max_registers=registers, heads_first=heads_first)


def choose_flat_tile(
    rotation: Rotation,
    heads: Sequence[int],
    rest: int,
    tokens: int,
    innermost: str,
    *,
    positions: bool,
    itemsize: int = 2,
) -> FlatTile | None:
    """The flat tile of a call; None where a `Tile` is as fast.

    Flat tiles are faster where a `Tile` leaves threads without work: where the number of pairs, or the number of heads
    of q and k, is no power of two, and pairs are interleaved or elements of two bytes have positions. They are also
    faster where features that do not rotate are copied, because their loads begin together with the others. Split-half
    heads that threads can read 16 bytes at a time gain nothing without positions: a flat program then begins within a
    head, and two programs share the bytes around its beginning. A call of few accesses has more programs at once, and
    smaller ones.

    Args:
        heads: the numbers of heads of q and, if there is a k, of k.
        rest: the number of features of a head that the kernel copies.
        tokens: the number of tokens of all batches.
        innermost: as for `choose_tile`.
        positions: whether positions are read.
        itemsize: the bytes of an element of the input.

    The choice rests on the repository's study `model_heads`, a sweep over the heads of 18 models.
    """
    pairs, access = rotation.rotary_dim // 2, pairs_per_access(rotation, rest)
    if tokens <= _FEW_TOKENS or access < PAIRS_PER_ACCESS or itemsize > 4:
        return None
    is_padded = pairs != next_power_of_2(pairs)
    wide = min(access, ACCESS_BYTES // itemsize // (2 if rotation.interleaved else 1))
    if innermost == "tokens":
        gains = itemsize == 2 and (rest or (is_padded and rotation.interleaved))
        return FlatTile(128, 4, innermost, wide, block_heads=2) if gains else None
    has_idle_threads = is_padded or (len(heads) > 1 and any(n != next_power_of_2(n) for n in heads))
    gains = rotation.interleaved or (itemsize == 2 and (positions or access < 2 * PAIRS_PER_ACCESS))
    few = itemsize == 2 and len(heads) > 1 and tokens * sum(heads) * (pairs + rest // 2) // access <= _FEW_ACCESSES
    if not (rest or few or (has_idle_threads and gains)):
        return None
    warps = 2 if few and not rotation.interleaved else 4
    # Few programs read positions first, as in `choose_tile`. The threads of a program with several tokens read several
    # positions. To read the heads first then gains nothing, except for padded split-half heads.
    one_token = sum(heads) * (pairs + rest // 2) // wide % (32 * warps) == 0
    heads_first = not few and (not rotation.interleaved if is_padded else one_token)
    return FlatTile(32 * warps, warps, innermost, wide, heads_first=positions and heads_first)


def pairs_per_access(rotation: Rotation, rest: int) -> int:
    """The largest power of two of pairs, up to eight, into which the features of a head divide.

    Args:
        rest: the number of features of a head that the kernel copies.
    """
    parts = [2 * PAIRS_PER_ACCESS, rotation.rotary_dim // 2]
    if rest:
        # The members of a pair of features that are copied are half of all these features apart.
        parts += [n // 2 if n % 2 == 0 else 1 for n in (rest, rotation.first)]
    return gcd(*parts)


def choose_table_free_tile(
    rotary_dim: int, q_heads: int, seq_len: int, innermost: str = "heads", *, itemsize: int = 2
) -> Tile:
    """The tile for a kernel that computes cosines and sines; the arguments are as for `choose_tile`.

    The tile has as many tokens as give each thread one angle to compute. With fewer angles than threads, the compiler
    would make every thread compute the angles of its own pairs: eight times as many angles. Many heads share the
    angles, so that a thread has 16 pairs. Where heads are adjacent, two warps make a program: the threads of a program
    wait for each other, and many small programs wait less than few large programs.
    """
    width = next_power_of_2(rotary_dim // 2)
    threads = max(32 * (4 if innermost == "tokens" else 2), min(width, 256))
    heads = min(_TABLE_FREE_HEADS, next_power_of_2(max(q_heads, 1)))
    # With few heads the tile has more tokens, so that a thread still moves 16 bytes at once.
    access = PAIRS_PER_ACCESS if itemsize > 2 else 2 * PAIRS_PER_ACCESS
    tokens = max(threads, threads * access // heads) // width
    tokens = min(max(1, tokens), next_power_of_2(max(seq_len, 1)))
    return Tile(tokens, heads, threads // 32, innermost, access)


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
