"""Measure dense batches: in full, in other formats, with few tokens, and the table of DeepSpeed#8052."""

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from ropelab.bench import cells as of_cells
from ropelab.bench import in_parts, peers, timing
from ropelab.bench.operation import compare, table
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.workloads import DEEPSPEED_CELLS, DENSE_CELLS, FEW_TOKENS_CELLS, FORMATS, LENGTHS, Cell, Workload
from ropelab.layout.pairing import LAYOUTS

ROUNDS = 12
FEWER_ROUNDS = 10
SMOKE_ROUNDS = 3


def dense(*, smoke: bool = False) -> pd.DataFrame:
    """Time the peers in the dense cells, in both layouts and directions. Columns: those of `PeerRotation`, and bar."""
    if timing.is_stopped() and not smoke:
        return in_parts.compiled(_of_all_peers, [(DENSE_CELLS[::2], 1), (DENSE_CELLS[1::2], 1)])
    return _of_all_peers(DENSE_CELLS[-1:] if smoke else DENSE_CELLS, SMOKE_ROUNDS if smoke else ROUNDS)


def formats(*, smoke: bool = False) -> pd.DataFrame:
    """Time the dense cells in other formats and as views of qkv. Columns: those of `PeerRotation`, and bar."""
    cells = [
        Cell(replace(cell.workload, seq_format=seq_format, storage=storage), 0.95)
        for cell in (DENSE_CELLS[-1:] if smoke else DENSE_CELLS)
        for seq_format, storage in FORMATS
    ]
    return _cells(cells, peers.of("formats"), SMOKE_ROUNDS if smoke else FEWER_ROUNDS)


def few_tokens(*, smoke: bool = False) -> pd.DataFrame:
    """Time one to eight tokens. Columns: those of `PeerRotation`, and bar."""
    cells = FEW_TOKENS_CELLS[-1:] if smoke else FEW_TOKENS_CELLS
    return _cells(cells, peers.of("few_tokens"), SMOKE_ROUNDS if smoke else FEWER_ROUNDS)


def lengths(*, smoke: bool = False) -> pd.DataFrame:
    """Time one sequence of many lengths, forward. Columns: those of `PeerRotation`."""
    cells = [PeerRotation(shape, peers.of("lengths")) for shape in (LENGTHS[:1] if smoke else LENGTHS)]
    return table(cells, rounds=SMOKE_ROUNDS if smoke else ROUNDS)


def _of_all_peers(cells: Iterable[Cell], rounds: int) -> pd.DataFrame:
    return _cells(cells, peers.PEERS, rounds)


def _cells(cells: Iterable[Cell], contenders: tuple[peers.Peer, ...], rounds: int) -> pd.DataFrame:
    bars = {replace(cell.workload, layout=layout): cell.bar for cell in cells for layout in LAYOUTS}

    def measure(shape: Workload) -> pd.DataFrame:
        return compare(PeerRotation(shape, contenders), rounds=rounds).assign(bar=bars[shape])

    return of_cells.table(bars, measure, lambda shape: shape.description)


def deepspeed_table(*, smoke: bool = False) -> pd.DataFrame:
    """Time the table of DeepSpeed#8052 on this GPU. Columns: those of `PeerRotation`.

    The contenders have the names of the document:

    - eager: the formula with chunk and cat
    - compile: the same formula under torch.compile
    - torchembed: the kernel of torchembed on one tensor, as in the document
    - torchembed API: the module of torchembed, with q also in the place of k, as in DeepSpeed
    - ropelab
    """
    names = {
        "ropelab": "ropelab",
        "eager": "hf_eager",
        "compile": "hf_compiled",
        "torchembed": "torchembed 0.3.2",
    }
    chosen = (*(replace(peers.BY_NAME[peer], name=name) for name, peer in names.items()), peers.TORCHEMBED_API)
    shapes = list(dict.fromkeys(replace(cell, direction="forward") for cell in DEEPSPEED_CELLS))
    cells = [PeerRotation(shape, chosen) for shape in (shapes[:1] if smoke else shapes)]
    return table(cells, rounds=SMOKE_ROUNDS if smoke else ROUNDS)
