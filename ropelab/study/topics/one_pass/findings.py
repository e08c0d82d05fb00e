"""The ceilings and the record ``paged_cache``, in sentences and in tables."""

import pandas as pd

from ropelab.bench.names import SAME_PLACES as PLACES
from ropelab.bench.rows import timed
from ropelab.study.engine.words import value_range
from ropelab.study.topics.one_pass.traffic import bytes_moved
from ropelab.study.topics.performance import findings as training
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


def roof_sentence(frame: pd.DataFrame) -> str:
    """The sentence on the share of the roof that the one launch reaches."""
    ours = timed(frame)
    ours = ours[(ours.contender == ONE) & (ours.bytes >= LARGE)]
    if ours.empty:
        return f"No case of `{ONE}` moves {LARGE / 1e6:.0f} MB or more."
    missed = ours[ours.fraction_of_copy < LEAST_OF_COPY].itertuples()
    each = [f"{row.operation}, {row.layout}, {row.tokens:,} tokens ({row.fraction_of_copy:.3f})" for row in missed]
    met = len(ours) - len(each)
    return (
        f"From {LARGE / 1e6:.0f} MB on, one launch for norm, rotation and cache runs at "
        f"{value_range(ours.fraction_of_copy)} of the best copy. The copy has the bytes that must move, and {met} of "
        f"{len(ours)} cases reach the bar of {LEAST_OF_COPY}{bool(each) * '. These miss it: '}{'; '.join(each)}."
    )


def places_sentence(frame: pd.DataFrame) -> str:
    """The sentence on the cases whose bytes are apart, or narrower where they are written; "" without such a case."""
    table = times(frame[frame.bytes >= LARGE])
    reached = (table[PLACES] / table[ONE]).dropna()
    return (
        f"In {len(reached)} of these cases the rows have gaps, or the results are narrower than the inputs. "
        f"There one launch runs at {value_range(reached)} of a copy that reads and writes the same places; "
        f"{(reached >= LEAST_OF_COPY).sum()} of {len(reached)} cases reach the bar with this copy as the limit."
    ) * bool(len(reached))


def faster_sentence(frame: pd.DataFrame) -> str:
    """The sentence on the speed of the one launch over each other contender that was timed."""
    table = times(frame)
    others = {SEPARATE: "ropelab's separate launches", VLLM: "vLLM's operator", FLASHINFER: "FlashInfer's append"}
    each = (
        f"{value_range(ratios)} times as fast as {words}"
        for other, words in others.items()
        if (ratios := (table[other] / table[ONE]).dropna()).size
    )
    return f"Over all cases of the record, one launch is {', '.join(each)}."


def sentences(frame: pd.DataFrame) -> list[str]:
    """The one launch beside the roof, beside a copy to the same places, and beside the other contenders."""
    return list(filter(None, (roof_sentence(frame), places_sentence(frame), faster_sentence(frame))))


def training_sentence(frame: pd.DataFrame) -> str:
    """Norm and rotation in the record ``qk_norm``: the forward beside a copy, both passes beside compiled functions."""
    bars = training.qk_norm_bars(frame)
    return (
        "Worst cases in training: "
        + ", and ".join(f"{bar.number} {bar.what}, where the bar is {bar.limit:.2f}" for bar in bars)
        + "."
    )


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


def ceiling_sentence(q_heads: int, k_heads: int, head_dim: int) -> str:
    """How much faster one pass is than separate launches by `traffic.bytes_moved`, with these heads of q and of k."""
    moved = bytes_moved(q_heads, k_heads, head_dim)
    (three, two, _), (three_8, two_8, _) = (moved[f"{bits}-bit cache, passes"] for bits in (16, 8))
    return (
        f"With {q_heads // k_heads} query heads for each key head and a cache in 16 bits, one pass is by bytes "
        f"{three:.2f} times as fast as three launches and {two:.2f} times as fast as two. With a cache in 8 bits it is "
        f"{three_8:.2f} and {two_8:.2f} times as fast."
    )
