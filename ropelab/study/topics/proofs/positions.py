"""Statements about positions and rows of tables, which Z3 proves of `positions_torch`, `positions_triton` and
`place_triton`.

Under context parallelism rank r of n holds of each sequence the chunks ``r`` and ``2n - 1 - r`` of ``2n`` chunks (the
zigzag). With h tokens in a chunk, token i of the rank's 2h tokens has in the whole sequence the place::

    r h + i                   for i < h:   chunk r
    (2n - 2 - r) h + i        for i >= h:  chunk 2n - 1 - r

Every chunk belongs to one rank, since ``r -> 2n - 1 - r`` maps the first n chunks to the last n chunks, one to one. The
statements say the same of the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import z3

from ropelab.kernels import place_triton, positions_torch, positions_triton
from ropelab.kernels.rotation import MOST_ROWS, NO_POSITION
from ropelab.study.topics.proofs.symbolic import Claim, Language, Machine, every, implies


def _chunk(place: z3.ArithRef, local: z3.ArithRef, size: z3.ArithRef, shard: positions_torch.Shard) -> z3.BoolRef:
    """Whether a place in a sequence is that of a token of the rank, by the formula of the zigzag or of whole chunks.

    Args:
        place, local: the token among those of the sequence, and among those of the rank.
        size: the tokens of a chunk.
    """
    chunks = [shard.cp_rank] + [2 * shard.cp_size - 1 - shard.cp_rank] * shard.dual
    held = []
    for before, chunk in enumerate(chunks):
        within = local - before * size
        held.append(every((0 <= within, within < size, place == chunk * size + within)))
    return z3.Or(*held)


def _shards(m: Machine, shard: positions_torch.Shard) -> Any:
    """`Shard.in_sequence` for a sequence of any length that the ranks can share."""
    size = m.integer("size", 0, 2**31, width=64)
    length = (1 + shard.dual) * size
    local = m.integer("local", 0, length, width=64)
    m.replaced["torch"] = SimpleNamespace(where=Language(m).where)
    place = m.call(positions_torch.Shard.in_sequence, shard, local, length)
    return every((place.safe, _chunk(place.value, local.value, size.value, shard)))


def _packed(m: Machine, shard: positions_torch.Shard, sequences: int) -> Any:
    """The launch for packed sequences of any lengths, of which each token gets its index among the unsharded tokens.

    A token of sequence s has an index between ``cu_seqlens[s]`` and ``cu_seqlens[s + 1]``, in a chunk of its rank and
    at the place that its own number has there. A token after the last sequence has no position.
    """
    cu = z3.Function("cu_seqlens", z3.IntSort(), z3.IntSort())
    m.memory = lambda at: cu(at.value)
    starts = [cu(z3.IntVal(i)) for i in range(sequences + 1)]
    chunks = shard.num_chunks
    total = m.integer("total_tokens", 1, 2**31, width=32)
    m.assumptions += [starts[0] == 0, starts[-1] <= total.value * shard.cp_size, starts[-1] < 2**31]
    for i, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        quotient = z3.Int(f"chunk_{i}")
        m.assumptions += [start <= end, end - start == quotient * chunks, start % chunks == 0, end % chunks == 0]
    m.grid = (m.integer("program", 0, 2**22),)
    width = 2
    while width < sequences + 1:
        width *= 2
    m.call(
        positions_triton._packed_positions_kernel, m.number(0), m.number(0), m.number(0), 1, 1, m.number(sequences),
        total, 0, shard.cp_rank, sequences.bit_length(), CP_SIZE=shard.cp_size, DUAL=shard.dual, OFFSETS=True,
        BLOCK_TOKENS=512, BLOCK_SEQUENCES=width,
    )  # fmt: skip
    [(at, position, mask)] = m.stored
    found, token = position.value, at.value
    past = token * shard.cp_size >= starts[-1]
    inside = []
    for i, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        local = token - start / shard.cp_size
        right = every((0 <= local, _chunk(found - start, local, z3.Int(f"chunk_{i}"), shard)))
        inside.append(every((start <= found, found < end, right)))
    right = z3.If(past, found == NO_POSITION, z3.Or(*inside))
    return every((mask.holds == (token < total.value), implies(mask, z3.And(right, position.safe, at.safe))))


def _row(m: Machine, width: int) -> Any:
    """`place_triton.row_of`: a position has the row of its magnitude, if the tables have the row."""
    position = m.integer("position", -(2 ** (width - 1)), 2 ** (width - 1), width=width)
    rows = m.integer("rows", 0, MOST_ROWS + 1)
    row, exists = m.call(place_triton.row_of, position, rows, SimpleNamespace(POSITIONS="token"))
    magnitude = z3.Abs(position.value)
    right = z3.Implies(exists.holds, z3.And(row.value == magnitude, row.safe))
    return z3.And(exists.holds == (magnitude < rows.value), right)


def _sharded(makes: Any, ranks: tuple[int, ...], **known: Any) -> Iterator[Claim]:
    for size in ranks:
        for rank in range(size):
            for dual in {False, size > 1}:
                yield partial(makes, shard=positions_torch.Shard(size, rank, dual), **known)


def _packed_claims() -> Iterator[Claim]:
    yield from _sharded(_packed, (1, 2, 3, 8), sequences=1)
    yield from _sharded(_packed, (1, 2, 4), sequences=3)


STATEMENTS: dict[str, Any] = {
    "zigzag and whole chunks are a partition of a sequence": lambda: _sharded(_shards, (1, *range(2, 17))),
    "packed positions are a partition of the tokens": _packed_claims,
    "a position reads the row of its magnitude, or none": [partial(_row, width=width) for width in (32, 64)],
}
