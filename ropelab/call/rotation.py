"""The rotation of plain tensors, and as an operator of PyTorch's dispatcher."""

from collections.abc import Sequence

import torch

from ropelab.call.checks import INPLACE, check_layouts_alike, check_memory, check_rope_arguments, check_writable
from ropelab.call.dispatcher import copy_over, must_dispatch, operator
from ropelab.call.operation import Operation
from ropelab.call.where import Options, Where
from ropelab.kernels.tensors import RotateTensors


def rotate_or_dispatch(q: torch.Tensor, k: torch.Tensor | None, where: Where, inplace: bool):
    """Rotate q, or q and k, without a record for autograd: through the dispatcher if `must_dispatch`, else directly."""
    if must_dispatch(q, k):
        ys = _dispatched(q, k, where, inplace)
    else:
        ys = (ROTATE_IN_PLACE if inplace else ROTATE)((q, k), where)
    return ys[0] if k is None else tuple(ys)


def _check(given, where: Where) -> None:
    q, k = given
    check_rope_arguments(q, k, where)


def _check_in_place(given, where: Where) -> None:
    _check(given, where)
    check_layouts_alike(where.options)


def _make(given, options: Options) -> Sequence[torch.Tensor | None]:
    q, k = given
    return torch.empty_like(q), None if k is None else torch.empty_like(k)


ROTATE = Operation("rotate", "rotate", RotateTensors, ("q", "k"), _check, _make, records=True)
ROTATE_IN_PLACE = Operation(
    "rotate", "rotate", RotateTensors, ("q", "k"), _check_in_place, lambda given, options: given,
    writes=2, condition=INPLACE, heads=(0, 1),
)  # fmt: skip


def _dispatched(q, k, where: Where, inplace: bool):
    """Rotate through the dispatcher into new tensors, and for ``inplace`` copy the new tensors over q and k.

    With dynamic shapes, Inductor hands an operator that writes to a view a different view
    (https://github.com/pytorch/pytorch/issues/198068), so the operator writes to new tensors only.
    """
    check_rope_arguments(q, k, where)
    xs = [q] if k is None else [q, k]
    if inplace:
        check_layouts_alike(where.options)
        if not torch.compiler.is_compiling():  # compilers cannot follow this check
            check_writable(("q", "k"), xs)
    ys = rotate(xs, *where.for_operators, inplace or where.options.overwrites)
    return copy_over(xs, ys) if inplace else ys


def _rotate(xs: Sequence[torch.Tensor], *arguments) -> list[torch.Tensor]:
    """The operator ``ropelab::rotate``: rotate q, or q and k, into new tensors.

    The last argument says whether the caller writes the results over q and k, so that no two of their elements may
    share an address.
    """
    where, q, k = Where.of_operator(*arguments[:-1]), xs[0], xs[1] if len(xs) > 1 else None
    if arguments[-1]:
        check_memory(q, k, where.read)
    return [y for y in ROTATE((q, k), where) if y is not None]


def _rotate_fake(xs: Sequence[torch.Tensor], *arguments) -> list[torch.Tensor]:
    if arguments[-1]:
        check_memory(xs[0], xs[1] if len(xs) > 1 else None)
    return [torch.empty_like(x) for x in xs]


rotate = operator("ropelab::rotate", "Tensor[] xs", "bool overwrites", "Tensor[]", _rotate, _rotate_fake)
