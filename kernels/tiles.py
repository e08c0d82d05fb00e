"""How much of the work one Triton program takes."""

from dataclasses import dataclass, replace

PAIRS_PER_ACCESS = 4
"""Pairs of which a thread reads the features, or the cosines, at once: 16 bytes of a table in float32."""


@dataclass(frozen=True)
class Tile:
    """Tokens and query heads of one program (it takes its share of the key heads too), and its warps.

    ``innermost``: what programs that start one after the other have of one another: further "heads" of the same
    tokens, then further tokens; further heads of the same tokens, then further "batches"; or further "tokens".
    ``pairs_per_access``: of which a thread reads the features, or the cosines, at once.
    ``max_registers``: of a thread; None leaves it to the assembler.
    ``heads_first``: where positions are read, they are read when the loads of all heads are under way. Without it the
    compiler has the heads wait for the positions, whose rows of the tables then come with the heads.
    """

    block_tokens: int
    block_heads: int
    num_warps: int
    innermost: str = "heads"
    pairs_per_access: int = PAIRS_PER_ACCESS
    max_registers: int | None = None
    heads_first: bool = False


# With more than four pairs a thread the assembler, left alone, saves a few registers (which make no room for another
# program) by moving half of the loads behind the first arithmetic, and every program waits for memory twice. A thread
# that is allowed as many as it wants keeps all loads in front. A lean one can do so with 40, which leaves room for
# twelve programs of 128 threads on a multiprocessor instead of ten. One that reads positions too is better off with 32
# and sixteen programs, which suffice for one token, heads first; for split-half heads the assembler, left alone, finds
# as good a number.
_PLENTY, _ENOUGH_IF_LEAN, _LEAN_WITH_POSITIONS = 96, 40, 32

# Up to so many tokens of at least so many heads, all heads are under way at once if each is a program of one warp.
_FEW_TOKENS, _MANY_HEADS = 8, 32

# Up to so many pairs of q it counts how long a GPU takes to start all programs: half as many of twice the size.
_FEW_PAIRS = 2**20

_TABLE_FREE_HEADS = 16


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
    """The tile for ``q_heads`` heads of which ``rotary_dim`` features rotate, and ``batch`` times ``seq_len`` tokens.

    A thread moves 16 bytes at once: eight members of a split-half head, or four pairs of an interleaved one, in two
    bytes each. It takes eight pairs of an interleaved head as well where programs had better be fewer or hold more, and
    four of a single tensor whose tokens lie together, where no k shares the program and eight gain nothing.
    128 threads make a program, as a GPU starts programs at a limited rate: small ones wait for their turn instead of
    for memory.

    Args:
        innermost: of which axis neighbours lie next to each other in memory: "heads" (bshd, thd), "batches"
            (sbhd: its heads, then its batches) or "tokens" (bhsd).
        interleaved: the layout of the input.
        positions: they are read. A program then waits for memory twice, for its tokens' positions and for their rows
            of the tables, so more has to be under way at the same time: eight pairs of an interleaved head too, and,
            where heads lie together, the heads while it waits, unless those of k, interleaved, take too many registers.
        lean: a thread holds nothing but pairs of q, and one cosine and sine for each, in float32 or less: there is no
            k, all features rotate, the tables have a column per pair, one offset serves input and output, and one
            serves both tables.
        itemsize: bytes of an element of the input.

    The sweep behind this is the study ``tiles`` (data/measurements/), which times other tiles in the same run.
    """
    few_tokens = batch * seq_len <= _FEW_TOKENS
    if few_tokens and q_heads >= _MANY_HEADS:
        return Tile(1, 1, 1, innermost)
    if innermost == "tokens":
        # Few heads, as each is elsewhere in memory. They share the rows of the tables, for which a program that reads
        # positions waits longer: more heads then, and half as many threads, so that more programs wait side by side.
        warps, heads = (2, 4) if positions else (4, 2)
        narrow = lean and not positions or itemsize > 2
        access, registers = (PAIRS_PER_ACCESS, None) if narrow else (2 * PAIRS_PER_ACCESS, _PLENTY)
        return fit_tile(rotary_dim, q_heads, seq_len, innermost, access, warps, heads, registers)
    # Of a head whose pairs are no power of two, some threads have nothing to do; the others then take more.
    padded = rotary_dim != 2 * next_power_of_2(rotary_dim // 2)
    few_pairs = batch * seq_len * q_heads * rotary_dim // 2 <= _FEW_PAIRS
    narrow = interleaved and not (positions or padded or few_pairs) or itemsize > 2
    access = PAIRS_PER_ACCESS if narrow else 2 * PAIRS_PER_ACCESS
    if next_power_of_2(rotary_dim // 2) >= 128 and itemsize <= 4:
        # So that the single key head of MQA is not alone in a program of its own size.
        access = 2 * PAIRS_PER_ACCESS
    tile = fit_tile(rotary_dim, q_heads, seq_len, innermost, access, 4)
    # A few tokens are all under way at once anyhow, and the way from their positions to their rows is the longest.
    heads_first = positions and not few_tokens and (lean or not interleaved)
    registers = _PLENTY if access > PAIRS_PER_ACCESS else None
    if registers and lean and itemsize == 2:
        registers = _ENOUGH_IF_LEAN
        if positions and not interleaved:
            registers = None
        elif heads_first and tile.block_tokens == 1:
            registers = _LEAN_WITH_POSITIONS
    return replace(tile, max_registers=registers, heads_first=heads_first)


def choose_table_free_tile(
    rotary_dim: int, q_heads: int, seq_len: int, innermost: str = "heads", *, itemsize: int = 2
) -> Tile:
    """The tile where cosines and sines are computed; arguments as for `choose_tile`.

    As many tokens as give each thread one angle to compute: with fewer angles than threads the compiler would have
    every thread compute those of its own pairs, eight times as many. Then many heads, which share the angles, so
    that a thread has 16 pairs. Two warps make a program where heads lie together: its threads wait for each other, and
    many small programs wait less than few large ones.
    """
    width = next_power_of_2(rotary_dim // 2)
    threads = max(32 * (4 if innermost == "tokens" else 2), min(width, 256))
    heads = min(_TABLE_FREE_HEADS, next_power_of_2(max(q_heads, 1)))
    # With few heads more tokens, so that a thread still moves 16 bytes at once.
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
    """As many heads of a token as ``num_warps`` warps hold with one access a thread, or ``most_heads`` of several.

    Where there are too few tokens or heads for one of the two, the other fills the program; where both are too few,
    it has fewer warps.
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
