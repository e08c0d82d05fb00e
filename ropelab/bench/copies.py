"""Make copies. The fastest copy is the limit of a rotation that moves the same bytes.

A rotation reads q and k once and writes them once. A copy moves the same bytes and computes nothing. The size decides
which copy is fastest, so there are several copies. All copies are timed in the same rounds as the contenders.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch
import triton
import triton.language as tl

from ropelab.bench.names import PREFIX
from ropelab.bench.rows import are_copies

_TRITON_COPIES = ((1024, 4), (2048, 4), (4096, 4), (2048, 8), (4096, 8), (8192, 8))


@triton.jit
def _copy_kernel(x_ptr, y_ptr, x_out_ptr, y_out_ptr, x_numel, y_numel, BLOCK: tl.constexpr):
    """Copy x and y, both contiguous, in one launch: the first programs copy x, the other programs copy y."""
    program = tl.program_id(0).to(tl.int64)
    x_programs = tl.cdiv(x_numel, BLOCK)
    if program < x_programs:
        offsets = program * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < x_numel
        tl.store(x_out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)
    else:
        offsets = (program - x_programs) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < y_numel
        tl.store(y_out_ptr + offsets, tl.load(y_ptr + offsets, mask=mask), mask=mask)


def copies() -> dict[str, Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """The name of each copy -> a function that copies one or two contiguous tensors into new tensors."""
    found: dict[str, Callable] = {"copy_": _copy_each, "_foreach_copy_": _copy_together}
    for block, warps in _TRITON_COPIES:
        found[f"Triton, {block} elements, {warps} warps"] = partial(_copy_in_one_launch, block=block, warps=warps)
    return {PREFIX + name: copy for name, copy in found.items()}


def contenders(sets: Sequence[Sequence[torch.Tensor]]) -> dict[str, Callable[[], list[Callable]]]:
    """Every copy as a contender of `timing.gpu_times`. Each element of ``sets`` holds the tensors of one call."""
    tensors = [[x.detach().contiguous() for x in one] for one in sets]
    return {name: partial(_calls, copy, tensors) for name, copy in copies().items()}


def with_fraction(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with ``fraction_of_copy``: the median of the fastest copy over the median of each contender."""
    is_copy = are_copies(frame)
    return frame.assign(fraction_of_copy=frame[is_copy].median_us.min() / frame.median_us)


def _calls(copy: Callable, sets: Sequence[Sequence[torch.Tensor]]) -> list[Callable]:
    return [partial(copy, tensors) for tensors in sets]


def _copy_each(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(x).copy_(x) for x in tensors]


def _copy_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    outputs = [torch.empty_like(x) for x in tensors]
    torch._foreach_copy_(outputs, list(tensors))
    return outputs


def _copy_in_one_launch(tensors: Sequence[torch.Tensor], *, block: int, warps: int) -> list[torch.Tensor]:
    outputs = [torch.empty_like(x) for x in tensors]
    sizes = [x.numel() for x in tensors] if len(tensors) == 2 else [tensors[0].numel(), 0]
    programs = sum(triton.cdiv(size, block) for size in sizes)
    _copy_kernel[(programs,)](tensors[0], tensors[-1], outputs[0], outputs[-1], *sizes, BLOCK=block, num_warps=warps)
    return outputs
