"""Triton's interpreter without the work that it repeats or throws away, and with a check of what kernels promise.

Kernels compute the same bits in less time. A kernel promises the compiler that numbers are multiples, or adjacent. The
interpreter needs no such hints and ignores them. A GPU faults after a wrong hint, or reads other elements.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter


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
    tl.core.tuple.__eq__ = _same_values


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
    self.attr[name] = [_plain(value) for value in values]
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
