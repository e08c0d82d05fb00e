"""Make tables of the benchmark's records: timed rows, named cells, ratios to peers."""

from __future__ import annotations

import pandas as pd

from ropelab.bench import rows
from ropelab.bench.rows import are_copies

OURS, OURS_IN_PLACE = "ropelab", "ropelab in place"
CELL = ["cell", "layout", "direction"]


def timed(frame: pd.DataFrame, *needed: str) -> pd.DataFrame:
    """The rows of implementations that were right and were timed, without the copies; see `rows.timed`."""
    found = rows.timed(frame, *needed)
    return found[~are_copies(found)]


def named_cells(frame: pd.DataFrame) -> pd.Series:
    """The name of each cell, with the format if it is not bshd, and with the storage if it is not contiguous."""
    names = frame.cell
    for column, usual in (("seq_format", "bshd"), ("storage", "contiguous")):
        if column in frame:
            names = names.where(frame[column] == usual, names + ", " + frame[column])
    return names


def against_peers(frame: pd.DataFrame) -> pd.DataFrame:
    """Every peer against ropelab in the same cell: the cell, contender, median_us, in_place, slower.

    ``slower`` is the peer's time over ours, so below 1 the peer is faster. A peer that works in place is compared with
    our call in place, if the record has this call. Every other peer is compared with our call into new tensors.
    """
    times = timed(frame, OURS)
    ours = times[times.contender == OURS].set_index(CELL).median_us
    in_place = times[times.contender == OURS_IN_PLACE].set_index(CELL).median_us
    in_place = in_place.reindex(ours.index).fillna(ours)
    peers = times[~times.contender.isin((OURS, OURS_IN_PLACE))].set_index(CELL)
    own = ours.reindex(peers.index).where(~peers.in_place, in_place.reindex(peers.index))
    peers["slower"] = peers.median_us / own
    return peers[["contender", "median_us", "in_place", "slower"]].reset_index()


COPY = "best copy"


def times_beside_copy(frame: pd.DataFrame, cell: list[str]) -> pd.DataFrame:
    """Microseconds: a row for each ``cell``, a column for each contender and one for the best copy."""
    found = rows.timed(frame)
    found = found.assign(contender=found.contender.mask(are_copies(found), COPY))
    return found.pivot_table(index=cell, columns="contender", values="median_us", aggfunc="min", sort=False)


def number(value: object) -> str:
    """The text of a cell of a table: counts and words stay as they are, other numbers have at least four digits."""
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}") if isinstance(value, float) else str(value)
