"""Turn the records into the tables behind the rules and the figures, and words them.

``OLD`` and ``NEW`` are the grids of the pair that `grids.chosen` finds in the record.
"""

import numpy as np
import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.study.documents.transformer_engine.dispatch import HEURISTICS, LINEAR
from ropelab.study.documents.transformer_engine.grids import (
    ALONE,
    FORCED,
    GIVEN,
    INTEROP,
    LAYER,
    NEW,
    OLD,
    PACKAGES,
    SUMMED,
    WITHOUT,
    canonical,
    chosen,
)
from ropelab.study.engine import noise
from ropelab.study.engine.judging import above
from ropelab.study.engine.verdict import Basis
from ropelab.study.engine.words import followed, value_range
from ropelab.study.plots.drawing import label

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


def dead_block_fit(kernels: pd.DataFrame) -> pd.DataFrame:
    """The legacy grid's time beyond the time of its live blocks, for each number of dead blocks, in cells of one rank.

    The time of the live blocks is the grid's own time in the fastest cell with hardly any dead blocks. The token-linear
    grid cannot give this time, because its blocks also search.

    Columns, besides the columns of ``times``:
        beyond_us: the time beyond the live blocks.
        ns_per_dead_block: in a pass; forward and backward are two passes.
        fitted_us: the time of the live blocks, and a time for each dead block that is the same in all cells.
    """
    table = times(kernels).query("cp_size == 1").dropna(subset=[OLD])
    alive, many = table.dead_blocks <= table.tokens / 8, table.dead_blocks > 4 * table.tokens
    if not alive.any() or not many.any():
        return pd.DataFrame()
    live = table[OLD][alive].min()
    beyond = table[OLD] - live
    each = np.median(beyond[many] / table.dead_blocks[many])
    return table.assign(
        beyond_us=beyond,
        ns_per_dead_block=(1000 * beyond / table.dead_blocks / 2).where(many),
        fitted_us=live + each * table.dead_blocks,
    )


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


def equal_bits(parity: pd.DataFrame) -> pd.DataFrame:
    """The cases whose result and gradient have the same bits, ``"72 of 72"``, by pair of grids, dtype and cp_size."""
    keys = [parity.grids, parity.dtype, parity.cp_size]
    equal = (parity.same_result & parity.same_gradient).groupby(keys, sort=False)
    return (equal.sum().astype(str) + " of " + equal.size().astype(str)).unstack()


def shares(layer: pd.DataFrame) -> pd.DataFrame:
    """The share of the rotation in the layer, by n_seqs and contender.

    Columns:
        layer_us, alone_us: the times of the layer, and of the rotation of q and k alone.
        share: alone_us over layer_us, as in the document.
        added: the time of the layer beyond the layer without a rotation, over layer_us.
    """
    layer = canonical(layer)
    rows = layer[is_right(layer)]
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


IN_WORDS = {
    "dead_blocks": "empty blocks", "ns_per_dead_block": "ns for each empty block", "first_costs": "time over the best",
    "merged_costs": "time over the best", "given_us": "given cotangent, µs", "summed_us": "with sum(), µs",
    "first": "grid taken", "merged": "grid taken", "freqs_len": "rows of the table", "cp_rank": "rank",
    "cp_size": "ranks", "longest": "longest sequence", "kind": "lengths",
    "added_us": "added, µs", "added": "added share", "layer_us": "layer, µs", "alone_us": "q and k alone, µs",
}  # fmt: skip
"""Names of columns in the words of the chapter."""


def costly(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The columns of `missed` that name the packing, the choice of the heuristic and its cost."""
    found = missed(table, name)[[*CELL[1:], name, f"{name}_costs"]]
    return found.replace({name: {"legacy": "old grid", "linear": "new grid"}}).rename(columns=IN_WORDS)


def layer_spans(layer: pd.DataFrame) -> pd.DataFrame:
    """The whole layer in milliseconds: columns n_seqs, contender, least, middle, most (20th, 50th, 80th percentile)."""
    layer = canonical(layer)
    whole = layer[(layer.what == LAYER) & is_right(layer)]
    ms = whole[["q20_us", "median_us", "q80_us"]].div(1000).set_axis(["least", "middle", "most"], axis=1)
    return whole[["n_seqs", "contender"]].join(ms)


def sum_effects(kernels: pd.DataFrame) -> pd.DataFrame:
    """The effect of the document's ``out.sum()``, and of a backward from its gradient, on the times in table B.

    Columns contender, given_us and summed_us (medians over the packings), added_us, and added (the median of the added
    time over the time from a given cotangent).
    """
    given, summed = (times(kernels, step).query("part == 'table B'").set_index("n_seqs") for step in (GIVEN, SUMMED))
    rows = []
    for name in dict.fromkeys(canonical(kernels).contender):
        if name in given and name in summed:
            pair = pd.DataFrame({"given": given[name], "summed": summed[name]}).dropna()
            added = pair.summed - pair.given
            rows.append({"contender": name, "given_us": pair.given.median(), "summed_us": pair.summed.median(),
                         "added_us": added.median(), "added": (added / pair.given).median()})  # fmt: skip
    return pd.DataFrame(rows, columns=["contender", "given_us", "summed_us", "added_us", "added"]).dropna()


def sum_counts(kernels: pd.DataFrame) -> str:
    """The sentence on the sum in the document's loss: the time that it adds, and its effect on the speed-up."""
    given, summed = (times(kernels, step).query("part == 'table B'").set_index("n_seqs") for step in (GIVEN, SUMMED))
    ratios = [(table[OLD] / table[NEW]).max() for table in (given, summed)]
    effects = sum_effects(kernels)
    added = effects.added_us[~effects.contender.map(label).str.contains("model")]
    return (
        f"In the median of the packings the sum and its gradient add {value_range(added, '.0f')} µs "
        "to a kernel (our models left out), and the document's times contain them. Without the sum the largest "
        f"speed-up of the new grid over the old grid is {ratios[0]:.0f} instead of {ratios[1]:.0f}."
    )


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


def table_b_counts(kernels: pd.DataFrame) -> str:
    """The times of the packings of table B for ropelab and for both grids, or nothing where one was not timed."""
    table = times(kernels).query("part == 'table B'").dropna(subset=[OLD, NEW, "ropelab"])
    if table.empty:
        return ""
    ours = {"ropelab": "ropelab", INTEROP: "ropelab where the call finds the positions"}

    def times_of(names: dict[str, str]) -> str:
        each = (f"{value_range(table[name], ',.0f')} µs with {words}" for name, words in names.items() if name in table)
        return ", and ".join(each)

    return (
        f"From {table.n_seqs.min():,} to {table.n_seqs.max():,} sequences in "
        f"{table.tokens.iloc[0]:,} tokens, both passes take {times_of(ours)}. "
        f"They take {times_of({NEW: 'the new grid', OLD: 'the old grid'})}."
    )


def own_length_counts(kernels: pd.DataFrame) -> str:
    """Both grids for equal sequences whose table is as long as a sequence; "" without such cells."""
    table = times(kernels).query("part == 'freqs_len' and kind == 'balanced' and freqs_len == longest")
    table = table.assign(ratio=table[OLD] / table[NEW]).dropna(subset="ratio").sort_values("n_seqs")
    each = (f"{row.ratio:.2f} for {row.n_seqs:,} sequences" for row in table.itertuples())
    said = followed("With a table of the sequences' own length, the old grid's time over the new grid's is ", each)
    return said and said + "."


def skew_counts(kernels: pd.DataFrame) -> str:
    """The choices of both heuristics for one long sequence among short sequences."""
    table = choices(kernels)
    table = table[table.kind == "skewed"]
    each = [f" The {name} heuristic {missed_words(table, name)}." for name in HEURISTICS]
    return f"One long sequence among short sequences needs a table of its length.{''.join(each)}"


def block_price(fit: pd.DataFrame) -> str:
    """The time that a block without a token takes, from the table of `dead_block_fit`."""
    ns = fit.ns_per_dead_block
    return f"{ns.median():.2f} ns for each empty block and pass (median; {value_range(ns)})"


def blocks_count(kernels: pd.DataFrame) -> str:
    """The sentence on the time of a block without a token."""
    fit = dead_block_fit(kernels)
    if fit.empty:
        return ""
    row = fit.loc[fit.dead_blocks.idxmax()]
    return (
        f"The old grid takes {block_price(fit)}. "
        f"{row.dead_blocks:,} empty blocks take {row.beyond_us / 1000:,.0f} ms in both passes.{_beside_a_token(fit)}"
    )


def _beside_a_token(fit: pd.DataFrame) -> str:
    """The time of a token in ropelab's kernel in units of the time of an empty block, as a sentence; "" without it."""
    each = (1000 * fit.ropelab / fit.tokens / 2).median()
    if np.isnan(each):
        return ""
    return (
        f" ropelab's kernel turns a token in {each:.1f} ns for each pass, so a token costs as much as "
        f"{each / fit.ns_per_dead_block.median():.1f} empty blocks."
    )


def layer_counts(layer: pd.DataFrame) -> str:
    """The sentence on the share of the rotation in a layer."""
    table = shares(layer).pivot_table(index="n_seqs", columns="contender", values="share")
    parts = [
        f"{value_range(100 * table[name], '.1f')} % with {what}"
        for name, what in ((OLD, "the old grid"), (NEW, "the new grid"), ("ropelab", "ropelab"))
        if name in table
    ]
    said = f"In the layer the rotation of q and k alone takes {', '.join(parts)}."
    return " ".join(filter(None, (said, _added(layer), _beside_the_new_grid(layer))))


def _added(layer: pd.DataFrame) -> str:
    """How much shorter the layer is without a rotation than with ropelab; "" where one was not timed."""
    ours = shares(layer).query("contender == 'ropelab'").dropna()
    more = "; q and k alone do not explain so much, and the record does not tell what does"
    more = more if (ours.added > ours.share).all() else ""
    said = f"Without a rotation the layer is {value_range(100 * ours.added, '.1f')} % shorter than with ropelab{more}."
    return said if len(ours) else ""


def _beside_the_new_grid(layer: pd.DataFrame) -> str:
    """The time of the layer with ropelab over its time with the new grid, and the spread of a layer's samples."""
    layer = canonical(layer)
    whole = layer[is_right(layer) & (layer.what == LAYER)].set_index("n_seqs")
    by_name = {name: rows for name, rows in whole.groupby("contender")}
    if not {"ropelab", NEW, WITHOUT} <= by_name.keys():
        return ""
    ratio, merged = (
        value_range((by_name["ropelab"].median_us / by_name[name].median_us).dropna()) if name in by_name else ""
        for name in (NEW, PACKAGES.new)
    )
    without = by_name[WITHOUT]
    spread = ((without.q80_us - without.q20_us) / without.median_us).max()
    return (
        f"With ropelab the whole layer takes {ratio} of its time with the new grid of the first version"
        + f", and {merged} of its time with {PACKAGES.new}, as merged" * bool(merged)
        + f". The same layer without a rotation varies by up to {spread:.1%} (between the 20 and 80 % quantiles of its "
        "samples)."
    )
