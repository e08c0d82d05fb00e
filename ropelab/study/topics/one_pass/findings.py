"""The ceilings and the record ``paged_cache``, in sentences and in tables."""

import pandas as pd

from ropelab.bench.names import SAME_PLACES as PLACES
from ropelab.bench.rows import timed
from ropelab.study.topics.performance.comparison import COPY, times_beside_copy

RECORD = "paged_cache"
"""The name of the record."""
ONE, SEPARATE, VLLM, FLASHINFER = "ropelab, one launch", "ropelab, separate launches", "vLLM", "FlashInfer"
"""The contenders of the record."""
LARGE = 16_000_000
"""The fewest bytes, read and written, for which the bar counts."""
LEAST_OF_COPY = 0.90
"""The bar: the fraction of the best copy from `LARGE` bytes on."""
BESIDE_PEERS = 1, 4096
"""The tokens of README.md's table: a step of decoding, and a part of a prefill."""
CELL = ["operation", "q_heads", "k_heads", "head_dim", "layout", "cache", "q_out"]
"""The columns that tell one operation from another; the record counts heads of k and of v in ``k_heads``."""


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds: a row for each operation and number of tokens, a column for each contender and the best copy.

    The copy writes as many bytes as it reads. If the results are narrower, the column has its time over those bytes,
    times the bytes that must move: the limit of `fraction_of_copy`.
    """
    cell = [*CELL, "tokens"]
    table = times_beside_copy(frame, cell).reindex(columns=[ONE, SEPARATE, VLLM, FLASHINFER, COPY, PLACES])
    ours = timed(frame)[lambda rows: rows.contender == ONE].set_index(cell)
    return table.assign(**{COPY: ours.fraction_of_copy * ours.median_us})


def many_tokens(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with a time for the number of tokens that most operations of the record have with large tensors."""
    rows = timed(frame)
    return rows[rows.tokens == _most(rows)]


def _most(frame: pd.DataFrame) -> int:
    """The number of tokens with the most operations; the largest such number if there are several."""
    count = frame.drop_duplicates([*CELL, "tokens"]).tokens.value_counts()
    return int(count[count == count.max()].index.max())


def beside_peers(frame: pd.DataFrame) -> pd.DataFrame:
    """The times of the one launch beside vLLM and FlashInfer in microseconds, for `BESIDE_PEERS` tokens.

    Returns:
        A row for each operation that a peer has, with the first number of heads or with FlashInfer's; a column for each
        contender, ``""`` where the contender has no such operation.
    """
    found = times(frame[frame.tokens.isin(BESIDE_PEERS)])[[ONE, VLLM, FLASHINFER]]
    table = found.map("{:.1f}".format, na_action="ignore").astype(object)
    heads = table.index.get_level_values("q_heads")
    usual = heads.isin(table.groupby("operation").apply(lambda rows: rows.index.get_level_values("q_heads")[0]))
    return table[table[FLASHINFER].notna() | (table[VLLM].notna() & usual)].fillna("")
