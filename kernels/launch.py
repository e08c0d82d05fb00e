"""This file launches kernels without the cost of Triton's JIT wrapper, which inspects every argument of every call."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton

from ropelab.kernels.backends import INTERPRETED
from ropelab.kernels.direct_launch import Start, direct_start

if triton.knobs.runtime.interpret != INTERPRETED:
    raise RuntimeError(
        f"TRITON_INTERPRET: expected the value that it had when ropelab was imported ({INTERPRETED}), "
        f"got {triton.knobs.runtime.interpret}"
    )

_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # a torch without CUDA lacks it


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
        self._compiled: dict[tuple[bool, ...], Start] = {}

    def __call__(self, *arguments: torch.Tensor | int) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            arguments: the first arguments of the kernel: tensors, then numbers.
        """
        index = self.device_index
        if index is not None and index != _current_device():
            with torch.cuda.device(index):  # Triton launches on the current device
                return self(*arguments)
        addresses = [x.data_ptr() for x in arguments if type(x) is not int]  # type: ignore[union-attr]
        aligned = alignments(addresses)
        start = self._compiled.get(aligned)
        if start is None:
            self._compiled[aligned] = self._compile(arguments)
        else:
            start(arguments, addresses)

    def _compile(self, arguments: tuple[torch.Tensor | int, ...]) -> Start:
        """Launch through Triton's JIT, and return a function that launches for arguments of the same alignments."""
        compiled = self.kernel[self.grid](*arguments, *self.fixed, **self.options)
        # The interpreter compiles nothing. On AMD GPUs the JIT also specializes on the sizes of storages.
        if compiled is None or torch.version.hip is not None:
            return _through(partial(self.kernel[self.grid], **self.options), self.fixed)
        public = _through(compiled[self.grid], self.fixed)
        return direct_start(compiled, self.grid, self.fixed, self.device_index, public) or public


def alignments(addresses: Sequence[int]) -> tuple[bool, ...]:
    """Whether each address is a multiple of 16; this decides how many bytes a kernel reads at once.

    Nearly always all addresses are multiples of 16. The result is then empty, because the host makes an empty tuple
    faster.
    """
    together = 0
    for address in addresses:
        together |= address
    return tuple([address % 16 == 0 for address in addresses]) if together % 16 else ()


def _through(launch: Callable[..., None], fixed: tuple) -> Start:
    """A launch that takes tensors, as a `Start`."""

    def start(arguments, addresses) -> None:
        launch(*arguments, *fixed)

    return start


def compiler_options(num_warps: int, max_registers: int | None, *, fuse: bool) -> dict:
    """The compiler's options for a launch; ``maxnreg`` is an option for NVIDIA's GPUs only.

    Args:
        num_warps: the warps of a program.
        max_registers: the limit on the registers of a thread; None leaves it to the assembler.
        fuse: whether the compiler may fuse a product and a sum, so that they round once.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": fuse}
    return options if torch.version.hip is not None else options | {"maxnreg": max_registers}
