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

Start = Callable[[Sequence[Any], Sequence[int]], None]
"""``start(arguments, addresses)`` launches a compiled kernel.

``arguments`` are the first arguments of the kernel: tensors, then numbers. ``addresses`` are the addresses of the
tensors."""

_runtime = triton.knobs.runtime
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a torch without CUDA lacks it


def direct_start(
    compiled: Any, grid: tuple[int, int, int], fixed: tuple, device_index: int | None, through_triton: Start
) -> Start | None:
    """A launch of a compiled kernel on the current stream, or None where the arguments of the C function are unknown.

    Args:
        compiled: the result of a call of a ``triton.jit`` function.
        grid: the number of programs along each axis.
        fixed: the last arguments of the kernel.
        device_index: the current device of every launch.
        through_triton: the same launch through Triton, for a profiler that listens to launches.
    """
    prepare = _PREPARE.get(".".join(triton.__version__.split(".")[:2]))
    run = compiled.run
    if prepare is None or run.global_scratch_size or run.profile_scratch_size:
        return None  # Triton allocates the scratch memory of a kernel before each launch
    return prepare(run, compiled, grid, fixed, device_index, through_triton)


def _is_profiled() -> bool:
    """Whether a profiler listens to launches."""
    try:
        return bool(_runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls)
    except AttributeError:  # a hook that is no chain of hooks
        return True


_NO_SCRATCH = None, None
_NO_PROFILER = None, None, None
"""Stand-ins for the description of a launch, and for the hooks before and after the launch."""


def _prepare_3_6(run, compiled, grid, fixed, device_index, through_triton) -> Start:
    launch, attributes = run.launch, (run.launch_cooperative_grid, run.launch_pdl)
    middle = compiled.function, *attributes, *_NO_SCRATCH, compiled.packed_metadata, *_NO_PROFILER

    def start(arguments, addresses) -> None:
        if _is_profiled():
            return through_triton(arguments, addresses)
        numbers = arguments[len(addresses) :]
        launch(*grid, _current_stream(device_index), *middle, *addresses, *numbers, *fixed)

    return start


def _prepare_3_7(run, compiled, grid, fixed, device_index, through_triton) -> Start:
    launch, attributes = run.launch, (run.launch_cooperative_grid, run.launch_pdl)
    middle = (
        compiled.function, *attributes, compiled.packed_metadata, *_NO_PROFILER, *_NO_SCRATCH,
        run.arg_annotations, run.kernel_signature,
    )  # fmt: skip

    def start(arguments, addresses) -> None:
        if _is_profiled():
            return through_triton(arguments, addresses)
        numbers = arguments[len(addresses) :]
        launch(*grid, _current_stream(device_index), *middle, (*addresses, *numbers, *fixed))

    return start


_PREPARE = {"3.6": _prepare_3_6, "3.7": _prepare_3_7}
