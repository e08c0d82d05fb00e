"""Time every candidate tile in a part of the cells of `model_heads`, to judge the chosen tile."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import pandas as pd
import torch

from ropelab.bench import compiling, timing
from ropelab.bench.cells import progress
from ropelab.bench.model_cells import Call, Cell, cells, on_meta, packed_prefills, prefills
from ropelab.bench.model_heads import against_copies, planned
from ropelab.bench.operation import tidy
from ropelab.kernels import tile_of
from ropelab.kernels.tiles import FlatTile, Tile, candidates

DRAWN, CELLS = 220, 110
"""The number of drawn cells, and the number of drawn cells with tables that are timed, beside all prefills."""
_FIELDS = tuple(
    name for name in dict.fromkeys(field.name for kind in (Tile, FlatTile) for field in fields(kind))
    if name != "shares_columns"
)  # fmt: skip
"""The recorded attributes of tiles. No cell has several axes, so no program shares columns."""


def tile_regret(*, smoke: bool = False) -> pd.DataFrame:
    """Time every candidate tile of the cells that have tables.

    Columns: number (the index of the cell in `numbered`), the columns of the cell, kind ("flat" or "whole"), the
        attributes of both kinds of tiles, chosen, same_bits, the counters of `compiling.counters`, status, median_us,
        q20_us, q80_us, samples, fraction_of_copy, copy_us, places_us.
    """
    tried = [(number, cell, candidates(work_of(on_meta(cell)))) for number, cell in swept()[: 1 if smoke else None]]
    compiling.ahead((cell, tiles) for _, cell, tiles in tried)
    if timing.is_stopped():
        tried = tried[:1]
    tried = progress(tried, lambda item: item[1].workload.description)
    rounds = 3 if smoke else 9
    return pd.concat([sweep(*item, rounds=rounds).assign(number=n) for n, *item in tried], ignore_index=True)


def numbered() -> list[Cell]:
    """The cells from which the study takes its cells: drawn cells, then the prefills."""
    return [*cells(DRAWN), *prefills(), *packed_prefills()]


def swept() -> list[tuple[int, Cell]]:
    """The cells of the study, each with its index in `numbered`."""
    found = list(enumerate(numbered()))
    drawn = [(number, cell) for number, cell in found[:DRAWN] if not cell.table_free]
    return drawn[:CELLS] + found[DRAWN:]


def tile_of_row(row: Mapping[str, Any]) -> Tile | FlatTile:
    """The tile of a row of the study's table."""
    kind = FlatTile if row["kind"] == "flat" else Tile
    given = {field.name: row[field.name] for field in fields(kind) if field.name in _FIELDS}
    whole = {name: int(value) for name, value in given.items() if isinstance(value, float) and value == value}
    nothing = {name: None for name, value in given.items() if value != value}
    return kind(**given | whole | nothing)


def work_of(call: Call):
    return tile_of.work_of(call.tensors, call.rotation)


def sweep(cell: Cell, tiles: Sequence[Tile | FlatTile], rounds: int) -> pd.DataFrame:
    """Time the tiles and a few copies. Every result is compared with the result of the first tile, bit for bit."""
    sets = cell.sets(timing.cache_bytes())
    calls = [Call(cell, buffers) for buffers in sets]
    by_name = {str(tile): tile for tile in (*tiles, calls[0].tile)}
    first, *others = (_result(calls[0], tile) for tile in by_name.values())
    same = dict(zip(by_name, [True, *(_same(first, other) for other in others)], strict=True))
    frame = against_copies({name: partial(planned, calls, tile) for name, tile in by_name.items()}, calls, rounds)
    found = [by_name[name] for name in frame.contender]
    counters = [compiling.counters(calls[0], tile) for tile in found] if torch.cuda.is_available() else []
    frame = frame.assign(
        kind=["flat" if isinstance(tile, FlatTile) else "whole" for tile in found],
        **{field: [getattr(tile, field, None) for tile in found] for field in _FIELDS},
        chosen=[tile == calls[0].tile for tile in found],
        same_bits=frame.contender.map(same),
        **pd.DataFrame(counters, index=frame.index if counters else None),
    )
    return tidy(frame, cell.columns).drop(columns="contender")


def _result(call: Call, tile: Tile | FlatTile) -> list[torch.Tensor]:
    other = call.copied()
    return other.rotate(other.plan(tile))


def _same(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(expected, actual, strict=True))
