"""This file runs a rotation: the host checks and prepares a call once, then repeats it (`ropelab.launch_cache`)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from ropelab.arguments import integer, integers
from ropelab.checks import (
    check_layouts_alike,
    check_memory,
    check_places,
    check_rope_arguments,
    check_tensor,
    check_writable,
)
from ropelab.kernels import Rotation, backend, uses_triton
from ropelab.kernels.rotation import row_count
from ropelab.launch_cache import LaunchCache, call_key
from ropelab.memory import bytes_between
from ropelab.seq_format import check_seq_format, rank, to_bshd


class Options(NamedTuple):
    """The arguments of `apply_rope` that are not tensors.

    ``offsets``: the positions given are those of the sequences' first tokens. ``transpose``: rotate back.
    ``table_free``: frequencies stand in the places of cos and sin. ``overwrites``: the caller writes the result over
    q and k, whose elements must then have addresses of their own.
    """

    layout: str
    out_layout: str
    seq_format: str
    rotary_slice: tuple[int, int] | None
    offsets: bool
    transpose: bool
    table_free: bool = False
    overwrites: bool = False

    def slice(self, table_width: int) -> tuple[int, int]:
        """The first feature that rotates, and the end."""
        return self.rotary_slice or (0, 2 * table_width)

    def rotation(self, cos: torch.Tensor) -> Rotation:
        """These options for tables like ``cos``, or for frequencies, in the kernels' terms."""
        table_width = len(cos) if self.table_free else cos.shape[-1]
        first, end = self.slice(table_width)
        return Rotation(
            rotary_dim=end - first,
            first=first,
            interleaved=self.layout == "interleaved",
            out_interleaved=self.out_layout == "interleaved",
            transpose=self.transpose,
            full_width=table_width == end - first and not self.table_free,
            table_free=self.table_free,
            offsets=self.offsets,
        )


def locate(
    q: torch.Tensor, positions: torch.Tensor | None, offsets: int | torch.Tensor, seq_format: str
) -> tuple[torch.Tensor | None, int, bool]:
    """Where the tokens are, as the kernels want to know it.

    Returns:
        positions or offsets as a tensor, or None; else the first position; and whether the tensor has offsets.

    Raises:
        TypeError: ``offsets`` is neither an integer nor a tensor.
        ValueError: both are given.
    """
    if isinstance(offsets, torch.Tensor):
        if positions is not None:
            raise ValueError("offsets: expected none beside positions, got both")
        return offsets, 0, True
    if type(offsets) is not int:
        offsets = integer("offsets", offsets)
    if positions is not None:
        if offsets:
            raise ValueError("offsets: expected none beside positions, got both")
        return positions, 0, False
    if offsets < 0:  # the kernels count up from 0 or more, or read
        check_seq_format(seq_format)
        check_tensor("q", q, (rank(seq_format),), f"{seq_format} of rank {rank(seq_format)}")
        if offsets < -(2**63):
            raise ValueError(f"offsets: expected an integer >= -2**63, got {offsets}")
        batch = to_bshd(q, seq_format).shape[:1]
        return torch.full(batch, offsets, dtype=torch.int64, device=q.device), 0, True
    return None, offsets, False


def features(rotary_slice: tuple[int, int]) -> tuple[int, int]:
    """``rotary_slice`` as two ints.

    Raises:
        TypeError: it is not a sequence of integers.
        ValueError: it has not two of them.
    """
    ends = integers("rotary_slice", rotary_slice)
    if len(ends) != 2:
        raise ValueError(f"rotary_slice: expected (first, end), got {ends}")
    return ends


class _Prepared(NamedTuple):
    rotation: Rotation
    launch: Callable[..., None] | None  # None: the backend takes every call as its first


_prepared: LaunchCache[_Prepared] = LaunchCache()


def rotated(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    options: Options,
    inplace: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rotated q, or q and k, in new tensors or in place. Arguments and errors as for `apply_rope`."""
    # The rows of frequencies are pairs, so their number decides too.
    tensors = q, k, positions, cos if options.table_free else None
    key = call_key(tensors, (cos, sin), options, inplace)
    if inplace and k is not None and key is not None:
        key = key, bytes_between(q, k)
    prepared = _prepared.get(key)
    if prepared is None:
        check_rope_arguments(q, k, cos, sin, positions, options)
        if inplace:
            check_layouts_alike(options)
            check_memory(q, k)
    check_places(q, cos, positions, first_position, options)
    if inplace:
        check_writable(q, k)
    q_out = q if inplace else torch.empty_like(q)
    k_out = k if inplace or k is None else torch.empty_like(k)
    if prepared is None:
        prepared = _prepare(q, k, q_out, k_out, cos, sin, positions, options)
        _prepared.put(key, prepared)
    if inplace:  # a kernel writes unseen: whoever saved q or k for a backward must learn of it
        increment_version((q,) if k is None else (q, k))
    if prepared.launch is None:
        xs, outs, positions = _views(q, k, q_out, k_out, positions, options)
        rotate = backend("rotate", q).rotate
        rotate(xs, outs, cos, sin, prepared.rotation, positions=positions, first_position=first_position)
    else:
        # Where there is no k, or no positions, the kernel ignores what stands in for them.
        prepared.launch(
            q, q if k is None else k, q_out, q_out if k is None else k_out, cos, sin,
            cos if positions is None else positions, first_position, row_count(cos),
        )  # fmt: skip
    return q_out if k_out is None else (q_out, k_out)


def _prepare(q, k, q_out, k_out, cos, sin, positions, options: Options) -> _Prepared:
    rotation = options.rotation(cos)
    xs, outs, positions = _views(q, k, q_out, k_out, positions, options)
    launch = None
    if uses_triton(q) and all(t.stride(-1) == 1 for t in (*xs, *outs, cos, sin)):
        rotate_triton = backend("rotate", q)
        if len(xs[0]) <= rotate_triton.MAX_BATCH:
            launch = rotate_triton.plan(xs, outs, cos, sin, positions, rotation)
    return _Prepared(rotation, launch)


def _views(q, k, q_out, k_out, positions, options: Options):
    """What the backends take: ``[B, S, H, D]``, where out is in one object, and positions ``[B, S]`` or ``[B]``."""
    xs = [to_bshd(x, options.seq_format) for x in (q, k) if x is not None]
    outs = [
        view if x is out else to_bshd(out, options.seq_format)
        for view, x, out in zip(xs, (q, k), (q_out, k_out), strict=False)
    ]
    if positions is not None and not options.offsets:
        positions = positions.expand(xs[0].shape[:2])
    return xs, outs, positions
