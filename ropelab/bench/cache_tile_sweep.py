"""Time the one launch of `rope_and_cache` with the chosen tile and with other tiles.

`ropelab.kernels.tile_of.cache_rows` rests on this sweep.
"""

from collections.abc import Sequence
from functools import partial

import pandas as pd
import torch

from ropelab.bench import cells, in_parts, timing
from ropelab.bench.cache_operations import EPS, CacheOperation, LatentCache, NormAndCache, Tensors, WholeLatentCache
from ropelab.bench.operation import sweep
from ropelab.kernels import Norm, Rotation, paged_cache_triton, tile_of
from ropelab.kernels.run import run
from ropelab.kernels.tensors import CacheTensors
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, CacheTile
from ropelab.layout.pairing import LAYOUTS

FIELDS = dict.fromkeys(("block_rows", "num_warps", "pairs_per_access", "passes"), 0)
"""The attributes of tiles in a record."""


def one_pass_tiles(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the one launch with other tiles.

    Columns: the columns of the operation in `ropelab.bench.paged_cache`, block_rows, num_warps, pairs_per_access,
        passes, chosen, status, median_us, q20_us, q80_us, samples, fraction_of_copy.
    """
    cases = _cases()
    if smoke:
        return _sweeps(cases[:1], device, rounds=3)
    if timing.is_stopped():
        return in_parts.compiled(_sweeps, [(cases[first::_PARTS], device, 1) for first in range(_PARTS)])
    return _sweeps(cases, device, rounds=9)


_PARTS = 6
"""The processes that compile the sweep. Their number keeps its compilation shorter than the compilation of others."""


def _sweeps(cases: Sequence[CacheOperation], device: torch.device | str, rounds: int) -> pd.DataFrame:
    return cells.table(cases, partial(_sweep, device=device, rounds=rounds), lambda case: case.description)


def _cases() -> list[CacheOperation]:
    found: list[CacheOperation] = []
    for layout in LAYOUTS:
        found += [NormAndCache(tokens, layout) for tokens in (1, 64, 512, 4096)]
        found += [NormAndCache(4096, layout, q_heads=28, k_heads=4), NormAndCache(4096, layout, norm=False)]
        found += [NormAndCache(4096, layout, float8=True)]
        found += [NormAndCache(tokens, layout, norm=False, float8=True, float8_q=True) for tokens in (512, 4096)]
        found += [LatentCache(tokens, layout) for tokens in (64, 512, 4096)]
        found += [WholeLatentCache(tokens, layout) for tokens in (8, 64, 512)]
    return found


def candidate_tiles(block_pairs: int, layout: str) -> list[CacheTile]:
    """Programs of one to eight warps, whose threads take 16 bytes of each member of a pair, up to four times.

    A thread takes rows of other tokens, or of other heads, in one pass; or rows of the same tokens in several passes.
    """
    access = PAIRS_PER_ACCESS if layout == "interleaved" else 2 * PAIRS_PER_ACCESS
    sizes = [(warps, accesses, passes) for warps in (1, 2, 4) for accesses in (1, 2) for passes in (1, 2)]
    sizes += [(1, 1, 4), (2, 1, 4), (8, 1, 1)]
    rows = [(32 * warps * access * accesses // block_pairs, warps, passes) for warps, accesses, passes in sizes]
    return [CacheTile(max(1, n), warps, access, passes) for n, warps, passes in rows]


def _sweep(case: CacheOperation, device: torch.device | str, rounds: int) -> pd.DataFrame:
    sets = case.sets(device)
    tensors, interleaved = partial(_tensors, case, case.tables(device)), case.layout == "interleaved"
    rotation = Rotation(case.head_dim, interleaved=interleaved, out_interleaved=interleaved)
    norm = Norm(EPS) if isinstance(case, NormAndCache) and case.norm else None

    def write(tile: CacheTile, call: Tensors) -> None:
        run(paged_cache_triton.plan_write, tensors(call), rotation, norm, tile)

    chosen = tile_of.paged_cache(tensors(sets[0]), rotation)
    copied = [case.to_copy(call) for call in sets]
    with torch.no_grad():
        return sweep(
            (chosen, *candidate_tiles(case.head_dim // 2, case.layout)), chosen,
            lambda tile: case.calls(partial(write, tile), sets), FIELDS, copied, case.columns, rounds=rounds,
            share=case.share(copied[0]),
        )  # fmt: skip


def _tensors(case: CacheOperation, tables: Sequence[torch.Tensor], call: Tensors) -> CacheTensors:
    """The tensors of a call as the kernel takes them; results that are neither caches nor in place are new."""
    given = {name: x for name, x in case.arguments(call).items() if isinstance(x, torch.Tensor)}
    if "q_out" not in given:
        given["q_out"] = torch.empty(given["q"].shape, dtype=given["q"].dtype, device=given["q"].device)
    batched = ("q", "k", "v", "q_out", "q_nope", "q_nope_out", "positions")
    given |= dict(zip(("cos", "sin"), tables, strict=True)) | {name: call[name] for name in ("slots", "positions")}
    found = {"k_cache": given.pop("key_cache"), "v_cache": given.pop("value_cache")}
    found |= {name: x[None] if name in batched else x for name, x in given.items()} | case.scales(call["slots"].device)
    return CacheTensors(**dict.fromkeys(CacheTensors._fields) | found)
