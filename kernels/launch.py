"""This file launches kernels without the price of Triton's JIT wrapper, which looks at every argument of every call."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton

from ropelab.kernels.backends import INTERPRETED

if triton.knobs.runtime.interpret != INTERPRETED:
    raise RuntimeError(
        f"TRITON_INTERPRET: expected the value that it had when ropelab was imported ({INTERPRETED}), "
        f"got {triton.knobs.runtime.interpret}"
    )


class Launch:
    """A kernel on one device, with everything fixed but the tensors (and numbers that come with every call).

    Triton's JIT compiles a kernel anew for tensors of other dtypes, and for a tensor whose address is a multiple of 16
    or is none, each tensor by itself. A launch has tensors of one dtype in each place, and keeps a compiled kernel for
    each combination of alignments that it meets. The numbers of a call fit into int32.

    Args:
        kernel: a ``triton.jit`` function that specializes on no number.
        grid: its programs.
        numbers: the arguments between those of the call and the constants, in the kernel's order.
        constants: the kernel's last parameters, by name and in its order.
        options: of the compiler, see `compiler_options`.
        device: where the tensors are.
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
        """The kernel's last arguments, in its order."""
        self._compiled: dict[tuple[bool, ...], Callable[..., None]] = {}

    def __call__(self, *arguments: torch.Tensor | int) -> None:
        """Launch on the tensors' device and its current stream; ``arguments`` are the kernel's first."""
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
        """Launch through Triton's JIT, and return what launches for arguments of the same alignments."""
        compiled = self.kernel[self.grid](*arguments, *self.fixed, **self.options)
        # The interpreter compiles nothing. On AMD GPUs the JIT also specializes on the sizes of storages.
        if compiled is None or torch.version.hip is not None:
            return partial(self.kernel[self.grid], **self.options)
        return compiled[self.grid]


def alignments(arguments: Sequence[torch.Tensor | int]) -> tuple[bool, ...]:
    """Whether the address of each tensor is a multiple of 16, which decides how many bytes a kernel reads at once."""
    return tuple([x.data_ptr() % 16 == 0 for x in arguments if type(x) is not int])


def compiler_options(num_warps: int, max_registers: int | None, *, fuse: bool) -> dict:
    """The options of a launch, without those that only NVIDIA's GPUs know where there is another.

    Args:
        max_registers: of a thread; None leaves them to the assembler.
        fuse: whether a product and a sum may round once.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": fuse}
    return options if torch.version.hip is not None else options | {"maxnreg": max_registers}
