"""Launches without the price of the JIT wrapper, which looks at every argument of every call."""

from collections.abc import Sequence

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret


class Launch:
    """A kernel with everything fixed but the tensors (and numbers that come with every call).

    The first call goes through Triton's JIT, which compiles; later ones start the compiled kernel itself. That is
    right as long as nothing changes that the JIT specializes on: the dtypes, whether addresses are multiples of
    16, and whatever numbers are fixed here. Whoever keeps a ``Launch`` sees to that.
    """

    def __init__(self, kernel, grid: tuple[int, int, int], numbers: Sequence[int], constants: dict, options: dict):
        names = kernel.arg_names[-len(constants) :]
        if set(names) != set(constants):
            raise ValueError(f"constants: expected the last parameters of the kernel {names}, got {list(constants)}")
        self.kernel, self.grid, self.options = kernel, grid, options
        self.fixed = (*numbers, *(constants[name] for name in names))
        """The kernel's last arguments, in its order."""
        self._start = None

    def __call__(self, *arguments: torch.Tensor | int) -> None:
        """Launch on the current device and stream; ``arguments`` are the kernel's first."""
        if self._start is not None:
            self._start(*arguments, *self.fixed)
            return
        compiled = self.kernel[self.grid](*arguments, *self.fixed, **self.options)
        if compiled is not None:  # it is, under the interpreter
            self._start = compiled[self.grid]
