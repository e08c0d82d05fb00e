"""The rotation as operators of the dispatcher: what torch.compile, torch.export and fake tensors see.

Plain tensors in eager mode take the direct way to `ropelab.prepared`: a detour through the dispatcher would
cost more than all the rest of the call.
"""

from collections.abc import Sequence

import torch

from ropelab.checks import check_rope_arguments
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
) -> list[torch.Tensor]:
    options = _options(layout, out_layout, seq_format, rotary_slice, offsets, transpose, table_free)
    return _as_list(rotated(*_q_and_k(xs), cos, sin, positions, first_position, options, inplace=False))


@_rotate.register_fake
def _(xs, cos, sin, positions, first_position, layout, out_layout, seq_format, rotary_slice, offsets, transpose,
      table_free):  # fmt: skip
    return [torch.empty_like(x) for x in xs]


@torch.library.custom_op("ropelab::rotate_", mutates_args={"xs"})
def _rotate_in_place(
    xs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    seq_format: str,
    rotary_slice: Sequence[int] | None,
    offsets: bool,
    transpose: bool,
    table_free: bool,
) -> None:
    options = _options(layout, layout, seq_format, rotary_slice, offsets, transpose, table_free)
    rotated(*_q_and_k(xs), cos, sin, positions, first_position, options, inplace=True)


def must_dispatch(q: torch.Tensor) -> bool:
    """Whether ``q`` stands for a tensor, as under torch.compile, instead of being one."""
    return (
        torch.compiler.is_compiling()
        or type(q) not in (torch.Tensor, torch.nn.Parameter)
        and isinstance(q, torch.Tensor)
        or torch._C._len_torch_dispatch_stack() > 0
    )


def dispatched(q, k, cos, sin, positions, first_position, options: Options, inplace: bool):
    """As `ropelab.prepared.rotated`, through the dispatcher."""
    check_rope_arguments(q, k, cos, sin, positions, options, inplace=False)  # overlap shows when it runs
    xs = [q] if k is None else [q, k]
    layout, out_layout, *rest = options
    if inplace:
        _rotate_in_place(xs, cos, sin, positions, first_position, layout, *rest)
        return q if k is None else (q, k)
    ys = _rotate(xs, cos, sin, positions, first_position, layout, out_layout, *rest)
    return ys[0] if k is None else tuple(ys)


def _options(layout, out_layout, seq_format, rotary_slice, offsets, transpose, table_free) -> Options:
    rotary_slice = None if rotary_slice is None else tuple(rotary_slice)
    return Options(layout, out_layout, seq_format, rotary_slice, offsets, transpose, table_free)


def _q_and_k(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return xs[0], xs[1] if len(xs) > 1 else None


def _as_list(ys: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [ys] if isinstance(ys, torch.Tensor) else list(ys)
