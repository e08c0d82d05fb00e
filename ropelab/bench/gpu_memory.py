"""Read how much memory of a shared GPU torch took, and recognise errors for lack of memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CONTEXT_BYTES = 2**30
"""The GPU memory of a process besides torch's: the CUDA context, the code of kernels, workspaces of libraries."""
OUT_OF_MEMORY = "out of memory"
"""These words are in the messages of torch, CUDA and Triton."""

_highest = 0
_others_run = False


def watch() -> None:
    """Return unused GPU memory, and reset the peak.

    The garbage collector leaves all present objects alone from now on. The compiler of torch has about a million
    objects, and the collector would visit them again and again during the capture of graphs.
    """
    global _highest
    _highest = 0
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def forget_peak() -> None:
    """Reset torch's peak. `peak_reserved` still counts the old peak."""
    global _highest
    _highest = peak_reserved()
    torch.cuda.reset_peak_memory_stats()


def peak_reserved() -> int:
    """The largest number of bytes that torch has reserved in this process since `watch`."""
    return max(_highest, torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0)


@contextmanager
def shared() -> Iterator[None]:
    """Within the context other jobs share the GPU, so an error for lack of memory says nothing about a contender."""
    global _others_run
    before, _others_run = _others_run, True
    try:
        yield
    finally:
        _others_run = before


def is_shared() -> bool:
    return _others_run


def ran_out(error: BaseException) -> bool:
    """Whether the error says that memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or OUT_OF_MEMORY in str(error).lower()


def total_gib() -> float:
    """The memory of the current GPU, in GiB."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
