"""Fused operators of engines beside the separate launches that ropelab needs: tables and sentences from the records."""

import pandas as pd

from ropelab.bench import latent_attention, paged_cache
from ropelab.bench.copies import PREFIX
from ropelab.bench.rows import timed
from ropelab.study.engine.words import value_range

CACHES, LATENT = "paged_cache", "latent_attention"
"""The names of the records."""
COPY = "best copy"
_CACHE_CELL = ["operation", "tokens"]
_LATENT_CELL = ["part", "seq_format", "heads", "tokens", "direction"]


def cache_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds of the record ``paged_cache``: a row for each operation and number of tokens."""
    return _times(frame, _CACHE_CELL)


def latent_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds of the record ``latent_attention``: a row for each part, format, size and direction."""
    return _times(frame, _LATENT_CELL)


def cache_sentences(frame: pd.DataFrame) -> list[str]:
    """One sentence for each operation; none if vLLM's operator has no time."""
    table = _both(cache_times(frame), paged_cache.OURS, paged_cache.VLLM)
    return [
        f"{operation}: vLLM's one launch takes {_ratios(rows, paged_cache.VLLM, paged_cache.OURS, '{:,} tokens')} of "
        "the time of ropelab's launches"
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
