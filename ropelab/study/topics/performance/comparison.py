"""Tables out of the records of the benchmark: who reaches what, who is faster, who was not compared."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from ropelab.bench import rows
from ropelab.bench.copies import PREFIX
from ropelab.bench.records import Record

OURS, OURS_IN_PLACE = "ropelab", "ropelab in place"
CELL = ["cell", "layout", "direction"]


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of implementations, copies left out, that were right and were timed."""
    found = rows.timed(frame)
    return found[~found.contender.str.startswith(PREFIX)]


def named_cells(frame: pd.DataFrame) -> pd.Series:
    """The cells' names, with what a record may say beside them: a format other than bshd, q and k as views of qkv."""
    names = frame.cell
    for column, usual in (("seq_format", "bshd"), ("storage", "contiguous")):
        if column in frame:
            names = names.where(frame[column] == usual, names + ", " + frame[column])
    return names


def fractions(frame: pd.DataFrame) -> pd.DataFrame:
    """Speed as a fraction of the best copy: a row per layout, direction and cell, a column per contender."""
    table = timed(frame).pivot_table(
        index=["layout", "direction", "cell"], columns="contender", values="fraction_of_copy", sort=False
    )
    return table[[OURS, *(name for name in table if name != OURS)]]


def against_peers(frame: pd.DataFrame) -> pd.DataFrame:
    """Every peer against ropelab in the same cell: the cell, contender, median_us, in_place, slower.

    ``slower`` is the peer's time over ours: below 1 the peer is faster. In-place peers are held against our
    in-place call where there is one, the others against the out-of-place call.
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
    """A cell of a table: counts and words as they are, other numbers to four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def not_compared(found: Iterable[Record]) -> pd.DataFrame:
    """What was not timed and why: columns study, contender, reason, rows (how many)."""
    reasons = []
    for record in found:
        untimed = record.frame[~rows.is_right(record.frame)]
        outcomes = zip(untimed.contender, untimed.status, strict=True)
        reasons += [(record.study, *pair) for pair in (*record.provenance["not_run"].items(), *outcomes)]
    frame = pd.DataFrame(reasons, columns=["study", "contender", "reason"])
    frame["reason"] = frame.reason.str.replace(r"\d+\.\d+(e[-+]\d+)?", "…", regex=True)
    return frame.groupby(["study", "contender", "reason"], sort=False).size().rename("rows").reset_index()
