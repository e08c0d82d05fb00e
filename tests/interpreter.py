"""Triton's interpreter without the work that it repeats or throws away, and with checks of what would fault on a GPU.

Kernels compute the same bits in less time. A kernel promises the compiler that numbers are multiples, or adjacent. The
interpreter needs no such hints and ignores them. A GPU faults after a wrong hint, or reads other elements. A GPU also
faults at some addresses outside of the tensors of a launch, where the interpreter reads whatever is there.

As a plugin of pytest it does so for all tests; a lane with ``-p no:tests.interpreter`` has the interpreter as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


def pytest_configure(config) -> None:
    """Make the interpreter of the tests faster."""
    hasten()


def hasten() -> None:
    """Make the interpreter of this process faster, for good; the process must compile no kernel."""
    # The interpreter computes whether a sum or a product of integers overflows. It looks at the answer only if its
    # option debug is set, and nothing sets this option.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    # The interpreter replaces the functions of the language at each launch and at each call of a device function.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    # Each operation makes a type, and the few types of a kernel come again and again.
    tl.core.pointer_type.__hash__ = tl.core.block_type.__hash__ = lambda self: hash(self.name)
    interpreter._get_np_dtype = cache(interpreter._get_np_dtype)
    tl.core.block_type.__init__ = _block_type
    tl.core.tensor.__init__ = _tensor
    interpreter.TensorHandle.set_attr = _checked_hint
    interpreter.GridExecutor._init_args_hst = _noted_arguments
    builder.create_masked_load = _checked_access(builder.create_masked_load, mask_at=1)
    builder.create_masked_store = _checked_access(builder.create_masked_store, mask_at=2)
    tl.core.tuple.__eq__ = _same_values

    # Two tensors of one shape need no broadcast, and two of one type no conversion, but for a quotient.
    TritonSemantic.broadcast_impl_value = _unless_of_one_shape(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_type_checking_impl = _unless_of_one_type(TritonSemantic.binary_op_type_checking_impl)


def _block_type(self, element_ty, shape):
    assert isinstance(shape, (list, tl.tuple))
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _described(element_ty, *map(_plain, shape))


@cache
def _described(element_ty, *shape):
    """The shape, the number of elements and the name of a type of blocks."""
    if not shape:
        raise TypeError("0d block_type is forbidden")
    values = tl.tuple(shape)
    return values, validate_block_shape(values), f"<{values}, {element_ty}>"


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _sizes(*type.shape) if type.is_block() else _sizes()


def _checked_hint(self, name, values):
    """Note a hint of a kernel, and raise AssertionError unless it is true.

    ``tt.contiguity``: along each axis, so many elements are successive numbers. ``tt.divisibility``: the first element
    of each of these groups is such a multiple; without groups, every element is.
    """
    values = self.attr[name] = [_plain(value) for value in values]
    if max(values) == 1:
        return
    data = np.atleast_1d(self.data).astype(np.int64)
    groups = self.attr.get("tt.contiguity", [1] * data.ndim)
    for axis, size in enumerate(groups):
        size = min(size, data.shape[axis])
        along = np.moveaxis(data, axis, -1)
        along = along.reshape(*along.shape[:-1], -1, size)
        if name == "tt.contiguity":
            assert (np.diff(along) == 1).all(), f"expected groups of {size} adjacent elements, got {along}"
        if name == "tt.divisibility":
            multiple = self.attr[name][axis]
            assert (along[..., 0] % multiple == 0).all(), f"expected multiples of {multiple}, got {along[..., 0]}"


_init_args_hst = interpreter.GridExecutor._init_args_hst
_memory: list[np.ndarray] = []
"""The first address of each piece of memory that the launch may touch, ascending, and the address after each piece."""


_checks_addresses = True


@contextmanager
def any_address() -> Iterator[None]:
    """Within the context, kernels may touch any memory: the kernel of somebody else that is shown to do so."""
    global _checks_addresses
    _checks_addresses = False
    try:
        yield
    finally:
        _checks_addresses = True


def _noted_arguments(self, arguments, options):
    """The arguments of a launch, after noting the memory of its tensors; pieces that overlap become one."""
    found = _init_args_hst(self, arguments, options)
    arguments = [*found[0], *found[1].values()]
    tensors = [x for argument in arguments for x in _flat(argument) if hasattr(x, "data_ptr") and x.numel()]
    pieces: list[list[int]] = []
    for start, end in sorted((x.data_ptr(), x.data_ptr() + _span(x)) for x in tensors):
        if pieces and start <= pieces[-1][1]:
            pieces[-1][1] = max(pieces[-1][1], end)
        else:
            pieces.append([start, end])
    _memory[:] = np.array(pieces, dtype=np.uint64).reshape(-1, 2).T
    return found


def _flat(argument) -> Iterator:
    """The leaves of an argument, which may be a tuple of tuples; of a descriptor its tensor."""
    if isinstance(argument, TensorDescriptor):
        yield argument.base
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _flat(part)
    else:
        yield argument


def _span(x) -> int:
    """The bytes from the first element of a tensor to the end of the last."""
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _checked_access(access, mask_at: int):
    """``access`` of the interpreter, which raises AssertionError for an address outside of the launch's tensors."""

    def checked(ptrs, *arguments, **options):
        mask = arguments[mask_at - 1]  # of a descriptor an array
        at = ptrs.data[(mask if isinstance(mask, np.ndarray) else mask.data).astype(bool)]
        if at.size and _checks_addresses:
            starts, ends = _memory
            size = np.uint64(ptrs.get_element_ty().primitive_bitwidth // 8)
            first = np.searchsorted(starts, at.min(), side="right") - 1
            if first >= 0 and at.max() + size <= ends[first]:  # one piece, as nearly always
                return access(ptrs, *arguments, **options)
            piece = np.searchsorted(starts, at, side="right").astype(np.int64) - 1
            inside = (piece >= 0) & (at + size <= ends[piece])
            assert inside.all(), f"expected addresses within the tensors of the launch, got {(~inside).sum()} others"
        return access(ptrs, *arguments, **options)

    return checked


def _unless_of_one_shape(broadcast):
    """``broadcast`` of two tensors, where their shapes, which `_sizes` makes once each, are not the same object."""
    return lambda self, lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)


def _unless_of_one_type(convert):
    """``convert`` of the operands of a binary operation, where they are not two tensors of one type of numbers."""

    def converted(self, lhs, rhs, *rules):
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.shape is rhs.shape:
            if lhs.dtype is rhs.dtype and not (any(rules[3:]) or lhs.dtype.is_ptr()):  # the fourth rule: a quotient
                return lhs, rhs
        return convert(self, lhs, rhs, *rules)

    return converted


@cache
def _sizes(*shape):
    """The number of elements of a tensor, and its shape, as constants of the language."""
    count = 1
    for size in shape:
        count *= size
    return tl.constexpr(count), tl.tuple([tl.constexpr(size) for size in shape])


def _same_values(self, other):
    return tl.constexpr([*map(_plain, self.values)] == [*map(_plain, other)])


def _plain(value):
    return value.value if isinstance(value, tl.constexpr) else value
