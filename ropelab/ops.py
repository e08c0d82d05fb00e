"""This file makes the rotation an operator of the dispatcher, for torch.compile, torch.export and fake tensors.

Plain tensors in eager mode take the direct way to `ropelab.prepared`: a detour through the dispatcher would
cost more than all the rest of the call.
"""

from collections.abc import Sequence

import torch

from ropelab.checks import check_layouts_alike, check_memory, check_rope_arguments, check_writable
from ropelab.prepared import Options, rotated


@torch.library.custom_op("ropelab::rotate", mutates_args=())
def _rotate(
    xs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    out_layout: str,
    seq_format: str,
    rotary_slice: Sequence[int] | None,
    offsets: bool,
    transpose: bool,
    table_free: bool,
    overwrites: bool,
) -> list[torch.Tensor]:
    """Rotate into new tensors; ``overwrites`` says that the caller will write these over ``xs``."""
    if overwrites:
        check_memory(*_q_and_k(xs))
    slice_ = None if rotary_slice is None else (rotary_slice[0], rotary_slice[1])
    options = Options(layout, out_layout, seq_format, slice_, offsets, transpose, table_free)
    return _as_list(rotated(*_q_and_k(xs), cos, sin, positions, first_position, options, inplace=False))


@_rotate.register_fake
def _(xs, cos, sin, positions, first_position, layout, out_layout, seq_format, rotary_slice, offsets, transpose,
      table_free, overwrites):  # fmt: skip
    if overwrites:
        check_memory(*_q_and_k(xs))
    return [torch.empty_like(x) for x in xs]


def must_dispatch(q: torch.Tensor, k: torch.Tensor | None) -> bool:
    """Whether q or k stands for a tensor, as under torch.compile, instead of being one."""
    return (
        torch.compiler.is_compiling()
        or (type(q) not in _PLAIN and isinstance(q, torch.Tensor))
        or (type(k) not in _PLAIN and isinstance(k, torch.Tensor))
        or torch._C._len_torch_dispatch_stack() > 0
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def dispatched(q, k, cos, sin, positions, first_position, options: Options, inplace: bool):
    """As `ropelab.prepared.rotated`, through the dispatcher.

    In place it rotates into new tensors and copies: an operator that writes to a view is handed another view by
    Inductor where shapes are dynamic (https://github.com/pytorch/pytorch/issues/198068).
    """
    check_rope_arguments(q, k, cos, sin, positions, options)
    if inplace:
        check_layouts_alike(options)
        if not torch.compiler.is_compiling():  # compilers cannot follow it
            check_writable(q, k)
        options = options._replace(overwrites=True)
    ys = _rotate([q] if k is None else [q, k], cos, sin, positions, first_position, *options)
    if inplace:
        ys = copy_over((q,) if k is None else (q, k), ys)
    return ys[0] if k is None else tuple(ys)


def copy_over(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copy each of ``ys`` to its counterpart in ``xs``, which are returned."""
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)  # what that returns may be another object than x, if y is of a subclass
    return tuple(xs)


def _q_and_k(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return xs[0], xs[1] if len(xs) > 1 else None


def _as_list(ys: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [ys] if isinstance(ys, torch.Tensor) else list(ys)
