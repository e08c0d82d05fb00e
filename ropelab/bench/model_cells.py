"""Draw calls of the rotation with the heads of published models, from a seed."""

import math
import random
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ropelab.angles.table_free import rotary_frequencies
from ropelab.bench import same_places
from ropelab.bench.model_shapes import MODELS, SHAPES, Model
from ropelab.bench.workloads import Buffers, Workload
from ropelab.kernels import Rotation, rotate_triton, tile_of
from ropelab.kernels.rotation import row_count
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import FlatTile, Tile
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import to_bshd

MOST_TOKENS = 65536
_MOST_BYTES = 2**29
_MOST_SETS = 128
_SECTOR = 32
_PREFILL_TOKENS = 4096, 1024, 16384
_PLAIN = "bshd", "contiguous", False
_OTHERS = (
    ("bhsd", "contiguous", False),
    ("bshd", "qkv", False),
    ("bshd", "contiguous", True),
    ("sbhd", "contiguous", False),
)
"""(seq_format, storage, in_place) of `prefills`."""
_SEED = 20261122


@dataclass(frozen=True)
class Cell:
    """A call of the rotation.

    Attributes:
        model: the heads.
        workload: the tensors; ``direction == "backward"`` rotates back.
        positions: "none", "token" (a position for each token) or "offsets" (a position for each sequence).
        wide_positions: whether positions have 64 bits.
        in_place: whether the results overwrite the inputs.
        converts: whether the results have the other layout.
        full_width: whether the tables have a column for each feature.
        table_free: whether frequencies take the place of tables.
    """

    model: Model
    workload: Workload
    positions: str = "none"
    wide_positions: bool = False
    in_place: bool = False
    converts: bool = False
    full_width: bool = False
    table_free: bool = False

    @property
    def rotation(self) -> Rotation:
        w = self.workload
        interleaved = w.layout == "interleaved"
        return Rotation(
            w.rotary_dim, self.model.first, interleaved, interleaved != self.converts,
            transpose=w.direction == "backward", full_width=self.full_width, table_free=self.table_free,
            offsets=self.positions == "offsets",
        )  # fmt: skip

    @property
    def table_bytes(self) -> int:
        """The bytes of the rows of cosines and sines that the call needs; 0 without tables."""
        w = self.workload
        columns = w.rotary_dim if self.full_width else w.rotary_dim // 2
        return 0 if self.table_free else 2 * w.seq_len * columns * torch.float32.itemsize

    @property
    def rests(self) -> bool:
        """Whether features stay where they are: the features of a head that do not rotate, in place."""
        return self.in_place and self.workload.rotary_dim < self.workload.head_dim

    @property
    def head_bytes(self) -> int:
        """The least number of bytes of heads that the call reads and writes. Memory moves sectors of 32 bytes."""
        w = self.workload
        size, row = w.dtype.itemsize, w.head_dim * w.dtype.itemsize
        rows = w.bytes // row
        heads = w.bytes
        if self.rests:
            begins = [(i * row + self.model.first * size) % _SECTOR for i in range(_SECTOR)]
            touched = [_SECTOR * math.ceil((begin + w.rotary_dim * size) / _SECTOR) for begin in begins]
            heads = min(heads, rows * sum(touched) // len(touched))
        return heads

    @property
    def necessary_bytes(self) -> int:
        """The least number of bytes that the call moves: heads, read and written, tables and positions, read once."""
        w = self.workload
        positions = {"none": 0, "token": w.batch * w.seq_len, "offsets": w.batch}[self.positions]
        return self.head_bytes + self.table_bytes + positions * (8 if self.wide_positions else 4)

    @property
    def columns(self) -> dict[str, object]:
        """The columns that identify this cell in a record."""
        flags = {name: getattr(self, name) for name in ("in_place", "converts", "full_width", "table_free")}
        positions = self.positions + ", int64" * self.wide_positions
        about = {"first": self.model.first, "positions": positions, **flags}
        about |= {"head_bytes": self.head_bytes, "necessary_bytes": self.necessary_bytes}
        return {"model": self.model.name, **self.workload.columns, **about}

    def sets(self, cache_bytes: int) -> list[Buffers]:
        """As many sets of buffers as keep every access out of the cache, but at most ``_MOST_SETS``."""
        return self.workload.buffers(min(self.workload.cold_count(cache_bytes), _MOST_SETS))


def cells(count: int) -> list[Cell]:
    """``count`` cells; a smaller number gives the first of the same cells."""
    rng = random.Random(_SEED)
    return [_draw(rng) for _ in range(count)]


def prefills() -> list[Cell]:
    """The plainest calls of every model: bfloat16, forward, no positions, in both layouts; four calls for a model.

    Two calls have bshd and new tensors. The other two calls take turns at the formats, views of qkv, and in place. The
    numbers of tokens take turns too.
    """
    return [
        _prefill(model, layout, number + turn, plain)
        for number, model in enumerate(MODELS + SHAPES)
        for turn, layout in enumerate(LAYOUTS)
        for plain in (True, False)
    ]


def packed_prefills() -> list[Cell]:
    """A call of every model at positions, in bfloat16. Layouts take turns, and so do new tensors and in place."""
    return [
        replace(_prefill(model, LAYOUTS[number % 2], number, True), positions="token", in_place=number // 2 % 2 == 0)
        for number, model in enumerate(MODELS + SHAPES)
    ]


def _prefill(model: Model, layout: str, number: int, plain: bool) -> Cell:
    seq_format, storage, in_place = _PLAIN if plain else _OTHERS[number % len(_OTHERS)]
    batch = 4 if seq_format == "sbhd" else 1
    row = (model.q_heads + model.k_heads) * model.head_dim * torch.bfloat16.itemsize
    seq_len = min(_PREFILL_TOKENS[number % len(_PREFILL_TOKENS)], _MOST_BYTES // row) // batch
    workload = Workload(
        f"{batch}x{seq_len} {model.heads}", batch, seq_len, model.q_heads, model.k_heads, model.head_dim,
        model.rotary_dim, torch.bfloat16, layout, seq_format, storage=storage,
    )  # fmt: skip
    return Cell(model, workload, in_place=in_place)


def _draw(rng: random.Random) -> Cell:
    """One cell: a random model; tokens of all magnitudes; in a quarter of the cells as many tokens as in a prefill."""
    model = rng.choice(MODELS + SHAPES)
    dtype = rng.choice((torch.bfloat16,) * 4 + (torch.float16, torch.float32))
    row = (model.q_heads + model.k_heads) * model.head_dim * dtype.itemsize
    most = min(MOST_TOKENS, _MOST_BYTES // row)
    tokens = min(most, 4096 if rng.random() < 0.25 else round(MOST_TOKENS ** rng.random()))
    seq_format = rng.choice(("bshd", "bshd", "bshd", "sbhd", "bhsd", "thd", "qkv"))
    batch = 1 if seq_format == "thd" else min(tokens, rng.choice((1, 1, 2, 5, 8, 64)))
    lengths: tuple[int, ...] = ()
    if seq_format == "thd":
        cuts = sorted(rng.sample(range(1, tokens), min(tokens - 1, rng.choice((0, 1, 7, 30)))))
        lengths = tuple(end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True))
    layout = rng.choice((*LAYOUTS, LAYOUTS[1] if model.interleaved else LAYOUTS[0]))
    positions = "token" if lengths else rng.choice(("none", "none", "none", "token", "token", "offsets"))
    in_place = rng.random() < 0.4
    table_free = rng.random() < 0.08
    backward = rng.random() < 0.3
    seq_len = tokens // batch
    workload = Workload(
        f"{batch}x{seq_len} {model.heads}", batch, seq_len, model.q_heads, model.k_heads, model.head_dim,
        model.rotary_dim, dtype, layout, "bshd" if seq_format == "qkv" else seq_format,
        "backward" if backward else "forward",
        storage="qkv" if seq_format == "qkv" and not backward else "contiguous", lengths=lengths,
    )  # fmt: skip
    return Cell(
        model, workload, positions, positions != "none" and rng.random() < 0.5, in_place,
        converts=not in_place and rng.random() < 0.08,
        full_width=not table_free and rng.random() < 0.12,
        table_free=table_free,
    )  # fmt: skip


class Call:
    """A call of the kernel on one set of buffers.

    Attributes:
        inputs: q and k, ``[B, S, H, D]``.
        tables: cosines and sines, or twice the frequencies.
        positions: the positions of the tokens or of the sequences, or None.
    """

    def __init__(self, cell: Cell, buffers: Buffers):
        self.cell, self.rotation = cell, cell.rotation
        w = cell.workload
        back = w.direction == "backward"
        self.inputs = [to_bshd(x.detach(), w.seq_format) for x in (buffers.cotangents if back else buffers.inputs)]
        device = buffers.q.device
        self.tables = [buffers.cos, buffers.sin]
        if cell.full_width:
            interleaved = self.rotation.interleaved
            self.tables = [t.repeat_interleave(2, 1) if interleaved else torch.cat((t, t), 1) for t in self.tables]
        if cell.table_free:
            self.tables = [rotary_frequencies(w.rotary_dim).to(device)] * 2
        self.positions = _positions(cell, device)

    @property
    def tensors(self) -> RotateTensors:
        """The tensors of the call, with new results unless it works in place."""
        return RotateTensors.of(self.inputs, self.outputs(), *self.tables, self.positions)

    @cached_property
    def tile(self) -> Tile | FlatTile:
        """The tile that ropelab chooses."""
        return tile_of.rotate(self.tensors, self.rotation)

    def copied(self) -> "Call":
        """The same call on copies of the inputs, so that a rotation in place leaves the inputs as they are."""
        other = copy(self)
        other.inputs = [x.clone() for x in self.inputs]
        return other

    def outputs(self) -> list[torch.Tensor]:
        return self.inputs if self.cell.in_place else [_empty_like(x) for x in self.inputs]

    def places(self) -> list[same_places.Part]:
        """The features that rotate, if the others stay where they are; else nothing."""
        places = self.rotation.first, self.rotation.rotary_dim
        return [same_places.in_place(x, *places) for x in self.inputs] if self.cell.rests else []

    def plan(self, tile: Tile | FlatTile | None = None) -> Callable[..., None]:
        """The launch of this call, with the chosen tile by default; it serves the same call on other buffers."""
        return rotate_triton.plan_rotate(self.tensors, self.rotation, tile or self.tile)

    def rotate(self, launch: Callable[..., None]) -> list[torch.Tensor]:
        """The results of a launch that `plan` returned."""
        tensors = self.tensors
        launch(tensors, 0, row_count(tensors.cos))
        return [y for _, y in tensors.pairs]

    def stand_ins(self, device: torch.device | str) -> RotateTensors:
        """Tensors on ``device`` with the dtypes of the call's tensors, which suffice for a compiler."""
        made = (None if x is None else torch.empty(1, dtype=x.dtype, device=device) for x in self.tensors)
        return RotateTensors(*made)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like(x)``, which gives axes of length 1 other strides if ``x`` has no memory."""
    end = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.new_empty_strided(x.shape, x.stride()) if end == x.numel() else torch.empty_like(x)


def _positions(cell: Cell, device: torch.device) -> torch.Tensor | None:
    w = cell.workload
    if cell.positions == "none":
        return None
    dtype = torch.int64 if cell.wide_positions else torch.int32
    if cell.positions == "offsets":
        return torch.zeros(w.batch, dtype=dtype, device=device)
    if w.lengths:
        return torch.cat([torch.arange(n, dtype=dtype) for n in w.lengths]).to(device)[None]
    return torch.arange(w.seq_len, dtype=dtype, device=device).expand(w.batch, -1).contiguous()


def on_meta(cell: Cell) -> Call:
    """The call of a cell without memory, which suffices for a plan."""
    w = cell.workload

    def empty(heads: int) -> torch.Tensor:
        return torch.empty(w.shape(heads), dtype=w.dtype, device="meta")

    q, k = dq, dk = empty(w.q_heads), empty(w.k_heads)
    if w.storage == "qkv":
        heads = (w.q_heads, w.k_heads, w.k_heads)
        q, k, _ = empty(sum(heads)).split(heads, dim=2)
    table = torch.empty(w.seq_len, w.rotary_dim // 2, device="meta")
    return Call(cell, Buffers(q, k, dq, dk, table, table))


def smaller(cell: Cell) -> Cell:
    """The cell with at most seven tokens, for the interpreter."""
    w = cell.workload
    batch, seq = min(w.batch, 2), min(w.seq_len, 3)
    tokens = (seq,) if w.lengths else ()
    return replace(cell, workload=replace(w, batch=batch, seq_len=seq, lengths=tokens))
