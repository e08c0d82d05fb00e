"""How much of the work one Triton program takes.

A program rotates ``block_tokens`` tokens x ``block_heads`` heads. The kernel moves bytes and does next to
nothing else, so a tile is right when each thread has enough 16-byte accesses in flight and the cos/sin
row it loads serves several heads.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Tokens and heads of one program, and the warps that share them."""

    block_tokens: int
    block_heads: int
    num_warps: int


def choose_tile(head_dim: int, itemsize: int, max_heads: int, heads_adjacent: bool) -> Tile:
    """The tile for heads of ``head_dim`` elements of ``itemsize`` bytes.

    Args:
        head_dim: features of a head.
        itemsize: bytes of an element.
        max_heads: the larger of the query's and the key's head count.
        heads_adjacent: heads of one token lie closer in memory than tokens of one head (bshd, sbhd);
            the tile extends along the closer axis, so that it reads long runs of memory.
    """
    rows = max(1, TILE_BYTES // (_next_power_of_2(head_dim) * itemsize))
    block_heads = min(rows, _next_power_of_2(max_heads)) if heads_adjacent else 1
    block_tokens = rows // block_heads
    num_warps = max(1, min(8, block_tokens * block_heads * _next_power_of_2(head_dim) * itemsize // BYTES_PER_WARP))
    return Tile(block_tokens, block_heads, num_warps)


TILE_BYTES = 2048
BYTES_PER_WARP = 512


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
