"""This file times the heads of published models with both kinds of tiles. `choose_flat_tile` rests on this sweep."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from ropelab.bench import copies, timing
from ropelab.bench.compare import copy_contenders, progress, tidy
from ropelab.bench.tile_sweep import FIELDS, flat_tiles, rotation_of
from ropelab.bench.workloads import Buffers, Workload
from ropelab.kernels import rotate_triton
from ropelab.kernels.addressing import innermost
from ropelab.kernels.tiles import FlatTile, Tile
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import to_bshd

HEADS = (
    (32, 8, 128, 128), (28, 4, 128, 128), (12, 2, 128, 128), (56, 8, 128, 128), (96, 8, 128, 128), (40, 8, 192, 192),
    (16, 1, 256, 256), (14, 2, 64, 64), (20, 20, 64, 64), (71, 1, 64, 64), (128, 1, 64, 64), (16, 16, 72, 72),
    (16, 16, 80, 80), (32, 32, 96, 96), (24, 8, 112, 112), (32, 8, 128, 64), (32, 32, 80, 32), (64, 64, 96, 24),
)  # fmt: skip
"""The query heads, the key heads, head_dim and rotary_dim of models."""

_MODES = ((False, False), (True, False), (True, True))
"""(in place, whether the kernel reads positions)"""


def model_heads(*, smoke: bool = False) -> pd.DataFrame:
    """Time the forward in bshd with the tile of whole heads, with flat tiles, and with the chosen tile.

    Columns: the columns of the workload, in_place, positions, the attributes of a tile as in `tile_sweep.tiles`,
        chosen, same_bits (whether the result has the bits of the result with the tile of whole heads), status,
        median_us, q20_us, q80_us, samples, fraction_of_copy.
    """
    shapes = [
        Workload(f"1x{tokens} {q}/{k} {dim}/{rotary}", 1, tokens, q, k, dim, rotary, layout=layout)
        for tokens in (4096, 64)
        for q, k, dim, rotary in (HEADS[:1] if smoke else HEADS)
        for layout in LAYOUTS
    ]
    rounds = 3 if smoke else 10
    cells = [(shape, *mode) for shape in shapes for mode in _MODES]
    cells = progress(cells, lambda cell: f"{cell[0].description}{', in place' * cell[1]}{', positions' * cell[2]}")
    return pd.concat([_sweep(*cell, rounds=rounds) for cell in cells], ignore_index=True)


def _sweep(shape: Workload, in_place: bool, reads_positions: bool, rounds: int) -> pd.DataFrame:
    sets = shape.buffers(shape.cold_count(timing.cache_bytes()))
    xs = _inputs(shape, sets[0])
    outs = xs if in_place else [torch.empty_like(x) for x in xs]
    along = torch.arange(shape.seq_len, dtype=torch.int32, device=xs[0].device)[None]
    positions = along if reads_positions else None
    call = xs, outs, sets[0].cos, sets[0].sin, positions, rotation_of(shape)
    whole, chosen = rotate_triton.whole_heads_tile_for(*call), rotate_triton.tile_for(*call)
    found = [whole, chosen, *flat_tiles(shape, innermost(xs[0]))]
    if reads_positions:
        found += [replace(tile, heads_first=not tile.heads_first) for tile in found]
    candidates = {str(tile): tile for tile in found}
    expected = _rotated(shape, sets[0], in_place, positions, whole)
    same = {name: _same(expected, _rotated(shape, sets[0], in_place, positions, t)) for name, t in candidates.items()}
    contenders = {name: partial(_calls, shape, sets, in_place, positions, tile) for name, tile in candidates.items()}
    frame = copies.with_fraction(timing.gpu_times(contenders | copy_contenders(shape, sets), rounds=rounds))
    frame = frame[frame.contender.isin(candidates)]
    tried = [candidates[name] for name in frame.contender]
    frame = frame.assign(
        **{field: [getattr(tile, field, absent) for tile in tried] for field, absent in FIELDS.items()},
        chosen=[tile == chosen for tile in tried],
        same_bits=frame.contender.map(same),
        in_place=in_place,
        positions=reads_positions,
    )
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return tidy(frame, shape.columns).drop(columns="contender")


def _inputs(shape: Workload, buffers: Buffers) -> list[torch.Tensor]:
    return [to_bshd(x.detach(), shape.seq_format) for x in buffers.inputs]


def _rotate(xs, cos, sin, in_place: bool, positions, rotation, tile: Tile | FlatTile) -> list[torch.Tensor]:
    outs = xs if in_place else [torch.empty_like(x) for x in xs]
    rotate_triton.rotate(xs, outs, cos, sin, rotation, positions=positions, tile=tile)
    return outs


def _rotated(shape: Workload, buffers: Buffers, in_place: bool, positions, tile) -> list[torch.Tensor]:
    """The result for copies of the inputs, so that a rotation in place leaves the inputs as they are."""
    xs = [x.clone() for x in _inputs(shape, buffers)]
    return _rotate(xs, buffers.cos, buffers.sin, in_place, positions, rotation_of(shape), tile)


def _same(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(expected, actual, strict=True))


def _calls(shape: Workload, sets: Sequence[Buffers], in_place: bool, positions, tile) -> list[Callable]:
    rotation = rotation_of(shape)
    return [partial(_rotate, _inputs(shape, b), b.cos, b.sin, in_place, positions, rotation, tile) for b in sets]
