"""Measure dense batches: in full, in other formats, with few tokens, and the table of DeepSpeed#8052."""

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from ropelab.bench import peers
from ropelab.bench.operation import table
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.workloads import DEEPSPEED_CELLS, DENSE_CELLS, FEW_TOKENS_CELLS, FORMATS, LENGTHS, Cell
from ropelab.layout.pairing import LAYOUTS

ROUNDS = 12
FEWER_ROUNDS = 10
SMOKE_ROUNDS = 3


def dense(*, smoke: bool = False) -> pd.DataFrame:
    """Time the peers in the dense cells, in both layouts and directions. Columns: those of `PeerRotation`, and bar."""
    cells = DENSE_CELLS[-1:] if smoke else DENSE_CELLS
    return table(_rotations(cells, peers.PEERS), rounds=SMOKE_ROUNDS if smoke else ROUNDS, parts=2)


def formats(*, smoke: bool = False) -> pd.DataFrame:
    """Time the dense cells in other formats and as views of qkv. Columns: those of `PeerRotation`, and bar."""
    cells = [
        Cell(replace(cell.workload, seq_format=seq_format, storage=storage), 0.95)
        for cell in (DENSE_CELLS[-1:] if smoke else DENSE_CELLS)
        for seq_format, storage in FORMATS
    ]
    return table(_rotations(cells, peers.of("formats")), rounds=SMOKE_ROUNDS if smoke else FEWER_ROUNDS)


def few_tokens(*, smoke: bool = False) -> pd.DataFrame:
    """Time one to eight tokens. Columns: those of `PeerRotation`, and bar."""
    cells = FEW_TOKENS_CELLS[-1:] if smoke else FEW_TOKENS_CELLS
    return table(_rotations(cells, peers.of("few_tokens")), rounds=SMOKE_ROUNDS if smoke else FEWER_ROUNDS)


def lengths(*, smoke: bool = False) -> pd.DataFrame:
    """Time one sequence of many lengths. Columns: those of `PeerRotation`."""
    cells = [PeerRotation(shape, peers.of("lengths")) for shape in (LENGTHS[:1] if smoke else LENGTHS)]
    return table(cells, rounds=SMOKE_ROUNDS if smoke else ROUNDS)


def _rotations(cells: Iterable[Cell], contenders: tuple[peers.Peer, ...]) -> list[PeerRotation]:
    """The cells in both layouts."""
    return [
        PeerRotation(replace(cell.workload, layout=layout), contenders, bar=cell.bar)
        for cell in cells for layout in LAYOUTS
    ]  # fmt: skip


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
