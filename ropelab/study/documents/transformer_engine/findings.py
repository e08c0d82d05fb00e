"""Turn the records into the tables behind the rules and the chapter, and words them.

``OLD`` and ``NEW`` are the grids of the pair that `grids.chosen` finds in the record.
"""

import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.study.documents.transformer_engine.dispatch import HEURISTICS, LINEAR
from ropelab.study.documents.transformer_engine.grids import (
    FORCED,
    GIVEN,
    NEW,
    OLD,
    PACKAGES,
    canonical,
    chosen,
)
from ropelab.study.engine import noise
from ropelab.study.engine.judging import above
from ropelab.study.engine.verdict import Basis
from ropelab.study.engine.words import value_range

CELL = ["part", "kind", "n_seqs", "longest", "tokens", "freqs_len", "cp_size", "cp_rank"]


def times(kernels: pd.DataFrame, step: str = GIVEN) -> pd.DataFrame:
    """Microseconds by cell (rows) and contender (columns), NaN where it was not right; and the cell's dead blocks."""
    return _by_cell(kernels, step, "median_us")


def intervals(kernels: pd.DataFrame) -> pd.DataFrame:
    """The table of ``times`` with the interval of each time in place of the median."""
    return _by_cell(kernels.assign(interval=kernels[is_right(kernels)].apply(noise.time, axis=1)), GIVEN, "interval")


def _by_cell(kernels: pd.DataFrame, step: str, values: str) -> pd.DataFrame:
    kernels = canonical(kernels)
    rows = kernels[is_right(kernels) & (kernels.step == step)]
    table = rows.pivot_table(index=CELL, columns="contender", values=values, aggfunc="first", sort=False)
    names = dict.fromkeys([OLD, NEW, "ropelab", *table])
    table = table.reindex(columns=list(names)).rename_axis(columns=None).reset_index()
    return table.assign(dead_blocks=table.freqs_len * table.n_seqs - table.tokens)


def choices(kernels: pd.DataFrame) -> pd.DataFrame:
    """The grid that each heuristic would take in every cell, and how much longer it takes than the faster grid.

    Columns, besides the columns of ``times``, for each heuristic:
        <name>: its choice.
        <name>_costs: the time of the choice over the time of the faster grid.
        <name>_slower: whether the choice is slower by more than the noise of both times.
    """
    kernels = canonical(kernels, FORCED)
    both = times(kernels)[[OLD, NEW]].notna().all(axis=1)
    table = times(kernels)[both].reset_index(drop=True)
    limits = intervals(kernels)[both].reset_index(drop=True)
    best = table[[OLD, NEW]].min(axis=1)
    for name, heuristic in HEURISTICS.items():
        arguments = zip(table.n_seqs, table.freqs_len, table.tokens, table.cp_size, strict=True)
        strategies = [heuristic(*map(int, each)) for each in arguments]
        taken = [table.at[i, grid_of(strategy)] for i, strategy in enumerate(strategies)]
        ratios = (limits[OLD] / limits[NEW], limits[NEW] / limits[OLD])
        over = [ratios[strategy == LINEAR][i] for i, strategy in enumerate(strategies)]
        table[name], table[f"{name}_costs"] = strategies, taken / best
        table[f"{name}_slower"] = [above(ratio, 1.0) is True for ratio in over]
    return table


def grid_of(strategy: str) -> str:
    """The grid of a strategy, `NEW` or `OLD`."""
    return NEW if strategy == LINEAR else OLD


def missed(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The cells of ``choices`` in which a heuristic takes the slower grid, worst first."""
    return table[table[f"{name}_slower"]].sort_values(f"{name}_costs", ascending=False)


def missed_words(table: pd.DataFrame, name: str) -> str:
    """The misses of a heuristic in words: ``"takes the slower grid in 3 of 9 cells, at worst 2.31 times as long"``."""
    lost = missed(table, name)
    worst = f", at worst {lost[f'{name}_costs'].iloc[0]:.2f} times as long" if len(lost) else ""
    return f"takes the slower grid in {len(lost)} of {len(table)} cells{worst}"


def whose(kernels: pd.DataFrame) -> str:
    """The words that name the source of the grids in a record."""
    pair = chosen(kernels)
    if pair == PACKAGES:
        return "TransformerEngine 2.18 has the old grid, and the new grid is the choice of TransformerEngine 2.20"
    return (
        "both grids are our models"
        if pair.basis is Basis.MODEL
        else f"both grids come from the file of the {pair.words}"
    )


def beside_the_packages(table: pd.DataFrame) -> str:
    """The times of TransformerEngine over the times of the grids, where both were timed, else nothing.

    2.18 has the old grid alone. 2.20 has the grid after the review, and the old grid.
    """
    said = []
    for name, grids in ((PACKAGES.old, [OLD]), (PACKAGES.new, [OLD, NEW])):
        if name in table and {OLD, NEW} <= set(table):
            ratio = (table[name] / table[grids].min(axis=1)).dropna()
            beside = "the old grid" if grids == [OLD] else "the faster grid"
            if len(ratio):
                said.append(f"{name} takes {value_range(ratio)} of the time of {beside}")
    return "; ".join(said)
