"""Statements about the work of programs, which Z3 proves: every head of every token belongs to one program."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import z3

from ropelab.kernels import addressing, cache_rows_triton, paged_cache_triton, place_triton, rotate_triton, tile_of
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.tensors import CacheTensors, RotateTensors
from ropelab.kernels.tiles import FlatTile, candidates
from ropelab.study.topics.proofs.symbolic import Claim, Machine, Number, every

BLOCKS = tuple(2**i for i in range(11))
"""Numbers of tokens of a block: the powers of two up to 1,024."""


def _programs(m: Machine, order: str, head_blocks: int) -> Any:
    """Every program has blocks that exist, and another program has others; a grid has as many programs as blocks."""
    batch, token_blocks = m.integer("batch", 1, addressing.MAX_BATCH + 1), m.integer("token_blocks", 1, 2**31)
    try:
        grid, chosen = m.call(addressing.launch_grid, batch, token_blocks, head_blocks, order)
    except ValueError:  # the host refuses the call
        return True

    def blocks_of(name: str) -> tuple[tuple[Number, ...], list[Number]]:
        m.grid = tuple(m.integer(name, 0, size) for size in grid)
        return m.grid, [m.number(x) for x in m.call(place_triton.blocks_of_program, head_blocks, chosen)]

    (first, blocks), (second, others) = blocks_of("program"), blocks_of("other")
    counts = (head_blocks, token_blocks, batch)
    exist = every(x for b, n in zip(blocks, counts, strict=True) for x in (b >= 0, b < n, b.safe))
    same, alike = (every(a == b for a, b in zip(*both, strict=True)) for both in ((blocks, others), (first, second)))
    sizes = [m.number(size).value for size in grid]
    as_many = z3.Product(*sizes) == head_blocks * token_blocks.value * batch.value
    return z3.And(exist, z3.Implies(same, alike), as_many)


def _tokens(m: Machine, block_tokens: int) -> Any:
    """A block has the tokens that follow its first, up to the end of the sequence; every token is in one block."""
    seq_len = m.integer("seq_len", 1, 2**31)
    blocks = (seq_len.value + block_tokens - 1) / block_tokens
    block = m.integer("token_block", 0, blocks)
    found = m.call(place_triton.block_of_tokens, m.integer("batch"), block, seq_len, block_tokens)
    token = found.first + found.distance
    sought = m.integer("token", 0, seq_len)
    right = every((found.exists.holds == (token.value < seq_len.value), token.safe, found.exists.safe, token >= 0))
    place = every((block == sought // block_tokens, found.distance == sought % block_tokens))
    in_grid = sought.value / block_tokens < blocks
    return z3.And(right, z3.Implies(token.value == sought.value, place), in_grid)


# --------------------------------------------------------------------------------------------------------- flat rows


def _flat_choices() -> list[SimpleNamespace]:
    """The choices of flat rows that the planner makes for many heads, in every layout and order of the axes."""
    found = {}
    for q_heads, k_heads in ((1, 0), (28, 4), (32, 8), (71, 1)):
        for head_dim, rotary_dim, first in ((128, 128, 0), (80, 32, 16)):
            for order, flags in product(("bshd", "bhsd", "sbhd"), product((False, True), repeat=2)):
                for tile, t, rotation in _flat_tiles(q_heads, k_heads, head_dim, rotary_dim, first, order, *flags):
                    *_, chosen = rotate_triton._flat(t, rotation, tile)
                    accesses = tile.accesses // tile.block_heads * chosen["PIECES"]
                    found[tuple(chosen.items())] = SimpleNamespace(
                        **chosen, Q_HEADS=q_heads, K_HEADS=k_heads,
                        BLOCK_TOKENS=accesses // chosen["ACCESSES_PER_LINE"],
                    )  # fmt: skip
    return list(found.values())


def _flat_tiles(
    q_heads: int,
    k_heads: int,
    head_dim: int,
    rotary_dim: int,
    first: int,
    order: str,
    interleaved: bool,
    in_place: bool,
) -> Iterator[tuple[FlatTile, RotateTensors, Rotation]]:
    batch, seq_len = 2, 64
    heads = []
    for count in filter(None, (q_heads, k_heads)):
        sizes = {"b": batch, "s": seq_len, "h": count, "d": head_dim}
        x = torch.empty([sizes[axis] for axis in order], dtype=torch.bfloat16, device="meta")
        heads.append(x.permute([order.index(axis) for axis in "bshd"]))
    results = heads if in_place else [torch.empty_like(x) for x in heads]
    table = torch.empty(seq_len, rotary_dim // 2, device="meta")
    rotation = Rotation(rotary_dim, first, interleaved, interleaved)
    t = RotateTensors.of(heads, results, table, table, None)
    for tile in candidates(tile_of.work_of(t, rotation)):
        if isinstance(tile, FlatTile):
            yield tile, t, rotation


def _head_itself(q, k, tokens, head, C):
    """In place of the addresses of a head: the head."""
    return head


def _flat(m: Machine, C: SimpleNamespace, given: str) -> Any:
    """A lane of a program has an access that exists, and the access has this lane; or the other way round."""
    m.replaced["_line_at"] = m.replaced.get("_line_at", _head_itself)
    seq_len, batch = m.integer("seq_len", 1, 2**20), m.integer("batch", 1, addressing.MAX_BATCH + 1)
    heads, along = C.Q_HEADS + C.K_HEADS, C.ACCESSES // C.BLOCK_HEADS
    blocks = (seq_len.value + C.BLOCK_TOKENS - 1) / C.BLOCK_TOKENS
    line_heads = -(-heads // C.BLOCK_HEADS)
    grid = {
        "heads": (blocks * C.PIECES, 1, batch), "tokens": (blocks * C.PIECES, line_heads, batch),
        "batches": (batch * C.PIECES, blocks, 1),
    }[C.INNERMOST]  # fmt: skip
    m.grid = tuple(m.integer("program", 0, size) for size in grid)
    tokens, (part,) = m.call(rotate_triton._flat_rows, None, None, seq_len, C)
    lane, _ = m.lanes[-1]
    if given == "lane":
        m.assume(part.exists)
        token, head, access, of = tokens.first + tokens.distance, part.at, part.access, tokens.batch
        inside = every((token >= 0, token < seq_len, head >= 0, head < heads, access >= 0, access < C.PER_HEAD))
    else:
        token, head = m.integer("token", 0, seq_len), m.integer("head", 0, heads)
        access, of = m.integer("access", 0, C.PER_HEAD), m.integer("batch_index", 0, batch)
    in_line = access if C.INNERMOST == "tokens" else head * C.PER_HEAD + access
    group = (token % C.BLOCK_TOKENS) * C.ACCESSES_PER_LINE + in_line
    block, piece = token // C.BLOCK_TOKENS, group // along
    at = (head % C.BLOCK_HEADS) * along if C.INNERMOST == "tokens" else 0
    programs = {
        "heads": (block * C.PIECES + piece, 0, of),
        "tokens": (block * C.PIECES + piece, head // C.BLOCK_HEADS, of),
        "batches": (of * C.PIECES + piece, block, 0),
    }[C.INNERMOST]
    place = [*(a == b for a, b in zip(m.grid, programs, strict=True)), lane == at + group % along]
    if given == "lane":
        return every((inside, *place, token.safe, head.safe))
    for condition in place:
        m.assume(condition)
    same = every((tokens.first + tokens.distance == token, part.at == head, part.access == access, tokens.batch == of))
    return every((part.exists, same))


def _flat_claims() -> Iterator[Claim]:
    for choices in _flat_choices():
        for given in ("access", "lane"):
            yield partial(_flat, C=choices, given=given)


# ------------------------------------------------------------------------------------------------- rows of a cache


def _kinds() -> Iterator[tuple[Any, SimpleNamespace]]:
    """The kinds of rows that the planner of `paged_cache_triton` makes for many heads and numbers of tokens."""
    for q_heads, k_heads, head_dim, tokens in product(
        (1, 8, 28, 32, 128), (1, 4, 8), (64, 80, 128, 256), (1, 16, 8192)
    ):
        q, k, cache = (
            torch.empty(*sizes, head_dim, dtype=torch.bfloat16, device="meta")
            for sizes in ((1, tokens, q_heads), (1, tokens, k_heads), (64, 16, k_heads))
        )
        slots, table = torch.empty(tokens, device="meta"), torch.empty(64, head_dim // 2, device="meta")
        known = {"q": q, "k": k, "v": k, "q_out": q, "k_cache": cache, "v_cache": cache, "slots": slots, "cos": table,
                 "sin": table}  # fmt: skip
        t = CacheTensors(**(dict.fromkeys(CacheTensors._fields) | known))
        rotation = Rotation(head_dim)
        tile = tile_of.paged_cache(t, rotation)
        block_tokens, kinds = paged_cache_triton._kinds(t, rotation, tile)
        for kind in kinds.values():
            if kind.PROGRAMS:
                yield kind, SimpleNamespace(BLOCK_ROWS=tile.block_rows, BLOCK_TOKENS=block_tokens)


def _rows(m: Machine, K: Any, C: SimpleNamespace, step: int, given: str) -> Any:
    """A row of a pass is a head of a token of the block, and each head of each token is one row of one pass."""
    rows = K.HEADS * K.PARTS
    seq_len, first = m.integer("seq_len", 1, 2**30), m.integer("first", 0, 2**30)
    part = m.integer("part", 0, K.PROGRAMS)
    block = cache_rows_triton.Block(0, first, seq_len, part)
    tokens, head, exists = m.call(cache_rows_triton.rows_of_program, block, rows, step, K, C)
    lane, _ = m.lanes[0]
    of_program = C.BLOCK_ROWS // K.TOKENS
    head_blocks = -(-rows // (of_program * K.PASSES))
    if C.BLOCK_TOKENS == 1:
        m.assume(first < seq_len)  # a grid is exact for blocks of one token
    if given == "row":
        m.assume(exists)
        token, row = tokens.distance, head
    else:
        token, row = m.integer("token", 0, C.BLOCK_TOKENS), m.integer("head", 0, rows)
        m.assume(first + token < seq_len)
        m.assume(row // of_program % K.PASSES == step)
    at = (token % K.TOKENS) * of_program + row % of_program
    place = (part == token // K.TOKENS * head_blocks + row // (of_program * K.PASSES), lane == at)
    if given == "row":
        inside = (token >= 0, token < C.BLOCK_TOKENS, row >= 0, row < rows, first + token < seq_len)
        return every((*place, *inside, row // of_program % K.PASSES == step, token.safe, row.safe))
    for condition in place:
        m.assume(condition)
    if K.TOKENS > 1:
        m.assume(m.lanes[-1][0] == lane)
    return every((exists, tokens.distance == token, head == row))


def _row_claims() -> Iterator[Claim]:
    seen = set()
    for kind, choices in _kinds():
        known = (kind.HEADS * kind.PARTS, kind.TOKENS, kind.PASSES, kind.PROGRAMS, *vars(choices).values())
        if known not in seen:
            seen.add(known)
            for step, given in product(range(kind.PASSES), ("head", "row")):
                if step * (choices.BLOCK_ROWS // kind.TOKENS) < known[0]:  # a later pass has no rows
                    yield partial(_rows, K=kind, C=choices, step=step, given=given)


STATEMENTS: dict[str, Any] = {
    "programs are a partition of the blocks, in every order": [
        partial(_programs, order=order, head_blocks=n) for order in ("heads", "tokens", "batches") for n in range(1, 65)
    ],
    "blocks are a partition of the tokens": [partial(_tokens, block_tokens=n) for n in BLOCKS],
    "flat rows are a partition of the accesses of heads": _flat_claims,
    "the rows of a paged cache are a partition of the heads of tokens": _row_claims,
}
