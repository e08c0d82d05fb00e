"""Programs of `rope_and_cache` that take a head in pieces, in the interpreter."""

from dataclasses import replace

import pytest
import torch

import ropelab
from ropelab.kernels import INTERPRETED
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import LAYOUTS
from tests.ops.test_cache_scales import with_scales
from tests.ops.test_paged_cache import assert_equal, example
from tests.support import forget

if INTERPRETED:
    from ropelab.kernels import tile_of
    from ropelab.kernels.tile_of import cache_rows, pieces_of
    from ropelab.kernels.tiles import CacheTile

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")

TILES = [(8, 1, 4, 1, 5), (2, 1, 4, 3, 3), (1, 1, 4, 2, 4)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    "change",
    [
        {}, {"norm": False}, {"head_dim": 80, "heads": (6, 2)}, {"head_dim": 21, "rotary_dim": 8, "norm": False},
        {"rotary_dim": 16}, {"value_dim": 96, "positions": False}, {"dtype": torch.bfloat16}, {"made_scales": True},
        {"options": {"norm_first": False, "rotary_slice": (8, 32)}, "rotary_dim": 24},
        {"options": {"weight_offset": 1.0, "eps": 0.0}},
    ],
    ids=str,
)  # fmt: skip
def test_pieces_give_the_bits_of_whole_heads(monkeypatch, change, tile, layout):
    change = {"head_dim": 40, "heads": (5, 3), "norm": True, "layout": layout, "tokens": 2} | change
    options, makes_scales = change.pop("options", {}), change.pop("made_scales", False)
    call = example(**change | ({"dtype": torch.float16, "cache_dtype": FLOAT8_DTYPES[0]} if makes_scales else {}))
    call.options |= options
    results = []
    for each in (CacheTile(*tile), replace(CacheTile(*tile), pieces=1)):
        monkeypatch.setattr(tile_of, "cache_rows", lambda *_, each=each, **__: each)
        forget(monkeypatch)
        copy = replace(call, key_cache=call.key_cache.clone(), value_cache=call.value_cache.clone())
        copy.options = dict(call.options)
        made = with_scales(copy) if makes_scales else {}
        with ropelab.use_backend("triton"):
            results.append([copy(), *copy.caches, *made.values()])
    for found, expected in zip(*results, strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize(
    "pairs, of_halves, of_adjacent",
    [(5, 1, 1), (16, 1, 1), (28, 1, 1), (36, 3, 3), (40, 3, 3), (48, 3, 3), (56, 1, 1), (64, 1, 1), (80, 3, 5),
     (88, 3, 3), (96, 3, 3), (112, 1, 1), (160, 3, 5), (288, 3, 5)],
)  # fmt: skip
def test_heads_have_as_few_pieces_as_leave_the_fewest_lanes_idle(pairs, of_halves, of_adjacent):
    for interleaved, pieces in ((False, of_halves), (True, of_adjacent)):
        assert pieces_of(pairs, interleaved) == pieces
        assert cache_rows(pairs, 2**20, interleaved=interleaved, itemsize=2).pieces == pieces
        assert cache_rows(pairs, 1, interleaved=interleaved, itemsize=2).pieces == 1
