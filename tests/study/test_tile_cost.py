"""The choice of a tile: candidates, the terms of the estimate, and weights that follow from the committed times."""

from dataclasses import astuple, fields, replace

import pytest

from ropelab.bench import tile_fit
from ropelab.bench.model_cells import cells, on_meta
from ropelab.bench.model_shapes import halves
from ropelab.kernels import HAS_TRITON, Rotation

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ropelab.bench.tile_regret import swept, tile_of_row, work_of
from ropelab.kernels import tile_cost
from ropelab.kernels.tiles import FlatTile, Tile, Work, candidates

WORK = Work(Rotation(128), (28, 4), 1, 4096, "heads", 0, False, 2, 4, False, False)
TIMES = tile_fit.read()


def test_the_committed_times_yield_the_weights():
    fitted, held_out = (TIMES[TIMES.model.isin(half)] for half in halves())
    weights = tile_fit.fit(fitted)
    assert astuple(weights) == pytest.approx(astuple(tile_cost.WEIGHTS), rel=5e-3)
    assert all(weight >= 0 for weight in astuple(weights))
    assert (
        not set(fitted.number) & set(held_out.number) and min(fitted.number.nunique(), held_out.number.nunique()) > 50
    )
    for part in (fitted, held_out):
        # A choice by chance loses more than the estimate's choice, on average and in the worst call.
        slower = part.median_us / part.groupby("number").median_us.transform("min") - 1
        found = tile_fit.regret(part, weights)
        assert found.mean() < slower.groupby(part.number).mean().mean() and found.max() < slower.max()


def test_the_times_are_those_of_the_candidates_of_the_cells():
    drawn = tile_fit.numbered()
    assert list(dict.fromkeys(TIMES.number)) == [number for number, _ in swept()]
    for number, rows in TIMES.groupby("number"):
        tried = {tile_of_row(row) for row in rows.to_dict("records")}
        known = set(candidates(work_of(on_meta(drawn[number]))))
        assert tried == known or (drawn[number].converts and tried < known), number


def test_terms_count_what_they_say():
    full = tile_cost.terms(WORK, FlatTile(128, 4, pairs_per_access=8))
    assert full.idle == 0 and full.late == full.registers == 0
    # Two programs of 16 heads take the 28 heads of q, so 4 of 36 places have no pair.
    whole = tile_cost.terms(WORK, Tile(1, 16, 4, pairs_per_access=8))
    assert whole.idle > 0 and whole.instructions > full.instructions
    partial = replace(WORK, rotation=Rotation(64), rest=64)
    assert tile_cost.terms(partial, Tile(1, 16, 4)).late > 0 == tile_cost.terms(partial, FlatTile(128, 4)).late
    assert tile_cost.terms(replace(partial, in_place=True, positions=True), Tile(1, 16, 4)).late == 0
    waiting = replace(WORK, positions=True)
    first, last = (tile_cost.terms(waiting, FlatTile(128, 4, heads_first=first)) for first in (True, False))
    assert last.in_flight > first.in_flight
    # Eight pairs of a thread are loaded before its position at no cost; the pairs of k after them cost.
    assert tile_cost.terms(waiting, Tile(1, 16, 4, pairs_per_access=8, heads_first=True)).behind > first.behind == 0
    assert tile_cost.terms(waiting, Tile(1, 16, 4, pairs_per_access=8)).behind == 0
    few = replace(WORK, seq_len=1)
    assert tile_cost.terms(few, Tile(1, 1, 1)).held > tile_cost.terms(WORK, Tile(1, 1, 1)).held


@pytest.mark.parametrize(
    "change",
    [{}, {"rotation": Rotation(72)}, {"heads": (71, 1)}, {"innermost": "tokens"}, {"positions": True}, {"seq_len": 1},
     {"rotation": Rotation(64), "rest": 64}, {"itemsize": 8, "column_bytes": 8}, {"heads": (1,), "bare_q": True},
     {"heads": (0, 4)}, {"rotation": Rotation(2)}],
    ids=str,
)  # fmt: skip
def test_every_call_has_a_tile(change):
    work = replace(WORK, **change)
    tile = tile_cost.choose(work)
    assert tile is tile_cost.choose(work)
    assert tile in candidates(work)
    assert tile_cost.cost(work, tile) == min(tile_cost.cost(work, other) for other in candidates(work))
    if work.itemsize == 8:
        assert isinstance(tile, Tile)


def test_every_candidate_of_every_cell_has_finite_terms():
    for cell in cells(100):
        work = work_of(on_meta(cell))
        for tile in () if cell.table_free else candidates(work):
            found = tile_cost.terms(work, tile)
            assert all(0 <= getattr(found, field.name) < 1e4 for field in fields(found)), (cell, tile, found)
