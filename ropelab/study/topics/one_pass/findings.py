"""This file says what the ceilings and the record ``paged_cache`` show, in sentences and in a table."""

import pandas as pd

from ropelab.bench import paged_cache
from ropelab.bench.copies import PREFIX
from ropelab.bench.rows import timed
from ropelab.study.engine.words import value_range
from ropelab.study.topics.one_pass.traffic import LAUNCHES

RECORD = "paged_cache"
"""The name of the record."""
ONE = "ropelab, one launch"
"""The contender of the record that makes one pass; earlier records do not have it."""
SEPARATE, VLLM, COPY = paged_cache.OURS, paged_cache.VLLM, "best copy"
CELL = ["operation", "q_heads", "k_heads", "head_dim", "layout"]
NOT_MEASURED = f"`{ONE}` is not measured yet: the record is older than the launch."


def has_one_pass(frame: pd.DataFrame) -> bool:
    """Whether the record has times of the one launch."""
    return bool((timed(frame).contender == ONE).any())


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds: a row for each cell and number of tokens, a column for each contender and for the best copy."""
    rows = timed(frame)
    rows = rows.assign(contender=rows.contender.mask(rows.contender.str.startswith(PREFIX), COPY))
    table = rows.pivot_table(
        index=[*CELL, "tokens"], columns="contender", values="median_us", aggfunc="min", sort=False
    )
    known = [name for name in (ONE, SEPARATE, VLLM, COPY) if name in table]
    return table[[*known, *(name for name in table if name not in known)]]


def roof_sentence(frame: pd.DataFrame, large: int = 16_000_000) -> str:
    """The share of the roof that the one launch reaches, or that it is not measured yet.

    Args:
        large: bytes from which a case counts as large, as the copies count them (read and written).
    """
    if not has_one_pass(frame):
        return NOT_MEASURED
    ours = timed(frame)
    ours = ours[(ours.contender == ONE) & (ours.bytes >= large)]
    if ours.empty:
        return f"No case of `{ONE}` moves {large / 1e6:.0f} MB or more."
    return (
        f"From {large / 1e6:.0f} MB on, one launch runs at {value_range(ours.fraction_of_copy)} of the best copy of "
        "the bytes that must move."
    )


def faster_sentence(frame: pd.DataFrame) -> str:
    """How many times as fast as separate launches and as vLLM's operator the one launch is."""
    if not has_one_pass(frame):
        return ""
    table = times(frame)
    parts = []
    for other, words in ((SEPARATE, "ropelab's separate launches"), (VLLM, "vLLM's operator")):
        if other in table:
            ratios = (table[other] / table[ONE]).dropna()
            if len(ratios):
                parts.append(f"{value_range(ratios)} times as fast as {words}")
    return f"In the cases of the record, one launch is {' and '.join(parts)}." if parts else ""


def ceiling_sentence(ceilings: pd.DataFrame, ratio: int = 4) -> str:
    """The ceilings at one ratio of heads."""
    rows = ceilings[ceilings.ratio == ratio].set_index(["launches", "cache"]).ceiling
    three, two, _ = LAUNCHES
    return (
        f"With {ratio} heads of q for each head of k, one pass can be {rows[three, 16]:.2f} times as fast as three "
        f"launches and {rows[two, 16]:.2f} times as fast as two launches with a cache in 16 bits, and "
        f"{rows[three, 8]:.2f} and {rows[two, 8]:.2f} times as fast with a cache in 8 bits."
    )
