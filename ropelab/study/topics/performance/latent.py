"""Make tables and sentences from the record ``latent_attention``: latent attention in training."""

import pandas as pd

from ropelab.bench.latent_attention import MEGATRON, OURS, VIEW
from ropelab.bench.names import SAME_PLACES
from ropelab.study.engine.words import value_range
from ropelab.study.topics.performance.comparison import COPY, times_beside_copy

RECORD = "latent_attention"
"""The name of the record."""
CACHE = 50_000_000
"""The bytes of the L2 cache of an H100, and about those of an H200."""
_CELL = ["part", "seq_format", "heads", "tokens", "direction"]


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds: a row for each part, format, size and direction, a column for each contender and the best copy."""
    return times_beside_copy(frame, _CELL)


def sentences(frame: pd.DataFrame) -> list[str]:
    """Megatron-LM's kernel for each part, then a value that is a view, then the copy to the same places."""
    table = times(frame).reindex(columns=[OURS, MEGATRON, COPY, SAME_PLACES])
    said = [
        f"Multi-head latent attention in training, {part}: Megatron-LM's kernel takes {value_range(ratios)} times as "
        "long as ropelab's kernel."
        for part, ratios in (table[MEGATRON] / table[OURS]).dropna().groupby(level="part", sort=False)
    ]
    view, copied = table.loc[VIEW], table.loc["k and v"]
    shorter = (view[OURS] / copied[OURS]).groupby(level="direction")
    at = view[COPY] / view[OURS]
    apart = table.dropna(subset=SAME_PLACES)
    columns = frame.drop_duplicates(_CELL).set_index(_CELL).loc[apart.index]
    small = (_moved(columns) < CACHE).to_numpy()
    parts = ("Beyond the L2 cache", apart[~small]), ("Where all bytes fit into it", apart[small])
    return [
        *said,
        "Where v is a view of the projection, ropelab's forward takes "
        f"{value_range(shorter.get_group('forward'))} of the time with a copy of v, and its backward "
        f"{value_range(shorter.get_group('backward'))}, because it writes the gradient of v in both cases. They run at "
        f"{value_range(at.xs('forward', level='direction'))} and {value_range(at.xs('backward', level='direction'))} "
        "of a copy of their bytes.",
        "Only a part of each head of q rotates, so the bytes that move are not adjacent. "
        + " ".join(f"{where} {_gaps(rows)}" for where, rows in parts if len(rows)),
    ]


def _gaps(rows: pd.DataFrame) -> str:
    return (
        f"a copy with the same gaps reaches {value_range(rows[COPY] / rows[SAME_PLACES])} of a copy without gaps, and "
        f"ropelab's kernel {value_range(rows[SAME_PLACES] / rows[OURS])} of the copy with gaps."
    )


def _moved(cells: pd.DataFrame) -> pd.Series:
    """The bytes of the features of q that rotate, read and written, in 16 bits."""
    tokens, heads = (cells.index.get_level_values(name) for name in ("tokens", "heads"))
    return cells.rotary_dim * tokens * heads * 2 * 2
