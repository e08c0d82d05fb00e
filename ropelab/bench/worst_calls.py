"""Rank ropelab's calls in a record by the fraction of their limit, and number the calls in the order of the study."""

from collections.abc import Iterator

import pandas as pd
import torch

from ropelab.bench import block_scales, cache_operations, cached_keys, latent_attention, mrope, projection, row_scales
from ropelab.bench import table_free as computed
from ropelab.bench.projection_law import Product
from ropelab.bench.rows import timed

LARGE_BYTES = 16_000_000
"""The fewest bytes of a large call, which only the memory limits. The start limits a smaller call too."""

OURS: dict[str, tuple[str, ...]] = {
    "model_heads": ("ropelab",),
    "one_pass_cells": (cache_operations.OURS,),
    "mrope": (mrope.ONE_AXIS, mrope.AXES, mrope.TABLES),
    "cached_keys": (cached_keys.OURS,),
    "latent_attention": (latent_attention.OURS,),
    "block_scales": (block_scales.OURS,),
    "row_scales": (row_scales.MADE, row_scales.GIVEN),
    "table_free": (computed.TABLE_FREE,),
    "packed": ("ropelab",),
    "projection": (projection.OURS, projection.KERNEL, projection.COMPUTED),
}
"""Each study with counters -> its contenders whose kernels are ropelab's, without separate launches."""


def worst(study: str, frame: pd.DataFrame, count: int = 10) -> pd.DataFrame:
    """The calls of ropelab that reach the smallest fractions of their limits: large calls, then smaller ones.

    Args:
        frame: the record of one of the studies `OURS`.
        count: the most calls of each size, from `LARGE_BYTES` on and below.

    Returns:
        The rows of the record, with call (`numbered`), moved_bytes (the fewest bytes that the call moves), large,
        fraction (of the limit), and bytes_us (the time of these bytes at the median rate of the record's large copies).
        ``attrs["calls"]`` has the number of all calls of the study. The limit is the fastest copy of these bytes; for
        the projection it is the product alone.
    """
    calls = numbered(frame)
    rows = timed(frame.assign(call=calls))
    rows = rows[rows.contender.isin(OURS[study])]
    moved = pd.Series([_moved_bytes(study, row) for _, row in rows.iterrows()], rows.index, dtype=float)
    rows = rows.assign(moved_bytes=moved, fraction=_fraction(study, rows, moved), large=moved >= LARGE_BYTES)
    rate = (moved / (rows.fraction * rows.median_us))[rows.large].median()
    ranked = rows.assign(bytes_us=moved / rate).sort_values("fraction", kind="stable")
    found = pd.concat([ranked[ranked.large].head(count), ranked[~ranked.large].head(count)])
    found.attrs["calls"] = int(calls.max()) + 1
    return found


def limit_us(frame: pd.DataFrame) -> pd.Series:
    """The limit of the rows of the record `model_heads`: the time of the fastest copy of all necessary bytes.

    Where features stay where they are, the copy is a copy of the others to the same places.
    """
    return frame.places_us.fillna(frame.copy_us) * frame.necessary_bytes / frame.head_bytes


def numbered(frame: pd.DataFrame) -> pd.Series:
    """The number of the call of `timing.gpu_times` that made each row, from 0 on.

    A study appends the rows of its calls one after another. A new call begins where `keys` change, or where a contender
    comes again.
    """
    numbers, number, before, seen = [], -1, None, set[str]()
    for key, contender in zip(keys(frame), frame.contender, strict=True):
        if key != before or contender in seen:
            number, before, seen = number + 1, key, set()
        seen.add(contender)
        numbers.append(number)
    return pd.Series(numbers, frame.index)


def keys(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """The values of the columns before ``contender``, which identify a call, in words; "" for no value."""
    first = frame.iloc[:, : frame.columns.get_loc("contender")]
    return (tuple(map(_word, row)) for row in first.astype(object).itertuples(index=False))


def described(frame: pd.DataFrame) -> list[str]:
    """The `keys` with the names of their columns in one text, without empty values."""
    return [", ".join(f"{name} {word}" for name, word in zip(frame, key, strict=False) if word) for key in keys(frame)]


def _word(value: object) -> str:
    if pd.isna(value):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _fraction(study: str, rows: pd.DataFrame, moved: pd.Series) -> pd.Series:
    if study == "model_heads":
        return limit_us(rows) / rows.median_us
    if study == "projection":
        return 1 / rows.over_product
    # The copies of `mrope` copy q and k, whatever the step.
    return rows.fraction_of_copy * moved / rows.bytes if study == "mrope" else rows.fraction_of_copy


def _moved_bytes(study: str, row: pd.Series) -> float:
    if study == "model_heads":
        return row.necessary_bytes
    if study == "projection":
        return Product(row.tokens, row.inputs, row.q_heads, row.k_heads, row.head_dim).bytes
    if study == "latent_attention":
        case = latent_attention.Latent(row.seq_format, row.tokens, row.heads, part=row.part)
        copied = case.must_move(row.direction, lambda *shape: torch.empty(shape, device="meta"))
        return 2 * copied.numel() * case.dtype.itemsize
    if study == "mrope":  # the backward of the norm also reads the gradients; the one pass also writes v, which is k
        more = {"qk_norm backward": 0.5, "one pass": row.k_heads / (row.q_heads + row.k_heads) / 2}
        return row.bytes * (1 + more.get(row.step, 0))
    return row.bytes
