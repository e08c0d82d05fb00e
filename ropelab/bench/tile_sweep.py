"""Time our kernel with the chosen tile and with other tiles, in the dense cells and other formats."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from ropelab.bench import cells, in_parts, timing
from ropelab.bench.operation import sweep
from ropelab.bench.workloads import DEEPSPEED_CELLS, DENSE_CELLS, Buffers, Workload
from ropelab.kernels import Rotation, rotate_triton, tile_of
from ropelab.kernels.addressing import innermost
from ropelab.kernels.run import run
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import ACCESS_BYTES, PAIRS_PER_ACCESS, FlatTile, Tile, next_power_of_2, pairs_per_access
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import to_bshd

FIELDS = {
    "accesses": 0, "block_tokens": 0, "block_heads": 0, "num_warps": 0, "innermost": "", "pairs_per_access": 0,
    "max_registers": None, "heads_first": False,
}  # fmt: skip
"""The attributes of both kinds of tiles -> the value in a record where a kind lacks the attribute."""
_ORDERS = {"heads": ("heads",), "tokens": ("tokens", "heads"), "batches": ("batches", "heads", "tokens")}
"""The axis whose neighbours lie side by side in memory -> the orders of programs that the sweep tries."""

_THREADS = ((PAIRS_PER_ACCESS, None), *((2 * PAIRS_PER_ACCESS, limit) for limit in (None, 32, 40, 96)))
"""(the pairs that a thread rotates, the registers that the thread may use)"""


def tiles(*, smoke: bool = False) -> pd.DataFrame:
    """Time the forward in the dense cells, in other formats, and for packed sequences.

    Columns: the columns of the workload, positions (whether the kernel reads positions), accesses (0 for a tile of
        whole heads), block_tokens (0 for a flat tile), block_heads, num_warps, innermost, pairs_per_access,
        max_registers, heads_first, chosen, status, median_us, q20_us, q80_us, samples, fraction_of_copy.
    """
    if smoke:
        return _sweeps([(shape, False) for shape in _both_layouts([DENSE_CELLS[-1].workload])], rounds=3)
    if timing.is_stopped():
        return in_parts.compiled(_sweeps, [(_shapes()[first::_PARTS], 1) for first in range(_PARTS)])
    return _sweeps(_shapes(), rounds=10)


_PARTS = 14
"""The processes that compile the sweep of more than 1,000 tiles."""


def _sweeps(shapes: Sequence[tuple[Workload, bool]], rounds: int) -> pd.DataFrame:
    return cells.table(
        shapes, lambda shape: _sweep(*shape, rounds=rounds), lambda item: item[0].description + ", positions" * item[1]
    )


def _shapes() -> list[tuple[Workload, bool]]:
    """(a workload of the sweep, whether the kernel reads positions)"""
    cells = {cell.workload.name: cell.workload for cell in DENSE_CELLS}
    large, wide = cells["4x4096 32/8 128"], cells["1x4096 16/1 256"]
    packed = Workload("4x4096 32/8 128", 1, 16384, 32, 8, 128, 128, seq_format="thd", lengths=(4096,) * 4)
    shapes = list(cells.values())
    shapes += [replace(cells["1x512 32/8 128"], name=f"1x{tokens} 32/8 128", seq_len=tokens) for tokens in (64, 1024)]
    # Formats with tokens side by side, with batches side by side, views, and packed sequences.
    heads_apart = ("4x4096 32/8 128", "1x4096 32/8 64", "1x4096 16/1 256")
    shapes += [replace(cells[name], seq_format="bhsd") for name in heads_apart]
    shapes += [replace(large, seq_format="sbhd"), replace(wide, storage="qkv")]
    shapes += [packed, replace(packed, name="128x512 32/0 128", seq_len=65536, lengths=(512,) * 128, k_heads=0)]
    single_head = replace(large, name="16x4096 1/0 128", batch=16, q_heads=1, k_heads=0)
    shapes += [replace(DEEPSPEED_CELLS[0], direction="forward"), single_head]
    found = [(shape, bool(shape.lengths)) for shape in _both_layouts(shapes)]
    few_heads = replace(cells["8x1 32/8 128"], name="8x1 16/4 128, positions", q_heads=16, k_heads=4)
    with_positions = [replace(large, name=f"{large.name}, positions", seq_format="bhsd"), few_heads]
    return [*found, *((shape, True) for shape in _both_layouts(with_positions))]


def _both_layouts(shapes: Sequence[Workload]) -> list[Workload]:
    return [replace(shape, layout=layout) for shape in shapes for layout in LAYOUTS]


def _sweep(shape: Workload, positions: bool, rounds: int) -> pd.DataFrame:
    sets = shape.buffers(shape.cold_count(timing.cache_bytes()))
    order = innermost(to_bshd(sets[0].q, shape.seq_format))
    chosen = _chosen(shape, positions, sets[0])
    found = [*candidate_tiles(shape, order), *flat_tiles(shape, order), chosen]
    if positions:
        found += [replace(tile, heads_first=not tile.heads_first) for tile in found]
    copied = [b.inputs for b in sets]
    calls = partial(_calls, shape, positions, sets)
    frame = sweep(found, chosen, calls, FIELDS, copied, shape.columns, rounds=rounds)
    return frame.assign(positions=positions)


def _chosen(shape: Workload, positions_read: bool, buffers: Buffers) -> Tile | FlatTile:
    xs = [to_bshd(x.detach(), shape.seq_format) for x in buffers.inputs]
    outs = [torch.empty_like(x) for x in xs]
    positions = torch.zeros(xs[0].shape[:2], dtype=torch.int32) if positions_read else None
    tensors = RotateTensors.of(xs, outs, buffers.cos, buffers.sin, positions)
    return tile_of.rotate(tensors, rotation_of(shape))


def rotation_of(shape: Workload) -> Rotation:
    """The rotation of a workload, with results in the layout of the inputs."""
    interleaved = shape.layout == "interleaved"
    return Rotation(shape.rotary_dim, interleaved=interleaved, out_interleaved=interleaved)


def candidate_tiles(shape: Workload, order: str) -> list[Tile]:
    """The tiles to try for a workload.

    - In the order of memory: programs of 512 and 1024 pairs, with ``PAIRS_PER_ACCESS`` pairs a thread, or twice as many
      with and without a limit on registers. If heads lie side by side, also programs of 256 pairs.
    - In other orders: programs of 512 pairs, with ``PAIRS_PER_ACCESS`` pairs a thread.
    - For up to eight tokens: also a warp for one head and a warp for two heads.

    Args:
        order: the axis whose neighbours lie side by side in memory: see `Work`.
    """
    width, most_heads = next_power_of_2(shape.rotary_dim // 2), next_power_of_2(shape.q_heads)
    found = []
    for pairs in (256, 512, 1024) if order == "heads" else (512, 1024):
        for block_heads in (2**i for i in range(most_heads.bit_length())):
            block_tokens = pairs // width // block_heads
            # If tokens lie side by side: few heads. Else: one or two tokens, or more tokens if there are too few heads.
            fits = block_heads <= 8 if order == "tokens" else block_tokens <= 2 or block_heads == most_heads
            if not block_tokens or not fits:
                continue
            for turn in _ORDERS[order]:
                if turn != order and pairs != 512:
                    continue
                for access, registers in _THREADS if turn == order and pairs > 256 else _THREADS[:1]:
                    if registers == 32 and shape.k_heads:  # too few registers for the pairs of q and of k
                        continue
                    found.append(Tile(block_tokens, block_heads, pairs // access // 32, turn, access, registers))
    if shape.batch * shape.seq_len <= 8:
        found += [Tile(1, heads, 1, order) for heads in (1, 2)]
    return [tile for tile in found if tile.num_warps <= 8]


def flat_tiles(shape: Workload, order: str) -> list[FlatTile]:
    """The flat tiles to try for a workload: programs of 64, 128 and 256 accesses, with one or two for each thread."""
    access = pairs_per_access(rotation_of(shape), shape.head_dim - shape.rotary_dim)
    if access < PAIRS_PER_ACCESS:
        return []
    access = min(access, ACCESS_BYTES // shape.dtype.itemsize // (2 if shape.layout == "interleaved" else 1))
    heads = 2 if order == "tokens" else 1
    programs = ((64, 2, None), (128, 4, None), (256, 8, None), (256, 4, None), (256, 4, 96))
    return [FlatTile(accesses, warps, order, access, heads, limit) for accesses, warps, limit in programs]


def _calls(shape: Workload, positions_read: bool, sets: Sequence[Buffers], tile: Tile | FlatTile) -> list[Callable]:
    rotation, device = rotation_of(shape), sets[0].q.device
    positions = shape.positions(device) if shape.lengths else torch.arange(shape.seq_len, device=device)
    positions = positions.int().expand(shape.batch, -1) if positions_read else None

    def rotate(inputs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        outputs = [torch.empty_like(x) for x in inputs]
        run(rotate_triton.plan_rotate, RotateTensors.of(inputs, outputs, cos, sin, positions), rotation, tile)
        return outputs

    def views(buffers: Buffers) -> list[torch.Tensor]:
        return [to_bshd(x.detach(), shape.seq_format) for x in buffers.inputs]

    return [partial(rotate, views(b), b.cos, b.sin) for b in sets]
