"""How much of the work one Triton program takes."""

from dataclasses import dataclass

PAIRS_PER_ACCESS = 4
"""Pairs of which a thread reads the features, or the cosines, at once: 16 bytes of a table in float32."""


@dataclass(frozen=True)
class Tile:
    """Tokens and query heads of one program (it takes its share of the key heads too), and its warps.

    ``innermost``: what programs that start one after the other have of one another: further "heads" of the same
    tokens, then further tokens; further heads of the same tokens, then further "batches"; or further "tokens".
    ``pairs_per_access``: of which a thread reads the features, or the cosines, at once.
    """

    block_tokens: int
    block_heads: int
    num_warps: int
    innermost: str = "heads"
    pairs_per_access: int = PAIRS_PER_ACCESS


# Four pairs of q for each of 128 threads. With eight the compiler moves half of the table loads behind the first
# arithmetic, and every program waits for memory twice: 16 instead of 8 bytes of a half head at once are slower,
# although the widest access is what one would ask for. Programs of a quarter of 512 pairs wait for their turn
# instead of for memory: a GPU starts them at a limited rate. More pairs a thread keep more registers and leave
# room for fewer programs.
_PAIRS_PER_PROGRAM = 512


def choose_tile(
    rotary_dim: int, q_heads: int, seq_len: int, innermost: str = "heads", interleaved: bool = False
) -> Tile:
    """The tile for ``q_heads`` heads of which ``rotary_dim`` features rotate, and ``seq_len`` tokens in a row.

    Args:
        innermost: of which axis neighbours lie next to each other in memory: "heads" (bshd, thd), "batches"
            (sbhd: its heads, then its batches) or "tokens" (bhsd).
        interleaved: the layout of the input.

    The sweep behind this is the study ``tiles`` (data/measurements/), which times other tiles in the same run.
    """
    width = next_power_of_2(rotary_dim // 2)
    program, access = _PAIRS_PER_PROGRAM, PAIRS_PER_ACCESS
    if innermost == "tokens":
        # Few heads, as each is elsewhere in memory. Two share rows of the tables; halves of heads are read 16 bytes
        # at a time here, with which two are too many.
        heads, access = (2, access) if interleaved else (1, 2 * access)
    else:
        # One token, with as many of its heads as fill the program. Of wide heads a program takes twice as much, so
        # that the single key head of MQA is not alone in a program of its own size.
        if width >= 128:
            program, access = 2 * program, 2 * access
        heads = max(1, program // width)
    heads = min(heads, next_power_of_2(max(q_heads, 1)))
    tokens = min(max(1, program // (heads * width)), next_power_of_2(max(seq_len, 1)))
    # Where there are too few tokens or heads for one of the two, the other fills the program.
    heads = min(max(heads, program // (tokens * width)), next_power_of_2(max(q_heads, 1)))
    most_warps = program // access // 32
    num_warps = min(max(1, tokens * heads * width // access // 32), most_warps)
    return Tile(tokens, heads, num_warps, innermost, access)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n >= 1``."""
    return 1 << (n - 1).bit_length()
