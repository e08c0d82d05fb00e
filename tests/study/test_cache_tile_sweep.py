"""The sweep over the tiles of `rope_and_cache`, with the kernel in the interpreter and without times."""

import pytest

from ropelab.bench import cache_tile_sweep
from ropelab.bench.cache_operations import LatentCache, NormAndCache, WholeLatentCache
from ropelab.kernels import INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "case",
    [
        NormAndCache(2, "interleaved", q_heads=4, k_heads=2), LatentCache(1, "split_half"),
        NormAndCache(2, q_heads=4, k_heads=2, norm=False, float8=True, float8_q=True),
        WholeLatentCache(1, "split_half"),
    ],
)  # fmt: skip
def test_tiles_are_tried_and_the_chosen_one_is_marked(monkeypatch, called_once, case):
    candidates = cache_tile_sweep.candidate_tiles(case.head_dim // 2, case.layout)
    monkeypatch.setattr(cache_tile_sweep, "candidate_tiles", lambda *_: candidates[:1])
    frame = cache_tile_sweep._sweep(case, "cpu", rounds=1)
    assert frame.chosen.sum() == 1 and (frame.status == "ok").all()
    assert {"operation", "layout", "block_rows", "num_warps", "pairs_per_access", "passes", "fraction_of_copy"} <= set(
        frame
    )
