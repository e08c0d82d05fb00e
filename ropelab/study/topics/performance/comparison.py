"""Make tables of the benchmark's records: fractions of the copy, ratios to peers, missing contenders."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from ropelab.bench import rows
from ropelab.bench.copies import PREFIX
from ropelab.bench.records import Record

OURS, OURS_IN_PLACE = "ropelab", "ropelab in place"
CELL = ["cell", "layout", "direction"]


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of implementations that were right and were timed, without the copies."""
    found = rows.timed(frame)
    return found[~found.contender.str.startswith(PREFIX)]


def named_cells(frame: pd.DataFrame) -> pd.Series:
    """The name of each cell, with the format if it is not bshd, and with the storage if it is not contiguous."""
    names = frame.cell
    for column, usual in (("seq_format", "bshd"), ("storage", "contiguous")):
        if column in frame:
            names = names.where(frame[column] == usual, names + ", " + frame[column])
    return names


def fractions(frame: pd.DataFrame) -> pd.DataFrame:
    """The speed as a fraction of the best copy: a row for each layout, direction and cell, a column per contender."""
    table = timed(frame).pivot_table(
        index=["layout", "direction", "cell"], columns="contender", values="fraction_of_copy", sort=False
    )
    return table[[OURS, *(name for name in table if name != OURS)]]


def against_peers(frame: pd.DataFrame) -> pd.DataFrame:
    """Every peer against ropelab in the same cell: the cell, contender, median_us, in_place, slower.

    ``slower`` is the peer's time over ours, so below 1 the peer is faster. A peer that works in place is compared with
    our call in place, if the record has this call. Every other peer is compared with our call into new tensors.
    """
    times = timed(frame)
    ours = times[times.contender == OURS].set_index(CELL).median_us
    in_place = times[times.contender == OURS_IN_PLACE].set_index(CELL).median_us
    in_place = in_place.reindex(ours.index).fillna(ours)
    peers = times[~times.contender.isin((OURS, OURS_IN_PLACE))].set_index(CELL)
    own = ours.reindex(peers.index).where(~peers.in_place, in_place.reindex(peers.index))
    peers["slower"] = peers.median_us / own
    return peers[["contender", "median_us", "in_place", "slower"]].reset_index()


def number(value: object) -> str:
    """The text of a cell of a table: counts and words stay as they are, other numbers have four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def not_compared(found: Iterable[Record]) -> pd.DataFrame:
    """The contenders that were not timed: columns study, contender, reason, rows (the number of rows)."""
    reasons = []
    for record in found:
        untimed = record.frame[~rows.is_right(record.frame)]
        outcomes = zip(untimed.contender, untimed.status, strict=True)
        reasons += [(record.study, *pair) for pair in (*record.provenance["not_run"].items(), *outcomes)]
    frame = pd.DataFrame(reasons, columns=["study", "contender", "reason"])
    frame["reason"] = frame.reason.str.replace(r"\d+\.\d+(e[-+]\d+)?", "…", regex=True)
    return frame.groupby(["study", "contender", "reason"], sort=False).size().rename("rows").reset_index()
