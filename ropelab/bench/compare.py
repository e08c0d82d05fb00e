"""Time peers and copies of one workload in the same rounds, as most studies need it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from ropelab.bench import cells, copies, peers, timing
from ropelab.bench.packages import NotInstalled
from ropelab.bench.workloads import DIRECTIONS, Buffers, Workload


def compare(shape: Workload, contenders: Sequence[peers.Peer], *, rounds: int, sets: int | None = None) -> pd.DataFrame:
    """Time the peers that pass the check, and the copies, in the same rounds: first the forward, then the backward.

    Args:
        rounds: the number of samples for each contender.
        sets: the number of sets of buffers; by default as many as `Workload.cold_count` says.

    Returns:
        One row per direction and contender, with the columns that identify the workload, contender, status
        (``"ok"``, ``"wrong: ..."``, ``"failed: ..."`` or ``"not run: ..."``), median_us, q20_us, q80_us,
        samples, in_place, and fraction_of_copy: the median of the fastest copy over the median of the contender.
    """
    buffers = shape.buffers(sets or shape.cold_count(timing.cache_bytes()))
    bound, status = bind(shape, contenders, buffers[0])
    in_place = {peer.name: peer.in_place for peer in contenders}
    frames = []
    for direction in DIRECTIONS:
        workload, outcome = replace(shape, direction=direction), dict(status)
        ready = checked(bound, workload, buffers[0], outcome)
        timed = {peer.name: partial(peers.calls, rotate, workload, buffers) for peer, rotate in ready.items()}
        frame = timing.gpu_times(timed | copy_contenders(workload, buffers), rounds=rounds)
        frame = tidy(copies.with_fraction(frame), workload.columns, outcome)
        frames.append(frame.assign(in_place=frame.contender.map(in_place).fillna(False).astype(bool)))
        del timed
        torch.cuda.empty_cache()  # the graphs have memory of their own
    return pd.concat(frames, ignore_index=True)


def table(
    shapes: Iterable[Workload], contenders: Sequence[peers.Peer], *, rounds: int, sets: int | None = None
) -> pd.DataFrame:
    """The rows of every workload, see `compare`, one workload after the other."""
    measure = partial(compare, contenders=contenders, rounds=rounds, sets=sets)
    return cells.table(shapes, measure, lambda shape: shape.description)


def bind(
    shape: Workload, contenders: Sequence[peers.Peer], buffers: Buffers
) -> tuple[dict[peers.Peer, peers.Rotate], dict[str, str]]:
    """Bind each peer to the workload and the tables.

    Returns:
        Each peer -> its rotation; and the name of each peer that cannot run -> its status. Peers that do not offer the
        workload are in neither.
    """
    found, status = peers.available(tuple(peer for peer in contenders if peer.offers(shape)))
    bound = {}
    for peer in found:
        try:
            bound[peer] = peer.bind(shape, buffers.cos, buffers.sin)
        except NotInstalled as error:  # a package that the peer's package needs
            status[peer.name] = f"not run: {error}"
        except Exception as error:  # the status records the error
            status[peer.name] = timing.failure(error)
    return bound, status


def checked(
    bound: Mapping[peers.Peer, peers.Rotate],
    workload: Workload,
    buffers: Buffers,
    status: dict[str, str],
    exact: Sequence[torch.Tensor] | None = None,
) -> dict[peers.Peer, peers.Rotate]:
    """The peers whose result in the direction of the workload is right; with the clock stopped, no result is checked.

    Args:
        bound: each peer -> its rotation.
        status: gets an entry, the name of the peer -> its status, for each peer whose result is wrong or that raises.
        exact: cosines and sines for `ropelab.bench.peers.check`.
    """
    right = {}
    for peer, rotate in bound.items():
        if workload.direction not in peer.directions:
            continue
        if timing.is_stopped():
            right[peer] = rotate
            continue
        try:
            outcome = peers.check(peer, rotate, workload, buffers, exact).status
        except Exception as error:  # the status records the error
            outcome = timing.failure(error)
        if outcome == "ok":
            right[peer] = rotate
        else:
            status[peer.name] = outcome
    return right


def copy_contenders(workload: Workload, sets: Sequence[Buffers]) -> dict[str, Callable]:
    """Copies of the tensors that the workload reads: the inputs, or in the backward the cotangents."""
    return copies.contenders([b.cotangents if workload.direction == "backward" else b.inputs for b in sets])


def tidy(frame: pd.DataFrame, identity: Mapping[str, object], status: Mapping[str, str] | None = None) -> pd.DataFrame:
    """``frame`` with the columns of ``identity`` in front, and a row for each contender of ``status`` at the end."""
    untimed = pd.DataFrame({"contender": list(status or {}), "status": list((status or {}).values())})
    frame = pd.concat([frame, untimed], ignore_index=True) if len(untimed) else frame.reset_index(drop=True)
    return pd.concat([pd.DataFrame([identity] * len(frame)), frame], axis=1)
