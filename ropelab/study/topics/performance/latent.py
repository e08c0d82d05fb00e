"""Make tables and sentences from the record ``latent_attention``: latent attention in training."""

import pandas as pd

from ropelab.bench.copies import PREFIX
from ropelab.bench.latent_attention import MEGATRON, OURS, VIEW
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
    """One sentence for each part that has a time of Megatron-LM's kernel, and what the record says of the roofs."""
    table = times(frame).reindex(columns=[OURS, MEGATRON]).dropna()
    said = [
        f"Multi-head latent attention in training, {part}: Megatron-LM's kernel takes {value_range(rows)} times as "
        "long as ropelab's kernel"
        for part, rows in (table[MEGATRON] / table[OURS]).groupby(level="part", sort=False)
    ]
    return [*said, *_of_the_view(times(frame)), *_of_the_same_places(times(frame))]


def _of_the_view(table: pd.DataFrame) -> list[str]:
    """The sentence on a value that is a view of kv; none if the record lacks it."""
    if not {OURS, COPY} <= set(table) or VIEW not in table.index.get_level_values("part"):
        return []
    forward = table.xs("forward", level="direction")
    view, copied = forward.loc[VIEW], forward.loc["k and v"]
    return [
        f"Where v is a view of the projection, ropelab's kernel takes {value_range(view[OURS] / copied[OURS])} of the "
        f"time with a copy of v, and runs at {value_range(view[COPY] / view[OURS])} of a copy of its bytes"
    ]


def _of_the_same_places(table: pd.DataFrame) -> list[str]:
    """The sentence on the features of q that rotate, which lie apart; none if the record lacks the copy of them."""
    if not {OURS, COPY, NAME} <= set(table):
        return []
    rows = table.dropna(subset=[OURS, COPY, NAME])
    return [
        f"Only a part of each head of q rotates, so the bytes that move are not adjacent. A copy with the same gaps "
        f"reaches {value_range(rows[COPY] / rows[NAME])} of a copy without gaps. ropelab's kernel reaches "
        f"{value_range(rows[NAME] / rows[OURS])} of the copy with gaps"
    ]
