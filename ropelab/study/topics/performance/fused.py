"""Fused operators of engines beside the separate launches that ropelab needs: tables and sentences from the records."""

import pandas as pd

from ropelab.bench import latent_attention, paged_cache
from ropelab.bench.copies import PREFIX
from ropelab.bench.rows import timed
from ropelab.study.engine.words import value_range

CACHES, LATENT = "paged_cache", "latent_attention"
"""The names of the records."""
COPY = "best copy"
_CACHE_CELL = ["operation", "q_heads", "layout", "cache", "tokens"]
_FIRST_CASES = {"QK norm, rotation, cache": (32, "split_half"), "MLA, rotation, cache": (128, "interleaved")}
"""The operations with operators of vLLM -> the heads of q, and the layout, with times for all numbers of tokens."""
_LATENT_CELL = ["part", "seq_format", "heads", "tokens", "direction"]


def cache_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds of the record ``paged_cache``: a row for each operation, heads, layout, cache and tokens."""
    return _times(frame, [name for name in _CACHE_CELL if name in frame])


def latent_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds of the record ``latent_attention``: a row for each part, format, size and direction."""
    return _times(frame, _LATENT_CELL)


def cache_sentences(frame: pd.DataFrame) -> list[str]:
    """One sentence for each operation with a 16-bit cache; none if vLLM's operator has no time."""
    cells = pd.Series(list(zip(frame.q_heads, frame.layout, strict=True)), frame.index)
    first = frame[cells == frame.operation.map(_FIRST_CASES)]
    first = first[first["cache"] == first["dtype"]] if "cache" in first else first
    table = _both(_times(first, ["operation", "tokens"]), paged_cache.OURS, paged_cache.VLLM)
    return [
        f"{operation}: ropelab's one launch takes {_ratios(rows, paged_cache.OURS, paged_cache.VLLM, '{:,} tokens')} "
        "of the time of vLLM's operator"
        for operation, rows in table.groupby(level="operation", sort=False)
    ]


def latent_sentences(frame: pd.DataFrame) -> list[str]:
    """One sentence for each part; none if Megatron-LM's kernels have no time."""
    table = _both(latent_times(frame), latent_attention.OURS, latent_attention.MEGATRON)
    shares = table[latent_attention.MEGATRON] / table[latent_attention.OURS]
    return [
        f"Heads of latent attention in training, {part}: Megatron-LM's kernel takes {value_range(rows)} of the time of "
        "ropelab's kernel"
        for part, rows in shares.groupby(level="part", sort=False)
    ]


def _times(frame: pd.DataFrame, cell: list[str]) -> pd.DataFrame:
    """A column for each contender that has a time, and a column for the fastest copy."""
    times = timed(frame)
    times = times.assign(contender=times.contender.mask(times.contender.str.startswith(PREFIX), COPY))
    return times.pivot_table(index=cell, columns="contender", values="median_us", aggfunc="min", sort=False)


def _both(table: pd.DataFrame, ours: str, theirs: str) -> pd.DataFrame:
    """The rows in which both have a time."""
    return table.reindex(columns=[ours, theirs]).dropna()


def _ratios(rows: pd.DataFrame, theirs: str, ours: str, of: str) -> str:
    shares = (rows[theirs] / rows[ours]).droplevel("operation")
    return ", ".join(f"{share:.2f} for {of.format(tokens)}" for tokens, share in shares.items())
