"""This file launches kernels without the cost of Triton's JIT wrapper, which inspects every argument of every call."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton

from ropelab.kernels.backends import INTERPRETED

if triton.knobs.runtime.interpret != INTERPRETED:
    raise RuntimeError(
        f"TRITON_INTERPRET: expected the value that it had when ropelab was imported ({INTERPRETED}), "
        f"got {triton.knobs.runtime.interpret}"
    )


class Launch:
    """A kernel on one device, whose last arguments are fixed: a call passes the tensors and a few numbers.

    Triton's JIT compiles a kernel again for tensors of other dtypes. For each tensor it also distinguishes whether the
    address is a multiple of 16. Every call of a launch passes tensors of the same dtypes, and a launch keeps one
    compiled kernel for each combination of alignments. The numbers of a call must fit into int32.

    Args:
        kernel: a ``triton.jit`` function that specializes on no number.
        grid: the number of programs along each axis.
        numbers: the arguments between the arguments of a call and the constants, in the order of the kernel.
        constants: the last parameters of the kernel, by name.
        options: the options of the compiler, see `compiler_options`.
        device: the device of the tensors.

    Raises:
        ValueError: ``constants`` are not the last parameters of the kernel.
    """

    def __init__(
        self,
        kernel,
        grid: tuple[int, int, int],
        numbers: Sequence[int],
        constants: dict,
        options: dict,
        device: torch.device,
    ):
        names = kernel.arg_names[-len(constants) :]
        if set(names) != set(constants):
            raise ValueError(f"constants: expected the last parameters of the kernel {names}, got {list(constants)}")
        self.kernel, self.grid, self.options = kernel, grid, options
        self.device_index = device.index if device.type == "cuda" else None
        self.fixed = (*numbers, *(constants[name] for name in names))
        """The last arguments of the kernel, in its order."""
        self._compiled: dict[tuple[bool, ...], Callable[..., None]] = {}

    def __call__(self, *arguments: torch.Tensor | int) -> None:
        """Launch on the current stream of the tensors' device; ``arguments`` are the first arguments of the kernel."""
        if self.device_index is None or self.device_index == torch.cuda.current_device():
            self._launch(arguments)
        else:  # Triton launches on the current device
            with torch.cuda.device(self.device_index):
                self._launch(arguments)

    def _launch(self, arguments: tuple[torch.Tensor | int, ...]) -> None:
        aligned = alignments(arguments)
        start = self._compiled.get(aligned)
        if start is None:
            start = self._compiled[aligned] = self._compile(arguments)
        else:
            start(*arguments, *self.fixed)

    def _compile(self, arguments: tuple[torch.Tensor | int, ...]) -> Callable[..., None]:
        """Launch through Triton's JIT, and return a function that launches for arguments of the same alignments."""
        compiled = self.kernel[self.grid](*arguments, *self.fixed, **self.options)
        # The interpreter compiles nothing. On AMD GPUs the JIT also specializes on the sizes of storages.
        if compiled is None or torch.version.hip is not None:
            return partial(self.kernel[self.grid], **self.options)
        return compiled[self.grid]


def alignments(arguments: Sequence[Any]) -> tuple[bool, ...]:
    """Whether the address of each tensor is a multiple of 16; this decides how many bytes a kernel reads at once."""
    return tuple([x.data_ptr() % 16 == 0 for x in arguments if type(x) is not int])


def compiler_options(num_warps: int, max_registers: int | None, *, fuse: bool) -> dict:
    """The compiler's options for a launch; ``maxnreg`` is an option for NVIDIA's GPUs only.

    Args:
        num_warps: the warps of a program.
        max_registers: the limit on the registers of a thread; None leaves it to the assembler.
        fuse: whether the compiler may fuse a product and a sum, so that they round once.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": fuse}
    return options if torch.version.hip is not None else options | {"maxnreg": max_registers}
