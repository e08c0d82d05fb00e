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

    One token and at least 512 of its pairs: four warps then hold four pairs a thread, enough 16-byte requests
    to keep memory busy, and few enough registers to fill the multiprocessor with programs. At least 8 heads, so
    that a row of the tables is read for 8 rows of q. The sweep behind this rule is the study ``tiles``
    (data/measurements/), which times every tile against a copy of the same bytes.

    Args:
        rotary_dim: rotated features of a head.
        max_heads: the larger of the query's and the key's head count.
    """
    heads = max(8, -(-512 // (rotary_dim // 2)))
    return Tile(block_tokens=1, block_heads=next_power_of_2(min(heads, max_heads)), num_warps=4)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n >= 1``."""
    return 1 << (n - 1).bit_length()
