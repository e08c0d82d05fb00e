"""This file reads how much memory of a shared GPU torch took, and which errors say that there was too little."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CONTEXT_BYTES = 2**30
"""Of a process on a GPU besides what torch reserves: CUDA's context, the code of kernels, workspaces of libraries."""
OUT_OF_MEMORY = "out of memory"
"""Said by torch, CUDA and Triton alike."""

_highest = 0
_others_run = False


def watch() -> None:
    """Give back what is not in use, and begin to look for the peak.

    What is alive now the collector leaves alone from now on: with torch's compiler loaded it would otherwise go through
    a million objects again and again while graphs are captured.
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
    """Let torch look for a new peak; ``peak_reserved`` remembers the one before."""
    global _highest
    _highest = peak_reserved()
    torch.cuda.reset_peak_memory_stats()


def peak_reserved() -> int:
    """Most bytes that torch has reserved in this process since ``watch``."""
    return max(_highest, torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0)


@contextmanager
def shared() -> Iterator[None]:
    """Within, others run on the GPU: that there is too little memory may be because of them, and says nothing."""
    global _others_run
    before, _others_run = _others_run, True
    try:
        yield
    finally:
        _others_run = before


def is_shared() -> bool:
    return _others_run


def ran_out(error: BaseException) -> bool:
    """Whether the error says that there was too little memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or OUT_OF_MEMORY in str(error).lower()


def total_gib() -> float:
    """Of the current GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
