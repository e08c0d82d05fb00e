"""Launches of kernels without the cost of Triton's JIT wrapper, which inspects every argument of every call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
import triton

from ropelab.kernels.backends import INTERPRETED
from ropelab.kernels.choices import Choices
from ropelab.kernels.direct_launch import Start, direct_start
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.kernels.tensors import addresses_of

if triton.knobs.runtime.interpret != INTERPRETED:
    raise RuntimeError(
        f"TRITON_INTERPRET: expected the value that it had when ropelab was imported ({INTERPRETED}), "
        f"got {triton.knobs.runtime.interpret}"
    )

_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # a torch without CUDA lacks it


class Launch:
    """A kernel on one device for tensors that agree in everything except contents and addresses.

    A kernel has the parameters ``(ptr, numbers, ..., strides, C)``. A call passes what changes:
    the tensors, whose addresses are ``ptr``, and the first numbers. The launch keeps the other numbers, the strides and
    the choices.

    Triton's JIT compiles a kernel again for tensors of other dtypes. For each tensor it also distinguishes whether the
    address is a multiple of 16. Every call of a launch passes tensors of the same dtypes, and a launch keeps one
    compiled kernel for each combination of alignments. The numbers of a call must fit into int32.

    Args:
        kernel: a ``triton.jit`` function that specializes on no number outside of ``strides``.
        grid: the number of programs along each axis.
        numbers: the numbers between the numbers of a call and the strides.
        strides: a named tuple as ``ptr``, with the strides of each tensor, or with None.
        choices: see `choices.Choices`.
        options: the options of the compiler, see `compiler_options`.
        device: the device of the tensors.
    """

    def __init__(
        self,
        kernel,
        grid: tuple[int, int, int],
        numbers: Sequence[int],
        strides: tuple,
        choices: Choices,
        options: dict,
        device: torch.device,
    ):
        self.kernel, self.grid, self.options = kernel, grid, options
        self.device_index = device.index if device.type == "cuda" else None
        self.named = type(strides)
        self.fixed: tuple[Any, ...] = (*numbers, strides, choices)
        """The last arguments of the kernel, in its order."""
        self._compiled: dict[tuple[bool, ...], Start] = {}

    def __call__(self, tensors: tuple[torch.Tensor | None, ...], *numbers: Any) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            tensors: a plain tuple of tensors in the order of ``strides``; None for a tensor that the call lacks.
            numbers: the first numbers of the kernel, and its descriptors.
        """
        self.at(addresses_of(tensors), tensors, *numbers)

    def at(self, addresses: tuple[int, ...], tensors: tuple[torch.Tensor | None, ...], *numbers: Any) -> None:
        """Launch, as a call does, where the caller knows `addresses_of` the tensors."""
        index = self.device_index
        if index is not None and index != _current_device():
            with torch.cuda.device(index):  # Triton launches on the current device
                return self.at(addresses, tensors, *numbers)
        start = self._compiled.get(aligned := alignments(addresses))
        if start is None:
            self._compiled[aligned] = self._compile(tensors, numbers, aligned)
        else:
            start(tensors, addresses, numbers)

    def _compile(self, tensors: tuple, numbers: tuple, aligned: tuple[bool, ...]) -> Start:
        """Launch through Triton's JIT, and return a function that launches for arguments of the same alignments."""
        *others, choices = self.fixed
        fixed = (*others, replace(choices, ALIGNED=False)) if aligned else self.fixed
        launch = partial(self.kernel[self.grid], **self.options)
        compiled = launch(self.named(*tensors), *numbers, *fixed)
        # The interpreter compiles nothing. On AMD GPUs the JIT also specializes on the sizes of storages.
        if compiled is None or torch.version.hip is not None:
            return self._through(launch, fixed)
        public = self._through(compiled[self.grid], fixed)
        return direct_start(compiled, self.grid, fixed, self.device_index, public) or public

    def _through(self, launch: Callable[..., None], fixed: tuple) -> Start:
        """A launch that takes tensors, as a `Start`."""
        return lambda tensors, addresses, numbers: launch(self.named(*tensors), *numbers, *fixed)


@dataclass(frozen=True)
class LaunchWithBytes:
    """A launch for a target that does not have 8-bit floats: the kernel gets them as bytes."""

    launch: Launch

    def __call__(self, tensors: tuple, *numbers: int) -> None:
        as_bytes = (x.view(torch.uint8) if x is not None and x.dtype in FLOAT8_DTYPES else x for x in tensors)
        self.launch(tuple(as_bytes), *numbers)


def alignments(addresses: Sequence[int]) -> tuple[bool, ...]:
    """Whether each address is a multiple of 16; this decides how many bytes a kernel reads at once.

    Nearly always all addresses are multiples of 16. The result is then empty, because the host makes an empty tuple
    faster.
    """
    together = reduce(or_, addresses)
    return tuple([address % 16 == 0 for address in addresses]) if together % 16 else ()


def launch_nothing(tensors: tuple, *numbers: int) -> None:
    """Do nothing, because an empty grid cannot be launched."""


def compiler_options(num_warps: int, max_registers: int | None, *, fuse: bool) -> dict:
    """The compiler's options for a launch; ``maxnreg`` is an option for NVIDIA's GPUs only.

    Args:
        num_warps: the warps of a program.
        max_registers: the limit on the registers of a thread; None leaves it to the assembler.
        fuse: whether the compiler may fuse a product and a sum, so that they round once.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": fuse}
    return options if torch.version.hip is not None else options | {"maxnreg": max_registers}
