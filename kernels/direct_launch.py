"""This file calls the C function at the end of Triton's launch path, with addresses in place of tensors.

In Triton 3.6 and 3.7, a compiled kernel spends half of the host's time on Python frames, on an object for profilers,
and on a question to the driver about each tensor. The C function takes addresses and needs none of them. Its arguments
are no public interface of Triton: in other versions `direct_start` returns None, and the caller launches through
Triton.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

Start = Callable[[Sequence[torch.Tensor | int], Sequence[int]], None]
"""``start(arguments, addresses)`` launches a compiled kernel.

``arguments`` are the first arguments of the kernel: tensors, then numbers. ``addresses`` are those of the tensors."""

_runtime = triton.knobs.runtime
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a torch without CUDA lacks it


def direct_start(
    compiled: Any, grid: tuple[int, int, int], fixed: tuple, device_index: int | None, through_triton: Start
) -> Start | None:
    """A launch of a compiled kernel on the current stream, or None where the arguments of the C function are unknown.

    Args:
        compiled: what a call of a ``triton.jit`` function returns.
        grid: the number of programs along each axis.
        fixed: the last arguments of the kernel.
        device_index: the current device of every launch.
        through_triton: the same launch through Triton, for a profiler that listens to launches.
    """
    version = ".".join(triton.__version__.split(".")[:2])
    run = compiled.run
    if version not in ("3.6", "3.7") or run.global_scratch_size or run.profile_scratch_size:
        return None  # with scratch memory, Triton allocates before each launch
    launch, function, attributes = run.launch, compiled.function, (run.launch_cooperative_grid, run.launch_pdl)
    no_scratch, no_profiler = (None, None), (None, None, None)
    if version == "3.6":
        middle = function, *attributes, *no_scratch, compiled.packed_metadata, *no_profiler

        def start(arguments, addresses) -> None:
            if _profiled():
                return through_triton(arguments, addresses)
            numbers = arguments[len(addresses) :]
            launch(*grid, _current_stream(device_index), *middle, *addresses, *numbers, *fixed)

        return start
    middle = (
        function, *attributes, compiled.packed_metadata, *no_profiler, *no_scratch,
        run.arg_annotations, run.kernel_signature,
    )  # fmt: skip

    def start(arguments, addresses) -> None:
        if _profiled():
            return through_triton(arguments, addresses)
        numbers = arguments[len(addresses) :]
        launch(*grid, _current_stream(device_index), *middle, (*addresses, *numbers, *fixed))

    return start


def _profiled() -> bool:
    """Whether a profiler listens to launches."""
    try:
        return bool(_runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls)
    except AttributeError:  # a hook that is no chain of hooks
        return True
