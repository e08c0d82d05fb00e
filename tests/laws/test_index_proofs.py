"""Z3 proves the statements about indices of the kernels' own functions, and refutes them where an error is planted."""

import pytest

pytest.importorskip("z3")

from ropelab.kernels import (  # noqa: E402
    addressing,
    cache_rows_triton,
    place_triton,
    positions_torch,
    positions_triton,
    rotate_triton,
    stages_triton,
)
from ropelab.study.topics.proofs import indices  # noqa: E402
from ropelab.study.topics.proofs.planted import altered  # noqa: E402


@pytest.mark.parametrize("statement", indices.STATEMENTS)
def test_the_statement_is_proved(statement):
    found = indices.proof(statement)
    assert found.outcome == "proved", found


PLANTED = [
    (stages_triton.lane_feature, "exists = pair + MEMBER * PAIRS, pair < PAIRS", "exists = pair + MEMBER * PAIRS, pair <= PAIRS", "pairs"),
    (stages_triton.lane_feature, "lane = 2 * pair + MEMBER", "lane = 2 * pair + MEMBER + 1", "pairs"),
    (stages_triton.lane_feature, "(C.LANE_DIM - C.ROTARY_DIM + 1) // 2", "(C.LANE_DIM - C.ROTARY_DIM) // 2", "pairs"),
    (stages_triton._feature_in, "lane < C.ROTARY_DIM + C.FIRST", "lane <= C.ROTARY_DIM + C.FIRST", "pairs"),
    (stages_triton.lane_feature, "PIECE * C.BLOCK_PAIRS", "PIECE * (C.BLOCK_PAIRS - 1)", "pieces"),
    (stages_triton.lane_feature, "lane = 2 * pair + MEMBER", "lane = 2 * pair + 1 - MEMBER", "layouts"),
    (stages_triton.members_of, "2 * C.GROUP if C.FIRST % (2 * C.GROUP", "2 * C.GROUP if C.FIRST % (1 * C.GROUP", "hints"),
    (rotate_triton._members_of_accesses, "lane >= C.BEFORE", "lane > C.BEFORE", "accesses"),
    (rotate_triton._members_of_accesses, "(C.PER_HEAD - ROTATING) * C.BLOCK_PAIRS", "(C.PER_HEAD - ROTATING - 1) * C.BLOCK_PAIRS", "accesses"),
    (place_triton.blocks_of_program, "x % HEAD_BLOCKS, y, x // HEAD_BLOCKS", "x % HEAD_BLOCKS, y, x // (HEAD_BLOCKS + 1)", "programs"),
    (addressing.launch_grid, "(batch * head_blocks, token_blocks, 1)", "(batch * head_blocks, token_blocks - 1, 1)", "programs"),
    (place_triton.block_of_tokens, "first + distance < seq_len", "first + distance <= seq_len", "blocks"),
    (place_triton._terms, "tokens.first.to(tl.int64) * strides[1]", "tokens.first * strides[1]", "offsets"),
    (addressing._max_tile_offset, "2 * x.shape[2] * x.stride(2)", "x.stride(2)", "offsets"),
    (place_triton.cached_at, "slot >= 0", "slot > 0", "slots"),
    (place_triton.cached_at, "page < pages", "page <= pages", "slots"),
    (place_triton.cached_at, "exists &= slot < 2**31", "exists &= slot < 2**32", "slots"),
    (rotate_triton._flat_rows, "in_line = in_line % C.ACCESSES_PER_LINE", "in_line = in_line % (C.ACCESSES_PER_LINE + 1)", "flat"),
    (rotate_triton._flat_rows, "in_line // C.PER_HEAD", "(in_line + 1) // C.PER_HEAD", "flat"),
    (cache_rows_triton.rows_of_program, "head < HEADS", "head <= HEADS", "the rows"),
    (cache_rows_triton.rows_of_program, "* K.PASSES + PASS)", "* K.PASSES + PASS + 1)", "the rows"),
    (positions_torch.Shard.in_sequence, "2 * self.cp_size - 2", "2 * self.cp_size - 1", "zigzag"),
    (positions_torch.Shard.in_sequence, "local < half", "local <= half", "zigzag"),
    (positions_triton._packed_positions_kernel, "2 * CP_SIZE - 2 - cp_rank", "2 * CP_SIZE - 1 - cp_rank", "packed"),
    (positions_triton._packed_positions_kernel, "is_token) <= token", "is_token) < token", "packed"),
    (place_triton.row_of, "magnitude < table_rows", "magnitude <= table_rows", "a position"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "old", "new", "words"), PLANTED, ids=[f"{p[3]}: {p[2]}" for p in PLANTED])
def test_a_planted_error_is_refuted(function, old, new, words):
    (statement,) = (one for one in indices.STATEMENTS if one.startswith(words))
    wrong = altered(function, old, new)
    found = indices.proof(statement, {wrong.__name__: wrong})
    assert found.outcome == "refuted" and found.refutation, found


def test_a_statement_of_nothing_is_not_proved():
    from ropelab.study.topics.proofs.symbolic import prove

    def empty(m):
        m.assume(m.integer("n") < m.integer("n", 3, 3))
        return True

    assert prove("of no number", [empty]).outcome == "undecided"
