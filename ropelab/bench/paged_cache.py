"""Measure rotations that also write into a paged cache: in one launch, and as separate launches."""

from itertools import product

import pandas as pd
import torch

from ropelab.bench.cache_operations import CacheOperation, LatentCache, NormAndCache, WholeLatentCache
from ropelab.bench.operation import table
from ropelab.layout.pairing import LAYOUTS

TOKENS = (1, 8, 64, 512, 4096, 8192)
GROUPED_HEADS = ((32, 8), (8, 8), (28, 4), (64, 8))
"""Heads of q and of k with 4, 1, 7 and 8 heads of q for each head of k."""


def paged_cache(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the operations of `headline_cases`.

    Columns: operation, tokens, cache, q_out (the dtypes of the caches and of the results for q), q_heads, k_heads
        (an entry of the cache in heads), head_dim, dtype, layout, bytes (that must move), and the columns of
        `operation.compare`. The copy reads the tensors that the operation must read, and writes as many bytes.
    """
    cases = [NormAndCache(1), LatentCache(1)] if smoke else headline_cases()
    return table(cases, rounds=3 if smoke else 9, device=device)


def one_pass_cells(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time all operations in both layouts, for all numbers of heads and tokens. Columns: as `paged_cache`."""
    return table(all_cases()[:1] if smoke else all_cases(), rounds=3 if smoke else 9, device=device)


def headline_cases() -> list[CacheOperation]:
    """Both operations for all numbers of tokens, and their variants for 4,096 tokens."""
    cases: list[CacheOperation] = [kind(tokens) for kind in (NormAndCache, LatentCache) for tokens in TOKENS]
    cases += [NormAndCache(4096, q_heads=hq, k_heads=hk) for hq, hk in GROUPED_HEADS[1:]]
    cases += [NormAndCache(tokens, "interleaved") for tokens in (1, 4096)]
    cases += [NormAndCache(4096, layout, norm=False) for layout in LAYOUTS]
    cases += [NormAndCache(4096, layout, float8=True) for layout in LAYOUTS]
    cases += [LatentCache(4096, "split_half"), LatentCache(4096, float8=True)]
    return [*cases, NormAndCache(4096, norm=False, float8=True, float8_q=True), WholeLatentCache(4096)]


def all_cases() -> list[CacheOperation]:
    """Every operation in both layouts: with and without the norm, with caches of 16 and of 8 bits."""
    cases: list[CacheOperation] = []
    for layout, tokens in product(LAYOUTS, TOKENS):
        cases += [NormAndCache(tokens, layout, q_heads=hq, k_heads=hk) for hq, hk in GROUPED_HEADS]
        cases += [NormAndCache(tokens, layout, norm=False), NormAndCache(tokens, layout, float8=True)]
        cases += [NormAndCache(tokens, layout, norm=False, float8=True, float8_q=True)]
        cases += [LatentCache(tokens, layout), LatentCache(tokens, layout, float8=True)]
        cases += [WholeLatentCache(tokens, layout)]
    return cases
