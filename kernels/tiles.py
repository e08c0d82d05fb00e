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
_PAIRS_PER_WARP = 128


def choose_tile(rotary_dim: int, q_heads: int, seq_len: int, innermost: str = "heads") -> Tile:
    """The tile for ``q_heads`` heads of which ``rotary_dim`` features rotate, and ``seq_len`` tokens in a row.

    Args:
        innermost: of which axis neighbours lie next to each other in memory: "heads" (bshd, thd), "batches"
            (sbhd: its heads, then its batches) or "tokens" (bhsd).

    One token and as many of its heads as fill a program; where there are too few heads, further tokens. Where
    tokens lie next to each other, two heads, to share rows of the tables, and as many tokens as fill the program.
    The sweep behind this is the study ``tiles`` (data/measurements/), which times other tiles in the same run.
    """
    width = next_power_of_2(rotary_dim // 2)
    heads = 2 if innermost == "tokens" else max(1, _PAIRS_PER_PROGRAM // width)
    heads = min(heads, next_power_of_2(max(q_heads, 1)))
    tokens = min(max(1, _PAIRS_PER_PROGRAM // (heads * width)), next_power_of_2(max(seq_len, 1)))
    if innermost == "tokens":  # few tokens leave room for more heads
        heads = min(max(1, _PAIRS_PER_PROGRAM // (tokens * width)), next_power_of_2(max(q_heads, 1)))
    num_warps = min(max(1, tokens * heads * width // _PAIRS_PER_WARP), _PAIRS_PER_PROGRAM // _PAIRS_PER_WARP)
    return Tile(tokens, heads, num_warps, innermost)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n >= 1``."""
    return 1 << (n - 1).bit_length()
