"""The kernels that one call launches on the GPU, and the memory that it takes."""

from collections.abc import Callable

import torch

from ropelab.bench import garbage, gpu_memory


def kernel_names(call: Callable[[], object]) -> list[str]:
    """The names of the kernels, copies and fills that one call runs on the GPU, in order."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(on_gpu, key=lambda event: event.time_range.start)]


def peak_bytes(call: Callable[[], object]) -> int:
    """The peak of the bytes that the call allocates, its results included, beyond the bytes allocated before."""
    call()
    torch.cuda.synchronize()
    with garbage.uncollected():
        before = torch.cuda.memory_allocated()
        gpu_memory.forget_peak()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
