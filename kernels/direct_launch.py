"""Calls of the C function at the end of Triton's launch path, with addresses in place of tensors.

In Triton 3.6 to 3.9, a compiled kernel spends half of the host's time on Python frames, on an object for profilers,
and on a question to the driver about each tensor. The C function takes addresses and needs none of them. Its arguments
are no public interface of Triton: in other versions `direct_start` returns None and warns once, and the caller launches
through Triton.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton

VERSION = ".".join(triton.__version__.split(".")[:2])

Start = Callable[[tuple, tuple[int, ...], tuple[int, ...]], None]
"""``start(tensors, addresses, numbers)`` launches a compiled kernel whose first arguments are tensors and numbers."""

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
    prepare, run = _PREPARE.get(VERSION), compiled.run
    if prepare is None:
        _warn_once()
        return None
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None  # Triton allocates the scratch memory of a kernel, or the sanitizer's, before each launch
    return prepare(run, compiled, grid, fixed, device_index, through_triton)


@cache
def _warn_once() -> None:
    warnings.warn(
        f"Triton {VERSION}: ropelab knows the launch paths of {', '.join(_PREPARE)} only, so each call takes the host "
        "some microseconds longer",
        stacklevel=2,
    )


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

    def start(tensors, addresses, numbers) -> None:
        if _is_profiled():
            return through_triton(tensors, addresses, numbers)
        launch(*grid, _current_stream(device_index), *middle, addresses, *numbers, *fixed)

    return start


def _prepare_3_7(run, compiled, grid, fixed, device_index, through_triton) -> Start:
    launch, attributes = run.launch, (run.launch_cooperative_grid, run.launch_pdl)
    middle = (
        compiled.function, *attributes, compiled.packed_metadata, *_NO_PROFILER, *_NO_SCRATCH,
        run.arg_annotations, run.kernel_signature,
    )  # fmt: skip

    def start(tensors, addresses, numbers) -> None:
        if _is_profiled():
            return through_triton(tensors, addresses, numbers)
        launch(*grid, _current_stream(device_index), *middle, (addresses, *numbers, *fixed))

    return start


_PREPARE = {"3.6": _prepare_3_6, "3.7": _prepare_3_7, "3.8": _prepare_3_7, "3.9": _prepare_3_7}
"""The versions of Triton whose C function is known."""
