"""The measurements that need nothing but kernels and a GPU. Each returns a table, ready to be recorded."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from ropelab.bench import peers, timing
from ropelab.bench.copies import PREFIX, copies
from ropelab.bench.workloads import DEEPSPEED_CELLS, DENSE_CELLS, DIRECTIONS, Buffers, Workload
from ropelab.kernels import Rotation, rotate_triton
from ropelab.kernels.tiles import Tile, choose_tile
from ropelab.layout import LAYOUTS
from ropelab.seq_format import to_bshd

ROUNDS = 20
SMOKE_ROUNDS = 3


def dense(*, smoke: bool = False) -> pd.DataFrame:
    """Peers and copies in the dense cells, both layouts and directions: columns as ``compare``, and bar."""
    cells = DENSE_CELLS[-1:] if smoke else DENSE_CELLS
    shapes = [(replace(cell.workload, layout=layout), cell.bar) for cell in cells for layout in LAYOUTS]
    frames = [
        compare(shape, peers.PEERS, rounds=SMOKE_ROUNDS if smoke else ROUNDS).assign(bar=bar)
        for shape, bar in _progress(shapes, lambda item: f"{item[0].name}, {item[0].layout}")
    ]
    return pd.concat(frames, ignore_index=True)


def deepspeed_table(*, smoke: bool = False) -> pd.DataFrame:
    """The table of DeepSpeed#8052 on this GPU: columns as ``compare``.

    Contenders are named as in the document: eager (the formula with chunk and cat), compile (torch.compile of
        it), torchembed (its kernel on one tensor, as in the document), torchembed API (its module, with q
        handed over twice, as DeepSpeed does) and ropelab.
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
        for shape in _progress(shapes[:1] if smoke else shapes, lambda shape: f"{shape.name}, {shape.dtype}")
    ]
    return pd.concat(frames, ignore_index=True)


def host(*, smoke: bool = False) -> pd.DataFrame:
    """Host time of an eager forward call with few tokens, with and without autograd.

    Columns: those that identify the workload, autograd, contender, status, median_us, q20_us, q80_us,
        samples.
    """
    frames = []
    shapes = [replace(DENSE_CELLS[-1].workload, layout=layout) for layout in LAYOUTS]
    for shape in _progress(shapes, lambda shape: f"{shape.name}, {shape.layout}"):
        sets = shape.buffers()
        bound, status = _bind(shape, peers.PEERS, sets[0])
        for autograd in (True, False):
            ready = _checked(bound, shape, sets[0], status)
            contenders = {
                peer.name: partial(_host_call, rotate, sets[0], autograd)
                for peer, rotate in ready.items()
                if not autograd or "backward" in peer.directions
            }
            with torch.set_grad_enabled(autograd):
                frame = timing.host_times(contenders, rounds=SMOKE_ROUNDS if smoke else 25, batch=40)
            frames.append(_tidy(frame, shape, status).assign(autograd=autograd))
    return pd.concat(frames, ignore_index=True)


def tiles(*, smoke: bool = False) -> pd.DataFrame:
    """Our kernel with other tiles than the one it chooses, forward: what the choice rests on.

    Columns: those that identify the workload, block_tokens, block_heads, num_warps, chosen, status,
        median_us, q20_us, q80_us, samples, fraction_of_copy.
    """
    cells = DENSE_CELLS[-1:] if smoke else DENSE_CELLS
    shapes = [replace(cell.workload, layout=layout) for cell in cells for layout in LAYOUTS]
    if not smoke:  # heads far apart in memory, the document's shape, and a single head
        shapes += [replace(DENSE_CELLS[1].workload, seq_format="bhsd", layout=layout) for layout in LAYOUTS]
        shapes += [replace(DEEPSPEED_CELLS[0], direction="forward")]
        shapes += [replace(DENSE_CELLS[1].workload, name="16x4096 1/0 128", batch=16, q_heads=1, k_heads=0)]
    frames = []
    for shape in _progress(shapes, lambda shape: f"{shape.name}, {shape.layout}"):
        sets = shape.buffers(shape.cold_count(timing.cache_bytes()))
        chosen = choose_tile(shape.rotary_dim, shape.q_heads, shape.seq_len)
        candidates = {str(tile): tile for tile in [*candidate_tiles(shape), chosen]}
        contenders = {name: partial(_tile_calls, shape, sets, tile) for name, tile in candidates.items()}
        frame = timing.gpu_times(contenders | _copy_contenders(shape, sets), rounds=SMOKE_ROUNDS if smoke else 15)
        frame = _with_fraction(frame)
        frame = frame[frame.contender.isin(candidates)]
        for field in ("block_tokens", "block_heads", "num_warps"):
            frame[field] = [getattr(candidates[name], field) for name in frame.contender]
        frame["chosen"] = [candidates[name] == chosen for name in frame.contender]
        frames.append(_tidy(frame, shape).drop(columns="contender"))
        del contenders, sets
        torch.cuda.empty_cache()
    return pd.concat(frames, ignore_index=True)


def candidate_tiles(workload: Workload) -> list[Tile]:
    """Tiles that give each thread 8 to 64 bytes of q: less wastes requests, more runs out of registers."""
    found = []
    shapes = ((1, 4), (1, 8), (1, 16), (1, 32), (2, 8), (2, 16), (4, 8))
    if workload.q_heads == 1:
        shapes = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1))
    for block_tokens, block_heads in shapes:
        if block_heads >= 2 * workload.q_heads:
            continue
        tile_bytes = block_tokens * block_heads * workload.head_dim * workload.dtype.itemsize
        warps = [w for w in (1, 2, 4, 8) if 8 <= tile_bytes / (32 * w) <= 64]
        found += [Tile(block_tokens, block_heads, w) for w in warps]
    return found


STUDIES: dict[str, Callable[..., pd.DataFrame]] = {
    "dense": dense,
    "host": host,
    "deepspeed_table": deepspeed_table,
    "tiles": tiles,
}
"""Study -> function of ``smoke`` that measures it."""


def compare(shape: Workload, contenders: Sequence[peers.Peer], *, rounds: int) -> pd.DataFrame:
    """Time those peers that pass the check, and the copies, in the same rounds; forward, then backward.

    Returns:
        One row per direction and contender, with the columns that identify the workload, contender, status
        (``"ok"``, ``"wrong: ..."``, ``"failed: ..."`` or ``"not run: ..."``), median_us, q20_us, q80_us,
        samples, in_place, and fraction_of_copy: the fastest copy's median over that of the contender.
    """
    sets = shape.buffers(shape.cold_count(timing.cache_bytes()))
    bound, status = _bind(shape, contenders, sets[0])
    in_place = {peer.name: peer.in_place for peer in contenders}
    frames = []
    for direction in DIRECTIONS:
        workload, outcome = replace(shape, direction=direction), dict(status)
        ready = _checked(bound, workload, sets[0], outcome)
        timed = {peer.name: partial(peers.calls, rotate, workload, sets) for peer, rotate in ready.items()}
        frame = timing.gpu_times(timed | _copy_contenders(workload, sets), rounds=rounds)
        frame = _tidy(_with_fraction(frame), workload, outcome)
        frames.append(frame.assign(in_place=frame.contender.map(in_place).fillna(False).astype(bool)))
        del timed
        torch.cuda.empty_cache()  # the graphs' own memory
    return pd.concat(frames, ignore_index=True)


def _bind(shape: Workload, contenders: Sequence[peers.Peer], buffers: Buffers):
    """Peer -> its rotation, and name -> reason for those without; peers of the other layout are left out."""
    found, status = peers.available(tuple(peer for peer in contenders if shape.layout in peer.layouts))
    bound = {}
    for peer in found:
        try:
            bound[peer] = peer.bind(shape, buffers.cos, buffers.sin)
        except Exception as error:  # recorded: what cannot run is a result too
            status[peer.name] = timing.failure(error)
    return bound, status


def _checked(bound: dict, workload: Workload, buffers: Buffers, status: dict[str, str]) -> dict:
    """Those that compute the right thing in this direction; the others go into ``status``."""
    right = {}
    for peer, rotate in bound.items():
        if workload.direction not in peer.directions:
            continue
        try:
            outcome = peers.check(peer, rotate, workload, buffers).status
        except Exception as error:  # as above
            outcome = timing.failure(error)
        if outcome == "ok":
            right[peer] = rotate
        else:
            status[peer.name] = outcome
    return right


def _copy_contenders(workload: Workload, sets: Sequence[Buffers]) -> dict[str, Callable]:
    tensors = [b.cotangents if workload.direction == "backward" else b.inputs for b in sets]
    tensors = [[x.detach() for x in pair] for pair in tensors]
    return {name: partial(_copy_calls, copy, tensors) for name, copy in copies().items()}


def _copy_calls(copy: Callable, tensors: Sequence[Sequence[torch.Tensor]]) -> list[Callable]:
    return [partial(copy, pair) for pair in tensors]


def _tile_calls(workload: Workload, sets: Sequence[Buffers], tile: Tile) -> list[Callable]:
    interleaved = workload.layout == "interleaved"

    def rotate(inputs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        outputs = [torch.empty_like(x) for x in inputs]
        rotation = Rotation(workload.rotary_dim, interleaved=interleaved, out_interleaved=interleaved)
        rotate_triton.rotate(inputs, outputs, cos, sin, rotation, tile=tile)
        return outputs

    def views(buffers: Buffers) -> list[torch.Tensor]:
        return [to_bshd(x.detach(), workload.seq_format) for x in buffers.inputs]

    return [partial(rotate, views(b), b.cos, b.sin) for b in sets]


def _host_call(rotate: peers.Rotate, buffers: Buffers, autograd: bool) -> Callable:
    q, k = (x if autograd else x.detach() for x in (buffers.q, buffers.k))
    return partial(rotate, q, k)


def _with_fraction(frame: pd.DataFrame) -> pd.DataFrame:
    is_copy = frame.contender.str.startswith(PREFIX)
    return frame.assign(fraction_of_copy=frame[is_copy].median_us.min() / frame.median_us)


def _tidy(frame: pd.DataFrame, workload: Workload, status: dict[str, str] | None = None) -> pd.DataFrame:
    """Rows of contenders that were not timed appended, and the workload's columns put in front."""
    untimed = pd.DataFrame({"contender": list(status or {}), "status": list((status or {}).values())})
    frame = pd.concat([frame, untimed], ignore_index=True) if len(untimed) else frame.reset_index(drop=True)
    identity = pd.DataFrame([workload.columns] * len(frame))
    return pd.concat([identity, frame], axis=1)


def _progress(items: Iterable, describe: Callable[[object], str]):
    items = list(items)
    for number, item in enumerate(items, 1):
        started = time.monotonic()
        yield item
        seconds = time.monotonic() - started
        print(f"    {number:2}/{len(items)} {describe(item):40} {seconds:6.1f} s", flush=True)
