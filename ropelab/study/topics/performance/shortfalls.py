"""The shortfalls of the kernels for README.md, with the numbers of the records."""

from collections.abc import Callable, Mapping

import pandas as pd

from ropelab.bench.rows import NotMeasured, need
from ropelab.bench.table_free import TABLE_FREE
from ropelab.study.documents.sglang.names import FLASH_PACKED, FLASHINFER, OURS_CACHE, PERSISTENT
from ropelab.study.documents.sglang.steps import timed_alike
from ropelab.study.engine.noise import FLOOR
from ropelab.study.engine.words import value_range
from ropelab.study.topics.performance.comparison import OURS, timed
from ropelab.study.topics.performance.findings import MANY, ONE, READS_TWICE, SKEWED

STUDIES = ("dense", "few_tokens", "sglang_protocols", "packed", "table_free", "memory", "deepspeed_table")
"""The records behind the sentences."""
FEW, FEW_IN_PLACE = 512, 64
"""The most tokens of the calls in the sentences on few tokens, and on few tokens in place."""
OVER_COMPILED = 1.5
"""The bar at DeepSpeed's own shapes: the speed over torch.compile."""


def sentences(frames: Mapping[str, pd.DataFrame]) -> list[str]:
    """A sentence for each shortfall, with a name in bold; ``frames`` holds a table for each of ``STUDIES``.

    Where a record lacks a peer, the sentence says so.

    Raises:
        NotMeasured: a record lacks ropelab.
    """
    times = {study: timed(frames[study], OURS) for study in STUDIES if study != "memory"}  # it has no times
    need(times["table_free"].contender, TABLE_FREE)
    as_called = _as_called(times["sglang_protocols"])
    need(as_called.contender, OURS, OURS_CACHE)
    return [
        _few_tokens(pd.concat([times["dense"], times["few_tokens"]])),
        _or_missing(_in_place, as_called),
        _or_missing(_at_positions, as_called),
        _or_missing(_packed, times["packed"]),
        _table_free(times["table_free"]),
        _partial_sums(frames["memory"]),
        _or_missing(_one_tensor, times["deepspeed_table"]),
    ]


def _or_missing(say: Callable[[pd.DataFrame], str], times: pd.DataFrame) -> str:
    try:
        return say(times)
    except NotMeasured as lacking:
        return f"{lacking}."


def _few_tokens(times: pd.DataFrame) -> str:
    ours = times[(times.contender == OURS) & (times.batch * times.seq_len <= FEW)]
    return (
        f"**{FEW} tokens and fewer.** The whole call takes {value_range(ours.median_us, '.1f')} microseconds, so "
        "every wait for memory shows. A copy looks nothing up and waits less."
    )


def _as_called(times: pd.DataFrame) -> pd.DataFrame:
    """The cells with which SGLang's kernel is called: few tokens, halves, nothing cloned, in CUDA graphs."""
    times = timed_alike(times)
    return times[times.batch * times.seq_len <= FEW_IN_PLACE].set_index("cell")


def _in_place(times: pd.DataFrame) -> str:
    need(times.contender, FLASH_PACKED)
    ours = times[times.contender == OURS].median_us
    flash = times[times.contender == FLASH_PACKED].median_us
    warps = _best(times, PERSISTENT)
    return (
        f"**In place, up to {FEW_IN_PLACE} tokens** in the L2 cache. With q and k packed, flash-attn's kernel is "
        f"{_faster(flash, ours)}. A model with a warp for every head (the best of its three sizes) is "
        f"{_faster(warps, ours)} (record `sglang_protocols`)."
    )


def _at_positions(times: pd.DataFrame) -> str:
    """The sentence on the cost of a position in a call that is little more than a wait for memory."""
    ours, in_order = (times[times.contender == name] for name in (OURS_CACHE, OURS))
    flashinfer = _best(times, FLASHINFER)
    return (
        f"**At position ids, in place, up to {FEW_IN_PLACE} tokens** in the L2 cache. Every program waits for its "
        f"position id and then for the row of the tables at this position. ropelab reaches "
        f"{value_range(ours.fraction_of_copy)} of a copy. With rows in the order of the tokens it reaches "
        f"{value_range(in_order.fraction_of_copy)}. FlashInfer's kernel, which also reads position ids, is "
        f"{_faster(flashinfer, ours.median_us)} (record `sglang_protocols`)."
    )


def _best(times: pd.DataFrame, named: str) -> pd.Series:
    """Microseconds in each cell of the best contender whose name begins with ``named``."""
    rows = times[times.contender.str.startswith(named)]
    need([named] if len(rows) else [], named)
    return rows.groupby("cell").median_us.min()


def _packed(times: pd.DataFrame) -> str:
    need(times.contender, "flash_attn", READS_TWICE)
    key = ["case", "layout", "direction"]
    by_name = {name: rows.set_index(key) for name, rows in times.groupby("contender")}
    ours, flash = by_name[OURS], by_name["flash_attn"].median_us
    skewed = flash.index.get_level_values("case") == SKEWED
    apart = _ratio(flash[skewed], ours.median_us)
    own = _ratio(ours.median_us.xs(SKEWED), ours.median_us.xs(MANY))
    whole = ours.loc[ONE].iloc[0]
    tables = 2 * whole.tokens * whole.head_dim // 2 * 4
    twice = 1 / by_name[READS_TWICE].fraction_of_copy
    copies = {layout: value_range(rows, ".1f") for layout, rows in twice.groupby("layout")}
    return (
        "**Packed sequences.** flash-attn's kernel receives the longest length. For sequences of one length it is "
        f"{_faster(flash[~skewed], ours.median_us)}. With one long sequence among many short sequences it takes "
        f"{value_range(apart, '.0f')} times as long as ropelab's kernel. ropelab's kernel takes {value_range(own)} "
        f"times as long for these sequences as for {ours.loc[MANY].n_seqs.iloc[0]:,} sequences of one length. With "
        f"{whole.tokens:,} tokens in one sequence ropelab's kernel also reads {tables / 1e6:.0f} MB of float32 tables: "
        f"at the copy's bytes per second, {whole.bytes / (whole.bytes + tables):.2f} of the copy's speed remains. The "
        f"token-linear kernel reads everything twice. It takes {copies['interleaved']} times as long as a copy in the "
        f"interleaved layout, and {copies['split_half']} times as long in the split-half layout, where the second read "
        "comes from the cache."
    )


def _table_free(times: pd.DataFrame) -> str:
    free = times[times.contender == TABLE_FREE]
    worst = free.loc[free.fraction_of_copy.idxmin()]
    return (
        "**Without tables** the arithmetic takes time where a call moves few bytes: "
        f"{worst.fraction_of_copy:.2f} of a copy for {worst.batch * worst.seq_len:,} tokens of {worst.head_dim} "
        f"features ({worst.median_us:.0f} microseconds). The page on the RoPE of real models has the other cases."
    )


def _partial_sums(memory: pd.DataFrame) -> str:
    rows = memory[memory.contender.str.contains("qk_norm")]
    beyond = (rows.peak_bytes - rows.result_bytes).max()
    return (
        f"**QK norm, backward** stores {beyond / 1e6:.1f} MB of partial sums of the weights' gradients, so that these "
        "gradients have the same bits in every run."
    )


def _one_tensor(times: pd.DataFrame) -> str:
    need(times.contender, "compile")
    cells = times.set_index(["cell", "dtype", "direction"])
    ours, compiled = (cells[cells.contender == name].median_us for name in (OURS, "compile"))
    forward = [index for index in compiled.index if index[1:] == ("bfloat16", "forward")]
    fractions = times.set_index("contender").fraction_of_copy
    most = 1 / fractions[["compile"]]
    bar = "out of reach" if most.max() < OVER_COMPILED else f"within reach in {(most >= OVER_COMPILED).sum()} cases"
    return (
        f"**DeepSpeed's own shapes** (`bhsd`, a single tensor): torch.compile reaches "
        f"{value_range(fractions[['compile']])} of a copy, and ropelab reaches {value_range(fractions[[OURS]])}. "
        f"In bfloat16 forward, torch.compile is {_faster(compiled.loc[forward], ours)}. A kernel as fast as a copy "
        f"would be {value_range(most)} times as fast as torch.compile, so the bar of {OVER_COMPILED} is {bar}."
    )


def _ratio(theirs: pd.Series, ours: pd.Series) -> pd.Series:
    """Their time over ours in the same case."""
    return theirs / ours.reindex(theirs.index)


def _faster(theirs: pd.Series, ours: pd.Series) -> str:
    """How much faster they are, ``"up to 4 % faster in 3 of 15 cases"``, or how much slower at least.

    What lies within the noise of any time is no difference.
    """
    ratio, noise = _ratio(theirs, ours), 1 + FLOOR
    faster, alike = ratio < 1 / noise, ratio.between(1 / noise, noise)
    if faster.any():
        return f"up to {100 * (1 - ratio.min()):.1f} % faster (in {faster.sum()} of {len(ratio)} cases)"
    if alike.any():
        return f"as fast within {FLOOR:.0%} in {alike.sum()} of {len(ratio)} cases, and nowhere faster"
    return f"at least {100 * (ratio.min() - 1):.1f} % slower"
