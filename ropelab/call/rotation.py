"""This file executes a rotation of plain tensors: it checks and prepares a call once, and launches it every time."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from ropelab.call.angles import Angles
from ropelab.call.checks import (
    INPLACE,
    check_layouts_alike,
    check_places,
    check_rope_arguments,
    check_writable,
    read_tensors,
)
from ropelab.call.launch_cache import LaunchCache, call_key
from ropelab.call.memory import DisjointCheck
from ropelab.call.options import Options
from ropelab.kernels import Rotation, backend, uses_triton
from ropelab.kernels.rotation import MOST_ROWS
from ropelab.layout.seq_format import to_bshd


class Prepared(NamedTuple):
    """The rotation in the kernels' terms, a launch, the tokens of a sequence, and the check of memory.

    The launch is None where the backend prepares nothing, and the check is None for a rotation into new tensors.
    """

    rotation: Rotation
    launch: Callable[..., None] | None
    seq_len: int
    check_memory: DisjointCheck | None


prepared_calls: LaunchCache[Prepared] = LaunchCache()


def executed(
    q: torch.Tensor,
    k: torch.Tensor | None,
    angles: Angles,
    positions: torch.Tensor | None,
    first_position: int,
    options: Options,
    inplace: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotate q, or q and k, into new tensors or in place. `apply_rope` describes the arguments and the errors."""
    key = call_key((q, k, positions), angles, options, inplace)
    if inplace and key is not None:
        key = key, angles.tensors[0].shape
    prepared = prepared_calls.get(key)
    check_memory = None if prepared is None else prepared.check_memory
    if prepared is None:
        check_rope_arguments(q, k, angles, positions, options)
        if inplace:
            check_layouts_alike(options)
            read = read_tensors(angles, positions, options)
            check_memory = DisjointCheck({"q": q, "k": k}, read, where=INPLACE)
    if check_memory is not None:
        check_memory(q, k, *angles.named.values(), positions)
    rows = angles.position_count
    if prepared is None or positions is not None or first_position + prepared.seq_len > rows:
        check_places(q, angles, positions, first_position, options)
    if inplace:
        check_writable(q, k)
    q_out = q if inplace else torch.empty_like(q)
    k_out = k if inplace or k is None else torch.empty_like(k)
    if prepared is None:
        prepared = _prepare(q, k, q_out, k_out, angles, positions, options, check_memory)
        prepared_calls.put(key, prepared)
    if inplace:  # autograd does not see a kernel write, and a function that saved q or k must fail in its backward
        increment_version((q,) if k is None else (q, k))
    cos, sin = angles.for_kernels
    if prepared.launch is None:
        xs, outs, positions = _views(q, k, q_out, k_out, positions, options)
        rotate = backend("rotate", q).rotate
        rotate(xs, outs, cos, sin, prepared.rotation, positions=positions, first_position=first_position)
    else:
        # The kernel ignores the tensors that stand in for a missing k and for missing positions.
        prepared.launch(
            q, q if k is None else k, q_out, q_out if k is None else k_out, cos, sin,
            cos if positions is None else positions, first_position, min(rows, MOST_ROWS),
        )  # fmt: skip
    return q_out if k_out is None else (q_out, k_out)


def _prepare(q, k, q_out, k_out, angles: Angles, positions, options: Options, check_memory) -> Prepared:
    rotation = options.rotation(angles)
    cos, sin = angles.for_kernels
    xs, outs, positions = _views(q, k, q_out, k_out, positions, options)
    launch = None
    if uses_triton(q) and all(t.stride(-1) == 1 for t in (*xs, *outs, cos, sin)):
        rotate_triton = backend("rotate", q)
        if len(xs[0]) <= rotate_triton.MAX_BATCH:
            launch = rotate_triton.plan(xs, outs, cos, sin, positions, rotation)
    return Prepared(rotation, launch, xs[0].shape[1], check_memory)


def _views(q, k, q_out, k_out, positions, options: Options):
    """The views that the backends take: heads as ``[B, S, H, D]``, positions as ``[B, S]``, offsets as ``[B]``.

    For a rotation in place, the views of the inputs and of the results are the same objects.
    """
    xs = [to_bshd(x, options.seq_format) for x in (q, k) if x is not None]
    outs = [
        view if x is out else to_bshd(out, options.seq_format)
        for view, x, out in zip(xs, (q, k), (q_out, k_out), strict=False)
    ]
    if positions is not None and not options.offsets:
        positions = positions.expand(xs[0].shape[:2])
    return xs, outs, positions
