"""PyTorch's dispatcher: which calls go through it, and the operators that they take."""

from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

from ropelab.call.where import SCHEMA

PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
"""The types of tensors whose memory a kernel may take, and of a tensor that a call lacks."""


def transformed() -> bool:
    """Whether a transform of torch.func or forward mode is active."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def check_untransformed(name: str) -> None:
    """Raise NotImplementedError under a transform of torch.func or in forward mode, for a function without them."""
    if transformed():
        raise NotImplementedError(f"{name}: transforms of torch.func and forward mode are unsupported")


def watched() -> bool:
    """Whether a compiler, a transform, forward mode or a dispatch mode sees the operations of a call."""
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0  # `transformed`, without a call
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def must_dispatch(q: torch.Tensor | None, k: torch.Tensor | None, names: Sequence[str] = ("q", "k")) -> bool:
    """Whether a call with these tensors must go through the dispatcher.

    A call must go through the dispatcher where a compiler traces, where a dispatch mode is active, where q or k is of a
    subclass of tensor, such as a fake tensor, and for tensors on the device meta. Parameters count as plain tensors.

    Raises:
        TypeError: q or k is a DTensor, whose sharding the operators do not know.
    """
    return (
        torch.compiler.is_compiling()
        or (type(q) not in PLAIN and is_subclass(names[0], q))
        or (type(k) not in PLAIN and is_subclass(names[1], k))
        or torch._C._len_torch_dispatch_stack() > 0
        or (isinstance(q, torch.Tensor) and q.is_meta)
    )


def is_subclass(name: str, x) -> bool:
    """Whether ``x``, which is none of the types `PLAIN`, is a tensor; raise TypeError for a DTensor."""
    if type(x).__name__ == "DTensor":
        raise TypeError(f"{name}: expected a plain tensor (to_local(), or ropelab.interop.dtensor), got a DTensor")
    return isinstance(x, torch.Tensor)


def operator(name: str, given: str, numbers: str, result: str, run: Callable, fake: Callable, mutates=()) -> Callable:
    """Make ``run`` an operator of PyTorch's dispatcher.

    Args:
        name: ``"ropelab::..."``.
        given, numbers, result: the schema of the arguments before and after those of `Where`, and of the result.
        run, fake: called with the arguments; ``fake`` makes the results without data.
        mutates: the names of the arguments that the operator writes.
    """
    arguments = ", ".join(part for part in (given, SCHEMA, numbers) if part)
    made = torch.library.custom_op(name, run, mutates_args=mutates, schema=f"({arguments}) -> {result}")
    made.register_fake(fake)
    return made


def copy_over(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copy each of ``ys`` to its counterpart in ``xs``, and return ``xs``."""
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)  # if y is of a subclass, copy_ may return another object than x
    return tuple(xs)
