"""The records and the computed evidence of SGLang#14302, a sentence for each section."""

from __future__ import annotations

import pandas as pd

from ropelab.bench.rows import need, timed
from ropelab.study.documents.sglang import evidence
from ropelab.study.documents.sglang.names import (
    FIRST_GRID_CELLS,
    FLASH_FULL,
    LAST_KERNEL,
    OURS,
    OURS_CACHE,
    SECOND_GRID_CELLS,
    THIRD_KERNEL,
)
from ropelab.study.documents.sglang.steps import (
    NAMES,
    PUBLISHED,
    STEP_NAMES,
    STEPS,
    fastest_persistent,
    mixed_timers,
    ratios,
    timed_alike,
    timer,
    without_models,
)
from ropelab.study.engine.words import listed, value_range
from ropelab.study.plots.drawing import copies


def flags() -> str:
    table = evidence.flags()
    inverted = table[table.formula != table.says]
    names = dict.fromkeys(inverted.implementation + ", " + inverted.flag)
    both = (table.groupby("implementation").formula.nunique() == 2).sum()
    return (
        f"{both} of {table.implementation.nunique()} implementations offer both layouts; "
        f"a flag does the opposite of what it says in {len(names)}: {'; '.join(names) or 'none'}."
    )


def protocol(protocols: pd.DataFrame) -> str:
    parts = []
    for peer in STEPS:
        found = ratios(protocols, peer)
        fair = [f"{found[step].median():.2f} times as long with {said}" for step, said in STEP_NAMES[peer].items()]
        parts.append(
            f"In the median {NAMES[peer]} takes {found[PUBLISHED].median():.2f} times as long as the first version's "
            f"kernel by the published protocol. It takes {' and '.join(fair)}."
        )
    repeated = timer(protocols)
    return " ".join([*parts, *([f"The timer itself changes the ratios: {repeated}."] if repeated else [])])


def timers(protocols: pd.DataFrame) -> str:
    each = [
        f"{NAMES[peer]} takes {mixed_timers(protocols, peer).median():.1f} times as long instead of "
        f"{ratios(protocols, peer)[STEPS[peer][1].name].median():.1f}"
        for peer in STEPS
    ]
    return f"With do_bench for the peer and CUDA graphs for the kernel, in the median {', and '.join(each)}."


def grids(protocols: pd.DataFrame, second: pd.DataFrame) -> str:
    parts = []
    grids = (("first", timed_alike(protocols), FIRST_GRID_CELLS), ("later", second, SECOND_GRID_CELLS))
    for name, frame, all_cells in grids:
        times = fastest_persistent(timed(without_models(frame)))
        times = times[~times.contender.str.startswith("copy") & (times.contender != FLASH_FULL)]
        table = times.pivot_table(index=["cell", "layout"], columns="contender", values="median_us", sort=False)
        need(table, OURS, OURS_CACHE)
        ours = table[[OURS, OURS_CACHE]].min(axis=1)
        behind = ours / table.drop(columns=[OURS, OURS_CACHE]).min(axis=1)
        ahead = table[behind > 1].idxmin(axis=1).unique()
        most = f" Elsewhere the fastest is {' or '.join(ahead)}, by up to {behind.max() - 1:.0%}." if len(ahead) else ""
        measured = f"{len(behind)} measured cells of the {name} grid's {all_cells}"
        parts.append(f"ropelab's operators are the fastest in {(behind <= 1).sum()} of the {measured}.{most}")
    return " ".join(parts)


def low_tokens(low: pd.DataFrame) -> str:
    cell = ["layout", "seq_len"]
    times = timed(low[low.family == "ropelab"])
    table = times.pivot_table(index=cell, columns="policy", values="median_us")
    need(table, "on", "off")
    best = times.groupby(cell).median_us.min()
    copy = copies(timed(low)).groupby(cell).median_us.min()
    return (
        f"With {listed(dict.fromkeys(times.seq_len))} tokens, ropelab's launch policy makes the kernel "
        f"{value_range(table['off'] / table['on'])} times as fast. The best division of the heads in the record would "
        f"make it {value_range(table['on'] / best)} times as fast again. A copy takes "
        f"{value_range(copy / table['on'])} of the kernel's time."
    )


def aligned_parts(parts: pd.DataFrame) -> str:
    """The sentence on the parts of heads and tables that 16-byte accesses can read; ``parts`` is sglang_alignment."""
    return (
        f"{parts.aligned.sum()} of {len(parts)} parts of heads and tables, of the document's head sizes and 96, lie at "
        "multiples of 16 bytes"
    )


def vector_widths(widths: pd.DataFrame) -> str:
    wide, narrow = (THIRD_KERNEL, LAST_KERNEL), (f"{THIRD_KERNEL}, narrow", f"{LAST_KERNEL}, narrow")
    times = timed(widths, OURS, *wide, *narrow)
    table = times.pivot_table(index=["contender", "offset_bytes"], columns="layout", values="median_us")
    gain = pd.concat([table.loc[slow, 0] / table.loc[fast, 0] for slow, fast in zip(narrow, wide, strict=True)])
    ours = table.loc[OURS]
    return (
        f"16-byte accesses make the third and the last version {value_range(gain)} times as fast as 2-byte accesses. "
        f"Tensors that begin 2 bytes off make ropelab {value_range(ours.loc[ours.index.max()] / ours.loc[0])} times as "
        "slow."
    )


def share_of_image(kernel: pd.DataFrame, baseline_ms: float) -> str:
    """The sentence on the most that the rotation can save of an image that takes ``baseline_ms``.

    ``kernel`` is the evidence sglang_published_kernel.
    """
    (row,) = kernel.itertuples()
    return (
        f"with {row.calls:,} calls in one image (an assumption), the claimed gain over the positions API saves "
        f"{row.expected_ms:.0f} ms of {baseline_ms:,.0f} ({100 * row.expected_ms / baseline_ms:.2f} %); the whole "
        f"rotation takes at most {row.all_ms:.0f} ms ({100 * row.all_ms / baseline_ms:.1f} %)"
    )


def end_to_end() -> str:
    kernel, total = evidence.published_kernel(), evidence.published_e2e().iloc[0]
    saved = share_of_image(kernel, total.baseline)
    less = 100 * kernel.expected_ms.item() / total.baseline < abs(total.change_percent)
    return (
        f"The document's two runs differ by {total.change_percent:+.1f} %. W{saved[1:]}. "
        f"The gain is {'less' if less else 'not less'} than that difference."
    )
