"""Time the one launch of `rope_and_cache` with the chosen tile and with other tiles.

`ropelab.kernels.paged_cache_triton.tile_for` rests on this sweep.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch

from ropelab.bench import copies, in_parts, timing
from ropelab.bench.cache_operations import EPS, LatentCache, NormAndCache, Operation, Tensors, WholeLatentCache
from ropelab.bench.cells import progress
from ropelab.bench.compare import tidy
from ropelab.bench.paged_cache import calls, fraction_of_bytes
from ropelab.kernels import Norm, Rotation, paged_cache_triton
from ropelab.kernels.paged_cache_triton import CacheTile
from ropelab.kernels.tensors import CacheTensors
from ropelab.kernels.tiles import PAIRS_PER_ACCESS
from ropelab.layout.pairing import LAYOUTS


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


def _sweeps(cases: Sequence[Operation], device: torch.device | str, rounds: int) -> pd.DataFrame:
    described = progress(cases, lambda case: case.description)
    return pd.concat([_sweep(case, device, rounds) for case in described], ignore_index=True)


def _cases() -> list[Operation]:
    found: list[Operation] = []
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


def _sweep(case: Operation, device: torch.device | str, rounds: int) -> pd.DataFrame:
    sets = calls(case, case.work.cold_count(timing.cache_bytes()), device)
    tensors, interleaved = partial(_tensors, case, case.tables(device)), case.layout == "interleaved"
    rotation = Rotation(case.head_dim, interleaved=interleaved, out_interleaved=interleaved)
    norm = Norm(EPS) if isinstance(case, NormAndCache) and case.norm else None

    def write(call: Tensors, tile: CacheTile) -> None:
        paged_cache_triton.write(tensors(call), rotation, norm, tile=tile)

    chosen = paged_cache_triton.tile_for(tensors(sets[0]), rotation)
    tiles = {str(tile): tile for tile in (chosen, *candidate_tiles(case.head_dim // 2, case.layout))}
    contenders = {name: partial(_ready, write, sets, tile) for name, tile in tiles.items()}
    copied = [case.to_copy(call) for call in sets]
    with torch.no_grad():
        frame = timing.gpu_times(contenders | copies.contenders(copied), rounds=rounds)
    frame = fraction_of_bytes(frame, case, copied[0])
    frame = frame[frame.contender.isin(tiles)]
    tried = [tiles[name] for name in frame.contender]
    fields = ("block_rows", "num_warps", "pairs_per_access", "passes")
    frame = frame.assign(**{field: [getattr(tile, field) for tile in tried] for field in fields})
    frame = frame.assign(chosen=[tile == chosen for tile in tried])
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return tidy(frame, case.columns).drop(columns="contender")


def _ready(write: Callable, sets: Sequence[Tensors], tile: CacheTile) -> list[Callable[[], object]]:
    return [partial(write, call, tile) for call in sets]


def _tensors(case: Operation, tables: Sequence[torch.Tensor], call: Tensors) -> CacheTensors:
    """The tensors of a call as the kernel takes them; results that are neither caches nor in place are new."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(case, LatentCache):
        q, k = case.parts(call)
        v_cache, k_cache = call["cache"].unsqueeze(2).split((case.latent, case.head_dim), dim=-1)
        k, v, q_out = k[:, None], call["latent"][:, None], q
    elif isinstance(case, WholeLatentCache):
        q, k, v = call["q"][..., 128:], call["kv"][:, None, 512:], call["latent"][:, None]
        v_cache, k_cache = (call[name].unsqueeze(2) for name in case.cached)
        q_out = call["q out"][..., 512:]
        found |= {"q_nope": call["absorbed"][None], "q_nope_out": call["q out"][None, ..., :512]}
    else:
        q, k, v = case.parts(call)
        k_cache, v_cache = (call[name] for name in case.cached)
        q_out = call.get("q out", torch.empty(q.shape, dtype=q.dtype, device=q.device))
        if case.norm:
            found |= {"q_weight": call["q weight"], "k_weight": call["k weight"]}
    if case.float8:
        scale = case.scale(q.device)
        found |= {"k_scale": scale, "v_scale": scale} | ({"q_scale": scale} if case.float8_q else {})
    cos, sin = tables
    nothing: dict[str, torch.Tensor | None] = dict.fromkeys(CacheTensors._fields)
    heads = {"q": q[None], "k": k[None], "v": v[None], "q_out": q_out[None], "k_cache": k_cache, "v_cache": v_cache}
    places = {"slots": call["slots"], "cos": cos, "sin": sin, "positions": call["positions"][None]}
    return CacheTensors(**nothing | heads | places | found)
