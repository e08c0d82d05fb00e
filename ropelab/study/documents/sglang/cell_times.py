"""Read the times of contenders by cell, with their intervals, from the records for the rules.

A record that lacks a cell of a rule is no evidence: the functions then return an empty result.
"""

from collections.abc import Sequence

import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.bench.workloads import Workload
from ropelab.study.documents.sglang.contenders import (
    FLASH,
    FLASH_PACKED,
    FLASHINFER,
    FLASHINFER_NEWEST,
    REAL_VLLM,
    SGL_KERNEL,
)
from ropelab.study.documents.sglang.measure import first_cells
from ropelab.study.engine import noise
from ropelab.study.engine.noise import Interval

PACKAGES = (FLASH, FLASH_PACKED, FLASHINFER, FLASHINFER_NEWEST, SGL_KERNEL, REAL_VLLM)
"""Contenders that may fail in some cells."""


def ran(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows without the contenders that are not installed."""
    return frame[~frame.status.str.startswith("not run")]


def rows_of(frame: pd.DataFrame, cells: Sequence[Workload], contender: str) -> pd.DataFrame:
    """The contender's rows by cell and layout, in the order of the cells; empty if a row is missing or was not run."""
    keys = [(cell.name, cell.layout) for cell in cells]
    rows = ran(frame[frame.contender == contender]).set_index(["cell", "layout"])
    return rows.loc[keys] if rows.index.is_unique and set(keys) <= set(rows.index) else rows.iloc[:0]


def times_of(frame: pd.DataFrame, cells: Sequence[Workload], *contenders: str) -> pd.DataFrame:
    """Intervals of microseconds: a row for each cell and layout, a column for each contender.

    Cells in which a package failed are left out. The table is empty if a cell is missing for a contender, or if a
    contender that is no package failed in a cell.
    """
    columns = {}
    for name in contenders:
        rows = rows_of(frame, cells, name)
        right = is_right(rows)
        if rows.empty or not (name in PACKAGES or right.all()):
            return pd.DataFrame()
        columns[name] = pd.Series([noise.time(row) for _, row in rows[right].iterrows()], rows.index[right], object)
    return pd.DataFrame(columns).dropna()


def ratios_of(frame: pd.DataFrame, cells: Sequence[Workload], slower: str, faster: str) -> list[Interval]:
    """The time of the contender ``slower`` over the time of ``faster`` in each cell."""
    times = times_of(frame, cells, slower, faster)
    return list(times[slower] / times[faster]) if len(times) else []


def ratio(rows: pd.DataFrame, slower: tuple, faster: tuple) -> Interval:
    """The time of the row ``slower`` over the time of the row ``faster``; both are labels of rows."""
    above, below = (noise.time(rows.loc[[label]].iloc[0]) for label in (slower, faster))
    return above / below


def by_configuration(times: pd.DataFrame, slower: str, faster: str) -> list[Interval]:
    """The mean time of ``slower`` over the mean time of ``faster``, for each configuration of the first grid.

    The means are over the lengths of a configuration.
    """
    of = {cell.name: (cell.batch, cell.q_heads, cell.k_heads, cell.head_dim) for cell in first_cells()}
    groups = times.groupby(times.index.get_level_values("cell").map(of), sort=False)
    return [noise.mean(list(rows[slower])) / noise.mean(list(rows[faster])) for _, rows in groups]
