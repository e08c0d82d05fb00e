"""Make tables and sentences from the record ``latent_attention``: latent attention in training."""

import pandas as pd

from ropelab.bench.copies import PREFIX
from ropelab.bench.latent_attention import MEGATRON, OURS
from ropelab.bench.rows import timed
from ropelab.bench.same_places import NAME
from ropelab.study.engine.words import value_range

RECORD = "latent_attention"
"""The name of the record."""
COPY = "best copy"
_CELL = ["part", "seq_format", "heads", "tokens", "direction"]


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds: a row for each part, format, size and direction, a column for each contender and the best copy."""
    rows = timed(frame)
    rows = rows.assign(contender=rows.contender.mask(rows.contender.str.startswith(PREFIX), COPY))
    return rows.pivot_table(index=_CELL, columns="contender", values="median_us", aggfunc="min", sort=False)


def sentences(frame: pd.DataFrame) -> list[str]:
    """One sentence for each part; none if Megatron-LM's kernels have no time."""
    table = times(frame).reindex(columns=[OURS, MEGATRON]).dropna()
    said = [
        f"Multi-head latent attention in training, {part}: Megatron-LM's kernel takes {value_range(rows)} of the time "
        "of ropelab's kernel"
        for part, rows in (table[MEGATRON] / table[OURS]).groupby(level="part", sort=False)
    ]
    return [*said, *_of_the_same_places(times(frame))]


def _of_the_same_places(table: pd.DataFrame) -> list[str]:
    """The sentence on the features of q that rotate, which lie apart; none if the record lacks the copy of them."""
    if not {OURS, COPY, NAME} <= set(table):
        return []
    rows = table.dropna(subset=[OURS, COPY, NAME])
    return [
        f"The features of q that rotate lie apart. A copy of them, each to its own place, runs at "
        f"{value_range(rows[COPY] / rows[NAME])} of a copy of as many adjacent bytes, and ropelab's kernel runs at "
        f"{value_range(rows[NAME] / rows[OURS])} of the former"
    ]
