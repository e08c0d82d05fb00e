"""How much of the work one Triton program takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Tokens and query heads of one program (it takes its share of the key heads too), and its warps."""

    block_tokens: int
    block_heads: int
    num_warps: int


def choose_tile(rotary_dim: int, max_heads: int) -> Tile:
    """The tile for heads of which ``rotary_dim`` features rotate.

    One token, and 1,024 of its pairs on 8 warps: four pairs a thread, whose cosines and sines are one 16-byte
    load each. Programs of half the size begin to be limited by how fast a GPU starts them; larger ones need
    registers that leave room for fewer. At least 16 heads, so that a row of the tables serves as many. The sweep
    behind this is the study ``tiles`` (data/measurements/), which times other tiles in the same run.

    Args:
        rotary_dim: rotated features of a head.
        max_heads: the larger of the query's and the key's head count.
    """
    pairs = next_power_of_2(rotary_dim // 2)
    heads = min(max(16, 1024 // pairs), next_power_of_2(max_heads))
    return Tile(block_tokens=1, block_heads=heads, num_warps=min(max(heads * pairs // 128, 1), 8))


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n >= 1``."""
    return 1 << (n - 1).bit_length()
