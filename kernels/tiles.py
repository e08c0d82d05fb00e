"""How much of the work one Triton program takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Tokens and query heads of one program (it takes its share of the key heads too), and its warps."""

    block_tokens: int
    block_heads: int
    num_warps: int


# A GPU starts programs at a limited rate: on an H200 one per multiprocessor every 90 ns, in which time memory
# moves 2.9 KB to and from it. 320 pairs of bfloat16, read and written, are 2.6 KB: about the smallest program
# that does not wait for its turn. And the smaller, the better: a short launch fills and drains the GPU evenly.
_PAIRS_PER_PROGRAM = 320
_MIN_HEADS = 4  # so many rows of q share a row of the tables in the L1 cache


def choose_tile(rotary_dim: int, q_heads: int, k_heads: int, seq_len: int) -> Tile:
    """The tile for heads of which ``rotary_dim`` features rotate.

    As few heads of one token as make a program worth starting, on one warp. Where the pairs of a head are not a
    power of two, some lanes of each warp idle, so a second warp keeps memory as busy. Heads too few to fill a
    program are joined by further tokens. The sweep behind this is the study ``tiles`` (data/measurements/),
    which times other tiles in the same run.
    """
    pairs = rotary_dim // 2
    width = next_power_of_2(pairs)
    k_per_q = k_heads / max(q_heads, 1)
    heads = _MIN_HEADS
    while heads * (1 + k_per_q) * width < _PAIRS_PER_PROGRAM:
        heads *= 2
    heads = min(heads, next_power_of_2(max(q_heads, 1)))
    tokens = 1
    while tokens * heads * (1 + k_per_q) * width < _PAIRS_PER_PROGRAM and tokens < seq_len:
        tokens *= 2
    return Tile(block_tokens=tokens, block_heads=heads, num_warps=1 if width == pairs else 2)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n >= 1``."""
    return 1 << (n - 1).bit_length()
