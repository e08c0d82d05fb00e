"""Choose the tile of a call: the candidate for which an estimate of the time is smallest.

The estimate compares the tiles of one call. It is a sum of ten terms, and each term counts something that holds a
call back. Seven terms count in large calls, where the rate of the memory limits the time. The other three count in
small calls, where the time of one program limits it. The weights are fitted to measured times of the candidates in
calls of half of the models, and tested on the other half.
"""

from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from math import ceil

from ropelab.kernels.tiles import FlatTile, Tile, Work, candidates, line_of, next_power_of_2

# An H100 or H200. The choice is the same on every GPU, so that a model has the same programs everywhere.
_MULTIPROCESSORS, _THREADS, REGISTERS = 132, 2048, 65536

_NEEDED_IN_FLIGHT = 32_000
"""The bytes of loads that the estimate wants under way in a multiprocessor of an H200: its share of 4.8 TB/s for 0.9
microseconds.

By Little's law half of them would do: a program waits for loads only, and half of the bytes that a rotation moves are
stores. So the term ``in_flight`` begins at twice the bytes that keep the memory busy, and its weight is fitted to that.
"""

_LATER_ROWS = 0.5
"""The wait for positions, as a part of a wait for memory, if the loads of all heads have begun before."""

_STARTED_BYTES = 2400
"""The bytes that an H200 moves in the time in which it starts a program: 4.2 TB/s for 0.57 nanoseconds."""

_HALF_LARGE_KB = 4000
"""The kilobytes of a call whose time depends by half on the rate of the memory."""


@dataclass(frozen=True)
class Terms:
    """The terms of the estimate, or their weights. Each term counts something that holds a call back.

    Attributes:
        instructions: the groups of pairs whose addresses the warps compute, for each kilobyte that is moved.
        idle: the padding among the pairs that the threads hold, for each pair.
        registers: the pairs that a thread holds beyond 16, in units of 16.
        in_flight: the share by which the threads of a multiprocessor have too few bytes under way, for each time that a
            program waits for memory.
        held: the pairs that a thread holds, padding included, in units of 8.
        busiest: the pairs on the busiest multiprocessor, padding included, over those of the average multiprocessor.
        late: whether a program loads features that do not rotate after all others.
        starts: by how much the start of all programs takes longer than the memory takes for their bytes.
        shared: whether the accesses of a warp end within a half of a head, so that two warps share sectors of memory.
            In place, a sector that a warp has written may still be read by the other.
        behind: the pairs beyond 8 that a thread loads before its position, in units of 8. The load of the position
            waits behind these loads, and the rows of the tables wait for the position.
    """

    instructions: float
    idle: float
    registers: float
    in_flight: float
    held: float
    busiest: float
    late: float
    starts: float
    shared: float
    behind: float


WEIGHTS = Terms(0.017, 0.0312, 0.0314, 0.114, 0.00858, 0.0277, 0.321, 0.0199, 0.0412, 0.0113)


@lru_cache(maxsize=4096)
def choose(work: Work) -> Tile | FlatTile:
    """The candidate that costs least."""
    return min(candidates(work), key=partial(cost, work))


def cost(work: Work, tile: Tile | FlatTile) -> float:
    """The estimate: the share of the time by which a call is slower than a call that nothing holds back."""
    return sum(weight * term for weight, term in zip(astuple(WEIGHTS), astuple(terms(work, tile)), strict=True))


@dataclass(frozen=True)
class _Programs:
    """The programs of a call; the groups of pairs of a thread, its pairs with padding, and whether it loads late."""

    count: int
    groups: float
    held: float
    late: bool


def terms(work: Work, tile: Tile | FlatTile) -> Terms:
    """The terms of a tile, each multiplied by the share of the time in which the term counts."""
    programs = _flat(work, tile) if isinstance(tile, FlatTile) else _whole(work, tile)
    copied = 0 if work.in_place else work.rest
    pairs = max(1, work.batch * work.seq_len * sum(work.heads) * (work.rotation.rotary_dim + copied) // 2)
    kilobytes = 4 * pairs * work.itemsize / 1000
    large = kilobytes / (kilobytes + _HALF_LARGE_KB)
    small = 1 - large
    warps, threads = programs.count * tile.num_warps, 32 * tile.num_warps
    waits, follows = work.positions and not tile.heads_first, work.positions and tile.heads_first
    rounds = 1 + waits + _LATER_ROWS * follows + programs.late
    registers = min(96, 18 + 2.8 * programs.held)
    resident = min(_THREADS, REGISTERS / registers)
    in_flight = resident * programs.held * 2 * work.itemsize
    busiest = ceil(programs.count / _MULTIPROCESSORS) * threads * programs.held
    return Terms(
        instructions=large * warps * programs.groups / kilobytes,
        idle=large * (warps * 32 * programs.held / pairs - 1),
        registers=large * max(0.0, programs.held / 16 - 1),
        in_flight=large * max(0.0, rounds * _NEEDED_IN_FLIGHT / in_flight - 1),
        held=small * programs.held / 8,
        busiest=small * min(8.0, busiest / max(pairs / _MULTIPROCESSORS, 256)),
        late=small * programs.late,
        starts=large * max(0.0, programs.count * _STARTED_BYTES / (1000 * kilobytes) - 1),
        shared=large * (isinstance(tile, FlatTile) and work.in_place and _ends_within_a_half(work, tile)),
        behind=large * follows * max(0.0, programs.held / 8 - 1),
    )


def _ends_within_a_half(work: Work, tile: FlatTile) -> bool:
    return not work.rotation.interleaved and 32 * line_of(work, tile).pairs % (work.rotation.rotary_dim // 2) != 0


def _flat(work: Work, tile: FlatTile) -> _Programs:
    line = line_of(work, tile)
    count = work.batch * ceil(work.seq_len / line.block_tokens) * line.pieces * line.blocks
    groups = max(1.0, tile.accesses / (32 * tile.num_warps))
    return _Programs(count, groups, groups * line.pairs, late=False)


def _whole(work: Work, tile: Tile) -> _Programs:
    width, threads = next_power_of_2(work.rotation.rotary_dim // 2), 32 * tile.num_warps
    blocks = max(1, ceil(work.heads[0] / tile.block_heads))
    count = ceil(work.seq_len / tile.block_tokens) * blocks * work.batch
    copies = work.rest > 0 and not work.in_place
    groups = held = 0.0
    for heads in (tile.block_heads, *(next_power_of_2(max(1, ceil(n / blocks))) for n in work.heads[1:])):
        pairs = tile.block_tokens * heads * width / threads
        groups += max(1.0, pairs / tile.pairs_per_access)
        held += max(1.0, pairs)
        if copies:
            held += max(0.5, tile.block_tokens * heads * next_power_of_2(work.rest) / threads / 2)
    return _Programs(count, groups, held, late=copies)
