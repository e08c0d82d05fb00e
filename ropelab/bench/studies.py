"""This file holds the measurements that need only kernels and a GPU. Each function returns a table to record."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from ropelab.bench import peers, timing
from ropelab.bench.compare import bind, checked, compare, progress, tidy
from ropelab.bench.conformance import conformance
from ropelab.bench.latent_attention import latent_attention
from ropelab.bench.latent_tiles import latent_tiles
from ropelab.bench.model_heads import model_heads
from ropelab.bench.packed import packed
from ropelab.bench.paged_cache import paged_cache
from ropelab.bench.peak_memory import memory
from ropelab.bench.qk_norm import qk_norm
from ropelab.bench.study import Study
from ropelab.bench.table_free import table_free, table_free_error
from ropelab.bench.tile_sweep import tiles
from ropelab.bench.workers import MOST_PROCESSES
from ropelab.bench.workloads import (
    DEEPSPEED_CELLS,
    DENSE_CELLS,
    FEW_TOKENS_CELLS,
    FORMATS,
    Buffers,
    Cell,
)
from ropelab.layout.pairing import LAYOUTS

ROUNDS = 20
FEWER_ROUNDS = 10
SMOKE_ROUNDS = 3

_ANY_FORMAT = tuple(
    peer
    for peer in peers.PEERS
    if peer.name in ("ropelab", "ropelab in place", "torchembed 0.3.2", "liger", "flash_attn")
)
"""The peers that need no compilation of seconds in every cell and format."""


def dense(*, smoke: bool = False) -> pd.DataFrame:
    """Time the peers in the dense cells, in both layouts and directions. Columns: the columns of `compare`, and bar."""
    return _cells(DENSE_CELLS[-1:] if smoke else DENSE_CELLS, peers.PEERS, SMOKE_ROUNDS if smoke else ROUNDS)


def formats(*, smoke: bool = False) -> pd.DataFrame:
    """Time the dense cells in other formats and as views of qkv. Columns: the columns of `compare`, and bar."""
    cells = [
        Cell(replace(cell.workload, seq_format=seq_format, storage=storage), 0.95)
        for cell in (DENSE_CELLS[-1:] if smoke else DENSE_CELLS)
        for seq_format, storage in FORMATS
    ]
    return _cells(cells, _ANY_FORMAT, SMOKE_ROUNDS if smoke else FEWER_ROUNDS)


def few_tokens(*, smoke: bool = False) -> pd.DataFrame:
    """Time one to eight tokens. Columns: the columns of `compare`, and bar."""
    cells = FEW_TOKENS_CELLS[-1:] if smoke else FEW_TOKENS_CELLS
    return _cells(cells, _ANY_FORMAT, SMOKE_ROUNDS if smoke else FEWER_ROUNDS)


def _cells(cells: Iterable[Cell], contenders: tuple[peers.Peer, ...], rounds: int) -> pd.DataFrame:
    shapes = [(replace(cell.workload, layout=layout), cell.bar) for cell in cells for layout in LAYOUTS]
    frames = [
        compare(shape, contenders, rounds=rounds).assign(bar=bar)
        for shape, bar in progress(shapes, lambda item: item[0].description)
    ]
    return pd.concat(frames, ignore_index=True)


def deepspeed_table(*, smoke: bool = False) -> pd.DataFrame:
    """Time the table of DeepSpeed#8052 on this GPU. Columns: the columns of `compare`.

    The contenders have the names of the document:

    - eager: the formula with chunk and cat
    - compile: the same formula under torch.compile
    - torchembed: the kernel of torchembed on one tensor, as in the document
    - torchembed API: the module of torchembed, with q also in the place of k, as in DeepSpeed
    - ropelab
    """
    by_name = {peer.name: peer for peer in peers.PEERS}
    names = {
        "ropelab": "ropelab",
        "eager": "hf_eager",
        "compile": "hf_compiled",
        "torchembed": "torchembed 0.3.2",
    }
    chosen = (*(replace(by_name[peer], name=name) for name, peer in names.items()), peers.TORCHEMBED_API)
    shapes = list(dict.fromkeys(replace(cell, direction="forward") for cell in DEEPSPEED_CELLS))
    frames = [
        compare(shape, chosen, rounds=SMOKE_ROUNDS if smoke else ROUNDS)
        for shape in progress(shapes[:1] if smoke else shapes, lambda shape: f"{shape.name}, {shape.dtype}")
    ]
    return pd.concat(frames, ignore_index=True)


def host(*, smoke: bool = False) -> pd.DataFrame:
    """Measure the host time of an eager forward call with few tokens, with and without autograd.

    Columns: the columns of the workload, autograd, contender, status, median_us, q20_us, q80_us, samples.
    """
    frames = []
    shapes = [replace(DENSE_CELLS[-1].workload, layout=layout) for layout in LAYOUTS]
    for shape in progress(shapes, lambda shape: shape.description):
        sets = shape.buffers()
        bound, status = bind(shape, [peer for peer in peers.PEERS if peer.own_host_time], sets[0])
        for autograd in (True, False):
            ready = checked(bound, shape, sets[0], status)
            contenders = {
                peer.name: partial(_host_call, rotate, sets[0], autograd)
                for peer, rotate in ready.items()
                if not autograd or "backward" in peer.directions
            }
            with torch.set_grad_enabled(autograd):
                frame = timing.host_times(contenders, rounds=SMOKE_ROUNDS if smoke else 25, batch=40)
            frames.append(tidy(frame, shape.columns, status).assign(autograd=autograd))
    return pd.concat(frames, ignore_index=True)


def _host_call(rotate: peers.Rotate, buffers: Buffers, autograd: bool) -> Callable:
    q, k = (x if autograd else x.detach() for x in (buffers.q, buffers.k))
    return partial(rotate, q, k)


STUDIES: dict[str, Study] = {
    # For each element of q, the check in float64 takes about 60 bytes, and two sets of buffers take 20 bytes more.
    "dense": Study(dense, gpu_gib=5),
    "formats": Study(formats, gpu_gib=8, wide=True),
    "packed": Study(packed, gpu_gib=16),
    "few_tokens": Study(few_tokens, gpu_gib=1, wide=True),
    "qk_norm": Study(qk_norm, gpu_gib=8),
    # With 4,096 tokens a set of q, kv and the latent vectors takes 0.2 GiB, and the check copies two sets.
    "paged_cache": Study(paged_cache, gpu_gib=4),
    # With 16,384 tokens a copy of the part of k and v takes 1.1 GiB, and each contender keeps a result of such a size.
    "latent_attention": Study(latent_attention, gpu_gib=36),
    "latent_tiles": Study(latent_tiles, gpu_gib=12, wide=True),
    "table_free": Study(table_free, gpu_gib=18),
    "table_free_error": Study(table_free_error, gpu_gib=3, timed=False),
    "memory": Study(memory, gpu_gib=3, timed=False),
    "host": Study(host, gpu_gib=1),
    "deepspeed_table": Study(deepspeed_table, gpu_gib=3),
    "tiles": Study(tiles, gpu_gib=8, wide=True),
    "model_heads": Study(model_heads, gpu_gib=2, wide=True),
    # This study starts processes, each with a CUDA context.
    "conformance": Study(conformance, gpu_gib=1.5 * MOST_PROCESSES, timed=False, wide=True),
}
"""The name of the record -> the study."""
