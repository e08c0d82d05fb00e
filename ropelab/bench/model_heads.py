"""Time 600 calls with the heads of published models, against copies and against other libraries."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import pandas as pd
import torch

from ropelab.bench import compiling, copies, peers, same_places, timing
from ropelab.bench.cells import progress
from ropelab.bench.model_cells import Call, Cell, cells, on_meta
from ropelab.bench.names import SAME_PLACES
from ropelab.bench.operation import checked, divided, tidy
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.workloads import Buffers
from ropelab.kernels import rotate_torch
from ropelab.kernels.tensors import RotateTensors

CELLS = 600
COPIES = ("copy: copy_", "copy: Triton, 2048 elements, 4 warps", "copy: Triton, 4096 elements, 8 warps")
"""The copies that are fastest for few, for more and for many bytes."""

_COMPARED, _COMPARED_WITH_ALL = 100, 25
_MOST_BYTES_COMPARED = 2**28


def model_heads(*, smoke: bool = False, count: int = CELLS) -> pd.DataFrame:
    """Time ropelab in the first ``count`` cells, and other libraries in the first cells that the libraries can serve.

    The libraries whose kernels are compiled take part in ``_COMPARED`` cells, and the libraries whose kernels are
    compiled in the study take part in ``_COMPARED_WITH_ALL`` cells.

    Columns: the columns of the cell, contender ("ropelab" or the name of a peer), tile, the counters of
        `compiling.counters`, same_bits (whether the result has the bits of the torch operations), status, median_us,
        q20_us, q80_us, samples, fraction_of_copy, copy_us, places_us: see `against_copies`.
    """
    drawn = cells(2 if smoke else count)
    compiling.ahead((cell, [on_meta(cell).tile]) for cell in drawn)
    others = _contenders(drawn)
    if timing.is_stopped():
        drawn = drawn[:1]
    drawn = progress(drawn, lambda cell: cell.workload.description)
    return pd.concat([_timed(cell, others.get(cell, ()), 3 if smoke else 9) for cell in drawn], ignore_index=True)


def _contenders(drawn: Sequence[Cell]) -> dict[Cell, tuple[peers.Peer, ...]]:
    libraries, compiled_here = peers.of("model_heads"), peers.of("model_heads, compiled here")
    plain = [cell for cell in drawn if _is_plain(cell)]
    found = dict.fromkeys(islice(plain, _COMPARED), libraries)
    return found | dict.fromkeys(islice(plain, _COMPARED_WITH_ALL), libraries + compiled_here)


def _is_plain(cell: Cell) -> bool:
    """Whether a `Workload` says everything about the cell, as the peers take it."""
    w = cell.workload
    unusual = cell.converts or cell.full_width or cell.table_free or cell.model.first or w.direction == "backward"
    counted = cell.positions == "none" or bool(w.lengths)
    return not unusual and counted and w.bytes <= _MOST_BYTES_COMPARED


def _timed(cell: Cell, others: Sequence[peers.Peer], rounds: int) -> pd.DataFrame:
    sets = cell.sets(timing.cache_bytes())
    calls = [Call(cell, buffers) for buffers in sets]
    contenders: dict[str, Callable] = {"ropelab": partial(planned, calls)}
    rotation, step = PeerRotation(cell.workload, others), cell.workload.direction
    found = rotation.contenders(sets, "cuda")
    right, wrong = divided(found, checked(rotation, sets, found, "cuda", step), step)
    contenders |= {name: rotation.prepared(one, sets, step) for name, one in right.items()}
    about = {"tile": str(calls[0].tile), "same_bits": same_bits(cell, sets[0])}
    if torch.cuda.is_available():
        about |= compiling.counters(calls[0], calls[0].tile)
    frame = against_copies(contenders, calls, rounds)
    frame = tidy(frame, cell.columns, wrong)
    ours = frame.contender == "ropelab"
    return frame.assign(**{name: pd.Series([value] * len(frame)).where(ours) for name, value in about.items()})


def against_copies(contenders: dict[str, Callable], calls: Sequence[Call], rounds: int) -> pd.DataFrame:
    """The times of the contenders, without the rows of the copies, and with the times of the fastest copies.

    Further columns: copy_us, the copy of the inputs to new tensors; and places_us, the copy to the same places, if
    features stay where they are.
    """
    copied = copies.contenders([call.inputs for call in calls])
    copied = {name: copied[name] for name in COPIES}
    places = [parts for call in calls if (parts := call.places())]
    copied |= same_places.contenders(places) if places else {}
    frame = timing.gpu_times(contenders | copied, rounds=rounds, graph_ms=0.3)
    frame = same_places.fastest_alone(copies.with_fraction(frame))
    copy_us = frame[frame.contender.isin(copied)].median_us.min()
    places_us = frame[frame.contender == SAME_PLACES].median_us.min()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the graphs have memory of their own
    return frame[frame.contender.isin(contenders)].assign(copy_us=copy_us, places_us=places_us)


def planned(calls: Sequence[Call], tile=None) -> list[Callable]:
    """Every call with one launch, so that the capture of many calls is short."""
    launch = calls[0].plan(tile)
    return [partial(call.rotate, launch) for call in calls]


def same_bits(cell: Cell, buffers: Buffers) -> bool:
    """Whether the result has the bits of the torch operations."""
    call = Call(cell, buffers).copied()
    expected = [torch.empty_like(x) for x in call.inputs]
    rotate_torch.rotate(RotateTensors.of(call.inputs, expected, *call.tables, call.positions), call.rotation)
    return all(torch.equal(y, e) for y, e in zip(call.rotate(call.plan()), expected, strict=True))
