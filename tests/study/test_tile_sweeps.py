"""The sweep over the tiles of `rope_and_cache`, with the kernel in the interpreter and without times."""

import pytest

from ropelab.bench.cache_operations import LatentCache, NormAndCache, WholeLatentCache
from ropelab.bench.operation import compare
from ropelab.bench.tile_sweeps import CacheSweep
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
    tiles = CacheSweep.tiles
    monkeypatch.setattr(CacheSweep, "tiles", lambda *arguments: tiles(*arguments)[:2])
    frame = compare(CacheSweep(case), rounds=1, device="cpu")
    assert frame.chosen.sum() == 1 and (frame.status == "ok").all()
    assert {*case.columns, *CacheSweep.fields, "fraction_of_copy"} <= set(frame)
