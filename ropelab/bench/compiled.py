"""Compile the kernel of a launch for a GPU that need not be there."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.tools.tensor_descriptor import TensorDescriptor

from ropelab.kernels.launch import Launch

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip


def compiled(launch: Launch, arguments: Sequence[Any], capability: int | str) -> Any:
    """The kernel of a launch on ``arguments``, the kernel's first, compiled for a GPU.

    Args:
        arguments: tensors, ints, descriptors, and named tuples of them and of None.
        capability: the compute capability of an NVIDIA GPU, such as 90; or the name of AMD's architecture, such as
            "gfx942".
    """
    kernel, values = launch.kernel, (*arguments, *launch.fixed)
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        else:
            specializes = not parameter.do_not_specialize
            signature[parameter.name] = type_of(value, (i,), specializes, constants, attributes)
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32) if isinstance(capability, int) else GPUTarget("hip", capability, 64)
    known = {field.name for field in fields(make_backend(target).parse_options({}))}
    assert launch.options.keys() <= known, f"{capability}: no option of this GPU: {launch.options.keys() - known}"
    return triton.compile(source, target=target, options=launch.options)


def type_of(value, path: tuple[int, ...], specializes: bool, constants: dict, attributes: dict):
    """The type of an argument as Triton's JIT finds it, which also compiles None and the number 1 as constants.

    Args:
        path: the number of the argument and, within named tuples, of the field.
        specializes: whether the kernel distinguishes numbers.
        constants, attributes: what the compiler knows of a value, by its path; the function adds to them.
    """
    if isinstance(value, tuple):
        types = [type_of(x, (*path, i), specializes, constants, attributes) for i, x in enumerate(value)]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape}>".replace(" ", "")
    is_tensor = isinstance(value, torch.Tensor)
    if value is None or (specializes and not is_tensor and value == 1):
        constants[path] = value
        return "constexpr"
    if is_tensor or (specializes and value % 16 == 0):
        attributes[path] = [["tt.divisibility", 16]]
    return TYPES[value.dtype] if is_tensor else "i32"
