"""What the records say: tables that the rules judge by and the figures draw."""

import numpy as np
import pandas as pd

from ropelab.study.transformer_engine.dispatch import HEURISTICS, LEGACY, LINEAR
from ropelab.study.transformer_engine.layer import ALONE, LAYER, WITHOUT
from ropelab.study.transformer_engine.measure import GIVEN, NAMES

CELL = ["part", "kind", "n_seqs", "longest", "tokens", "freqs_len", "cp_size", "cp_rank"]
SLOWER = 1.10
"""A grid counts as the wrong choice if it takes 10 % longer than the other: replays of one graph differ by 1 or 2 %."""


def times(kernels: pd.DataFrame, step: str = GIVEN) -> pd.DataFrame:
    """Microseconds by cell (rows) and contender, where it was right; and its dead blocks."""
    rows = kernels[(kernels.status == "ok") & (kernels.step == step)]
    table = rows.pivot_table(index=CELL, columns="contender", values="median_us", sort=False).reset_index()
    return table.assign(dead_blocks=table.freqs_len * table.n_seqs - table.tokens)


def dead_block_fit(kernels: pd.DataFrame) -> pd.DataFrame:
    """The legacy grid's time beyond the token-linear one's, against its dead blocks: cells of one rank.

    Columns of ``times``, and beyond_us, ns_per_dead_block (a pass; forward and backward are two), fitted_us: what a
    time for each dead block, the same in all cells, and that of the token-linear grid make together.
    """
    table = times(kernels)
    legacy, linear = (NAMES[strategy] for strategy in (LEGACY, LINEAR))
    if not {legacy, linear} <= set(table):
        return pd.DataFrame()
    table = table[(table.cp_size == 1)].dropna(subset=[legacy, linear])
    beyond = table[legacy] - table[linear]
    many = table.dead_blocks > 4 * table.tokens  # below, the difference of the live blocks counts as much
    if not many.any():
        return pd.DataFrame()
    each = np.median(beyond[many] / table.dead_blocks[many])
    return table.assign(
        beyond_us=beyond,
        ns_per_dead_block=(1000 * beyond / table.dead_blocks / 2).where(many),
        fitted_us=table[linear] + each * table.dead_blocks,
    )


def choices(kernels: pd.DataFrame) -> pd.DataFrame:
    """What each heuristic would take in every cell, and how much longer that is than the other grid.

    Columns of ``times``, and for each heuristic its choice and ``<name>_costs``: the time of the choice over the best.
    """
    table = times(kernels)
    wanted = [NAMES[LEGACY], NAMES[LINEAR]]
    if not set(wanted) <= set(table):
        return pd.DataFrame()
    table = table.dropna(subset=wanted).reset_index(drop=True)
    best = table[wanted].min(axis=1)
    for name, heuristic in HEURISTICS.items():
        arguments = zip(table.n_seqs, table.freqs_len, table.tokens, table.cp_size, strict=True)
        chosen = [heuristic(*map(int, each)) for each in arguments]
        taken = [table.at[i, NAMES[strategy]] for i, strategy in enumerate(chosen)]
        table[name], table[f"{name}_costs"] = chosen, taken / best
    return table


def missed(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The cells of ``choices`` in which a heuristic takes the slower grid, worst first."""
    return table[table[f"{name}_costs"] > SLOWER].sort_values(f"{name}_costs", ascending=False)


def shares(layer: pd.DataFrame) -> pd.DataFrame:
    """By n_seqs and contender: layer_us, alone_us, share (q and k alone over the layer, as the document has it) and
    added (what the layer takes beyond the one without a rotation, over the layer)."""
    rows = layer[layer.status == "ok"]
    table = rows.pivot_table(index=["n_seqs", "contender"], columns="what", values="median_us")
    if not {LAYER, ALONE} <= set(table):
        return pd.DataFrame(columns=["n_seqs", "contender", "layer_us", "alone_us", "share", "added"])
    without = (
        table[LAYER].xs(WITHOUT, level="contender") if WITHOUT in rows.contender.values else pd.Series(dtype=float)
    )
    table = table.rename(columns={LAYER: "layer_us", ALONE: "alone_us"}).reset_index()
    table["share"] = table.alone_us / table.layer_us
    table["added"] = 1 - table.n_seqs.map(without) / table.layer_us
    return table.rename_axis(columns=None)
