"""Run a rotation: what the shapes, strides and dtypes decide is checked and prepared once, then repeated.

A call with few tokens lasts a few microseconds on a GPU, so the host must not spend a hundred on it. Nearly all it
does depends on properties that repeat from layer to layer and from step to step; these form a key.
"""

from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from ropelab.checks import check_first_position, check_positions, check_rope_arguments
from ropelab.kernels import Rotation, backend_for, position_count, rotate_triton
from ropelab.kernels.launch import Launch
from ropelab.seq_format import SEQ_AXIS, to_bshd


class Options(NamedTuple):
    """The arguments of `apply_rope` that are not tensors.

    ``offsets``: the positions given are those of the sequences' first tokens. ``transpose``: rotate back.
    ``table_free``: frequencies stand in the places of cos and sin.
    """

    layout: str
    out_layout: str
    seq_format: str
    rotary_slice: tuple[int, int] | None
    offsets: bool
    transpose: bool
    table_free: bool = False

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
        ValueError: both are given.
    """
    if positions is not None:
        if isinstance(offsets, torch.Tensor) or offsets:
            raise ValueError("offsets: expected none beside positions, got both")
        return positions, 0, False
    if isinstance(offsets, torch.Tensor):
        return offsets, 0, True
    if isinstance(offsets, int) and offsets < 0:  # the kernels count up from 0 or more, or read
        batch = to_bshd(q, seq_format).shape[:1]
        return torch.full(batch, offsets, dtype=torch.int64, device=q.device), 0, True
    return None, offsets, False


class _Prepared(NamedTuple):
    rotation: Rotation
    launch: Launch | None  # None: the backend takes every call as its first
    device: int | None


_prepared: dict[tuple, _Prepared] = {}
_MOST_PREPARED = 4096  # then all are forgotten: a bound for programs whose shapes never repeat


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
    try:
        key = _key(q, k, cos, sin, positions, options, inplace)
        prepared = _prepared.get(key)
    except (AttributeError, TypeError):  # something is no tensor, or cannot be hashed: the checks will name it
        key = prepared = None
    if prepared is None or cos.shape != sin.shape:
        check_rope_arguments(q, k, cos, sin, positions, options, inplace)
    if positions is None:
        check_first_position(first_position, q.shape[SEQ_AXIS[options.seq_format]], cos)
    elif not positions.is_cuda:
        check_positions(positions, q.shape[SEQ_AXIS[options.seq_format]], cos, options.offsets)
    q_out = q if inplace else torch.empty_like(q)
    k_out = k if inplace or k is None else torch.empty_like(k)
    if prepared is None:
        prepared = _prepare(q, k, q_out, k_out, cos, sin, positions, options)
        if len(_prepared) >= _MOST_PREPARED:
            _prepared.clear()
        _prepared[key] = prepared
    if inplace:  # a kernel writes unseen: whoever saved q or k for a backward must learn of it
        increment_version((q,) if k is None else (q, k))
    if prepared.launch is None:
        xs, outs, positions = _views(q, k, q_out, k_out, positions, options)
        backend_for(q).rotate(xs, outs, cos, sin, prepared.rotation, positions=positions, first_position=first_position)
    else:
        # Where there is no k, or no positions, the kernel ignores what stands in for them.
        arguments = (
            q, q if k is None else k, q_out, q_out if k is None else k_out, cos, sin,
            cos if positions is None else positions, first_position, position_count(cos),
        )  # fmt: skip
        if torch.cuda.current_device() == prepared.device:
            prepared.launch(*arguments)
        else:
            with torch.cuda.device(prepared.device):
                prepared.launch(*arguments)
    return q_out if k is None else (q_out, k_out)


def _key(q, k, cos, sin, positions, options, inplace) -> tuple:
    """All that `_prepare` looks at, and the checks; the number of the tables' rows comes with every call."""
    addresses = q.data_ptr() | cos.data_ptr() | sin.data_ptr()
    k_key = positions_key = None
    if k is not None:
        addresses |= k.data_ptr()
        k_key = (k.shape, k.stride(), k.dtype, k.device, _distance(q, k) if inplace else None)
    if positions is not None:
        addresses |= positions.data_ptr()
        positions_key = (positions.shape, positions.stride(), positions.dtype, positions.device)
    return (
        q.shape, q.stride(), q.dtype, q.device, k_key, positions_key, options, inplace, addresses % 16,
        cos.shape if options.table_free else (cos.shape[:-2], cos.shape[-1]),
        cos.stride(), cos.dtype, cos.device, sin.stride(), sin.dtype, sin.device,
    )  # fmt: skip


def _distance(q: torch.Tensor, k: torch.Tensor) -> int | None:
    """Elements from q to k where they share a storage: decides with the strides whether they overlap."""
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return None
    return k.storage_offset() - q.storage_offset()


def _prepare(q, k, q_out, k_out, cos, sin, positions, options: Options) -> _Prepared:
    rotation = options.rotation(cos)
    xs, outs, positions = _views(q, k, q_out, k_out, positions, options)
    tensors = [*xs, *outs, cos, sin]
    launch = None
    if (
        q.is_cuda
        and len(xs[0]) <= rotate_triton.MAX_BATCH
        and all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0 for t in tensors)
    ):
        launch = rotate_triton.plan(xs, outs, cos, sin, positions, rotation)
    return _Prepared(rotation, launch, q.device.index)


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
