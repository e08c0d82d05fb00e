"""This file makes the rotation an operator of PyTorch's dispatcher, for torch.compile, torch.export and fake tensors.

Plain tensors in eager mode bypass the dispatcher, because the dispatcher takes longer than the rest of the call.
"""

from collections.abc import Sequence

import torch

from ropelab.call.angles import Angles, angles_of
from ropelab.call.checks import check_layouts_alike, check_memory, check_rope_arguments, check_writable
from ropelab.call.options import Options
from ropelab.call.rotation import executed


def run(q, k, angles: Angles, positions, first_position: int, options: Options, inplace: bool):
    """Rotate q, or q and k, without a record for autograd: through the dispatcher if `must_dispatch`, else directly."""
    step = _dispatched if must_dispatch(q, k) else executed
    return step(q, k, angles, positions, first_position, options, inplace)


def must_dispatch(q: torch.Tensor, k: torch.Tensor | None) -> bool:
    """Whether the call must go through the dispatcher.

    A call must go through the dispatcher where a compiler traces, where a dispatch mode is active, where q or k is of
    a subclass of tensor, such as a fake tensor, and for tensors on the device meta. Parameters count as plain tensors.

    Raises:
        TypeError: q or k is a DTensor, whose sharding the operators do not know.
    """
    return (
        torch.compiler.is_compiling()
        or (type(q) not in _PLAIN and _is_subclass("q", q))
        or (type(k) not in _PLAIN and _is_subclass("k", k))
        or torch._C._len_torch_dispatch_stack() > 0
        or (isinstance(q, torch.Tensor) and q.is_meta)
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def _is_subclass(name: str, x) -> bool:
    """Whether ``x`` is of a subclass of tensor."""
    if type(x).__name__ == "DTensor":
        raise TypeError(f"{name}: expected a plain tensor (to_local(), or ropelab.interop.dtensor), got a DTensor")
    return isinstance(x, torch.Tensor)


def _dispatched(q, k, angles: Angles, positions, first_position: int, options: Options, inplace: bool):
    """Rotate through the dispatcher into new tensors, and for ``inplace`` copy the new tensors over q and k.

    With dynamic shapes, Inductor hands an operator that writes to a view a different view
    (https://github.com/pytorch/pytorch/issues/198068), so the operator writes to new tensors only.
    """
    check_rope_arguments(q, k, angles, positions, options)
    if inplace:
        check_layouts_alike(options)
        if not torch.compiler.is_compiling():  # compilers cannot follow this check
            check_writable(q, k)
        options = options._replace(overwrites=True)
    ys = rotate([q] if k is None else [q, k], *angles.tensors, positions, first_position, *options)
    if inplace:
        ys = copy_over((q,) if k is None else (q, k), ys)
    return ys[0] if k is None else tuple(ys)


def copy_over(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copy each of ``ys`` to its counterpart in ``xs``, and return ``xs``."""
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)  # if y is of a subclass, copy_ may return another object than x
    return tuple(xs)


@torch.library.custom_op("ropelab::rotate", mutates_args=())
def rotate(
    xs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    out_layout: str,
    seq_format: str,
    rotary_slice: Sequence[int] | None,
    offsets: bool,
    transpose: bool,
    overwrites: bool,
) -> list[torch.Tensor]:
    """Rotate into new tensors: the operator ``ropelab::rotate``.

    Args:
        xs: q, or q and k.
        cos, sin: `Angles.tensors`.
        layout, out_layout, seq_format, rotary_slice, offsets, transpose, overwrites: the fields of `Options`.
    """
    q, k = _q_and_k(xs)
    if overwrites:
        check_memory(q, k)
    slice_ = None if rotary_slice is None else (rotary_slice[0], rotary_slice[1])
    options = Options(layout, out_layout, seq_format, slice_, offsets, transpose)
    ys = executed(q, k, angles_of(cos, sin), positions, first_position, options, inplace=False)
    return [ys] if isinstance(ys, torch.Tensor) else list(ys)


@rotate.register_fake
def _(xs, cos, sin, positions, first_position, layout, out_layout, seq_format, rotary_slice, offsets, transpose,
      overwrites):  # fmt: skip
    if overwrites:
        check_memory(*_q_and_k(xs))
    return [torch.empty_like(x) for x in xs]


def _q_and_k(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return xs[0], xs[1] if len(xs) > 1 else None
