"""Compile the kernels of many calls in other processes, before the calls are timed."""

import re
from collections.abc import Iterable, Sequence

import torch

from ropelab.bench import cells as of_study
from ropelab.bench import workers
from ropelab.bench.model_cells import Cell, on_meta
from ropelab.kernels.tiles import FlatTile, Tile

Tiles = Sequence[Tile | FlatTile]


def ahead(cells: Iterable[tuple[Cell, Tiles]]) -> None:
    """Compile the kernel of each call with each of its tiles, on all cores, into Triton's folder of compiled kernels.

    Without a GPU, and where a caller has chosen a few cells, the function does nothing.
    """
    if torch.cuda.is_available() and not of_study.are_chosen():
        for _ in workers.spread((), [(_compile, arguments) for arguments in cells]):
            pass


def _compile(cell: Cell, tiles: Tiles) -> None:
    call = on_meta(cell)
    for tile in tiles:
        compiled(call, tile)


def compiled(call, tile: Tile | FlatTile):
    """Triton's compiled kernel of a call; nothing is launched."""
    launch = call.plan(tile)
    return launch.kernel.warmup(call.stand_ins("cuda"), 0, 0, *launch.fixed, grid=launch.grid, **launch.options)


def counters(call, tile: Tile | FlatTile) -> dict[str, int]:
    """The counters of the compiler.

    - registers: the registers of a thread.
    - spills: the bytes of registers that a thread moves to local memory.
    - instructions: the lines of PTX code of the kernel that are instructions.
    - load_bytes, store_bytes: the bytes of the widest access of a thread.
    """
    kernel = compiled(call, tile)
    kernel._init_handles()
    ptx = kernel.asm["ptx"]
    return {
        "registers": kernel.n_regs,
        "spills": kernel.n_spills,
        "instructions": sum(line.startswith("\t") and not line.startswith("\t.") for line in ptx.splitlines()),
        "load_bytes": _widest(ptx, "ld"),
        "store_bytes": _widest(ptx, "st"),
    }


def _widest(ptx: str, instruction: str) -> int:
    found = re.findall(rf"{instruction}\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in found), default=0)
