"""This file times the heads of published models with both kinds of tiles. `choose_flat_tile` rests on this sweep."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
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


@dataclass(frozen=True)
class Mode:
    """A way to call the kernel: in place or not, with or without positions, with tables of full width or of pairs."""

    in_place: bool = False
    positions: bool = False
    full_width: bool = False

    @property
    def words(self) -> str:
        return "".join(f", {field.name}" for field in fields(self) if getattr(self, field.name))


MODES = (Mode(), Mode(in_place=True), Mode(True, True), Mode(full_width=True), Mode(True, True, True))


def model_heads(*, smoke: bool = False) -> pd.DataFrame:
    """Time the forward with the tile of whole heads, with flat tiles, and with the chosen tile.

    Columns: the columns of the workload, in_place, positions, full_width, the attributes of a tile as in
        `tile_sweep.tiles`, chosen, same_bits (whether the result has the bits of the result with the tile of whole
        heads), status, median_us, q20_us, q80_us, samples, fraction_of_copy.
    """
    cells = [(shape, mode) for shape in _shapes(smoke) for mode in MODES]
    cells = progress(cells, lambda cell: cell[0].description + cell[1].words)
    return pd.concat([_sweep(*cell, rounds=3 if smoke else 10) for cell in cells], ignore_index=True)


def _shapes(smoke: bool) -> list[Workload]:
    """All models with 4,096 and with 64 tokens; models of few or small heads also in bhsd, in float32, and q alone."""
    shapes = [
        Workload(f"1x{tokens} {q}/{k} {dim}/{rotary}", 1, tokens, q, k, dim, rotary)
        for tokens in (4096, 64)
        for q, k, dim, rotary in (HEADS[:1] if smoke else HEADS)
    ]
    if not smoke:
        idle = [shape for shape in shapes if shape.seq_len > 64 and (shape.q_heads < 32 or shape.rotary_dim < 128)]
        shapes += [replace(shape, seq_format="bhsd") for shape in idle]
        shapes += [replace(shape, dtype=torch.float32) for shape in idle]
        shapes += [replace(shape, name=f"{shape.name}, q", k_heads=0) for shape in idle]
    return [replace(shape, layout=layout) for shape in shapes for layout in LAYOUTS]


def _sweep(shape: Workload, mode: Mode, rounds: int) -> pd.DataFrame:
    sets = shape.buffers(shape.cold_count(timing.cache_bytes()))
    first = _Call(shape, mode, sets[0])
    whole, chosen = rotate_triton.whole_heads_tile_for(*first.arguments), rotate_triton.tile_for(*first.arguments)
    found = [whole, chosen, *flat_tiles(shape, innermost(first.inputs[0]))]
    if mode.positions:
        found += [replace(tile, heads_first=not tile.heads_first) for tile in found]
    candidates = {str(tile): tile for tile in found}
    expected = first.copied().rotate(whole)
    same = {name: _same(expected, first.copied().rotate(tile)) for name, tile in candidates.items()}
    contenders = {name: partial(_calls, shape, mode, sets, tile) for name, tile in candidates.items()}
    frame = copies.with_fraction(timing.gpu_times(contenders | copy_contenders(shape, sets), rounds=rounds))
    frame = frame[frame.contender.isin(candidates)]
    tried = [candidates[name] for name in frame.contender]
    frame = frame.assign(
        **{field: [getattr(tile, field, absent) for tile in tried] for field, absent in FIELDS.items()},
        **asdict(mode),
        chosen=[tile == chosen for tile in tried],
        same_bits=frame.contender.map(same),
    )
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return tidy(frame, shape.columns).drop(columns="contender")


class _Call:
    """A call of the kernel on one set of buffers."""

    def __init__(self, shape: Workload, mode: Mode, buffers: Buffers):
        self.mode, self.rotation = mode, replace(rotation_of(shape), full_width=mode.full_width)
        self.inputs = [to_bshd(x.detach(), shape.seq_format) for x in buffers.inputs]
        self.tables = [buffers.cos, buffers.sin]
        if mode.full_width:
            widen = partial(torch.repeat_interleave, repeats=2, dim=1) if self.rotation.interleaved else _twice
            self.tables = [widen(table) for table in self.tables]
        along = torch.arange(shape.seq_len, dtype=torch.int32, device=buffers.cos.device)
        self.positions = along[None] if mode.positions else None

    @property
    def arguments(self) -> tuple:
        """The arguments of `rotate_triton.tile_for`."""
        return self.inputs, self._outputs(), *self.tables, self.positions, self.rotation

    def copied(self) -> "_Call":
        """The same call on copies of the inputs, so that a rotation in place leaves the inputs as they are."""
        other = copy(self)
        other.inputs = [x.clone() for x in self.inputs]
        return other

    def rotate(self, tile: Tile | FlatTile) -> list[torch.Tensor]:
        outputs, tables = self._outputs(), self.tables
        rotate_triton.rotate(self.inputs, outputs, *tables, self.rotation, positions=self.positions, tile=tile)
        return outputs

    def _outputs(self) -> list[torch.Tensor]:
        return self.inputs if self.mode.in_place else [torch.empty_like(x) for x in self.inputs]


def _calls(shape: Workload, mode: Mode, sets: Sequence[Buffers], tile: Tile | FlatTile) -> list[Callable]:
    return [partial(_Call(shape, mode, buffers).rotate, tile) for buffers in sets]


def _twice(table: torch.Tensor) -> torch.Tensor:
    return torch.cat((table, table), dim=1)


def _same(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(expected, actual, strict=True))
