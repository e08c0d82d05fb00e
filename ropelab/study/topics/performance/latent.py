"""Make tables and sentences from the record ``latent_attention``: latent attention in training."""

import pandas as pd

from ropelab.bench.latent_attention import MEGATRON, OURS, VIEW
from ropelab.bench.same_places import NAME
from ropelab.study.engine.words import value_range
from ropelab.study.topics.performance.comparison import COPY, times_beside_copy

RECORD = "latent_attention"
"""The name of the record."""
_CELL = ["part", "seq_format", "heads", "tokens", "direction"]


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds: a row for each part, format, size and direction, a column for each contender and the best copy."""
    return times_beside_copy(frame, _CELL)


def sentences(frame: pd.DataFrame) -> list[str]:
    """Megatron-LM's kernel for each part, then a value that is a view, then the copy to the same places."""
    table = times(frame).reindex(columns=[OURS, MEGATRON, COPY, NAME])
    said = [
        f"Multi-head latent attention in training, {part}: Megatron-LM's kernel takes {value_range(ratios)} times as "
        "long as ropelab's kernel."
        for part, ratios in (table[MEGATRON] / table[OURS]).dropna().groupby(level="part", sort=False)
    ]
    forward = table.xs("forward", level="direction")
    view, copied = forward.loc[VIEW], forward.loc["k and v"]
    apart = table.dropna(subset=NAME)
    return [
        *said,
        f"Where v is a view of the projection, ropelab's kernel takes {value_range(view[OURS] / copied[OURS])} of the "
        f"time with a copy of v, and runs at {value_range(view[COPY] / view[OURS])} of a copy of its bytes.",
        f"Only a part of each head of q rotates, so the bytes that move are not adjacent. A copy with the same gaps "
        f"reaches {value_range(apart[COPY] / apart[NAME])} of a copy without gaps. ropelab's kernel reaches "
        f"{value_range(apart[NAME] / apart[OURS])} of the copy with gaps.",
    ]
